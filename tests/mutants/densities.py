"""Mutants in noise schedules and energies, each with the checks that must notice it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from genmodels.diffusion.path import LinearPath
from genmodels.diffusion.schedule import CosineSchedule
from genmodels.energy.function import EnergyFunction
from genmodels.energy.ground_truth import DoubleWell, Quadratic
from genmodels.verification.check import Report
from genmodels.verification.densities import check_energy, check_schedule


@dataclass(frozen=True)
class Mutant:
    """A broken object, the function that checks it, and exactly the checks that fail; none for a sound one."""

    make: Callable
    check: Callable[..., Report]
    failing: frozenset[str] = field(default=frozenset())

    def run(self) -> Report:
        """The result of every check."""
        return self.check(self.make())


class Rising(CosineSchedule):
    """Time runs the other way."""

    def log_snr(self, t):
        return super().log_snr(1 - t)


class Single(CosineSchedule):
    """Float32, which is not enough near the ends."""

    def log_snr(self, t):
        return super().log_snr(t).float()


class FactorTwo(CosineSchedule):
    """The rate of the log of alpha / sigma instead of its square."""

    def log_snr_rate(self, t):
        return super().log_snr_rate(t) / 2


class ShiftedTime(CosineSchedule):
    """An inverse that is one step of a thousand late."""

    def time_of(self, log_snr):
        return super().time_of(log_snr) + 1e-3


class FromStepZero(CosineSchedule):
    """The betas of steps 0 .. T - 1."""

    def betas(self, num_steps):
        return super().betas(num_steps).roll(1)


class OpenEnd(CosineSchedule):
    """End points without the limits of the schedule."""

    @property
    def end_points(self):
        return 20.0, -20.0


class Exploding(CosineSchedule):
    """The signal is not scaled down."""

    def alpha_sigma(self, t):
        alpha, sigma = super().alpha_sigma(t)
        return torch.ones_like(alpha), sigma / alpha


class ForgottenNoise(LinearPath):
    """The velocity of a path without the noise that this one leaves at t = 0."""

    def __init__(self):
        super().__init__(sigma_min=0.1)

    def rates(self, t):
        return LinearPath().rates(t)


class _Well(EnergyFunction):
    """(|x|^2 - 1)^2, to break."""

    def __init__(self):
        super().__init__()
        self.height = torch.nn.Parameter(torch.ones(()))

    def energy(self, x, cond=None):
        return self.height * (x.flatten(1).square().sum(1) - 1).square()


class LostSign(_Well):
    """A score uphill in energy."""

    def score(self, x, cond=None):
        return -super().score(x, cond)


class Detached(_Well):
    """The score teaches nothing."""

    def score(self, x, cond=None):
        return super().score(x, cond).detach()


class HalfDetached(_Well):
    """The score teaches half of what it should."""

    def score(self, x, cond=None):
        score = super().score(x, cond)
        return 0.5 * (score + score.detach())


class BatchMean(_Well):
    """The mean of the batch is subtracted."""

    def energy(self, x, cond=None):
        return super().energy(x - x.mean(0))


class Flat(_Well):
    """Bounded: exp(-E) has no integral."""

    def energy(self, x, cond=None):
        return super().energy(x).tanh()


class Upside(_Well):
    """The density is large where it should be small."""

    def energy(self, x, cond=None):
        return -super().energy(x)


class Dead(_Well):
    """A parameter that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(3))


class Counting(_Well):
    """The state changes with every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def energy(self, x, cond=None):
        self.calls += 1
        return super().energy(x)


class Summed(_Well):
    """One number for the whole batch."""

    def energy(self, x, cond=None):
        return super().energy(x).sum()[None]


class Bent(Quadratic):
    """Half of the curvature is missing."""

    def jet(self, x, v):
        value, slope, bend = super().jet(x, v)
        return value, slope, bend / 2


class LostJet(Quadratic):
    """Slope and curvature are NaN, the value is right."""

    def jet(self, x, v):
        value, slope, bend = super().jet(x, v)
        return value, math.nan * slope, math.nan * bend


class LostFarAway(_Well):
    """Not a number where it is large."""

    def energy(self, x, cond=None):
        energy = super().energy(x)
        return torch.where(energy > 1e5, math.nan, energy)


class Walled(_Well):
    """Infinite beyond a ball: a density with a bounded domain."""

    def energy(self, x, cond=None):
        return torch.where(x.flatten(1).norm(dim=1) > 50, math.inf, super().energy(x))


def _schedule(make, *failing: str) -> Mutant:
    return Mutant(make, check_schedule, frozenset(failing))


def _energy(make, *failing: str) -> Mutant:
    return Mutant(make, lambda made: check_energy(made, (2,)), frozenset(failing))


#: Sound ones, then one mutant after the other.
MUTANTS: dict[str, Mutant] = {
    "nothing (schedule)": _schedule(CosineSchedule),
    "time reversed": _schedule(Rising, "decreasing", "rate", "rates of signal and noise", "time of a level"),
    "log-SNR in float32": _schedule(
        Single, "shape and dtype", "variance preserving", "rate", "rates of signal and noise", "time of a level",
        "betas",
    ),
    "rate without the square": _schedule(FactorTwo, "rate", "rates of signal and noise"),
    "inverse a step late": _schedule(ShiftedTime, "time of a level"),
    "steps counted from zero": _schedule(FromStepZero, "betas"),
    "end points of another schedule": _schedule(OpenEnd, "end points"),
    "signal not scaled": _schedule(Exploding, "variance preserving", "rates of signal and noise"),
    "nothing (path)": _schedule(LinearPath),
    "velocity of another path": _schedule(ForgottenNoise, "rate", "rates of signal and noise"),
    "nothing (energy)": _energy(DoubleWell),
    "nothing (jet)": _energy(lambda: Quadratic(torch.eye(2))),
    "nothing (bounded domain)": _energy(Walled),
    "jet that is not a number": _energy(lambda: LostJet(torch.eye(2)), "jet"),
    "energy that is not a number far away": _energy(LostFarAway, "falls off"),
    "sign of the score": _energy(LostSign, "score"),
    "nothing (large offset)": _energy(lambda: Quadratic(torch.eye(2), offset=1e6)),
    "curvature halved beside a large offset": _energy(lambda: Bent(torch.eye(2), offset=1e6), "jet"),
    "score detached": _energy(Detached, "gradients of the score"),
    "score half detached": _energy(HalfDetached, "gradients of the score"),
    "mean of the batch": _energy(BatchMean, "rows independent", "score"),
    "bounded energy": _energy(Flat, "falls off"),
    "energy upside down": _energy(Upside, "falls off"),
    "dead parameter of an energy": _energy(Dead, "gradients"),
    "calls counted in the state": _energy(Counting, "nothing modified"),
    "one energy for all": _energy(
        Summed, "shape", "rows independent", "score", "nothing modified", "gradients", "gradients of the score"
    ),
    "curvature halved": _energy(lambda: Bent(torch.eye(2)), "jet"),
}
