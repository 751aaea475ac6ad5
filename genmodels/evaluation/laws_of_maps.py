"""What a bijection must be as a map: invertible, with the log-determinant of its Jacobian, one row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.subject import Subject

LAWS = Laws()

_CHUNK = 1024  # rows of a Jacobian made at once
_STEPS = (1e-5, 1e-6, 1e-7)  # of finite differences
_GRIDS = (64, 128, 256, 512, 1024)
_CELLS = 16384  # points of a grid looked at together
_SETTLED = 1e-3  # a grid is fine enough when doubling it changes the mass by less


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


@LAWS.add("round trip", 1e-10, "inverse(forward(x)) = x and forward(inverse(z)) = z")
@torch.no_grad()
def round_trip(s: Subject) -> Measured:
    errors = {}
    for name, inverse, value in s.directions():
        there, _ = s.run(value, inverse)
        errors[f"{name} first"] = relative(s.run(there, not inverse)[0], value)
    return worst(errors)


@LAWS.add("log-det forward", 1e-8, "forward's log-determinant = slogdet of autograd's Jacobian")
def log_det_forward(s: Subject) -> Measured:
    return _log_det(s, inverse=False)


@LAWS.add("log-det inverse", 1e-8, "inverse's log-determinant = slogdet of autograd's Jacobian")
def log_det_inverse(s: Subject) -> Measured:
    return _log_det(s, inverse=True)


def _log_det(s: Subject, inverse: bool) -> Measured:
    x, z, cond, note = s.small()
    value = z if inverse else x
    with torch.no_grad():
        result, said = s.run(value, inverse, cond=cond)
        copies = s.run(value[:1].expand_as(value), inverse, cond=None if cond is None else cond[:1].expand_as(cond))[0]
    if not relative(copies[0], result[0]) < 1e-6:
        raise NotApplicable("rows depend on one another: none has a Jacobian of its own")
    true = torch.stack([torch.linalg.slogdet(jacobian(s, value, cond, row, inverse))[1] for row in range(len(value))])
    error = relative(said, true)
    if said.shape == true.shape:
        row = int((said - true).abs().argmax())
        note = f"{note}{': ' if note else ''}says {float(said[row]):.9g}, is {float(true[row]):.9g}"
    return Measured(error, note)


def jacobian(s: Subject, value: Tensor, cond: Tensor | None, row: int, inverse: bool) -> Tensor:
    """The Jacobian of one example, (D out, D in): row i of a batch of copies gives the gradient of z_i."""
    one = value[row : row + 1]
    size, rows = one.numel(), []
    for start in range(0, size, _CHUNK):
        count = min(_CHUNK, size - start)
        x = one.repeat(count, *[1] * (one.dim() - 1)).requires_grad_()
        own = None if cond is None else cond[row : row + 1].repeat(count, *[1] * (cond.dim() - 1))
        z, _ = s.run(x, inverse, cond=own)
        chosen = z.flatten(1)[torch.arange(count, device=z.device), torch.arange(start, start + count, device=z.device)]
        rows.append(torch.autograd.grad(chosen.sum(), x)[0].flatten(1))
    return torch.cat(rows)


@LAWS.add("log-dets cancel", 1e-9, "the log-determinants of a map and of its inverse add up to zero")
@torch.no_grad()
def cancel(s: Subject) -> Measured:
    errors = {}
    for name, inverse, value in s.directions():
        there, logdet = s.run(value, inverse)
        errors[f"{name} first"] = relative(-s.run(there, not inverse)[1], logdet)
    return worst(errors)


@LAWS.add("gradients", 1e-5, "autograd's gradients = finite differences, by the inputs and, forward, by the parameters")
def gradients(s: Subject) -> Measured:
    """Without this, what takes autograd's Jacobian for the truth would believe a wrong backward pass."""
    errors = {}
    for name, inverse, value in s.directions():
        parameters = [] if inverse else [p for p in s.layer.parameters() if p.requires_grad]
        generator = s.generator(f"ways {name}")
        x = value.clone().requires_grad_()
        leaves = [x, *parameters]
        ways = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in leaves]
        # Matrices move relative to their fan-in, so that the step is as small for a deep flow as for a layer.
        ways[1:] = [way / math.sqrt(way[0].numel()) if way.dim() > 1 else way for way in ways[1:]]
        slopes = torch.autograd.grad(_weighted(s, *s.run(x, inverse)), leaves, allow_unused=True)
        along = [0.0 if g is None else (g * way).sum() for g, way in zip(slopes, ways, strict=True)]
        errors[f"{name} by its input"] = _slope_error(s, value, inverse, ways[0], [], along[0])
        if parameters:
            still = torch.zeros_like(value)
            errors[f"{name} by the parameters"] = _slope_error(s, value, inverse, still, ways[1:], sum(along[1:]))
    return worst(errors)


def _slope_error(
    s: Subject, value: Tensor, inverse: bool, way: Tensor, ways: list[Tensor], slope: Tensor | float
) -> float:
    """How far a slope is from finite differences; the best of several steps, for a kink (of a ReLU) may lie in some."""
    errors = []
    for step in _STEPS:
        high, low = (_moved(s, value, inverse, sign * step, way, ways) for sign in (1, -1))
        found = (high - low) / (2 * step)
        errors.append(relative(found, torch.as_tensor(slope).to(found)))
    return min(errors)


@torch.no_grad()
def _moved(s: Subject, value: Tensor, inverse: bool, step: float, way: Tensor, ways: list[Tensor]) -> Tensor:
    """The weighted result a step away, along a way for the input and one for each parameter."""
    layer = s.copy() if ways else s.layer
    for parameter, own in zip([p for p in layer.parameters() if p.requires_grad] if ways else [], ways, strict=True):
        parameter.add_(step * own)
    return _weighted(s, *s.run(value + step * way, inverse, layer=layer))


