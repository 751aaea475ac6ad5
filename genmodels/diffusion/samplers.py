"""From noise to data: each sampler is one pure step from time t to an earlier time s, one loop drives them all.

    step(denoiser, x, t, s, memory, generator, cond, temperature) -> (x, memory)

t and s are 0-dim float64 tensors; s = 0 is the clean end, where every sampler returns its estimate of x_0 without
noise. `memory` is None at the first step, then what the step before handed on. Noise is drawn from `generator` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.process import Variance, alpha_sigma, expand, posterior, posterior_variance, variance_function
from genmodels.diffusion.schedule import NoiseSchedule
from genmodels.errors import InputError
from genmodels.random import Generator, at_step, normal


class Memory(NamedTuple):
    """What a step hands on: its estimate of x_0 and the log-SNR at which it was made."""

    x0: Tensor
    log_snr: Tensor


class Sampler(Protocol):
    """One step of a sampler; see the head of this module."""

    def __call__(
        self,
        denoiser,
        x: Tensor,
        t: Tensor,
        s: Tensor,
        memory: Memory | None,
        generator: Generator,
        cond: Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Memory]: ...


def _log_snrs(schedule: NoiseSchedule, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(lambda_s, lambda_t); s = 0 means the data themselves, whatever noise the schedule leaves there."""
    log_snr_s, log_snr_t = schedule.log_snr(torch.stack([s, t])).unbind()
    return torch.where((s == 0).to(log_snr_s.device), torch.inf, log_snr_s), log_snr_t


def _predict(denoiser, x: Tensor, t: Tensor, cond: Tensor | None) -> Prediction:
    return denoiser(x, t.to(x.device).expand(len(x)), cond)


class DDPMSampler:
    """Ancestral sampling: x_s = c_0 x0 + c_t x_t + sqrt(s2) z (Ho et al. 2020, algorithm 2).

    Arguments:
        variance: s2, a name in VARIANCES.
        clip: clip the estimate of x_0 to [-1, 1].

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, DDPMSampler(), generator).x.shape
        torch.Size([3, 2])
    """

    def __init__(self, *, variance: Literal["beta", "beta_tilde"] | Variance = "beta", clip: bool = False):
        self.variance, self.clip = variance_function(variance), clip

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = _log_snrs(denoiser.schedule, t, s)
        x0 = _predict(denoiser, x, t, cond).x0
        x0 = x0.clamp(-1, 1) if self.clip else x0
        c_0, c_t, _ = posterior(log_snr_s, log_snr_t)
        mean = expand(c_0, x) * x0 + expand(c_t, x) * x
        if bool(s == 0):
            return mean, Memory(x0, log_snr_t)
        z = temperature * normal(x.shape, generator, dtype=x.dtype, device=x.device)
        return mean + expand(self.variance(log_snr_s, log_snr_t).sqrt(), x) * z, Memory(x0, log_snr_t)


class DDIMSampler:
    """x_s = alpha_s x0 + sqrt(sigma_s^2 - eta^2 w) eps + eta sqrt(w) z, where w = beta_tilde.

    eta = 0 is deterministic, eta = 1 is ancestral sampling with variance beta_tilde. Source: Song, Meng, Ermon,
    "Denoising diffusion implicit models", 2021, equations 12 and 16.

    Arguments:
        eta: share of the ancestral noise, in [0, 1].
        clip: clip the estimate of x_0 to [-1, 1]; eps follows from the clipped one.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, DDIMSampler(), generator).evaluations
        5
    """

    def __init__(self, *, eta: float = 0.0, clip: bool = False):
        if not 0 <= eta <= 1:
            raise InputError(f"eta = {eta}: choose a value from 0 (deterministic) to 1 (ancestral)")
        self.eta, self.clip = eta, clip

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = _log_snrs(denoiser.schedule, t, s)
        prediction = _predict(denoiser, x, t, cond)
        x0, alpha_s, sigma_s = prediction.x0, *alpha_sigma(log_snr_s)
        if self.clip:
            x0, (alpha_t, sigma_t) = x0.clamp(-1, 1), alpha_sigma(log_snr_t)
            eps = (x - expand(alpha_t, x) * x0) / expand(sigma_t, x)
        else:
            eps = prediction.eps
        w = self.eta**2 * posterior_variance(log_snr_s, log_snr_t)
        kept = (sigma_s.square() - w).clamp(min=0).sqrt()
        mean = expand(alpha_s, x) * x0 + expand(kept, x) * eps
        if self.eta == 0 or bool(s == 0):
            return mean, Memory(x0, log_snr_t)
        z = temperature * normal(x.shape, generator, dtype=x.dtype, device=x.device)
        return mean + expand(w.sqrt(), x) * z, Memory(x0, log_snr_t)


