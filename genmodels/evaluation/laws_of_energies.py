"""What an energy must be: one number an example, whose score is minus its gradient, and that falls off at infinity."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genmodels.evaluation.laws import Laws, Measured, NotApplicable, Report

LAWS = Laws()
_STEP = 1e-5


@dataclass(frozen=True)
class EnergySubject:
    """An energy under judgement in float64, and a few points and directions."""

    energy: nn.Module
    x: Tensor
    v: Tensor

    def values(self, x: Tensor) -> Tensor:
        """(B,) energies, detached."""
        with torch.no_grad():
            return self.energy.energy(x)


def check_energy(energy: nn.Module, shape: Sequence[int], *, seed: int = 0, batch: int = 5) -> Report:
    """The verdict of every law on an energy; it is copied and made float64.

    Arguments:
        energy: has `energy(x)` and `score(x)`.
        shape: event shape of x.
        seed, batch: of the points.

    Example:
        >>> from genmodels.energy import DoubleWell
        >>> check_energy(DoubleWell(), (2,)).passed
        True
    """
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    subject = EnergySubject(copy.deepcopy(energy).double(), x, v)
    return Report(f"{type(energy).__name__}, an energy", tuple(LAWS.judge(subject)))


@LAWS.add("shape", 0.0, "an energy is one finite number for each example")
def shape(s: EnergySubject) -> Measured:
    """(B,), and the number of energies that are not finite."""
    found = s.values(s.x)
    if found.shape != s.x.shape[:1]:
        return Measured(math.inf, f"shape {tuple(found.shape)} for {len(s.x)} examples")
    return Measured(float((~torch.isfinite(found)).sum()))


@LAWS.add("score", 1e-6, "the score is minus the gradient of the energy")
def score(s: EnergySubject) -> Measured:
    """Differences in float64 know nothing of autograd, nor of a sign that was lost in it."""
    found = s.energy.score(s.x).detach()
    if found.shape != s.x.shape:
        return Measured(math.inf, f"shape {tuple(found.shape)}")
    slope = (found * s.v).flatten(1).sum(1)
    truth = -(s.values(s.x + _STEP * s.v) - s.values(s.x - _STEP * s.v)) / (2 * _STEP)
    return Measured(float(((slope - truth).abs() / (1 + truth.abs())).max()))


@LAWS.add("rows independent", 1e-9, "the energy of an example does not depend on the others")
def rows(s: EnergySubject) -> Measured:
    """The energy of every row alone against that of the batch."""
    together = s.values(s.x)
    alone = torch.cat([s.values(s.x[k : k + 1]) for k in range(len(s.x))])
    return Measured(float(((alone - together).abs() / (1 + together.abs())).max()))


@LAWS.add("nothing modified", 0.0, "energy and score leave x and the state as they were, and give the same again")
def unmodified(s: EnergySubject) -> Measured:
    """Energy and score twice, and x and the state dict before and after."""
    x, state = s.x.clone(), copy.deepcopy(s.energy.state_dict())
    first = s.values(s.x), s.energy.score(s.x).detach()
    second = s.values(s.x), s.energy.score(s.x).detach()
    changed = [float((s.x - x).abs().max()), *(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))]
    changed += [float((state[k] - v).abs().max()) for k, v in s.energy.state_dict().items() if v.is_floating_point()]
    return Measured(max(changed))


@LAWS.add("falls off", 0.0, "far away the energy rises, so that exp(-E) has an integral")
def falls_off(s: EnergySubject) -> Measured:
    """Along a few rays: faster than the volume grows, D log r, between r = 30 and r = 300."""
    rays = torch.cat([s.v, -s.v])
    rays = rays / rays.flatten(1).norm(dim=1).view(-1, *[1] * (rays.dim() - 1))
    rise = s.values(300 * rays) - s.values(30 * rays)
    needed = rays[0].numel() * math.log(10)
    return Measured(max(0.0, float((needed - rise).max())))


@LAWS.add("gradients", 0.0, "every parameter has a gradient of the score's size")
def gradients(s: EnergySubject) -> Measured:
    """The number of parameters that neither the square of the score nor the energy has a gradient for."""
    parameters = [p for p in s.energy.parameters() if p.requires_grad]
    if not parameters:
        raise NotApplicable("no parameters")
    with torch.enable_grad():
        found = s.energy.score(s.x).square().sum() + s.energy.energy(s.x).sum()
        slopes = torch.autograd.grad(found, parameters, allow_unused=True)
    names = [name for name, p in s.energy.named_parameters() if p.requires_grad]
    dead = [name for name, slope in zip(names, slopes, strict=True) if slope is None]
    return Measured(float(len(dead)), ", ".join(dead[:3]))


@LAWS.add("jet", 1e-6, "the jet is log p, its slope and its curvature along v")
def jet(s: EnergySubject) -> Measured:
    """Against central differences of the energy along v, steps 1e-4; for energies that have a jet."""
    if not getattr(s.energy, "has_jet", False):
        raise NotApplicable("has no jet")
    value, slope, bend = (part.detach() for part in s.energy.jet(s.x, s.v))
    up, here, down = (-s.values(s.x + k * 1e-4 * s.v) for k in (1, 0, -1))
    truth = here, (up - down) / 2e-4, (up - 2 * here + down) / 1e-8
    loose = 1.0, 1.0, 1e-3  # a second difference has half as many digits
    pairs = zip((value, slope, bend), truth, loose, strict=True)
    return Measured(max(k * float(((a - b).abs() / (1 + b.abs())).max()) for a, b, k in pairs))
