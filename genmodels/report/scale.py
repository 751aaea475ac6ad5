"""Axes: where a number lies on paper, and which round numbers are written beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A map of numbers to positions on paper, linear or logarithmic.

        position = start + (end - start) (f(x) - f(low)) / (f(high) - f(low)),    f(x) = x or log10 x

    Arguments:
        low, high: the numbers at the two ends, low < high; positive on a logarithmic scale.
        start, end: their positions.
        log: whether the scale is logarithmic.

    Example:
        >>> Scale(0, 10, 100, 200)(2.5), Scale(1, 100, 0, 10, log=True)(10)
        (125.0, 5.0)
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, x: float) -> float:
        """The position of a number."""
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, x))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers between the ends, at most `most` of them where the scale is linear or spans decades."""
        return _decades(self.low, self.high, most) if self.log else _steps(self.low, self.high, most)


def _steps(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) if abs(step) > 1e-9 else k * step for k in range(first, last + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / most))
    decades = [10.0**k for k in range(first, last + 1, stride)]
    if len(decades) >= 3:
        return decades
    finer = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
    return [x for x in finer if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)] or [low, high]


def span(values: list[float], *, log: bool = False, margin: float = 0.05, zero: bool = False) -> tuple[float, float]:
    """Ends of a scale that holds all values with a margin; a single value gets room on both sides.

    Arguments:
        values: what is drawn; what is not finite (or not positive, on a logarithmic scale) is left out.
        log: for a logarithmic scale.
        margin: room at both ends, as a share of the whole.
        zero: let a linear scale hold 0 where all values are on one side of it.

    Example:
        >>> span([1.0, 3.0], margin=0.5), span([2.0, 2.0]), span([1.0, 100.0], log=True, margin=0)
        ((0.0, 4.0), (1.5, 2.5), (1.0, 100.0))
    """
    values = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not values:
        return (0.1, 1.0) if log else (0.0, 1.0)
    if log:
        low, high = math.log10(min(values)), math.log10(max(values))
    else:
        low, high = min(values), max(values)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
    room = margin * (high - low)
    if room == 0 and high - low == 0:
        room = 0.5 if log else 0.25 * abs(high) or 0.5
    at_zero = zero and not log
    low, high = (low if at_zero and low == 0 else low - room), (high if at_zero and high == 0 else high + room)
    return (10**low, 10**high) if log else (low, high)


def short(value: float) -> str:
    """A number as it stands beside a tick: few characters, nothing rounded away that the tick says.

    Example:
        >>> [short(v) for v in (0.0, 0.25, 1500.0, 20000.0, 1e-7, -3.0, 2.5e6)]
        ['0', '0.25', '1,500', '20,000', '1e-7', '-3', '2.5e6']
    """
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".")
