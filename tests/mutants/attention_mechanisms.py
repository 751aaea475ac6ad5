"""Mechanisms outside the core with one error each, of the kinds that have been published, and sound ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.attention import LSH, LocalDenseSynthesizer, LocalMonotonic, hide_rows, masked_softmax
from tests.mutants.attention_core import Explicit


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


class TwoWays(OwnWindows):
    """Without a mask neighbours beyond the ends keep their share, with one they do not."""

    def shares(self, x, mask):
        return (self.hidden(x) @ self.W2).softmax(-1) if mask is None else super().shares(x, mask)


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


class HashedPadding(LSH):
    """Padding is hashed too, and falls into buckets with what is valid."""

    def _mix(self, given, values, drop):
        return super()._mix(given._replace(keys=None), values, drop)


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
