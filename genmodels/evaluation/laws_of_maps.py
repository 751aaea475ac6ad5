"""What a bijection must be as a map: invertible, one row at a time, and what its parts say it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.subject import Subject

LAWS = Laws()


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


@LAWS.add("round trip", 1e-10, "inverse(forward(x)) = x and forward(inverse(z)) = z")
@torch.no_grad()
def round_trip(s: Subject) -> Measured:
    """There and back from both sides, relative to the largest value."""
    errors = {}
    for name, inverse, value in s.directions():
        there, _ = s.run(value, inverse)
        errors[f"{name} first"] = relative(s.run(there, not inverse)[0], value)
    return worst(errors)


@LAWS.add("rows independent", 1e-12, "a row alone gives what it gives in a batch")
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


@LAWS.add("condition", 0.0, "both directions depend on the condition, row by row, and pass it gradients")
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


@LAWS.add("sum of layers", 1e-10, "the log-determinant of a composition = the sum over its layers")
@torch.no_grad()
def sum_of_layers(s: Subject) -> Measured:
    """The layers one after the other, by `walk`, against the whole."""
    steps = list(s.layer.walk(s.x.clone(), s.cond)) if hasattr(s.layer, "walk") else []
    if len(steps) < 2:
        raise NotApplicable("a single layer")
    z, logdet = s.run(s.x)
    return worst({"log-det": relative(logdet, sum(step.logdet for step in steps)),
                  "z": relative(z, steps[-1].z)})


@LAWS.add("kept part", 0.0, "a coupling leaves what it keeps as it is, bit for bit")
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
