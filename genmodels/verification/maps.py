"""Checks of bijections as maps (inverses, rows, conditions, masks, total mass), and of trained flows layer by layer."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch
from genmodels.core.tensors import hide
from genmodels.flows.bijection import Step
from genmodels.flows.replay import examine
from genmodels.models.base import GenerativeModel
from genmodels.models.density import over_the_plane
from genmodels.verification.check import NO_TIME, CheckSet, Measured, NotApplicable, NotVerified, largest
from genmodels.verification.subject import Subject, crop, draw, error_far_out, initialize, rolled, shown_event, waits

CHECKS = CheckSet()


def relative(found: Tensor, true: Tensor) -> float:
    """max |found - true| / (1 + max |true|); infinite for other shapes and for values that are not finite.

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
    """The largest of several errors, and its name."""
    name = max(parts, key=lambda key: math.inf if math.isnan(parts[key]) else parts[key])
    return Measured(parts[name], name if parts[name] > 0 else "")


def weighted(s: Subject, result: Tensor, logdet: Tensor, name: str = "weights") -> Tensor:
    """A scalar that depends on every output with a different weight."""
    generator = s.generator(name)
    weights = (torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in (result, logdet))
    return sum((v * w).sum() for v, w in zip((result, logdet), weights, strict=True))


@CHECKS.add("round trip", 1e-10, "inverse(forward(x)) = x and forward(inverse(z)) = z")
@torch.no_grad()
def round_trip(s: Subject) -> Measured:
    """A round trip from both sides, relative to the largest value; some inputs lie far out."""
    errors = {}
    for name, inverse, value in s.directions():
        there, _ = s.run(value, inverse)
        finite = torch.isfinite(there).reshape(len(there), -1).all(1)
        if not bool(finite.all()):
            s.finite, end = False, "z_range" if inverse else "x_range"
            return Measured(math.inf, f"{name} is not finite at {shown_event(value[~finite][0])}: if it takes part of "
                            f"the line only, give {end}, or the layer an attribute {end} = (low, high)")
        errors[f"{name} first"] = relative(s.run(there, not inverse)[0], value)
        far = s.far[inverse]
        if far is not None and math.isfinite(errors[f"{name} first"]):
            errors[f"{name} first, far out"] = error_far_out(s, far, inverse)
    return worst(errors)


@CHECKS.add("rows independent", 1e-12, "a row alone gives its result in a batch")
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


@CHECKS.add("condition", 0.0, "both directions depend on the condition, row by row, with gradients")
def condition(s: Subject) -> Measured:
    """Conditions are rolled by one row: rows whose condition changed must move, the others must not."""
    if s.cond is None:
        raise NotApplicable("takes no condition")
    other, changed = rolled(s.cond)
    blind = []
    for name, inverse, value in s.directions():
        with torch.no_grad():
            before, after = s.run(value, inverse), s.run(value, inverse, cond=other)
        moved = sum((a - b).abs().reshape(len(value), -1).amax(1) for a, b in zip(before, after, strict=True))
        # One row suffices: others may lie where a spline is the identity.
        blind += [] if bool(moved[changed].any()) else [f"{name} ignores it"]
        blind += [f"{name} mixes rows"] if bool((moved[~changed] > 1e-9).any()) else []
        if s.cond.is_floating_point() and not getattr(s.layer, "rounds_cond", False):
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
    return worst({"log-det": relative(logdet, sum(step.logdet for step in steps)), "z": relative(z, steps[-1].z)})


@CHECKS.add("kept part", 0.0, "a coupling leaves its kept part unchanged, bit for bit")
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


