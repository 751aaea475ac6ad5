"""Steps along the probability-flow ODE, in the view where it is simplest, and EDM's return to higher noise before them.

    y = x/alpha,   sigma_bar = sigma/alpha,   dy/d sigma_bar = eps(x, t)            (Karras et al. 2022, equation 1)

A step from t to s in y is written in x = alpha y with the estimates themselves, y_t = x0 + sigma_bar_t eps, so that it
exists where the SNR is 0 and y does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.process import alpha_sigma, expand, renoise
from genmodels.diffusion.sampling import Memory, log_snrs, predict
from genmodels.errors import InputError
from genmodels.random import normal


class EulerSampler:
    """First order: y_s = y_t + (sigma_bar_s - sigma_bar_t) eps, that is x_s = alpha_s x0 + sigma_s eps.

    The same as DDIM with eta = 0.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, EulerSampler(), generator).evaluations
        5
    """

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        prediction = predict(denoiser, x, t, cond, memory)
        return _straight(prediction, x, log_snr_s), Memory(prediction.x0, log_snr_t)


class HeunSampler:
    """Second order: y_s = y_t + (sigma_bar_s - sigma_bar_t) (eps_t + eps_s)/2, eps_s at the end of an Euler step.

    Two network calls a step; an Euler step with one call to the clean end, and where t has no signal. Source: Karras
    et al., "Elucidating the design space of diffusion-based generative models", 2022, algorithm 1.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, HeunSampler(), generator).evaluations
        9
    """

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        before = predict(denoiser, x, t, cond, memory)
        memory = Memory(before.x0, log_snr_t)
        ahead = _straight(before, x, log_snr_s)
        if bool(torch.isposinf(log_snr_s)) or bool(torch.isneginf(log_snr_t)):
            return ahead, memory
        after = predict(denoiser, ahead, s, cond, memory)
        alpha_s, sigma_s = alpha_sigma(log_snr_s)
        half = (sigma_s - alpha_s * torch.exp(-log_snr_t / 2)) / 2  # alpha_s (sigma_bar_s - sigma_bar_t) / 2
        return ahead + expand(half, x) * (after.eps - before.eps), memory


class EDMSampler(HeunSampler):
    """EDM's stochastic sampler: back to a higher noise level by fresh noise, then a step of Heun from there.

        sigma_bar^ = (1 + g) sigma_bar_t,   y^ = y + sqrt(sigma_bar^^2 - sigma_bar_t^2) S_noise z
        g = min(S_churn/N, sqrt 2 - 1) where S_min <= sigma_bar_t <= S_max, else 0

    churn = 0 is Heun. The level never rises above that of t = 1. Source: Karras et al. 2022, algorithm 2.

    Arguments:
        steps: N, the number of steps.
        churn: S_churn, how much noise all steps together add.
        smallest, largest: S_min and S_max.
        noise: S_noise, a factor on the fresh noise.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, karras, sample
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = karras(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, EDMSampler(5, churn=2.0), generator).evaluations
        9
    """

    def __init__(
        self, steps: int, *, churn: float = 0.0, smallest: float = 0.0, largest: float = math.inf, noise: float = 1.0
    ):
        if steps < 1 or churn < 0 or noise < 0:
            raise InputError(f"steps = {steps}, churn = {churn}, noise = {noise}: give steps >= 1, the others >= 0")
        self.rise = min(churn / steps, math.sqrt(2) - 1)
        self.smallest, self.largest, self.noise = smallest, largest, noise

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_t = denoiser.schedule.log_snr(t)
        lowest = denoiser.schedule.end_points[1]
        inside = self.smallest <= math.exp(-float(log_snr_t) / 2) <= self.largest
        if self.rise > 0 and inside and float(log_snr_t) > lowest:
            log_snr_t_hat = (log_snr_t - 2 * math.log1p(self.rise)).clamp(min=lowest)
            z = temperature * self.noise * normal(x.shape, generator, dtype=x.dtype, device=x.device)
            x, t = renoise(x, log_snr_t, log_snr_t_hat, z), denoiser.schedule.time_of(log_snr_t_hat).clamp(max=1).cpu()
        return super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)


def _straight(prediction: Prediction, x: Tensor, log_snr_s: Tensor) -> Tensor:
    """alpha_s x0 + sigma_s eps, and x0 itself at the clean end, where eps need not exist."""
    alpha_s, sigma_s = alpha_sigma(log_snr_s)
    if bool(sigma_s == 0):
        return expand(alpha_s, x) * prediction.x0
    return expand(alpha_s, x) * prediction.x0 + expand(sigma_s, x) * prediction.eps
