"""Likelihood by the probability-flow ODE: deterministic trajectories to noise, whose change of volume is the density.

With lambda the log-SNR, the ODE moves points so that they have the model's marginal distribution at every noise level
(Song et al. 2021, equations 13 and 39, for the time lambda):

    dx / d lambda = 1/2 sigma (sigma x - eps_hat) = -1/2 alpha sigma v_hat
    log p(x at lambda_0) = log N(x at lambda_1; 0, I) + int from lambda_0 to lambda_1 of tr(d field / dx) d lambda
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.errors import InputError, at_least, one_of
from genmodels.core.random import Generator, child, uniform
from genmodels.core.tensors import event_sum, hide, one_each, spread, usable
from genmodels.diffusion.guidance import require_unaltered
from genmodels.diffusion.path import NOISIEST, alpha_sigma, expand
from genmodels.diffusion.solvers import SOLVERS, FixedSteps, SolverError

Field = Callable[[Tensor], Tensor]


def exact_divergence(field: Field, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The trace of the Jacobian by one vector-Jacobian product for each scalar of the event; one column.

    Example:
        >>> exact_divergence(lambda x: x**2 / 2, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[1]
        tensor([[3.],
                [7.]])
    """
    with torch.inference_mode(False), torch.enable_grad():
        mask = usable(mask)
        x = hide(usable(x), mask).detach().requires_grad_()
        y = hide(field(x), mask)
    units = torch.eye(x[0].numel(), dtype=x.dtype, device=x.device)
    used = range(len(units))
    if mask is not None:  # no product for positions that are valid in no example
        used = spread(mask, x).expand_as(x).flatten(1).any(0).nonzero().flatten().tolist()
    total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for i in used:
        total += _weighted_gradient(y, x, units[i].view(x.shape[1:]).expand_as(y)).flatten(1)[:, i]
    return y.detach(), total[:, None]