@MASK_CHECKS.add("masked content", 1e-12, "values outside the mask change nothing, get no gradient and become zeros")
def masked_content(s: Subject) -> Measured:
    """Other numbers and NaN in the padding, both ways, and the gradient with respect to it."""
    mask = s.mask()
    if misfit := s.misfit():
        return Measured(math.inf, misfit)
    errors: dict[str, float] = {}
    for name, inverse, own in (("forward", False, mask), ("inverse", True, s.out_mask(mask))):
        after = mask if inverse else s.out_mask(mask)
        value = s.z if inverse else s.x
        with torch.no_grad():
            result, logdet = s.run(value, inverse, mask=own)
            for content, fill in (("other numbers", _noise(s, value)), ("NaN", torch.full_like(value, math.nan))):
                changed, changed_logdet = s.run(torch.where(own, value, fill), inverse, mask=own)
                errors[f"{name}, {content}"] = largest([relative(changed, result), relative(changed_logdet, logdet)])
            errors[f"{name} is not zero there"] = float(result.masked_fill(after, 0).abs().max())
        x = value.clone().requires_grad_()
        result, logdet = s.run(x, inverse, mask=own)
        gradient = torch.autograd.grad((result.square().sum() + logdet.sum()), x)[0]
        errors[f"gradient of {name}"] = float(gradient.masked_fill(own, 0).abs().max())
    return worst(errors)


def _noise(s: Subject, like: Tensor) -> Tensor:
    return 100 * torch.randn(like.shape, generator=s.generator("padding"), dtype=torch.float64).to(like.device)


@MASK_CHECKS.add("padding", 1e-12, "a padded sequence gives the result of the sequence alone")
@torch.no_grad()
def padding(s: Subject) -> Measured:
    """The valid values of every padded row against the same row cropped to its length, both ways."""
    return worst({f"{where}, length {length}": relative(padded, alone)
                  for where, length, (padded, _), (alone, _) in padded_and_cropped(s)})


@MASK_CHECKS.add("masked log-det", 1e-10, "the log-determinant under a mask = that of the cropped sequence")
@torch.no_grad()
def masked_log_det(s: Subject) -> Measured:
    """As for padding, with the log-determinants."""
    return worst({f"{where}, length {length}": relative(padded, alone)
                  for where, length, (_, padded), (_, alone) in padded_and_cropped(s)})


def padded_and_cropped(s: Subject):
    """Direction, length, and the results of each padded row (valid values alone) and of the same row cropped."""
    mask, lengths = s.mask(), s.lengths()
    if s.misfit():
        raise NotApplicable("its masks do not fit: see masked content")
    out = s.out_mask(mask)
    for name, inverse, value, own, after in (("forward", False, s.x, mask, out), ("inverse", True, s.z, out, mask)):
        result, logdet = s.run(value, inverse, mask=own)
        for row, length in enumerate(lengths):
            # The condition of a row; a map loses the same positions.
            cond = None if s.cond is None else crop(s.cond[row : row + 1], [s.shape[-1]], [length])
            if inverse and value.dim() == 2:  # flattened scales: only those of the cropped sequence
                alone = value[row : row + 1][own[row : row + 1]][None]
            else:
                alone = value[row : row + 1, :, : int(own[row].sum(-1).max())]
            cropped, cropped_logdet = s.run(alone, inverse, cond=cond)
            valid = result[row][after[row].expand_as(result[row])]
            yield name, length, (valid, logdet[row]), (cropped.flatten(), cropped_logdet[0])


@MASK_CHECKS.add("masked start", 1e-6, "initialisation on padded sequences = on the same sequences cropped")
def masked_start(s: Subject) -> Measured:
    """Two instances initialised on 16 rows or as many as a layer needs, one padded and one cropped, are compared."""
    if not waits(s.blank):
        raise NotApplicable("needs no data to start from")
    length = s.lengths()[-1]
    rows = max([16, *(getattr(part, "fewest", 0) for part in s.blank.modules())])
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

_SAMPLES = 8192  # samples that locate the cells of the integral
_SETTLED = 2e-4
_POINTS = 4_000_000


@MASS_CHECKS.add("integrates to one", 1e-3, "the density of a normal latent, integrated over the plane, is one")
@torch.no_grad()
def integrates_to_one(s: Subject) -> Measured:
    """On the plane mapped to a square, by cells refined until the sum changes by less than 2e-4."""
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


#: Relative difference between float32 and float64 after a layer: limits of a warning and of a failure.
WARN, FAIL = 1e-3, 1e-1
_LARGEST = 1024  # dimensions up to which the Jacobian of a whole flow is computed
_JACOBIAN = 1e-7  # nats per dimension

LAYER_CHECKS = CheckSet()


