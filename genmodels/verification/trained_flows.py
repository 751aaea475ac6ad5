"""A trained flow layer by layer: what each contributes to the log-determinant, what it loses in float32, its health."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from genmodels.core.data import Batch
from genmodels.flows.bijection import Step
from genmodels.flows.monitor import examine
from genmodels.verification.maps import relative

#: Relative difference between float32 and float64 after a layer: a warning, and a failure.
WARN, FAIL = 1e-3, 1e-1
_LARGEST = 1024  # dimensions up to which the Jacobian of a whole flow is made
_JACOBIAN = 1e-7  # nats per dimension

Row = tuple[str, float | None, float | None, bool | None, str]


@torch.no_grad()
def layers_of(model, batch: Batch, weights: str | float = "ema") -> list[dict]:
    """Every layer in order, as plain values.

    Log-determinant per dimension (mean over the items, in float64); the largest difference between float32 and
    float64 after the layer, relative to the largest value, from the same input of the flow; and what the monitor knows.
    """
    core = model.weights(weights)
    x, cond, bijection = core.middle(batch.x), model._cond(batch), core.flow.bijection
    twin = copy.deepcopy(bijection).double()
    health = examine(bijection, x, cond, batch.mask).layers
    rows = []
    pairs = zip(bijection.walk(x, cond, batch.mask), twin.walk(x.double(), cond, batch.mask), health, strict=True)
    for ours, exact, known in pairs:
        rows.append({
            "name": ours.name, "kind": type(ours.layer).__name__,
            "log_det_per_dim": float(exact.logdet.mean()) / model.spec.dims,
            "drift": relative(ours.z.double(), exact.z), "round_trip": known.drift, "log_scale": known.log_scale,
            "condition": known.condition,
        })
    return rows


def drift_of(layers: list[dict]) -> dict:
    """The first layer after which float32 is off by more than the warning allows.

    Example:
        >>> drift_of([{"name": "a", "drift": 1e-6}, {"name": "b", "drift": 2e-3}])["first_over"]
        'b'
    """
    first = next((row["name"] for row in layers if not row["drift"] <= WARN), None)
    return {"first_over": first, "warn": WARN, "fail": FAIL}


def prove_trained_flow(model, batch: Batch, weights: str | float, seed: int, until: float) -> Iterator[Row]:
    """The rows of a flow: round trips, drift, health, and log-determinants against autograd's Jacobian."""
    core = model.weights(weights)
    yield from _round_trips(model, core, batch)
    layers = layers_of(model, batch, weights)
    worst = max(layers, key=lambda row: math.inf if math.isnan(row["drift"]) else row["drift"])
    first = drift_of(layers)["first_over"]
    where = f"largest after {worst['name']} ({worst['kind']})" + (f"; first over {WARN:g}: {first}" if first else "")
    verdict = (None if first else True) if worst["drift"] <= FAIL else False
    yield "float32 against float64 after each layer", worst["drift"], FAIL, verdict, where
    scale = max((row["log_scale"] for row in layers if row["log_scale"] is not None), default=0.0)
    condition = max((row["condition"] for row in layers if row["condition"] is not None), default=1.0)
    sound = scale <= math.log(1e3) and condition <= 1e4
    told = f"largest |log-scale| {scale:.2f}, largest condition number {condition:.1f}"
    yield "layer health", scale, math.log(1e3), True if sound else None, told if sound else f"{told}: a warning"
    yield from _log_determinants(model, core, batch, until)


def _round_trips(model, core, batch: Batch) -> Iterator[Row]:
    middle, cond = core.middle(batch.x), model._cond(batch)
    bijection = core.flow.bijection
    after = None if batch.mask is None else bijection.out_mask(batch.mask)
    with torch.no_grad():
        back = bijection.inverse(bijection(middle, cond, batch.mask)[0], cond, after)[0]
        twin = copy.deepcopy(bijection).double()
        wide = middle.double()
        exact = twin.inverse(twin(wide, cond, batch.mask)[0], cond, after)[0]
    if model.spec.levels is not None:
        same = (core.quantise(back).to(batch.x.dtype) == batch.x).double().mean()
        yield ("round trip in float32", float(1 - same), 0.0, bool(same == 1), "share of levels not recovered")
    else:
        error = relative(back.double(), wide)
        yield ("round trip in float32", error, 1e-3, error <= 1e-3, "relative")
    error = relative(exact, wide)
    yield ("round trip in float64", error, 1e-8, error <= 1e-8, "relative")


def _log_determinants(model, core, batch: Batch, until: float) -> Iterator[Row]:
    """Each layer's log-determinant, then that of the whole, against the Jacobian at the real input; as time allows."""
    rows = batch.rows(slice(0, 2))
    twin = copy.deepcopy(core.flow.bijection).double()
    x, cond = core.middle(rows.x).double(), model._cond(rows)
    with torch.no_grad():
        steps = list(twin.walk(x, cond, rows.mask))
    worst, place, done = 0.0, "", 0
    for step in steps:
        if time.monotonic() > until:
            break
        if step.layer.constant_logdet and _keeps(step):
            done += 1  # a permutation or a squeeze: nothing to be wrong about but zero, which the whole shows
            continue
        error = _against_jacobian(step, slice(0, 1))
        done += 1
        if not error <= worst:
            worst, place = error, f"{step.name} ({type(step.layer).__name__})"
    told = f"largest at {place}" if place else "one item"
    if done < len(steps):
        told = f"{told}; only {done} of {len(steps)} layers in the time there was (proofs=full)"
    if done:
        yield "log-determinant of each layer", worst, _JACOBIAN, bool(worst <= _JACOBIAN), told
    else:
        yield "log-determinant of each layer", None, _JACOBIAN, None, "no time was left: proofs=full lifts the bound"
    if model.spec.dims > _LARGEST:
        yield ("log-determinant of the whole", None, _JACOBIAN, None,
               f"{model.spec.dims} dimensions are too many for a Jacobian: it follows from its layers")
        return
    if time.monotonic() > until:
        yield ("log-determinant of the whole", None, _JACOBIAN, None, "no time was left: proofs=full lifts the bound")
        return
    with torch.no_grad():
        z, logdet = twin(x, cond, rows.mask)
    error = _against_jacobian(Step("", twin, x, z, logdet, cond, rows.mask), slice(0, len(x)))
    yield "log-determinant of the whole", error, _JACOBIAN, bool(error <= _JACOBIAN), f"{len(x)} items"


def _keeps(step: Step) -> bool:
    return not any(True for _ in step.layer.parameters())


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
