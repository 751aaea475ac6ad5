"""Relative bias of Swin Transformers: one learned number for each offset of a map, at any resolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.attention.position import Position, Space


class Swin2d(Position):
    """A learned bias for each head and each offset (dy, dx) between two places of a map.

        b(i, j) = table[(dy + H_m - 1)(2 W_m - 1) + dx + W_m - 1, h],    (dy, dx) = query minus key

    The offset is stored query minus key, the other way round than distances are elsewhere here: published checkpoints
    have it so. The index is computed, not saved. On a map of another size than the table was made for, the table is
    resampled bicubically with its corners kept in place, so that offsets keep their meaning as parts of the map.

    Arguments:
        dim, heads: as in the attention it serves.
        size: height and width of the map that the table is made for.

    Shapes: table `((2 H_m - 1)(2 W_m - 1), H)`. Errors: ValueError for a size below 1.
    Source: Liu et al. 2021, section 3.2, equation 4.

    Example:
        >>> Swin2d.index((2, 2))
        tensor([[4, 3, 1, 0],
                [5, 4, 2, 1],
                [7, 6, 4, 3],
                [8, 7, 5, 4]])
    """

    dims = 2
    score = "shared"

    def __init__(self, dim: int, heads: int, *, size: tuple[int, int]):
        super().__init__(dim, heads)
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"size must be (height, width), at least 1 each, got {tuple(size)}")
        self.size = tuple(size)
        self.table = nn.Parameter(torch.randn((2 * size[0] - 1) * (2 * size[1] - 1), heads) * 0.02)

    @staticmethod
    def index(space: Space, *, device=None) -> Tensor:
        """The row of a table made for `space`, for each query and key: int64 `(H W, H W)`."""
        height, width = space
        place = torch.arange(height * width, device=device)
        y, x = torch.div(place, width, rounding_mode="floor"), place % width
        dy, dx = y[:, None] - y, x[:, None] - x
        return (dy + height - 1) * (2 * width - 1) + dx + width - 1

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        space = self.space_of(Lq) if space is None else space
        table = self.table
        if tuple(space) != self.size:
            table = resample(table, self.size, space)
        return table[self.index(space, device=q.device)].permute(2, 0, 1)[None]

    def space_of(self, length: int) -> Space:
        if length != self.size[0] * self.size[1]:
            raise ValueError(
                f"{length} positions are not the {self.size[0]} x {self.size[1]} of Swin2d: pass space, (height, width)"
            )
        return self.size


def resample(table: Tensor, size: Space, space: Space) -> Tensor:
    """A table made for maps of `size`, resampled for maps of `space`: bicubic, corners and centre kept in place.

    As two small products and not by `interpolate`: this one has a centre for maps of one row, and gradients that are
    the same in every run.

    Shapes: `((2 H_m - 1)(2 W_m - 1), heads)` to `((2 H - 1)(2 W - 1), heads)`.

    Example:
        >>> resample(torch.ones(9, 1), (2, 2), (1, 2)).flatten()
        tensor([1., 1., 1.])
    """
    rows, columns = (cubic_weights(2 * a - 1, 2 * b - 1, like=table) for a, b in zip(size, space, strict=True))
    grid = table.unflatten(0, (2 * size[0] - 1, 2 * size[1] - 1))
    return torch.einsum("ya,xb,abh->yxh", rows, columns, grid).flatten(0, 1)


def cubic_weights(source: int, target: int, *, like: Tensor) -> Tensor:
    """The matrix `(target, source)` of cubic convolution (a = -0.75) with the ends aligned and kept beyond the border.

    Source: Keys 1981, equation 15.

    Example:
        >>> cubic_weights(3, 1, like=torch.zeros(()))
        tensor([[0., 1., 0.]])
    """
    place = torch.arange(target, dtype=torch.float64, device=like.device)
    # A single sample stands at the centre: there are no two ends to align.
    place = place * ((source - 1) / (target - 1)) if target > 1 else place + (source - 1) / 2
    first = place.floor()
    weights = torch.zeros(target, source, dtype=torch.float64, device=like.device)
    for tap in range(-1, 3):
        t = (place - (first + tap)).abs()
        near = (1.25 * t - 2.25) * t * t + 1
        far = ((-0.75 * t + 3.75) * t - 6) * t + 3
        column = (first + tap).clamp(0, source - 1).long()
        weights = weights.scatter_add(1, column[:, None], torch.where(t <= 1, near, far)[:, None])
    return weights.to(like.dtype)
