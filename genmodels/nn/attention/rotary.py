"""Rotary positions, along a sequence and along the two axes of a map."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from genmodels.nn.attention.position import Position, Space, frequencies

LAYOUTS = ("interleaved", "half")
Layout = Literal["interleaved", "half"]


class Rotary(Position):
    """Queries and keys turned by angles proportional to their index, so that scores depend on the distance alone.

        (x_a, x_b) -> (x_a cos - x_b sin, x_a sin + x_b cos),    angle = index * base^(-2m / d) for pair m

    Angles are made in float64: in float32 a score drifts by 1e-4 at an offset of 1,000 and by 8e-3 at 100,000.

    Arguments:
        dim, heads: as in the attention it serves; the head width must be even.
        base: the slowest pair turns once in about 2 pi base positions.
        layout: which values form pair m: `interleaved` (2m, 2m + 1) or `half` (m, m + d/2). It is stored, and weights
            of one layout do not load into the other.
        cross: whether queries and keys of two sequences share one clock.

    Errors: ValueError for an odd head width. Source: Su et al. 2021 (RoFormer), section 3.2.

    Example:
        >>> turn(torch.tensor([1.0, 0, 1, 0]), torch.tensor([1]), 10000.0, "interleaved")
        tensor([[0.5403, 0.8415, 0.9999, 0.0100]])
    """

    rotates = True

    def __init__(
        self, dim: int, heads: int, *, base: float = 10000.0, layout: Layout = "interleaved", cross: bool = False
    ):
        super().__init__(dim, heads, cross=cross)
        if self.head_dim % 2:
            raise ValueError(f"rotation takes pairs: dim = {dim} over heads = {heads} is the odd width {self.head_dim}")
        self.base = base
        _store_layout(self, layout)

    def rotate(self, q: Tensor, k: Tensor, q0: int, k0: int, space: Space | None = None) -> tuple[Tensor, Tensor]:
        return self._turn(q, q0), self._turn(k, k0)

    def _turn(self, x: Tensor, start: int) -> Tensor:
        index = torch.arange(start, start + x.shape[-2], device=x.device)
        return turn(x, index, self.base, self.layout)

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        _check_layout(self, state, prefix, errors)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)


class Rotary2d(Position):
    """Rotary positions of a map: the first half of each head is turned by the row, the second by the column.

        score depends on (dy, dx) alone

    Arguments:
        dim, heads: as in the attention it serves; the head width must be a multiple of 4.
        base: as in `Rotary`; maps are short, so it is small.
        layout: which values of a half form a pair, as in `Rotary`.

    Errors: ValueError for a head width that is no multiple of 4. Source: Heo et al. 2024, section 3.2 (axial).

    Example:
        >>> position = Rotary2d(8, 1)
        >>> q = torch.randn(1, 1, 6, 8)
        >>> position.rotate(q, q, 0, 0, (2, 3))[0].shape
        torch.Size([1, 1, 6, 8])
    """

    dims = 2
    rotates = True

    def __init__(self, dim: int, heads: int, *, base: float = 100.0, layout: Layout = "interleaved"):
        super().__init__(dim, heads)
        if self.head_dim % 4:
            raise ValueError(
                f"rotation takes pairs of both axes: dim = {dim} over heads = {heads} is the width {self.head_dim}, "
                "not a multiple of 4"
            )
        self.base = base
        _store_layout(self, layout)

    def rotate(self, q: Tensor, k: Tensor, q0: int, k0: int, space: Space | None = None) -> tuple[Tensor, Tensor]:
        height, width = space if space is not None else self.space_of(q.shape[-2])
        index = torch.arange(height * width, device=q.device)
        y, x = torch.div(index, width, rounding_mode="floor"), index % width
        return self._turn(q, y, x), self._turn(k, y, x)

    def _turn(self, values: Tensor, y: Tensor, x: Tensor) -> Tensor:
        by_row, by_column = values.chunk(2, dim=-1)
        parts = [turn(by_row, y, self.base, self.layout), turn(by_column, x, self.base, self.layout)]
        return torch.cat(parts, dim=-1)

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        _check_layout(self, state, prefix, errors)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)


def turn(x: Tensor, index: Tensor, base: float, layout: Layout) -> Tensor:
    """The pairs of `x (.., L, d)` turned by the angles of `index (L,)`; norms are kept."""
    angles = index.to(torch.float64)[:, None] * frequencies(x.shape[-1], base, x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    if layout == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def _store_layout(position: Position, layout: Layout) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    position.layout = layout
    position.register_buffer("layout_number", torch.tensor(LAYOUTS.index(layout)))


def _check_layout(position: Position, state: dict, prefix: str, errors: list[str]) -> None:
    stored = state.get(f"{prefix}layout_number")
    if stored is not None and LAYOUTS[int(stored)] != position.layout:
        errors.append(
            f"{prefix}layout: the weights pair their values {LAYOUTS[int(stored)]}, this module {position.layout}"
        )
