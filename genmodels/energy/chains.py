"""Running chains: warm-up, kept draws, and what is known of them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.energy.adaptation import DualAveraging
from genmodels.energy.diagnostics import effective_sample_size, split_r_hat
from genmodels.energy.function import ScoreFunction, require_energy
from genmodels.energy.kernels import Kernel, Target, noise_like
from genmodels.errors import InputError, RunError
from genmodels.random import Generator, at_step

#: Events of more coordinates than this are judged by their energy alone.
_MOST_COORDINATES = 64


class Start(NamedTuple):
    """Where chains begin, and what that says about their "samples"."""

    x: Tensor
    label: str = "given"

    @classmethod
    def prior(cls, shape, spread: float, generator: Generator, *, dtype=torch.float32, device=None) -> Start:
        """From N(0, spread^2): the density of the confinement alone."""
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        return cls(spread * noise_like(x, at_step(generator, 0)), "prior of the confinement")

    @classmethod
    def data(cls, x: Tensor, sigma: float, generator: Generator) -> Start:
        """From data with noise: such chains need not have left the data, and their draws are labelled so."""
        return cls(x + sigma * noise_like(x, at_step(generator, 0)), "data plus noise")


class ChainState(NamedTuple):
    """All that a chain needs to go on: position, number of steps done, adaptation."""

    x: Tensor
    step: int
    adaptation: DualAveraging


@dataclass
class ChainResult:
    """Draws of chains, and what is known of them.

    Arguments:
        draws: (N, B, *event), the kept ones after the warm-up; the last of them are the samples.
        state: to go on from.
        acceptance: (B,) mean probability of acceptance after the warm-up, None without correction.
        divergences: (B,) proposals after the warm-up whose energy rose by more than 1000 or was no number.
        step_size: (B,) in use after the warm-up.
        ess, r_hat: of each coordinate, or of the energy for more than 64 of them; None for fewer than 4 draws.
        evaluations: of the score, over all chains.
        started: where the chains began.
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
        """(B, *event), where the chains are now."""
        return self.state.x

    def summary(self) -> dict[str, float | int | str | None]:
        """Plain values for logs and reports: the worst coordinate counts."""
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
    model: ScoreFunction,
    kernel: Kernel,
    start: Start | ChainState | Tensor,
    generator: Generator,
    *,
    steps: int,
    warm_up: int = 0,
    keep_every: int = 1,
    cond: Tensor | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
) -> ChainResult:
    """Chains of a kernel from a start, B at once; step k of chain b draws its noise from `generator` at step k + 1.

    The step size adapts in the first `warm_up` steps, if the kernel has an acceptance, and is frozen afterwards. With a
    keyed generator chain b is the same alone and in any batch. Going on from a `ChainState` with a keyed generator is
    the same as not having stopped.

    Arguments:
        model: an energy; a score alone will do for a kernel without correction.
        kernel: ULA, MALA or HMC.
        start: where to begin.
        steps: number of steps after the warm-up.
        warm_up: number of steps before, for a fresh start.
        keep_every: every so many steps after the warm-up are kept; 0 keeps none but the last state.
        callback: called after each step as callback(number from 0, x).

    Errors: InputError for a score without energy under a corrected kernel, or an unadjusted step beyond the stability
    of a quadratic energy; RunError when unadjusted chains leave all bounds.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> from genmodels.energy.hamiltonian import HMC
        >>> from genmodels.random import KeyedGenerator
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
    kept, energies, accepted = [], [], 0.0
    divergences = torch.zeros(len(first.x), dtype=torch.int64, device=first.x.device)
    for i in range(warm_up + steps):
        warming = i < warm_up
        size = adaptation.step_size if warming else adaptation.averaged
        point, move = kernel(target, point, at_step(generator, first.step + i + 1), size)
        divergences += move.divergent & (not warming)
        if move.acceptance is None:
            _require_finite(point.x, first.step + i)
        elif warming:
            adaptation = adaptation.update(move.acceptance, wanted=kernel.wanted_acceptance)
        else:
            accepted = accepted + move.acceptance
        if not warming and keep_every and (i + 1 - warm_up) % keep_every == 0:
            kept.append(point.x)
            energies.append(point.energy)
        if callback is not None:
            callback(i, point.x)
    draws = torch.stack(kept) if kept else point.x.new_empty(0, *point.x.shape)
    judged = _judged(draws, energies)
    return ChainResult(
        draws=draws,
        state=ChainState(point.x, first.step + warm_up + steps, adaptation),
        acceptance=accepted / steps if kernel.wanted_acceptance is not None and steps else None,
        divergences=divergences,
        step_size=adaptation.averaged,
        ess=None if judged is None else effective_sample_size(judged),
        r_hat=None if judged is None else split_r_hat(judged),
        evaluations=target.evaluations,
        started=label,
        exact=kernel.exact,
    )


def _judged(draws: Tensor, energies: list[Tensor | None]) -> Tensor | None:
    """(N, B, K): the coordinates, or the energy of large events."""
    if not len(draws):
        return None
    if draws[0, 0].numel() <= _MOST_COORDINATES:
        return draws.flatten(2)
    return None if energies[0] is None else torch.stack(energies)[..., None]


def _require_finite(x: Tensor, step: int) -> None:
    finite = x.flatten(1).isfinite().all(1)
    if not bool(finite.all()):
        chain = int((~finite).nonzero()[0])
        raise RunError(f"chain {chain} left all bounds at step {step}: use a smaller step_size, or MALA")


def _require_stable(model: ScoreFunction, x: Tensor, step_size: float, cond: Tensor | None) -> None:
    """Refuses h > 2/lambda where the score looks linear, lambda its steepest slope: there the chain must explode.

    The steepest slope comes from a few power iterations with differences of the score, at one chain and beside it.
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
