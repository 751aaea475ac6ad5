"""Sampling of diffusion models by options: sampler, guidance, clipping, inpainting, editing and inversion."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.core.errors import InputError, at_least, one_of
from genmodels.core.random import Generator, KeyedGenerator, at_step, normal
from genmodels.core.samples import SamplingOptions
from genmodels.core.tensors import hide
from genmodels.diffusion.guidance import GuidedDenoiser, ThresholdedDenoiser
from genmodels.diffusion.path import Path, alpha_sigma, q_sample, renoise
from genmodels.diffusion.samplers import SAMPLERS, HeunSampler
from genmodels.diffusion.sampling import SPACINGS, Counted, Sampler, SampleResult, log_snrs, sample


def times_from(times: Tensor, first: float) -> Tensor:
    """The times of a sampler from `first` on.

    Errors: a first time outside (0, 1].

    Example:
        >>> times_from(torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), 0.6).tolist()
        [0.6, 0.5, 0.25, 0.0]
    """
    if not 0 < first <= 1:
        raise InputError(f"strength = {first}: choose a number above 0 and at most 1, which is pure noise")
    times = times.to(torch.float64)
    return torch.cat([times.new_tensor([first]), times[times < first]])


def noised_start(schedule: Path, x0: Tensor, t: float, generator: Generator, temperature: float = 1.0) -> Tensor:
    """A draw of q(x_t | x_0), from which sampling leads to data that resemble x_0 (B, *event).

    The noise is that from which the sample of the same number starts, times the temperature.

    Source: Meng et al., "SDEdit", 2022, section 3.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> noised_start(CosineSchedule(), torch.ones(2, 3), 0.5, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3])
    """
    noise = temperature * normal(x0.shape, at_step(generator, 0), dtype=x0.dtype, device=x0.device)
    return q_sample(x0, schedule.log_snr(torch.tensor(t, dtype=torch.float64)), noise)


@torch.no_grad()
def invert(
    denoiser, x0: Tensor, times: Tensor, *, sampler: Sampler | None = None, cond: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The latents of data, from which a deterministic sampler leads back to them.

    The probability-flow ODE is solved from the last noisy time to the first; more steps give a more exact
    reconstruction. A self-conditioned network sees no estimates, with which the way back would be another one. Source:
    Song, Meng, Ermon 2021, section 5.4.

    Arguments:
        x0: (B, *event).
        times: the decreasing times of the sampler, with the clean end.
        sampler: a sampler without memory or noise; Heun by default.
        cond: the condition under which x0 is encoded and decoded.
        mask: (B, 1, T) of sequences, True = valid; the latents are zero elsewhere.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, HeunSampler, sample, uniform_log_snr
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1, dtype=torch.float64), 0.25)
        >>> x0, times = torch.tensor([[0.7]], dtype=torch.float64), uniform_log_snr(exact.schedule, 100)
        >>> z = invert(exact, x0, times)
        >>> round(float(z), 1)  # as many standard deviations from the mean as x0 is
        1.4
    """
    rising = times.detach().to("cpu", torch.float64).flip(0)
    rising = rising[rising > 0]
    alpha, _ = alpha_sigma(denoiser.schedule.log_snr(rising[:1]))
    return follow(denoiser, x0 * alpha.to(x0), rising, sampler=sampler, cond=cond, mask=mask)


