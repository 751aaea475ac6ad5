"""The request of an evaluation, and the opened checkpoint and data that its stages work on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from genmodels import __version__
from genmodels.core.checkpoint import checkpoint_hash
from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, RunError, check_number, check_temperature
from genmodels.core.processes import Ranks
from genmodels.core.random import seed_of
from genmodels.core.samples import SamplingOptions
from genmodels.data.base import DataModule
from genmodels.evaluation.features import Cache, code_hash, device_of, key_of
from genmodels.evaluation.materials import require_same_items
from genmodels.evaluation.report import CheckpointFacts, DataFacts, Report
from genmodels.models.base import GenerativeModel
from genmodels.models.checkpoint import weights_of
from genmodels.models.transcription import SearchOptions
from genmodels.training.run import training_time

_LIKELIHOOD, _SAMPLES = ("likelihood", "audit", "ood", "checks"), ("fidelity", "cost", "sweeps")
#: The stages in which options have an effect.
_STAGES = {
    **dict.fromkeys(("draws", "replicates", "bound", "importance_samples", "ode", "ode_options", "normaliser", "chains",
                     "densities"), _LIKELIHOOD),
    **dict.fromkeys(("sampler", "steps", "temperature", "guidance"), _SAMPLES),
    **dict.fromkeys(("samples", "features", "force", "recognizer"), ("fidelity", "sweeps")),
    **dict.fromkeys((option.name for option in fields(SearchOptions)), ("fidelity", "sweeps", "audit")),
    "checks": ("checks",),
}


@dataclass(frozen=True, kw_only=True)
class Request(SearchOptions):
    """The settings of an evaluation, the same for every model of a table.

    Arguments:
        split: train, val or test.
        out: the report's file (one checkpoint) or folder (several); default report.json next to each checkpoint, and
            the table of several in the folder they share.
        stages: any of likelihood, fidelity, cost, checks; default all.
        draws: terms of a diffusion bound: all of them, or a number of strata with one term each; auto is all if that
            takes at most 100,000 network evaluations, else 5 to 100 strata.
        replicates: repetitions of the stratified estimate, at least 2, for its standard error.
        bound: of a diffusion model: with its T steps (discrete), with infinitely many (continuous), or both; auto is
            discrete, and for texts continuous, which few terms estimate better.
        importance_samples: dequantisations per item, K, for flows and energy-based models (default 1 and 8; K = 1 is
            always included) and for an ODE of exact divergence (default 1); a list gives one line for each K.
        ode: also compute the likelihood by the probability-flow ODE, on a separate line; auto does so for vectors of
            few dimensions, where it is fast.
        ode_options: its solver, tolerance, probes, ...
        normaliser: method for log Z of an energy-based model; default quadrature in one and two dimensions, else
            annealed importance sampling (ais); none skips it.
        chains: chains of annealed importance sampling; default 256, 64 with limit.
        densities: densities between its base and the model; default 1,000, 50 with limit.
        samples: number of samples to compare with equally many items; auto is the number of items, at most 1,000.
        sampler: as in sample.py; default that of the family.
        steps: number of sampling steps; default that of the sampler.
        temperature: factor on the standard deviation of the noise of samples of flows, diffusion and speech; by default
            that of each model.
        guidance: factor of classifier-free guidance for samples; likelihoods are those of the model without it.
        features: the network whose features are compared; auto is a small classifier trained on the training split,
            random convolutions for images without labels, the coordinates themselves for vectors.
        force: allow a comparison of fewer items than twice the number of features.
        sweeps: compare samples at several numbers of steps, at several temperatures, or both.
        ood: other data whose likelihood to compute: a data set (fashion_mnist, ...), noise or shuffled.
        ood_data: options of that data set, such as ood_data.root.
        audit: rank the utterances of a split, the least likely first, to find wrong transcripts and damaged clips.
        recognizer: a trained recogniser (model=recognizer) for synthesised texts, instead of PocketSphinx.
        nbest: of a recogniser, also the WER of the best of so many texts of the search (oracle WER); at most `beam`.
        checks: default (about a minute, ten seconds of a part of a split) or full (an hour).
        rank: rank lines within each kind of likelihood, or across kinds, with a note on how each kind may err.
        batch_size: items per batch.
        processes: processes that share the items and the samples.
        limit: evaluate only the first items of the split (the report says so), or all; default
            trainer.limit_evaluation of the run.
        seed: seed of the noise.
        ema: averaged weights (true), raw ones (false), or the average with one decay.
        data: options of the data set that differ from training, such as data.root.
        cache: store results, and reuse those computed for the same checkpoint, settings and code.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes a checkpoint may name.

    Raises:
        InputError: for values out of range.
    """

    split: Literal["train", "val", "test"] = "test"
    out: str | None = None
    stages: list[Literal["likelihood", "fidelity", "cost", "checks"]] | None = None
    draws: int | Literal["auto", "all"] = "auto"
    replicates: int = 2
    bound: Literal["auto", "discrete", "continuous", "both"] = "auto"
    importance_samples: int | list[int] | None = None
    ode: bool | Literal["auto"] = "auto"
    ode_options: dict | None = None
    normaliser: Literal["auto", "quadrature", "ais", "none"] | None = None
    chains: int | None = None
    densities: int | None = None
    samples: int | Literal["auto"] = "auto"
    sampler: str | None = None
    steps: int | None = None
    temperature: float | None = None
    guidance: float | None = None
    features: Literal["auto", "classifier", "random-conv", "coordinates", "inception"] = "auto"
    force: bool = False
    sweeps: list[Literal["steps", "temperature"]] | None = None
    ood: str | list[str] | None = None
    ood_data: dict | None = None
    audit: bool = False
    recognizer: str | None = None
    nbest: int = 1
    checks: Literal["default", "full"] = "default"
    rank: Literal["kind", "across"] = "kind"
    batch_size: int = 256
    processes: int = 1
    limit: int | Literal["all"] | None = None
    seed: int = 0
    ema: bool | float = True
    data: dict | None = None
    cache: bool = True
    device: str = "auto"
    trust: list[str] | None = None

    def __post_init__(self):
        for key in ("importance_samples", "ood"):
            if isinstance(getattr(self, key), int | str):
                object.__setattr__(self, key, [getattr(self, key)])
        for key, empty in (("ode_options", {}), ("sweeps", []), ("ood", []), ("ood_data", {}), ("data", {}),
                           ("trust", [])):
            if getattr(self, key) is None:
                object.__setattr__(self, key, empty)
        counts = ("batch_size", "processes", "limit", "replicates", "draws", "samples", "steps", "chains", "densities",
                  "beam", "nbest", "seed")
        values = [(key, getattr(self, key)) for key in counts]
        for key, value in values + [("importance_samples", k) for k in self.importance_samples or ()]:
            least = {"replicates": 2, "samples": 2, "chains": 2, "seed": 0}.get(key, 1)  # a mean's error needs two
            if isinstance(value, int) and value < least:
                raise InputError(f"{key} must be at least {least}, got {value}")
        for key, example in (("importance_samples", "[1,64]"), ("stages", "[likelihood]")):
            if getattr(self, key) == []:
                raise InputError(f"{key}=[] is empty: give for example {key}={example}, or leave it out")
        for key in ("chains", "densities"):
            if getattr(self, key) is not None and self.normaliser in ("quadrature", "none"):
                raise InputError(f"{key} is for normaliser=ais, got normaliser={self.normaliser}: leave one of the two "
                                 "out")
        if self.temperature is not None:
            check_temperature(self.temperature)
        if self.guidance is not None:
            check_number("guidance", self.guidance, -1e6)
        super().__post_init__()
        usual = {field.name: field.default for field in fields(self)}
        for key, stages in _STAGES.items():
            if getattr(self, key) not in (usual[key], {}) and not any(self.wants(stage) for stage in stages):
                raise InputError(f"{key} has no effect with stages=[{','.join(self.stages)}]: leave it out, or add "
                                 f"{stages[0]}")
        if self.ood_data and not self.ood:
            raise InputError("ood_data holds options of another data set: say which by ood=<name>")
        if self.ood_data and set(self.ood) <= {"noise", "shuffled"}:
            raise InputError(f"ood_data holds options of a data set, and ood={','.join(self.ood)} is none: leave it "
                             "out")

    @property
    def partition(self) -> dict:
        """The options of log Z that were given."""
        given = {"normaliser": self.normaliser, "chains": self.chains, "densities": self.densities}
        return {key: value for key, value in given.items() if value is not None}

    def wants(self, stage: str) -> bool:
        """Whether a stage is done.

        Example:
            >>> Request().wants("checks"), Request().wants("ood"), Request(stages=["cost"]).wants("checks")
            (True, False, False)
        """
        asked = {"audit": self.audit, "ood": bool(self.ood), "sweeps": bool(self.sweeps)}.get(stage, True)
        return asked and (self.stages is None or stage in self.stages or stage in ("audit", "ood", "sweeps"))


@dataclass
class Opened:
    """A model, the header of its checkpoint, and its data, prepared.

    Arguments:
        path: the checkpoint.
        model, header: its content.
        datamodule: the data.
        request: the settings.
        items: number of items evaluated.
        sha256: hash of the checkpoint's content.
    """

    path: Path
    model: GenerativeModel
    header: dict
    datamodule: DataModule
    request: Request
    items: int
    sha256: str = ""

    @classmethod
    def open(cls, path: Path, request: Request, prepared: dict | None = None) -> Opened:
        """Load a checkpoint and prepare its data, unless they are in `prepared`, which keeps them for the next one."""
        from genmodels.models.build import build
        from genmodels.models.checkpoint import data_options, load_model

        sha256 = checkpoint_hash(path)
        model, header = load_model(path, device=request.device, trust=request.trust)
        if checkpoint_hash(path) != sha256:
            raise RunError(f"{path} was replaced while it was read: evaluate again")
        trained = data_options(header, path)
        node, prepared = trained | request.data, {} if prepared is None else prepared
        key = repr(sorted(node.items()))
        if key not in prepared:
            prepared[key] = build(node, trust=request.trust).prepare()
        datamodule = prepared[key]
        fits(model, datamodule.spec)
        changed = {key: value for key, value in request.data.items() if key not in trained or value != trained[key]}
        _require_same_division(datamodule, trained, changed)
        require_same_items(model, datamodule, changed)
        spec = datamodule.spec  # request.data may have replaced the data of training
        model.spec = replace(model.spec, name=spec.name, entropy=spec.entropy, encoding=spec.encoding)
        limit = request.limit
        if limit is None:
            limit = (header["config"].get("trainer") or {}).get("limit_evaluation")
        size = len(datamodule.split(request.split))
        items = size if limit in (None, "all") else min(limit, size)
        return cls(path, model, header, datamodule, request, items, sha256)

    @property
    def spec(self) -> DataSpec:
        """The DataSpec that the model was built for."""
        return self.model.spec

    @property
    def limited(self) -> bool:
        """Whether fewer items are evaluated than the split has."""
        return self.items < len(self.datamodule.split(self.request.split))

    def evaluated(self, most: int | None = None) -> Batch:
        """The evaluated items as one batch, or the first `most` of them."""
        count = self.items if most is None else min(most, self.items)
        return self.datamodule.items(self.request.split, torch.arange(count))

    def sampler_options(self) -> dict:
        """The requested sampler, steps and guidance; a model of a table without such options ignores them."""
        asked = {"sampler": self.request.sampler, "steps": self.request.steps}
        if getattr(self.model, "has_null_class", False):  # models need not be ours
            asked["guidance"] = self.request.guidance
        return {key: value for key, value in asked.items() if value is not None and self.model.takes(key)}

    def sampling(self, n: int, **options) -> SamplingOptions:
        """The options of the first n samples of the requested seed; `options` override the request."""
        request = self.request
        return SamplingOptions(**{
            "n": n, "seed": request.seed, "weights": weights_of(request.ema), "temperature": request.temperature,
            **self.sampler_options(), **options,
        }).with_default(temperature=getattr(self.model, "default_temperature", 1.0))


def fits(model: GenerativeModel, found: DataSpec) -> None:
    """Raise an InputError with both values if data do not fit the DataSpec that a model was built for."""
    kept = {"symbols", "blanks", "form"} & set(model.spec.text or {})
    texts = [None if spec.text is None else {key: spec.text.get(key) for key in kept} for spec in (model.spec, found)]
    if texts[0] is not None and texts[0] != texts[1]:
        raise InputError("these data do not fit the checkpoint: their texts are in other symbols, or there are none: "
                         "give data.symbols, data.blanks and the like as in training")
    for key in ("event_shape", "levels", "mel", *(["speakers"] if texts[0] is not None else [])):
        then, now = getattr(model.spec, key), getattr(found, key)
        if then != now and not (key == "event_shape" and model.spec.holds(now)):
            raise InputError(f"these data do not fit the checkpoint: {key} is {now}, the model was built for {then}")
    columns, names = model.spec.columns, found.columns
    if columns != names and sorted(columns) == sorted(names):
        raise InputError(f"these data do not fit the checkpoint: the columns are {', '.join(names)}, the model was "
                         f"built for {', '.join(columns)}: put them in that order")
    if model.num_classes is not None and found.num_classes != model.num_classes:
        now = "no labels" if found.num_classes is None else f"{found.num_classes} classes"
        raise InputError(f"these data do not fit the checkpoint: they have {now}, the model is conditioned on "
                         f"{model.num_classes} classes: give labelled data of these classes")


def _require_same_division(datamodule: DataModule, trained: dict, changed: dict) -> None:
    """Raise an InputError for an option that would hold out items that the model was trained on."""
    if datamodule.draws_items or "file" in changed:
        return
    for key in ("seed", "val_fraction", "test_fraction"):
        if key in changed and changed[key] != trained.get(key, changed[key]):
            raise InputError(f"data.{key}={changed[key]} divides {datamodule.spec.name} anew and would hold out items "
                             f"that the model was trained on (data.{key}={trained[key]}): leave it out")


class EvaluationState:
    """A checkpoint under evaluation, and its results so far.

    Arguments:
        opened: the model and its data.
        cache: of results.
        shared: results that the models of a table share (item hashes, the feature network); filled by the stages.
        ranks: the processes of this command.

    Attributes:
        report: the results of the stages done so far.
        arrays: values for figures by name.
    """

    def __init__(self, opened: Opened, cache: Cache, shared: dict, ranks: Ranks):
        self.opened, self.cache, self.shared, self.ranks = opened, cache, shared, ranks
        ranks.members.append(self)
        self.arrays: dict[str, Tensor] = {}
        self.report = self._head()
        self.report.warnings += in_order_of_classes(opened)

    @property
    def request(self) -> Request:
        """The settings."""
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
                path=str(opened.path), sha256=opened.sha256, step=header["step"], epoch=header.get("epoch"),
                family=header["family"], parameters=header["parameters"], weights=str(weights_of(request.ema)),
                training_seconds=training_time(opened.path.parent) or None,
            ),
            config=header["config"],
            data=DataFacts(
                name=spec.name, split=request.split, items=opened.items, limited=opened.limited,
                item_hash=self.hash_of(request.split, torch.arange(opened.items)), event_shape=list(spec.event_shape),
                levels=spec.levels, units="levels" if spec.levels else "the data's own", mel=spec.mel,
                num_classes=spec.num_classes, class_names=list(spec.class_names), encoding=spec.encoding,
            ),
        )

    def hash_of(self, split: str, rows: Tensor | None = None, datamodule: DataModule | None = None) -> str:
        """A hash of indices, values and labels of these items of a split (default all), or of another data set's."""
        datamodule = datamodule or self.opened.datamodule
        key = ("hash", id(datamodule), split, None if rows is None else rows.numpy().tobytes())
        if key not in self.shared:
            digest = hashlib.sha256()
            for batch in datamodule.loader(split, 1024, rows):
                cond = batch.cond
                parts = (cond.tokens, cond.speaker) if isinstance(cond, TextCondition) else (cond,)
                for tensor in (batch.index, batch.x, *parts):
                    if tensor is not None:
                        digest.update(tensor.contiguous().numpy().tobytes())
            self.shared[key] = digest.hexdigest()
        return self.shared[key]

    def key(self, stage: str, settings: dict) -> str:
        """The name of a result in the cache."""
        return key_of(
            stage=stage, checkpoint=self.opened.sha256, settings=settings, data=self.report.data.item_hash,
            items=self.opened.items, split=self.request.split, weights=str(weights_of(self.request.ema)),
            seed=self.request.seed, batch_size=self.request.batch_size, threads=torch.get_num_threads(),
            torch=torch.__version__, code=code_hash(), data_options=self.request.data,
            device=device_of(self.opened.model.device, stage),
        )

    def once(self, stage: str, settings: dict, compute: Callable[[], dict]) -> dict:
        """The result of a stage from the cache, or computed and stored."""
        key = self.key(stage, settings)
        found = self.cache.get(key)
        return self.cache.put(key, compute()) if found is None else found

    def once_by_all(
        self, stage: str, settings: dict, join: Callable[[list], dict], parts: Callable[..., dict], *arguments
    ) -> dict:
        """`once` for a stage that all processes compute.

        Arguments:
            join: combines all parts, in the order of their numbers.
            parts: `parts(state, key, *arguments)` returns the parts of one process by number; every process calls it.
        """
        key = self.key(stage, settings)

        def compute() -> dict:
            found = {}
            for some in self.ranks.run(parts, self, key, *arguments):
                found |= some
            return join([found[number] for number in sorted(found)])

        found = self.once(stage, settings, compute)
        self.cache.forget(key)
        return found

    def sampling_settings(self) -> dict:
        """The settings of sampling in the keys of the cache."""
        request = self.request
        return {"sampler": request.sampler, "steps": request.steps, "temperature": request.temperature,
                "guidance": request.guidance}


