"""Pictures of learned densities and scores in the plane, with the true ones where they are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.data.toy import density

Function = Callable[[Tensor], Tensor]

_PIXELS = 160  # of a density, per side
_ARROWS = 22  # of a field, per side
_FAINT = 1e-3  # of the largest density: no arrows below


def truth_of(spec: DataSpec):
    """The exact density of a two-dimensional data set, None if unknown.

    Example:
        >>> truth_of(DataSpec("table", (2,))) is None, truth_of(DataSpec("toy_moons", (2,))) is None
        (True, False)
    """
    if spec.event_shape != (2,) or not spec.name.startswith("toy_"):
        return None
    try:
        return density(spec.name)
    except InputError:
        return None


def picture_of_fields(
    spec: DataSpec, score: Function, log_density: Function | None, location: Tensor, scale: Tensor, width: float = 2.6
) -> Image.Image:
    """Density and scores of a model in the plane, with the true ones above them.

    Arguments:
        spec: the data set; the true density is looked up by its name.
        score: maps `(N, 2)` points to the model's scores.
        log_density: maps `(N, 2)` points to `(N,)`; None for a model without a density.
        location, scale: `(2,)` mean and standard deviation of the data.
        width: half-width of the picture in standard deviations.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    box = [(float(m - width * s), float(m + width * s)) for m, s in zip(location, scale, strict=True)]
    truth = truth_of(spec)
    rows = [("learned", log_density, score)]
    if truth is not None:
        rows.append(("true", truth.log_prob, lambda x: _slopes(truth.log_prob, x, 1e-3 * float(scale.min()))))
    shown = log_density if truth is None else truth.log_prob
    columns = 1 if log_density is None else 2
    height = 4 * float(scale[1] / scale[0]) + 0.5
    figure = Figure(figsize=(4 * columns, len(rows) * min(8.0, max(1.5, height))), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    top, arrows = None, None
    for row, (name, log_p, field) in zip(axes, reversed(rows), strict=True):  # the true density sets the scales
        if log_density is not None:
            values = log_p(_grid(box, _PIXELS)).detach().double().exp().cpu().numpy().reshape(_PIXELS, _PIXELS)
            top = float(values.max()) if top is None else top
            row[0].imshow(values.T, origin="lower", extent=[*box[0], *box[1]], aspect="equal", vmin=0, vmax=top)
            row[0].set_title(f"{name} density")
        arrows = _arrows(row[-1], box, field, shown, arrows)
        row[-1].set_title(f"{name} score")
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _arrows(axes, box, field: Function, shown: Function | None, longest: float | None) -> float:
    """Draw a vector field where there are data; all fields of a picture share a scale, which is returned."""
    points = _grid(box, _ARROWS)
    if shown is not None:
        log_p = shown(points).detach()
        points = points[log_p > log_p.max() + np.log(_FAINT)]
    vectors = field(points).detach().double().cpu()
    lengths = vectors.norm(dim=1, keepdim=True)
    if longest is None:
        longest = float(lengths[lengths.isfinite()].quantile(0.9)) or 1.0
    vectors = (vectors * (longest / lengths).clamp(max=1)).numpy()  # the longest would hide all others
    size = (box[0][1] - box[0][0]) / _ARROWS
    x = points.cpu().numpy()
    axes.quiver(x[:, 0], x[:, 1], vectors[:, 0], vectors[:, 1], angles="xy", scale_units="xy", scale=longest / size,
                width=0.004)
    axes.set(xlim=box[0], ylim=box[1], aspect="equal")
    return longest


def _grid(box, count: int) -> Tensor:
    sides = [torch.linspace(*side, count) for side in box]
    return torch.stack([side.flatten() for side in torch.meshgrid(*sides, indexing="ij")], dim=1)


def _slopes(log_density: Function, x: Tensor, step: float) -> Tensor:
    """The gradient by central differences, in float64, because not all densities are differentiable everywhere."""
    x = x.double()
    moves = step * torch.eye(2, dtype=x.dtype)
    sides = [(log_density(x + move) - log_density(x - move)) / (2 * step) for move in moves]
    return torch.nan_to_num(torch.stack(sides, dim=1), nan=0.0, posinf=0.0, neginf=0.0)
