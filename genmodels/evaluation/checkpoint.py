"""A checkpoint and its data, open: what every stage of an evaluation works on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from genmodels import __version__
from genmodels.core.checkpoint import checkpoint_hash
from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, RunError
from genmodels.core.likelihood import Likelihood
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.data.base import DataModule, spread_rows
from genmodels.data.utterances import joined
from genmodels.evaluation.cache import Cache, blocks, code_hash, in_processes, key_of, strided
from genmodels.evaluation.report import CheckpointFacts, DataFacts, Report
from genmodels.evaluation.request import Request
from genmodels.evaluation.samples import draw
from genmodels.models.base import GenerativeModel
from genmodels.models.checkpoint import weights_of
from genmodels.training.run import training_time


@dataclass
class Opened:
    """A model, the header of its checkpoint, and its data, prepared.

    Arguments:
        path: the checkpoint.
        model, header: what it holds.
        datamodule: the data.
        request: what is asked.
        items: number of items evaluated.
    """

    path: Path
    model: GenerativeModel
    header: dict
    datamodule: DataModule
    request: Request
    items: int

    @classmethod
    def open(cls, path: Path, request: Request, held: dict | None = None) -> Opened:
        """Load a checkpoint and prepare its data; `held` keeps prepared data sets for the next checkpoint.

        Raises:
            InputError, RunError: one line, as the commands want it.
        """
        from genmodels.models.build import build
        from genmodels.models.checkpoint import data_options, load_model

        model, header = load_model(path, device=request.device, trust=request.trust)
        node = data_options(header, path)
        held = {} if held is None else held
        key = repr(sorted({**node, **request.data}.items()))
        if key not in held:
            held[key] = build({**node, **request.data}, trust=request.trust).prepare()
        datamodule = held[key]
        fits(model, datamodule.spec)
        limit = request.limit
        if limit is None:
            limit = (header["config"].get("trainer") or {}).get("limit_evaluation")
        size = len(datamodule.split(request.split))
        items = size if limit in (None, "all") else min(limit, size)
        return cls(path, model, header, datamodule, request, items)

    @property
    def spec(self) -> DataSpec:
        """The data the model was built for."""
        return self.model.spec

    @property
    def limited(self) -> bool:
        """Whether fewer items are evaluated than the split has."""
        return self.items < len(self.datamodule.split(self.request.split))

    def whole(self, split: str, most: int | None = None) -> Batch:
        """The items of a split as one batch: all of them, or `most` that are spread over it."""
        size = len(self.datamodule.split(split))
        rows = spread_rows(size, size if most is None else min(size, most))
        return _joined(self.datamodule.loader(split, 4096, rows))

    def evaluated(self, most: int | None = None) -> Batch:
        """The items that are evaluated, as one batch; the first `most` of them."""
        count = self.items if most is None else min(most, self.items)
        return _joined(self.datamodule.loader(self.request.split, 4096, torch.arange(count)))

    def likelihood(
        self, method: str, options: dict, label: str = "", other: DataModule | None = None, count: int | None = None
    ) -> Likelihood:
        """The likelihood of every item that is evaluated (or of the first ones of another data set), in index order.

        Arguments:
            method: name of the model's method, with these options.
            label: for the progress bar.
            other: another data set, of which `count` items are evaluated.

        Raises:
            RunError: when an item was lost or evaluated twice, or holds what is no value of these data.
        """
        request, count = self.request, self.items if count is None else count
        bar = f"{self.model.family}{f', {label}' if label else ''} on {request.split}"
        if request.processes == 1 or other is not None:
            datamodule = self.datamodule if other is None else other
            found = [_likelihood(self.model, datamodule, request, torch.arange(count), method, options, bar)]
        else:
            arguments = [(self.path, request, share, method, options, bar if rank == 0 else None)
                         for rank, share in enumerate(strided(count, request.processes)) if len(share)]
            found = in_processes(likelihood_share, arguments)
        return Likelihood.concatenate(found).in_index_order()

    def sampler_options(self) -> dict:
        """The sampler and its steps as asked for, where the model has such options: some in a table have none."""
        asked = {"sampler": self.request.sampler, "steps": self.request.steps}
        return {key: value for key, value in asked.items() if value is not None and self.model.takes(key)}

    def draw(self, n: int, *, progress: bool = True, **options) -> Samples:
        """The first n samples of the seed that was asked for, or as the options say.

        Raises:
            InputError: for an option that this family does not have, or a value that it refuses.
        """
        request = self.request
        asked = SamplingOptions(**{
            "n": n, "seed": request.seed, "weights": weights_of(request.ema), "temperature": request.temperature,
            **self.sampler_options(), **options,
        })
        if request.processes == 1 or n < 2 * request.processes:
            return draw(self.model, asked, batch_size=min(request.batch_size, 64), progress=progress)
        arguments = [(self.path, request, replace(asked, start=asked.start + first, n=count), first == 0)
                     for first, count in blocks(n, request.processes)]
        parts = in_processes(samples_share, arguments)
        together = {name: joined([getattr(p, name) for p in parts])
                    for name in ("x", "cond", "index", "mask", "durations")}
        return Samples(made=parts[0].made, **together)


def likelihood_share(
    path: Path, request: Request, indices: Tensor, method: str, options: dict, bar: str | None
) -> Likelihood:
    """What one of several processes does: it opens the checkpoint and evaluates its indices."""
    opened = Opened.open(path, request)
    return _likelihood(opened.model, opened.datamodule, request, indices, method, options, bar)


def samples_share(path: Path, request: Request, options: SamplingOptions, progress: bool) -> Samples:
    """What one of several processes does: it opens the checkpoint and draws its samples."""
    model = Opened.open(path, request).model
    return draw(model, options, batch_size=min(request.batch_size, 64), progress=progress)


def _likelihood(
    model, datamodule: DataModule, request: Request, indices: Tensor, method: str, options: dict, bar: str | None
) -> Likelihood:
    parts = []
    loader = datamodule.loader(request.split, request.batch_size, indices)
    for batch in tqdm(loader, desc=bar, unit="batch", disable=bar is None, mininterval=0.5):
        try:
            model.spec.check(batch)
        except ValueError as error:
            raise RunError(str(error)) from error
        try:
            parts.append(getattr(model, method)(batch.to(model.device), **options).cpu())
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error):
                size = request.batch_size
                raise RunError(f"out of memory at batch_size={size}: try batch_size={max(1, size // 4)}") from error
            raise
    return Likelihood.concatenate(parts)


def fits(model: GenerativeModel, found: DataSpec) -> None:
    """Raise an InputError with both values when data do not fit what a model was built for."""
    wanted = model.spec
    for key in ("event_shape", "levels", "mel"):
        if key == "event_shape" and wanted.holds(found.event_shape):
            continue
        then, now = getattr(wanted, key), getattr(found, key)
        if then != now:
            raise InputError(f"these data do not fit the checkpoint: {key} is {now}, the model was built for {then}")
    if model.num_classes is not None and found.num_classes != model.num_classes:
        now = "no labels" if found.num_classes is None else f"{found.num_classes} classes"
        raise InputError(f"these data do not fit the checkpoint: they have {now}, the model is conditioned on "
                         f"{model.num_classes} classes: give labelled data of these classes")


def _joined(batches) -> Batch:
    batches = list(batches)
    return Batch(*(joined([getattr(b, name) for b in batches]) for name in ("x", "cond", "mask", "index")))


class Frame:
    """A checkpoint under evaluation, and what has been found of it so far.

    Arguments:
        opened: the model and its data.
        cache: where results are kept.
        shared: what the models of a table have in common (item hashes, the feature network); filled here.

    Attributes:
        report: as it stands after the stages done so far.
        arrays: numbers for pictures by name.
    """

    def __init__(self, opened: Opened, cache: Cache, shared: dict):
        self.opened, self.cache, self.shared = opened, cache, shared
        self.sha256 = checkpoint_hash(opened.path)
        self.arrays: dict[str, Tensor] = {}
        self.report = self._head()

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.opened.request

    def _head(self) -> Report:
        opened, header, request = self.opened, self.opened.header, self.opened.request
        spec = opened.spec
        return Report(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            genmodels={"version": __version__, "torch": torch.__version__, "python": platform.python_version(),
                       "device": str(opened.model.device), "threads": torch.get_num_threads()},
            name=header["family"],
            checkpoint=CheckpointFacts(
                path=str(opened.path), sha256=self.sha256, step=header["step"], epoch=header.get("epoch"),
                family=header["family"], parameters=header["parameters"], weights=str(weights_of(request.ema)),
                training_seconds=training_time(opened.path.parent) or None,
            ),
            config=header["config"],
            data=DataFacts(
                name=spec.name, split=request.split, items=opened.items, limited=opened.limited,
                item_hash=self.hash_of(request.split, opened.items), event_shape=list(spec.event_shape),
                levels=spec.levels, units="levels" if spec.levels else "the data's own", mel=spec.mel,
                num_classes=spec.num_classes, class_names=list(spec.class_names),
            ),
        )

    def hash_of(self, split: str, count: int | None = None) -> str:
        """The hash of the first `count` items of a split, all of them by default."""
        key = ("hash", id(self.opened.datamodule), split, count)
        if key not in self.shared:
            self.shared[key] = item_hash(self.opened.datamodule, split, count)
        return self.shared[key]

    def once(self, stage: str, settings: dict, compute: Callable[[], dict]) -> dict:
        """The result of a stage from the cache, or computed and kept."""
        model = self.opened.model
        key = key_of(
            stage=stage, checkpoint=self.sha256, settings=settings, data=self.report.data.item_hash,
            items=self.opened.items, split=self.request.split, weights=str(weights_of(self.request.ema)),
            seed=self.request.seed, batch_size=self.request.batch_size, processes=self.request.processes,
            device=str(model.device), threads=torch.get_num_threads(), torch=torch.__version__, code=code_hash(),
            data_options=self.request.data,
        )
        found = self.cache.get(key)
        return self.cache.put(key, compute()) if found is None else found

    def sampling_settings(self) -> dict:
        """How samples are drawn, for the keys of the cache."""
        request = self.request
        return {"sampler": request.sampler, "steps": request.steps, "temperature": request.temperature}


def item_hash(datamodule: DataModule, split: str, limit: int | None = None) -> str:
    """A hash of the items evaluated: their indices, values and labels."""
    indices = None if limit is None else torch.arange(min(limit, len(datamodule.split(split))))
    digest = hashlib.sha256()
    for batch in datamodule.loader(split, 1024, indices):
        said = batch.cond
        parts = (said.tokens, said.speaker) if isinstance(said, TextCondition) else (said,)
        for tensor in (batch.index, batch.x, *parts):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
