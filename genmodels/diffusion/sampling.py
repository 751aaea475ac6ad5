"""Sampling: a sampler is one pure step from time t to an earlier time s, and one loop runs all of them.

    step(denoiser, x, t, s, memory, generator, cond, temperature) -> (x, memory)

t and s are 0-dim float64 tensors; s = 0 is the clean end, where every sampler returns its estimate of x_0 without
noise. `memory` is None at the first step, then that returned by the step before. Noise comes from `generator` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from genmodels.core.errors import InputError, at_least, check_temperature
from genmodels.core.random import Generator, at_step, normal
from genmodels.core.tensors import hide
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.path import Path
from genmodels.diffusion.schedule import step_to_time


class Memory(NamedTuple):
    """What a step passes to the next: its estimate of x_0 and the log-SNR of that estimate."""

    x0: Tensor
    log_snr: Tensor


@dataclass(frozen=True)
class Defaults:
    """Defaults of a sampler: its number of steps (None for all T), their spacing, and its own options."""

    steps: int | None = None
    spacing: str = "uniform_log_snr"
    options: dict[str, float | str] = field(default_factory=dict)


class Sampler(Protocol):
    """One step of a sampler, see the docstring of this module; its memory has the fields of `Memory` at least."""

    def __call__(
        self, denoiser, x: Tensor, t: Tensor, s: Tensor, memory: Memory | None, generator: Generator,
        cond: Tensor | None = None, temperature: float = 1.0,
    ) -> tuple[Tensor, Memory]: ...


def log_snrs(schedule: Path, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(lambda_s, lambda_t), where s = 0 is clean data, even if the schedule has noise there."""
    log_snr_s, log_snr_t = schedule.log_snr(torch.stack([s, t])).unbind()
    return torch.where((s == 0).to(log_snr_s.device), torch.inf, log_snr_s), log_snr_t


def predict(
    denoiser, x: Tensor, t: Tensor, cond: Tensor | None, memory: Memory | None = None, until: Tensor | None = None
) -> Prediction:
    """The prediction at one time for all rows.

    A self-conditioned network also gets the last estimate of x_0, a flow map the end of its step.
    """
    given = {}
    if memory is not None and getattr(denoiser, "self_conditioning", False):
        given["estimate"] = memory.x0
    if until is not None and getattr(denoiser, "takes_until", False):
        given["until"] = until.to(x.device).expand(len(x))
    return denoiser(x, t.to(x.device).expand(len(x)), cond, **given)


@dataclass
class SampleResult:
    """Samples x (B, *event) at the last time, and how many times the network was called."""

    x: Tensor
    evaluations: int


class Counted:
    """A denoiser that counts its calls and passes the mask of the sequences to each."""

    def __init__(self, denoiser, mask: Tensor | None):
        self.denoiser, self.schedule, self.calls = denoiser, denoiser.schedule, 0
        self.self_conditioning = getattr(denoiser, "self_conditioning", False)
        self.takes_until = getattr(denoiser, "takes_until", False)
        self.extra = () if mask is None else (mask,)

    def __call__(self, x: Tensor, t: Tensor, cond: Tensor | None = None, **given: Tensor) -> Prediction:
        self.calls += 1
        return self.denoiser(x, t, cond, *self.extra, **given)


@torch.no_grad()
def sample(
    denoiser,
    shape: tuple[int, ...],
    times: Tensor,
    sampler: Sampler,
    generator: Generator,
    *,
    cond: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    start: Tensor | None = None,
    callback: Callable[[int, Tensor, Tensor], None] | None = None,
) -> SampleResult:
    """Run a sampler over a decreasing sequence of times, from pure noise.

    With a KeyedGenerator the noise of sample k is a function of (seed, k, step), where step 0 is the start and step
    i + 1 the i-th step of the sampler; so a sample is the same alone and in any batch.

    Arguments:
        shape: (B, *event).
        times: (N+1,) decreasing within [0, 1]; a last entry 0 is the clean end. See SPACINGS.
        mask: (B, 1, T) of sequences, True = valid; the result is zero elsewhere.
        temperature: factor on all noise, at the start and in the steps.
        dtype: of x and the arithmetic of the steps, float32 or float64; the network has its own.
        start: (B, *event) at times[0], in place of noise.
        callback: called after each step as callback(number from 0, x, estimate of x_0).

    Errors: times that do not decrease within [0, 1]; a temperature below 0 or not finite; another dtype.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, DPMSolverPP2MSampler, GaussianDenoiser, uniform_log_snr
        >>> from genmodels.core.random import KeyedGenerator
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> times, sampler = uniform_log_snr(exact.schedule, 20), DPMSolverPP2MSampler()
        >>> both = sample(exact, (2, 2), times, sampler, KeyedGenerator(0, torch.tensor([6, 7]), "sample"))
        >>> alone = sample(exact, (1, 2), times, sampler, KeyedGenerator(0, torch.tensor([7]), "sample"))
        >>> bool((both.x[1] - alone.x[0]).abs().max() < 1e-5)
        True
    """
    times = times.detach().to("cpu", torch.float64)
    inside = times.dim() == 1 and len(times) > 1 and bool(((times >= 0) & (times <= 1)).all())  # and no NaN
    if not inside or bool((times.diff() >= 0).any()):
        raise InputError("the times of a sampler must decrease within [0, 1], at least two of them")
    check_temperature(temperature)
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype is torch.float32 or torch.float64, got {dtype}")
    counted = Counted(denoiser, mask)
    if start is None:
        x = temperature * normal(shape, at_step(generator, 0), dtype=dtype, device=device)
    else:
        x = start.to(device=device, dtype=dtype)
        if x.shape != torch.Size(shape):
            raise InputError(f"start must have the shape of the samples, {tuple(shape)}, got {tuple(x.shape)}")
    x, memory = hide(x, mask), None
    for i in range(len(times) - 1):
        x, memory = sampler(counted, x, times[i], times[i + 1], memory, at_step(generator, i + 1), cond, temperature)
        if x.shape != torch.Size(shape):
            raise InputError(f"a step turned samples {tuple(shape)} into {tuple(x.shape)}: the denoiser or the sampler "
                             "does not keep the shape of x")
        if callback is not None:
            callback(i, x, memory.x0)
    return SampleResult(hide(x, mask), counted.calls)


