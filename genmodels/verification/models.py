"""What can be proved of a model: a table of families and their laws."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from genmodels.core.data import Batch
from genmodels.core.errors import InputError
from genmodels.diffusion import DDPMSampler, DPMSolverPP2MSampler
from genmodels.models.base import GenerativeModel
from genmodels.models.density import is_diffusion, is_energy, is_flow
from genmodels.verification.check import FAILED, NOT_PROVEN, PASSED, Findings, Options, Report, Verdict, counting
from genmodels.verification.checkpoints import Trial, prove_checkpoint
from genmodels.verification.densities import check_energy, check_schedule
from genmodels.verification.diffusion import check_denoiser, check_sampler
from genmodels.verification.flows import prove_flow

_LONG = 3600.0  # nothing is left out: who asks for proofs waits for them
#: A bound of few strata, and log Z of few chains: proofs are about whether, not about how much.
_DRAWN = {"draws": 20, "replicates": 2}
_PARTITION = {"chains": 16, "densities": 20}
_POINTS = 128  # samples of the plane, to see where the density lies


def prove_diffusion(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The laws of its noise schedule, denoiser and usual samplers, then what holds of the model as a whole."""
    _begin(model, initial)
    denoiser, cond = model.told(batch)
    drawn = {"draws": min(_DRAWN["draws"], model.num_steps - 1), "replicates": _DRAWN["replicates"]}
    shape = tuple(batch.x.shape[1:]) if model.spec.text is None else (model.spec.event_shape[0], cond.shape[2])
    return _told(options, [
        ("schedule", lambda: check_schedule(denoiser.schedule)),
        ("denoiser", lambda: check_denoiser(denoiser, shape, cond=cond, seed=options.seed)),
        ("DPM-Solver++", lambda: check_sampler(DPMSolverPP2MSampler())),
        ("DDPM", lambda: check_sampler(DDPMSampler())),
        ("model", lambda: _of_model(model, batch, options, drawn)),
    ])  # fmt: skip


def prove_energy(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The laws of its energy, then what holds of the model as a whole."""
    _begin(model, initial)
    core, shape = model.weights("raw"), tuple(batch.x.shape[1:])
    return _told(options, [
        ("energy", lambda: check_energy(core, shape, seed=options.seed)),
        ("model", lambda: _of_model(model, batch, options, {"normaliser": "auto", **_PARTITION})),
    ])  # fmt: skip


def prove_field(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """What holds of a field of scores, which has no density: its samples."""
    _begin(model, initial)
    return _told(options, [("model", lambda: _of_model(model, batch, options, {}))])


def _begin(model: GenerativeModel, initial: Batch | None) -> None:
    if initial is not None:
        model.initialize(initial)
    model.eval()


def _told(options: Options, parts: list[tuple[str, Callable[[], Report]]]) -> Findings:
    found = Findings()
    with counting(len(parts), options.progress, "part") as watch:
        for name, check in parts:
            watch(name)
            found.wholes.append(check())
    return found


def _of_model(model: GenerativeModel, batch: Batch, options: Options, own: dict) -> Report:
    """The checks that evaluate.py runs on a checkpoint, as laws; raw weights, which hold what was asked for."""
    given = {"weights": "raw", "seed": options.seed, **own}
    points = batch.x if batch.x[0].numel() != 2 else model.sample(_POINTS, weights="raw").x
    trial = Trial(model, batch, "raw", options.seed, given, None, time.monotonic() + _LONG, points)
    verdicts = []
    for row in prove_checkpoint(trial):
        status = {True: PASSED, False: FAILED, None: NOT_PROVEN}[row["passed"]]
        error = row["value"] if row["value"] is not None or status == NOT_PROVEN else math.inf
        threshold = 0.0 if row["threshold"] is None else row["threshold"]
        verdicts.append(Verdict(row["name"], status, error, threshold, row["where"]))
    return Report(f"{type(model).__name__} {tuple(batch.x.shape[1:])}, the whole model", tuple(verdicts))


@dataclass(frozen=True)
class Family:
    """A kind of model that something can be proved of.

    Arguments:
        name: what it is called in messages.
        fits: whether a model is of this kind.
        prove: `prove(model, fresh, batch, initial, options)`, see `prove`.
    """

    name: str
    fits: Callable[[GenerativeModel], bool]
    prove: Callable[..., Findings]


def prove(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """Every law there is for a model.

    Arguments:
        model: the model; it may be changed.
        fresh: builds another one with the same options.
        batch: a few items with unlike conditions.
        initial: the batch on which training would initialise it; None for a trained model.
        options: how to go about it.

    Raises:
        InputError: for a family without laws.
    """
    for family in FAMILIES:
        if family.fits(model):
            return family.prove(model, fresh, batch, initial, options)
    raise InputError(f"there is nothing to verify for the family {model.family}: "
                     f"there are laws for {', '.join(family.name for family in FAMILIES)}")


#: Families in the order they are tried; a new one adds a line.
FAMILIES = [
    Family("normalizing flows (core.flow)", is_flow, prove_flow),
    Family("diffusion models (core.schedule)", is_diffusion, prove_diffusion),
    Family("energies (core.energy)", is_energy, prove_energy),
    Family("fields of scores (sigmas)", lambda model: hasattr(model, "sigmas"), prove_field),
]
