"""Attentions with one error each, of the kinds that have been published, and sound ones to tell them from."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.nn.attention import (
    LSH,
    Attention,
    LocalDenseSynthesizer,
    LocalMonotonic,
    MusicTransformer,
    Shaw,
    Swin2d,
    TransformerXL,
    hide_rows,
    masked_softmax,
)
from genmodels.nn.attention.distance import relative_positions, sinusoids


class Encoded(TransformerXL):
    """Transformer-XL by a table of pairs, with the row of each distance open to error."""

    def code(self, r: Tensor) -> Tensor:
        """The encoding of distances, (.., D)."""
        return sinusoids(r.flatten(), self.dim).unflatten(0, r.shape)

    def indices(self, Lq: int, Lk: int, q0: int, k0: int) -> Tensor:
        """What is encoded for each pair."""
        return relative_positions(Lq, Lk, q0, k0)

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        rows = self.project(self.code(self.indices(Lq, Lk, q0, k0)).to(q.dtype))
        rows = rows.unflatten(-1, (self.heads, self.head_dim))  # (Lq, Lk, H, d)
        return torch.einsum("bhid,ijhd->bhij", (q + self.v[:, None]) / math.sqrt(self.head_dim), rows)


class SharedSign(Encoded):
    """+d and -d share a row."""

    def indices(self, Lq, Lk, q0, k0):
        return super().indices(Lq, Lk, q0, k0).abs()


class CentredTable(Encoded):
    """The table is cut from the middle of a non-negative one: distance 0 is row max_len // 2."""

    def __init__(self, dim: int, heads: int, max_len: int = 2000):
        super().__init__(dim, heads)
        self.max_len = max_len

    def indices(self, Lq, Lk, q0, k0):
        return super().indices(Lq, Lk, q0, k0) + self.max_len // 2


class AbsoluteKey(Encoded):
    """The absolute index of the key is called its distance."""

    def indices(self, Lq, Lk, q0, k0):
        return (torch.arange(Lk) + k0).expand(Lq, Lk)


class DetachedPosition(Encoded):
    """No gradient reaches the positions."""

    def score_bias(self, *given, **named):
        return super().score_bias(*given, **named).detach()


class CausalShift(TransformerXL):
    """The shift for causal models in an encoder that sees both sides: the future reads the next row."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        r = torch.arange(-Lk, 1) + (k0 - q0) + Lk - Lq
        rows = self.project(sinusoids(r, self.dim).to(q.dtype)).unflatten(-1, (self.heads, self.head_dim))
        scores = torch.einsum("bhid,phd->bhip", (q + self.v[:, None]) / math.sqrt(self.head_dim), rows)
        return scores.flatten(2)[..., Lq : Lq + Lq * Lk].unflatten(-1, (Lq, Lk))


class KeptColumns(TransformerXL):
    """After the shift as many columns are kept as there are queries, not keys."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        scores = super().score_bias(q, q0, k0, Lq, Lk, space)
        return nn.functional.pad(scores[..., :Lq], (0, max(Lk - Lq, 0)))


class UnmovedQuery(Attention):
    """With a cache, the index of the first query stays where it was."""

    def _prepare(self, x, memory, mask, memory_mask, cache, offset, space):
        call = super()._prepare(x, memory, mask, memory_mask, cache, offset, space)
        return call._replace(q0=call.k0)


class UnmaskedSkew(MusicTransformer):
    """The skewed scores are not masked: what stands to the right of the diagonal is rubbish."""

    past_only = False


class RowStride(Swin2d):
    """The stride of a row is that of a column, which squares do not show."""

    @staticmethod
    def index(space, *, device=None):
        height, width = space
        place = torch.arange(height * width, device=device)
        y, x = torch.div(place, width, rounding_mode="floor"), place % width
        dy, dx = y[:, None] - y, x[:, None] - x
        return (dy + height - 1) * (2 * min(height, width) - 1) + dx + width - 1


