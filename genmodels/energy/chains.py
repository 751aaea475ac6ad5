"""Running Markov chains: step size adaptation, warm-up, draws, effective sample size and R-hat."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError
from genmodels.core.random import Generator, at_step
from genmodels.energy.function import ScoreFunction, require_energy
from genmodels.energy.kernels import Kernel, Point, Target


class DualAveraging(NamedTuple):
    """Dual averaging of the logarithm of the step size, one for every chain.

        H_t = (1 - 1/(t + t0)) H_{t-1} + (wanted - acceptance_t)/(t + t0)
        log h_{t+1} = mu - sqrt(t)/gamma H_t,   log h_bar = t^-kappa log h + (1 - t^-kappa) log h_bar

    Each chain adapts by its own acceptance alone, so that it is the same in any batch. Use `step_size` while adapting
    and the constant `averaged` afterwards, because a chain with an adapting step size does not leave the target
    invariant.

    After a short warm-up the acceptance is above the wanted one: it is concave in log h, which still varies. MALA on
    N(0, I) in 30 dimensions exceeds .574 by .032 after 220 steps, by .016 after 1000 and by .007 after 4000.

    Shapes: all `(B,)` float64, `count` an integer.
    Source: Hoffman and Gelman 2014, section 3.2.1, with its constants.

    Example:
        >>> state = DualAveraging.start(0.1, 1)
        >>> for _ in range(500):  # an acceptance that decreases with the step: .65 at h = .35
        ...     state = state.update(1 - state.step_size, wanted=0.65)
        >>> round(float(state.averaged), 2)
        0.35
    """

    error: Tensor
    log_step: Tensor
    log_averaged: Tensor
    centre: Tensor
    count: int

    @classmethod
    def start(cls, step_size: float, chains: int, device=None) -> DualAveraging:
        """The state before the first step; the step size is pulled towards ten times the given one."""
        log_step = torch.full((chains,), math.log(step_size), dtype=torch.float64, device=device)
        return cls(torch.zeros_like(log_step), log_step, log_step.clone(), log_step + math.log(10), 0)

    @property
    def step_size(self) -> Tensor:
        """(B,) for the next step of the warm-up."""
        return self.log_step.exp()

    @property
    def averaged(self) -> Tensor:
        """(B,) for all steps after the warm-up."""
        return self.log_averaged.exp()

    def update(self, acceptance: Tensor, *, wanted: float) -> DualAveraging:
        """The state after a step with acceptance probability (B,)."""
        t = self.count + 1
        share = 1 / (t + 10)
        error = (1 - share) * self.error + share * (wanted - acceptance.to(torch.float64))
        log_step = self.centre - math.sqrt(t) / 0.05 * error
        weight = t**-0.75
        return DualAveraging(error, log_step, torch.lerp(self.log_averaged, log_step, weight), self.centre, t)


def split_r_hat(draws: Tensor) -> Tensor | None:
    """Split R-hat of each quantity, from the variances between and within half-chains; 1 for converged chains.

        R = sqrt(((n - 1)/n W + B/n) / W)

    with B/n the variance of the means of the half-chains and W the mean of their variances.

    Shapes: `draws (N, B, K)` for N draws of B chains; the result is `(K,)`, or None for fewer than 4 draws.
    Source: Gelman et al. 2013, "Bayesian data analysis", section 11.4.

    Example:
        >>> draws = torch.randn(1000, 4, 1, generator=torch.Generator().manual_seed(0))
        >>> bool((split_r_hat(draws) < 1.01).all()), bool((split_r_hat(draws + torch.arange(4)[:, None]) > 1.3).all())
        (True, True)
    """
    if len(draws) < 4:
        return None
    halves = _halves(draws.to(torch.float64))
    n = len(halves)
    within = halves.var(0).mean(0)
    between = halves.mean(0).var(0)
    return (((n - 1) / n * within + between) / within).sqrt()


def effective_sample_size(draws: Tensor) -> Tensor | None:
    """Effective sample size: the number of independent draws that would estimate the mean of each quantity as well.

        ESS = N B / (1 + 2 sum_t rho_t),   rho_t = 1 - (W - mean autocovariance at lag t) / var_plus

    The sum ends where the sum of a pair of neighbouring rho is no longer positive, and pairs do not increase.

    Shapes: `draws (N, B, K)`; the result is `(K,)`, or None for fewer than 4 draws.
    Source: Geyer 1992 (initial monotone sequence); Vehtari et al. 2021, section 3 (several chains, split).

    Example:
        >>> draws = torch.randn(1000, 4, 1, generator=torch.Generator().manual_seed(0))
        >>> 3200 < float(effective_sample_size(draws)) < 4800
        True
    """
    if len(draws) < 4:
        return None
    halves = _halves(draws.to(torch.float64))
    n, chains, _ = halves.shape
    centred = halves - halves.mean(0)
    # Autocovariances by the Fourier transform, padded to avoid wrap-around.
    spectrum = torch.fft.rfft(centred, n=2 * n, dim=0)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * n, dim=0)[:n].mean(1) / n  # (n, K)
    within = covariance[0] * n / (n - 1)
    plus = covariance[0] + halves.mean(0).var(0)
    rho = 1 - (within - covariance) / plus
    rho[0] = 1
    pairs = rho[: n // 2 * 2].view(n // 2, 2, -1).sum(1)  # rho_{2k} + rho_{2k + 1}
    positive = (pairs > 0).long().cumprod(0)
    pairs = pairs.cummin(0).values * positive
    length = (2 * pairs.sum(0) - 1).clamp(min=1 / torch.tensor(float(n * chains)).log10())
    return n * chains / length


def _halves(draws: Tensor) -> Tensor:
    """(N, B, K) to (N // 2, 2 B, K)."""
    half = len(draws) // 2
    return torch.cat([draws[:half], draws[half : 2 * half]], dim=1)


#: Diagnostics of events with more coordinates use the energy instead.
_MOST_COORDINATES = 64


class Start(NamedTuple):
    """The starting points of chains, with a label for reports."""

    x: Tensor
    label: str = "given"


class ChainState(NamedTuple):
    """The state from which chains continue: position, number of steps done, adaptation."""

    x: Tensor
    step: int
    adaptation: DualAveraging


@dataclass
class ChainResult:
    """Draws of chains, with diagnostics.

    Arguments:
        draws: (N, B, *event), kept after the warm-up; the last of them are the samples.
        state: the state from which the chains can continue.
        acceptance: (B,) mean acceptance probability after the warm-up, None without correction.
        divergences: (B,) number of proposals after the warm-up whose energy rose by more than 1000 or was not finite.
        step_size: (B,) after the warm-up.
        ess, r_hat: of each coordinate, or of the energy if there are more than 64; None for fewer than 4 draws.
        evaluations: number of evaluations of the score, over all chains.
        started: how the chains were started.
        exact: whether the kernel leaves the target invariant.
    """

    draws: Tensor
    state: ChainState
    acceptance: Tensor | None
    divergences: Tensor
    step_size: Tensor
    ess: Tensor | None
    r_hat: Tensor | None
    evaluations: int
    started: str
    exact: bool

    @property
    def samples(self) -> Tensor:
        """(B, *event), the final positions of the chains."""
        return self.state.x

    def summary(self) -> dict[str, float | int | str | None]:
        """Plain values for logs and reports, of the worst coordinate."""
        return {
            "acceptance": None if self.acceptance is None else float(self.acceptance.mean()),
            "ess": None if self.ess is None else float(self.ess.min()),
            "r_hat": None if self.r_hat is None else float(self.r_hat.max()),
            "divergences": int(self.divergences.sum()),
            "step_size": float(self.step_size.median()),
            "evaluations": self.evaluations,
            "steps": self.state.step,
            "started": self.started,
            "exact": self.exact,
        }


def run_chains(
    model: ScoreFunction, kernel: Kernel, start: Start | ChainState | Tensor, generator: Generator, *, steps: int,
    warm_up: int = 0, keep_every: int = 1, cond: Tensor | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
) -> ChainResult:
    """Run B chains of a kernel in parallel; step k of chain b draws its noise from `generator` at step k + 1.

    The step size adapts in the first `warm_up` steps, if the kernel has an acceptance, and is constant afterwards. With
    a keyed generator chain b is the same alone and in any batch, and continuing from a `ChainState` equals an
    uninterrupted run.

    MALA and HMC reject proposals with a non-finite energy and count them as divergences; ULA, which never rejects,
    raises an error. Chains may not start at such a point.

    Arguments:
        model: an energy; for kernels without correction a score suffices.
        kernel: ULA, MALA or HMC.
        start: starting points, or the state of earlier chains.
        steps: number of steps after the warm-up.
        warm_up: number of steps before, for a fresh start.
        keep_every: interval of kept draws after the warm-up; 0 keeps only the last state.
        callback: called after each step as callback(number from 0, x).

    Errors: InputError for a score without energy under a corrected kernel, or an unadjusted step beyond the stability
    of a quadratic energy; RunError naming a chain that starts at, or with ULA reaches, a point with non-finite energy
    or score.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> from genmodels.energy.kernels import HMC
        >>> from genmodels.core.random import KeyedGenerator
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> keyed = KeyedGenerator(0, torch.arange(64), "chains")
        >>> result = run_chains(normal, HMC(), torch.zeros(64, 2), keyed, steps=100, warm_up=50)
        >>> result.draws.shape, bool(result.r_hat.max() < 1.1)
        (torch.Size([100, 64, 2]), True)
    """
    if kernel.exact:
        require_energy(model, type(kernel).__name__)
    target = Target(model, cond)
    if not isinstance(start, ChainState):
        start = start if isinstance(start, Start) else Start(start)
        adaptation = DualAveraging.start(kernel.step_size, len(start.x), start.x.device)
        first, label = ChainState(start.x.detach(), 0, adaptation), start.label
    else:
        first, label, warm_up = start, "an earlier run", 0
    if not kernel.exact and first.step == 0:
        _require_stable(model, first.x, kernel.step_size, cond)
    point, adaptation = target.evaluate(first.x), first.adaptation
    _require_finite(point, "starts where", "start where both are finite")
    kept, energies, accepted = [], [], 0.0
    divergences = torch.zeros(len(first.x), dtype=torch.int64, device=first.x.device)
    for i in range(warm_up + steps):
        warming = i < warm_up
        size = adaptation.step_size if warming else adaptation.averaged
        point, move = kernel(target, point, at_step(generator, first.step + i + 1), size)
        divergences += move.divergent & (not warming)
        if move.acceptance is None:
            _require_finite(point, f"diverged at step {first.step + i}:", "use a smaller step_size, or MALA")
        elif warming:
            adaptation = adaptation.update(target.kept(move.acceptance), wanted=kernel.wanted_acceptance)
        else:
            accepted = accepted + move.acceptance
        if not warming and keep_every and (i + 1 - warm_up) % keep_every == 0:
            kept.append(point.x)
            energies.append(point.energy)
        if callback is not None:
            callback(i, point.x)
    draws = torch.stack(kept) if kept else point.x.new_empty(0, *point.x.shape)
    quantities = _quantities(draws, energies)
    return ChainResult(
        draws=draws,
        state=ChainState(point.x, first.step + warm_up + steps, adaptation),
        acceptance=accepted / steps if kernel.wanted_acceptance is not None and steps else None,
        divergences=divergences,
        step_size=adaptation.averaged,
        ess=effective_sample_size(quantities),
        r_hat=split_r_hat(quantities),
        evaluations=target.evaluations,
        started=label,
        exact=kernel.exact,
    )


def _quantities(draws: Tensor, energies: list[Tensor | None]) -> Tensor:
    """(N, B, K) quantities for diagnostics: the coordinates, or the energy of large events if there is one."""
    if draws.shape[2:].numel() <= _MOST_COORDINATES:
        return draws.flatten(2)
    return draws[:0] if not energies or energies[0] is None else torch.stack(energies)[..., None]


def _require_finite(point: Point, event: str, advice: str) -> None:
    for name, values in (("position", point.x), ("energy", point.energy), ("score", point.score)):
        bad = [] if values is None else (~values.reshape(len(values), -1).isfinite().all(1)).nonzero()
        if len(bad):
            raise RunError(f"chain {int(bad[0])} {event} its {name} is not finite: {advice}")


def _require_stable(model: ScoreFunction, x: Tensor, step_size: float, cond: Tensor | None) -> None:
    """Raise InputError for h > 2/lambda if the score is linear with steepest slope lambda: such a chain diverges.

    The slope is found by power iterations with differences of the score, at one chain and at a shifted point.
    """
    with torch.no_grad():
        one, condition = x[:1], None if cond is None else cond[:1]
        slopes = []
        for origin in (one, one + 1):
            base = model.score(origin, condition)
            direction = torch.ones_like(one) + 0.1 * torch.arange(one.numel(), device=x.device).view_as(one).sin()
            for _ in range(8):
                direction = direction / direction.norm()
                change = base - model.score(origin + direction, condition)
                slope, direction = change.norm(), change
            slopes.append(float(slope))
    linear = abs(slopes[0] - slopes[1]) <= 1e-3 * slopes[0]
    if linear and step_size * min(slopes) > 2:
        raise InputError(
            f"step_size = {step_size} is outside the stability of this energy: use less than {2 / min(slopes):.3g}"
        )
