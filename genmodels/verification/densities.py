"""Checks of noise schedules and other paths, and of energies; errors that checks of networks share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genmodels.diffusion.path import Path
from genmodels.diffusion.schedule import NoiseSchedule
from genmodels.verification.check import CheckSet, Measured, NotApplicable, NotVerified, Report, largest
from genmodels.verification.subject import device_of, slopes_of


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """|found - expected| / (1 + |expected|), elementwise."""
    return (found - expected).abs() / (1 + expected.abs())


def changes(module: nn.Module, state: dict[str, Tensor]) -> list[float]:
    """The largest difference of each entry of a module's state dict from an earlier copy."""
    now = module.state_dict()
    return [float((now[name].double() - value.double()).abs().max()) for name, value in state.items() if value.numel()]


def without_gradient(module: nn.Module, output: Callable[[], Tensor], ignored: str | None = None) -> Measured:
    """The number of parameters on which a scalar output does not depend; those whose name begins so are ignored."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise NotApplicable("no parameters")

    def dead_in(training: bool) -> list[str]:
        module.train(training)
        with torch.enable_grad():
            slopes = torch.autograd.grad(output(), list(named.values()), allow_unused=True)
        return [name for name, slope in zip(named, slopes, strict=True)
                if slope is None and not (ignored and name.startswith(ignored))]

    before = module.training
    dead = dead_in(before)
    dead = dead and [name for name in dead_in(True) if name in dead]  # hard attention learns in training alone
    module.train(before)
    return Measured(float(len(dead)), ", ".join(dead[:3]))


SCHEDULE_CHECKS = CheckSet()


@dataclass(frozen=True)
class ScheduleSubject:
    """A noise schedule, and times inside (0, 1): its own steps if it has a number of steps."""

    schedule: nn.Module
    times: Tensor

    @property
    def steps(self) -> int | None:
        """The number of its steps, None in continuous time."""
        return getattr(self.schedule, "num_steps", None)

    def worst(self, error: Tensor) -> Measured:
        """The largest error and its time."""
        return Measured(float(error.max()), f"at t = {float(self.times[int(error.argmax())]):.3f}")

    def log_snr(self, t: Tensor) -> Tensor:
        """Detached values."""
        with torch.no_grad():
            return self.schedule.log_snr(t)


def check_schedule(schedule: nn.Module, *, points: int = 401) -> Report:
    """The result of every check of a noise schedule.

    Arguments:
        schedule: has `log_snr(t)` and what `NoiseSchedule` derives from it, or is another `Path`.
        points: number of times.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> check_schedule(CosineSchedule()).passed
        True
    """
    steps = getattr(schedule, "num_steps", None)
    times = torch.linspace(0, 1, points + 2, dtype=torch.float64)[1:-1]
    if steps is not None:
        times = torch.arange(1, max(steps, 2), dtype=torch.float64) / steps  # of a single step t = 1 itself
        times = times[:: max(1, len(times) // points)]
    subject = ScheduleSubject(schedule, times)
    return Report(f"{type(schedule).__name__}, a noise schedule", tuple(SCHEDULE_CHECKS.run(subject)))


@SCHEDULE_CHECKS.add("shape and dtype", 1e-9, "log_snr is elementwise, float64 of the shape of t")
def shape(s: ScheduleSubject) -> Measured:
    """For times with zero, one and two axes, and in float32; and every time alone against all together."""
    for t in (s.times[0], torch.stack([s.times, s.times]), s.times.float()):
        found = s.log_snr(t)
        if found.shape != t.shape or found.dtype != torch.float64:
            return Measured(math.inf, f"{tuple(found.shape)} {found.dtype} for times {tuple(t.shape)} {t.dtype}")
    alone = torch.stack([s.log_snr(t) for t in s.times[::50]])
    together = s.log_snr(s.times)[::50]
    return Measured(float(errors(alone, together).max()))


@SCHEDULE_CHECKS.add("decreasing", 0.0, "the log-SNR falls from data to noise")
def decreasing(s: ScheduleSubject) -> Measured:
    """The largest rise between neighbouring times, and its time; a constant log-SNR fails too.

    The ends count, where samplers start and stop; they may be infinite. Tables have no step at t = 0.
    """
    ends = s.times.new_tensor([0.0, 1.0])
    times = torch.cat([ends[:1] if getattr(s.schedule, "num_steps", None) is None else ends[:0], s.times, ends[1:]])
    times = times.unique()
    if len(times) < 2:
        raise NotApplicable("fewer than two times")
    rises = s.log_snr(times).diff()
    worst = int(rises.argmax())
    bad = not bool((rises < 0).all())
    return Measured(max(float(rises[worst]), 1e-300) if bad else 0.0, f"near t = {float(times[worst]):.3f}")


@SCHEDULE_CHECKS.add("variance preserving", 1e-12, "alpha^2 + sigma^2 = 1, and alpha^2 / sigma^2 = exp(log SNR)")
def preserving(s: ScheduleSubject) -> Measured:
    """Both identities at all times; the second, of logarithms, counts a thousandth."""
    if isinstance(s.schedule, Path) and not isinstance(s.schedule, NoiseSchedule):
        raise NotApplicable("a path that does not preserve the variance")
    alpha, sigma = (part.detach() for part in s.schedule.alpha_sigma(s.times))
    ratio = errors(2 * (alpha.log() - sigma.log()), s.log_snr(s.times))
    return Measured(largest([(alpha.square() + sigma.square() - 1).abs().max(), 1e-3 * ratio.max()]))


@SCHEDULE_CHECKS.add("rate", 1e-6, "log_snr_rate is the derivative of log_snr")
def rate(s: ScheduleSubject) -> Measured:
    """Against central differences of log_snr; for schedules of continuous time."""
    if s.steps is not None:
        raise NotApplicable("defined at its steps only")
    step = 1e-6 * torch.minimum(s.times, 1 - s.times)
    expected = (s.log_snr(s.times + step) - s.log_snr(s.times - step)) / (2 * step)
    return s.worst(errors(s.schedule.log_snr_rate(s.times).detach(), expected))


@SCHEDULE_CHECKS.add("rates of signal and noise", 1e-6, "rates are the derivatives of alpha and sigma")
def rates(s: ScheduleSubject) -> Measured:
    """Against central differences of alpha_sigma; for paths of continuous time."""
    if s.steps is not None or not hasattr(s.schedule, "rates"):
        raise NotApplicable("defined at its steps only" if hasattr(s.schedule, "rates") else "has no rates")
    step = 1e-6 * torch.minimum(s.times, 1 - s.times)
    with torch.no_grad():
        after, before, found = (torch.stack(pair) for pair in (
            s.schedule.alpha_sigma(s.times + step), s.schedule.alpha_sigma(s.times - step), s.schedule.rates(s.times)))
    return s.worst(errors(found, (after - before) / (2 * step)).amax(0))


@SCHEDULE_CHECKS.add("time of a level", 1e-8, "time_of is the inverse of log_snr")
def inverse(s: ScheduleSubject) -> Measured:
    """time_of(log_snr(t)) against t."""
    return s.worst((s.schedule.time_of(s.log_snr(s.times)).detach() - s.times).abs())


@SCHEDULE_CHECKS.add("betas", 1e-10, "the betas are those of alpha_bar: alpha_bar_i = prod (1 - beta)")
def betas(s: ScheduleSubject) -> Measured:
    """At the steps of the schedule, or at 50: products of 1 - beta, and alpha_bars, against sigmoid(log SNR)."""
    if not hasattr(s.schedule, "betas"):
        raise NotApplicable("has no betas")
    steps = s.steps or 50
    product = (1 - s.schedule.betas(steps).detach()).cumprod(0)
    found = s.schedule.alpha_bars(steps).detach()
    expected = torch.sigmoid(s.log_snr(torch.arange(1, steps + 1).double() / steps))
    return Measured(float(torch.maximum((product - expected).abs(), (found - expected).abs()).max()))


@SCHEDULE_CHECKS.add("end points", 1e-12, "end_points are the log-SNR at the first and the last time")
def ends(s: ScheduleSubject) -> Measured:
    """At the clean end and at t = 1; of a table at t = 1 alone, since it defines nothing before its first step."""
    limits = s.log_snr(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    pairs = list(zip(s.schedule.end_points, limits, strict=True))[0 if s.steps is None else 1 :]
    return Measured(largest(0.0 if a == b else abs(a - b) for a, b in pairs))


ENERGY_CHECKS = CheckSet()
_STEP = 1e-5


@dataclass(frozen=True)
class EnergySubject:
    """An energy in float64, and a few points and directions."""

    energy: nn.Module
    x: Tensor
    v: Tensor

    def values(self, x: Tensor) -> Tensor:
        """(B,) energies, detached."""
        with torch.no_grad():
            return self.energy.energy(x)


def check_energy(energy: nn.Module, shape: Sequence[int], *, seed: int = 0, batch: int = 5) -> Report:
    """The result of every check of an energy, on a copy in float64.

    Arguments:
        energy: has `energy(x)` and `score(x)`, which score matching differentiates by the parameters.
        shape: event shape of x.
        seed, batch: of the points.

    Example:
        >>> from genmodels.energy import DoubleWell
        >>> check_energy(DoubleWell(), (2,)).passed
        True
    """
    if batch < 2:
        raise ValueError(f"at least two examples are needed to tell whether they are independent, got {batch}")
    generator, device, shape = torch.Generator().manual_seed(seed), device_of(energy), tuple(shape)
    x, v = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2))
    subject = EnergySubject(copy.deepcopy(energy).double().eval(), x, v)
    return Report(f"{type(energy).__name__}, an energy", tuple(ENERGY_CHECKS.run(subject)))


@ENERGY_CHECKS.add("shape", 0.0, "an energy is one finite number for each example")
def energy_shape(s: EnergySubject) -> Measured:
    """(B,), and the number of energies that are not finite."""
    found = s.values(s.x)
    if found.shape != s.x.shape[:1]:
        return Measured(math.inf, f"shape {tuple(found.shape)} for {len(s.x)} examples")
    return Measured(float((~torch.isfinite(found)).sum()))


@ENERGY_CHECKS.add("score", 1e-6, "the score is minus the gradient of the energy")
def score(s: EnergySubject) -> Measured:
    """Along random directions, against central differences in float64, beyond the rounding of large energies."""
    found = s.energy.score(s.x).detach()
    if found.shape != s.x.shape:
        return Measured(math.inf, f"shape {tuple(found.shape)}")
    slope = (found * s.v).flatten(1).sum(1)
    expected = -(s.values(s.x + _STEP * s.v) - s.values(s.x - _STEP * s.v)) / (2 * _STEP)
    return _beyond_rounding(slope, expected, s.values(s.x), _STEP)


def _beyond_rounding(found: Tensor, expected: Tensor, energy: Tensor, step: float) -> Measured:
    """Errors less four roundings of the energy, of which a difference divided by `step` was made.

    Raises:
        NotVerified: if these are larger than what is found.
    """
    rounding = 4 * torch.finfo(torch.float64).eps * energy.abs() / step
    if bool((rounding > 0.1 * (1 + found.abs())).any()):
        raise NotVerified(f"energies of {float(energy.abs().max()):.0e} have lost the digits of their differences")
    return Measured(float(errors(found, expected).sub(rounding / (1 + expected.abs())).max().clamp(min=0)))


@ENERGY_CHECKS.add("rows independent", 1e-9, "the energy of an example does not depend on the others")
def rows(s: EnergySubject) -> Measured:
    """The energy of every row alone against that of the batch."""
    together = s.values(s.x)
    alone = torch.cat([s.values(s.x[k : k + 1]) for k in range(len(s.x))])
    return Measured(float(errors(alone, together).max()))


@ENERGY_CHECKS.add("nothing modified", 0.0, "energy and score change neither x nor the state, and are the same again")
def unmodified(s: EnergySubject) -> Measured:
    """Energy and score twice, and x and the state dict before and after."""
    x, state = s.x.clone(), copy.deepcopy(s.energy.state_dict())
    first = s.values(s.x), s.energy.score(s.x).detach()
    second = s.values(s.x), s.energy.score(s.x).detach()
    changed = [float((s.x - x).abs().max()), *(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))]
    return Measured(largest(changed + changes(s.energy, state)))


@ENERGY_CHECKS.add("falls off", 0.0, "far away the energy rises, so that exp(-E) has an integral")
def falls_off(s: EnergySubject) -> Measured:
    """Along a few rays it rises by more than D log r, as the volume does, between r = 3,000 sqrt(D) and ten times that.

    Nearer, from r = 30 sqrt(D), it may fall, but is a number.
    """
    rays = torch.cat([s.v, -s.v])
    rays = rays / rays.flatten(1).norm(dim=1).view(-1, *[1] * (rays.dim() - 1))
    dims = rays[0].numel()
    near, _, far, farthest = (s.values(30 * 10**k * math.sqrt(dims) * rays) for k in range(4))
    rise = torch.where(farthest == math.inf, math.inf, farthest - far)
    unknown = torch.isnan(near) | torch.isnan(far) | torch.isnan(farthest)
    return Measured(largest([0.0, *torch.where(unknown, math.nan, dims * math.log(10) - rise)]))


@ENERGY_CHECKS.add("gradients", 0.0, "every parameter has a gradient of the score's size or of the energy")
def gradients(s: EnergySubject) -> Measured:
    """The number of parameters on which neither the square of the score nor the energy depends."""
    return without_gradient(s.energy, lambda: s.energy.score(s.x).square().sum() + s.energy.energy(s.x).sum())


@ENERGY_CHECKS.add("gradients of the score", 1e-5, "its gradients by the parameters = finite differences")
def gradients_of_the_score(s: EnergySubject) -> Measured:
    """Score matching trains by them. Along random directions, in several steps; the least error counts.

    A wrong gradient is wrong in every direction and step, unlike one near a kink.

    Raises:
        NotVerified: if the score is so large that its differences are rounding.
    """
    if not (learned := [p for p in s.energy.parameters() if p.requires_grad]):
        raise NotApplicable("no parameters")
    score = s.energy.score(s.x)
    if not score.requires_grad:
        return Measured(math.inf, "it has none, which score matching needs (contrastive divergence does not)")
    found, generator, seen = slopes_of((score * s.v).sum(), learned), torch.Generator().manual_seed(0), []
    kept, rounding = [p.data for p in learned], 4 * torch.finfo(torch.float64).eps * (score * s.v).abs().sum().detach()
    for step in 3 * [10.0**-k for k in range(5, 9)]:
        ways = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in learned]
        ways = [way / math.sqrt(way[0].numel()) if way.dim() > 1 else way for way in ways]
        ends = []
        for sign in (1, -1):
            for p, own, way in zip(learned, kept, ways, strict=True):
                p.data = own + sign * step * way
            ends.append((s.energy.score(s.x) * s.v).sum().detach())
        for p, own in zip(learned, kept, strict=True):
            p.data = own
        slope, expected = sum((a * b).sum() for a, b in zip(found, ways, strict=True)), (ends[0] - ends[1]) / (2 * step)
        if rounding / step < 0.01 * (1 + expected.abs()):
            seen.append(float((errors(slope, expected) - rounding / step / (1 + expected.abs())).clamp(min=0)))
    if not seen:
        raise NotVerified(f"a score of {float(score.detach().abs().max()):.0e} has lost the digits of its differences")
    return Measured(min(seen))


@ENERGY_CHECKS.add("jet", 1e-6, "the jet is log p, its slope and its curvature along v")
def jet(s: EnergySubject) -> Measured:
    """Against central differences of the energy along v, steps 1e-4; for energies that have a jet."""
    if not getattr(s.energy, "has_jet", False):
        raise NotApplicable("has no jet")
    value, slope, bend = (part.detach() for part in s.energy.jet(s.x, s.v))
    up, here, down = (-s.values(s.x + k * 1e-4 * s.v) for k in (1, 0, -1))
    expected = here, (up - down) / 2e-4, (up - 2 * here + down) / 1e-8
    loose = 1.0, 1.0, 1e-3  # a second difference has half as many digits
    parts = zip((value, slope, bend), expected, loose, (1.0, 1e-4, 1e-8), strict=True)
    return Measured(largest(k * _beyond_rounding(a, b, here, step).error for a, b, k, step in parts))
