"""Checks of a trained flow layer by layer: round trips, float32 against float64, health, log-determinants."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch
from genmodels.flows.bijection import Step
from genmodels.flows.replay import examine
from genmodels.models.base import GenerativeModel
from genmodels.verification.check import CheckSet, Measured, NotVerified
from genmodels.verification.maps import relative, worst

#: Relative difference between float32 and float64 after a layer: from where on a warning, and a failure.
WARN, FAIL = 1e-3, 1e-1
_LARGEST = 1024  # dimensions up to which the Jacobian of a whole flow is made
_JACOBIAN = 1e-7  # nats per dimension
_NO_TIME = "no time was left: checks=full lifts the limit"

CHECKS = CheckSet()


@dataclass(frozen=True)
class TrainedFlow:
    """A trained flow and what it is checked on.

    Arguments:
        model: a model with `core.flow`.
        batch: up to 64 items on its device.
        weights: which of its weights.
        until: `time.monotonic()` at which no further Jacobian begins.
    """

    model: GenerativeModel
    batch: Batch
    weights: str | float
    until: float

    @cached_property
    def core(self) -> nn.Module:
        """The model's core with the weights asked for."""
        return self.model.weights(self.weights)

    @cached_property
    @torch.no_grad()
    def layers(self) -> list[dict]:
        """Every layer in order, as plain values.

        Log-determinant per dimension (mean over the items, in float64); the largest difference between float32 and
        float64 after the layer, relative to the largest value, from the same input of the flow; and what the monitor
        measures.
        """
        x, cond, bijection = self.core.middle(self.batch.x), self.model._cond(self.batch), self.core.flow.bijection
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
        """The largest value of the layers and the layer that has it; NaN counts as the largest."""
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
        return twin, self.core.middle(few.x).double(), self.model._cond(few), few.mask


def drift_of(layers: list[dict]) -> dict:
    """The first layer after which float32 is off by more than the warning allows.

    Example:
        >>> drift_of([{"name": "a", "drift": 1e-6}, {"name": "b", "drift": 2e-3}])["first_over"]
        'b'
    """
    first = next((row["name"] for row in layers if not row["drift"] <= WARN), None)
    return {"first_over": first, "warn": WARN, "fail": FAIL}


@CHECKS.add("round trip in float32", 1e-3, "inverse(forward(x)) = x in float32")
def single_round_trip(s: TrainedFlow) -> Measured:
    """Of quantised data every level is recovered; of others, relative to the largest value."""
    x = s.core.middle(s.batch.x)
    back = _there_and_back(s, s.core.flow.bijection, x)
    if s.model.spec.levels is not None:
        same = (s.core.quantise(back).to(s.batch.x.dtype) == s.batch.x).double().mean()
        return Measured(float(1 - same), "share of levels not recovered", 0.0)
    return Measured(relative(back.double(), x.double()), "relative")


@CHECKS.add("round trip in float64", 1e-8, "inverse(forward(x)) = x in float64")
def double_round_trip(s: TrainedFlow) -> Measured:
    """Relative to the largest value."""
    x = s.core.middle(s.batch.x).double()
    return Measured(relative(_there_and_back(s, copy.deepcopy(s.core.flow.bijection).double(), x), x), "relative")


@torch.no_grad()
def _there_and_back(s: TrainedFlow, bijection: nn.Module, x: Tensor) -> Tensor:
    cond, mask = s.model._cond(s.batch), s.batch.mask
    after = None if mask is None else bijection.out_mask(mask)
    return bijection.inverse(bijection(x, cond, mask)[0], cond, after)[0]


@CHECKS.add("float32 against float64 after each layer", WARN, "float32 follows float64 through every layer")
def drift(s: TrainedFlow) -> Measured:
    """Up to 1e-1 it is a warning: not verified."""
    error, layer = s.largest("drift", 0.0)
    first = drift_of(s.layers)["first_over"]
    note = f"largest after {layer}" + (f"; first over {WARN:g}: {first}" if first else "")
    if WARN < error <= FAIL:
        raise NotVerified(note, error)
    return Measured(error, note)


@CHECKS.add("largest log-scale", math.log(1e3), "no layer scales by more than a thousand")
def log_scale(s: TrainedFlow) -> Measured:
    """Above it is a warning: not verified."""
    return _or_warning(*s.largest("log_scale", 0.0), limit=math.log(1e3))


@CHECKS.add("largest condition number", 1e4, "no matrix of a layer is nearly singular")
def condition(s: TrainedFlow) -> Measured:
    """Above it is a warning: not verified."""
    return _or_warning(*s.largest("condition", 1.0), limit=1e4)


def _or_warning(value: float, layer: str, limit: float) -> Measured:
    if value > limit:
        raise NotVerified(f"{layer}: a warning", value)
    return Measured(value, layer)


@CHECKS.add("log-determinant of each layer", _JACOBIAN, "each layer's log-determinant = that of its Jacobian")
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
            continue  # a permutation or a squeeze: nothing to be wrong about but zero, which the whole shows
        errors[f"{step.name} ({type(step.layer).__name__})"] = _against_jacobian(step, slice(0, 1))
    else:
        late = ""
    found = worst(errors)
    if late and found.error <= _JACOBIAN:
        raise NotVerified(f"largest at {found.note}; {late}" if found.note else late, found.error)
    return Measured(found.error, f"largest at {found.note}" if found.note else "one item")


@CHECKS.add("log-determinant of the whole", _JACOBIAN, "the flow's log-determinant = that of its Jacobian")
def whole_log_det(s: TrainedFlow) -> Measured:
    """At two real inputs, nats per dimension."""
    if s.model.spec.dims > _LARGEST:
        raise NotVerified(f"{s.model.spec.dims} dimensions are too many for a Jacobian: it follows from its layers")
    if time.monotonic() > s.until:
        raise NotVerified(_NO_TIME)
    twin, x, cond, mask = s.rows
    with torch.no_grad():
        z, logdet = twin(x, cond, mask)
    return Measured(_against_jacobian(Step("", twin, x, z, logdet, cond, mask), slice(0, len(x))), f"{len(x)} items")


def _against_jacobian(step: Step, rows: slice) -> float:
    """|log-determinant - log |det J|| per dimension, the largest over some items."""
    errors = []
    for k in range(*rows.indices(len(step.x))):
        one = slice(k, k + 1)
        cond, mask = (None if value is None else value[one] for value in (step.cond, step.mask))
        x = step.x[one]

        def flat(v: Tensor, x=x, cond=cond, mask=mask) -> Tensor:
            return step.layer(v.view_as(x), cond, mask)[0].flatten()

        matrix = torch.autograd.functional.jacobian(flat, x.flatten())
        errors.append(abs(float(torch.linalg.slogdet(matrix)[1] - step.logdet[k])) / x.numel())
    return max(errors)
