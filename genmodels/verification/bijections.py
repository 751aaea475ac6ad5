"""Checks of bijections: log-determinants against autograd's Jacobian, gradients against finite differences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.verification.check import CheckSet, CheckSpec, Measured, NotApplicable, NotVerified, Report
from genmodels.verification.code import CHECKS as CODE_CHECKS
from genmodels.verification.maps import CHECKS as MAP_CHECKS
from genmodels.verification.maps import MASK_CHECKS, MASS_CHECKS, relative, weighted, worst
from genmodels.verification.subject import Range, Subject, knots_of, prepare

JACOBIAN_CHECKS = CheckSet()

_CHUNK = 1024  # rows of a Jacobian made at once
_FIRST, _PART = 2, 32  # the same for large events
_LARGEST = 4096  # values of an event of which a Jacobian is made at all
_DOUBTFUL = 1e-6  # error on a part of an event that may be the part's fault
_STEPS = (1e-5, 1e-6, 1e-7)  # of finite differences
_WAYS = 5  # along which slopes are compared, until one is smooth
_SMOOTH = 1e-6


@JACOBIAN_CHECKS.add("log-det forward", 1e-8, "forward's log-determinant = slogdet of autograd's Jacobian")
def log_det_forward(s: Subject) -> Measured:
    """(B,) against log |det dz/dx|, row by row in float64."""
    return _log_det(s, inverse=False)


@JACOBIAN_CHECKS.add("log-det inverse", 1e-8, "inverse's log-determinant = slogdet of autograd's Jacobian")
def log_det_inverse(s: Subject) -> Measured:
    """(B,) against log |det dx/dz|, row by row in float64."""
    return _log_det(s, inverse=True)


def _log_det(s: Subject, inverse: bool) -> Measured:
    value = s.z if inverse else s.x
    with torch.no_grad():
        one = None if s.cond is None else s.cond[:1].expand_as(s.cond)
        result, copies = s.run(value, inverse)[0], s.run(value[:1].expand_as(value), inverse, cond=one)[0]
    if not relative(copies[0], result[0]) < 1e-6:
        raise NotApplicable("rows depend on one another: none has a Jacobian of its own")
    value, cond, jacobians, note = _jacobians(s, inverse, len(value))
    with torch.no_grad():
        returned = s.run(value, inverse, cond=cond)[1]
    true = torch.stack([torch.linalg.slogdet(jacobian)[1] for jacobian in jacobians])
    shaped = returned.shape == (len(value),)
    error = relative(returned[: len(true)], true) if shaped else math.inf
    if shaped:
        row = int((returned[: len(true)] - true).abs().argmax())
        note = f"{note}{': ' if note else ''}says {float(returned[row]):.9g}, is {float(true[row]):.9g}"
        note += _likely(returned[: len(true)], true, tuple(value.shape[1:])) if error > _DOUBTFUL else ""
    if value.shape[1:] != (s.z if inverse else s.x).shape[1:] and not s.takes_other_sizes and not error < _DOUBTFUL:
        raise NotVerified(f"{_too_large(s)}; {note}, if it takes a part of the event at all (it has no out_shape)")
    return Measured(error, note)


def _likely(returned: Tensor, true: Tensor, shape: tuple[int, ...]) -> str:
    """The usual mistake that explains a wrong log-determinant in full, if one does."""
    positions = math.prod(shape[1:])
    mistakes = {
        -1: "its sign is wrong",
        positions: f"it is {positions} times what is returned: the number of positions is missing",
        math.prod(shape): f"it is {math.prod(shape)} times what is returned: a mean in the place of a sum",
        shape[0]: f"it is {shape[0]} times what is returned: a mean over channels in the place of a sum",
    }
    found = [what for factor, what in mistakes.items() if factor != 1 and relative(factor * returned, true) < _DOUBTFUL]
    return f" ({found[0]})" if found and bool((true.abs() > _DOUBTFUL).any()) else ""


def _jacobians(s: Subject, inverse: bool, rows: int) -> tuple[Tensor, Tensor | None, list[Tensor], str]:
    """Inputs, conditions, the Jacobians of the first rows of them, and a note on what they are of.

    Of a large event one row is enough; a part of the event does where a layer takes it and the whole takes long.

    Raises:
        NotVerified: when neither is possible.
    """
    value = s.z if inverse else s.x
    if s.dims <= s.max_dims:
        return value, s.cond, [jacobian(s, value, s.cond, row, inverse) for row in range(rows)], ""
    part = s.cropped()
    if s.dims <= _LARGEST:
        whole = jacobian(s, value, s.cond, 0, inverse, s.patience if part is None else s.patience / 30)
        if whole is not None:
            return value, s.cond, [whole], ""
    if part is None:
        raise NotVerified(_too_large(s))
    value, cond = part[1 if inverse else 0], part[2]
    return (value, cond, [jacobian(s, value, cond, row, inverse) for row in range(min(rows, len(value)))],
            f"at {tuple(part[0].shape[1:])}")


def _too_large(s: Subject) -> str:
    if s.dims > _LARGEST:
        return f"an event of {s.dims} values is too large for a Jacobian (at most {_LARGEST}): take a smaller shape"
    return f"the Jacobian of {s.dims} values takes more than {s.patience:g} s: take a smaller shape, or more patience"


def jacobian(
    s: Subject, value: Tensor, cond: Tensor | None, row: int, inverse: bool, seconds: float | None = None
) -> Tensor | None:
    """The Jacobian of one example, (D out, D in): row i of a batch of copies gives the gradient of z_i.

    None if it is going to take more than these seconds; then it is made in small parts, which also saves memory.
    """
    one = value[row : row + 1]
    size, rows, done, begun = one.numel(), [], 0, time.perf_counter()
    while done < size:
        # A first, small part tells how long the rest will take.
        count = min(size - done, _CHUNK if seconds is None else _FIRST if done == 0 else _PART)
        x = one.repeat(count, *[1] * (one.dim() - 1)).requires_grad_()
        own = None if cond is None else cond[row : row + 1].repeat(count, *[1] * (cond.dim() - 1))
        z, _ = s.run(x, inverse, cond=own)
        chosen = z.flatten(1)[torch.arange(count, device=z.device), torch.arange(done, done + count, device=z.device)]
        rows.append(torch.autograd.grad(chosen.sum(), x)[0].flatten(1))
        done += count
        spent = time.perf_counter() - begun
        if seconds is not None and (spent > seconds or (done > _FIRST and spent * size / done > seconds)):
            return None
    return torch.cat(rows)


@JACOBIAN_CHECKS.add("log-dets cancel", 1e-9, "the log-determinants of a map and of its inverse add up to zero")
@torch.no_grad()
def cancel(s: Subject) -> Measured:
    """There and back from both sides."""
    errors = {}
    for name, inverse, value in s.directions():
        there, logdet = s.run(value, inverse)
        errors[f"{name} first"] = relative(-s.run(there, not inverse)[1], logdet)
    return worst(errors)


@JACOBIAN_CHECKS.add("gradients", 1e-5,
                   "autograd's gradients = finite differences, by the inputs and, forward, by the parameters")
def gradients(s: Subject) -> Measured:
    """Without this, the checks against autograd's Jacobian would believe a wrong backward pass.

    A wrong slope is wrong everywhere, along every way; a kink (of a ReLU) is not, so others are tried.
    """
    errors = {}
    for name, inverse, value in s.directions():
        errors[f"{name} by its input"] = _slope_error(s, value, inverse, [])
        parameters = [] if inverse else [p for p in s.layer.parameters() if p.requires_grad]
        if parameters:
            errors[f"{name} by the parameters"] = _slope_error(s, value, inverse, parameters)
    return worst(errors)


def _slope_error(s: Subject, value: Tensor, inverse: bool, parameters: list[Tensor]) -> float:
    """How far slopes by the parameters or, where there are none, by the input are from finite differences.

    The error of the best of several steps along a few random ways from a few places, for a kink may lie in some.
    """
    errors = []
    for number in range(_WAYS):
        # Towards the next row, which stays where the layer is defined.
        place = value.lerp(value.roll(1, 0), 0.01 * number)
        x = place.clone().requires_grad_()
        leaves = parameters or [x]
        slopes = torch.autograd.grad(weighted(s, *s.run(x, inverse)), leaves, allow_unused=True)
        generator = s.generator(f"ways {inverse} {bool(parameters)} {number}")
        ways = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in leaves]
        still = torch.zeros_like(value) if parameters else ways[0]
        if parameters:
            # Matrices move relative to their fan-in, so that the step is as small for a deep flow as for a layer.
            ways = [way / math.sqrt(way[0].numel()) if way.dim() > 1 else way for way in ways]
        slope = sum((g * way).sum() for g, way in zip(slopes, ways, strict=True) if g is not None)
        for step in _STEPS:
            high, low = (
                _moved(s, place, inverse, sign * step, still, ways if parameters else []) for sign in (1, -1)
            )
            found = (high - low) / (2 * step)
            errors.append(relative(found, torch.as_tensor(slope).to(found)))
        if min(errors) < _SMOOTH:
            break
    return min(errors)


@torch.no_grad()
def _moved(s: Subject, value: Tensor, inverse: bool, step: float, way: Tensor, ways: list[Tensor]) -> Tensor:
    """The weighted result a step away, along a way for the input and one for each parameter."""
    layer = s.copy() if ways else s.layer
    for parameter, own in zip([p for p in layer.parameters() if p.requires_grad] if ways else [], ways, strict=True):
        parameter.add_(step * own)
    return weighted(s, *s.run(value + step * way, inverse, layer=layer))


@JACOBIAN_CHECKS.add("constant log-det", 1e-12, "a log-determinant that is said not to depend on the data does not")
@torch.no_grad()
def constant(s: Subject) -> Measured:
    """For layers with `constant_logdet`: every row against the first, under one condition."""
    if not getattr(s.layer, "constant_logdet", False):
        raise NotApplicable("depends on the data")
    one = None if s.cond is None else s.cond[:1].expand_as(s.cond)
    return worst({
        name: relative(logdet, logdet[:1].expand_as(logdet))
        for name, inverse, value in s.directions() for logdet in [s.run(value, inverse, cond=one)[1]]
    })


@JACOBIAN_CHECKS.add("triangular Jacobian", 0.0,
                   "an output of an autoregressive layer depends on inputs up to its own only")
def triangular(s: Subject) -> Measured:
    """The largest entry above the diagonal, with dimensions in the order that the layer has for them."""
    layer = getattr(s.layer, "bijection", s.layer)
    # The turn of each dimension, as the layer or its network has it.
    orders = [getattr(part, "order", None) for part in (layer, getattr(layer, "net", None))]
    orders = [order for order in orders if torch.is_tensor(order)]
    if not orders:
        raise NotApplicable("not autoregressive")
    turns = orders[0].argsort()
    return worst({
        name: float(_jacobians(s, inverse, 1)[2][0][turns][:, turns].triu(1).abs().max())
        for name, inverse, _ in s.directions()
    })


#: Every check of bijections, in the order of reports.
CHECKS = CheckSet(MAP_CHECKS, JACOBIAN_CHECKS, MASS_CHECKS, MASK_CHECKS, CODE_CHECKS)

#: Tolerances of maps whose inverse is an iteration: its last step is worth this much.
ITERATIVE = {"round trip": 1e-8, "log-dets cancel": 1e-8, "log-det inverse": 1e-7, "rows independent": 1e-8,
             "masked content": 1e-8, "padding": 1e-8, "masked log-det": 1e-8}


def check_bijection(
    layer: nn.Module,
    shape: Sequence[int],
    *,
    x: Tensor | None = None,
    z: Tensor | None = None,
    cond: Tensor | None = None,
    batch: int = 3,
    randomise: bool = True,
    initial: tuple[Tensor, Tensor | None] | None = None,
    x_range: Range | None = None,
    z_range: Range | None = None,
    masks: bool = True,
    knots: Sequence[float] | None = None,
    starts_as_identity: bool = False,
    fresh: Callable[[], nn.Module] | None = None,
    max_dims: int = 256,
    patience: float = 60.0,
    compiler: Literal["aot_eager", "eager", "inductor"] | None = "aot_eager",
    only: Iterable[str] | None = None,
    without: Iterable[str] = (),
    tolerances: Mapping[str, float] | None = None,
    seed: int = 0,
    watch: Callable[[CheckSpec], None] | None = None,
    name: str | None = None,
) -> Report:
    """The result of every check of a bijection; the layer itself is not touched.

    It is copied, made float64, its parameters moved at random (zeros and identities at the start of training hide
    errors), and initialised on random data if it waits for data. Round trips alone say nothing of a log-determinant,
    and cancelling log-determinants are blind to an error made in both directions: the reference is autograd's Jacobian.

    Arguments:
        layer: a `Bijection`, or any module with `forward(x, cond, mask) -> (z, logdet)` and `inverse(z, cond, mask) ->
            (x, logdet)`; one that takes neither cond nor mask will do.
        shape: event shape of x; for sequences (C, T) masks are tried too.
        x, z: inputs of the two directions, drawn at random by default.
        cond: the condition of each row, at least two unlike ones; needed by layers that use one.
        batch: number of examples where none are given.
        randomise: whether parameters are moved; false checks them as they are.
        initial: data and condition for a layer that waits for data.
        x_range, z_range: where the layer is defined, if not everywhere.
        masks: whether the layer takes masks.
        knots: inputs at which it might stumble; ends and knots of its splines by default.
        starts_as_identity: whether it must be the identity as given.
        fresh: makes another instance with the same options, into which the layer's state is loaded.
        max_dims: largest event of which a Jacobian is made of every row; of a larger one (at most 4096 values) it is
            made of one row, or of a part of the event where the layer takes it and the whole takes long.
        patience: seconds that one Jacobian of a larger event may take. What is too large for any is not verified.
        compiler: backend of torch.compile; None leaves compilation out.
        only, without: names of checks to run, or to leave out.
        tolerances: tolerances by name of check, in place of the usual ones.
        seed: seed of inputs and of the perturbation.
        watch: called before each check.
        name: the subject's name in the report.

    Raises:
        ValueError: for a shape the layer does not take, a missing condition, or a check that does not exist.

    Example:
        >>> from genmodels.flows.scaling import ActNorm
        >>> report = check_bijection(ActNorm(2), (2, 3, 3), compiler=None)
        >>> report.passed, report["log-det forward"].status
        (True, 'passed')
    """
    specs = CHECKS.choose(only, without)
    limits = dict(tolerances or {})
    CHECKS.choose(limits)
    if not getattr(layer, "exact_inverse", True):
        limits = {**ITERATIVE, **limits}
    subject = prepare(
        layer, shape, x=x, z=z, cond=cond, batch=batch, randomise=randomise, initial=initial, x_range=x_range,
        z_range=z_range, seed=seed, masks=masks, knots=knots_of(layer) if knots is None else knots, max_dims=max_dims,
        patience=patience, starts_as_identity=starts_as_identity, compiler=compiler, fresh=fresh,
    )
    checks = tuple(CHECKS.run(subject, specs, limits, watch))
    return Report(name or f"{type(layer).__name__} {show_shape(shape)}", checks)


def show_shape(shape: Sequence[int]) -> str:
    """An event shape as one writes it.

    Example:
        >>> show_shape([3]), show_shape([3, 8, 8])
        ('(3,)', '(3, 8, 8)')
    """
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
