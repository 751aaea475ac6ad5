"""Drawing the unknown part of an event from a model that was trained on whole ones."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.diffusion.process import q_sample, renoise
from genmodels.diffusion.sampling import Sampler, log_snrs
from genmodels.errors import InputError
from genmodels.random import normal


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
        >>> oracle = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(2), covariance)
        >>> known, mask = torch.tensor([2.0, 0.0]), torch.tensor([True, False])
        >>> sampler = Inpainting(DDIMSampler(), known, mask, rounds=3)
        >>> out = sample(oracle, (3, 2), uniform_t(oracle.schedule, 20), sampler, torch.Generator().manual_seed(0))
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
