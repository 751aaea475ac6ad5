"""Local dense synthesizer attention: weights over the neighbours, computed from each position alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, relu

from genmodels.core.tensors import wide
from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.mechanism import AtOnce, Inputs, admit, split_heads

#: Positions whose neighbours are summed by one product.
BLOCK = 64


class LocalDenseSynthesizer(AtOnce):
    """Each position weighs its c neighbours by a small network of itself alone; no position is compared with another.

        B_t = softmax(relu(x_t W1) W2),    Y_t = sum_{j<c} B_tj V_{t+j-floor(c/2)},    y = concat(Y) W_O

    with W1 (D x d) and W2 (d x c) of each head. For even c the window reaches one position further into the past. Time
    and memory are linear in the length.

    Arguments:
        dim: width D of x and y.
        heads: number of heads; divides D.
        c: number of neighbours, the position itself among them.
        boundary: what becomes of neighbours that do not exist or are invalid: `renormalise` shares their weight out,
            `zero` adds nothing in their place.
        dropout: probability of dropping a weight, in training.
        bias: whether the projections of values and output have biases.

    Shapes: `x (B, L, D)`, `mask (B, 1, L)` bool, True = valid; y is `(B, L, D)`, zero at invalid positions.
    Errors: ValueError for c < 1, an unknown boundary, a memory, a cache, a mask of pairs.
    Source: Xu et al. 2021 (local dense synthesizer attention), section 2.3.

    Example:
        >>> attention = LocalDenseSynthesizer(8, 2, c=5)
        >>> attention(torch.randn(3, 4, 8))[0].shape, attention.local_weights(torch.randn(3, 4, 8)).shape
        (torch.Size([3, 4, 8]), torch.Size([3, 2, 4, 5]))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        c: int = 15,
        boundary: Literal["renormalise", "zero"] = "renormalise",
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(dim, heads, dropout)
        if c < 1:
            raise ValueError(f"c must be at least 1, got {c}")
        if boundary not in ("renormalise", "zero"):
            raise ValueError(f"boundary must be renormalise or zero, got {boundary!r}")
        self.c, self.boundary = c, boundary
        self.project_hidden = nn.Linear(dim, dim, bias=False)  # W1 of every head, side by side
        self.W2 = nn.Parameter(torch.randn(heads, self.head_dim, c) * self.head_dim**-0.5)
        self.project_v = nn.Linear(dim, dim, bias=bias)
        self.project_out = nn.Linear(dim, dim, bias=bias)

    def local_weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """B `(B, H, L, c)`, without dropout; entry j weighs the position j - floor(c/2) away."""
        given = admit(self, x, None, mask, None, cross=False)
        return self._weigh(given.x, given.keys)

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        reason = f"each position weighs {self.c} neighbours by itself, linear in the length"
        if Lk <= self.c:
            reason = f"{reason}; no cheaper than full attention below {self.c + 1} positions"
        block = min(max(BLOCK, self.c), max(Lq, 1))
        rows = block * -(-Lq // block)
        return reason, rows * (self.heads * (block + 3 * self.c - 1) + self.dim * (block + self.c - 1) // block)

    def _mix(self, given: Inputs, values: Tensor, drop: float) -> Tensor:
        """The weighted sums of values, block by block: a band of weights times the values it covers.

        Within a block row i of the band begins i places to the right: rows of c weights and n zeros, read as rows of
        one element less.
        """
        if given.empty:
            return wide(values)
        B = self._weigh(given.x, given.keys)
        B = dropout(B, drop) if drop else B
        length = B.shape[2]
        n = min(max(BLOCK, self.c), length)
        missing, width = -length % n, n + self.c - 1
        with torch.autocast(values.device.type, enabled=False):
            near = self._around(wide(values), missing).unfold(2, width, n)  # (B, H, blocks, d, width)
            rows = pad(B, (0, n, 0, missing)).unflatten(2, ((length + missing) // n, n))
            band = rows.flatten(3)[..., : n * width].unflatten(3, (n, width))
            return (band @ near.mT).flatten(2, 3)[:, :, :length]

    def _weigh(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Weights `(B, H, L, c)` over neighbours; those outside of the sequence or invalid have none."""
        hidden = relu(split_heads(self.project_hidden(x), self.heads))
        with torch.autocast(x.device.type, enabled=False):
            logits = wide(hidden) @ wide(self.W2)
            if not x.shape[1]:
                return logits
            there = x.new_ones(1, 1, x.shape[1], dtype=torch.bool) if valid is None else valid
            there = self._around(there[..., None])[..., 0].unfold(2, self.c, 1)  # (B or 1, 1, L, c)
            if self.boundary == "renormalise":
                return masked_softmax(logits, there)
            return torch.where(there, logits.softmax(-1), 0)

    def _around(self, values: Tensor, more: int = 0) -> Tensor:
        """`(B, H, L, d)` with zeros for the neighbours before the first and after the last position, and some more."""
        past = self.c // 2
        return pad(values, (0, 0, past, self.c - 1 - past + more))
