"""Attentions whose positions have one error each, of the kinds that have been published, and a sound one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.nn.attention import Attention, MusicTransformer, Shaw, Swin2d, TransformerXL
from genmodels.nn.attention.position import distances, relative_positions, sinusoids


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


class ShiftLeftOut(TransformerXL):
    """Scores by distance are read as scores by key: the shift is left out."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        rows = self.project(sinusoids(distances(Lq, Lk, q0, k0), self.dim).to(q.dtype))
        rows = rows.unflatten(-1, (self.heads, self.head_dim))
        return torch.einsum("bhid,phd->bhip", (q + self.v[:, None]) / math.sqrt(self.head_dim), rows)[..., :Lk]


class SpoiledPast(Attention):
    """The keys of the given cache are set to zero after use."""

    def forward(self, x, mask=None, cache=None, **named):
        result = super().forward(x, mask=mask, cache=cache, **named)
        if cache is not None:
            cache.k.zero_()
        return result


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
