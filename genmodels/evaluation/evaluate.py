"""Evaluation of a checkpoint, the same for every family, and baselines of the likelihood."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Sequence

import torch
from PIL import Image
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, Interrupted, an, one_of, progress_bar
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import Ranks
from genmodels.core.random import KeyedGenerator
from genmodels.data.base import DataModule
from genmodels.data.clips import cell_statistics
from genmodels.data.utterances import characters
from genmodels.evaluation import cost
from genmodels.evaluation.checkpoint import EvaluationState, Opened, Request
from genmodels.evaluation.features import Cache
from genmodels.evaluation.likelihood import LikelihoodStage, bounds_of, lines_of
from genmodels.evaluation.out_of_distribution import OtherDataStage, audit, picture_of_audit, require_texts
from genmodels.evaluation.report import Drift, Layer, Reference, Report, SamplingCost
from genmodels.evaluation.sample_quality import FidelityStage
from genmodels.evaluation.samples import draw, takes_temperature
from genmodels.evaluation.speech import spoken_at
from genmodels.models.checkpoint import weights_of
from genmodels.models.density import is_flow
from genmodels.models.mels import NOISE, even_lengths, with_noise
from genmodels.speech.decoding import NGram
from genmodels.verification.check import Check
from genmodels.verification.checkpoints import ModelSubject, verify_checkpoint


class PixelHistogram:
    """An independent histogram for each scalar, with additive smoothing.

        P(x) = prod_d (count_d[x_d] + a) / (N + a L)

    Arguments:
        train: (N, *event) integer training data.
        levels: number of levels L.
        smoothing: the pseudo-count a > 0.

    Example:
        >>> model = PixelHistogram(torch.tensor([[0], [0], [1]]), levels=2, smoothing=1.0)
        >>> [round(float(p.exp()), 6) for p in model.log_prob(torch.tensor([[0], [1]]))]
        [0.6, 0.4]
    """

    def __init__(self, train: Tensor, levels: int, smoothing: float = 1.0):
        flat = train.flatten(1).long()
        offsets = torch.arange(flat.shape[1]) * levels
        counts = torch.bincount((flat + offsets).flatten(), minlength=flat.shape[1] * levels).double()
        table = counts.view(flat.shape[1], levels) + smoothing
        self._log = (table / table.sum(1, keepdim=True)).log()

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-mass of each example in nats, (B,) float64."""
        flat = x.flatten(1).long()
        return self._log[torch.arange(flat.shape[1]), flat].sum(1)


def best_histogram(train: Tensor, val: Tensor, levels: int) -> PixelHistogram:
    """The histogram model with the best smoothing on the validation split."""
    candidates = [PixelHistogram(train, levels, a) for a in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)]
    return max(candidates, key=lambda model: float(model.log_prob(val).sum()))


def references(datamodule: DataModule, split: str, spec: DataSpec, limit: int | None = None) -> list[Reference]:
    """Baselines of the likelihood of the first `limit` items, with their standard errors over the items.

    For images the uniform model and the best per-pixel histogram; for text the uniform model and the frequencies of
    bytes and of pairs of bytes; for mels a Gaussian for each band; for transcripts n-grams of characters of order 1 and
    6; for other data the exact entropy, if it is known.

    Arguments:
        datamodule: the data.
        split: train, val or test.
        spec: the DataSpec of what the model assigns probabilities to, such as the transcripts for a recogniser.
        limit: number of items, None for all.
    """
    if spec.encoding == "characters":
        return [_reference(f"{order}-gram of the training texts", spec.unit, of_characters(
            datamodule, split, spec.levels - 1, order, limit)) for order in (1, 6)]
    if spec.mel is not None:
        found = gaussian_per_band(datamodule, split, limit)
        return [_reference("a Gaussian for each band", "nats_per_dim", found)]
    if spec.levels is None:
        return [] if spec.entropy is None else [Reference("exact entropy", "nats", spec.entropy)]
    rows = [Reference("uniform", spec.unit, math.log2(spec.levels))]
    if spec.encoding is not None:
        rows += of_bytes(datamodule, split, spec, limit)
    elif spec.dims * spec.levels <= 2_000_000:
        train, val, evaluated = (datamodule.items(name).x for name in ("train", "val", split))
        nats = best_histogram(train, val, spec.levels).log_prob(evaluated[:limit])
        found = Likelihood(nats, "exact", spec.dims, spec.levels)
        rows.append(_reference("best per-pixel histogram", "bits_per_dim", found))
    return rows


def _reference(name: str, unit: str, found: Likelihood) -> Reference:
    error = found.standard_error(unit)
    value = found.mean_nll_per_dim() if unit == "nats_per_dim" else found.mean_bits_per_dim()
    return Reference(name, unit, value, None if error is None else error.total)


