"""Multistep solvers of the probability-flow ODE, exact where the estimate of x_0 does not change.

    x_s = (sigma_s/sigma_t) x_t - alpha_s expm1(-h) d,   h = (lambda_s - lambda_t)/2                (one update)

d stands for the estimate of x_0 between t and s; the solvers differ in how they guess it from the estimates at hand.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.diffusion.process import alpha_sigma, expand
from genmodels.diffusion.sampling import Memory, log_snrs, predict
from genmodels.errors import InputError


def update(x: Tensor, d: Tensor, log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
    """(sigma_s/sigma_t) x - alpha_s expm1(-h) d: the ODE solved exactly from t to s for a constant estimate d."""
    (alpha_s, sigma_s), (_, sigma_t) = alpha_sigma(log_snr_s), alpha_sigma(log_snr_t)
    return expand(sigma_s / sigma_t, x) * x - expand(alpha_s * torch.expm1((log_snr_t - log_snr_s) / 2), x) * d


class DPMSolverPP2MSampler:
    """DPM-Solver++ of second order: deterministic, one network call a step (Lu et al. 2022, algorithm 2).

        d = (1 + 1/2r) x0 - (1/2r) x0_prev,   r = h_prev/h;   the first step and the step to the clean end use d = x0

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, DPMSolverPP2MSampler(), generator).evaluations
        5
    """

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        x0 = d = predict(denoiser, x, t, cond, memory).x0
        if memory is not None and not bool(s == 0):
            ahead = expand((log_snr_s - log_snr_t) / (2 * (log_snr_t - memory.log_snr)), x)  # 1/2r
            d = (1 + ahead) * x0 - ahead * memory.x0
        return update(x, d, log_snr_s, log_snr_t), Memory(x0, log_snr_t)


class UniPCMemory(NamedTuple):
    """What UniPC hands on: the estimate of x_0 at the last log-SNR, x there, and older (estimate, log-SNR) pairs."""

    x0: Tensor
    log_snr: Tensor
    x: Tensor
    older: tuple[tuple[Tensor, Tensor], ...]


class UniPCSampler:
    """UniPC with B_2: each step is predicted as DPM-Solver++ does, then corrected by the network's call at its end.

        d = x0_t + sum_k rho_k (x0_k - x0_t)/r_k,   r_k = (lambda_k - lambda_t)/(lambda_s - lambda_t)
        sum_k rho_k r_k^(j-1) = E[r^j],   j = 1 .. number of k,   density of r in [0, 1] proportional to e^((r-1) h)

    so d is the mean, under the weights of the exact solution, of the polynomial through the estimates; with a single
    k, rho is 1/2. The k are `order` - 1 estimates before t, and in the correction the one at s as well: the correction
    costs no call, because that estimate is what the next step needs. Accuracy is of order `order` + 1. Deterministic;
    the step to the clean end uses d = x0. Source: Zhao et al., "UniPC: a unified predictor-corrector framework for fast
    sampling of diffusion models", 2023, algorithms 1 and 2, with data prediction.

    Arguments:
        order: that of the predictor.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, UniPCSampler(), generator).evaluations
        5
    """

    def __init__(self, *, order: Literal[1, 2, 3] = 2):
        if order not in (1, 2, 3):
            raise InputError(f"order = {order}: UniPC predicts with order 1, 2 or 3")
        self.order = order

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        x0, older = predict(denoiser, x, t, cond, memory).x0, ()
        if memory is not None and bool(torch.isfinite(memory.log_snr)):  # SNR 0 is infinitely far away
            d = _mean_estimate(memory.x0, log_snr_t, memory.log_snr, (*memory.older, (x0, log_snr_t)))
            x = update(memory.x, d, log_snr_t, memory.log_snr)
            older = ((memory.x0, memory.log_snr), *memory.older)[: self.order - 1]
        d = x0 if bool(s == 0) else _mean_estimate(x0, log_snr_s, log_snr_t, older)
        return update(x, d, log_snr_s, log_snr_t), UniPCMemory(x0, log_snr_t, x, older)


def _mean_estimate(
    x0: Tensor, log_snr_s: Tensor, log_snr_t: Tensor, known: tuple[tuple[Tensor, Tensor], ...]
) -> Tensor:
    """d of UniPC for the step from t, where the estimate is x0, to s; `known` are (estimate, log-SNR) elsewhere."""
    ratios = [float((log_snr - log_snr_t) / (log_snr_s - log_snr_t)) for _, log_snr in known]
    if not ratios:
        return x0
    if len(ratios) == 1:
        shares = [0.5]
    else:
        powers = torch.tensor([[r**j for r in ratios] for j in range(len(ratios))], dtype=torch.float64)
        moments = _moments(float(log_snr_s - log_snr_t) / 2, len(ratios))
        shares = torch.linalg.solve(powers, torch.tensor(moments, dtype=torch.float64)).tolist()
    return x0 + sum(rho / r * (estimate - x0) for rho, r, (estimate, _) in zip(shares, ratios, known, strict=True))


def _moments(h: float, count: int) -> list[float]:
    """E[r^j] for j = 1 .. count, r in [0, 1] with density proportional to e^((r-1) h), h > 0."""
    if h < 1:  # the recurrence below would cancel: integrate the series of the exponential
        integrals = [
            sum((-h) ** k * math.factorial(j) / math.factorial(j + k + 1) for k in range(20)) for j in range(count + 1)
        ]
        return [integral / integrals[0] for integral in integrals[1:]]
    moments = [1.0]
    for j in range(1, count + 1):
        moments.append(-1 / math.expm1(-h) - j * moments[-1] / h)
    return moments[1:]
