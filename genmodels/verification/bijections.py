"""Checks of bijections: log-determinants against autograd's Jacobian, gradients against finite differences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.flows.bijection import shown
from genmodels.nn.perceptron import MADE
from genmodels.verification.check import (
    NOT_VERIFIED,
    Check,
    CheckSet,
    CheckSpec,
    Measured,
    NotApplicable,
    NotVerified,
    Report,
    largest,
)
from genmodels.verification.code import CHECKS as CODE_CHECKS
from genmodels.verification.maps import CHECKS as MAP_CHECKS
from genmodels.verification.maps import MASK_CHECKS, MASS_CHECKS, padded_and_cropped, relative, weighted, worst
from genmodels.verification.subject import FAR_VALUES, Range, Subject, knots_of, prepare, rows_of, slopes_of

JACOBIAN_CHECKS = CheckSet()

_CHUNK = 1024  # rows of a Jacobian computed at once
_FIRST, _PART = 2, 32  # the same for large events
_LARGEST = 4096  # values of an event up to which a Jacobian is computed at all
_DOUBTFUL = 1e-6  # error on a part of an event that may be due to the cropping
_STEPS = (1e-5, 1e-6, 1e-7)  # of finite differences
_DIRECTIONS = 5  # along which slopes are compared, until one is smooth
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
        raise NotApplicable("rows depend on one another: no row alone has a Jacobian")
    far = _log_det_far_out(s, inverse)
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
    cropped = value.shape[1:] != (s.z if inverse else s.x).shape[1:]
    if cropped and not hasattr(s.layer, "out_shape") and not error < _DOUBTFUL:
        raise NotVerified(f"{_too_large(s)}; {note}, if it takes a part of the event at all (it has no out_shape)")
    return far if far is not None and error < min(far.error, _DOUBTFUL) else Measured(error, note)


def _log_det_far_out(s: Subject, inverse: bool) -> Measured | None:
    """The error at inputs far out, relative to what rounding may do to the reference; None for none, or large events.

    A Jacobian whose singular values are far from 1 has lost digits: those of a saturated sigmoid are all lost.
    """
    value = s.far[inverse]
    if value is None or s.dims > s.max_dims:
        return None
    value = value[: math.ceil(FAR_VALUES / s.dims)]
    cond = rows_of(s.cond, len(value))
    with torch.no_grad():
        returned = s.run(value, inverse, cond=cond)[1]
    found = Measured(0.0)
    for row in range(len(value)):
        matrix = jacobian(s, value, cond, row, inverse).detach()
        if not bool(matrix.isfinite().all()):
            continue
        sizes = torch.linalg.svdvals(matrix)
        true, scale = sizes.log().sum(), 1e-6 * torch.maximum(sizes[0], 1 / sizes[-1])
        error = float((returned[row] - true).abs() / (1 + true.abs()) / scale.clamp(min=1))
        error = math.inf if bool(returned[row].isnan()) else error
        if error > found.error:  # not where the Jacobian is singular, and the error NaN
            found = Measured(error, f"far out: says {float(returned[row]):.9g}, is {float(true):.9g}")
    return found


def _likely(returned: Tensor, true: Tensor, shape: tuple[int, ...]) -> str:
    """The common mistake that fully explains a wrong log-determinant, if there is one."""
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
    """Inputs, conditions, the Jacobians of their first rows, and a note.

    For a large event it is one row, or a part of the event if the layer takes it and the whole takes too long.

    Raises:
        NotVerified: if neither is possible.
    """
    value = s.z if inverse else s.x
    if s.dims <= s.max_dims:
        return value, s.cond, [jacobian(s, value, s.cond, row, inverse) for row in range(rows)], ""
    part = s.cropped
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

    None if it would take more than these seconds; with a limit it is computed in small parts.
    """
    one = value[row : row + 1]
    size, rows, done, begun = one.numel(), [], 0, time.perf_counter()
    while done < size:
        # The time of a small first part predicts that of the rest.
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
    """A round trip from both sides."""
    errors = {}
    for name, inverse, value in s.directions():
        there, logdet = s.run(value, inverse)
        errors[f"{name} first"] = relative(-s.run(there, not inverse)[1], logdet)
    return worst(errors)


@JACOBIAN_CHECKS.add("gradients", 1e-5,
                   "autograd's gradients = finite differences, by inputs, conditions and parameters")
