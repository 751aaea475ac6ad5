"""What a position scheme may answer, and nothing else; the core asks and adds up."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.nn.attention.distance import by_distance, distances

Space = tuple[int, int]


class Position(nn.Module):
    """A position scheme: four optional answers, all addressed by absolute offsets.

        s(i, j) = ((q_i + u) . k_j) / sqrt(d) + b(i, j),    y_i = sum_j a_ij v_j + value_bias_i

    Query i of a call has absolute index q0 + i and key j has k0 + j; that is all that caches, chunks and blocks need.
    This class answers nothing: a softmax over content alone, equivariant to permutations.

    Arguments:
        dim: width D of the attention.
        heads: number of heads H; the head width is d = D / H.
        cross: whether queries and keys of two different sequences share one clock, so that their distance means
            something; without it the scheme is refused in cross-attention.

    Attributes:
        dims: 1 for sequences; 2 for maps, flattened row by row, whose `space` is then passed on.
        rotates: whether `rotate` changes q and k.
        score: what `score_bias` gives: `none`, `shared` by the batch `(1, H, Lq, Lk)`, or `content` `(B, H, Lq, Lk)`.
        adds_values: whether `value_bias` gives anything; it needs the weights themselves, hence the explicit path.
        past_only: whether only keys at or before the query have a position, so that causality is forced.

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
        """Queries `(B, H, Lq, d)` and keys `(B, H, Lk, d)` turned by their absolute indices."""
        return q, k

    def query_bias(self) -> Tensor | None:
        """u `(H, d)`, added to every query where it meets a key."""
        return None

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor | None:
        """b `(B or 1, H, Lq, Lk)` in units of the logits (divided by sqrt(d) already where the equation says so)."""
        return None

    def value_bias(self, a: Tensor, q0: int, k0: int, space: Space | None = None) -> Tensor | None:
        """What the weights `a (B, H, Lq, Lk)` add to the values, `(B, H, Lq, d)`."""
        return None

    def space_of(self, length: int) -> Space:
        """The map that `length` positions are when the caller does not say; for 2-D schemes that know it."""
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
        raise ValueError(f"heads = {heads} does not divide dim = {dim}")
    return dim // heads