def of_bytes(datamodule: DataModule, split: str, spec: DataSpec, limit: int | None = None) -> list[Reference]:
    """Bits per character of the frequencies of bytes in the training split, and of bytes given the previous one.

        p(b | a) = (n(a, b) + 16 p(b)) / (n(a) + 16),    p(b) = (n(b) + 1) / (n + 256)
    """
    train, evaluated = (datamodule.items(name).x.flatten(1).long() for name in ("train", split))
    evaluated = evaluated[:limit]
    single = torch.bincount(train.flatten(), minlength=256).double() + 1
    single = single / single.sum()
    pairs = torch.bincount((train[:, :-1] * 256 + train[:, 1:]).flatten(), minlength=256**2).view(256, 256).double()
    pairs = (pairs + 16 * single) / (pairs.sum(1, keepdim=True) + 16)
    first = single[evaluated].log()
    second = torch.cat([first[:, :1], pairs[evaluated[:, :-1], evaluated[:, 1:]].log()], dim=1)
    return [_reference(name, spec.unit, Likelihood(each.sum(1), "exact", spec.dims, spec.levels))
            for name, each in (("frequencies of bytes", first), ("frequencies of pairs of bytes", second))]


def of_characters(datamodule: DataModule, split: str, classes: int, order: int, limit: int | None = None) -> Likelihood:
    """The likelihood of the transcripts of a split under n-grams of the training transcripts, which see no mels."""
    train, found = (
        [tuple(row[:count]) for batch in datamodule.loader(name, 256, rows) for row, count in
         zip(*(part.tolist() for part in characters(batch)), strict=True)]
        for name, rows in (("train", None), (split, torch.arange(limit or len(datamodule.split(split)))))
    )
    model = NGram(train, classes, order=order)
    nats = torch.tensor([model.log_prob(text) for text in found], dtype=torch.float64)
    return Likelihood(nats, "exact", torch.tensor([len(text) for text in found]), classes)


def gaussian_per_band(datamodule: DataModule, split: str, limit: int | None = None) -> Likelihood:
    """The likelihood of the first `limit` noisy mels of a split under a Gaussian for each band.

        sum log N(x + w (u - 1/2); m_c, s_c),    m_c and s_c of band c in the training split

    The cells are the same as for the models: a frame of silence that makes a length even is included.

    Example:
        >>> from genmodels.data.speech import Speech
        >>> 1.5 < gaussian_per_band(Speech().prepare(), "test").mean_nll_per_dim() < 2.2
        True
    """
    training = _noisy(datamodule, "train", None)
    cells = cell_statistics((x.transpose(0, 1)[:, mask[:, 0]] for x, mask in training), "band")
    mean, std = (torch.tensor(cells[key], dtype=torch.float64)[:, None] for key in ("mean", "std"))
    normal = torch.distributions.Normal(mean, std)
    nats, dims = [], []
    for x, mask in _noisy(datamodule, split, limit):
        nats.append(normal.log_prob(x).mul(mask).flatten(1).sum(1))
        dims.append(mask.flatten(1).sum(1) * x.shape[1])
    return Likelihood(torch.cat(nats), "exact", torch.cat(dims))


