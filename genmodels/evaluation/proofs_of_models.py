"""What can be proved of diffusion models, energies and fields of scores: the laws of their parts and of the whole."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from genmodels.data.spec import Batch
from genmodels.diffusion import DDPMSampler, DPMSolverPP2MSampler
from genmodels.evaluation.checkpoint_proofs import Trial, prove_checkpoint
from genmodels.evaluation.findings import Findings, Options, counting
from genmodels.evaluation.laws import FAILED, NOT_PROVEN, PASSED, Report, Verdict
from genmodels.evaluation.laws_of_denoisers import check_denoiser
from genmodels.evaluation.laws_of_energies import check_energy
from genmodels.evaluation.laws_of_samplers import check_sampler
from genmodels.evaluation.laws_of_schedules import check_schedule
from genmodels.models.base import GenerativeModel

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

