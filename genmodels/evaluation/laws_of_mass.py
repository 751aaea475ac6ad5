"""The density that a bijection of the plane makes of a normal latent must integrate to one."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.subject import Subject

LAWS = Laws()

_SAMPLES, _CROWD, _DEPTH = 8192, 16, 40  # samples that place the cells of an integral, at most 16 in each
_NODES = 5  # points along each side of a cell
_CELLS = 512  # cells looked at together
_SETTLED = 2e-4  # cells are fine enough when quartering all of them changes the mass by less
_POINTS = 4_000_000


@LAWS.add("integrates to one", 1e-3, "the density of a normal latent, integrated over the plane, is one")
@torch.no_grad()
def integrates_to_one(s: Subject) -> Measured:
    """On the plane mapped to a square, by cells refined until the sum settles at 2e-4."""
    if s.shape != (2,):
        raise NotApplicable("for events in the plane")
    if not all(math.isinf(end) for end in (*s.x_range, *s.z_range)):
        raise NotApplicable("defined on a part of the plane")
    latents = torch.randn(_SAMPLES, 2, generator=s.generator("plane"), dtype=torch.float64).to(s.x.device)
    cond = None if s.cond is None else s.cond[:1].expand(len(latents), *s.cond.shape[1:])
    points, _ = s.run(latents, True, cond=cond)
    centre, axes = points.mean(0), torch.linalg.cholesky(points.T.cov())
    along = torch.linalg.solve_triangular(axes, (points - centre).T, upper=False).T
    # The whole plane as a square, the density's axes along its sides: u = t / (1 - t^2), -1 < t < 1.
    low, size = _crowded(2 * along / (1 + (1 + 4 * along.square()).sqrt()))
    coarse, mass, doubt, seen = _masses(s, centre, axes, low, size), 0.0, 0.0, 0
    while len(low):
        # Each cell against the four in it; the cells that are least in doubt are done with.
        low, size = _quarters(low, size)
        fine = _masses(s, centre, axes, low, size).view(-1, 4)
        seen += fine.numel() * _NODES**2
        error = (fine.sum(1) - coarse).abs().nan_to_num(math.inf)
        order = error.argsort()
        sums = doubt + error[order].cumsum(0)
        every = bool(sums[-1] <= _SETTLED)
        done = torch.zeros_like(error, dtype=torch.bool)
        done[order] = every | (sums <= (doubt + _SETTLED) / 2)
        mass, doubt = mass + float(fine[done].sum()), doubt + float(error[done].sum())
        left = ~done.repeat_interleave(4)
        low, size, coarse = low[left], size[left], fine[~done].flatten()
        if len(low) and seen > _POINTS:
            raise NotApplicable(f"{seen} points do not settle this integral (about {mass + float(coarse.sum()):.4f})")
    return Measured(abs(mass - 1), f"mass {mass:.6f}, {seen} points")


def _crowded(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Cells (corner, size) of the square (-1, 1)^2 with few samples each: no peak can hide between their points."""
    low, size = samples.new_full((1, 2), -1.0), samples.new_full((1,), 2.0)
    owner = torch.zeros(len(samples), dtype=torch.long, device=samples.device)
    for _ in range(_DEPTH):
        full = torch.bincount(owner, minlength=len(low)) > _CROWD
        if not bool(full.any()):
            break
        # What is full becomes four cells, behind those that stay.
        index = torch.where(full, (~full).sum() + 4 * (full.cumsum(0) - 1), (~full).cumsum(0) - 1)
        upper = (samples >= low[owner] + size[owner, None] / 2).long()
        owner = index[owner] + torch.where(full[owner], 2 * upper[:, 0] + upper[:, 1], 0)
        below, halves = _quarters(low[full], size[full])
        low, size = torch.cat([low[~full], below]), torch.cat([size[~full], halves])
    return low, size


def _quarters(low: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The four cells in each of some cells, one cell after the other."""
    corners = torch.cartesian_prod(*[torch.arange(2.0, dtype=low.dtype, device=low.device)] * 2)
    return (low[:, None] + corners * size[:, None, None] / 2).flatten(0, 1), (size / 2).repeat_interleave(4)


def _masses(s: Subject, centre: Tensor, axes: Tensor, low: Tensor, size: Tensor) -> Tensor:
    """The integral of the density over each cell of the square, by the rule of Gauss and Legendre."""
    nodes, weights = (torch.as_tensor(v, dtype=low.dtype, device=low.device)
                      for v in np.polynomial.legendre.leggauss(_NODES))
    at, weight = torch.cartesian_prod(nodes, nodes), torch.cartesian_prod(weights, weights).prod(1) / 4
    found = []
    for corner, side in zip(low.split(_CELLS), size.split(_CELLS), strict=True):
        t = (corner[:, None] + side[:, None, None] * (1 + at) / 2).flatten(0, 1)
        points = centre + t / (1 - t.square()) @ axes.T
        slope = ((1 + t.square()) / (1 - t.square()).square()).prod(1) * axes.diagonal().prod()
        cond = None if s.cond is None else s.cond[:1].expand(len(points), *s.cond.shape[1:])
        z, logdet = s.run(points, cond=cond)
        density = (logdet - z.square().sum(1) / 2 - math.log(2 * math.pi)).exp() * slope
        found.append(density.view(len(side), -1) @ weight * side.square())
    return torch.cat(found)