@torch.no_grad()
def follow(
    denoiser, x: Tensor, times: Tensor, *, sampler: Sampler | None = None, cond: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The end of the probability-flow ODE from x at the first of the times, up or down; arguments as of `invert`.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, uniform_log_snr
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1, dtype=torch.float64), 0.25)
        >>> z, times = torch.tensor([[1.4]], dtype=torch.float64), uniform_log_snr(exact.schedule, 100)
        >>> round(float(follow(exact, z, times)), 1)
        0.7
    """
    sampler, masked, x = sampler or HeunSampler(), Counted(denoiser, mask), hide(x, mask)
    masked.self_conditioning = False
    times = times.detach().to("cpu", torch.float64)
    for t, s in zip(times[:-1], times[1:], strict=True):
        x, _ = sampler(masked, x, t, s, None, None, cond)
    return hide(x, mask)


class Inpainting:
    """A sampler around another that draws the unknown part of an event, given the known part.

        x_s = alpha_s x_known + sigma_s z on the mask, the inner step from t to s elsewhere

    To make the two parts consistent, each step is repeated `rounds` times, with fresh noise from s back to t in between
    (Lugmayr et al., "RePaint", 2022, algorithm 1). Samples are exact in the limit of many rounds and steps, with an
    inner kernel that is exact there (`DDPMSampler(variance="beta")`); with few they are biased towards the
    unconditional distribution. At the clean end the known part is returned bit for bit. Start from pure noise; the
    inner sampler gets no memory, because earlier estimates belong to another x.

    Arguments:
        sampler: the inner sampler.
        known: (B, *event), or broadcastable to it.
        mask: bool, True where `known` holds; broadcastable to (B, *event).
        rounds: repetitions of each step.

    Errors: fewer than one round, a mask that is not boolean.

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
        at_least(1, rounds=rounds)
        if mask.dtype != torch.bool:
            raise InputError(f"the mask of what is known must be boolean, True where it holds, got {mask.dtype}")
        self.sampler, self.known, self.mask, self.rounds = sampler, known, mask, rounds

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        known, mask = self.known.to(x).expand_as(x), self.mask.to(x.device).expand_as(x)

        def noise() -> Tensor:
            return temperature * normal(x.shape, generator, dtype=x.dtype, device=x.device)

        rounds = 1 if bool(s == 0) else self.rounds
        for done in range(rounds):
            drawn, memory = self.sampler(denoiser, x, t, s, None, generator, cond, temperature)
            given = known if bool(s == 0) else q_sample(known, log_snr_s, noise())
            drawn = torch.where(mask, given, drawn)
            if done + 1 < rounds:
                x = renoise(drawn, log_snr_s, log_snr_t, noise())
        return drawn, memory


_INPAINTING_STEPS = 50  # each of them is taken several times


class SamplingPlan(NamedTuple):
    """The decreasing times (steps + 1,), the sampler, and a description of both in plain values."""

    times: Tensor
    sampler: Sampler
    made: dict

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.times) - 1


