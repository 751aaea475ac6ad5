"""How a diffusion model draws samples: a sampler by name, guidance, clipping, inpainting and editing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.core.errors import InputError, one_of
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import SamplingOptions
from genmodels.diffusion.editing import Inpainting, noised_start, times_from
from genmodels.diffusion.guidance import GuidedDenoiser, ThresholdedDenoiser
from genmodels.diffusion.path import Path
from genmodels.diffusion.samplers import SAMPLERS
from genmodels.diffusion.sampling import SPACINGS, Sampler, SampleResult, sample

_INPAINTING_STEPS = 50  # each of them is taken several times


class SamplingPlan(NamedTuple):
    """The decreasing times (steps + 1,), the sampler that goes along them, and what to note of both, plain values."""

    times: Tensor
    sampler: Sampler
    made: dict

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return len(self.times) - 1


@dataclass(frozen=True)
class DiffusionSampler:
    """Draws samples from the denoiser of a model of T steps, as `SamplingOptions` say.

    Arguments:
        num_steps: T, the most steps of a sampler.
        variance: of the ancestral kernels, a name in VARIANCES, or `learned`.
        clip: threshold of the estimate of the data by default, a name in THRESHOLDS, or None.
        null: the class that stands for all of them, None for a model without.
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
        """Sampler, steps and spacing that the options name, or the defaults of the sampler.

        Errors: a sampler or a spacing that does not exist, options that are not the sampler's, too many steps.
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
            times, made["strength"] = times_from(times, options.strength), options.strength
        return SamplingPlan(times, sampler, made)

    def times(self, schedule: Path, sampler: str, steps: int, spacing: str | None = None) -> Tensor:
        """The decreasing times of a sampler, (steps + 1,), ending at the clean end."""
        name = spacing or SAMPLERS[sampler].defaults.spacing
        one_of("spacing", name, SPACINGS)
        return SPACINGS[name](schedule, steps, self.num_steps)

    def threshold(self, options: SamplingOptions) -> str | None:
        """How the estimate of the data is kept in its range, a name in THRESHOLDS, or None for not at all."""
        clip = self.clip if options.clip is None else options.clip
        return {True: "static", False: None}.get(clip, clip)

    def steer(self, denoiser, options: SamplingOptions):
        """The denoiser with guidance, and with its estimate kept in range."""
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
        self,
        plan: SamplingPlan,
        denoiser,
        shape: tuple[int, ...],
        options: SamplingOptions,
        generator: KeyedGenerator,
        *,
        cond: Tensor | None = None,
        mask: Tensor | None = None,
        known: Tensor | None = None,
        edit: Tensor | None = None,
        start: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
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
        if edit is not None:
            start = noised_start(denoiser.schedule, edit.expand(shape), float(plan.times[0]), generator)
        return sample(
            self.steer(denoiser, options), shape, plan.times, sampler, generator, cond=cond, mask=mask, dtype=dtype,
            temperature=1.0 if options.temperature is None else options.temperature, device=device, start=start,
            callback=callback,
        )


def make_sampler(name: str, steps: int, variance: str, **options: float | str | None) -> tuple[Sampler, dict]:
    """The sampler of a name in SAMPLERS, and the values of the options that it alone has.

    Arguments:
        steps: how many it is to take.
        variance: of its kernels, where it has a choice.
        options: such as `eta` of ddim; None for the sampler's default.

    Errors: InputError for an option that is not this sampler's; ValueError for a name that does not exist.

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