def hutchinson(field: Field, x: Tensor, probes: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e^T J e for each probe e: unbiased, since E[e e^T] = I; exact if J is diagonal and e of signs.

    Shapes: probes (B, M, *event), the same all along a trajectory; one column a probe.
    Source: Hutchinson 1990; for the likelihood of continuous flows Grathwohl et al. 2019, section 3.1.

    Example:
        >>> x, probes = torch.zeros(1, 2), torch.tensor([[[1.0, -1.0], [1.0, 1.0]]])
        >>> hutchinson(lambda x: torch.stack([x[:, 0] + 3 * x[:, 1], x[:, 1]], 1), x, probes)[1]
        tensor([[-1.,  5.]])
    """
    with torch.inference_mode(False), torch.enable_grad():
        mask = usable(mask)
        x = hide(usable(x), mask).detach().requires_grad_()
        y = hide(field(x), mask)
    probes = probes.to(x.dtype)
    estimates = []
    for probe in probes.unbind(1):
        e = hide(probe, mask)
        estimates.append((_weighted_gradient(y, x, e) * e).flatten(1).sum(1))
    return y.detach(), torch.stack(estimates, 1)


def _weighted_gradient(y: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """weights^T dy/dx, zeros where y does not depend on x."""
    if not y.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(y, x, weights, retain_graph=True, materialize_grads=True)[0]


def rademacher(shape: tuple[int, ...], generator: Generator, *, device: torch.device | None = None) -> Tensor:
    """Signs +-1 with equal probability, float64: the least variance among probes with independent entries.

    Example:
        >>> rademacher((1, 4), torch.Generator().manual_seed(0)).abs()
        tensor([[1., 1., 1., 1.]], dtype=torch.float64)
    """
    u = uniform(shape, generator, dtype=torch.float64, device=device)
    return torch.where(u < 0.5, -1.0, 1.0).to(torch.float64)


#: The exact divergence is the default up to this many scalars.
EXACT_UP_TO = 64
_CLEANEST = 20.0  # log-SNR of clean data, from where trajectories start at most


@dataclass
class OdeLogProb:
    """Log-densities by the probability-flow ODE.

    `log_prob (B, M)`: one column for each probe, a single one for the exact divergence. `latent (B, *event)`: the ends
    of the trajectories. `evaluations (B,)`: calls of the network for each example. All float64, `evaluations` int64.
    """

    log_prob: Tensor
    latent: Tensor
    evaluations: Tensor


class OdeDensity:
    """The model's density of x at one noise level, by the probability-flow ODE from there to pure noise.

    The state is float64 and the network runs in its own precision. Every example has its own steps, so that its value
    depends on the batch through rounding alone; where rounding decides whether a step is accepted, by about the
    tolerance. The base is N(0, I) at the noisiest level of the schedule. The true marginal there differs by the order
    of |mean| e^(lambda(1)/2), averaged over the data by its square, so schedules should go down to -15 or less.

    Arguments:
        divergence: `exact` (a vector-Jacobian product for each scalar), `hutchinson` (one for each probe, unbiased), or
            `auto`: exact for up to 64 scalars.
        probes: number of random probes of `hutchinson`, the same all along a trajectory.
        solver: `rk45` (adaptive, on the device), `scipy` (`solve_ivp`, one example after the other), `heun`, `rk4`.
        tolerance: relative and absolute tolerance of the adaptive solvers.
        steps: number of equal steps of `heun` and `rk4`.
        variable: integration variable: `log_snr`, or the `time` of the path, in which the flow of a straight path is
            nearly straight, so that few steps suffice; fine structure, and schedules given by a table of betas, whose
            rate in time jumps from cell to cell, need `log_snr` or more steps.
        rows: most examples solved at once.

    Shapes: x (B, *event) already noised to `log_snr`, cond (B,) or (B, F), mask (B, 1, T) of the valid scalars.
    Errors: InputError for an unknown divergence or solver, or a denoiser changed for sampling; SolverError where the
    solver fails, with the log-SNR it reached.
    Source: Song et al. 2021, section 4.3 and appendix D.2.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> found = OdeDensity()(exact, torch.zeros(1, 2), 15.0)
        >>> found.log_prob
        tensor([[-1.8379]], dtype=torch.float64)
    """

    def __init__(
        self,
        *,
        divergence: Literal["auto", "exact", "hutchinson"] = "auto",
        probes: int = 1,
        solver: Literal["rk45", "scipy", "heun", "rk4"] = "rk45",
        tolerance: float = 1e-5,
        steps: int = 64,
        variable: Literal["log_snr", "time"] = "log_snr",
        rows: int = 256,
    ):
        one_of("variable", variable, ("log_snr", "time"))
        one_of("divergence", divergence, ("auto", "exact", "hutchinson"))
        one_of("solver", solver, SOLVERS)
        at_least(1, probes=probes, steps=steps, rows=rows)
        self.divergence, self.probes, self.rows, self.variable = divergence, probes, rows, variable
        fixed = issubclass(SOLVERS[solver], FixedSteps)
        self.solver_options = {"steps": steps} if fixed else {"tolerance": tolerance}
        self.solver_name, self.solve = solver, SOLVERS[solver](**self.solver_options)

    def exact(self, dims: int) -> bool:
        """Whether events of this many scalars get the exact divergence."""
        return self.divergence == "exact" or (self.divergence == "auto" and dims <= EXACT_UP_TO)

    def coarser(self) -> OdeDensity:
        """The same with ten times the tolerance, or half the steps; its difference bounds the error of this one."""
        coarse = {name: 10 * value if name == "tolerance" else max(1, value // 2)
                  for name, value in self.solver_options.items()}
        return OdeDensity(divergence=self.divergence, probes=self.probes, solver=self.solver_name, rows=self.rows,
                          variable=self.variable, **coarse)

    def made(self, dims: int) -> dict:
        """How a density of this many scalars is computed, in plain values."""
        trace = {"divergence": "exact"} if self.exact(dims) else {"divergence": "hutchinson", "probes": self.probes}
        return trace | {"solver": self.solver_name, "variable": self.variable} | self.solver_options

    def __call__(
        self, denoiser, x: Tensor, log_snr: float, *, cond: Tensor | None = None, mask: Tensor | None = None,
        generator: Generator | None = None, base: Callable[[Tensor], Tensor] | None = None,
    ) -> OdeLogProb:
        """log p(x) at the noise level `log_snr`.

        Arguments:
            generator: source of the probes; with a keyed one the probes of an example depend on its index alone.
            base: log-density (b, *event) -> (b,) at the noisiest level, in place of the standard normal.
        """
        require_unaltered(denoiser)
        x = hide(x.to(torch.float64), mask)
        probes = None
        if not self.exact(x.shape[1:].numel()):
            if generator is None:
                raise InputError("the probes of divergence = 'hutchinson' need a generator")
            probes = rademacher((len(x), self.probes, *x.shape[1:]), child(generator, "probes"), device=x.device)
        if not len(x):
            columns = 1 if probes is None else self.probes
            return OdeLogProb(x.new_zeros(0, columns), x, torch.zeros(0, dtype=torch.int64, device=x.device))
        found = []
        for start in range(0, len(x), self.rows):
            part = slice(start, start + self.rows)
            inputs = (None if value is None else value[part] for value in (x, cond, mask, probes))
            found.append(self._solve(denoiser, start, log_snr, *inputs, base))
        return OdeLogProb(*(torch.cat(values) for values in zip(*found, strict=True)))

    def _solve(self, denoiser, first: int, log_snr: float, x, cond, mask, probes, base):
        schedule, in_time, dims = denoiser.schedule, self.variable == "time", x[0].numel()

        def derivative(place: Tensor, state: Tensor, rows: Tensor) -> Tensor:
            cond_here, valid, e = (None if v is None else v[rows] for v in (cond, mask, probes))
            level = schedule.log_snr(place).detach() if in_time else place

            def here(x: Tensor) -> Tensor:
                return field(denoiser, x, level, cond_here, valid)

            at = state[:, :dims].reshape(-1, *x.shape[1:])
            slope, trace = exact_divergence(here, at, valid) if e is None else hutchinson(here, at, e, valid)
            found = torch.cat([slope.flatten(1), trace], dim=1)
            return schedule.log_snr_rate(place).detach()[:, None] * found if in_time else found

        volume = x.new_zeros(len(x), 1 if probes is None else probes.shape[1])
        ends = torch.tensor([min(log_snr, _CLEANEST), last_log_snr(schedule)], dtype=torch.float64)
        ends = (schedule.time_of(ends).detach() if in_time else ends).tolist()
        try:
            solution = self.solve(derivative, torch.cat([x.flatten(1), volume], 1), *ends)
        except SolverError as error:
            at = float(schedule.log_snr(torch.tensor(error.at)).detach()) if in_time else error.at
            raise SolverError(first + error.row, at, f"the ODE failed: {error.reason}") from error
        latent = solution.y[:, :dims].reshape(x.shape)
        at_the_end = standard_normal(latent, mask) if base is None else one_each("base", base(latent), latent)
        return at_the_end[:, None] + solution.y[:, dims:], latent, solution.evaluations


def last_log_snr(schedule) -> float:
    """The log-SNR of a schedule at t = 1, -20 at least."""
    return max(schedule.end_points[1], NOISIEST)


def field(
    denoiser, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """dx / d lambda = -1/2 alpha sigma v_hat(x, lambda); x (B, *event), log_snr (B,).

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1), 1.0)
        >>> float(field(exact, torch.ones(1, 1), torch.zeros(1)).abs())  # unit variance stays unit variance
        0.0
    """
    t = denoiser.schedule.time_of(log_snr).clamp(0, 1).to(x.device)
    alpha, sigma = alpha_sigma(log_snr.to(torch.float64))
    return hide(-0.5 * expand(alpha * sigma, x) * denoiser(x, t, cond, mask).v, mask)


def standard_normal(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,) log N(x; 0, I) over the valid scalars."""
    return event_sum(-0.5 * (x.square() + math.log(2 * math.pi)), mask)
