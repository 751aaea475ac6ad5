"""Learned densities in the plane: on a grid beside the truth, and their mass."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.data.spec import Batch
from genmodels.evaluation.families import is_flow

_GRID = 256
_ROWS = 4096


def extent_of(points: Tensor, margin: float = 0.15) -> list[float]:
    """[x0, x1, y0, y1] of a box around points (N, 2), with a margin on every side.

    Example:
        >>> extent_of(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), 0.5)
        [-0.5, 1.5, -1.0, 3.0]
    """
    low, high = points.double().amin(0), points.double().amax(0)
    spare = margin * (high - low)
    low, high = low - spare, high + spare
    return [float(low[0]), float(high[0]), float(low[1]), float(high[1])]


def midpoints(extent: list[float], size: int) -> tuple[Tensor, float]:
    """Midpoints of a grid, (size^2, 2) float32 with rows of constant y from the lowest, and the area of a cell."""
    x0, x1, y0, y1 = extent
    along = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    y, x = torch.meshgrid(y0 + (y1 - y0) * along, x0 + (x1 - x0) * along, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1).float(), (x1 - x0) * (y1 - y0) / size**2


def width_of(model) -> torch.dtype:
    """The type of the numbers of a model: what it was trained in."""
    return next((p.dtype for p in model.core.parameters() if p.is_floating_point()), torch.float32)


def on_grid(
    model, extent: list[float], size: int, *, method: str = "log_likelihood", **options
) -> tuple[Tensor, float]:
    """The log-density (size, size) float64 on a grid, row 0 the lowest, and its mass."""
    points, area = midpoints(extent, size)
    points, parts = points.to(width_of(model)), []
    for start in range(0, len(points), _ROWS):
        part = points[start : start + _ROWS]
        batch = Batch(part, index=torch.arange(start, start + len(part))).to(model.device)
        parts.append(getattr(model, method)(batch, **options).cpu().nats)
    values = torch.cat(parts)
    return values.view(size, size), float(values.exp().sum() * area)


def mass_of(trial) -> tuple[float, float]:
    """The mass of a model's density on a grid, and on one twice as fine.

    The box covers 8,192 samples of a flow and 30 % more; of an energy, whose samples are dear, the data and as much
    again on every side.
    """
    points, margin = trial.points, 1.0
    if is_flow(trial.model):
        samples = trial.model.sample(8192, seed=trial.seed, weights=trial.weights)
        points, margin = torch.cat([points, samples.x.cpu()]), 0.3
    extent = extent_of(points, margin)
    first, second = (on_grid(trial.model, extent, size, **trial.options)[1] for size in (_GRID, 2 * _GRID))
    return first, second
