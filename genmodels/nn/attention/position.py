"""Interface of position schemes, distances, shift and sinusoids; rotary positions of sequences and maps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.core.errors import one_of


def relative_positions(Lq: int, Lk: int | None = None, q0: int = 0, k0: int = 0, *, device=None) -> Tensor:
    """The distances r[i, j] = (k0 + j) - (q0 + i), as int64 `(Lq, Lk)`; Lk is Lq by default.

    Example:
        >>> relative_positions(3)
        tensor([[ 0,  1,  2],
                [-1,  0,  1],
                [-2, -1,  0]])
    """
    i = torch.arange(q0, q0 + Lq, device=device)
    j = torch.arange(k0, k0 + (Lq if Lk is None else Lk), device=device)
    return j - i[:, None]


def distances(Lq: int, Lk: int, q0: int = 0, k0: int = 0, *, device=None) -> Tensor:
    """Every distance that occurs between Lq queries and Lk keys, ascending: int64 `(Lq + Lk - 1,)`.

    Example:
        >>> distances(2, 3, q0=1)
        tensor([-2, -1,  0,  1])
    """
    return torch.arange(1 - Lq, Lk, device=device) + (k0 - q0)


def rel_shift(x: Tensor, length: int) -> Tensor:
    """Scores by distance to scores by key: out[i, j] = x[i, j + C-1-i] for C queries and `length` keys.

    With a column of padding on the left, the memory is read as rows that are one column narrower, so that each row is
    shifted by one more. C + length - 1 columns are needed.

    Shapes: `x (.., C, W)` to `(.., C, length)`. Errors: ValueError when W < C + length - 1.
    Source: Dai et al. 2019 (Transformer-XL), appendix B.

    Example:
        >>> rel_shift(torch.arange(1.0, 22).view(3, 7), 4)
        tensor([[ 3.,  4.,  5.,  6.],
                [ 9., 10., 11., 12.],
                [15., 16., 17., 18.]])
    """
    rows, width = x.shape[-2:]
    if width < rows + length - 1:
        raise ValueError(f"{rows} queries and {length} keys are {rows + length - 1} distances apart, x has {width}")
    return shift_padded(pad(x, (1, 0)))[..., :length]


def shift_padded(x: Tensor) -> Tensor:
    """`rel_shift` of scores that carry the extra column on the left already, at full width `(.., C, W)`."""
    *lead, rows, width = x.shape
    return x.reshape(*lead, width, rows)[..., 1:, :].reshape(*lead, rows, width - 1)


def skew(x: Tensor) -> Tensor:
    """Scores by distance ..., -1, 0 to scores by key, right at and below the diagonal only.

    Column W-1 is distance 0. Values to the right of the diagonal are meaningless and must be masked.

    Shapes: `x (.., C, W)` to the same, W >= C: the first query stands at key W - C.
    Source: Huang et al. 2018 (Music Transformer), section 3.4.1.

    Example:
        >>> skew(torch.arange(1.0, 10).view(3, 3))
        tensor([[3., 0., 4.],
                [5., 6., 0.],
                [7., 8., 9.]])
    """
    return shift_padded(pad(x, (1, 0)))


def by_distance(table: Tensor, Lq: int, Lk: int) -> Tensor:
    """One value for each distance to one for each (query, key): out[.., i, j] = table[.., j + Lq-1-i].

    Shapes: `table (.., Lq + Lk - 1)`, ascending as `distances` gives them, to `(.., Lq, Lk)`.

    Example:
        >>> by_distance(distances(2, 3), 2, 3)
        tensor([[ 0,  1,  2],
                [-1,  0,  1]])
    """
    return table.unfold(-1, Lk, 1).flip(-2)


def sinusoids(r: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """The encoding of distances (negative ones too): R[r]_{2m} = sin(r w_m), R[r]_{2m+1} = cos(r w_m).

        w_m = base^(-2m / dim)

    Computed in float64 for the distances needed, so that there is neither a longest length nor drift.

    Shapes: `r (N,)` to `(N, dim)` float64. Source: Vaswani et al. 2017, section 3.5.

    Example:
        >>> sinusoids(torch.tensor([0, -1]), 4).float()
        tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
                [-0.8415,  0.5403, -0.0100,  0.9999]])
    """
    angles = r.to(torch.float64)[:, None] * frequencies(dim, base, r.device)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim]


def frequencies(dim: int, base: float, device) -> Tensor:
    """w_m = base^(-2m / dim) for the ceil(dim / 2) pairs, float64."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.float64, device=device) / -dim)


