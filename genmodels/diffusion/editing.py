"""Sampling that does not begin at pure noise: from a noised picture, or from the latents of one."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.diffusion.ode_steps import HeunSampler
from genmodels.diffusion.process import q_sample
from genmodels.diffusion.sampling import Sampler
from genmodels.diffusion.schedule import NoiseSchedule
from genmodels.errors import InputError
from genmodels.random import Generator, at_step, normal


def times_from(times: Tensor, first: float) -> Tensor:
    """The part of a sampler's times that follows `first`, with `first` before it.

    Errors: a first time outside (0, 1].

    Example:
        >>> times_from(torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), 0.6).tolist()
        [0.6, 0.5, 0.25, 0.0]
    """
    if not 0 < first <= 1:
        raise InputError(f"strength = {first}: choose a share of the way to noise, above 0 and at most 1")
    times = times.to(torch.float64)
    return torch.cat([times.new_tensor([first]), times[times < first]])


def noised_start(schedule: NoiseSchedule, x0: Tensor, t: float, generator: Generator) -> Tensor:
    """A draw of q(x_t | x_0), from which a sampler goes on to data that resemble x_0 (B, *event).

    The noise is that which a sample of the same number starts from. Source: Meng et al., "SDEdit", 2022, section 3.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> noised_start(CosineSchedule(), torch.ones(2, 3), 0.5, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3])
    """
    noise = normal(x0.shape, at_step(generator, 0), dtype=x0.dtype, device=x0.device)
    return q_sample(x0, schedule.log_snr(torch.tensor(t, dtype=torch.float64)), noise)


@torch.no_grad()
def invert(
    denoiser, x0: Tensor, times: Tensor, *, sampler: Sampler | None = None, cond: Tensor | None = None
) -> Tensor:
    """The latents of data: the start from which a deterministic sampler would arrive at them.

    The probability-flow ODE is followed from the last noisy time up to the first. The more steps, the nearer the way
    back comes to the data. Source: Song, Meng, Ermon 2021, section 5.4.

    Arguments:
        x0: (B, *event).
        times: the decreasing times of the sampler, with the clean end.
        sampler: a sampler without memory or noise; Heun by default.
        cond: the condition under which x0 is encoded, and is to be decoded.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, HeunSampler, sample, uniform_log_snr
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(1, dtype=torch.float64), 0.25)
        >>> x0, times = torch.tensor([[0.7]], dtype=torch.float64), uniform_log_snr(oracle.schedule, 100)
        >>> z = invert(oracle, x0, times)
        >>> round(float(z), 1)  # as many deviations from the mean as x0 is
        1.4
    """
    sampler = sampler or HeunSampler()
    rising = times.detach().to("cpu", torch.float64).flip(0)
    rising = rising[rising > 0]
    alpha, _ = denoiser.schedule.alpha_sigma(rising[:1])
    x = x0 * alpha.to(x0)
    for t, s in zip(rising[:-1], rising[1:], strict=True):
        x, _ = sampler(denoiser, x, t, s, None, None, cond)
    return x
