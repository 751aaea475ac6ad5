"""What a noise schedule must be: decreasing, elementwise, in float64, and one with all that is derived from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genmodels.evaluation.laws import Laws, Measured, NotApplicable, Report

LAWS = Laws()


@dataclass(frozen=True)
class ScheduleSubject:
    """A schedule under judgement, and times inside (0, 1): those of its steps where it has only these."""

    schedule: nn.Module
    times: Tensor

    def log_snr(self, t: Tensor) -> Tensor:
        """Detached values."""
        with torch.no_grad():
            return self.schedule.log_snr(t)


def check_schedule(schedule: nn.Module, *, points: int = 401) -> Report:
    """The verdict of every law on a noise schedule.

    Arguments:
        schedule: has `log_snr(t)` and what `NoiseSchedule` derives from it.
        points: number of times looked at.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> check_schedule(CosineSchedule()).passed
        True
    """
    steps = getattr(schedule, "num_steps", None)
    times = torch.linspace(0, 1, points + 2, dtype=torch.float64)[1:-1]
    if steps is not None:
        times = torch.arange(1, steps, dtype=torch.float64) / steps
        times = times[:: max(1, len(times) // points)]
    subject = ScheduleSubject(schedule, times)
    return Report(f"{type(schedule).__name__}, a noise schedule", tuple(LAWS.judge(subject)))


@LAWS.add("shape and dtype", 1e-9, "log_snr is elementwise, float64 of the shape of t")
def shape(s: ScheduleSubject) -> Measured:
    """For times of no, one and two axes, and in float32; and every time alone against all together."""
    for t in (s.times[:1].reshape(()), s.times[:6].reshape(2, 3), s.times.float()):
        found = s.log_snr(t)
        if found.shape != t.shape or found.dtype != torch.float64:
            return Measured(math.inf, f"{tuple(found.shape)} {found.dtype} for times {tuple(t.shape)} {t.dtype}")
    alone = torch.stack([s.log_snr(t) for t in s.times[::50]])
    together = s.log_snr(s.times)[::50]
    return Measured(float(((alone - together).abs() / (1 + together.abs())).max()))


@LAWS.add("decreasing", 0.0, "the log-SNR falls from data to noise")
def decreasing(s: ScheduleSubject) -> Measured:
    """The largest rise between neighbouring times, and where it is; a level that stays breaks it too."""
    rises = s.log_snr(s.times).diff()
    worst = int(rises.argmax())
    bad = float(rises[worst]) >= 0 or not bool(torch.isfinite(rises).all())
    return Measured(max(float(rises[worst]), 1e-300) if bad else 0.0, f"near t = {float(s.times[worst]):.3f}")


@LAWS.add("variance preserving", 1e-12, "alpha^2 + sigma^2 = 1, and alpha^2 / sigma^2 = exp(log SNR)")
def preserving(s: ScheduleSubject) -> Measured:
    """Both identities at all times; the second, of logarithms, counts a thousandth."""
    alpha, sigma = (part.detach() for part in s.schedule.alpha_sigma(s.times))
    ratio = (2 * (alpha.log() - sigma.log()) - s.log_snr(s.times)).abs() / (1 + s.log_snr(s.times).abs())
    return Measured(max(float((alpha.square() + sigma.square() - 1).abs().max()), 1e-3 * float(ratio.max())))


@LAWS.add("rate", 1e-6, "log_snr_rate is the derivative of log_snr")
def rate(s: ScheduleSubject) -> Measured:
    """Against central differences of log_snr; for schedules of continuous time."""
    if getattr(s.schedule, "num_steps", None) is not None:
        raise NotApplicable("defined at its steps only")
    step = 1e-6 * torch.minimum(s.times, 1 - s.times)
    truth = (s.log_snr(s.times + step) - s.log_snr(s.times - step)) / (2 * step)
    found = s.schedule.log_snr_rate(s.times).detach()
    error = (found - truth).abs() / (1 + truth.abs())
    return Measured(float(error.max()), f"at t = {float(s.times[int(error.argmax())]):.3f}")


@LAWS.add("time of a level", 1e-8, "time_of is the inverse of log_snr")
def inverse(s: ScheduleSubject) -> Measured:
    """time_of(log_snr(t)) against t."""
    back = s.schedule.time_of(s.log_snr(s.times)).detach()
    error = (back - s.times).abs()
    return Measured(float(error.max()), f"at t = {float(s.times[int(error.argmax())]):.3f}")


@LAWS.add("betas", 1e-10, "the betas are those of alpha_bar: alpha_bar_i = prod (1 - beta)")
def betas(s: ScheduleSubject) -> Measured:
    """For the steps of the schedule, or for 50: products of 1 - beta, and alpha_bars, against sigmoid(log SNR)."""
    steps = getattr(s.schedule, "num_steps", None) or 50
    product = (1 - s.schedule.betas(steps)).cumprod(0)
    found, truth = s.schedule.alpha_bars(steps), torch.sigmoid(s.log_snr(torch.arange(1, steps + 1).double() / steps))
    return Measured(float(torch.maximum((product - truth).abs(), (found - truth).abs()).max()))


@LAWS.add("end points", 1e-12, "end_points are the log-SNR at the first and the last time")
def ends(s: ScheduleSubject) -> Measured:
    """At the clean end and at t = 1; a table has nothing before its first step."""
    first, last = s.schedule.end_points
    limits = s.log_snr(torch.tensor([1.0 / (getattr(s.schedule, "num_steps", None) or math.inf), 1.0]).double())
    pairs = [(first, float(limits[0])), (last, float(limits[1]))]
    if getattr(s.schedule, "num_steps", None) is not None:
        pairs = pairs[1:]  # before the first step there is nothing to compare with
    return Measured(max(0.0 if a == b else abs(a - b) for a, b in pairs))
