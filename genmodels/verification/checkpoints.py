"""What is proved of a trained checkpoint by default: a row for each check, with its value and its threshold."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from genmodels.core.data import Batch
from genmodels.core.errors import InputError, RunError
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.models.base import GenerativeModel
from genmodels.models.density import is_diffusion, is_energy, is_flow, mass_of


@dataclass(frozen=True)
class Proof:
    """One check.

    Arguments:
        name: what was checked.
        value: what was measured, None where nothing was.
        threshold: what it is held against.
        passed: the verdict; None for a warning, or where nothing was measured.
        where: at which layer, item or term, or why nothing was measured.
    """

    name: str
    value: float | None
    threshold: float | None
    passed: bool | None
    where: str = ""

    @classmethod
    def below(cls, name: str, value: float, threshold: float, where: str = "") -> Proof:
        """Passed when the value is finite and at most the threshold.

        Example:
            >>> Proof.below("round trip", float("nan"), 1.0).passed
            False
        """
        return cls(name, value, threshold, bool(value <= threshold), where)

    def to_dict(self) -> dict:
        """Plain types; a value that is not finite becomes None and says so."""
        if self.value is not None and not math.isfinite(self.value):
            where = f"{self.where}, not finite" if self.where else "not finite"
            return {**asdict(self), "value": None, "where": where}
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """What the checks are given.

    Arguments:
        model: the model.
        batch: up to 64 items on its device.
        weights: which of its weights.
        seed: seed of all noise.
        options: options of its likelihood, those of the table.
        likelihood: the first line of the table, or None.
        until: `time.monotonic()` at which no further part of a long check begins.
        points: further items, for the box that a density is summed over.
    """

    model: GenerativeModel
    batch: Batch
    weights: str | float
    seed: int
    options: dict
    likelihood: Likelihood | None
    until: float
    points: Tensor

    def judge(self, model: GenerativeModel | None = None, batch: Batch | None = None) -> Likelihood:
        """The likelihood of the items under the same options."""
        return (model or self.model).log_likelihood(batch or self.batch, **self.options).cpu()

    @property
    def patience(self) -> float:
        """Seconds that are left."""
        return self.until - time.monotonic()


def prove_checkpoint(trial: Trial, progress: Callable[[str], None] = lambda name: None) -> list[dict]:
    """Every check that applies to the family, in order; one that raises has failed, and says with what."""
    rows: list[dict] = []
    for name, applies, check in CHECKS:
        if not applies(trial.model):
            continue
        progress(name)
        if trial.patience <= 0:
            rows.append(Proof(name, None, None, None, "no time was left: proofs=full lifts the bound").to_dict())
            continue
        try:
            rows += [proof.to_dict() for proof in check(trial)]
        except (InputError, RunError, ValueError, ArithmeticError, NotImplementedError) as error:
            rows.append(Proof(name, None, None, False, " ".join(str(error).split())[:200]).to_dict())
    return rows


def _determinism(trial: Trial) -> Iterator[Proof]:
    """Two runs with one seed are equal; item by item gives what the batch gave."""
    first, second = trial.judge(), trial.judge()
    yield Proof.below("same seed, same value", _largest(first.nats - second.nats), 0.0, "two runs")
    few = trial.batch.rows(slice(0, 8))
    alone = torch.cat([trial.judge(batch=few.rows(slice(k, k + 1))).nats for k in range(len(few))])
    together = first.nats[: len(few)]
    error = _largest((alone - together) / trial.model.spec.dims)
    yield Proof.below("batch size 1 against 64", error, 1e-5, f"{len(few)} items, nats per dimension")


def _samples_alone(trial: Trial) -> Iterator[Proof]:
    """Sample 3 of a seed is the same alone and in a batch."""
    options = {"seed": trial.seed, "weights": trial.weights}
    batch = trial.model.sample(4, **options)
    labels = isinstance(batch.cond, Tensor)
    alone = trial.model.sample(1, start=3, **options, **({"cond": int(batch.cond[3])} if labels else {}))
    whole = batch.x[3][..., : alone.x.shape[-1]]  # alone, nothing has to be as long as others are
    difference = (whole.double() - alone.x[0].double()).abs().max()
    threshold = 1.0 if trial.model.spec.levels is not None else 1e-3 * max(1.0, float(batch.x.double().abs().max()))
    where = "levels" if trial.model.spec.levels is not None else "units of the data"
    yield Proof.below("sample 3 alone and in a batch", float(difference), threshold, where)


def _precision(trial: Trial) -> Iterator[Proof]:
    """The value in float32 is that in float64, with the same draws."""
    few = trial.batch.rows(slice(0, 16)) if hasattr(trial.model, "num_steps") else trial.batch
    precise = few if trial.model.spec.levels is not None else replace(few, x=few.x.double())
    exact = copy.deepcopy(trial.model).double().log_likelihood(precise, **trial.options).cpu()
    ours = trial.judge(batch=few)
    error = abs(float((ours.nats - exact.nats).mean())) / (trial.model.spec.dims * math.log(2))
    yield Proof.below("float32 against float64", error, 1e-3, f"mean of {len(few)} items, bits per dimension")


def _parts(trial: Trial) -> Iterator[Proof]:
    """The named parts add up to the bound; strata estimate what all terms give."""
    found = trial.judge()
    total = sum(part.double() for part in found.parts.values())
    error = _largest((total + found.nats) / trial.model.spec.dims)
    yield Proof.below("prior + terms + reconstruction = bound", error, 1e-6, "nats per dimension")
    terms = trial.model.num_steps - 1
    few = trial.batch.rows(slice(0, 4))
    rate = trial.model.spec.dims  # a rough guard: large events are left to proofs=full
    if rate * terms * len(few) > 5e6 and trial.patience < 300:
        where = "all terms of 4 items would take long: proofs=full"
        yield Proof("all terms = stratified estimate", None, 4.0, None, where)
        return
    own = {key: value for key, value in trial.options.items() if key not in ("draws", "replicates")}
    whole = trial.model.log_likelihood(few, **own, draws=None).cpu()
    strata = trial.model.log_likelihood(few, **own, draws=max(1, min(50, terms // 2)), replicates=8).cpu()
    deviation = float(strata.stderr.square().sum().sqrt())
    z = abs(float((whole.nats - strata.nats).sum())) / max(deviation, 1e-12)
    yield Proof.below("all terms = stratified estimate", z, 4.0, f"{len(few)} items, standard errors")


def _decoder(trial: Trial) -> Iterator[Proof]:
    """The decoder's masses of all levels sum to one, whatever mean it is given."""
    model = trial.model
    levels = torch.arange(model.spec.levels, device=model.device)
    log_snr = model.core.schedule.log_snr(model.bound_times()[:1].to(model.device)).double()
    means = torch.linspace(-1.2, 1.2, 25, dtype=torch.float64, device=model.device)
    masses = model.decoder.log_mass(levels[:, None], means, torch.exp(-0.5 * log_snr)).exp().sum(0)
    yield Proof.below("masses of the decoder sum to one", _largest(masses - 1), 1e-5, f"{len(levels)} levels")


