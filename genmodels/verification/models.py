"""Verification of a whole model: which checks each family of models has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from genmodels.core.data import Batch
from genmodels.core.errors import InputError
from genmodels.diffusion import DDPMSampler, DPMSolverPP2MSampler
from genmodels.models.base import GenerativeModel
from genmodels.models.density import is_diffusion, is_energy, is_flow, is_masked_diffusion
from genmodels.models.few_steps import StepModel
from genmodels.verification.check import Findings, Options, Report, counting
from genmodels.verification.checkpoints import ModelSubject, verify_checkpoint
from genmodels.verification.densities import check_energy, check_schedule
from genmodels.verification.diffusion import check_denoiser, check_sampler
from genmodels.verification.flows import verify_flow

_LONG = 3600.0  # no check is left out for want of time
#: A bound of few strata, and log Z of few chains: it is checked whether they are right, not how precise they are.
_DRAWN = {"draws": 20, "replicates": 2}
_PARTITION = {"chains": 16, "densities": 20}
_POINTS = 128  # samples of the plane, to see where the density lies


def verify_diffusion(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The checks of its noise schedule, denoiser and usual samplers, then those of the model as a whole."""
    _begin(model, initial)
    denoiser, cond = model.denoiser_and_cond(batch)
    drawn = {"draws": min(_DRAWN["draws"], model.num_steps - 1), "replicates": _DRAWN["replicates"]}
    shape = tuple(batch.x.shape[1:]) if model.spec.text is None else (model.spec.event_shape[0], cond.shape[2])
    return _one_by_one(options, [
        ("schedule", lambda: check_schedule(denoiser.schedule)),
        ("denoiser", lambda: check_denoiser(denoiser, shape, cond=cond, seed=options.seed)),
        ("DPM-Solver++", lambda: check_sampler(DPMSolverPP2MSampler())),
        ("DDPM", lambda: check_sampler(DDPMSampler())),
        ("model", lambda: _of_model(model, batch, options, drawn)),
    ])  # fmt: skip


def verify_energy_model(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The checks of its energy, then those of the model as a whole."""
    _begin(model, initial)
    core, shape = model.weights("raw"), tuple(batch.x.shape[1:])
    return _one_by_one(options, [
        ("energy", lambda: check_energy(core, shape, seed=options.seed)),
        ("model", lambda: _of_model(model, batch, options, {"normaliser": "auto", **_PARTITION})),
    ])  # fmt: skip


def verify_score_model(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The checks of a score-based model, or another without a density: those of its samples."""
    _begin(model, initial)
    return _one_by_one(options, [("model", lambda: _of_model(model, batch, options, {}))])


def verify_masked_diffusion(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The checks of a masked diffusion: those of its bound and of its samples."""
    _begin(model, initial)
    drawn = {"draws": min(_DRAWN["draws"], model.num_steps - 1), "replicates": _DRAWN["replicates"]}
    return _one_by_one(options, [("model", lambda: _of_model(model, batch, options, drawn))])


def _begin(model: GenerativeModel, initial: Batch | None) -> None:
    if initial is not None:
        model.initialize(initial)
    model.eval()


def _one_by_one(options: Options, parts: list[tuple[str, Callable[[], Report]]]) -> Findings:
    found = Findings()
    with counting(len(parts), options.progress, "part") as watch:
        for name, check in parts:
            watch(name)
            found.wholes.append(check())
    return found


def _of_model(model: GenerativeModel, batch: Batch, options: Options, own: dict) -> Report:
    """The checks that evaluate.py runs on a checkpoint, on the raw weights."""
    given = {"weights": "raw", "seed": options.seed, **own}
    points = batch.x if batch.x[0].numel() != 2 else model.sample(_POINTS, weights="raw").x
    subject = ModelSubject(model, batch, "raw", options.seed, given, None, time.monotonic() + _LONG, points)
    return Report(f"{type(model).__name__} {tuple(batch.x.shape[1:])}, the whole model",
                  tuple(verify_checkpoint(subject)))


@dataclass(frozen=True)
class Family:
    """A kind of model that can be verified.

    Arguments:
        name: what it is called in messages.
        fits: whether a model is of this kind.
        verify: `verify(model, fresh, batch, initial, options)`, see `verify`.
    """

    name: str
    fits: Callable[[GenerativeModel], bool]
    verify: Callable[..., Findings]


def verify(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """Every check there is for a model.

    Arguments:
        model: the model; it may be changed.
        fresh: builds another one with the same options.
        batch: a few items with unlike conditions.
        initial: the batch on which training would initialise it; None for a trained model.
        options: how it is checked.

    Raises:
        InputError: for a family without checks.
    """
    for family in FAMILIES:
        if family.fits(model):
            return family.verify(model, fresh, batch, initial, options)
    raise InputError(f"there is nothing to verify for the family {model.family}: "
                     f"there are checks for {', '.join(family.name for family in FAMILIES)}")


#: Families in the order they are tried; a new one adds a line.
FAMILIES = [
    Family("normalizing flows (core.flow)", is_flow, verify_flow),
    Family("diffusion models (core.schedule)", is_diffusion, verify_diffusion),
    Family("masked diffusion (masking)", is_masked_diffusion, verify_masked_diffusion),
    Family("energy-based models (core.energy)", is_energy, verify_energy_model),
    Family("score-based models (sigmas)", lambda model: hasattr(model, "sigmas"), verify_score_model),
    Family("consistency models and students", lambda model: isinstance(model, StepModel), verify_score_model),
    Family("flows from other data (spec.source)", lambda model: model.spec.source is not None, verify_score_model),
]