@LAWS.add("sum of layers", 1e-10, "the log-determinant of a composition = the sum over its layers")
@torch.no_grad()
def sum_of_layers(s: Subject) -> Measured:
    steps = list(s.layer.walk(s.x, s.cond)) if hasattr(s.layer, "walk") else []
    if len(steps) < 2:
        raise NotApplicable("a single layer")
    z, logdet = s.run(s.x)
    return worst({"log-det": relative(logdet, sum(step.logdet for step in steps)),
                  "z": relative(z, steps[-1].z)})


@LAWS.add("rows independent", 1e-12, "a row alone gives what it gives in a batch")
@torch.no_grad()
def rows_independent(s: Subject) -> Measured:
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
            gradient = torch.autograd.grad(_weighted(s, result, logdet), cond, allow_unused=True)[0]
            blind += [] if gradient is not None and bool(gradient.any()) else [f"no gradient through {name}"]
    return Measured(float(len(blind)), "; ".join(blind))


def _weighted(s: Subject, result: Tensor, logdet: Tensor) -> Tensor:
    """A scalar on which every output has an influence of its own."""
    generator = s.generator("weights")
    weights = (torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in (result, logdet))
    return sum((v * w).sum() for v, w in zip((result, logdet), weights, strict=True))


@LAWS.add("constant log-det", 1e-12, "a log-determinant that is said not to depend on the data does not")
@torch.no_grad()
def constant(s: Subject) -> Measured:
    if not getattr(s.layer, "constant_logdet", False):
        raise NotApplicable("depends on the data")
    one = None if s.cond is None else s.cond[:1].expand_as(s.cond)
    return worst({
        name: relative(logdet, logdet[:1].expand_as(logdet))
        for name, inverse, value in s.directions() for logdet in [s.run(value, inverse, cond=one)[1]]
    })


@LAWS.add("kept part", 0.0, "a coupling leaves what it keeps as it is, bit for bit")
@torch.no_grad()
def kept_part(s: Subject) -> Measured:
    take = getattr(getattr(s.layer, "split", None), "take", None)
    if take is None:
        raise NotApplicable("no coupling")
    return worst({
        name: float((take(s.run(value, inverse)[0])[0] != take(value)[0]).sum())
        for name, inverse, value in s.directions()
    })


@LAWS.add("triangular Jacobian", 0.0, "an output of an autoregressive layer depends on inputs up to its own only")
def triangular(s: Subject) -> Measured:
    layer = getattr(s.layer, "bijection", s.layer)
    # The turn of each dimension, as the layer or its network has it.
    orders = [getattr(part, "order", None) for part in (layer, getattr(layer, "net", None))]
    orders = [order for order in orders if torch.is_tensor(order)]
    if not orders:
        raise NotApplicable("not autoregressive")
    x, z, cond, _ = s.small()
    turns = orders[0].argsort()
    return worst({
        name: float(jacobian(s, value, cond, 0, inverse)[turns][:, turns].triu(1).abs().max())
        for name, inverse, value in (("forward", False, x), ("inverse", True, z))
    })


@LAWS.add("integrates to one", 1e-3, "the density of a normal latent, summed over a grid in the plane, is one")
@torch.no_grad()
def integrates_to_one(s: Subject) -> Measured:
    if s.shape != (2,):
        raise NotApplicable("for events in the plane")
    if not all(math.isinf(end) for end in (*s.x_range, *s.z_range)):
        raise NotApplicable("defined on a part of the plane")
    latents = torch.randn(4096, 2, generator=s.generator("plane"), dtype=torch.float64).to(s.x.device)
    cond = None if s.cond is None else s.cond[:1].expand(len(latents), *s.cond.shape[1:])
    points, _ = s.run(latents, True, cond=cond)
    # The grid lies along the density: strongly stretched ones would fall between the points of any other.
    axes = torch.linalg.cholesky(points.T.cov())
    along = torch.linalg.solve_triangular(axes, (points - points.mean(0)).T, upper=False).T
    low, high = along.amin(0), along.amax(0)
    low, high = low - 0.3 * (high - low), high + 0.3 * (high - low)
    before = math.inf
    for side in _GRIDS:
        mass = _mass(s, points.mean(0), axes, low, high, side)
        if not abs(mass - before) > _SETTLED:
            break
        before = mass
    else:
        raise NotApplicable(f"a grid of {side} x {side} does not resolve this density (mass {mass:.4f})")
    return Measured(abs(mass - 1), f"mass {mass:.6f}")


def _mass(s: Subject, centre: Tensor, axes: Tensor, low: Tensor, high: Tensor, side: int) -> float:
    """The integral of the density by the midpoint rule on side x side cells, x = centre + axes u, low < u < high."""
    middles = (torch.arange(side, dtype=torch.float64, device=low.device) + 0.5) / side
    first, second = (low[i] + (high[i] - low[i]) * middles for i in (0, 1))
    total = 0.0
    for part in first.split(max(1, _CELLS // side)):
        points = centre + torch.cartesian_prod(part, second) @ axes.T
        cond = None if s.cond is None else s.cond[:1].expand(len(points), *s.cond.shape[1:])
        z, logdet = s.run(points, cond=cond)
        total += float((logdet - z.square().sum(1) / 2 - math.log(2 * math.pi)).exp().sum())
    return total * float((high - low).prod() * axes.diagonal().prod()) / side**2
