"""Noise schedules given by a table of betas, and the rescaling of any schedule to zero terminal SNR.

A table fixes alpha_bar at t = i / T only. In between, -log alpha_bar is interpolated linearly: the diffusion whose
rate beta(t) is constant on each step. So lambda(0) = +inf, and 0 < t < 1/T has less noise than any step of the chain.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from genmodels.core.errors import InputError, at_least, one_of
from genmodels.diffusion.path import alpha_sigma, in_float64
from genmodels.diffusion.schedule import (
    CosineSchedule,
    GradTTSSchedule,
    LearnedSchedule,
    LinearContinuousSchedule,
    LinearLogSnrSchedule,
    NoiseSchedule,
    SigmoidSchedule,
    step_to_time,
)


class DiscreteSchedule(NoiseSchedule):
    """alpha_bar_i = prod_{j <= i} (1 - beta_j) at t = i / T, -log alpha_bar linear in between.

    Arguments:
        betas: (T,) each in (0, 1).

    Example:
        >>> DiscreteSchedule(torch.tensor([0.5, 0.75])).alpha_bar(torch.tensor([0.0, 0.5, 1.0]))
        tensor([1.0000, 0.5000, 0.1250], dtype=torch.float64)
    """

    def __init__(self, betas: Tensor):
        super().__init__()
        betas = in_float64(betas)
        if betas.dim() != 1 or not bool(((betas > 0) & (betas < 1)).all()):
            raise InputError("betas must be a 1-D table of numbers strictly between 0 and 1")
        self.num_steps = len(betas)
        decay = torch.cumsum(-torch.log1p(-betas), 0)
        self.register_buffer("decay", torch.cat([decay.new_zeros(1), decay]), persistent=False)

    def _apply(self, fn, recurse=True):
        # The table moves with the module but stays float64 when the network becomes float32 or bfloat16.
        exact = self.decay
        super()._apply(fn, recurse)
        self.decay = exact.to(self.decay.device)
        return self

    def _locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(-log alpha_bar at t, its increase over the step that t lies in)."""
        u = in_float64(t).to(self.decay.device) * self.num_steps
        i = u.floor().clamp(0, self.num_steps - 1).long()
        rise = self.decay[i + 1] - self.decay[i]
        return self.decay[i] + (u - i) * rise, rise

    def log_snr(self, t: Tensor) -> Tensor:
        decay, _ = self._locate(t)
        return -torch.log(torch.expm1(decay))

    def log_snr_rate(self, t: Tensor) -> Tensor:
        decay, rise = self._locate(t)
        return self.num_steps * rise / torch.expm1(-decay)

    def time_of(self, log_snr: Tensor) -> Tensor:
        decay = -logsigmoid(in_float64(log_snr).to(self.decay.device))
        i = (torch.searchsorted(self.decay, decay, right=True) - 1).clamp(0, self.num_steps - 1)
        return (i + (decay - self.decay[i]) / (self.decay[i + 1] - self.decay[i])) / self.num_steps


class LinearSchedule(DiscreteSchedule):
    """DDPM's betas: equal steps from `beta_start` to `beta_end`, both times 1000 / T.

    Errors: T so small that a beta reaches 1. Source: Ho, Jain, Abbeel, "Denoising diffusion probabilistic models",
    2020, section 4; the scaling with T from Nichol and Dhariwal 2021.

    Example:
        >>> round(float(LinearSchedule().alpha_bar(torch.tensor(0.5))), 10)
        0.0785872429
    """

    def __init__(self, num_steps: int = 1000, *, beta_start: float = 1e-4, beta_end: float = 0.02):
        if not all(0 < beta < math.inf for beta in (beta_start, beta_end)):
            raise InputError(f"beta_start = {beta_start}, beta_end = {beta_end}: give finite numbers above 0")
        smallest = math.floor(1000 * max(beta_start, beta_end)) + 1
        if num_steps < smallest:
            largest = max(beta_start, beta_end) * 1000 / num_steps if num_steps > 0 else math.inf
            raise InputError(
                f"num_steps = {num_steps} is too small for the linear schedule (a beta would be {largest:.3g}): "
                f"use num_steps >= {smallest}, or another schedule"
            )
        scale = 1000 / num_steps
        super().__init__(torch.linspace(beta_start * scale, beta_end * scale, num_steps, dtype=torch.float64))


class CosineDiscreteSchedule(DiscreteSchedule):
    """beta_i = min(1 - f(i/T) / f((i-1)/T), `max_beta`), f(u) = cos^2(pi/2 (u + offset) / (1 + offset)).

    Source: Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", 2021, equation 17.

    Example:
        >>> round(float(CosineDiscreteSchedule().alpha_bar(torch.tensor(0.5))), 10)
        0.4938435904
    """

    def __init__(self, num_steps: int = 1000, *, offset: float = 0.008, max_beta: float = 0.999):
        at_least(1, num_steps=num_steps)
        u = step_to_time(torch.arange(num_steps + 1), num_steps)
        f = torch.cos(math.pi / 2 * (u + offset) / (1 + offset)).square()
        super().__init__((1 - f[1:] / f[:-1]).clamp(max=max_beta))


