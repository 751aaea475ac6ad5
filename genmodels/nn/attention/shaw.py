"""Relative keys and values of Shaw et al.: a learned vector for each distance of a window."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.nn.attention.distance import relative_positions
from genmodels.nn.attention.position import Position, Space


class Shaw(Position):
    """A learned key, and a learned value, for each distance up to K.

        s(i, j) = q_i . (k_j + aK[r]) / sqrt(d),    y_i = sum_j a_ij (v_j + aV[r]),    r = j - i

    Queries meet the 2K + 1 keys once and the scores are gathered by distance; weights are summed by distance and meet
    the 2K + 1 values once. A tensor (L, L, d) never exists.

    Arguments:
        dim, heads: as in the attention it serves.
        K: the largest distance with vectors of its own.
        outside: beyond K, `clip` takes the vectors of the nearest distance, `zero` adds nothing.
        values: whether there are relative values too; they need the explicit path.
        shared: one table for all heads.
        cross: whether queries and keys of two sequences share one clock.

    Shapes: tables `(H or 1, 2K + 1, d)`, normal of standard deviation d^-1/2; row K is distance 0.
    Errors: ValueError for K < 0 or an unknown `outside`.
    Source: Shaw et al. 2018, section 3.2 (clip); Kim et al. 2020 (Glow-TTS), appendix A (zero, K = 4).

    Example:
        >>> Shaw(8, 2, K=2).rows(5)
        tensor([[2, 3, 4, 4, 4],
                [1, 2, 3, 4, 4],
                [0, 1, 2, 3, 4],
                [0, 0, 1, 2, 3],
                [0, 0, 0, 1, 2]])
    """

    score = "content"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        K: int = 4,
        outside: Literal["clip", "zero"] = "clip",
        values: bool = True,
        shared: bool = False,
        cross: bool = False,
    ):
        super().__init__(dim, heads, cross=cross)
        if K < 0:
            raise ValueError(f"K, the largest distance of its own, cannot be negative, got {K}")
        if outside not in ("clip", "zero"):
            raise ValueError(f"outside must be clip or zero, got {outside!r}")
        self.K, self.outside, self.adds_values = K, outside, values
        shape, deviation = (1 if shared else heads, 2 * K + 1, self.head_dim), self.head_dim**-0.5
        self.keys = nn.Parameter(torch.randn(shape) * deviation)
        self.values = nn.Parameter(torch.randn(shape) * deviation) if values else None

    def rows(self, Lq: int, Lk: int | None = None, q0: int = 0, k0: int = 0, *, device=None) -> Tensor:
        """The row of the tables for each query and key: min(max(r, -K), K) + K."""
        return relative_positions(Lq, Lk, q0, k0, device=device).clamp(-self.K, self.K) + self.K

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        by_row = (q / math.sqrt(self.head_dim)) @ self.keys.mT  # (B, H, Lq, 2K + 1)
        rows = self.rows(Lq, Lk, q0, k0, device=q.device).expand(*q.shape[:2], Lq, Lk)
        scores = by_row.gather(-1, rows)
        return scores if self.outside == "clip" else scores.masked_fill(self._far(Lq, Lk, q0, k0, q.device), 0)

    def value_bias(self, a: Tensor, q0: int, k0: int, space: Space | None = None) -> Tensor | None:
        if self.values is None:
            return None
        Lq, Lk = a.shape[-2:]
        if self.outside == "zero":
            a = a.masked_fill(self._far(Lq, Lk, q0, k0, a.device), 0)
        rows = self.rows(Lq, Lk, q0, k0, device=a.device).expand(a.shape)
        by_row = a.new_zeros(*a.shape[:-1], 2 * self.K + 1).scatter_add(-1, rows, a)
        return by_row @ self.values.to(a.dtype)

    def _far(self, Lq: int, Lk: int, q0: int, k0: int, device) -> Tensor:
        return relative_positions(Lq, Lk, q0, k0, device=device).abs() > self.K