def gradients(s: Subject) -> Measured:
    """Detects a wrong backward pass, to which the checks against autograd's Jacobian are blind.

    A wrong slope is wrong everywhere and in every direction, unlike a kink (of a ReLU): several are tried.
    """
    errors = {}
    for name, inverse, value in s.directions():
        errors[f"{name} by its input"] = _slope_error(s, value, inverse, [])
        if s.cond is not None and s.cond.is_floating_point() and not getattr(s.layer, "rounds_cond", False):
            errors[f"{name} by the condition"] = _slope_error(s, value, inverse, [], s.cond)
        if parameters := [p for p in s.layer.parameters() if p.requires_grad]:
            errors[f"{name} by the parameters"] = _slope_error(s, value, inverse, parameters)
    return worst(errors)


def _slope_error(
    s: Subject, value: Tensor, inverse: bool, parameters: list[Tensor], cond: Tensor | None = None
) -> float:
    """The error of slopes by the parameters, the condition or, without either, the input, against finite differences.

    It is the least over several steps in a few random directions from a few points, since some may cross a kink.
    """
    errors, layer = [], s.copy() if parameters else s.layer
    for number in range(_DIRECTIONS):
        # Towards the next row, hence within the domain of the layer.
        place = value.lerp(value.roll(1, 0), 0.01 * number)
        generator = s.generator(f"ways {inverse} {bool(parameters)} {number}")
        # Conditions may all lie on a kink, such as zeros before a ReLU.
        near = None if cond is None else cond + 0.01 * number * torch.randn(cond.shape, generator=generator).to(cond)
        x, own = (v if v is None else v.clone().requires_grad_() for v in (place, near))
        leaves = parameters or [x if own is None else own]
        slopes = torch.autograd.grad(weighted(s, *s.run(x, inverse, cond=own)), leaves, allow_unused=True)
        directions = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in leaves]
        along, steps = directions[0], []
        if parameters:
            # Matrices move relative to their fan-in, so that the step is as small for a deep flow as for a layer.
            directions = [v / math.sqrt(v[0].numel()) if v.dim() > 1 else v for v in directions]
            along, steps = torch.zeros_like(value), directions
        slope = sum((g * v).sum() for g, v in zip(slopes, directions, strict=True) if g is not None)
        for step in _STEPS:
            high, low = (_moved(s, layer, place, inverse, sign * step, along, steps, near) for sign in (1, -1))
            found = (high - low) / (2 * step)
            errors.append(relative(found, torch.as_tensor(slope).to(found)))
        if min(errors) < _SMOOTH:
            break
    return min(errors)


@torch.no_grad()
def _moved(
    s: Subject, layer: nn.Module, value: Tensor, inverse: bool, step: float, along: Tensor, by: list[Tensor],
    cond: Tensor | None,
) -> Tensor:  # fmt: skip
    """The weighted result after a step of the input, or of `cond`, and of a copy's parameters, if any, `by` others."""
    pairs = zip(*([p for p in part.parameters() if p.requires_grad] for part in (layer, s.layer)), strict=True)
    for (moved, given), own in zip(pairs if by else (), by, strict=True):
        moved.copy_(given + step * own)
    if by:
        layer.train().eval()  # where layers drop what they have cached of their parameters
    value, cond = (value + step * along, None) if cond is None else (value, cond + step * along)
    return weighted(s, *s.run(value, inverse, cond=cond, layer=layer))


@JACOBIAN_CHECKS.add("masked gradients", 1e-8, "gradients under a mask = those of the cropped sequence")
def masked_gradients(s: Subject) -> Measured:
    """By the input and the parameters, of a sum of the valid values with different weights and of the log-det."""
    own = replace(s, x=s.x.clone().requires_grad_(), z=s.z.clone().requires_grad_())
    learned, errors = [p for p in s.layer.parameters() if p.requires_grad], {}
    for where, length, *both in padded_and_cropped(own):
        leaves = [own.z if where == "inverse" else own.x, *learned]
        ways = torch.randn(both[0][0].shape, generator=s.generator(where), dtype=torch.float64).to(s.x.device)
        padded, alone = (slopes_of((valid * ways).sum() + logdet, leaves) for valid, logdet in both)
        errors[f"{where}, length {length}"] = largest(map(relative, padded, alone))
    return worst(errors)


@JACOBIAN_CHECKS.add("constant log-det", 1e-12, "a log-determinant declared independent of the data is so")
@torch.no_grad()
def constant(s: Subject) -> Measured:
    """For layers with `constant_logdet`: every row against the first, under one condition."""
    if not getattr(s.layer, "constant_logdet", False):
        raise NotApplicable("not declared: constant_logdet is false")
    one = None if s.cond is None else s.cond[:1].expand_as(s.cond)
    return worst({
        name: relative(logdet, logdet[:1].expand_as(logdet))
        for name, inverse, value in s.directions() for logdet in [s.run(value, inverse, cond=one)[1]]
    })


