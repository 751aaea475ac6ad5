"""The hybrid objective: the simple loss for the mean of the kernels, the bound for their variance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.diffusion.bound import check_grid
from genmodels.diffusion.decoder import Decoder
from genmodels.diffusion.masks import event_size
from genmodels.diffusion.objectives import ObjectiveOutput, Simple, predict, step_above
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.process import kernel_variance, q_sample
from genmodels.diffusion.terms import diffusion_term, reconstruction_term
from genmodels.diffusion.time_sampling import TimeSampler, TimeSamplerName
from genmodels.diffusion.weighting import Weighting, WeightingName
from genmodels.errors import InputError
from genmodels.random import Generator, normal


class Hybrid(Simple):
    """L_hybrid = L_simple + share * L_vlb, the mean detached in L_vlb, so that it trains the variances only.

        L_vlb = (K + 1) L_k in bits/dim,   L_0 the reconstruction, L_1 .. L_K the terms of the bound, k drawn

    Both parts are taken at the same t_k of the bound's grid.

    Arguments:
        share: weight of L_vlb.
        weighting: of the simple part, a name in WEIGHTINGS or a weighting.

    Errors: a denoiser without learned variance.
    Source: Nichol and Dhariwal 2021, equation 16.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Denoiser, Gaussian, V, ddpm_times
        >>> doubled = lambda x, log_snr, cond: torch.zeros(len(x), 6)
        >>> denoiser = Denoiser(doubled, CosineSchedule(), V(), learned_variance=True)
        >>> objective, generator = Hybrid(Gaussian(), ddpm_times(10)), torch.Generator().manual_seed(0)
        >>> list(objective(denoiser, torch.zeros(4, 3), None, generator).parts)
        ['mse', 'variance_bits_per_dim']
    """

    def __init__(
        self,
        decoder: Decoder | None = None,
        times: Tensor | None = None,
        *,
        share: float = 0.001,
        weighting: WeightingName | Weighting = "none",
        time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        super().__init__(decoder, times, weighting=weighting, time_sampler=time_sampler)
        self.need_bound()
        self.share = share

    def check(self, denoiser) -> None:
        """Raise where there is no variance to train."""
        super().check(denoiser)
        if not denoiser.learned_variance:
            raise InputError("the hybrid loss trains the variance of the kernels: choose variance = learned")

    def at_times(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, u: Tensor, weight: Tensor,
        mask: Tensor | None,
    ) -> ObjectiveOutput:
        times = self.times.to(x0.device, torch.float64)
        log_snr = check_grid(denoiser.schedule, times)
        k = step_above(u, len(times)).long() - 1
        noise = normal(x0.shape, generator, dtype=x0.dtype, device=x0.device)
        x = q_sample(x0, log_snr[k], noise)
        prediction = predict(denoiser, x, log_snr[k], cond, mask, generator)
        mse, weighed = self.errors(denoiser, prediction, x0, noise, times[k], log_snr[k], mask)
        bits = len(times) * self.bits(prediction, x0, x, k, log_snr, mask)
        integrand = weighed + self.share * bits
        per_example = weight * integrand
        parts = {"mse": mse, "variance_bits_per_dim": weight * bits}
        return ObjectiveOutput(per_example.mean(), per_example, times[k], parts, u, integrand.detach())

    def bits(
        self, prediction: Prediction, x0: Tensor, x: Tensor, k: Tensor, log_snr: Tensor, mask: Tensor | None
    ) -> Tensor:
        """(B,) L_k in bits/dim at the noisy x, with the estimate of x_0 detached."""
        x0_hat = prediction.x0.detach()
        nats = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
        for rows, first in ((k > 0, False), (k == 0, True)):
            if not bool(rows.any()):
                continue
            valid = None if mask is None else mask[rows]
            variance = kernel_variance("learned", prediction.nu[rows], log_snr[1])
            if first:
                noisy, at_0 = x[rows], x0_hat[rows]
                terms = reconstruction_term(x0[rows], noisy, at_0, log_snr[:1], self.decoder, variance, valid)
            else:
                s, t = log_snr[k[rows] - 1], log_snr[k[rows]]
                terms = diffusion_term(x0[rows], x0_hat[rows], s, t, variance, valid)
            nats = nats.masked_scatter(rows, terms)
        return nats / (math.log(2) * event_size(x0, mask))
