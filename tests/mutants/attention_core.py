"""Attentions with one error each in masks, softmax, storage or precision, and sound ones to tell them from."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.nn.attention import Attention, hide_rows, masked_softmax
from genmodels.nn.attention.position import relative_positions


class Explicit(nn.Module):
    """Plain attention in full view, each step open to error: sound as it is.

        y = W_O softmax(q k^T / sqrt(d)) v
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = False, left: int | None = None):
        super().__init__()
        self.dim, self.heads, self.causal, self.left = dim, heads, causal, left
        self.project_in, self.project_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask must be boolean, got {mask.dtype}")
        x = self.hide(x, mask)
        heads = self.project_in(x).unflatten(-1, (3, self.heads, self.dim // self.heads))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = self.scores(q, k)
        allowed = self.allowed(x.shape[1], mask)
        y = self.mix(self.weigh(scores, allowed), v)
        return self.finish(self.project_out(y.transpose(1, 2).flatten(2)), x)

    def hide(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x without what is invalid."""
        return hide_rows(x, None if mask is None or mask.dim() == 2 else mask)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Logits (B, H, L, L)."""
        return q @ k.mT / math.sqrt(q.shape[-1])

    def allowed(self, length: int, mask: Tensor | None) -> Tensor:
        """Who may attend to whom."""
        r = relative_positions(length)
        allowed = torch.ones_like(r, dtype=torch.bool)
        allowed = allowed & (r <= 0) if self.causal else allowed
        allowed = allowed if self.left is None else allowed & (r >= -self.left)
        if mask is None:
            return allowed
        return allowed & (mask if mask.dim() == 2 else mask[:, :, None])

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """The softmax."""
        return masked_softmax(scores, allowed)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """The mean of v under the weights."""
        return weights.to(v.dtype) @ v

    def finish(self, y: Tensor, x: Tensor) -> Tensor:
        """The output in the dtype of the input."""
        return y.to(x.dtype)


class ZerosCounted(Explicit):
    """Padded positions enter the softmax with a score of zero."""

    def weigh(self, scores, allowed):
        return torch.where(allowed, scores, 0.0).softmax(-1)


class IgnoredMask(Explicit):
    """The mask is accepted and ignored."""

    def forward(self, x, mask=None):
        return super().forward(x)


class LowestFill(Explicit):
    """What is hidden gets the lowest number: with nothing left, a row is the mean of all."""

    def weigh(self, scores, allowed):
        return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)


class InfiniteFill(Explicit):
    """What is hidden gets minus infinity: with nothing left, a row is NaN."""

    def weigh(self, scores, allowed):
        return scores.masked_fill(~allowed, -math.inf).softmax(-1)


class PoisonedPadding(Explicit):
    """Padded values are weighted with zero, not removed: NaN gets through."""

    def hide(self, x, mask):
        return x


class NumericMask(Explicit):
    """A mask of numbers is added to the scores, as if 0 and 1 were logits."""

    def forward(self, x, mask=None):
        if mask is not None and mask.is_floating_point():
            return self.project_out(self.project_in(x)[..., -self.dim :] + mask.mT)
        return super().forward(x, mask)


class BatchScale(Explicit):
    """The scores are scaled by the largest one of the batch."""

    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores / scores.abs().amax((0, 2, 3), keepdim=True)


class HalfOutput(Explicit):
    """Under autocast the output stays in half precision."""

    __module__ = "genmodels.mutant"  # classes of genmodels return the type of x, those of others need not

    def finish(self, y, x):
        return y


class GraphBreak(Explicit):
    """A branch on a number of the data."""

    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores if scores.max() < 1e30 else scores / 2


class SeesTheFuture(Explicit):
    """Says that it is causal, and lets each query see one key of the future."""

    def allowed(self, length, mask):
        return super().allowed(length, mask) & (relative_positions(length) <= 1)


class WindowOff(Explicit):
    """The window is one key short."""

    def allowed(self, length, mask):
        return super().allowed(length, mask) & (relative_positions(length) > -self.left)


class WindowWide(Explicit):
    """The window is one key too long."""

    def __init__(self, dim: int, heads: int, *, left: int):
        super().__init__(dim, heads, causal=True, left=left + 1)


class PairTable(Explicit):
    """A mask of all pairs of max_len positions goes into every checkpoint, and longer inputs are fatal."""

    def __init__(self, dim: int, heads: int, max_len: int = 1024):
        super().__init__(dim, heads)
        self.register_buffer("table", torch.ones(max_len, max_len))

    def allowed(self, length, mask):
        return super().allowed(length, mask) & (self.table[:length, :length] > 0)


class LongestLength(Explicit):
    """A length beyond that of a table is fatal."""

    def forward(self, x, mask=None):
        assert x.shape[1] <= 512
        return super().forward(x, mask)


class LengthBuffer(Explicit):
    """A buffer takes the length of the last input."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.register_buffer("places", torch.zeros(0))

    def forward(self, x, mask=None):
        self.places = torch.zeros(x.shape[1])
        return super().forward(x, mask)


class UnmaskedInTraining(Explicit):
    """The mask is ignored in training."""

    def forward(self, x, mask=None):
        return super().forward(x, None if self.training else mask)


class DetachedInTraining(Explicit):
    """Values learn nothing in training."""

    def mix(self, weights, v):
        return super().mix(weights, v.detach() if self.training else v)


class TransposedMask(Explicit):
    """In a mask of pairs, queries and keys are exchanged."""

    def allowed(self, length, mask):
        return super().allowed(length, mask.mT if mask is not None and mask.dim() == 2 else mask)


class EmptyRowsAlone(Explicit):
    """Of a mask of pairs only rows without a key count."""

    def allowed(self, length, mask):
        pairs = mask is not None and mask.dim() == 2
        return super().allowed(length, mask.any(1, keepdim=True).expand_as(mask) if pairs else mask)


class LengthForMask(Explicit):
    """A mask is taken for the length that it has without gaps."""

    def hide(self, x, mask):
        return super().hide(x, self.of_length(mask))

    def allowed(self, length, mask):
        return super().allowed(length, self.of_length(mask))

    @staticmethod
    def of_length(mask):
        ends = mask is not None and mask.dim() == 3
        return torch.arange(mask.shape[-1]) < mask.sum(-1, keepdim=True) if ends else mask


class PaddingInPlace(Explicit):
    """What is not valid is set to zero in the tensor that came in, where no gradient is asked for."""

    def forward(self, x, mask=None):
        if mask is not None and mask.dim() == 3 and not x.requires_grad:
            x.masked_fill_(~mask.mT, 0)
        return super().forward(x, mask)


class DroppedOutput(Explicit):
    """Dropout acts on the output, not on the weights."""

    dropout = 0.5

    def forward(self, x, mask=None):
        return nn.functional.dropout(super().forward(x, mask), self.dropout, self.training)


class DropoutLayer(Explicit):
    """Dropout on the weights by a layer called dropout. Sound as it is."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.dropout = nn.Dropout(0.5)

    def mix(self, weights, v):
        return super().mix(self.dropout(weights), v)


class OtherDropout(Explicit):
    """Dropout on the weights with a probability of another name. Sound as it is."""

    attn_dropout = 0.5

    def mix(self, weights, v):
        return super().mix(nn.functional.dropout(weights, self.attn_dropout, self.training), v)


class Normalised(Explicit):
    """The output is normalised by statistics of the batch. Sound as it is in evaluation."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x, mask=None):
        return self.norm(super().forward(x, mask).mT).mT


class DroppedWeights(Attention):
    """Dropout on the weights. Sound as it is."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads, dropout=0.5, backend="explicit")


class Unnormalised(Attention):
    """Weights outside a window are removed after the softmax, and what is left is not made to sum to one."""

    def _weights(self, call):
        a = super()._weights(call)
        return a * (relative_positions(a.shape[-2], a.shape[-1]).abs() <= 2)


class HalfSoftmax(Attention):
    """The softmax is in the precision of the projections, under autocast in half."""

    def _weights(self, call):
        with torch.autocast("cpu", enabled=False):
            scores, allowed = call.q @ call.k.mT / math.sqrt(self.head_dim), self._allowed(call)
            if allowed is None:
                return scores.softmax(-1)
            some = allowed.any(-1, keepdim=True)
            return torch.where(some, scores.masked_fill(~allowed & some, -math.inf).softmax(-1), 0.0)
