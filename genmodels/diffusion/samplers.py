"""Samplers of diffusion models and paths, each with its defaults; a new one is a class here and a row in SAMPLERS."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.core.errors import InputError, at_least, one_of
from genmodels.core.random import normal
from genmodels.diffusion.few_steps import ConsistencySampler
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.path import (
    Path,
    Variance,
    alpha_sigma,
    expand,
    kernel_variance,
    posterior,
    posterior_variance,
    renoise,
    variance_function,
)
from genmodels.diffusion.sampling import Defaults, Memory, log_snrs, predict


def update(x: Tensor, d: Tensor, log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
    """(sigma_s/sigma_t) x - alpha_s expm1(-h) d: the ODE solved exactly from t to s for a constant estimate d."""
    (alpha_s, sigma_s), (_, sigma_t) = alpha_sigma(log_snr_s), alpha_sigma(log_snr_t)
    return expand(sigma_s / sigma_t, x) * x - expand(alpha_s * torch.expm1((log_snr_t - log_snr_s) / 2), x) * d


class DPMSolverPP2MSampler:
    """DPM-Solver++ of second order: deterministic, one network call a step (Lu et al. 2022, algorithm 2).

        d = (1 + 1/2r) x0 - (1/2r) x0_prev,   r = h_prev/h;   the first step and the step to the clean end use d = x0

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, DPMSolverPP2MSampler(), generator).evaluations
        5
    """

    defaults = Defaults(20)

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        x0 = d = predict(denoiser, x, t, cond, memory).x0
        if memory is not None and not bool(s == 0):
            weight = expand((log_snr_s - log_snr_t) / (2 * (log_snr_t - memory.log_snr)), x)  # 1/2r
            d = (1 + weight) * x0 - weight * memory.x0
        return update(x, d, log_snr_s, log_snr_t), Memory(x0, log_snr_t)


class UniPCMemory(NamedTuple):
    """Memory of UniPC: the estimate of x_0 at the last log-SNR, x there, and older (estimate, log-SNR) pairs."""

    x0: Tensor
    log_snr: Tensor
    x: Tensor
    older: tuple[tuple[Tensor, Tensor], ...]


class UniPCSampler:
    """UniPC with B_2: a prediction as by DPM-Solver++, corrected by the network's call at the end of the step.

        d = x0_t + sum_k rho_k (x0_k - x0_t)/r_k,   r_k = (lambda_k - lambda_t)/(lambda_s - lambda_t)
        sum_k rho_k r_k^(j-1) = E[r^j],   j = 1 .. number of k,   density of r in [0, 1] proportional to e^((r-1) h)

    so d is the mean of the polynomial through the estimates under the weights of the exact solution; with a single k,
    rho is 1/2. The k are `order` - 1 estimates before t, and in the correction also the estimate at s, which costs no
    further call because the next step needs it. Accuracy is of order `order` + 1. Deterministic; the step to the clean
    end uses d = x0.

    Source: Zhao et al., "UniPC: a unified predictor-corrector framework for fast sampling of diffusion models", 2023,
    algorithms 1 and 2, with data prediction.

    Arguments:
        order: order of the predictor.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, UniPCSampler(), generator).evaluations
        5
    """

    defaults = Defaults(20)

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
    """d of UniPC for the step from t, where the estimate is x0, to s; `known` are other (estimate, log-SNR) pairs."""
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


class EulerSampler:
    """First order: y_s = y_t + (sigma_bar_s - sigma_bar_t) eps, that is x_s = alpha_s x0 + sigma_s eps.

    The same as DDIM with eta = 0.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, EulerSampler(), generator).evaluations
        5
    """

    defaults = Defaults(50)

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        prediction = predict(denoiser, x, t, cond, memory)
        return _euler_step(prediction, x, log_snr_s), Memory(prediction.x0, log_snr_t)


class HeunSampler:
    """Second order: y_s = y_t + (sigma_bar_s - sigma_bar_t) (eps_t + eps_s)/2, eps_s at the end of an Euler step.

    Two network calls a step; an Euler step with one call to the clean end, and where t has no signal. Source: Karras
    et al., "Elucidating the design space of diffusion-based generative models", 2022, algorithm 1.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, HeunSampler(), generator).evaluations
        9
    """

    defaults = Defaults(18, "karras")

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        before = predict(denoiser, x, t, cond, memory)
        memory = Memory(before.x0, log_snr_t)
        ahead = _euler_step(before, x, log_snr_s)
        if bool(torch.isposinf(log_snr_s)) or bool(torch.isneginf(log_snr_t)):
            return ahead, memory
        after = predict(denoiser, ahead, s, cond, memory)
        alpha_s, sigma_s = alpha_sigma(log_snr_s)
        half = (sigma_s - alpha_s * torch.exp(-log_snr_t / 2)) / 2  # alpha_s (sigma_bar_s - sigma_bar_t) / 2
        return ahead + expand(half, x) * (after.eps - before.eps), memory


class EDMSampler(HeunSampler):
    """EDM's stochastic sampler: fresh noise raises the noise level, then a step of Heun follows.

        sigma_bar^ = (1 + g) sigma_bar_t,   y^ = y + sqrt(sigma_bar^^2 - sigma_bar_t^2) S_noise z
        g = min(S_churn/N, sqrt 2 - 1) where S_min <= sigma_bar_t <= S_max, else 0

    churn = 0 is Heun. The noise level never rises above the level at t = 1. Source: Karras et al. 2022, algorithm 2.

    Arguments:
        steps: N, the number of steps.
        churn: S_churn, the noise that all steps add together.
        smallest, largest: S_min and S_max.
        noise: S_noise, a factor on the fresh noise.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, karras, sample
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = karras(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, EDMSampler(5, churn=2.0), generator).evaluations
        9
    """

    defaults = Defaults(40, "karras", {"churn": 10.0})

    def __init__(
        self, steps: int, *, churn: float = 0.0, smallest: float = 0.0, largest: float = math.inf, noise: float = 1.0
    ):
        at_least(1, steps=steps)
        if not (churn >= 0 and 0 <= noise < math.inf):
            raise InputError(f"churn = {churn}, noise = {noise}: give numbers that are at least 0")
        if not smallest <= largest:
            raise InputError(f"smallest = {smallest} and largest = {largest}: give the smaller noise level first")
        self.rise = min(churn / steps, math.sqrt(2) - 1)
        self.smallest, self.largest, self.noise = smallest, largest, noise

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_t = denoiser.schedule.log_snr(t)
        lowest = denoiser.schedule.end_points[1]
        inside = self.smallest <= math.exp(-float(log_snr_t) / 2) <= self.largest
        if self.rise > 0 and inside and float(log_snr_t) > lowest:
            log_snr_t_hat = (log_snr_t - 2 * math.log1p(self.rise)).clamp(min=lowest)
            z = self.noise * _noise(x, generator, temperature)
            x, t = renoise(x, log_snr_t, log_snr_t_hat, z), denoiser.schedule.time_of(log_snr_t_hat).clamp(max=1).cpu()
        return super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)


def _euler_step(prediction: Prediction, x: Tensor, log_snr_s: Tensor) -> Tensor:
    """alpha_s x0 + sigma_s eps, and x0 itself at the clean end, where eps need not exist."""
    alpha_s, sigma_s = alpha_sigma(log_snr_s)
    mean = expand(alpha_s, x) * prediction.x0
    return mean if bool(sigma_s == 0) else mean + expand(sigma_s, x) * prediction.eps


class DDPMSampler:
    """Ancestral sampling: x_s = c_0 x0 + c_t x_t + sqrt(s2) z (Ho et al. 2020, algorithm 2).

    Arguments:
        variance: s2, a name in VARIANCES, or `learned` where the network gives one.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, DDPMSampler(), generator).x.shape
        torch.Size([3, 2])
    """

    defaults = Defaults(None, "integer_trailing")

    def __init__(self, *, variance: Literal["beta", "beta_tilde", "learned"] | Variance = "beta"):
        self.variance = variance_function(variance)

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        prediction = predict(denoiser, x, t, cond, memory)
        x0 = prediction.x0
        c_0, c_t, _ = posterior(log_snr_s, log_snr_t)
        mean = expand(c_0, x) * x0 + expand(c_t, x) * x
        if bool(s == 0):
            return mean, Memory(x0, log_snr_t)
        std = kernel_variance(self.variance, prediction.nu)(log_snr_s, log_snr_t).sqrt()
        std = expand(std, x) if std.dim() == 0 else std.to(x)  # a learned variance is one for each scalar
        return mean + std * _noise(x, generator, temperature), Memory(x0, log_snr_t)


class DDIMSampler:
    """x_s = alpha_s x0 + sqrt(sigma_s^2 - eta^2 w) eps + eta sqrt(w) z, where w = beta_tilde.

    eta = 0 is deterministic, eta = 1 is ancestral sampling with variance beta_tilde. Source: Song, Meng, Ermon,
    "Denoising diffusion implicit models", 2021, equations 12 and 16.

    Arguments:
        eta: share of the ancestral noise, in [0, 1].

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, DDIMSampler(), generator).evaluations
        5
    """

    defaults = Defaults(50, "integer_trailing", {"eta": 0.0})

    def __init__(self, *, eta: float = 0.0):
        if not 0 <= eta <= 1:
            raise InputError(f"eta = {eta}: choose a value from 0 (deterministic) to 1 (ancestral)")
        self.eta = eta

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        prediction = predict(denoiser, x, t, cond, memory)
        alpha_s, sigma_s = alpha_sigma(log_snr_s)
        w = self.eta**2 * posterior_variance(log_snr_s, log_snr_t)
        kept = (sigma_s.square() - w).clamp(min=0).sqrt()
        mean = expand(alpha_s, x) * prediction.x0 + expand(kept, x) * prediction.eps
        memory = Memory(prediction.x0, log_snr_t)
        if self.eta == 0 or bool(s == 0):
            return mean, memory
        return mean + expand(w.sqrt(), x) * _noise(x, generator, temperature), memory


def _require_bounded(path: Path, t: Tensor) -> None:
    """Raise where the velocity of a path is unbounded, as at t = 1 of schedules whose alpha^2 falls to 0 linearly."""
    if max(abs(float(rate)) for rate in path.rates(t)) > 100:
        raise InputError(f"the velocity of this path has no bound at t = {float(t):g}: choose sampler=dpmpp_2m")


class FlowSampler:
    """Heun's method for dx_t/dt = u(x_t, t) with x_t of the path; two network calls a step, one to the clean end.

        x_s = x_t + (s - t) (u_t + u_s)/2,   u_s at the end of an Euler step

    Along the straight path its Euler steps alone are the sampler `euler`. Source: Lipman et al. 2023, section 3.

    Example:
        >>> from genmodels.diffusion import GaussianDenoiser, LinearPath, sample, uniform_t
        >>> exact = GaussianDenoiser(LinearPath(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, FlowSampler(), generator).evaluations
        9
    """

    defaults = Defaults(20, "uniform_t")

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        path = denoiser.schedule
        _require_bounded(path, t)
        before = predict(denoiser, x, t, cond, memory)
        memory = Memory(before.x0, path.log_snr(t))
        if bool(s == 0):
            return before.x0, memory
        x, r_s, step = expand(path.scale(t), x) * x, expand(path.scale(s), x), expand(s - t, x)
        after = predict(denoiser, (x + step * before.velocity) / r_s, s, cond, memory)
        return (x + step * (before.velocity + after.velocity) / 2) / r_s, memory


class FlowMapSampler:
    """The steps of a flow map: x_s = x_t - (t - s) u(x_t, t, s), one network call each, however long.

    With any other denoiser these are Euler steps, equal in time. Source: Geng et al., "Mean flows for
    one-step generative modeling", 2025, algorithm 2.

    Example:
        >>> from genmodels.diffusion import FlowMap, sample, uniform_t
        >>> still = FlowMap(lambda x, times, cond: 0 * x)
        >>> times, generator = uniform_t(still.schedule, 2), torch.Generator().manual_seed(0)
        >>> sample(still, (3, 2), times, FlowMapSampler(), generator).evaluations
        2
    """

    defaults = Defaults(4, "uniform_t")

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        prediction = predict(denoiser, x, t, cond, memory, until=s)
        return _euler_step(prediction, x, log_snr_s), Memory(prediction.x0, log_snr_t)


#: Squared diffusion coefficients w(t) of `sde`, as functions (t, sigma of the path) -> w (Ma et al. 2024, table 2).
DIFFUSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigma": lambda t, sigma: sigma,
    "constant": lambda t, sigma: torch.ones_like(t),
    "decreasing": lambda t, sigma: (1 - torch.cos(math.pi * t)).square() / 4,
    "sine": lambda t, sigma: torch.sin(math.pi * t).square(),
}


class SDESampler:
    """Euler-Maruyama steps of a reverse SDE with the marginals of the path, for any diffusion coefficient.

        dx_t = (u - w(t)/2 score) dt + sqrt(w(t)) dW,   t decreasing,   score = -eps/sigma at x_t of the path

    w = 0 is the flow itself. Source: Ma et al., "SiT", 2024, equations 4 and 8.

    Arguments:
        diffusion: w, a name in DIFFUSIONS or a function (t, sigma) -> w.

    Example:
        >>> from genmodels.diffusion import GaussianDenoiser, LinearPath, sample, uniform_t
        >>> exact = GaussianDenoiser(LinearPath(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(exact.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(exact, (3, 2), times, SDESampler(), generator).evaluations
        5
    """

    defaults = Defaults(250, "uniform_t", {"diffusion": "sigma"})

    def __init__(self, *, diffusion: str | Callable[[Tensor, Tensor], Tensor] = "sigma"):
        one_of("diffusion", diffusion if isinstance(diffusion, str) else "sigma", DIFFUSIONS)
        self.diffusion = diffusion if callable(diffusion) else DIFFUSIONS[diffusion]

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        path = denoiser.schedule
        _require_bounded(path, t)
        found = predict(denoiser, x, t, cond, memory)
        memory = Memory(found.x0, path.log_snr(t))
        if bool(s == 0):
            return found.x0, memory
        _, sigma = path.alpha_sigma(t)
        w, step = self.diffusion(t, sigma), t - s
        drift = expand(step, x) * found.velocity + expand(step * w / (2 * sigma), x) * found.eps
        noise = expand((w * step).sqrt(), x) * _noise(x, generator, temperature)
        return (expand(path.scale(t), x) * x - drift + noise) / expand(path.scale(s), x), memory


def _noise(x: Tensor, generator, temperature: float) -> Tensor:
    return temperature * normal(x.shape, generator, dtype=x.dtype, device=x.device)


SAMPLERS: dict[str, type] = {
    "ddpm": DDPMSampler,
    "ddim": DDIMSampler,
    "euler": EulerSampler,
    "heun": HeunSampler,
    "edm": EDMSampler,
    "dpmpp_2m": DPMSolverPP2MSampler,
    "unipc": UniPCSampler,
    "flow": FlowSampler,
    "sde": SDESampler,
    "flow_map": FlowMapSampler,
    "consistency": ConsistencySampler,
}