#: The last noisy time of spacings in log-SNR without T.
LAST_TIME = 1e-3


def uniform_t(schedule: Path, steps: int, num_steps: int | None = None) -> Tensor:
    """Equal steps of time from 1 to 0.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> uniform_t(CosineSchedule(), 4).tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    _check(schedule, steps, num_steps)
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


def uniform_log_snr(schedule: Path, steps: int, num_steps: int | None = None) -> Tensor:
    """Equal steps of log-SNR from t = 1 to the first step 1/T (or 0.001), then the clean end.

    Example:
        >>> from genmodels.diffusion import LinearLogSnrSchedule
        >>> [round(t, 6) for t in uniform_log_snr(LinearLogSnrSchedule(), 3, 1000).tolist()]
        [1.0, 0.5005, 0.001, 0.0]
    """
    total = _check(schedule, steps, num_steps)
    last = 1 / total if total else LAST_TIME
    if steps == 1:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)
    # Where the SNR at t = 1 is 0 the spacing starts just before, but the first time is 1.
    first = 1.0 if math.isfinite(schedule.end_points[1]) else 1 - last
    low, high = schedule.log_snr(torch.tensor([first, last], dtype=torch.float64)).tolist()
    times = schedule.time_of(torch.linspace(low, high, steps, dtype=torch.float64)).cpu()
    times[0] = 1.0
    return _to_clean(times)


def karras_sigmas(steps: int, sigma_min: float, sigma_max: float, rho: float = 7.0) -> Tensor:
    """(steps,) noise levels sigma/alpha, equally spaced in their rho-th root (Karras et al. 2022, equation 5).

    Example:
        >>> karras_sigmas(5, 0.002, 80.0)
        tensor([8.0000e+01, 1.7528e+01, 2.5152e+00, 1.6975e-01, 2.0000e-03],
               dtype=torch.float64)
    """
    roots = torch.linspace(sigma_max ** (1 / rho), sigma_min ** (1 / rho), steps, dtype=torch.float64)
    return roots**rho


def karras(
    schedule: Path, steps: int, num_steps: int | None = None, *, sigma_min: float = 0.002, sigma_max: float = 80.0,
    rho: float = 7.0,
) -> Tensor:
    """EDM's noise levels, narrowed to those of the schedule between the first step 1/T (or 0.001) and t = 1.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> karras(CosineSchedule(), 3).shape
        torch.Size([4])
    """
    total = _check(schedule, steps, num_steps)
    ends = torch.tensor([1 / total if total else LAST_TIME, 1.0], dtype=torch.float64)
    lowest, highest = schedule.sigma_bar(ends).tolist()
    sigmas = karras_sigmas(steps, max(sigma_min, lowest), min(sigma_max, highest), rho)
    return _to_clean(schedule.time_of(-2 * torch.log(sigmas)).cpu())


def integer_trailing(schedule: Path, steps: int, num_steps: int | None = None) -> Tensor:
    """Steps T, T - T/N, T - 2T/N, ... rounded, then 0: starts at pure noise (Lin et al. 2023, table 2).

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> integer_trailing(CosineSchedule(), 4, 10).tolist()
        [1.0, 0.8, 0.5, 0.2, 0.0]
    """
    total = _total(schedule, steps, num_steps)
    exact = total - torch.arange(steps + 1, dtype=torch.float64) * total / steps
    return step_to_time(exact.round(), total)


def integer_leading(schedule: Path, steps: int, num_steps: int | None = None) -> Tensor:
    """Steps 1 + j (T // N), j = N-1 .. 0, then 0: the spacing of the first DDIM code; does not start at t = 1.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> integer_leading(CosineSchedule(), 4, 10).tolist()
        [0.7, 0.5, 0.3, 0.1, 0.0]
    """
    total = _total(schedule, steps, num_steps)
    noisy = step_to_time(torch.arange(steps - 1, -1, -1) * (total // steps), total, zero_based=True)
    return _to_clean(noisy)


def _to_clean(times: Tensor) -> Tensor:
    return torch.cat([times.clamp(0, 1), times.new_zeros(1)])


def _check(schedule: Path, steps: int, num_steps: int | None) -> int | None:
    """T or None; raises for more steps than the schedule or the model has."""
    total = num_steps if num_steps is not None else schedule.num_steps
    at_least(1, steps=steps)
    if total is not None and steps > total:
        raise InputError(f"steps = {steps}: this model has T = {total} steps, use steps <= {total}")
    return total


def _total(schedule: Path, steps: int, num_steps: int | None) -> int:
    total = _check(schedule, steps, num_steps)
    if total is None:
        raise InputError("integer spacings need num_steps (T): the schedule is continuous")
    return total


SPACINGS: dict[str, Callable[..., Tensor]] = {
    "uniform_t": uniform_t,
    "uniform_log_snr": uniform_log_snr,
    "karras": karras,
    "integer_trailing": integer_trailing,
    "integer_leading": integer_leading,
}