@dataclass(frozen=True)
class TrainedFlow:
    """A trained flow and the data of its checks.

    Arguments:
        model: a model with `core.flow`.
        batch: up to 64 items on its device.
        weights: which of its weights.
        until: `time.monotonic()` after which no Jacobian is begun.
    """

    model: GenerativeModel
    batch: Batch
    weights: str | float
    until: float

    @cached_property
    def core(self) -> nn.Module:
        """The model's core with these weights."""
        return self.model.weights(self.weights)

    @cached_property
    @torch.no_grad()
    def points(self) -> Tensor:
        """The items as points of the flow, integers at the median of their noise, padding as zeros."""
        return hide(self.core.centre(self.batch.x, self.batch.mask), self.batch.mask)

    @cached_property
    @torch.no_grad()
    def layers(self) -> list[dict]:
        """Every layer in order, as plain values.

        Log-determinant per dimension (mean over the items, in float64); the largest difference between float32 and
        float64 after the layer for the same input of the flow, relative to the largest value; and the values of the
        invertibility monitor.
        """
        x, cond, bijection = self.points, self.model._cond(self.batch), self.core.flow.bijection
        twin = copy.deepcopy(bijection).double()
        health = examine(bijection, x, cond, self.batch.mask).layers
        rows = []
        pairs = zip(bijection.walk(x, cond, self.batch.mask), twin.walk(x.double(), cond, self.batch.mask), health,
                    strict=True)
        for ours, exact, measured in pairs:
            rows.append({
                "name": ours.name, "kind": type(ours.layer).__name__,
                "log_det_per_dim": float(exact.logdet.mean()) / self.model.spec.dims,
                "drift": relative(ours.z.double(), exact.z), "round_trip": measured.drift,
                "log_scale": measured.log_scale, "condition": measured.condition,
            })
        return rows

    def largest(self, key: str, default: float) -> tuple[float, str]:
        """The largest value of the layers, and its layer; NaN counts as the largest."""
        rows = [row for row in self.layers if row[key] is not None]
        if not rows:
            return default, ""
        worst = max(rows, key=lambda row: math.inf if math.isnan(row[key]) else row[key])
        return worst[key], f"{worst['name']} ({worst['kind']})"

    @cached_property
    def rows(self) -> tuple[nn.Module, Tensor, Tensor | None, Tensor | None]:
        """The flow in float64 and two items: the bijection, x, condition and mask."""
        few = self.batch.rows(slice(0, 2))
        twin = copy.deepcopy(self.core.flow.bijection).double()
        return twin, self.points[: len(few.x)].double(), self.model._cond(few), few.mask


def drift_of(layers: list[dict]) -> dict:
    """The first layer after which float32 is off by more than the warning allows.

    Example:
        >>> drift_of([{"name": "a", "drift": 1e-6}, {"name": "b", "drift": 2e-3}])["first_over"]
        'b'
    """
    first = next((row["name"] for row in layers if not row["drift"] <= WARN), None)
    return {"first_over": first, "warn": WARN, "fail": FAIL}


@LAYER_CHECKS.add("round trip in float32", 1e-3, "inverse(forward(x)) = x in float32")
def single_round_trip(s: TrainedFlow) -> Measured:
    """Every level of quantised data is recovered; for other data, relative to the largest value."""
    x = s.points
    back = _there_and_back(s, s.core.flow.bijection, x)
    if s.model.spec.levels is not None:
        lost = (s.core.quantise(back).to(s.batch.x.dtype) != s.batch.x).double()
        share = hide(lost, s.batch.mask).sum() / hide(torch.ones_like(lost), s.batch.mask).sum()
        return Measured(float(share), "share of levels not recovered", 0.0)
    return Measured(relative(back.double(), x.double()), "relative")


@LAYER_CHECKS.add("round trip in float64", 1e-8, "inverse(forward(x)) = x in float64")
def double_round_trip(s: TrainedFlow) -> Measured:
    """Relative to the largest value."""
    x = s.points.double()
    return Measured(relative(_there_and_back(s, copy.deepcopy(s.core.flow.bijection).double(), x), x), "relative")


@torch.no_grad()
def _there_and_back(s: TrainedFlow, bijection: nn.Module, x: Tensor) -> Tensor:
    cond, mask = s.model._cond(s.batch), s.batch.mask
    after = None if mask is None else bijection.out_mask(mask)
    return bijection.inverse(bijection(x, cond, mask)[0], cond, after)[0]


