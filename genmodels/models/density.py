"""Kinds of models, and learned densities in the plane: their values on a grid, and their integral."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from genmodels.core.data import Batch
from genmodels.models.base import GenerativeModel


def is_flow(model: GenerativeModel) -> bool:
    """Whether the model is a normalizing flow: its core has a `flow` with a bijection.

    Example:
        >>> from genmodels.core.data import DataSpec
        >>> from genmodels.models.energy import EnergyModel
        >>> from genmodels.models.normalizing_flows import RealNVP
        >>> models = [kind(DataSpec("plane", (2,))) for kind in (RealNVP, EnergyModel)]
        >>> [is_flow(model) for model in models], [is_energy(model) for model in models]
        ([True, False], [False, True])
    """
    return hasattr(getattr(model.core, "flow", None), "bijection")


def has_gaps(model: GenerativeModel) -> bool:
    """Whether the model is of a table whose columns of few values are filled with noise, so that values are bounds."""
    gap = getattr(getattr(model, "encoding", None), "gap", None)
    return gap is not None and bool(gap.any())


def is_diffusion(model: GenerativeModel) -> bool:
    """Whether the model is a diffusion with a bound: its core has a `schedule`, and it has an `elbo`.

    Example:
        >>> from genmodels.core.data import DataSpec
        >>> from genmodels.models.ddpm import DDPM
        >>> is_diffusion(DDPM(DataSpec("plane", (2,)), num_steps=4))
        True
    """
    return hasattr(model, "elbo") and hasattr(model.core, "schedule")


def is_masked_diffusion(model: GenerativeModel) -> bool:
    """Whether the model is a masked diffusion: it has a `masking`, and a bound in continuous time."""
    return hasattr(model, "masking")


def is_energy(model: GenerativeModel) -> bool:
    """Whether the model is energy-based: its core has an `energy`, and the model a `normaliser`."""
    return hasattr(model, "normaliser") and hasattr(model.core, "energy")


def is_of_noisy_data(model: GenerativeModel) -> bool:
    """Whether the model has only the density of noisy data, hence no likelihood: a flow trained with `augment`.

    Example:
        >>> from genmodels.core.data import DataSpec
        >>> from genmodels.models.normalizing_flows import TarFlow
        >>> small = {"patch": 4, "blocks": 1, "width": 8, "depth": 1, "heads": 2, "preprocess": "centre"}
        >>> [is_of_noisy_data(TarFlow(DataSpec("digits", (1, 8, 8), levels=17), **small, augment=s)) for s in (0, 0.1)]
        [False, True]
    """
    return getattr(getattr(model, "core", None), "kind", None) == "unnormalised"


def needs_class(model: GenerativeModel) -> bool:
    """Whether the model has a density for each class only: it was never trained without them."""
    return model.conditional and not model.has_null_class


_ROWS = 4096  # points in one call of a density on a grid
_MOST_SAMPLES, _DEPTH = 16, 40  # samples in a cell of an integral at most, and how often it is quartered for that
_NODES = 5  # points along each side of a cell
_CELLS = 512  # cells in one call of a density


def extent_of(points: Tensor) -> list[float]:
    """[x0, x1, y0, y1] of a box around points (N, 2), with a margin of 15 % on every side, or of the value itself.

    Example:
        >>> extent_of(torch.tensor([[0.0, 0.0], [20.0, 40.0]])), extent_of(torch.tensor([[0.0, 20.0]]))
        ([-3.0, 23.0, -6.0, 46.0], [-1.0, 1.0, 17.0, 23.0])
    """
    low, high = points.double().amin(0), points.double().amax(0)
    spare = 0.15 * torch.where(high > low, high - low, high.abs())
    spare = torch.where(spare > 0, spare, 1.0)
    low, high = low - spare, high + spare
    return [float(low[0]), float(high[0]), float(low[1]), float(high[1])]


def midpoints(extent: list[float], size: int) -> Tensor:
    """Midpoints of a grid, (size^2, 2) float32 with rows of constant y from the lowest."""
    x0, x1, y0, y1 = extent
    along = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    y, x = torch.meshgrid(y0 + (y1 - y0) * along, x0 + (x1 - x0) * along, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1).float()


def width_of(model) -> torch.dtype:
    """The floating-point type of the weights of a model."""
    return next((p.dtype for p in model.core.parameters() if p.is_floating_point()), torch.float32)


def on_grid(model, extent: list[float], size: int, *, method: str = "log_likelihood", **options) -> Tensor:
    """The log-density (size, size) float64 on a grid, row 0 the lowest."""
    points, parts = midpoints(extent, size).to(width_of(model)), []
    for start in range(0, len(points), _ROWS):
        part = points[start : start + _ROWS]
        batch = Batch(part, index=torch.arange(start, start + len(part))).to(model.device)
        parts.append(getattr(model, method)(batch, **options).cpu().nats)
    return torch.cat(parts).view(size, size)


def mass_of(
    model: GenerativeModel, points: Tensor, *, seed: int, weights: str | float, options: dict
) -> tuple[float, float, int]:
    """The integral of a model's density over the plane, its error, and the points it took.

    Cells are placed by `points` (N, 2), items of the data, and for a flow, which samples fast, by 8,192 samples too.
    `options` are those of the model's `log_likelihood`.
    """
    if is_flow(model):
        samples = model.sample(8192, seed=seed, weights=weights)
        points = torch.cat([points, samples.x.cpu()])

    def log_density(rows: Tensor) -> Tensor:
        batch = Batch(rows.to(width_of(model)), index=torch.arange(len(rows))).to(model.device)
        return model.log_likelihood(batch, **options).cpu().nats

    return over_the_plane(log_density, points.double())


def over_the_plane(
    log_density: Callable[[Tensor], Tensor], samples: Tensor, *, settled: float = 2e-4, most: int = 600_000
) -> tuple[float, float, int]:
    """The integral of a density over the whole plane, its error, and the number of points it took.

    The plane is mapped to a square, u = t / (1 - t^2) in each coordinate, in units of the samples' standard deviations.
    The square is cut into cells, which are quartered where they hold many samples, and then where that changes their
    mass, until the changes add up to less than `settled` or `most` points are used. A peak between the points of the
    rule that samples, or points beyond the outermost ones, reveal counts as error too. The rule does not converge for
    densities along a line that is thinner than a thousandth of its length.

    Arguments:
        log_density: of points (N, 2) float64.
        samples: (N, 2) float64 draws of the density or of a similar one; peaks are found where they lie.
        settled: tolerance of the integral.
        most: most points that are used, apart from those of the last refinement.

    Example:
        >>> x = torch.randn(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> mass, error, _ = over_the_plane(lambda x: -x.square().sum(1) / 2 - math.log(2 * math.pi), x)
        >>> round(mass, 4), error <= 2e-4
        (1.0, True)
    """
    samples = samples[samples.isfinite().all(1)]
    centre, scale = samples.mean(0), samples.std(0).clamp(min=1e-100)
    probes = torch.cat([samples, _beyond(samples)])
    along = (probes - centre) / scale
    t = 2 * along / (1 + (1 + 4 * along.square()).sqrt())
    low, size, owner = _split_by_samples(t, len(samples))
    height = torch.cat([log_density(rows) for rows in probes.split(_CELLS * _NODES**2)])
    height = height.to(t.dtype).exp() * _slope(t, scale)
    coarse, mass, total_error, seen = _masses(log_density, centre, scale, low, size)[0], 0.0, 0.0, len(probes)
    while len(low):
        # Compare each cell with its four quarters, and finish the cells with the smallest changes.
        owner = 4 * owner + _quarter_of(t, low[owner], size[owner])
        low, size = _quarters(low, size)
        fine, peak = _masses(log_density, centre, scale, low, size)
        seen += fine.numel() * _NODES**2
        shown = torch.zeros_like(peak).scatter_reduce(0, owner, height, "amax")
        missed = torch.where(shown > 2 * peak, shown * size.square(), 0.0)
        fine = fine.view(-1, 4)
        error = ((fine.sum(1) - coarse).abs() + missed.view(-1, 4).sum(1)).nan_to_num(math.inf)
        order = error.argsort()
        sums = total_error + error[order].cumsum(0)
        finish = bool(sums[-1] <= settled) or seen > most
        done = torch.zeros_like(error, dtype=torch.bool)
        done[order] = finish | (sums <= (total_error + settled) / 2)
        mass, total_error = mass + float(fine[done].sum()), total_error + float(error[done].sum())
        left = ~done.repeat_interleave(4)
        low, size, coarse = low[left], size[left], fine[~done].flatten()
        stays = left[owner]
        t, height, owner = t[stays], height[stays], (left.cumsum(0) - 1)[owner[stays]]
    return mass, total_error, seen


def _beyond(samples: Tensor) -> Tensor:
    """Points (2 N, 2) one and two steps from each sample away from its eighth neighbour: some lie outside a peak."""
    places = samples.cpu().numpy()
    neighbour = cKDTree(places).query(places, k=[min(9, len(places))])[1][:, 0]  # the first is the sample itself
    step = samples - samples[torch.as_tensor(neighbour, device=samples.device)]
    return torch.cat([samples + step, samples + 2 * step])


def _split_by_samples(points: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cells (corner, size) of the square [-1, 1)^2 with few of the first `samples` points each, and every point's cell.

    A cell with many samples may hide a peak between the points of the rule.
    """
    low, size = points.new_full((1, 2), -1.0), points.new_full((1,), 2.0)
    owner = torch.zeros(len(points), dtype=torch.long, device=points.device)
    for _ in range(_DEPTH):
        full = torch.bincount(owner[:samples], minlength=len(low)) > _MOST_SAMPLES
        if not bool(full.any()):
            break
        # Full cells are replaced by their quarters, after the cells that stay.
        index = torch.where(full, (~full).sum() + 4 * (full.cumsum(0) - 1), (~full).cumsum(0) - 1)
        owner = index[owner] + torch.where(full[owner], _quarter_of(points, low[owner], size[owner]), 0)
        below, halves = _quarters(low[full], size[full])
        low, size = torch.cat([low[~full], below]), torch.cat([size[~full], halves])
    return low, size, owner


def _quarter_of(points: Tensor, low: Tensor, size: Tensor) -> Tensor:
    """The number of the quarter of its cell, in the order of `_quarters`, in which each point lies."""
    upper = (points >= low + size[:, None] / 2).long()
    return 2 * upper[:, 0] + upper[:, 1]


def _quarters(low: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The four quarters of each cell, cell by cell."""
    corners = torch.cartesian_prod(*[torch.arange(2.0, dtype=low.dtype, device=low.device)] * 2)
    return (low[:, None] + corners * size[:, None, None] / 2).flatten(0, 1), (size / 2).repeat_interleave(4)


def _slope(t: Tensor, scale: Tensor) -> Tensor:
    """The determinant of the map from the square to the plane, at points of the square."""
    return ((1 + t.square()) / (1 - t.square()).square()).prod(1) * scale.prod()


def _masses(log_density: Callable, centre: Tensor, scale: Tensor, low: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The integral of the density over each cell of the square, by Gauss-Legendre rules, and its largest value there.

    That value is a density in the square.
    """
    nodes, weights = (torch.as_tensor(v, dtype=low.dtype, device=low.device)
                      for v in np.polynomial.legendre.leggauss(_NODES))
    at, weight = torch.cartesian_prod(nodes, nodes), torch.cartesian_prod(weights, weights).prod(1) / 4
    found, largest = [], []
    for corner, side in zip(low.split(_CELLS), size.split(_CELLS), strict=True):
        t = (corner[:, None] + side[:, None, None] * (1 + at) / 2).flatten(0, 1)
        density = log_density(centre + scale * t / (1 - t.square())).to(low.dtype).exp() * _slope(t, scale)
        density = density.view(len(side), -1)
        found.append(density @ weight * side.square())
        largest.append(density.amax(1))
    return torch.cat(found), torch.cat(largest)