class ZeroTerminalSchedule(NoiseSchedule):
    """Another schedule, with alpha mapped affinely so that the last step has SNR 0: a~ = a_1 (a - a_T) / (a_1 - a_T).

    a_1 is alpha at the first step (t = 1/T, or t = 0 for continuous schedules), up to which nothing changes. Source:
    Lin et al., "Common diffusion noise schedules and sample steps are flawed", 2023, algorithm 1.

    Example:
        >>> round(float(ZeroTerminalSchedule(LinearSchedule()).alpha_bar(torch.tensor(0.5))), 10)
        0.0760287505
    """

    def __init__(self, base: NoiseSchedule):
        super().__init__()
        self.base, self.num_steps = base, base.num_steps
        first = 1 / base.num_steps if base.num_steps else 0.0
        ends = base.log_snr(torch.tensor([first, 1.0], dtype=torch.float64)).detach()
        self.first_log_snr = float(ends[0])
        (self.first, self.last), (self.sigma_first, _) = (v.tolist() for v in alpha_sigma(ends))

    def _missing_first(self) -> float:
        """1 - a_1, without cancellation: sigma^2 / (1 + a)."""
        return self.sigma_first**2 / (1 + self.first)

    def log_snr(self, t: Tensor) -> Tensor:
        base = self.base.log_snr(t)
        alpha, sigma = alpha_sigma(base)
        missing = sigma.square() / (1 + alpha)  # 1 - alpha, and likewise below for the mapped one
        gap = self.first - self.last
        mapped = self.first * (alpha - self.last).clamp(min=0) / gap
        mapped_missing = (self.first * missing - self.last * self._missing_first()) / gap
        log_snr = 2 * torch.log(mapped) - torch.log(mapped_missing * (1 + mapped))
        return torch.where(base >= self.first_log_snr, base, log_snr)

    def log_snr_rate(self, t: Tensor) -> Tensor:
        base, rate = self.base.log_snr(t), self.base.log_snr_rate(t)
        alpha, sigma = alpha_sigma(base)
        _, mapped_sigma = alpha_sigma(self.log_snr(t))
        # d log alpha = sigma^2 / 2 d lambda, before and after the map
        mapped = rate * sigma.square() * alpha / ((alpha - self.last) * mapped_sigma.square())
        return torch.where(base > self.first_log_snr, rate, mapped)

    def time_of(self, log_snr: Tensor) -> Tensor:
        log_snr = in_float64(log_snr)
        mapped, mapped_sigma = alpha_sigma(log_snr)
        mapped_missing = mapped_sigma.square() / (1 + mapped)
        gap = self.first - self.last
        alpha = self.last + mapped * gap / self.first
        missing = (mapped_missing * gap + self.last * self._missing_first()) / self.first
        base = 2 * torch.log(alpha) - torch.log(missing * (1 + alpha))
        return self.base.time_of(torch.where(log_snr >= self.first_log_snr, log_snr, base))


rescale_zero_terminal = ZeroTerminalSchedule  #: as a function of a schedule

SCHEDULES: dict[str, type[NoiseSchedule]] = {
    "linear": LinearSchedule,
    "linear_continuous": LinearContinuousSchedule,
    "grad_tts": GradTTSSchedule,
    "cosine": CosineSchedule,
    "cosine_discrete": CosineDiscreteSchedule,
    "sigmoid": SigmoidSchedule,
    "linear_log_snr": LinearLogSnrSchedule,
    "learned": LearnedSchedule,
}
ScheduleName = Literal[
    "cosine", "linear", "linear_continuous", "grad_tts", "cosine_discrete", "sigmoid", "linear_log_snr", "learned"
]


def default_ends(name: ScheduleName, finest: float = 15.0, *, levels: int | None = None) -> list[float] | None:
    """Log-SNR at t = 0 and at t = 1 of a schedule whose end points can be chosen, None for others.

    Arguments:
        name: an entry of SCHEDULES.
        finest: log-SNR at t = 0 of the learned schedule and, for integers, of `linear_log_snr`. An end with more noise
            would leave bits to the decoder that no denoiser can save: at log-SNR 10 half a bit to a bit for each scalar
            of 256 levels, with a fixed variance.
        levels: number of levels of the data, None for real numbers.

    Example:
        >>> default_ends("cosine"), default_ends("linear"), default_ends("linear_log_snr", 12.5, levels=256)
        ([15.0, -15.0], None, [12.5, -10.0])
    """
    one_of("schedule", name, SCHEDULES)
    parameters = inspect.signature(SCHEDULES[name]).parameters
    if "log_snr_max" not in parameters:
        return None
    if issubclass(SCHEDULES[name], LearnedSchedule):
        return [finest, -15.0]
    if levels is not None and issubclass(SCHEDULES[name], LinearLogSnrSchedule):
        return [finest, parameters["log_snr_min"].default]
    return [parameters["log_snr_max"].default, parameters["log_snr_min"].default]


def make_schedule(
    name: ScheduleName, num_steps: int, *, ends: Sequence[float] | None = None, zero_terminal_snr: bool = False,
) -> NoiseSchedule:
    """The schedule of a name in SCHEDULES for a model of T steps.

    Arguments:
        num_steps: T, the length of a table of betas.
        ends: log-SNR at t = 0 and at t = 1 where they can be chosen; `default_ends` by default.
        zero_terminal_snr: rescale it so that no signal is left at t = 1.

    Errors: an unknown name; ends of a schedule with fixed end points, or not two of them.

    Example:
        >>> make_schedule("cosine", 10, ends=[7, -9]).end_points
        (7.0, -9.0)
    """
    defaults = default_ends(name)
    kind = SCHEDULES[name]
    if ends is not None and defaults is None:
        raise InputError(f"log_snr_ends is for schedule=cosine, linear_log_snr and learned: {name} has its own")
    if ends is not None and len(ends) != 2:
        raise InputError(f"log_snr_ends are two log-SNRs, at t = 0 and at t = 1, got {list(ends)}")
    if defaults is not None:
        first, last = defaults if ends is None else ends
        schedule = kind(log_snr_max=float(first), log_snr_min=float(last))
    elif issubclass(kind, DiscreteSchedule):
        schedule = kind(num_steps=num_steps)
    else:
        schedule = kind()
    return rescale_zero_terminal(schedule) if zero_terminal_snr else schedule