class SwappedSides(Swin2d):
    """Height and width change places."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        return super().score_bias(q, q0, k0, Lq, Lk, space and space[::-1])


class ClippedEarly(Shaw):
    """Distances are clipped one too early."""

    def rows(self, Lq, Lk=None, q0=0, k0=0, *, device=None):
        return relative_positions(Lq, Lk, q0, k0, device=device).clamp(1 - self.K, self.K - 1) + self.K


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


class DroppedOutput(Explicit):
    """Dropout acts on the output, not on the weights."""

    dropout = 0.5

    def forward(self, x, mask=None):
        return nn.functional.dropout(super().forward(x, mask), self.dropout, self.training)


class DroppedWeights(Attention):
    """Dropout on the weights. Sound as it is."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads, dropout=0.5, backend="explicit")


class Unnormalised(Attention):
    """Weights outside a window are removed after the softmax, and what is left is not made to sum to one."""

    def _weights(self, call):
        a = super()._weights(call)
        return a * (relative_positions(a.shape[-2], a.shape[-1]).abs() <= 2)


class SegmentMeans(nn.Module):
    """Landmarks by segment means over valid positions: a sum for each segment over its count. Sound as it is.

        y = softmax(q kL^T) softmax(qL kL^T)^-1 softmax(qL k^T) v
    """

    def __init__(self, dim: int, heads: int, landmarks: int = 2):
        super().__init__()
        self.dim, self.landmarks = dim, landmarks
        self.project_in, self.project_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError("mask must be boolean")
        valid = torch.ones_like(x[:, :, 0], dtype=torch.bool) if mask is None else mask[:, 0]
        x = x.masked_fill(~valid[..., None], 0)
        q, k, v = self.project_in(x).masked_fill(~valid[..., None], 0).chunk(3, dim=-1)
        q, k = q * self.dim**-0.25, k * self.dim**-0.25
        segments = self.segments(valid)  # (B, m, L)
        there = segments.sum(-1) > 0
        mean = segments / self.counts(segments).clamp(min=1)
        own_q, own_k = mean @ q, mean @ k
        to_landmarks = masked_softmax(q @ own_k.mT, there[:, None])
        between = masked_softmax(own_q @ own_k.mT, there[:, None] & there[..., None])
        of_landmarks = masked_softmax(own_q @ k.mT, valid[:, None] & there[..., None])
        # Segments that hold nothing stand alone, so that the inverse exists.
        between = between + torch.diag_embed((~there).to(between.dtype))
        y = to_landmarks @ torch.linalg.solve(between, of_landmarks @ v)
        return self.project_out(y.to(v.dtype)).to(x.dtype)

    def segments(self, valid: Tensor) -> Tensor:
        """Which positions belong to each landmark, counted among the valid ones."""
        count = valid.sum(-1, keepdim=True)
        place = valid.long().cumsum(-1) - 1
        own = torch.div(place * self.landmarks, count.clamp(min=1), rounding_mode="floor")
        index = torch.arange(self.landmarks)[:, None]
        return ((own[:, None] == index) & valid[:, None]).to(self.project_in.weight.dtype)


    def counts(self, segments: Tensor) -> Tensor:
        """The number of positions of each landmark."""
        return segments.sum(-1, keepdim=True)


class PaddedMeans(SegmentMeans):
    """Padding is counted in the means."""

    def counts(self, segments):
        return super().counts(torch.full_like(segments, 1 / self.landmarks))


class MultipleOfLandmarks(Explicit):
    """The length must be a multiple of the number of landmarks."""

    def forward(self, x, mask=None):
        x.unflatten(1, (2, -1))
        return super().forward(x, mask)


