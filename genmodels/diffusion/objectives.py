"""Training objectives: the simple mean squared error, the variational bound itself, and the two together.

Each is called as `objective(denoiser, x0, cond, generator, rank, world, mask)` with x0 (B, *event) in the model's units
and mask (B, 1, T) or None: what it hides enters no sum or mean.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from genmodels.core.errors import InputError, one_of
from genmodels.core.random import Generator, normal, uniform
from genmodels.core.tensors import event_mean, event_size
from genmodels.diffusion.bound import (
    bound_terms,
    check_grid,
    diffusion_term,
    prior_term,
    rate_term,
    reconstruction_term,
)
from genmodels.diffusion.decoder import Decoder
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.path import Path, Variance, kernel_variance, q_sample, variance_function
from genmodels.diffusion.weighting import (
    LossAwareTimes,
    TimeSampler,
    TimeSamplerName,
    Weighting,
    WeightingName,
    make_time_sampler,
    make_weighting,
)


@dataclass
class ObjectiveOutput:
    """The loss of a batch.

    `value`: the scalar to minimise. `per_example (B,)`: its contributions. `times (B,)`: where each example was noised.
    `parts`: named (B,) tensors, the unit in the name (`_nats`, or `mse`: mean squared error per scalar). `drawn (B,)`:
    the draws of the time sampler in [0, 1), of which the times are made. `integrand (B,)`: the part of each example
    that depends on its time, unweighted; a loss-aware sampler learns from it.
    """

    value: Tensor
    per_example: Tensor
    times: Tensor
    parts: dict[str, Tensor]
    drawn: Tensor
    integrand: Tensor


class Objective:
    """Base of the objectives.

    Arguments:
        decoder: p(x_0 | x_{t_0}), where the objective has a reconstruction term.
        times: (K+1,) increasing grid of the ELBO; see `ddpm_times`.
        time_sampler: how the times of a batch are drawn, a name in TIME_SAMPLERS or a sampler.
    """

    #: Whether the value is in nats: then it is a bound, and may train a noise schedule.
    in_nats: ClassVar[bool] = False

    def __init__(
        self, decoder: Decoder | None = None, times: Tensor | None = None, *,
        time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        self.decoder, self.times = decoder, times
        self.time_sampler = make_time_sampler(time_sampler, bound=self.in_nats)

    def __call__(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, rank: int = 0, world: int = 1,
        mask: Tensor | None = None,
    ) -> ObjectiveOutput:
        self.check(denoiser)
        u, weight = self.time_sampler(len(x0), generator, rank, world)
        return self.at_times(denoiser, x0, cond, generator, u.to(x0.device), weight.to(x0.device), mask)

    def at_times(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, u: Tensor, weight: Tensor,
        mask: Tensor | None,
    ) -> ObjectiveOutput:
        """The loss at the draws u in [0, 1) of the time sampler, (B,) float64, each counted with its weight."""
        raise NotImplementedError

    def check(self, denoiser) -> None:
        """Raise where this objective cannot train the denoiser."""
        if is_learned(denoiser.schedule) and not self.in_nats:
            raise InputError(
                "a learned schedule needs the ELBO as its objective: the simple loss would seek easy noise levels"
            )

    def observe(self, out: ObjectiveOutput) -> None:
        """In training, give the losses of a batch to a loss-aware time sampler, which keeps them for `learn`."""
        if isinstance(self.time_sampler, LossAwareTimes) and torch.is_grad_enabled():
            self.time_sampler.observe(out.drawn, out.integrand)

    def learn(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Let a loss-aware time sampler learn from these losses; `gather` as in `LossAwareTimes.learn`."""
        if isinstance(self.time_sampler, LossAwareTimes):
            self.time_sampler.learn(gather)

    def need_bound(self) -> None:
        """Raise unless there is a decoder and a grid."""
        if self.decoder is None or self.times is None:
            raise InputError("the ELBO needs a decoder and its grid of times")


def is_learned(schedule: Path) -> bool:
    """Whether the schedule has parameters that are trained."""
    return any(parameter.requires_grad for parameter in schedule.parameters())