@JACOBIAN_CHECKS.add("triangular Jacobian", 0.0,
                   "an output of an autoregressive layer depends on inputs up to its own only")
def triangular(s: Subject) -> Measured:
    """The largest entry above the diagonal in the order of a MADE's outputs, or of the layer's `autoregressive_order`.

    The order holds the place of each dimension in the sequence.
    """
    layer = getattr(s.layer, "bijection", s.layer)
    net = getattr(layer, "net", None)
    order = net.order if isinstance(net, MADE) else getattr(layer, "autoregressive_order", None)
    if order is None:
        raise NotApplicable("not autoregressive")
    order = torch.as_tensor(order).argsort()
    return worst({
        name: float(_jacobians(s, inverse, 1)[2][0][order][:, order].triu(1).abs().max())
        for name, inverse, _ in s.directions()
    })


#: Every check of bijections, in the order of reports.
CHECKS = CheckSet(MAP_CHECKS, JACOBIAN_CHECKS, MASS_CHECKS, MASK_CHECKS, CODE_CHECKS)

#: Tolerances of maps whose inverse is an iteration, which stops at about this error.
ITERATIVE = {"round trip": 1e-8, "log-dets cancel": 1e-8, "log-det inverse": 1e-7, "rows independent": 1e-8,
             "masked content": 1e-8, "padding": 1e-8, "masked log-det": 1e-8, "masked gradients": 1e-6}


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

    It is copied, converted to float64, its parameters moved at random (zeros and identities at the start of training
    hide errors), and initialised on random data if it needs data. The reference of its log-determinant is autograd's
    Jacobian, since round trips do not test it, and its cancellation misses an error made in both directions.

    Arguments:
        layer: a `Bijection`, or any module with `forward(x, cond, mask) -> (z, logdet)` and `inverse(z, cond, mask) ->
            (x, logdet)`; one that takes neither cond nor mask will do.
        shape: event shape of x; for sequences (C, T) masks are tried too.
        x, z: inputs of the two directions, random by default: then some lie far from zero.
        cond: the condition of each row, at least two different ones; needed by layers that use one.
        batch: number of random examples.
        randomise: whether parameters are moved at random.
        initial: data and condition for a layer that needs data to initialise.
        x_range, z_range: the domain of each direction, by default the layer's attribute of this name or everywhere;
            finite ends are open.
        masks: whether the layer takes masks.
        knots: inputs at which it may be singular; ends and knots of its splines by default.
        starts_as_identity: whether it must be the identity as given.
        fresh: makes another instance with the same options, into which the layer's state is loaded.
        max_dims: largest event of which the Jacobian of every row is computed; for a larger one (at most 4096 values)
            it is that of one row, or of a part of the event if the layer takes it and the whole takes too long.
        patience: seconds that one Jacobian of a larger event may take; what takes longer is not verified.
        compiler: backend of torch.compile; None skips compilation.
        only, without: names of checks to run, or to skip.
        tolerances: tolerances by name of check, in place of the defaults.
        seed: seed of inputs and of the perturbation.
        watch: called before each check.
        name: the subject's name in the report.

    Raises:
        ValueError: for a shape the layer does not take, a missing condition or one it does not use, a direction that
            raises or returns no pair on the first inputs, or a check that does not exist.

    Example:
        >>> from genmodels.flows.scaling import ActNorm
        >>> report = check_bijection(ActNorm(2), (2, 3, 3), compiler=None)
        >>> report.passed, report["log-det forward"].status
        (True, 'passed')
    """
    if isinstance(layer, type):
        raise TypeError(f"the class {layer.__name__} is no layer: give an instance, {layer.__name__}(...)")
    specs = CHECKS.choose(only, without)
    limits = dict(tolerances or {})
    CHECKS.require(limits)
    if not getattr(layer, "exact_inverse", True):
        limits = {**ITERATIVE, **limits}
    subject = prepare(
        layer, shape, x=x, z=z, cond=cond, batch=batch, randomise=randomise, initial=initial, x_range=x_range,
        z_range=z_range, seed=seed, masks=masks, knots=knots_of(layer) if knots is None else knots, max_dims=max_dims,
        patience=patience, starts_as_identity=starts_as_identity, compiler=compiler, fresh=fresh,
    )
    checks = []
    for check in CHECKS.run(subject, specs, limits, watch):
        checks.append(check)
        if not subject.finite:  # what follows would fail for this reason, and say others
            break
    checks += [Check(spec.name, NOT_VERIFIED, None, spec.tolerance, "needs finite values")
               for spec in specs[len(checks) :]]
    return Report(name or f"{type(layer).__name__} {shown(shape)}", tuple(checks))
