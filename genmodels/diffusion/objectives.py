"""Training objectives: the simple mean squared error and the variational bound itself.

Each is called as `objective(denoiser, x0, cond, generator, rank, world)` with x0 (B, *event) in the model's units, and
every objective is built from the same two things: the decoder and the grid of times of the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from genmodels.diffusion.bound import check_grid
from genmodels.diffusion.decoder import Decoder
from genmodels.diffusion.process import Variance, q_sample, variance_function
from genmodels.diffusion.terms import diffusion_term, prior_term, reconstruction_term
from genmodels.diffusion.time_sampling import TIME_SAMPLERS
from genmodels.errors import InputError
from genmodels.random import Generator, normal


@dataclass
class ObjectiveOutput:
    """What an objective returns.

    `value`: the scalar to minimise. `per_example (B,)`: its contributions. `times (B,)`: where each example was noised.
    `parts`: named (B,) tensors, the unit in the name (`_nats`, or `mse`: mean squared error per scalar).
    """

    value: Tensor
    per_example: Tensor
    times: Tensor
    parts: dict[str, Tensor]


class Objective:
    """Base of the objectives.

    Arguments:
        decoder: p(x_0 | x_{t_0}), where the objective has a reconstruction term.
        times: (K+1,) increasing grid of the bound; see `ddpm_times` and `vdm_times`.
        time_sampler: how the times of a batch are drawn.
    """

    def __init__(
        self,
        decoder: Decoder | None = None,
        times: Tensor | None = None,
        *,
        time_sampler: Literal["uniform", "stratified", "antithetic"] = "antithetic",
    ):
        if time_sampler not in TIME_SAMPLERS:
            raise InputError(f"time_sampler = {time_sampler!r}: choose one of {', '.join(TIME_SAMPLERS)}")
        self.decoder, self.times, self.time_sampler = decoder, times, TIME_SAMPLERS[time_sampler]

    def __call__(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, rank: int = 0, world: int = 1
    ) -> ObjectiveOutput:
        raise NotImplementedError


class Simple(Objective):
    """L_simple: the mean over scalars of |target - output|^2, in the units of the network's own output.

    Times are continuous, or the steps i/T where the schedule is a table. This weighs the terms of the bound anew: it is
    no likelihood and is never shown as bits/dim. Source: Ho et al. 2020, equation 14.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1.0)
        >>> out = Simple()(oracle, torch.zeros(4, 3), None, torch.Generator().manual_seed(0))
        >>> out.per_example.shape, list(out.parts)
        (torch.Size([4]), ['mse'])
    """

    def __call__(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, rank: int = 0, world: int = 1
    ) -> ObjectiveOutput:
        t, weight = (v.to(x0.device) for v in self.time_sampler(len(x0), generator, rank, world))
        if (num_steps := denoiser.schedule.num_steps) is not None:
            t = _step_above(t, num_steps) / num_steps
        noise = normal(x0.shape, generator, dtype=x0.dtype, device=x0.device)
        log_snr = denoiser.schedule.log_snr(t)
        prediction = denoiser(q_sample(x0, log_snr, noise), t, cond)
        target = denoiser.parameterisation.target(x0, noise, log_snr)
        mse = (target - prediction.output).square().flatten(1).mean(1)
        per_example = weight.to(mse.dtype) * mse
        return ObjectiveOutput(per_example.mean(), per_example, t, {"mse": mse})


class Vlb(Objective):
    """L_vlb: an unbiased estimate of the bound in nats, prior + K * diffusion_k + reconstruction with k drawn.

    The network sees the noised batch at t_k and at t_0 in one doubled call. Source: Ho et al. 2020, equation 5.

    Arguments:
        variance: variance of the model's kernels, a name in VARIANCES.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Gaussian, GaussianDenoiser, ddpm_times
        >>> oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1.0)
        >>> out = Vlb(Gaussian(), ddpm_times(10))(oracle, torch.zeros(4, 3), None, torch.Generator().manual_seed(0))
        >>> list(out.parts)
        ['prior_nats', 'diffusion_nats', 'reconstruction_nats']
    """

    def __init__(
        self,
        decoder: Decoder | None = None,
        times: Tensor | None = None,
        *,
        variance: Literal["beta", "beta_tilde"] | Variance = "beta",
        time_sampler: Literal["uniform", "stratified", "antithetic"] = "antithetic",
    ):
        super().__init__(decoder, times, time_sampler=time_sampler)
        if decoder is None or times is None:
            raise InputError("the bound needs a decoder and its grid of times")
        self.variance = variance_function(variance)

    def __call__(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, rank: int = 0, world: int = 1
    ) -> ObjectiveOutput:
        times = self.times.to(x0.device, torch.float64)
        log_snr = check_grid(denoiser.schedule, times)
        num_terms = len(times) - 1
        u, weight = (v.to(x0.device) for v in self.time_sampler(len(x0), generator, rank, world))
        k = _step_above(u, num_terms).long()

        t = torch.cat([times[k], times[:1].expand(len(x0))])
        noise = [normal(x0.shape, generator, dtype=x0.dtype, device=x0.device) for _ in range(2)]
        x = q_sample(torch.cat([x0, x0]), denoiser.schedule.log_snr(t), torch.cat(noise))
        at_k, at_0 = denoiser(x, t, None if cond is None else torch.cat([cond, cond])).x0.chunk(2)

        diffusion = diffusion_term(x0, at_k, log_snr[k - 1], log_snr[k], self.variance)
        parts = {
            "prior_nats": prior_term(x0, log_snr[-1]),
            "diffusion_nats": weight * num_terms * diffusion,
            "reconstruction_nats": reconstruction_term(x0, at_0, log_snr[:1], self.decoder, self.variance),
        }
        per_example = sum(parts.values())
        return ObjectiveOutput(per_example.mean(), per_example, times[k], parts)


def _step_above(u: Tensor, num_steps: int) -> Tensor:
    """The step 1..T whose interval ((i-1)/T, i/T] holds u; u = 0 belongs to step 1."""
    return (u * num_steps).ceil().clamp(1, num_steps)


OBJECTIVES: dict[str, type[Objective]] = {"simple": Simple, "vlb": Vlb}
