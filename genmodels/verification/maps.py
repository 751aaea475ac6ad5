"""Checks of bijections as maps: invertibility, independent rows, conditions, masks, total probability."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from genmodels.models.density import over_the_plane
from genmodels.verification.check import CheckSet, Measured, NotApplicable
from genmodels.verification.subject import Subject, crop, draw, initialize, waits

CHECKS = CheckSet()


def relative(found: Tensor, true: Tensor) -> float:
    """max |found - true| / (1 + max |true|); NaN and infinity are infinitely far from everything.

    Example:
        >>> relative(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])), relative(torch.tensor([1.0]), torch.empty(0))
        (0.25, inf)
    """
    if found.shape != true.shape or not bool(torch.isfinite(found).all() & torch.isfinite(true).all()):
        return math.inf
    if found.numel() == 0:
        return 0.0
    return float((found - true).abs().max() / (1 + true.abs().max()))


def worst(parts: dict[str, float]) -> Measured:
    """The largest of several errors, and which it was."""
    name = max(parts, key=lambda key: math.inf if math.isnan(parts[key]) else parts[key])
    return Measured(parts[name], name if parts[name] > 0 else "")


def weighted(s: Subject, result: Tensor, logdet: Tensor) -> Tensor:
    """A scalar on which every output has an influence of its own."""
    generator = s.generator("weights")
    weights = (torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in (result, logdet))
    return sum((v * w).sum() for v, w in zip((result, logdet), weights, strict=True))


@CHECKS.add("round trip", 1e-10, "inverse(forward(x)) = x and forward(inverse(z)) = z")
@torch.no_grad()
def round_trip(s: Subject) -> Measured:
    """There and back from both sides, relative to the largest value."""
    errors = {}
    for name, inverse, value in s.directions():
        there, _ = s.run(value, inverse)
        errors[f"{name} first"] = relative(s.run(there, not inverse)[0], value)
    return worst(errors)


@CHECKS.add("rows independent", 1e-12, "a row alone gives what it gives in a batch")
@torch.no_grad()
def rows_independent(s: Subject) -> Measured:
    """Results and log-determinants of every row by itself against those of the batch."""
    errors = {}
    for name, inverse, value in s.directions():
        result, logdet = s.run(value, inverse)
        alone = [s.run(value[b : b + 1], inverse, cond=None if s.cond is None else s.cond[b : b + 1])
                 for b in range(len(value))]
        errors[name] = relative(torch.cat([a for a, _ in alone]), result)
        errors[f"{name} log-det"] = relative(torch.cat([a for _, a in alone]), logdet)
    return worst(errors)


@CHECKS.add("condition", 0.0, "both directions depend on the condition, row by row, and pass it gradients")
def condition(s: Subject) -> Measured:
    """Conditions are rolled by one row: rows whose condition changed must move, the others must not."""
    if s.cond is None:
        raise NotApplicable("takes no condition")
    other = s.cond.roll(1, 0)
    changed = (other != s.cond).flatten(1).any(1) if s.cond.dim() > 1 else other != s.cond
    if not bool(changed.any()):
        raise NotApplicable("every row has the same condition: give unlike ones")
    blind = []
    for name, inverse, value in s.directions():
        with torch.no_grad():
            before, after = s.run(value, inverse), s.run(value, inverse, cond=other)
        moved = sum((a - b).abs().reshape(len(value), -1).amax(1) for a, b in zip(before, after, strict=True))
        # One row is enough: others may lie where a spline is the identity.
        blind += [] if bool(moved[changed].any()) else [f"{name} does not see it"]
        blind += [f"{name} mixes rows"] if bool((moved[~changed] > 1e-9).any()) else []
        if s.cond.is_floating_point():
            cond = s.cond.clone().requires_grad_()
            result, logdet = s.run(value, inverse, cond=cond)
            gradient = torch.autograd.grad(weighted(s, result, logdet), cond, allow_unused=True)[0]
            blind += [] if gradient is not None and bool(gradient.any()) else [f"no gradient through {name}"]
    return Measured(float(len(blind)), "; ".join(blind))


@CHECKS.add("sum of layers", 1e-10, "the log-determinant of a composition = the sum over its layers")
@torch.no_grad()
def sum_of_layers(s: Subject) -> Measured:
    """The layers one after the other, by `walk`, against the whole."""
    steps = list(s.layer.walk(s.x.clone(), s.cond)) if hasattr(s.layer, "walk") else []
    if len(steps) < 2:
        raise NotApplicable("a single layer")
    z, logdet = s.run(s.x)
    return worst({"log-det": relative(logdet, sum(step.logdet for step in steps)),
                  "z": relative(z, steps[-1].z)})


@CHECKS.add("kept part", 0.0, "a coupling leaves what it keeps as it is, bit for bit")
@torch.no_grad()
def kept_part(s: Subject) -> Measured:
    """The number of kept values that changed, in either direction."""
    take = getattr(getattr(s.layer, "split", None), "take", None)
    if take is None:
        raise NotApplicable("no coupling")
    return worst({
        name: float((take(s.run(value, inverse)[0])[0] != take(value)[0]).sum())
        for name, inverse, value in s.directions()
    })


MASK_CHECKS = CheckSet()


@MASK_CHECKS.add("masked content", 1e-12,
               "what stands outside the mask changes nothing, gets no gradient, leaves as zeros")
def masked_content(s: Subject) -> Measured:
    """Other numbers and NaN in the padding, both ways; and the gradient that reaches it."""
    mask = s.mask()
    errors: dict[str, float] = {}
    for name, inverse, own in (("forward", False, mask), ("inverse", True, s.out_mask(mask))):
        after = mask if inverse else s.out_mask(mask)
        value = s.z if inverse else s.x
        with torch.no_grad():
            result, logdet = s.run(value, inverse, mask=own)
            for content, fill in (("other numbers", _noise(s, value)), ("NaN", torch.full_like(value, math.nan))):
                changed, changed_logdet = s.run(torch.where(own, value, fill), inverse, mask=own)
                errors[f"{name}, {content}"] = max(relative(changed, result), relative(changed_logdet, logdet))
            errors[f"{name} leaves something there"] = float(result.masked_fill(after, 0).abs().max())
        x = value.clone().requires_grad_()
        result, logdet = s.run(x, inverse, mask=own)
        gradient = torch.autograd.grad((result.square().sum() + logdet.sum()), x)[0]
        errors[f"gradient of {name}"] = float(gradient.masked_fill(own, 0).abs().max())
    return worst(errors)


def _noise(s: Subject, like: Tensor) -> Tensor:
    return 100 * torch.randn(like.shape, generator=s.generator("padding"), dtype=torch.float64).to(like.device)


@MASK_CHECKS.add("padding", 1e-12, "a padded sequence gives what the sequence alone gives")
@torch.no_grad()
def padding(s: Subject) -> Measured:
    """The valid values of every padded row against the same row cropped to its length, both ways."""
    return worst({f"{where}, length {length}": relative(padded, alone)
                  for where, length, (padded, _), (alone, _) in _pairs(s)})


@MASK_CHECKS.add("masked log-det", 1e-10, "the log-determinant under a mask = that of the cropped sequence")
@torch.no_grad()
def masked_log_det(s: Subject) -> Measured:
    """As for padding, of the log-determinants."""
    return worst({f"{where}, length {length}": relative(padded, alone)
                  for where, length, (_, padded), (_, alone) in _pairs(s)})


def _pairs(s: Subject):
    """Direction, length, and the results of each padded row (valid values alone) and of the same row cropped."""
    mask, lengths = s.mask(), s.lengths()
    out = s.out_mask(mask)
    for name, inverse, value, own, after in (("forward", False, s.x, mask, out), ("inverse", True, s.z, out, mask)):
        result, logdet = s.run(value, inverse, mask=own)
        for row, length in enumerate(lengths):
            cond = _cropped_cond(s, row, length)
            if inverse and value.dim() == 2:  # flattened scales: only those of the cropped sequence
                alone = value[row : row + 1][own[row : row + 1]][None]
            else:
                alone = value[row : row + 1, :, : int(own[row].sum(-1).max())]
            cropped, cropped_logdet = s.run(alone, inverse, cond=cond)
            valid = result[row][after[row].expand_as(result[row])]
            yield name, length, (valid, logdet[row]), (cropped.flatten(), cropped_logdet[0])


def _cropped_cond(s: Subject, row: int, length: int) -> Tensor | None:
    """The condition of a row; a map loses the same positions."""
    return None if s.cond is None else crop(s.cond[row : row + 1], [s.shape[-1]], [length])


@MASK_CHECKS.add("masked start", 1e-6, "initialised on padded sequences = initialised on the same sequences cropped")
def masked_start(s: Subject) -> Measured:
    """Two instances initialised on 16 rows, one padded and one cropped; their state dicts are compared."""
    if not waits(s.blank):
        raise NotApplicable("needs no data to start from")
    length = s.lengths()[-1]
    rows = 16
    x = draw((rows, *s.shape), s.x_range, s.generator("start")).to(s.x.device)
    cond = None if s.cond is None else s.cond[:1].expand(rows, *s.cond.shape[1:])
    mask = (torch.arange(s.shape[-1], device=x.device) < length).expand(rows, 1, -1)
    padded, cropped = copy.deepcopy(s.blank).double().eval(), copy.deepcopy(s.blank).double().eval()
    initialize(padded, x, cond, mask)
    initialize(cropped, x[..., :length], crop(cond, [s.shape[-1]], [length]))
    return worst({
        name: relative(value.double(), other.double())
        for (name, value), other in zip(padded.state_dict().items(), cropped.state_dict().values(), strict=True)
    })


MASS_CHECKS = CheckSet()

_SAMPLES = 8192  # samples that place the cells of the integral
_SETTLED = 2e-4
_POINTS = 4_000_000


@MASS_CHECKS.add("integrates to one", 1e-3, "the density of a normal latent, integrated over the plane, is one")
@torch.no_grad()
def integrates_to_one(s: Subject) -> Measured:
    """On the plane mapped to a square, by cells refined until the sum settles at 2e-4."""
    if s.shape != (2,):
        raise NotApplicable("for events in the plane")
    if not all(math.isinf(end) for end in (*s.x_range, *s.z_range)):
        raise NotApplicable("defined on a part of the plane")
    latents = torch.randn(_SAMPLES, 2, generator=s.generator("plane"), dtype=torch.float64).to(s.x.device)

    def cond(rows: Tensor) -> Tensor | None:
        return None if s.cond is None else s.cond[:1].expand(len(rows), *s.cond.shape[1:])

    def log_density(points: Tensor) -> Tensor:
        z, logdet = s.run(points, cond=cond(points))
        return logdet - z.square().sum(1) / 2 - math.log(2 * math.pi)

    samples, _ = s.run(latents, True, cond=cond(latents))
    mass, doubt, seen = over_the_plane(log_density, samples, settled=_SETTLED, most=_POINTS)
    if doubt > _SETTLED:
        raise NotApplicable(f"{seen} points do not settle this integral (about {mass:.4f})")
    return Measured(abs(mass - 1), f"mass {mass:.6f}, {seen} points")