Space = tuple[int, int]


class Position(nn.Module):
    """A position scheme: rotation of q and k, and biases of queries, scores and values, all optional.

        s(i, j) = ((q_i + u) . k_j) / sqrt(d) + b(i, j),    y_i = sum_j a_ij v_j + value_bias_i

    Query i of a call has absolute index q0 + i, key j has k0 + j. This class adds no positions: the attention is
    equivariant to permutations.

    Arguments:
        dim: width D of the attention.
        heads: number of heads H; the head width is d = D / H.
        cross: whether queries and keys of two sequences share one index, so that their distance has a meaning; without
            it the scheme is refused in cross-attention.

    Attributes:
        dims: 1 for sequences; 2 for maps, flattened row by row, whose `space` is then passed on.
        rotates: whether `rotate` changes q and k.
        score: what `score_bias` gives: `none`, `shared` by the batch `(1, H, Lq, Lk)`, or `content` `(B, H, Lq, Lk)`.
        adds_values: whether `value_bias` gives anything; it needs the weights themselves, hence the explicit path.
        past_only: whether only keys at or before the query have a position, so that the attention is causal.

    Errors: ValueError when `heads` does not divide `dim`.
    """

    dims: int = 1
    rotates: bool = False
    score: Literal["none", "shared", "content"] = "none"
    adds_values: bool = False
    past_only: bool = False

    def __init__(self, dim: int, heads: int, *, cross: bool = False):
        super().__init__()
        self.dim, self.heads, self.head_dim, self.cross = dim, heads, head_width(dim, heads), cross

    def rotate(self, q: Tensor, k: Tensor, q0: int, k0: int, space: Space | None = None) -> tuple[Tensor, Tensor]:
        """Queries `(B, H, Lq, d)` and keys `(B, H, Lk, d)` rotated by their absolute indices."""
        return q, k

    def query_bias(self) -> Tensor | None:
        """u `(H, d)`, added to every query where it meets a key."""
        return None

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor | None:
        """b `(B or 1, H, Lq, Lk)` in units of the logits (divided by sqrt(d) already where the equation says so)."""
        return None

    def value_bias(self, a: Tensor, q0: int, k0: int, space: Space | None = None) -> Tensor | None:
        """The value bias `(B, H, Lq, d)` for weights `a (B, H, Lq, Lk)`."""
        return None

    def space_of(self, length: int) -> Space:
        """The default height and width of a map of `length` positions, for schemes with a fixed size."""
        raise ValueError(f"{type(self).__name__} needs space = (height, width) of the {length} positions")

    def score_elements(self, batch: int, Lq: int, Lk: int) -> int:
        """Numbers that `score_bias` allocates."""
        return {"none": 0, "shared": self.heads, "content": batch * self.heads}[self.score] * Lq * Lk


class DistanceBias(Position):
    """A position scheme whose bias is a function of head and distance alone: b(i, j) = table(r)[h].

    A subclass defines `table`.
    """

    score = "shared"

    def table(self, r: Tensor) -> Tensor:
        """The bias of distances `r (N,)`, int64, as `(H, N)`."""
        raise NotImplementedError

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        r = distances(Lq, Lk, q0, k0, device=q.device)
        table = self.table(r)
        return by_distance(table.to(torch.promote_types(q.dtype, torch.float32)), Lq, Lk)[None]


def head_width(dim: int, heads: int) -> int:
    """D / H, or ValueError with both numbers."""
    if heads < 1 or dim < 1 or dim % heads:
        raise ValueError(f"heads = {heads} does not divide the width {dim}")
    return dim // heads


LAYOUTS = ("interleaved", "half")
Layout = Literal["interleaved", "half"]


class _Rotation(Position):
    """Common parts of rotary positions: the base of the angles and the layout of the pairs, which is saved."""

    rotates = True

    def __init__(self, dim: int, heads: int, base: float, layout: Layout, *, cross: bool = False):
        super().__init__(dim, heads, cross=cross)
        one_of("layout", layout, LAYOUTS)
        self.base, self.layout = base, layout
        self.register_buffer("layout_number", torch.tensor(LAYOUTS.index(layout)))

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        stored = state.get(f"{prefix}layout_number")
        if stored is not None and LAYOUTS[int(stored)] != self.layout:
            errors.append(
                f"{prefix}layout: the weights pair their values {LAYOUTS[int(stored)]}, this module {self.layout}"
            )
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)


