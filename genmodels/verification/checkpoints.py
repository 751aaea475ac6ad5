"""Checks of trained checkpoints, and the checks of each family of models."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genmodels.core.data import Batch
from genmodels.core.errors import InputError
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import DDPMSampler, DPMSolverPP2MSampler
from genmodels.models.base import GenerativeModel
from genmodels.models.density import (
    is_diffusion,
    is_energy,
    is_flow,
    is_masked_diffusion,
    is_of_noisy_data,
    mass_of,
    needs_class,
)
from genmodels.models.few_steps import StepModel
from genmodels.verification.check import (
    NO_TIME,
    NOT_APPLICABLE,
    NOT_VERIFIED,
    Check,
    CheckSet,
    CheckSpec,
    Findings,
    Measured,
    NotApplicable,
    NotVerified,
    Options,
    Report,
    counting,
    run_check,
)

if TYPE_CHECKING:
    from genmodels.verification.maps import TrainedFlow

_SETTLED = 1e-3  # error of an integral above which it is inconclusive


@dataclass(frozen=True)
class ModelSubject:
    """A trained model and the data of its checks.

    Arguments:
        model: the model.
        batch: up to 64 items on its device.
        weights: which of its weights.
        seed: seed of all noise.
        options: options of its likelihood, those of the table.
        line: its likelihood in the first line of the table, or None.
        until: `time.monotonic()` after which no part of a long check is begun.
        points: further items, which determine the box of the integral of a density.
        method: the model's method for its likelihood, `ode_likelihood` where there is no other.
    """

    model: GenerativeModel
    batch: Batch
    weights: str | float
    seed: int
    options: dict
    line: Likelihood | None
    until: float
    points: Tensor
    method: str = "log_likelihood"

    def evaluate(self, batch: Batch | None = None) -> Likelihood:
        """The likelihood of some items, all by default, under the same options."""
        return getattr(self.model, self.method)(batch or self.batch, **self.options).cpu()

    @cached_property
    def likelihood(self) -> Likelihood:
        """The likelihood of all items."""
        return self.evaluate()

    @cached_property
    def flow(self) -> TrainedFlow:
        """The layers of a flow."""
        from genmodels.verification.maps import TrainedFlow  # other families need no flows

        return TrainedFlow(self.model, self.batch, self.weights, self.until)

    @property
    def patience(self) -> float:
        """The remaining seconds."""
        return self.until - time.monotonic()


def verify_checkpoint(subject: ModelSubject, watch: Callable[[str], None] = lambda name: None) -> list[Check]:
    """The result of every check that applies to the model; `watch` is called before each with its name."""
    specs: list[tuple[CheckSpec, object]] = [
        (spec, subject) for name, spec in CHECKS.specs.items() if _APPLIES[name](subject)]
    if is_flow(subject.model):
        from genmodels.verification.maps import LAYER_CHECKS

        specs += [(spec, subject.flow) for spec in LAYER_CHECKS.specs.values()]
    found = []
    for spec, part in specs:
        watch(spec.name)
        late = Check(spec.name, NOT_VERIFIED, None, spec.tolerance, NO_TIME)
        found.append(late if subject.patience <= 0 else run_check(spec, part))
    return [check for check in found if check.status != NOT_APPLICABLE]


#: Every check of checkpoints but those of the layers of a flow, and the models that each applies to.
CHECKS = CheckSet()
_APPLIES: dict[str, Callable[[ModelSubject], bool]] = {}


def _check(name: str, tolerance: float, statement: str, applies: Callable[[ModelSubject], bool]) -> Callable:
    """Decorator: add a check of the models that it applies to."""
    _APPLIES[name] = applies
    return CHECKS.add(name, tolerance, statement)


def _has_likelihood(s: ModelSubject) -> bool:
    model = s.model
    ours = is_flow(model) or _has_bound(model) or is_energy(model) or model.spec.text is not None
    return not is_of_noisy_data(model) and (ours or (s.line is not None and s.line.kind != "unnormalised"))


def _has_flow_or_bound(s: ModelSubject) -> bool:
    return _has_likelihood(s) and (is_flow(s.model) or _has_bound(s.model))


def _has_decoder(s: ModelSubject) -> bool:
    return is_diffusion(s.model) and s.model.spec.levels is not None


def _has_bound(model: GenerativeModel) -> bool:
    return is_diffusion(model) or is_masked_diffusion(model)


def _has_density(s: ModelSubject) -> bool:
    exact = s.line is not None and s.line.kind == "exact"  # a user class
    in_the_plane = s.model.spec.event_shape == (2,) and s.model.spec.levels is None and not needs_class(s.model)
    return in_the_plane and (is_flow(s.model) or is_energy(s.model) or exact)


@_check("same seed, same value", 0.0, "two evaluations with one seed are equal", _has_likelihood)
def determinism(s: ModelSubject) -> Measured:
    """The log-likelihoods of all items, twice."""
    return Measured(_largest(s.likelihood.nats - s.evaluate().nats), "two runs")


@_check("batch size 1 against 64", 1e-5, "an item alone has its likelihood in a batch",
        _has_likelihood)
def one_by_one(s: ModelSubject) -> Measured:
    """Eight items, nats per dimension."""
    few = s.batch.rows(slice(0, 8))
    alone = torch.cat([s.evaluate(few.rows(slice(k, k + 1))).nats for k in range(len(few))])
    error = _largest((alone - s.likelihood.nats[: len(few)]) / s.model.spec.dims)
    return Measured(error, f"{len(few)} items, nats per dimension")


@_check("sample 3 alone and in a batch", 1e-3, "sample k of a seed is the same alone and in a batch",
        lambda s: s.model.generates)
def addressable(s: ModelSubject) -> Measured:
    """Within one level, or within 1e-3 of the largest value."""
    options = {"seed": s.seed, "weights": s.weights}
    batch = s.model.sample(4, **options)
    labels = isinstance(batch.cond, Tensor)
    alone = s.model.sample(1, start=3, **options, **({"cond": batch.cond[3:4]} if labels else {}))
    whole = batch.x[3][..., : alone.x.shape[-1]]  # in a batch it is padded
    difference = float((whole.double() - alone.x[0].double()).abs().max())
    if s.model.spec.levels is not None:
        return Measured(difference, "levels", 1.0)
    return Measured(difference, "units of the data", 1e-3 * max(1.0, float(batch.x.double().abs().max())))


@_check("float32 against float64", 1e-3, "the mean likelihood in float32 is that in float64",
        _has_flow_or_bound)
def precision(s: ModelSubject) -> Measured:
    """With the same draws, bits per dimension."""
    few = s.batch.rows(slice(0, 16)) if hasattr(s.model, "num_steps") else s.batch
    precise = few if s.model.spec.levels is not None else replace(few, x=few.x.double())
    exact = copy.deepcopy(s.model).double().log_likelihood(precise, **s.options).cpu()
    ours = s.likelihood if few is s.batch else s.evaluate(few)
    error = abs(float((ours.nats - exact.nats).mean())) / (s.model.spec.dims * math.log(2))
    return Measured(error, f"mean of {len(few)} items, bits per dimension")


@_check("density integrates to one", 1e-3, "the integral of the density over the plane is one",
        _has_density)
def integrates_to_one(s: ModelSubject) -> Measured:
    """Not verified where the integral does not settle, or few items say where the density lies."""
    if len(s.points) < 10 and not is_flow(s.model):
        raise NotVerified(f"{len(s.points)} evaluated items are too few to say where the density lies")
    mass, error, points = mass_of(s.model, s.points, seed=s.seed, weights=s.weights, options=s.options)
    note = f"{mass:.5f} +- {error:.5f} over the plane, {points} points"
    if error > _SETTLED and abs(mass - 1) <= error + 1e-3:
        raise NotVerified(note, abs(mass - 1))
    return Measured(abs(mass - 1), note)


@_check("prior + terms + reconstruction = bound", 1e-6, "the named parts add up to the negative ELBO",
        lambda s: _has_bound(s.model))
def parts_add_up(s: ModelSubject) -> Measured:
    """Nats per dimension."""
    total = sum(part.double() for part in s.likelihood.parts.values())
    return Measured(_largest((total + s.likelihood.nats) / s.model.spec.dims), "nats per dimension")


@_check("all terms = stratified estimate", 4.0, "strata estimate what the sum of all terms gives",
        lambda s: _has_bound(s.model))
def strata(s: ModelSubject) -> Measured:
    """In standard errors of the estimate."""
    terms = s.model.num_steps - 1
    few = s.batch.rows(slice(0, 4))
    if terms < 4:
        raise NotApplicable("strata of single terms")
    if s.model.spec.dims * terms * len(few) > 5e6 and s.patience < 300:
        raise NotVerified("all terms of 4 items would take long: checks=full")
    own = {key: value for key, value in s.options.items() if key not in ("draws", "replicates")}
    whole = s.model.log_likelihood(few, **own, draws=None).cpu()
    estimate = s.model.log_likelihood(few, **own, draws=min(50, terms // 4), replicates=8).cpu()
    error = float(estimate.stderr.square().sum().sqrt())
    # Both have the same noise but that of the reconstruction, which the estimate draws more often.
    whole, estimate = (one.nats + one.parts.get("reconstruction", 0) for one in (whole, estimate))
    z = abs(float((whole - estimate).sum())) / max(error, 1e-12)
    return Measured(z, f"{len(few)} items, standard errors")


@_check("masses of the decoder sum to one", 1e-5, "the decoder's masses of all levels sum to one",
        _has_decoder)
def decoder(s: ModelSubject) -> Measured:
    """For 25 means from -1.2 to 1.2."""
    model = s.model
    levels = torch.arange(model.spec.levels, device=model.device)
    schedule = model.core.schedule
    log_snr = schedule.log_snr(model.elbo.times(schedule)[:1].to(model.device)).double()
    means = torch.linspace(-1.2, 1.2, 25, dtype=torch.float64, device=model.device)
    masses = model.decoder.log_mass(levels[:, None], means, torch.exp(-0.5 * log_snr)).exp().sum(0)
    return Measured(_largest(masses - 1), f"{len(levels)} levels")


@_check("score = - gradient of the energy", 1e-4, "the score is minus the gradient of the energy",
        lambda s: is_energy(s.model))
def score(s: ModelSubject) -> Measured:
    """Along a random direction, by central differences in float64."""
    twin = copy.deepcopy(s.model).double()
    few = s.batch.rows(slice(0, 4))
    noise = KeyedGenerator(s.seed, torch.arange(len(few), device=few.x.device), "checks")
    z, _ = twin.encoding(few.x.double() if s.model.spec.levels is None else few.x, noise)
    z = z.double()
    direction = noise.child("direction").normal(tuple(z.shape), dtype=torch.float64, device=z.device)
    core = twin.weights(s.weights)
    slope = (core.score(z).detach() * direction).flatten(1).sum(1)
    step = 1e-5
    with torch.no_grad():
        risen = -(core.energy(z + step * direction) - core.energy(z - step * direction)) / (2 * step)
    return Measured(_largest((slope - risen) / (1 + slope.abs())), f"{len(few)} items, central differences")


@_check("forward log Z <= reverse", 3.0, "the forward estimate of log Z is not above the reverse one",
        lambda s: is_energy(s.model))
def bracket(s: ModelSubject) -> Measured:
    """In standard errors of the difference."""
    made = {} if s.line is None else s.line.made
    if made.get("log_z_upper") is None:
        raise NotApplicable("log Z has no reverse estimate")
    gap = made["log_z"] - made["log_z_upper"]
    error = math.hypot(made["log_z_stderr"], made.get("upper_stderr") or 0.0)
    note = f"log Z {made['log_z']:.3f}, reverse {made['log_z_upper']:.3f}; standard errors"
    return Measured(gap / max(error, 1e-12), note)


def _largest(values: Tensor) -> float:
    """The largest absolute value; NaN stays NaN."""
    return float(values.abs().max()) if len(values) else 0.0


_LONG = 3600.0  # seconds: no check is skipped
_POINTS = 128  # samples in the plane, which locate the density
Part = tuple[str, Callable[[], Report]]


def _parts_of_diffusion(model: GenerativeModel, batch: Batch, seed: int) -> list[Part]:
    """The checks of its noise schedule, denoiser, energy if any, and default samplers."""
    from genmodels.verification.densities import check_energy, check_schedule  # evaluation needs none of it
    from genmodels.verification.diffusion import check_denoiser, check_sampler

    denoiser, cond = model.denoiser_and_cond(batch)
    shape = tuple(batch.x.shape[1:]) if model.spec.text is None else (model.spec.event_shape[0], cond.shape[2])
    energy = [] if not hasattr(model, "level") else [
        ("energy", lambda: check_energy(model.level(0.0, "raw"), shape, seed=seed))]
    return [
        ("schedule", lambda: check_schedule(denoiser.schedule)),
        ("denoiser", lambda: check_denoiser(denoiser, shape, cond=cond, seed=seed)), *energy,
        ("DPM-Solver++", lambda: check_sampler(DPMSolverPP2MSampler())),
        ("DDPM", lambda: check_sampler(DDPMSampler())),
    ]  # fmt: skip


def _parts_of_energy(model: GenerativeModel, batch: Batch, seed: int) -> list[Part]:
    """The checks of its energy."""
    from genmodels.verification.densities import check_energy

    core, shape = model.weights("raw"), tuple(batch.x.shape[1:])
    return [("energy", lambda: check_energy(core, shape, seed=seed))]


def _of_model(model: GenerativeModel, batch: Batch, seed: int) -> Report:
    """The checks that evaluate.py runs on a checkpoint, on the raw weights."""
    given = {"weights": "raw", "seed": seed}
    # Few strata of a bound, and few chains for log Z: the checks need no precise values.
    if _has_bound(model):
        given |= {"draws": min(20, model.num_steps - 1), "replicates": 2}
    elif is_energy(model):
        given |= {"normaliser": "auto", "chains": 16, "densities": 20}
    points = batch.x if batch.x[0].numel() != 2 else model.sample(_POINTS, weights="raw").x
    subject = ModelSubject(model, batch, "raw", seed, given, None, time.monotonic() + _LONG, points)
    return Report(f"{type(model).__name__} {tuple(batch.x.shape[1:])}, the whole model",
                  tuple(verify_checkpoint(subject)))


def verify(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """Every check of a model: of its parts, then of the whole.

    Arguments:
        model: the model; it may be changed.
        fresh: builds another one with the same options.
        batch: a few items with different conditions.
        initial: the batch on which training would initialise it; None for a trained model.
        options: how it is checked.

    Raises:
        InputError: for a family without checks.
    """
    if is_flow(model):
        from genmodels.verification.flows import verify_flow  # other families need no flows

        return verify_flow(model, fresh, batch, initial, options)
    parts_of = next((parts for _, fits, parts in FAMILIES if fits(model)), None)
    if parts_of is None:
        raise InputError(f"there is nothing to verify for the family {model.family}: there are checks for "
                         f"normalizing flows (core.flow), {', '.join(name for name, _, _ in FAMILIES)}")
    if initial is not None:
        model.initialize(initial)
    model.eval()
    parts = [*parts_of(model, batch, options.seed),
             ("model", lambda: _of_model(model, batch, options.seed))]
    found = Findings()
    with counting(len(parts), options.progress, "part") as watch:
        for name, check in parts:
            watch(name)
            found.wholes.append(check())
    return found


def _no_parts(model: GenerativeModel, batch: Batch, seed: int) -> list[Part]:
    """None: its samples, and its ELBO if any, are checked with the whole model."""
    return []


#: Families besides flows in the order they are tried: a name for messages, whether a model is one,
#: and the checks of its parts.
FAMILIES: list[tuple[str, Callable[[GenerativeModel], bool], Callable[..., list[Part]]]] = [
    ("diffusion models (core.schedule)", is_diffusion, _parts_of_diffusion),
    ("masked diffusion (masking)", is_masked_diffusion, _no_parts),
    ("energy-based models (core.energy)", is_energy, _parts_of_energy),
    ("consistency models and students", lambda model: isinstance(model, StepModel), _no_parts),
    ("language models (reader)", lambda model: hasattr(model, "reader"), _no_parts),
    ("flows from other data (spec.source)", lambda model: model.spec.source is not None, _no_parts),
]