def in_order_of_classes(opened: Opened) -> list[str]:
    """A warning if the first items, which alone are evaluated, hold half the classes of as many of all or fewer."""
    if not opened.limited or opened.spec.num_classes is None:
        return []
    split, number, found = opened.request.split, min(opened.items, 500), []
    for size in (opened.items, len(opened.datamodule.split(split))):
        labels = opened.datamodule.items(split, torch.linspace(0, size - 1, number, dtype=torch.float64).long()).cond
        found.append(len(labels.unique()) if isinstance(labels, Tensor) else 0)
    half = 2 * found[0] == found[1] and number >= 2 * found[1]  # with fewer items it may be by chance
    if 2 * found[0] >= found[1] and not half:
        return []
    return [f"only the first {opened.items:,} items are evaluated: {number} of them have {found[0]} "
            f"class{'es' * (found[0] > 1)}, {number} from the whole split {found[1]}; their values are not those of "
            "the split, limit=all evaluates it"]


def chosen(count: int, n: int, what: str) -> Tensor:
    """n of `count` rows in order, the same in every evaluation; all of them if n >= count."""
    if n >= count:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed_of("fidelity", what, count))
    return torch.randperm(count, generator=generator)[:n].sort().values


def classes_in_turn(labels: Tensor) -> Tensor:
    """The labels (N,) in another order: every class in turn, as long as it lasts.

    Example:
        >>> classes_in_turn(torch.tensor([1, 1, 1, 0, 2, 0]))
        tensor([0, 1, 2, 0, 1, 1])
    """
    order = labels.argsort(stable=True)
    counts = labels.bincount()
    before = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]  # others of its class
    return labels[order][before.argsort(stable=True)]
