"""Solvers of dy/ds = f(s, y) for many examples at once, where no example's steps depend on the others.

    solve(f, y (B, n) float64, start, end) -> Solution

`f(s (b,), y (b, n), rows (b,)) -> (b, n)` gets the rows of the batch that are not finished yet. s runs
from `start` to `end` in either direction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.core.errors import RunError, at_least, positive

Derivative = Callable[[Tensor, Tensor, Tensor], Tensor]

_MOST_STEPS = 10_000


@functools.cache
def _tableau() -> tuple[Tensor, ...]:
    """The tableau of Dormand and Prince 1980 from scipy: nodes, stages, weights, and the weights of the error."""
    from scipy.integrate import RK45  # takes a second to import

    return tuple(torch.from_numpy(part.copy()) for part in (RK45.C, RK45.A, RK45.B, RK45.E))


class Solution(NamedTuple):
    """`y (B, n)` at the end, and the evaluations of f that each example took, (B,) int64."""

    y: Tensor
    evaluations: Tensor


class _Counted:
    """f with a count for each row; raises where a value is not finite, which no step size would change."""

    def __init__(self, f: Derivative, y: Tensor):
        self.f, self.evaluations = f, torch.zeros(len(y), dtype=torch.int64, device=y.device)

    def __call__(self, s: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        self.evaluations[rows] += 1
        slope = self.f(s, y, rows)
        good = torch.isfinite(slope).all(1)
        if not bool(good.all()):
            first = int((~good).nonzero()[0, 0])
            raise SolverError(int(rows[first]), float(s[first]), "the derivative is not finite")
        return slope


class SolverError(RunError):
    """A solver that failed: `row` of the batch, the value `at` of s that was reached, and the reason."""

    def __init__(self, row: int, at: float, reason: str):
        super().__init__(f"row {row}: {reason}, at {at:.6g}")
        self.row, self.at, self.reason = row, at, reason


class AdaptiveRK45:
    """The Runge-Kutta pair of order 5(4) with each example's own steps, in lockstep on the device.

    The steps are those that `scipy.integrate.RK45` would take on this example alone: the same first step, error norm
    (root mean square over the state), factors and last step.

    Arguments:
        tolerance: relative and absolute tolerance of the local error.

    Errors: SolverError for steps that become too small or too many, derivatives that are not finite.
    Source: Dormand and Prince 1980; step control as in Hairer, Norsett, Wanner 1993, section II.4.

    Example:
        >>> fall = AdaptiveRK45(tolerance=1e-8)(lambda s, y, rows: -y, torch.ones(1, 1, dtype=torch.float64), 0.0, 1.0)
        >>> round(float(fall.y), 7), int(fall.evaluations)
        (0.3678794, 62)
    """

    def __init__(self, *, tolerance: float = 1e-5):
        self.tolerance = positive("tolerance", tolerance)

    def __call__(self, f: Derivative, y: Tensor, start: float, end: float) -> Solution:
        f = _Counted(f, y)
        y, direction = y.clone(), math.copysign(1.0, end - start)
        s = torch.full((len(y),), start, dtype=torch.float64, device=y.device)
        every = torch.arange(len(y), device=y.device)
        slope = f(s, y, every)
        h = self._first_step(f, s, y, slope, every, direction, abs(end - start))
        most_growth = torch.full_like(h, 10.0)  # 1 right after a rejected step
        for _ in range(_MOST_STEPS):
            rows = (s != end).nonzero().flatten()
            if not len(rows):
                return Solution(y, f.evaluations)
            smallest = 10 * (torch.nextafter(s[rows], torch.full_like(s[rows], end)) - s[rows]).abs()
            after_accepted = most_growth[rows] > 1
            h[rows] = torch.where(after_accepted, torch.maximum(h[rows], smallest), h[rows])
            if bool((h[rows] < smallest).any()):
                worst = rows[(h[rows] < smallest).nonzero()[0, 0]]
                raise SolverError(int(worst), float(s[worst]), "the step became smaller than the spacing of numbers")
            after = s[rows] + direction * h[rows]
            after = torch.where(direction * (after - end) > 0, end, after)
            step = after - s[rows]
            y_after, slope_after, error = self._step(f, s[rows], y[rows], slope[rows], step, rows)
            scale = self.tolerance * (1 + torch.maximum(y[rows].abs(), y_after.abs()))
            norm = _rms(error / scale)
            accepted = norm < 1
            factor = (0.9 * norm**-0.2).clamp(min=0.2)
            h[rows] = step.abs() * torch.where(accepted, torch.minimum(factor, most_growth[rows]), factor)
            most_growth[rows] = torch.where(accepted, 10.0, 1.0).to(h.dtype)
            moved = rows[accepted]
            s[moved], y[moved], slope[moved] = after[accepted], y_after[accepted], slope_after[accepted]
        row = rows[0]
        raise SolverError(int(row), float(s[row]), f"{_MOST_STEPS} steps did not reach the end; raise the tolerance")

    def _first_step(self, f, s, y, slope, rows, direction: float, length: float) -> Tensor:
        scale = self.tolerance * (1 + y.abs())
        d0, d1 = _rms(y / scale), _rms(slope / scale)
        h0 = torch.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / d1).clamp(max=length)
        further = f(s + direction * h0, y + direction * h0[:, None] * slope, rows)
        d2 = _rms((further - slope) / scale) / h0
        steepest = torch.maximum(d1, d2)
        h1 = torch.where(steepest <= 1e-15, (1e-3 * h0).clamp(min=1e-6), (0.01 / steepest) ** 0.2)
        return torch.minimum(100 * h0, h1).clamp(max=length)

    def _step(self, f, s, y, slope, step, rows):
        """(y, slope, error) after one step; the last slope is the first one of the next step."""
        nodes, stages, weights, of_error = _tableau()
        slopes = [slope]
        for node, stage in zip(nodes[1:], stages[1:], strict=True):
            moved = sum(float(a) * k for a, k in zip(stage, slopes, strict=False))
            slopes.append(f(s + float(node) * step, y + step[:, None] * moved, rows))
        y_after = y + step[:, None] * sum(float(b) * k for b, k in zip(weights, slopes, strict=True))
        slopes.append(f(s + step, y_after, rows))
        error = step[:, None] * sum(float(e) * k for e, k in zip(of_error, slopes, strict=True))
        return y_after, slopes[-1], error


class ScipyRK45:
    """`scipy.integrate.solve_ivp` itself, one example after the other: the reference, slow where the network is large.

    Example:
        >>> fall = ScipyRK45(tolerance=1e-8)(lambda s, y, rows: -y, torch.ones(1, 1, dtype=torch.float64), 0.0, 1.0)
        >>> round(float(fall.y), 7), int(fall.evaluations)
        (0.3678794, 62)
    """

    def __init__(self, *, tolerance: float = 1e-5):
        self.tolerance = positive("tolerance", tolerance)

    def __call__(self, f: Derivative, y: Tensor, start: float, end: float) -> Solution:
        from scipy.integrate import solve_ivp

        f, ends = _Counted(f, y), []
        for row in range(len(y)):
            rows = torch.tensor([row], device=y.device)

            def alone(s, values, rows=rows):
                here = torch.tensor([s], dtype=torch.float64, device=y.device)
                return f(here, torch.from_numpy(values).to(y.device)[None], rows)[0].cpu().numpy()

            options = {"method": "RK45", "rtol": self.tolerance, "atol": self.tolerance, "t_eval": [end]}
            found = solve_ivp(alone, (start, end), y[row].cpu().numpy(), **options)
            if not found.success:
                raise SolverError(row, float(found.t[-1]) if len(found.t) else start, found.message)
            ends.append(torch.from_numpy(found.y[:, -1]).to(y.device))
        return Solution(torch.stack(ends), f.evaluations)


class FixedSteps:
    """A fixed number of equal steps, the same for every example, without an estimate of the error.

    Arguments:
        steps: number of steps.

    Source: Heun's method is the explicit trapezoidal rule, order 2; `RK4` is the classical rule of order 4.
    """

    def __init__(self, *, steps: int = 64):
        at_least(1, steps=steps)
        self.steps = steps

    def __call__(self, f: Derivative, y: Tensor, start: float, end: float) -> Solution:
        f, every = _Counted(f, y), torch.arange(len(y), device=y.device)
        places = torch.linspace(start, end, self.steps + 1, dtype=torch.float64, device=y.device)
        for here, after in zip(places[:-1], places[1:], strict=True):
            y = self._step(lambda s, y: f(s.expand(len(y)), y, every), y, here, after)
        return Solution(y, f.evaluations)

    def _step(self, f: Callable[[Tensor, Tensor], Tensor], y: Tensor, here: Tensor, after: Tensor) -> Tensor:
        raise NotImplementedError


class Heun(FixedSteps):
    """y + h (k_1 + k_2)/2, k_2 at the end of the Euler step.

    Example:
        >>> fall = Heun(steps=10)(lambda s, y, rows: -y, torch.ones(1, 1, dtype=torch.float64), 0.0, 1.0)
        >>> round(float(fall.y), 4), int(fall.evaluations)
        (0.3685, 20)
    """

    def _step(self, f, y, here, after):
        h = after - here
        first = f(here, y)
        return y + h / 2 * (first + f(after, y + h * first))


class RK4(FixedSteps):
    """y + h (k_1 + 2 k_2 + 2 k_3 + k_4)/6.

    Example:
        >>> fall = RK4(steps=10)(lambda s, y, rows: -y, torch.ones(1, 1, dtype=torch.float64), 0.0, 1.0)
        >>> round(float(fall.y), 6), int(fall.evaluations)
        (0.36788, 40)
    """

    def _step(self, f, y, here, after):
        h, middle = after - here, (here + after) / 2
        first = f(here, y)
        second = f(middle, y + h / 2 * first)
        third = f(middle, y + h / 2 * second)
        return y + h / 6 * (first + 2 * second + 2 * third + f(after, y + h * third))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(1).sqrt()


#: What `solver` may be; the adaptive ones take a tolerance, the others a number of steps.
SOLVERS: dict[str, type] = {"rk45": AdaptiveRK45, "scipy": ScipyRK45, "heun": Heun, "rk4": RK4}
