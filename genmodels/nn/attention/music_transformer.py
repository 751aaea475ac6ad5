"""Relative keys of the Music Transformer: one learned vector for each distance into the past."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.nn.attention.distance import distances, rel_shift, skew
from genmodels.nn.attention.position import Position, Space


class MusicTransformer(Position):
    """A learned key for each distance into the past; the attention becomes causal.

        s(i, j) = q_i . (k_j + E[r]) / sqrt(d),    r = j - i = -(max_len - 1) .. 0

    Distance 0 is the last row of E whatever the length; what lies further back than E reaches shares its first row, so
    longer inputs than `max_len` work. Scores by distance are skewed into place in O(L^2), without a tensor (L, L, d).

    Arguments:
        dim, heads: as in the attention it serves.
        max_len: number of distances with a vector of their own.
        cross: whether queries and keys of two sequences share one clock.

    Shapes: E `(H, max_len, d)`, normal of standard deviation d^-1/2. Errors: ValueError for max_len < 1.
    Source: Huang et al. 2018, section 3.4.

    Example:
        >>> MusicTransformer(8, 2, max_len=16).score_bias(torch.randn(3, 2, 5, 4), 0, 0, 5, 5).shape
        torch.Size([3, 2, 5, 5])
    """

    score = "content"
    past_only = True

    def __init__(self, dim: int, heads: int, *, max_len: int = 512, cross: bool = False):
        super().__init__(dim, heads, cross=cross)
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1, got {max_len}")
        self.max_len = max_len
        self.E = nn.Parameter(torch.randn(heads, max_len, self.head_dim) * self.head_dim**-0.5)

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        q = q / math.sqrt(self.head_dim)
        if q0 + Lq == k0 + Lk and Lk >= Lq:
            # The last key stands at the last query: half the distances are enough, and the future is rubbish.
            return skew(q @ self._rows(torch.arange(1 - Lk, 1, device=q.device)).mT)
        return rel_shift(q @ self._rows(distances(Lq, Lk, q0, k0, device=q.device)).mT, Lk)

    def _rows(self, r: Tensor) -> Tensor:
        return self.E.index_select(1, r.clamp(1 - self.max_len, 0) + self.max_len - 1)