@LAYER_CHECKS.add("float32 against float64 after each layer", WARN, "float32 follows float64 through every layer")
def drift(s: TrainedFlow) -> Measured:
    """Up to 1e-1 it is a warning: not verified."""
    error, layer = s.largest("drift", 0.0)
    first = drift_of(s.layers)["first_over"]
    note = f"largest after {layer}" + (f"; first over {WARN:g}: {first}" if first else "")
    if WARN < error <= FAIL:
        raise NotVerified(note, error)
    return Measured(error, note)


@LAYER_CHECKS.add("largest log-scale", math.log(1e3), "no layer scales by more than a thousand")
def log_scale(s: TrainedFlow) -> Measured:
    """A larger one is a warning: not verified."""
    return _or_warning(*s.largest("log_scale", 0.0), limit=math.log(1e3))


@LAYER_CHECKS.add("largest condition number", 1e4, "no matrix of a layer is nearly singular")
def condition_number(s: TrainedFlow) -> Measured:
    """A larger one is a warning: not verified."""
    return _or_warning(*s.largest("condition", 1.0), limit=1e4)


def _or_warning(value: float, layer: str, limit: float) -> Measured:
    if value > limit:
        raise NotVerified(f"{layer}: a warning", value)
    return Measured(value, layer)


@LAYER_CHECKS.add("log-determinant of each layer", _JACOBIAN, "each layer's log-determinant = that of its Jacobian")
def each_log_det(s: TrainedFlow) -> Measured:
    """At a real input, nats per dimension, as many layers as time allows."""
    twin, x, cond, mask = s.rows
    with torch.no_grad():
        steps = list(twin.walk(x, cond, mask))
    errors = {"": 0.0}
    for done, step in enumerate(steps):
        if time.monotonic() > s.until:
            late = f"only {done} of {len(steps)} layers in the time there was (checks=full)"
            break
        if step.layer.constant_logdet and not any(True for _ in step.layer.parameters()):
            continue  # a permutation or a squeeze, whose log-determinant of zero is checked with the whole
        errors[f"{step.name} ({type(step.layer).__name__})"] = _against_jacobian(step, slice(0, 1))
    else:
        late = ""
    found = worst(errors)
    if late and found.error <= _JACOBIAN:
        raise NotVerified(f"largest at {found.note}; {late}" if found.note else late, found.error)
    return Measured(found.error, f"largest at {found.note}" if found.note else "one item")


@LAYER_CHECKS.add("log-determinant of the whole", _JACOBIAN, "the flow's log-determinant = that of its Jacobian")
def whole_log_det(s: TrainedFlow) -> Measured:
    """At two real inputs, nats per dimension."""
    if s.model.spec.dims > _LARGEST:
        raise NotVerified(f"{s.model.spec.dims} dimensions are too many for a Jacobian: it follows from its layers")
    if time.monotonic() > s.until:
        raise NotVerified(NO_TIME)
    twin, x, cond, mask = s.rows
    with torch.no_grad():
        z, logdet = twin(x, cond, mask)
    return Measured(_against_jacobian(Step("", twin, x, z, logdet, cond, mask), slice(0, len(x))), f"{len(x)} items")


def _against_jacobian(step: Step, rows: slice) -> float:
    """|log-determinant - log |det J|| per valid dimension, the largest over some items."""
    errors = []
    for k in range(*rows.indices(len(step.x))):
        one = slice(k, k + 1)
        cond, mask = (None if value is None else value[one] for value in (step.cond, step.mask))
        x = step.x[one]

        def flat(v: Tensor, x=x, cond=cond, mask=mask) -> Tensor:
            return step.layer(v.view_as(x), cond, mask)[0].flatten()

        matrix = torch.autograd.functional.jacobian(flat, x.flatten())
        if mask is not None:
            inputs = hide(torch.ones_like(x), mask).bool().flatten()
            outputs = hide(torch.ones_like(step.z[one]), step.layer.out_mask(mask)).bool().flatten()
            matrix = matrix[outputs][:, inputs]
        errors.append(abs(float(torch.linalg.slogdet(matrix)[1] - step.logdet[k])) / len(matrix))
    return largest(errors)