def _score(trial: Trial) -> Iterator[Proof]:
    """The score is minus the gradient of the energy, by differences in float64."""
    twin = copy.deepcopy(trial.model).double()
    few = trial.batch.rows(slice(0, 4))
    noise = KeyedGenerator(trial.seed, torch.arange(len(few), device=few.x.device), "proofs")
    z, _ = twin.encoding(few.x.double() if trial.model.spec.levels is None else few.x, noise)
    z = z.double()
    direction = noise.child("direction").normal(tuple(z.shape), dtype=torch.float64, device=z.device)
    core = twin.weights(trial.weights)
    slope = (core.score(z).detach() * direction).flatten(1).sum(1)
    step = 1e-5
    with torch.no_grad():
        risen = -(core.energy(z + step * direction) - core.energy(z - step * direction)) / (2 * step)
    error = _largest((slope - risen) / (1 + slope.abs()))
    yield Proof.below("score = - gradient of the energy", error, 1e-4, f"{len(few)} items, central differences")


def _bracket(trial: Trial) -> Iterator[Proof]:
    """The forward estimate of log Z is not above the reverse one."""
    made = {} if trial.likelihood is None else trial.likelihood.made
    if "log_z_upper" not in made or made["log_z_upper"] is None:
        return
    gap = made["log_z"] - made["log_z_upper"]
    error = math.hypot(made["log_z_stderr"], made.get("upper_stderr") or 0.0)
    where = f"log Z {made['log_z']:.3f}, reverse {made['log_z_upper']:.3f}; standard errors"
    yield Proof.below("forward log Z <= reverse", gap / max(error, 1e-12), 3.0, where)


def _mass(trial: Trial) -> Iterator[Proof]:
    """In the plane: the density integrates to one; open where the integral does not settle."""
    mass, error, points = mass_of(trial)
    name, where = "density integrates to one", f"{mass:.5f} +- {error:.5f} over the plane, {points} points"
    if error > 1e-3:
        yield Proof(name, abs(mass - 1), 1e-3, None if abs(mass - 1) <= error + 1e-3 else False, where)
    else:
        yield Proof.below(name, abs(mass - 1), 1e-3, where)


def _flow(trial: Trial) -> Iterator[Proof]:
    from genmodels.verification.trained_flows import prove_trained_flow  # here, since other families need no flows

    for row in prove_trained_flow(trial.model, trial.batch, trial.weights, trial.seed, trial.until):
        yield Proof(*row)


def _largest(values: Tensor) -> float:
    """The largest absolute value; NaN stays NaN, and two infinities of one sign are equal."""
    return float(values.abs().max()) if len(values) else 0.0


def _has_likelihood(model) -> bool:
    return is_flow(model) or is_diffusion(model) or is_energy(model) or model.spec.text is not None


def _has_density(model) -> bool:
    return model.spec.event_shape == (2,) and model.spec.levels is None and (is_flow(model) or is_energy(model))


#: (name, for which models, the check), in the order of the report. Dear ones come last: time may run out.
CHECKS: list[tuple[str, Callable[[GenerativeModel], bool], Callable[[Trial], Iterator[Proof]]]] = [
    ("determinism", _has_likelihood, _determinism),
    ("addressable samples", lambda model: True, _samples_alone),
    ("precision", lambda model: is_flow(model) or is_diffusion(model), _precision),
    ("density", _has_density, _mass),
    ("bound", is_diffusion, _parts),
    ("decoder", lambda model: is_diffusion(model) and model.spec.levels is not None, _decoder),
    ("score", is_energy, _score),
    ("bracket", is_energy, _bracket),
    ("flow", is_flow, _flow),
]
