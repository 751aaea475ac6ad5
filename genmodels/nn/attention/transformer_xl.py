"""Relative positions of Transformer-XL: sinusoids of the distance, projected, met by the query."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.nn.attention.distance import shift_padded, sinusoids
from genmodels.nn.attention.position import Position, Space


class TransformerXL(Position):
    """Content and distance, each with a bias of its own for the query.

        s(i, j) = ((q_i + u) . k_j + (q_i + v) . (W_R R[r])) / sqrt(d),    r = j - i

    R are the sinusoids of the distance, computed for the distances that occur: there is no longest length, and past and
    future differ in the sign of the sine. The second term is one product by distance, O(Lq (Lq + Lk) H), and a shift.

    Arguments:
        dim, heads: as in the attention it serves.
        cross: whether queries and keys of two sequences share one clock.

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
        # One distance more on the left than occurs: the column that the shift would have to pad.
        r = torch.arange(-Lq, Lk, device=q.device) + (k0 - q0)
        encoded = self.project(sinusoids(r, self.dim).to(self.project.weight.dtype))
        encoded = encoded.view(-1, self.heads, self.head_dim).permute(1, 2, 0)  # (H, d, Lq + Lk)
        scores = ((q + self.v[:, None]) / math.sqrt(self.head_dim)) @ encoded
        return shift_padded(scores)[..., :Lk]

    def score_elements(self, batch: int, Lq: int, Lk: int) -> int:
        return batch * self.heads * Lq * (Lq + Lk)
