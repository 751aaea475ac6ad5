"""Relative keys: a vector for each distance, learned (Shaw, Music Transformer) or of sinusoids (Transformer-XL)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.errors import at_least, one_of
from genmodels.nn.attention.position import (
    Position,
    Space,
    distances,
    rel_shift,
    relative_positions,
    shift_padded,
    sinusoids,
    skew,
)


class Shaw(Position):
    """A learned key, and a learned value, for each distance up to K.

        s(i, j) = q_i . (k_j + aK[r]) / sqrt(d),    y_i = sum_j a_ij (v_j + aV[r]),    r = j - i

    The products with the 2K + 1 keys are gathered by distance, and weights are summed by distance before the product
    with the 2K + 1 values, without a tensor (L, L, d).

    Arguments:
        dim, heads: those of the attention.
        K: the largest distance with vectors of its own.
        outside: beyond K, `clip` takes the vectors of the nearest distance, `zero` adds nothing.
        values: whether there are relative values too; they need the explicit path.
        shared: one table for all heads.
        cross: see `Position`.

    Shapes: tables `(H or 1, 2K + 1, d)`, Gaussian of standard deviation d^-1/2; row K is distance 0.
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
        one_of("outside", outside, ("clip", "zero"))
        self.K, self.outside, self.adds_values = K, outside, values
        shape, std = (1 if shared else heads, 2 * K + 1, self.head_dim), self.head_dim**-0.5
        self.keys = nn.Parameter(torch.randn(shape) * std)
        self.values = nn.Parameter(torch.randn(shape) * std) if values else None

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


class MusicTransformer(Position):
    """A learned key for each distance into the past; the attention becomes causal.

        s(i, j) = q_i . (k_j + E[r]) / sqrt(d),    r = j - i = -(max_len - 1) .. 0

    Distance 0 is the last row of E; larger distances than E has share its first row, so that inputs may be longer than
    `max_len`. Scores by distance are skewed into place in O(L^2), without a tensor (L, L, d).

    Arguments:
        dim, heads: those of the attention.
        max_len: number of distances with a vector of their own.
        shared: one E for all heads.
        cross: see `Position`.

    Shapes: E `(H or 1, max_len, d)`, Gaussian of standard deviation d^-1/2. Errors: ValueError for max_len < 1.
    Source: Huang et al. 2018, section 3.4.

    Example:
        >>> MusicTransformer(8, 2, max_len=16).score_bias(torch.randn(3, 2, 5, 4), 0, 0, 5, 5).shape
        torch.Size([3, 2, 5, 5])
    """

    score = "content"
    past_only = True

    def __init__(self, dim: int, heads: int, *, max_len: int = 512, shared: bool = False, cross: bool = False):
        super().__init__(dim, heads, cross=cross)
        at_least(1, max_len=max_len)
        self.max_len = max_len
        self.E = nn.Parameter(torch.randn(1 if shared else heads, max_len, self.head_dim) * self.head_dim**-0.5)

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        q = q / math.sqrt(self.head_dim)
        if q0 + Lq == k0 + Lk and Lk >= Lq:
            # The last key is at the last query: half of the distances suffice, and later keys are masked.
            return skew(q @ self._rows(torch.arange(1 - Lk, 1, device=q.device)).mT)
        return rel_shift(q @ self._rows(distances(Lq, Lk, q0, k0, device=q.device)).mT, Lk)

    def _rows(self, r: Tensor) -> Tensor:
        return self.E.index_select(1, r.clamp(1 - self.max_len, 0) + self.max_len - 1)


class TransformerXL(Position):
    """Scores by content and by distance, each with its own bias of the query.

        s(i, j) = ((q_i + u) . k_j + (q_i + v) . (W_R R[r])) / sqrt(d),    r = j - i

    R are the sinusoids of all distances that occur, so that there is no longest length. The second term is one product
    by distance, O(Lq (Lq + Lk) H), and a shift.

    Arguments:
        dim, heads: those of the attention.
        cross: see `Position`.

    Shapes: u, v `(H, d)`, zero at the start; W_R `(D, D)` without bias.
    Source: Dai et al. 2019, section 3.3 and appendix B.

    Example:
        >>> position = TransformerXL(8, 2)
        >>> position.score_bias(torch.randn(3, 2, 5, 4), 0, 0, 5, 6).shape
        torch.Size([3, 2, 5, 6])
    """

    score = "content"

    def __init__(self, dim: int, heads: int, *, cross: bool = False):
        super().__init__(dim, heads, cross=cross)
        self.u = nn.Parameter(torch.zeros(heads, self.head_dim))
        self.v = nn.Parameter(torch.zeros(heads, self.head_dim))
        self.project = nn.Linear(dim, dim, bias=False)

    def query_bias(self) -> Tensor:
        return self.u

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        # One more distance on the left, in place of the padding of the shift.
        r = torch.arange(-Lq, Lk, device=q.device) + (k0 - q0)
        encoded = self.project(sinusoids(r, self.dim).to(self.project.weight.dtype))
        encoded = encoded.view(-1, self.heads, self.head_dim).permute(1, 2, 0)  # (H, d, Lq + Lk)
        scores = ((q + self.v[:, None]) / math.sqrt(self.head_dim)) @ encoded
        return shift_padded(scores)[..., :Lk]

    def score_elements(self, batch: int, Lq: int, Lk: int) -> int:
        return batch * self.heads * Lq * (Lq + Lk)
