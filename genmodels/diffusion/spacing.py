"""Which times a sampler visits: `spacing(schedule, steps, num_steps) -> times`, (steps + 1,), from 1 down to 0.

`steps` is the number of network calls of a one-call sampler, `num_steps` is T, needed for integer spacings where the
schedule is not a table itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from genmodels.diffusion.schedule import NoiseSchedule, step_to_time
from genmodels.errors import InputError

#: The last noisy time of the spacings in log-SNR, where no T tells it.
LAST_TIME = 1e-3


def uniform_t(schedule: NoiseSchedule, steps: int, num_steps: int | None = None) -> Tensor:
    """Equal steps of time from 1 to 0.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> uniform_t(CosineSchedule(), 4).tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    _check(schedule, steps, num_steps)
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


def uniform_log_snr(schedule: NoiseSchedule, steps: int, num_steps: int | None = None) -> Tensor:
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
    # Where the SNR at t = 1 is 0 the steps start just before; the first time is 1 all the same.
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
    schedule: NoiseSchedule,
    steps: int,
    num_steps: int | None = None,
    *,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
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


def integer_trailing(schedule: NoiseSchedule, steps: int, num_steps: int | None = None) -> Tensor:
    """Steps T, T - T/N, T - 2T/N, ... rounded, then 0: starts at pure noise (Lin et al. 2023, table 2).

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> integer_trailing(CosineSchedule(), 4, 10).tolist()
        [1.0, 0.8, 0.5, 0.2, 0.0]
    """
    total = _total(schedule, steps, num_steps)
    exact = total - torch.arange(steps + 1, dtype=torch.float64) * total / steps
    return step_to_time(exact.round(), total)


def integer_leading(schedule: NoiseSchedule, steps: int, num_steps: int | None = None) -> Tensor:
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


def _check(schedule: NoiseSchedule, steps: int, num_steps: int | None) -> int | None:
    """T, or None; raises where there are more steps than the schedule or the model has."""
    total = num_steps if num_steps is not None else schedule.num_steps
    if steps < 1:
        raise InputError(f"steps = {steps}: give a positive number")
    if total is not None and steps > total:
        raise InputError(f"steps = {steps}: this model has T = {total} steps, use steps <= {total}")
    return total


def _total(schedule: NoiseSchedule, steps: int, num_steps: int | None) -> int:
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
