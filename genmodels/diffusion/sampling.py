"""From noise to data: a sampler is one pure step from time t to an earlier time s, one loop drives them all.

    step(denoiser, x, t, s, memory, generator, cond, temperature) -> (x, memory)

t and s are 0-dim float64 tensors; s = 0 is the clean end, where every sampler returns its estimate of x_0 without
noise. `memory` is None at the first step, then what the step before handed on. Noise is drawn from `generator` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from genmodels.diffusion.masks import hide
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.schedule import NoiseSchedule
from genmodels.errors import InputError, check_temperature
from genmodels.random import Generator, at_step, normal


class Memory(NamedTuple):
    """What a step hands on: its estimate of x_0 and the log-SNR at which it was made."""

    x0: Tensor
    log_snr: Tensor


class Sampler(Protocol):
    """One step of a sampler; see the head of this module. A memory of its own has the fields of `Memory` at least."""

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


def log_snrs(schedule: NoiseSchedule, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(lambda_s, lambda_t); s = 0 means the data themselves, whatever noise the schedule leaves there."""
    log_snr_s, log_snr_t = schedule.log_snr(torch.stack([s, t])).unbind()
    return torch.where((s == 0).to(log_snr_s.device), torch.inf, log_snr_s), log_snr_t


def predict(denoiser, x: Tensor, t: Tensor, cond: Tensor | None, memory: Memory | None = None) -> Prediction:
    """The prediction at one time for all rows; a self-conditioned network also sees the last estimate of x_0."""
    known = memory is not None and getattr(denoiser, "self_conditioning", False)
    return denoiser(x, t.to(x.device).expand(len(x)), cond, **({"estimate": memory.x0} if known else {}))


@dataclass
class SampleResult:
    """Samples x (B, *event) at the last time, and how many times the network was called."""

    x: Tensor
    evaluations: int


class _Counted:
    """A denoiser that counts its calls and brings the mask of the sequences into each."""

    def __init__(self, denoiser, mask: Tensor | None):
        self.denoiser, self.schedule, self.calls = denoiser, denoiser.schedule, 0
        self.self_conditioning = getattr(denoiser, "self_conditioning", False)
        self.extra = () if mask is None else (mask,)

    def __call__(self, x: Tensor, t: Tensor, cond: Tensor | None, **estimate: Tensor) -> Prediction:
        self.calls += 1
        return self.denoiser(x, t, cond, *self.extra, **estimate)


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

    With a KeyedGenerator the noise of sample k is a function of (seed, k, step): step 0 is the start, step i + 1 the
    i-th step of the sampler. So a sample is the same alone and in any batch.

    Arguments:
        shape: (B, *event).
        times: (N+1,) decreasing within [0, 1]; a last entry 0 is the clean end. See SPACINGS.
        mask: (B, 1, T) of sequences, True = valid; what it hides is zero in the result.
        temperature: factor on all noise, at the start and in the steps.
        dtype: of x and the arithmetic of the steps; the network runs in its own.
        start: (B, *event) at times[0], in place of noise.
        callback: called after each step as callback(number from 0, x, estimate of x_0).

    Errors: times that do not decrease within [0, 1]; a temperature below 0 or not finite.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, DPMSolverPP2MSampler, GaussianDenoiser, uniform_log_snr
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
    check_temperature(temperature)
    counted = _Counted(denoiser, mask)
    if start is None:
        x = temperature * normal(shape, at_step(generator, 0), dtype=dtype, device=device)
    else:
        x = start.to(device=device, dtype=dtype)
    x, memory = hide(x, mask), None
    for i in range(len(times) - 1):
        x, memory = sampler(counted, x, times[i], times[i + 1], memory, at_step(generator, i + 1), cond, temperature)
        if callback is not None:
            callback(i, x, memory.x0)
    return SampleResult(hide(x, mask), counted.calls)