def _noisy(datamodule: DataModule, split: str, limit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Mels (B, n_mels, T) of every batch, float64, and their masks (B, 1, T)."""
    size = len(datamodule.split(split))
    rows = torch.arange(size if limit is None else min(size, limit))
    for batch in datamodule.loader(split, 32, rows):
        batch = even_lengths(batch)
        x = with_noise(batch.x, NOISE, KeyedGenerator(0, batch.index, "likelihood"))
        yield x.double(), batch.mask


_CHECK_SECONDS = 60.0  # for all checks, unless checks=full


class Evaluation:
    """The stages of one checkpoint's evaluation, each computed once for the same checkpoint and settings.

    Arguments:
        opened, cache, shared, ranks: see `EvaluationState`.

    Attributes:
        opened: the model and its data.
        report: the results of the stages done so far.
        arrays: values for figures by name.
        pictures: by name, written as files next to the report.
    """

    def __init__(self, opened: Opened, cache: Cache, shared: dict | None = None, ranks: Ranks | None = None):
        self.state = EvaluationState(opened, cache, {} if shared is None else shared, ranks or Ranks())
        self.opened, self.report, self.arrays = opened, self.state.report, self.state.arrays
        self.pictures: dict[str, Image.Image] = {}
        self.likelihood = LikelihoodStage(self.state)
        self.fidelity = FidelityStage(self.state)
        self.other_data = OtherDataStage(self.state, self.likelihood)

    def run(self) -> Report:
        """The report of all requested stages, in order.

        Raises:
            Interrupted: `report` has the finished stages, and is marked `partial`.
        """
        stages = {"likelihood": self.likelihood.run, "audit": self.audit, "ood": self.other_data.run,
                  "fidelity": self.fidelity.run, "cost": self.cost, "checks": self.checks,
                  "sweeps": self.sweeps}
        if self.state.request.wants("fidelity") or self.state.request.wants("sweeps"):
            self.fidelity.check()
        if self.state.request.wants("audit"):
            require_texts(self.opened)
        if self.state.request.wants("ood"):
            self.other_data.check()
        self.report.references = self._references()
        try:
            for name, stage in stages.items():
                if self.state.request.wants(name):
                    start = time.monotonic()
                    stage()
                    self.report.seconds[name] = round(time.monotonic() - start, 3)
        except (KeyboardInterrupt, Interrupted):
            self.report.partial = True
            kept = "the stages that were finished are in the report" if self.report.seconds else "no stage was finished"
            raise Interrupted(f"interrupted: {kept}") from None
        return self.report

    def _references(self) -> list[Reference]:
        opened, shared, split = self.opened, self.state.shared, self.state.request.split
        key = ("references", id(opened.datamodule), opened.model.modelled.encoding, split, opened.items)
        if key not in shared:
            limit = opened.items if opened.limited else None
            shared[key] = references(opened.datamodule, split, opened.model.modelled, limit)
        return shared[key]

    def audit(self) -> None:
        """Utterances ordered by likelihood, with a picture of alignments."""
        _, likelihood = self.likelihood.of_first_line()
        self.report.audit = audit(self.state, likelihood)
        picture = picture_of_audit(self.opened, self.report.audit)
        if picture is not None:
            self.pictures["audit"] = picture

    def sweeps(self) -> None:
        """Samples, or the synthesis of texts, at several numbers of steps or temperatures."""
        if self.opened.spec.text is None:
            return self.fidelity.sweeps()
        for key in self.state.request.sweeps:
            found = spoken_at(self.state, key)
            if found is None:
                self.report.warnings.append(f"no sweep over {key}: {an(self.opened.model.family)} has no such option")
            self.report.spoken_at = [*(self.report.spoken_at or []), *(found or [])]

    def cost(self) -> None:
        """Network evaluations, samples per second, latency and memory on this device."""
        if not self.opened.model.generates:
            return
        opened, small = self.opened, self.opened.limited
        size = min(self.state.request.batch_size, 16 if small else 64)
        found = self.state.once("cost", self.state.sampling_settings() | {"batch_size": size}, lambda: cost.measure(
            opened.model,
            lambda n, start: draw(opened.model, opened.sampling(n, start=start), batch_size=size, progress=False),
            batch_size=size, budget=5.0 if small else 60.0, weights=weights_of(self.state.request.ema),
        ))
        self.report.sampling = SamplingCost(**found, seed=self.state.request.seed)

    def checks(self) -> None:
        """The checks of this checkpoint, and the layers of a flow."""
        model, request, line = self.opened.model, self.state.request, self.likelihood.lines[0]
        seconds = 3600.0 if request.checks == "full" else 10.0 if self.opened.limited else _CHECK_SECONDS

        def compute() -> dict:
            batch = self.opened.evaluated(8 if line.method == "ode_likelihood" else 64).to(model.device)
            subject = ModelSubject(
                model, batch, weights_of(request.ema), request.seed, line.options, self.likelihood.first,
                time.monotonic() + seconds, self.opened.evaluated(2000).x, line.method,
            )
            with progress_bar(desc=f"checks of {model.family}", unit="check") as bar:

                def watch(name: str) -> None:
                    bar.set_postfix_str(name, refresh=False)
                    bar.update()

                checks = [check.to_dict() for check in verify_checkpoint(subject, watch)]
            return {"checks": checks, "layers": subject.flow.layers if is_flow(model) else []}

        # Some checks need the likelihood of the items, which is there if its stage was done.
        settings = {"line": line.settings, "seconds": seconds, "likelihood": self.likelihood.first is not None}
        done = self.state.once("checks", settings, compute)
        self.report.checks = [Check(**check) for check in done["checks"]]
        if done["layers"]:
            from genmodels.verification.maps import drift_of  # here, since other families need no flows

            self.report.profile.flow = [Layer(**layer) for layer in done["layers"]]
            self.report.drift = Drift(**drift_of(done["layers"]))
        self.report.failed += [f"check failed: {check.name} ({check.note})" for check in self.report.checks
                               if check.failed]


def check_options(models: Sequence[Opened]) -> None:
    """Raise an InputError for an option that none of the models takes; the others of a table ignore it."""
    request, taken = models[0].request, _taken(models)
    for name, needed, families in _given(request):
        if needed not in taken:
            held = ", ".join(f"{opened.path} holds {an(opened.model.family)}" for opened in models)
            raise InputError(f"{name} {'are' if ' and ' in name else 'is'} for {families}: {held}")
    for opened in models:
        if request.sampler is not None and opened.model.takes("sampler") and opened.model.samplers:
            one_of("sampler" if len(models) == 1 else f"sampler of {opened.path}", request.sampler,
                   opened.model.samplers)  # before the likelihoods, which may take long
        if request.temperature not in (None, 1) and not takes_temperature(opened.model, request.sampler):
            if opened.spec.source is not None:
                raise InputError(f"temperature is for noise, and {opened.path} starts from "
                                 f"{opened.spec.source['name']}: leave it out")
            raise InputError(f"temperature={request.temperature:g} is a factor on the noise of flows and diffusion, "
                             f"and {opened.path} holds a model of another kind ({opened.model.family}): samples of one "
                             "table are drawn alike, leave it out")


def _taken(models: Sequence[Opened]) -> set[str]:
    """The arguments of likelihoods and samplers that one of the models takes, and what one has: samples, an ODE, ..."""
    request = models[0].request
    arguments = [inspect.signature(opened.model.log_likelihood).parameters for opened in models]
    taken = {name for names in arguments for name in names}
    taken -= {"importance_samples", "chains"}  # without effect on real numbers, and on a sum over a grid
    lines = {line.options.get("importance_samples") for opened in models for line in lines_of(opened)[0]}
    if lines.issuperset(request.importance_samples or ()):  # the ODE takes them if its divergence is exact
        taken.add("importance_samples")
    if request.normaliser == "ais" or any("normaliser" in names and opened.spec.dims > 2
                                          for names, opened in zip(arguments, models, strict=True)):
        taken.add("chains")
    if len(models) > 1:
        taken.add("several")
    for opened in models:
        model = opened.model
        taken |= {name for name in ("sampler", "steps") if model.takes(name)} | set(bounds_of(model))
        taken |= {"guidance"} if getattr(model, "has_null_class", False) else set()
        taken |= {"ode"} if model.has_ode_likelihood else set()
        taken |= {"samples"} if model.generates else {"beam", "nbest", "lm", "length"}
        if model.generates and opened.spec.text is not None:
            taken |= {"recognizer"} | ({"beam"} if request.recognizer is not None else set())
    return taken


def _given(request: Request) -> list[tuple[str, str, str]]:
    """The options that a request sets: name, the entry of `_taken` that each needs, and the models that have it."""
    options = [
        ("recognizer", "recognizer", "text-to-speech models", request.recognizer is not None),
        ("nbest", "nbest", "recognisers", request.nbest > 1),
        ("lm", "lm", "recognisers", request.lm is not None),
        ("length", "length", "recognisers", bool(request.length)),
        ("beam", "beam", "recognisers, and with recognizer= for text-to-speech models", request.beam > 1),
        ("stages=[cost]", "samples", "models with samples", request.stages == ["cost"]),
        ("temperature", "samples", "models with samples", request.temperature is not None),
        ("samples", "samples", "models with samples", request.samples != "auto"),
        ("features", "samples", "models with samples", request.features != "auto"),
        ("force", "samples", "models with samples", request.force),
        ("draws", "draws", "diffusion bounds", request.draws not in ("auto", "all")),
        ("replicates", "draws", "diffusion bounds", request.replicates != 2),
        ("bound", "bound", "diffusion bounds", request.bound != "auto"),
        (" and ".join(request.partition), "normaliser", "energies", bool(request.partition)),
        ("chains and densities", "chains", "energies of three or more dimensions, others take the sum over a grid",
         bool({"chains", "densities"} & set(request.partition))),
        ("importance_samples", "importance_samples", "flows and energies of integers, and energies of tables with gaps",
         request.importance_samples is not None),
        (f"bound={request.bound}", request.bound, "models that have this bound", request.bound not in ("auto", "both")),
        ("rank=across", "several", "a table of several models", request.rank == "across"),
        ("sampler", "sampler", "models with several samplers", request.sampler is not None),
        ("steps", "steps", "models that are sampled in steps", request.steps is not None),
        ("guidance", "guidance", "models of classes with model.cond_drop above 0", request.guidance is not None),
        ("ode", "ode", "diffusion models that start from noise", request.ode is True or bool(request.ode_options)),
    ]
    return [(name, needed, families) for name, needed, families, is_set in options if is_set]
