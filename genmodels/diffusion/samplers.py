"""DDPM and DDIM: steps that may draw noise on the way. The table of all samplers is here too."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from genmodels.diffusion.multistep import DPMSolverPP2MSampler, UniPCSampler
from genmodels.diffusion.ode_steps import EDMSampler, EulerSampler, HeunSampler
from genmodels.diffusion.process import (
    Variance,
    alpha_sigma,
    expand,
    kernel_variance,
    posterior,
    posterior_variance,
    variance_function,
)
from genmodels.diffusion.sampling import Memory, log_snrs, predict
from genmodels.errors import InputError
from genmodels.random import normal


class DDPMSampler:
    """Ancestral sampling: x_s = c_0 x0 + c_t x_t + sqrt(s2) z (Ho et al. 2020, algorithm 2).

    Arguments:
        variance: s2, a name in VARIANCES, or `learned` where the network gives one.

    Example:
        >>> import torch
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, DDPMSampler(), generator).x.shape
        torch.Size([3, 2])
    """

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
        deviation = kernel_variance(self.variance, prediction.nu)(log_snr_s, log_snr_t).sqrt()
        return mean + _shaped(deviation, x) * _noise(x, generator, temperature), Memory(x0, log_snr_t)


class DDIMSampler:
    """x_s = alpha_s x0 + sqrt(sigma_s^2 - eta^2 w) eps + eta sqrt(w) z, where w = beta_tilde.

    eta = 0 is deterministic, eta = 1 is ancestral sampling with variance beta_tilde. Source: Song, Meng, Ermon,
    "Denoising diffusion implicit models", 2021, equations 12 and 16.

    Arguments:
        eta: share of the ancestral noise, in [0, 1].

    Example:
        >>> import torch
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, DDIMSampler(), generator).evaluations
        5
    """

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


def _noise(x: Tensor, generator, temperature: float) -> Tensor:
    return temperature * normal(x.shape, generator, dtype=x.dtype, device=x.device)


def _shaped(value: Tensor, x: Tensor) -> Tensor:
    """One value for all rows, or one for each scalar as a network learns them, to multiply x."""
    return expand(value, x) if value.dim() == 0 else value.to(x)


SAMPLERS: dict[str, type] = {
    "ddpm": DDPMSampler,
    "ddim": DDIMSampler,
    "euler": EulerSampler,
    "heun": HeunSampler,
    "edm": EDMSampler,
    "dpmpp_2m": DPMSolverPP2MSampler,
    "unipc": UniPCSampler,
}
