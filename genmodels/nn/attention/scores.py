"""Score functions: how well a query and a key agree, as logits for one and the same masked softmax."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.tensors import wide
from genmodels.nn.attention.mechanism import split_heads
from genmodels.nn.attention.position import head_width


class Past(NamedTuple):
    """Where the queries before this one looked: weights of the last and the sum of all, both `(B, H, Lk)`."""

    previous: Tensor
    cumulative: Tensor

    def after(self, weights: Tensor, queries: Tensor | None) -> Past:
        """The past of the next query, from the weights `(B, H, Lq, Lk)` of these; invalid ones have not happened."""
        if queries is None:
            return Past(weights[:, :, -1], self.cumulative + weights.sum(2))
        weights = weights.masked_fill(~queries[..., None], 0)
        number = queries.cumsum(-1)
        last = queries & (number == number[..., -1:])
        previous = weights.masked_fill(~last[..., None], 0).sum(2)
        happened = number[..., -1:] > 0
        return Past(torch.where(happened, previous, self.previous), self.cumulative + weights.sum(2))


class Score(nn.Module):
    """A score function: keys are projected once, logits are finite everywhere and know of no mask.

    A subclass defines `keys` and `logits`.

    Arguments:
        dim: width D of queries and memory.
        heads: number of heads H; divides D.

    Attributes:
        uses_past: whether the logits of a query depend on where the queries before it looked; then queries can only be
            scored one after the other.
    """

    uses_past: bool = False

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_width(dim, heads)

    def keys(self, memory: Tensor) -> Tensor:
        """What the memory `(B, Lk, D)` shows to every query, `(B, H, Lk, n)`."""
        raise NotImplementedError

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        """The scores `(B, H, Lq, Lk)` of queries `x (B, Lq, D)`, float32 or wider."""
        raise NotImplementedError


class ScaledDot(Score):
    """The inner product of query and key: e_ij = s_i . h_j / sqrt(n), with s = W x and h = V m.

    Arguments:
        dim, heads: as in the attention it serves.
        bias: whether W and V have biases.

    Source: Vaswani et al. 2017, equation 1.

    Example:
        >>> score = ScaledDot(8, 2)
        >>> score.logits(torch.randn(3, 4, 8), score.keys(torch.randn(3, 6, 8))).shape
        torch.Size([3, 2, 4, 6])
    """

    def __init__(self, dim: int, heads: int, *, bias: bool = True):
        super().__init__(dim, heads)
        self.project_q = nn.Linear(dim, dim, bias=bias)
        self.project_k = nn.Linear(dim, dim, bias=bias)

    def keys(self, memory: Tensor) -> Tensor:
        return split_heads(self.project_k(memory), self.heads)

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        q = split_heads(self.project_q(x), self.heads)
        with torch.autocast(x.device.type, enabled=False):
            return wide(q) @ wide(keys).mT / math.sqrt(self.head_dim)


class Additive(Score):
    """A network of one hidden layer over query and key: e_ij = w^T tanh(W s_i + V h_j + b).

    Every pair has a hidden layer of its own, so that memory grows with Lq Lk n.

    Arguments:
        dim, heads: as in the attention it serves.
        hidden: width n of the hidden layer of each head, D / H by default.

    Errors: ValueError for hidden < 1.
    Source: Bahdanau et al. 2015, appendix A.1.2.

    Example:
        >>> score = Additive(8, 2, hidden=5)
        >>> score.logits(torch.randn(3, 4, 8), score.keys(torch.randn(3, 6, 8))).shape
        torch.Size([3, 2, 4, 6])
    """

    def __init__(self, dim: int, heads: int, *, hidden: int | None = None):
        super().__init__(dim, heads)
        self.hidden = self.head_dim if hidden is None else hidden
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {hidden}")
        self.project_q = nn.Linear(dim, heads * self.hidden)
        self.project_k = nn.Linear(dim, heads * self.hidden, bias=False)
        self.w = nn.Parameter(torch.randn(heads, self.hidden) * self.hidden**-0.5)

    def keys(self, memory: Tensor) -> Tensor:
        return split_heads(self.project_k(memory), self.heads)

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        q = split_heads(self.project_q(x), self.heads)
        with torch.autocast(x.device.type, enabled=False):
            hidden = torch.tanh(wide(q)[:, :, :, None] + wide(keys)[:, :, None])  # (B, H, Lq, Lk, n)
            return torch.einsum("bhijn,hn->bhij", hidden, self.w.to(hidden.dtype))


class Location(Additive):
    """The additive score that also sees where the queries before it looked.

        e_ij = w^T tanh(W s_i + V h_j + U f_ij + b),    f_i = F * (a_{i-1}, sum_{k<i} a_k), or F * a_{i-1}

    F is a convolution along the keys, padded with zeros. Queries are scored one after the other.

    Arguments:
        dim, heads: as in the attention it serves.
        hidden: width n of the hidden layer of each head, D / H by default.
        channels: number of filters of F.
        kernel: their length, odd, so that a filter has a middle.
        cumulative: whether the filters see the sum of all weights so far too, or those of the last query alone.

    Errors: ValueError for an even kernel, for channels or hidden < 1.
    Source: Chorowski et al. 2015, equations 8 and 9 (`cumulative=False`); the sum of weights: Shen et al. 2018
        (Tacotron 2), section 2.2.

    Example:
        >>> score, memory = Location(8, 2, channels=3, kernel=5), torch.randn(3, 6, 8)
        >>> past = Past(torch.zeros(3, 2, 6), torch.zeros(3, 2, 6))
        >>> score.logits(torch.randn(3, 1, 8), score.keys(memory), past).shape
        torch.Size([3, 2, 1, 6])
    """

    uses_past = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden: int | None = None,
        channels: int = 32,
        kernel: int = 31,
        cumulative: bool = True,
    ):
        super().__init__(dim, heads, hidden=hidden)
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that a filter has a middle, got {kernel}")
        if channels < 1:
            raise ValueError(f"channels must be at least 1, got {channels}")
        self.cumulative = cumulative
        self.filters = nn.Conv1d(2 if cumulative else 1, channels, kernel, padding=kernel // 2, bias=False)
        self.project_location = nn.Parameter(torch.randn(heads, channels, self.hidden) * channels**-0.5)

    def features(self, past: Past) -> Tensor:
        """U f of the next query, `(B, H, Lk, n)`."""
        seen = torch.stack([past.previous, past.cumulative] if self.cumulative else [past.previous], dim=2)
        seen = seen.flatten(0, 1)  # (B H, 2 or 1, Lk)
        found = self.filters(seen.to(self.filters.weight.dtype))
        found = found.unflatten(0, (len(past.previous), self.heads))  # (B, H, channels, Lk)
        return found.mT @ self.project_location

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        return super().logits(x, wide(keys) + wide(self.features(past)), past)