@dataclass(frozen=True)
class DiffusionSampler:
    """Draws samples from the denoiser of a model of T steps, according to `SamplingOptions`.

    Arguments:
        num_steps: T, the most steps of a sampler.
        variance: of the ancestral kernels, a name in VARIANCES, or `learned`.
        clip: threshold of the estimate of the data by default, a name in THRESHOLDS, or None.
        null: the null class of guidance, None for a model without.
        name: the default sampler, a name in SAMPLERS.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact, options = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0), SamplingOptions(steps=5)
        >>> draws = DiffusionSampler(num_steps=1000, variance="beta")
        >>> plan = draws.plan(exact.schedule, options)
        >>> plan.made
        {'sampler': 'dpmpp_2m', 'steps': 5, 'spacing': 'uniform_log_snr'}
        >>> draws(plan, exact, (3, 2), options, KeyedGenerator(0, torch.arange(3), "sample")).evaluations
        5
    """

    num_steps: int
    variance: Literal["beta", "beta_tilde", "learned"]
    clip: Literal["static", "dynamic"] | None = None
    null: int | None = None
    name: str = "dpmpp_2m"

    def plan(self, schedule: Path, options: SamplingOptions) -> SamplingPlan:
        """Sampler, steps and spacing of the options, or the defaults of the sampler.

        Errors: an unknown sampler or spacing, options of another sampler, too many steps.
        """
        name = options.sampler or (self.name if options.known is None else "ddpm")
        one_of("sampler", name, SAMPLERS)
        steps = options.steps
        if steps is None:
            usual = SAMPLERS[name].defaults.steps or self.num_steps
            steps = min(self.num_steps, usual if options.known is None else _INPAINTING_STEPS)
        if not 1 <= steps <= self.num_steps:
            raise InputError(f"steps must lie in 1..{self.num_steps} (T of this model), got {steps}")
        sampler, own = make_sampler(name, steps, self.variance, eta=options.eta, churn=options.churn,
                                   diffusion=options.diffusion)
        times = self.times(schedule, name, steps, options.spacing)
        made = {"sampler": name, "steps": steps, "spacing": options.spacing or SAMPLERS[name].defaults.spacing, **own}
        if options.known is not None:
            made["rounds"] = options.rounds
        if options.edit is not None:
            times = times_from(times, options.strength)
            made |= {"strength": options.strength, "steps_taken": len(times) - 1}
        return SamplingPlan(times, sampler, made)

    def times(self, schedule: Path, sampler: str, steps: int, spacing: str | None = None) -> Tensor:
        """The decreasing times of a sampler, (steps + 1,), ending at the clean end."""
        name = spacing or SAMPLERS[sampler].defaults.spacing
        one_of("spacing", name, SPACINGS)
        return SPACINGS[name](schedule, steps, self.num_steps)

    def threshold(self, options: SamplingOptions) -> str | None:
        """The threshold of the estimate of the data, a name in THRESHOLDS, or None."""
        clip = self.clip if options.clip is None else options.clip
        return {True: "static", False: None}.get(clip, clip)

    def steer(self, denoiser, options: SamplingOptions):
        """The denoiser with the guidance and the threshold of the options."""
        interval = options.guidance_interval
        if options.guidance not in (0, 1):
            between = {} if interval is None else {"interval": tuple(interval)}
            denoiser = GuidedDenoiser(
                denoiser, options.guidance, self.null, rescale=options.guidance_rescale, **between)
        elif options.guidance_rescale or interval is not None:
            raise InputError("guidance_rescale and guidance_interval go with guidance=, a scale that is not 0 or 1")
        threshold = self.threshold(options)
        return denoiser if threshold is None else ThresholdedDenoiser(denoiser, threshold)

    def __call__(
        self, plan: SamplingPlan, denoiser, shape: tuple[int, ...], options: SamplingOptions,
        generator: KeyedGenerator, *, cond: Tensor | None = None, mask: Tensor | None = None,
        known: Tensor | None = None, edit: Tensor | None = None, start: Tensor | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | None = None,
        callback: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> SampleResult:
        """Samples of that shape, in the network's units.

        Arguments:
            plan: of the same options.
            shape: (n, *event).
            generator: keyed over the samples.
            cond: as the denoiser takes it.
            mask: (n, 1, T) of sequences, True = valid.
            known, edit: `options.known` and `options.edit` in the network's units, (1, *event).
            start, dtype, device, callback: see `sample`.
        """
        sampler = plan.sampler
        if known is not None:
            sampler = Inpainting(sampler, known, options.keep.to(known.device), rounds=options.rounds)
        temperature = 1.0 if options.temperature is None else options.temperature
        if edit is not None:
            start = noised_start(denoiser.schedule, edit.expand(shape), float(plan.times[0]), generator, temperature)
        return sample(
            self.steer(denoiser, options), shape, plan.times, sampler, generator, cond=cond, mask=mask, dtype=dtype,
            temperature=temperature, device=device, start=start, callback=callback,
        )


def make_sampler(name: str, steps: int, variance: str, **options: float | str | None) -> tuple[Sampler, dict]:
    """The sampler of a name in SAMPLERS, and the values of its own options.

    Arguments:
        steps: their number.
        variance: of its kernels, if it has that option.
        options: such as `eta` of ddim; None for the sampler's default.

    Errors: InputError for an option of another sampler; ValueError for an unknown name.

    Example:
        >>> sampler, own = make_sampler("ddim", 10, "beta", eta=None, churn=None)
        >>> own
        {'eta': 0.0}
    """
    one_of("sampler", name, SAMPLERS)
    takes = {key: inspect.signature(kind).parameters for key, kind in SAMPLERS.items()}
    for option, value in options.items():
        if value is not None and option not in takes[name]:
            owners = ", ".join(key for key, known in takes.items() if option in known)
            raise InputError(f"{option} is an option of sampler={owners}, not of {name}: leave it out")
    own = dict(SAMPLERS[name].defaults.options) | {key: value for key, value in options.items() if value is not None}
    shared = {key: value for key, value in (("steps", steps), ("variance", variance)) if key in takes[name]}
    return SAMPLERS[name](**shared, **own), own