class DPMSolverPP2MSampler:
    """DPM-Solver++ of second order, multistep: deterministic, one network call a step (Lu et al. 2022, algorithm 2).

        h = (lambda_s - lambda_t)/2,  r = h_prev/h,  d = (1 + 1/2r) x0 - (1/2r) x0_prev,
        x_s = (sigma_s/sigma_t) x_t - alpha_s expm1(-h) d;   the first step and the step to the clean end use d = x0

    Arguments:
        clip: clip the estimate of x_0 to [-1, 1].

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, uniform_t
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, generator = uniform_t(oracle.schedule, 5), torch.Generator().manual_seed(0)
        >>> sample(oracle, (3, 2), times, DPMSolverPP2MSampler(), generator).evaluations
        5
    """

    def __init__(self, *, clip: bool = False):
        self.clip = clip

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = _log_snrs(denoiser.schedule, t, s)
        x0 = _predict(denoiser, x, t, cond).x0
        x0 = d = x0.clamp(-1, 1) if self.clip else x0
        if memory is not None and not bool(s == 0):
            ahead = expand((log_snr_s - log_snr_t) / (2 * (log_snr_t - memory.log_snr)), x)  # 1/2r
            d = (1 + ahead) * x0 - ahead * memory.x0
        (alpha_s, sigma_s), (_, sigma_t) = alpha_sigma(log_snr_s), alpha_sigma(log_snr_t)
        step = -alpha_s * torch.expm1((log_snr_t - log_snr_s) / 2)
        return expand(sigma_s / sigma_t, x) * x + expand(step, x) * d, Memory(x0, log_snr_t)


SAMPLERS: dict[str, type] = {"ddpm": DDPMSampler, "ddim": DDIMSampler, "dpmpp_2m": DPMSolverPP2MSampler}


@dataclass
class SampleResult:
    """Samples x (B, *event) at the last time, and how many times the network was called."""

    x: Tensor
    evaluations: int


class _Counted:
    """A denoiser that counts its calls."""

    def __init__(self, denoiser):
        self.denoiser, self.schedule, self.calls = denoiser, denoiser.schedule, 0

    def __call__(self, *args, **kwargs) -> Prediction:
        self.calls += 1
        return self.denoiser(*args, **kwargs)


@torch.no_grad()
def sample(
    denoiser,
    shape: tuple[int, ...],
    times: Tensor,
    sampler: Sampler,
    generator: Generator,
    *,
    cond: Tensor | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    start: Tensor | None = None,
    callback: Callable[[int, Tensor, Tensor], None] | None = None,
) -> SampleResult:
    """Run a sampler over a decreasing sequence of times, from pure noise.

    With a KeyedGenerator the noise of sample k is a function of (seed, k, step): step 0 is the start, step i + 1 the
    i-th step of the sampler. So a sample is the same alone and in any batch.

    Arguments:
        shape: (B, *event).
        times: (N+1,) decreasing within [0, 1]; a last entry 0 is the clean end. See SPACINGS.
        temperature: factor on all noise, at the start and in the steps.
        dtype: of x and the arithmetic of the steps; the network runs in its own.
        start: (B, *event) at times[0], in place of noise.
        callback: called after each step as callback(number from 0, x, estimate of x_0).

    Errors: times that do not decrease within [0, 1].

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, uniform_log_snr
        >>> from genmodels.random import KeyedGenerator
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, sampler = uniform_log_snr(oracle.schedule, 20), DPMSolverPP2MSampler()
        >>> both = sample(oracle, (2, 2), times, sampler, KeyedGenerator(0, torch.tensor([6, 7]), "sample"))
        >>> alone = sample(oracle, (1, 2), times, sampler, KeyedGenerator(0, torch.tensor([7]), "sample"))
        >>> bool((both.x[1] - alone.x[0]).abs().max() < 1e-5)
        True
    """
    times = times.detach().to("cpu", torch.float64)
    if times.dim() != 1 or len(times) < 2 or bool((times.diff() >= 0).any()) or times[0] > 1 or times[-1] < 0:
        raise InputError("the times of a sampler must decrease within [0, 1], at least two of them")
    counted = _Counted(denoiser)
    if start is None:
        x = temperature * normal(shape, at_step(generator, 0), dtype=dtype, device=device)
    else:
        x = start.to(device=device, dtype=dtype)
    memory = None
    for i in range(len(times) - 1):
        x, memory = sampler(counted, x, times[i], times[i + 1], memory, at_step(generator, i + 1), cond, temperature)
        if callback is not None:
            callback(i, x, memory.x0)
    return SampleResult(x, counted.calls)
