"""Hamiltonian Monte Carlo: long moves along the contours of the energy, corrected for the error of the integrator."""

from __future__ import annotations

from torch import Tensor

from genmodels.energy.kernels import Move, Point, Target, metropolis, noise_like, positive, rows
from genmodels.errors import InputError
from genmodels.random import Generator, uniform


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
    """Hamiltonian Monte Carlo with a diagonal mass.

        p ~ N(0, m),   (x', p') = leapfrog(x, p),   accept with min(1, exp(H(x, p) - H(x', p'))),   H = E + p^2/(2m)

    Arguments:
        step_size: e, length of a leapfrog step.
        leapfrog_steps: number of them in one move.
        inverse_mass: 1/m, event-shaped, about the variance of each coordinate; None is one everywhere.
        jitter: each move's step is e times a number from 1 - jitter to 1 + jitter, drawn before it: moves of one length
            may follow the period of the density and never leave an orbit.

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
        self,
        *,
        step_size: float = 0.1,
        leapfrog_steps: int = 5,
        inverse_mass: Tensor | None = None,
        jitter: float = 0.2,
    ):
        if leapfrog_steps < 1:
            raise InputError(f"leapfrog_steps = {leapfrog_steps} must be at least 1")
        if inverse_mass is not None and not bool((inverse_mass > 0).all()):
            raise InputError("inverse_mass must be positive everywhere")
        if not 0 <= jitter < 1:
            raise InputError(f"jitter = {jitter} must lie in 0 .. 1")
        self.step_size = positive("step_size", step_size)
        self.leapfrog_steps, self.inverse_mass, self.jitter = leapfrog_steps, inverse_mass, jitter

    @property
    def wanted_acceptance(self) -> float:
        """.65 for short trajectories, .8 for those longer than 1, whose errors add up."""
        return 0.8 if self.step_size * self.leapfrog_steps > 1 else 0.65

    def __call__(self, target: Target, point: Point, generator: Generator, step_size: Tensor) -> tuple[Point, Move]:
        inverse_mass = 1.0 if self.inverse_mass is None else self.inverse_mass.to(point.x)
        p = noise_like(point.x, generator) * inverse_mass**-0.5
        u = uniform(step_size.shape, generator, dtype=step_size.dtype, device=step_size.device)
        step_size = step_size * (1 + self.jitter * (2 * u - 1))
        proposal, p_new = leapfrog(target, point, p, step_size, self.leapfrog_steps, inverse_mass)
        kinetic = (0.5 * inverse_mass * (p.square() - p_new.square())).flatten(1).sum(1)
        return metropolis(point, proposal, point.energy - proposal.energy + kinetic, generator)