def predict(
    denoiser, x: Tensor, log_snr: Tensor, cond: Tensor | None, mask: Tensor | None, generator: Generator,
    copies: int = 1,
) -> Prediction:
    """The prediction in training; with self-conditioning half of the rows see a first estimate from the same x.

    The estimate has no gradient; the other rows see zeros, as in the first step of a sampler (Chen et al. 2023,
    algorithm 1). x holds `copies` of the rows that the generator is keyed for.
    """
    if not denoiser.self_conditioning:
        return denoiser.at_log_snr(x, log_snr, cond, mask)
    with torch.no_grad():
        estimate = denoiser.at_log_snr(x, log_snr, cond, mask).x0
    torch.clear_autocast_cache()  # the second call must not reuse weights cast without a gradient
    shown = uniform((len(x) // copies, copies), generator, device=x.device).T.reshape(-1, *[1] * (x.dim() - 1)) < 0.5
    estimate = torch.where(shown, estimate, 0)
    return denoiser.at_log_snr(x, log_snr, cond, mask, estimate)


def predict_with_first(
    denoiser, x0: Tensor, log_snr: Tensor, first: Tensor, cond: Tensor | None, mask: Tensor | None,
    generator: Generator,
) -> tuple[Tensor, Tensor, Prediction]:
    """One doubled call, at the log-SNRs (B,) and, with other noise, at the log-SNR of t_0 (1,).

    The noise (B, *event) of the first half, the noisy x (B, *event) of the second, and the prediction (2B, *event).
    """
    both = torch.cat([log_snr, first.expand(len(x0))])
    noise = [normal(x0.shape, generator, dtype=x0.dtype, device=x0.device) for _ in range(2)]
    cond, mask = (None if value is None else torch.cat([value, value]) for value in (cond, mask))
    x = q_sample(torch.cat([x0, x0]), both, torch.cat(noise))
    return noise[0], x[len(x0) :], predict(denoiser, x, both, cond, mask, generator, copies=2)


class Simple(Objective):
    """L_simple: the weighted mean over scalars of |target - output|^2, in the units of the network's own output.

    Times are continuous, or the steps i/T where the schedule is a table. It reweights the terms of the ELBO, so it is
    no likelihood and is never shown as bits/dim. Source: Ho et al. 2020, equation 14.

    Arguments:
        weighting: of the noise levels, a name in WEIGHTINGS or a weighting.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1.0)
        >>> out = Simple()(exact, torch.zeros(4, 3), None, torch.Generator().manual_seed(0))
        >>> out.per_example.shape, list(out.parts)
        (torch.Size([4]), ['mse'])
    """

    def __init__(
        self, decoder: Decoder | None = None, times: Tensor | None = None, *,
        weighting: WeightingName | Weighting = "none", time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        super().__init__(decoder, times, time_sampler=time_sampler)
        self.weighting = make_weighting(weighting)

    def at_times(self, denoiser, x0, cond, generator, u, weight, mask) -> ObjectiveOutput:
        t = times_of(denoiser.schedule, u)
        noise = self.noise(x0, cond, generator)
        log_snr = denoiser.schedule.log_snr(t)
        prediction = predict(denoiser, q_sample(x0, log_snr, noise), log_snr, cond, mask, generator)
        mse, weighted = self.errors(denoiser, prediction, x0, noise, t, log_snr, mask)
        per_example = weight.to(mse.dtype) * weighted
        if per_example.shape != t.shape:
            raise InputError(f"weightings and the weights of times give one number for each item, {tuple(t.shape)}, "
                             f"and made losses of shape {tuple(per_example.shape)}")
        return ObjectiveOutput(per_example.mean(), per_example, t, {"mse": mse}, u, weighted.detach())

    def noise(self, x0: Tensor, cond: Tensor | None, generator: Generator) -> Tensor:
        """(B, *event) the noise of each x0."""
        return normal(x0.shape, generator, dtype=x0.dtype, device=x0.device)

    def errors(
        self, denoiser, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor, log_snr: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(B,) mean squared errors of the network's output, plain and weighted."""
        target = denoiser.parameterisation.target(x0, noise, log_snr)
        mse = event_mean((target - prediction.output).square(), mask)
        rate = denoiser.schedule.log_snr_rate(t).detach()
        return mse, self.weighting(denoiser.parameterisation, log_snr, rate).to(mse) * mse


class Vlb(Objective):
    """L_vlb: an unbiased estimate of the negative ELBO in nats, prior + K * diffusion_k + reconstruction with k drawn.

    The network sees the noised batch at t_k and at t_0 in one doubled call. Source: Ho et al. 2020, equation 5.

    Arguments:
        variance: variance of the model's kernels, a name in VARIANCES or `learned`.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Gaussian, GaussianDenoiser, ddpm_times
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1.0)
        >>> out = Vlb(Gaussian(), ddpm_times(10))(exact, torch.zeros(4, 3), None, torch.Generator().manual_seed(0))
        >>> list(out.parts)
        ['prior_nats', 'diffusion_nats', 'reconstruction_nats']
    """

    in_nats = True

    def __init__(
        self, decoder: Decoder | None = None, times: Tensor | None = None, *,
        variance: Literal["beta", "beta_tilde", "learned"] | Variance = "beta",
        time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        super().__init__(decoder, times, time_sampler=time_sampler)
        self.need_bound()
        self.variance = variance_function(variance)

    def at_times(self, denoiser, x0, cond, generator, u, weight, mask) -> ObjectiveOutput:
        times = self.times.to(x0.device, torch.float64)
        log_snr = check_grid(denoiser.schedule, times)
        num_terms = len(times) - 1
        k = step_above(u, num_terms).long()

        _, x, prediction = predict_with_first(denoiser, x0, log_snr[k], log_snr[:1], cond, mask, generator)
        at_k, at_0 = prediction.x0.chunk(2)
        nu_k, nu_0 = (None, None) if prediction.nu is None else prediction.nu.chunk(2)

        variance = kernel_variance(self.variance, nu_k)
        diffusion = diffusion_term(x0, at_k, log_snr[k - 1], log_snr[k], variance, mask)
        variance = kernel_variance(self.variance, nu_0, log_snr[1])
        parts = {
            "prior_nats": prior_term(x0, log_snr[-1], mask),
            "diffusion_nats": weight * num_terms * diffusion,
            "reconstruction_nats": reconstruction_term(x0, x, at_0, log_snr[:1], self.decoder, variance, mask),
        }
        per_example = sum(parts.values())
        return ObjectiveOutput(per_example.mean(), per_example, times[k], parts, u, num_terms * diffusion.detach())


def times_of(schedule: Path, u: Tensor) -> Tensor:
    """The times of draws u in [0, 1): u itself, or the steps i/T where the schedule is a table."""
    return u if schedule.num_steps is None else step_above(u, schedule.num_steps) / schedule.num_steps


def step_above(u: Tensor, num_steps: int) -> Tensor:
    """The step 1..T whose interval ((i-1)/T, i/T] holds u; u = 0 belongs to step 1."""
    return (u * num_steps).ceil().clamp(1, num_steps)


class Hybrid(Simple):
    """L_hybrid = L_simple + share * L_vlb, with the mean detached in L_vlb, so that this trains the variances only.

        L_vlb = (K + 1) L_k in bits/dim,   L_0 the reconstruction, L_1 .. L_K the terms of -ELBO, k drawn

    Both parts are taken at the same t_k of the ELBO's grid.

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
        self, decoder: Decoder | None = None, times: Tensor | None = None, *, share: float = 0.001,
        weighting: WeightingName | Weighting = "none", time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        super().__init__(decoder, times, weighting=weighting, time_sampler=time_sampler)
        self.need_bound()
        if not 0 <= share < math.inf:
            raise InputError(f"share = {share}: choose a finite weight of at least 0")
        self.share = share

    def check(self, denoiser) -> None:
        """Raise where there is no variance to train."""
        super().check(denoiser)
        if not denoiser.learned_variance:
            raise InputError("the hybrid loss trains the variance of the kernels: choose variance = learned")

    def at_times(self, denoiser, x0, cond, generator, u, weight, mask) -> ObjectiveOutput:
        times = self.times.to(x0.device, torch.float64)
        log_snr = check_grid(denoiser.schedule, times)
        k = step_above(u, len(times)).long() - 1
        noise = normal(x0.shape, generator, dtype=x0.dtype, device=x0.device)
        x = q_sample(x0, log_snr[k], noise)
        prediction = predict(denoiser, x, log_snr[k], cond, mask, generator)
        mse, weighted = self.errors(denoiser, prediction, x0, noise, times[k], log_snr[k], mask)
        bits = len(times) * self.bits(prediction, x0, x, k, log_snr, mask)
        integrand = weighted + self.share * bits
        per_example = weight * integrand
        parts = {"mse": mse, "variance_bits_per_dim": weight * bits}
        return ObjectiveOutput(per_example.mean(), per_example, times[k], parts, u, integrand.detach())

    def bits(
        self, prediction: Prediction, x0: Tensor, x: Tensor, k: Tensor, log_snr: Tensor, mask: Tensor | None
    ) -> Tensor:
        """(B,) L_k in bits/dim at the noisy x, with the estimate of x_0 detached."""
        x0_hat = prediction.x0.detach()
        nats = bound_terms(k, x0, x, x0_hat, prediction.nu, log_snr, self.decoder, "learned", mask)
        return nats / (math.log(2) * event_size(x0, mask).clamp(min=1))


class Continuous(Objective):
    """L_infinity: an unbiased estimate of the negative ELBO in continuous time: prior, diffusion at one t, decoder.

    A learned schedule is trained with it, to lower the variance of the estimate: its parameters get the gradient of the
    mean of squared diffusion terms in bits/dim, everything else the gradient of the mean (Kingma et al. 2021, appendix
    I.2). Both come from one backward pass.

    Arguments:
        decoder: p(x_0 | x_{t_0}).
        times: only the first, t_0, matters.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Gaussian, GaussianDenoiser, ddpm_times
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1.0)
        >>> objective = Continuous(Gaussian(), ddpm_times(10))
        >>> list(objective(exact, torch.zeros(4, 3), None, torch.Generator().manual_seed(0)).parts)
        ['prior_nats', 'diffusion_nats', 'reconstruction_nats']
    """

    in_nats = True

    def check(self, denoiser) -> None:
        """Raise where a variance would not be trained."""
        super().check(denoiser)
        self.need_bound()
        if getattr(denoiser, "learned_variance", False):
            raise InputError("in continuous time the variance of the kernels plays no part: choose beta or beta_tilde")

    def at_times(self, denoiser, x0, cond, generator, u, weight, mask) -> ObjectiveOutput:
        schedule, first = denoiser.schedule, float(self.times[0])
        if first and is_learned(schedule):  # the time of a fixed noise level, which training would else make noisier
            finest = torch.tensor(self.decoder.finest_log_snr, dtype=torch.float64)
            first = float(schedule.time_of(finest).detach())
        ends = check_grid(schedule, torch.tensor([first, 1.0], dtype=torch.float64)).to(x0.device).detach()
        t = first + (1 - first) * u
        log_snr, rate = schedule.log_snr(t), schedule.log_snr_rate(t)

        noise, x, prediction = predict_with_first(denoiser, x0, log_snr, ends[:1], cond, mask, generator)
        output, x0_hat = prediction.output[: len(x0)], prediction.x0[len(x0) :]

        integrand = (1 - first) * rate_term(denoiser, output, x0, noise, log_snr, rate, mask)
        diffusion = weight * integrand
        if is_learned(schedule) and diffusion.requires_grad:
            squared = 2 * diffusion.detach() / (math.log(2) * event_size(x0, mask).clamp(min=1))
            for value in (log_snr, rate):  # d(L^2) = 2 L dL
                value.register_hook(lambda gradient: gradient * squared)
        parts = {
            "prior_nats": prior_term(x0, ends[1], mask),
            "diffusion_nats": diffusion,
            "reconstruction_nats": reconstruction_term(
                x0, x, x0_hat, ends[:1], self.decoder, kernel_variance("beta", None), mask
            ),
        }
        per_example = sum(parts.values())
        return ObjectiveOutput(per_example.mean(), per_example, t, parts, u, integrand.detach())


OBJECTIVES: dict[str, type[Objective]] = {"simple": Simple, "vlb": Vlb, "hybrid": Hybrid, "continuous": Continuous}
ObjectiveName = Literal["simple", "vlb", "hybrid", "continuous"]


def default_variance(objective: ObjectiveName, levels: int | None) -> Literal["beta", "beta_tilde", "learned"]:
    """The default variance of the reverse steps: learned by `hybrid`, fixed otherwise.

    Example:
        >>> default_variance("hybrid", 256), default_variance("simple", 256), default_variance("simple", None)
        ('learned', 'beta_tilde', 'beta')
    """
    return "learned" if objective == "hybrid" else "beta" if levels is None else "beta_tilde"


def make_objective(
    name: ObjectiveName, denoiser, decoder: Decoder, times: Tensor, *, variance: str, weighting: WeightingName = "none",
    time_sampler: TimeSamplerName | TimeSampler = "antithetic",
) -> Objective:
    """The objective of a name in OBJECTIVES that trains this denoiser.

    Errors: options that do not go together.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Gaussian, GaussianDenoiser, ddpm_times
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1.0)
        >>> make_objective("vlb", exact, Gaussian(), ddpm_times(10), variance="beta").in_nats
        True
    """
    one_of("variance", variance, ("beta", "beta_tilde", "learned"))
    one_of("objective", name, OBJECTIVES)
    kind = OBJECTIVES[name]
    options = {"weighting": weighting, "variance": variance, "time_sampler": time_sampler}
    known = inspect.signature(kind).parameters
    if weighting != "none" and "weighting" not in known:
        raise InputError(f"weighting={weighting} is for objective=simple and hybrid: {name} has its own")
    if variance == "learned" and name not in ("vlb", "hybrid"):
        raise InputError(f"objective={name} trains no variance: choose hybrid or vlb, or variance=beta")
    objective = kind(decoder, times, **{key: value for key, value in options.items() if key in known})
    objective.check(denoiser)
    return objective