class OwnWindows(LocalDenseSynthesizer):
    """Local dense attention with its windows in full view, each step open to error. Sound as it is."""

    def forward(self, x: Tensor, memory=None, mask: Tensor | None = None):
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError("mask must be boolean")
        x = hide_rows(x, mask)
        values = hide_rows(self.project_v(x), mask).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        y = (self.windows(values, self.before()) @ self.shares(x, mask).to(values.dtype)[..., None])[..., 0]
        return hide_rows(self.project_out(y.transpose(1, 2).flatten(2)).to(x.dtype), mask), None

    def windows(self, values: Tensor, past: int) -> Tensor:
        """The c neighbours of each position, of which `past` stand before it: (.., L, d) to (.., L, d, c)."""
        return nn.functional.pad(values, (0, 0, past, self.c - 1 - past)).unfold(-2, self.c, 1)

    def before(self) -> int:
        """The number of neighbours before the position itself."""
        return self.c // 2

    def hidden(self, x: Tensor) -> Tensor:
        """What each head makes of each position, (B, H, L, d)."""
        return self.project_hidden(x).relu().unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def shares(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Weights of the neighbours, (B, H, L, c)."""
        there = torch.ones_like(x[:, :, :1]) if mask is None else mask.mT.expand(len(x), -1, -1).to(x.dtype)
        return masked_softmax(self.hidden(x) @ self.W2, self.windows(there[:, None], self.c // 2)[:, :, :, 0] > 0)


class EvenMiddle(OwnWindows):
    """The window begins at the middle rounded the other way, which odd widths do not show."""

    def before(self):
        return (self.c - 1) // 2


class MixedHeads(OwnWindows):
    """The second layer of a head reads the hidden values of all."""

    def hidden(self, x):
        return super().hidden(x).mean(1, keepdim=True).expand(-1, self.heads, -1, -1)


class IgnoredNeighbours(OwnWindows):
    """The mask is accepted and ignored by the weights: a neighbour that is padded keeps its share."""

    def shares(self, x, mask):
        return super().shares(x, None)


class StandingStill(LocalMonotonic):
    """The place is never moved on: every query starts from the first one's."""

    def _positions(self, given, place, there):
        p = super()._positions(given, place, there)
        return torch.cat([p[..., :1], p.diff(dim=-1)], dim=-1)


class WholePlaces(LocalMonotonic):
    """The Gaussian is taken at whole numbers."""

    def _distance(self, position, there):
        return super()._distance(position.round(), there)


class WithoutTanh(LocalMonotonic):
    """The step is linear in the query: the tanh is missing."""

    def _number(self, projection, vector, x):
        hidden = projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return torch.einsum("bhln,hn->bhl", hidden, vector)


class OnePlace(LocalMonotonic):
    """One place serves the whole batch."""

    def _positions(self, given, place, there):
        p = super()._positions(given, place, there)
        return p.mean(0, keepdim=True).expand_as(p)


class MultipleOfChunks(LSH):
    """The length must divide into pairs of chunks."""

    def forward(self, x, memory=None, mask=None, **more):
        if x.shape[1] % (2 * self.chunk):
            raise ValueError(f"length {x.shape[1]} does not divide by {2 * self.chunk}")
        return super().forward(x, memory, mask, **more)


class FewerBuckets(LSH):
    """Only every second bucket is ever used."""

    def hashes(self, qk):
        return torch.div(super().hashes(qk), 2, rounding_mode="floor") * 2


class PredictedCentre(nn.Module):
    """Attention around a centre that is predicted for each example, a Gaussian of distance 1: sound as it is."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.project_v, self.project_out, self.centre = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError("mask must be boolean")
        x = hide_rows(x, mask)
        place = torch.arange(x.shape[1], dtype=x.dtype)
        p = self.centres(x)
        scores = -0.5 * (place[None, None] - p[..., None]).square()
        allowed = None if mask is None else mask.expand(-1, x.shape[1], -1)
        return self.project_out(masked_softmax(scores, allowed).to(x.dtype) @ self.project_v(x)).to(x.dtype)

    def centres(self, x: Tensor) -> Tensor:
        """p_t = p_{t-1} + exp(z_t)."""
        return self.centre(x).squeeze(-1).exp().cumsum(-1)


class OneCentre(PredictedCentre):
    """One centre serves the whole batch."""

    def centres(self, x):
        return super().centres(x).mean(0, keepdim=True).expand(len(x), -1)
