"""MCMC kernels as pure functions of a point per chain: ULA, MALA and HMC; annealed Langevin dynamics over noise levels.

    kernel(target, point, generator, step_size (B,)) -> (point, Move)

h is the step size of x' = x + h s(x) + sqrt(2h) xi everywhere in this package: the alpha of Song and Ermon 2019 is 2h,
the epsilon of Song et al. 2021 is h. Every chain has its own step size and noise, independent of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from genmodels.core.errors import InputError, at_least, check_temperature, positive
from genmodels.core.random import Generator, at_step, normal, uniform
from genmodels.core.tensors import event_size, hide
from genmodels.energy.function import EnergyFunction, NoiseConditionalScore, ScoreFunction, like

#: A proposal that raises the energy by more than this counts as a divergence of the integrator.
DIVERGENCE = 1000.0


class Point(NamedTuple):
    """The positions of the chains, with energy and score there.

    Shapes: `x`, `score` `(B, *event)`, `energy (B,)` or None for a score without energy; `parts` are further tensors
    with B rows that the target needs again (see `annealed_importance`).
    """

    x: Tensor
    energy: Tensor | None
    score: Tensor
    parts: tuple[Tensor, ...] = ()


class Move(NamedTuple):
    """Statistics of a step, each (B,): the acceptance probability (None without correction) and whether it diverged."""

    acceptance: Tensor | None
    divergent: Tensor


class Target:
    """The density that chains sample; counts its evaluations, over all chains.

    Arguments:
        model: an energy, or only a score for kernels without correction.
        cond: condition of every chain.
    """

    def __init__(self, model: ScoreFunction, cond: Tensor | None = None):
        self.model, self.cond, self.evaluations = model, cond, 0

    def kept(self, x: Tensor) -> Tensor:
        """Values rounded to the `grain` of the model, in which they do not depend on the batch."""
        grain = getattr(self.model, "grain", None)
        return x if grain is None else x.to(grain).to(x.dtype)

    def evaluate(self, x: Tensor) -> Point:
        """Energy and score at x, without a graph."""
        x = self.kept(x)
        self.evaluations += len(x)
        with torch.no_grad():
            if isinstance(self.model, EnergyFunction):
                energy, score = self.model.energy_and_score(x, self.cond)
                return Point(x, energy, score)
            return Point(x, None, like(x, self.model.score(x, self.cond)))


class Kernel(Protocol):
    """One step of a chain; see the docstring of this module.

    Attributes:
        exact: whether it leaves the target invariant; otherwise it has a bias of the order of its step size.
        step_size: the initial step size.
        wanted_acceptance: target of the adaptation of the step size, None without acceptance.
    """

    exact: bool
    step_size: float
    wanted_acceptance: float | None

    def __call__(self, target: Target, point: Point, generator: Generator, step_size: Tensor) -> tuple[Point, Move]: ...


class ULA:
    """The unadjusted Langevin step: x' = x + h s(x) + sqrt(2h) xi.

    On N(0, 1) its stationary variance is 1/(1 - h/2), not 1: the bias is of order h, and for h >= 2 it diverges.

    Arguments:
        step_size: h.

    Source: Roberts and Tweedie 1996, section 1.4.1.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = Target(LogDensity(lambda x: -0.5 * x.square().sum(1)))
        >>> point = normal.evaluate(torch.zeros(4, 2))
        >>> point, move = ULA()(normal, point, torch.Generator().manual_seed(0), torch.full((4,), 0.1))
        >>> point.x.shape
        torch.Size([4, 2])
    """

    exact = False
    wanted_acceptance = None

    def __init__(self, *, step_size: float = 0.1):
        self.step_size = positive("step_size", step_size)

    def __call__(self, target: Target, point: Point, generator: Generator, step_size: Tensor) -> tuple[Point, Move]:
        h = rows(step_size, point.x)
        x = point.x + h * point.score + (2 * h).sqrt() * noise_like(point.x, generator)
        new = target.evaluate(x)
        return new, Move(None, _diverged(point, new))


class MALA:
    """The Metropolis-adjusted Langevin step: the unadjusted one as a proposal, accepted with probability

        min(1, exp(E(x) - E(x') + log q(x | x') - log q(x' | x))),   log q(y | x) = -|y - x - h s(x)|^2 / (4h)

    Arguments:
        step_size: h.

    Source: Roberts and Tweedie 1996, section 1.4.2; the acceptance of .574 is from Roberts and Rosenthal 1998.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = Target(LogDensity(lambda x: -0.5 * x.square().sum(1)))
        >>> point = normal.evaluate(torch.zeros(4, 2))
        >>> point, move = MALA()(normal, point, torch.Generator().manual_seed(0), torch.full((4,), 1e-6))
        >>> bool((move.acceptance > 0.999).all())
        True
    """

    exact = True
    wanted_acceptance = 0.574

    def __init__(self, *, step_size: float = 0.1):
        self.step_size = positive("step_size", step_size)

    def __call__(self, target: Target, point: Point, generator: Generator, step_size: Tensor) -> tuple[Point, Move]:
        h = rows(step_size, point.x)
        forward = (2 * h).sqrt() * noise_like(point.x, generator)  # x' - x - h s(x)
        proposal = target.evaluate(point.x + h * point.score + forward)
        backward = point.x - proposal.x - h * proposal.score
        excess = ((forward.square() - backward.square()) / (4 * h)).flatten(1).sum(1)
        return metropolis(point, proposal, point.energy - proposal.energy + excess, generator)


def metropolis(point: Point, proposal: Point, log_ratio: Tensor, generator: Generator) -> tuple[Point, Move]:
    """Accepts each chain's proposal with probability min(1, exp(log_ratio)), never one whose energy is not finite."""
    unusable = log_ratio.isnan() | ~proposal.energy.isfinite()
    acceptance = torch.where(unusable, -torch.inf, log_ratio).clamp(max=0).exp()
    u = uniform(log_ratio.shape, generator, dtype=torch.float64, device=log_ratio.device)
    return choose(u < acceptance, proposal, point), Move(acceptance, _diverged(point, proposal))


def choose(accept: Tensor, new: Point, old: Point) -> Point:
    """The new point for the chains that accept, the old one for the others."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(accept.reshape(-1, *(1,) * (a.dim() - 1)), a, b)

    parts = tuple(pick(a, b) for a, b in zip(new.parts, old.parts, strict=True))
    return Point(pick(new.x, old.x), pick(new.energy, old.energy), pick(new.score, old.score), parts)


def rows(value: Tensor, x: Tensor) -> Tensor:
    """(B,) as (B, 1, ..., 1) of the type of x."""
    return value.to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1))


def noise_like(x: Tensor, generator: Generator) -> Tensor:
    """Standard normal noise with the shape, type and device of x."""
    return normal(x.shape, generator, dtype=x.dtype, device=x.device)


def _diverged(point: Point, new: Point) -> Tensor:
    if new.energy is None:
        return ~new.x.flatten(1).isfinite().all(1)
    return ~(new.energy - point.energy <= DIVERGENCE) | ~new.energy.isfinite()


def leapfrog(
    target: Target, point: Point, momentum: Tensor, step_size: Tensor, steps: int, inverse_mass: Tensor | float = 1.0
) -> tuple[Point, Tensor]:
    """The leapfrog integrator of dx/dt = p/m, dp/dt = s(x): reversible, volume-preserving, of second order.

        p <- p + e/2 s(x),   (x <- x + e p/m,   p <- p + e s(x)) repeated,   the last with e/2

    Source: Neal 2011, "MCMC using Hamiltonian dynamics", section 5.2.3.3.
    """
    e = rows(step_size, point.x)
    p = momentum + 0.5 * e * point.score
    for i in range(steps):
        point = target.evaluate(point.x + e * inverse_mass * p)
        p = p + (e if i + 1 < steps else 0.5 * e) * point.score
    return point, p


class HMC:
    """Hamiltonian Monte Carlo with a diagonal mass matrix.

        p ~ N(0, m),   (x', p') = leapfrog(x, p),   accept with min(1, exp(H(x, p) - H(x', p'))),   H = E + p^2/(2m)

    Arguments:
        step_size: e, length of a leapfrog step.
        leapfrog_steps: number of leapfrog steps per move.
        inverse_mass: 1/m, event-shaped, about the variance of each coordinate; None is one everywhere.
        jitter: the step of each move is e times a uniform draw from 1 - jitter to 1 + jitter; moves of equal length can
            be periodic and never leave an orbit.

    Errors: InputError for a step that is not positive or fewer than one leapfrog step.
    Source: Neal 2011, sections 5.3 and 5.4.2.2.

    Example:
        >>> import torch
        >>> from genmodels.energy import LogDensity
        >>> normal = Target(LogDensity(lambda x: -0.5 * x.square().sum(1)))
        >>> point = normal.evaluate(torch.zeros(4, 2))
        >>> point, move = HMC()(normal, point, torch.Generator().manual_seed(0), torch.full((4,), 0.1))
        >>> bool((move.acceptance > 0.99).all()), normal.evaluations
        (True, 24)
    """

    exact = True

    def __init__(
        self, *, step_size: float = 0.1, leapfrog_steps: int = 5, inverse_mass: Tensor | None = None,
        jitter: float = 0.2,
    ):
        at_least(1, leapfrog_steps=leapfrog_steps)
        if inverse_mass is not None and not bool(((inverse_mass > 0) & inverse_mass.isfinite()).all()):
            raise InputError("inverse_mass must be positive and finite everywhere")
        if not 0 <= jitter < 1:
            raise InputError(f"jitter = {jitter} must be from 0 to below 1")
        self.step_size = positive("step_size", step_size)
        self.leapfrog_steps, self.inverse_mass, self.jitter = leapfrog_steps, inverse_mass, jitter

    @property
    def wanted_acceptance(self) -> float:
        """.65 for short trajectories, .8 for those longer than 1, whose errors accumulate."""
        return 0.8 if self.step_size * self.leapfrog_steps > 1 else 0.65

    def __call__(self, target: Target, point: Point, generator: Generator, step_size: Tensor) -> tuple[Point, Move]:
        inverse_mass = 1.0 if self.inverse_mass is None else self.inverse_mass.to(point.x)
        p = noise_like(point.x, generator) * inverse_mass**-0.5
        u = uniform(step_size.shape, generator, dtype=step_size.dtype, device=step_size.device)
        step_size = step_size * (1 + self.jitter * (2 * u - 1))
        proposal, p_new = leapfrog(target, point, p, step_size, self.leapfrog_steps, inverse_mass)
        kinetic = (0.5 * inverse_mass * (p.square() - p_new.square())).flatten(1).sum(1)
        return metropolis(point, proposal, point.energy - proposal.energy + kinetic, generator)


Callback = Callable[[int, Tensor], None]


def annealed_langevin(
    model: NoiseConditionalScore, shape, sigmas: Sequence[float], generator: Generator, *, steps_per_level: int = 10,
    step: float | None = None, temperature: float = 1.0, denoise: bool = True, start: Tensor | None = None,
    cond: Tensor | None = None, dtype=torch.float32, device=None, callback: Callback | None = None,
) -> Tensor:
    """Annealed Langevin dynamics: unadjusted Langevin steps at each noise level, from the largest to the smallest.

        h_i = c sigma_i^2 / sigma_L^2,   x <- x + h_i s(x, sigma_i) + tau sqrt(2 h_i) xi
        at the end   x <- x + sigma_L^2 s(x, sigma_L)

    The last line is the posterior mean of the clean data given x. There is no correction and no stationary density, so
    that acceptance, effective sample size and R-hat are undefined.

    Arguments:
        shape: (B, *event).
        sigmas: decreasing noise levels.
        steps_per_level: steps at each noise level.
        step: c, the step size at the smallest level; None is a tenth of sigma_L^2 (the alpha of the source is 2h).
        temperature: tau, a factor on the standard deviation of all noise: densities p^(1/tau^2) at every level.
        denoise: whether to end with the posterior mean.
        start: (B, *event) in place of N(0, tau^2 sigma_1^2).
        callback: called after each level as callback(number from 0, x).

    Errors: InputError for levels that do not decrease, a temperature below 0 or not finite.
    Source: Song and Ermon 2019, algorithm 1; the last step is the expected denoised sample of Jolicoeur-Martineau et
    al. 2021.

    Example:
        >>> model = NoiseConditionalScore(lambda x, sigma, cond=None: (3 - x) / sigma[:, None] ** 2)  # data: 3
        >>> x = annealed_langevin(model, (2, 1), (4.0, 1.0, 0.1), torch.Generator().manual_seed(0))
        >>> x.flatten().tolist()
        [3.0, 3.0]
    """
    require_decreasing(sigmas)
    check_temperature(temperature)
    x = _start(shape, temperature * sigmas[0], generator, start, dtype, device)
    smallest = sigmas[-1]
    c = 0.1 * smallest**2 if step is None else positive("step", step)
    with torch.no_grad():
        for i, sigma in enumerate(sigmas):
            h, level = c * sigma**2 / smallest**2, model.at(sigma)
            for k in range(steps_per_level):
                noise = noise_like(x, at_step(generator, 1 + i * steps_per_level + k))
                x = x + h * level.score(x, cond) + temperature * (2 * h) ** 0.5 * noise
            if callback is not None:
                callback(i, x)
        return x + smallest**2 * model.at(smallest).score(x, cond) if denoise else x


def predictor_corrector(
    model: NoiseConditionalScore, shape, sigmas: Sequence[float], generator: Generator, *, snr: float = 0.16,
    corrector_steps: int = 1, denoise: bool = True, start: Tensor | None = None, cond: Tensor | None = None,
    mask: Tensor | None = None, dtype=torch.float32, device=None, callback: Callback | None = None,
) -> Tensor:
    """A step of the reverse diffusion between noise levels, then Langevin steps at the new level.

        predictor   x <- x + (sigma_i^2 - sigma_{i+1}^2) s(x, sigma_i) + sqrt(sigma_i^2 - sigma_{i+1}^2) xi
        corrector   x <- x + h s(x, sigma_{i+1}) + sqrt(2h) xi,   h = min(snr^2 D / |s|^2, sigma_{i+1}^2)

    D is the number of scalars, the mean of |xi|^2; the source divides |xi|^2 itself, but a step that depends on its own
    noise widens the samples. |s| is that of each example, where the source takes the mean over the batch, and twice our
    h for the same snr. The bound on h is ours: without it h is unbounded where the score nearly vanishes. In few
    dimensions |s| varies strongly, and the predictor alone (`corrector_steps=0`) is more accurate.

    The steps have errors of first order in the ratio of the levels: with the exact scores of N(0, 1) and levels from 10
    to 0.01 the standard deviation of samples is 1.7 % too large by 200 levels and 7 % by 50 without corrector; with it
    2.9 % and 5.6 % in 16 dimensions, 1.0 % and 3.9 % in 64.

    Arguments:
        shape, sigmas, callback: see `annealed_langevin`.
        snr: ratio of the norms of a corrector's drift and noise, times the square root of 2.
        corrector_steps: corrections at each level; 0 is the predictor alone.
        denoise: whether to end with the posterior mean of the clean data given x.
        start: (B, *event) in place of N(0, sigma_1^2).
        mask: (B, 1, T), of the valid frames, whose scores alone decide h.

    Errors: InputError for levels that do not decrease.
    Source: Song et al. 2021, "Score-based generative modeling through SDEs", algorithms 2 and 4; its epsilon is h.

    Example:
        >>> model = NoiseConditionalScore(lambda x, sigma, cond=None: (3 - x) / sigma[:, None] ** 2)  # data: 3
        >>> x = predictor_corrector(model, (2, 1), (4.0, 1.0, 0.1), torch.Generator().manual_seed(0))
        >>> [round(value, 4) for value in x.flatten().tolist()]
        [3.0, 3.0]
    """
    require_decreasing(sigmas)
    x = _start(shape, sigmas[0], generator, start, dtype, device)
    size = rows(event_size(x, mask).clamp(min=1), x)
    with torch.no_grad():
        for i, (sigma, smaller) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
            keyed = at_step(generator, 1 + i)
            gap = sigma**2 - smaller**2
            x = x + gap * model.at(sigma).score(x, cond) + gap**0.5 * noise_like(x, keyed)
            for _ in range(corrector_steps):
                score, noise = model.at(smaller).score(x, cond), noise_like(x, keyed)
                h = (size * (snr / _length(hide(score, mask))).square()).clamp(max=smaller**2)
                x = x + h * score + (2 * h).sqrt() * noise
            if callback is not None:
                callback(i, x)
        smallest = sigmas[-1]
        return x + smallest**2 * model.at(smallest).score(x, cond) if denoise else x


def require_decreasing(sigmas: Sequence[float]) -> None:
    """Raises InputError unless the noise levels are positive, finite and decrease."""
    pairs = zip(sigmas[:-1], sigmas[1:], strict=True)
    in_order = all(smaller < larger < math.inf for larger, smaller in pairs)
    if not (len(sigmas) and 0 < sigmas[-1] < math.inf and in_order):
        raise InputError("noise levels must be positive, finite and decrease, from the largest to the smallest")


def _start(shape, sigma: float, generator: Generator, start: Tensor | None, dtype, device) -> Tensor:
    if start is not None:
        return start.to(device=device, dtype=dtype)
    return sigma * noise_like(torch.empty(tuple(shape), dtype=dtype, device=device), at_step(generator, 0))


def _length(x: Tensor) -> Tensor:
    """(B, 1, ..., 1) norms of the events."""
    return rows(x.flatten(1).norm(dim=1), x).clamp(min=torch.finfo(x.dtype).tiny)
