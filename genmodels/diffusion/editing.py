"""Sampling that does not begin at pure noise: from a noised picture, or from the latents of one."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.core.errors import InputError
from genmodels.core.random import Generator, at_step, normal
from genmodels.diffusion.path import Path
from genmodels.diffusion.process import alpha_sigma, q_sample, renoise
from genmodels.diffusion.samplers import HeunSampler
from genmodels.diffusion.sampling import Sampler, log_snrs


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


def noised_start(schedule: Path, x0: Tensor, t: float, generator: Generator) -> Tensor:
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
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1, dtype=torch.float64), 0.25)
        >>> x0, times = torch.tensor([[0.7]], dtype=torch.float64), uniform_log_snr(exact.schedule, 100)
        >>> z = invert(exact, x0, times)
        >>> round(float(z), 1)  # as many standard deviations from the mean as x0 is
        1.4
    """
    sampler = sampler or HeunSampler()
    rising = times.detach().to("cpu", torch.float64).flip(0)
    rising = rising[rising > 0]
    alpha, _ = alpha_sigma(denoiser.schedule.log_snr(rising[:1]))
    x = x0 * alpha.to(x0)
    for t, s in zip(rising[:-1], rising[1:], strict=True):
        x, _ = sampler(denoiser, x, t, s, None, None, cond)
    return x


class Inpainting:
    """A sampler around another that draws the unknown part of an event, given the known part.

        x_s = known alpha_s x_known + sigma_s z on the mask, the inner step from t to s elsewhere

    The two parts were drawn apart and need not fit. So each step is repeated `rounds` times, with fresh noise from s
    back up to t in between, and the drawn part settles to the known one (Lugmayr et al., "RePaint", 2022, algorithm 1).
    What is drawn is exact in the limit of many rounds and many steps, with an inner kernel that is exact there
    (`DDPMSampler(variance="beta")`); with few it is biased towards the unconditional distribution.
    At the clean end the known part is returned bit for bit. Start from pure noise; the inner sampler sees no memory,
    because the estimates of the steps before belong to another x.

    Arguments:
        sampler: the inner sampler.
        known: (B, *event), or broadcastable to it.
        mask: bool, True where `known` holds; broadcastable to (B, *event).
        rounds: how often each step is taken.

    Errors: no round at all, a mask that is not boolean.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, DDIMSampler, GaussianDenoiser, sample, uniform_t
        >>> covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
        >>> exact = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(2), covariance)
        >>> known, mask = torch.tensor([2.0, 0.0]), torch.tensor([True, False])
        >>> sampler = Inpainting(DDIMSampler(), known, mask, rounds=3)
        >>> out = sample(exact, (3, 2), uniform_t(exact.schedule, 20), sampler, torch.Generator().manual_seed(0))
        >>> out.x[:, 0], out.evaluations
        (tensor([2., 2., 2.]), 58)
    """

    def __init__(self, sampler: Sampler, known: Tensor, mask: Tensor, *, rounds: int = 10):
        if rounds < 1:
            raise InputError(f"rounds = {rounds}: each step is taken at least once")
        if mask.dtype != torch.bool:
            raise InputError(f"the mask of what is known must be boolean, True where it holds, got {mask.dtype}")
        self.sampler, self.known, self.mask, self.rounds = sampler, known, mask, rounds

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        known = self.known.to(x).expand_as(x)

        def noise() -> Tensor:
            return temperature * normal(x.shape, generator, dtype=x.dtype, device=x.device)

        # Below the last noise level there is nothing left to settle.
        rounds = 1 if bool(s == 0) else self.rounds
        for done in range(rounds):
            drawn, memory = self.sampler(denoiser, x, t, s, None, generator, cond, temperature)
            given = known if bool(s == 0) else q_sample(known, log_snr_s, noise())
            drawn = torch.where(self.mask.to(x.device), given, drawn)
            if done + 1 < rounds:
                x = renoise(drawn, log_snr_s, log_snr_t, noise())
        return drawn, memory