class Rotary(_Rotation):
    """Queries and keys rotated by angles proportional to their index, so that scores depend only on the distance.

        (x_a, x_b) -> (x_a cos - x_b sin, x_a sin + x_b cos),    angle = index * base^(-2m / d) for pair m

    Angles are in float64: in float32 the error of a score is 1e-4 at an offset of 1,000 and 8e-3 at 100,000.

    Arguments:
        dim, heads: those of the attention; the head width must be even.
        base: the slowest pair rotates once in about 2 pi base positions.
        layout: which values form pair m: `interleaved` (2m, 2m + 1) or `half` (m, m + d/2). It is saved; weights of one
            layout do not load into the other.
        cross: whether queries and keys of two sequences share one index.

    Errors: ValueError for an odd head width. Source: Su et al. 2021 (RoFormer), section 3.2.

    Example:
        >>> turn(torch.tensor([1.0, 0, 1, 0]), torch.tensor([1]), 10000.0, "interleaved")
        tensor([[0.5403, 0.8415, 0.9999, 0.0100]])
    """

    def __init__(
        self, dim: int, heads: int, *, base: float = 10000.0, layout: Layout = "interleaved", cross: bool = False
    ):
        super().__init__(dim, heads, base, layout, cross=cross)
        if self.head_dim % 2:
            raise ValueError(f"rotation takes pairs: dim = {dim} over heads = {heads} is the odd width {self.head_dim}")

    def rotate(self, q: Tensor, k: Tensor, q0: int, k0: int, space: Space | None = None) -> tuple[Tensor, Tensor]:
        return self._turn(q, q0), self._turn(k, k0)

    def _turn(self, x: Tensor, start: int) -> Tensor:
        index = torch.arange(start, start + x.shape[-2], device=x.device)
        return turn(x, index, self.base, self.layout)


class Rotary2d(_Rotation):
    """Rotary positions of a map: the first half of each head is rotated by the row, the second by the column.

        the score depends only on (dy, dx)

    Arguments:
        dim, heads: those of the attention; the head width must be a multiple of 4.
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

    def __init__(self, dim: int, heads: int, *, base: float = 100.0, layout: Layout = "interleaved"):
        super().__init__(dim, heads, base, layout)
        if self.head_dim % 4:
            raise ValueError(
                f"rotation takes pairs of both axes: dim = {dim} over heads = {heads} is the width {self.head_dim}, "
                "not a multiple of 4"
            )

    def rotate(self, q: Tensor, k: Tensor, q0: int, k0: int, space: Space | None = None) -> tuple[Tensor, Tensor]:
        height, width = space if space is not None else self.space_of(q.shape[-2])
        index = torch.arange(height * width, device=q.device)
        y, x = torch.div(index, width, rounding_mode="floor"), index % width
        return self._turn(q, y, x), self._turn(k, y, x)

    def _turn(self, values: Tensor, y: Tensor, x: Tensor) -> Tensor:
        if self.layout == "interleaved":  # both halves in one product
            half = values.shape[-1] // 2
            return turn_by(values, torch.cat([angles_of(n, half, self.base) for n in (y, x)], dim=1), self.layout)
        by_row, by_column = values.chunk(2, dim=-1)
        parts = [turn(by_row, y, self.base, self.layout), turn(by_column, x, self.base, self.layout)]
        return torch.cat(parts, dim=-1)


def turn(x: Tensor, index: Tensor, base: float, layout: Layout) -> Tensor:
    """The pairs of `x (.., L, d)` rotated by the angles of `index (L,)`."""
    return turn_by(x, angles_of(index, x.shape[-1], base), layout)


def angles_of(index: Tensor, dim: int, base: float) -> Tensor:
    """The angles of positions, (L, d / 2) float64."""
    return index.to(torch.float64)[:, None] * frequencies(dim, base, index.device)


def turn_by(x: Tensor, angles: Tensor, layout: Layout) -> Tensor:
    """The pairs of `x (.., L, d)` rotated by `angles (L, d / 2)`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if layout == "interleaved" and not torch.compiler.is_compiling() and _is_of_pairs(x):
        # One complex product instead of six passes over real parts, which compilers fuse.
        pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)))
        turned = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    if layout == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def _is_of_pairs(x: Tensor) -> bool:
    """Whether pairs in the last dimension have the memory layout of complex numbers."""
    return x.stride(-1) == 1 and not any(n % 2 for n in (*x.stride()[:-1], x.storage_offset()))
