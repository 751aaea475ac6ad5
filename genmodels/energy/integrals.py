"""Z by quadrature, in one and two dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError
from genmodels.energy.function import EnergyFunction, require_energy

Limits = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Quadrature:
    """log Z over a box.

    Arguments:
        log_z: the logarithm of the integral of exp(-E) over the limits.
        error: bound on its absolute error, as estimated by the rule.
        limits: (low, high) of each coordinate; Z excludes what is outside.
        edge: the largest density on the border, relative to the largest inside; limits are wide enough if this is
            negligible.
        evaluations: number of evaluations of the energy.
    """

    log_z: float
    error: float
    limits: tuple[tuple[float, float], ...]
    edge: float
    evaluations: int


def quadrature(
    model: EnergyFunction,
    limits: Limits,
    *,
    cells: int = 8,
    tolerance: float | None = None,
    cond: Tensor | None = None,
    dtype=torch.float64,
    device=None,
) -> Quadrature:
    """log Z of an energy over a box, by adaptive Gauss-Kronrod rules on a grid of cells.

    Arguments:
        limits: (low, high) of each of one or two coordinates.
        cells: cells per coordinate, each refined separately, so that narrow modes are not overlooked.
        tolerance: target relative error; None is 1e-10 in float64 and 1e-5 in float32.
        cond: condition (1,) or (1, ...) of all points.
        dtype: of the points at which the energy is evaluated.

    Errors: InputError in more than two dimensions, or for a score without energy; RunError if the rule does not
    converge or the energy is not finite.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> round(quadrature(normal, [(-9, 9)]).log_z, 9) == round(0.5 * math.log(2 * math.pi), 9)
        True
    """
    model, limits = require_energy(model, "quadrature"), _checked(limits)
    energy = _Energy(model, cond, dtype, device)
    lowest, edge = _survey(energy, limits)
    value, error = _integrate(
        lambda points: np.exp(lowest - energy(points)), limits, cells, _tolerance(tolerance, dtype)
    )
    return Quadrature(math.log(value) - lowest, error / value, limits, edge, energy.evaluations)


def expectation(
    model: EnergyFunction,
    statistic: Callable[[Tensor], Tensor],
    limits: Limits,
    *,
    cells: int = 8,
    tolerance: float | None = None,
    cond: Tensor | None = None,
    dtype=torch.float64,
    device=None,
) -> float:
    """The mean of a statistic `(N, D) -> (N,)` under the density of an energy, by quadrature.

    Arguments:
        limits, cells, tolerance, cond, dtype: as for `quadrature`.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> round(expectation(normal, lambda x: x[:, 0] ** 2, [(-12, 12)]), 9)
        1.0
    """
    model, limits = require_energy(model, "quadrature"), _checked(limits)
    energy = _Energy(model, cond, dtype, device)
    lowest, _ = _survey(energy, limits)

    def weighted(points: np.ndarray) -> np.ndarray:
        weight = np.exp(lowest - energy(points))
        values = statistic(torch.as_tensor(points)).numpy()
        return np.stack([weight, weight * values], axis=-1)

    total, moment = _integrate(weighted, limits, cells, _tolerance(tolerance, dtype))[0]
    return float(moment / total)


class _Energy:
    """The energy as a function of NumPy points (N, D), in batches, counted."""

    def __init__(self, model: EnergyFunction, cond: Tensor | None, dtype, device):
        self.model, self.cond, self.dtype, self.device, self.evaluations = model, cond, dtype, device, 0

    def __call__(self, points: np.ndarray) -> np.ndarray:
        self.evaluations += len(points)
        x = torch.as_tensor(np.ascontiguousarray(points)).to(device=self.device, dtype=self.dtype)
        values = []
        with torch.no_grad():
            for some in x.split(65536):
                cond = None if self.cond is None else self.cond.expand(len(some), *self.cond.shape[1:])
                values.append(self.model.energy(some, cond).to("cpu", torch.float64))
        energy = torch.cat(values).numpy()
        if np.isnan(energy).any():
            raise RunError(f"the energy is NaN at x = {points[np.isnan(energy)][0].tolist()}")
        return energy


def _checked(limits: Limits) -> tuple[tuple[float, float], ...]:
    limits = tuple((float(low), float(high)) for low, high in limits)
    if len(limits) not in (1, 2):
        raise InputError(
            f"quadrature is for one or two dimensions, not {len(limits)}: use annealed importance sampling"
        )
    if any(not (math.isfinite(low) and math.isfinite(high) and low < high) for low, high in limits):
        raise InputError(f"limits must be finite pairs (low, high) with low < high, got {limits}")
    return limits


def _tolerance(tolerance: float | None, dtype) -> float:
    return tolerance if tolerance is not None else 1e-10 if dtype == torch.float64 else 1e-5


def _survey(energy: _Energy, limits) -> tuple[float, float]:
    """The lowest energy on a grid, and the largest density on the border relative to the largest on the grid."""
    sides = [np.linspace(low, high, 129) for low, high in limits]
    grid = np.meshgrid(*sides, indexing="ij")
    values = energy(np.stack([g.ravel() for g in grid], axis=1))
    border = np.any([(g.ravel() == s[0]) | (g.ravel() == s[-1]) for g, s in zip(grid, sides, strict=True)], axis=0)
    lowest = float(values.min())
    return lowest, float(np.exp(lowest - values[border].min()))


def _integrate(function: Callable, limits, cells: int, tolerance: float):
    """(integral, error bound) over all cells; each may spend its share of the tolerance."""
    from scipy.integrate import cubature

    edges = [np.linspace(low, high, cells + 1) for low, high in limits]
    middles = np.stack([g.ravel() for g in np.meshgrid(*(0.5 * (e[1:] + e[:-1]) for e in edges))], axis=1)
    volume = math.prod(high - low for low, high in limits)
    value = error = 0.0
    boxes = list(itertools.product(*(zip(e[:-1], e[1:], strict=True) for e in edges)))
    scale = np.max(np.atleast_1d(function(middles).mean(0))) * volume  # a first guess of the integral
    for box in boxes:
        low, high = (np.array(side) for side in zip(*box, strict=True))
        done = cubature(
            function, low, high, rule="gk21" if len(limits) == 1 else "gk15",
            rtol=tolerance, atol=tolerance * scale / len(boxes), max_subdivisions=2000,
        )  # fmt: skip
        if done.status != "converged":
            raise RunError(f"quadrature did not converge on {box}: narrow the limits or raise the tolerance")
        value, error = value + done.estimate, error + np.max(done.error)
    return value, float(error)
