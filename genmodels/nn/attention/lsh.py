"""Attention within buckets of similar vectors, found by locality-sensitive hashing."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.core.random import normal
from genmodels.core.tensors import wide
from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.mechanism import AtOnce, Inputs, split_heads
from genmodels.nn.dropout import dropout


def sign_bits(x: Tensor, planes: Tensor) -> Tensor:
    """On which side of each hyperplane a vector lies: bit k is x . planes_k > 0, so that exactly 0 is bit 0.

    Two vectors at angle theta share a bit with probability 1 - theta / pi when the planes are normal draws.

    Shapes: `x (.., d)`, `planes (d, k)` to bool `(.., k)`. Source: Charikar 2002, section 3.

    Example:
        >>> sign_bits(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.eye(2)).int()
        tensor([[1, 0],
                [0, 1]], dtype=torch.int32)
    """
    return x @ planes > 0


def sign_hash(x: Tensor, planes: Tensor) -> Tensor:
    """The bucket of the sign bits read as a binary number, the first bit leading: int64 in 0 .. 2^k - 1.

    Example:
        >>> sign_hash(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.eye(2))
        tensor([2, 1])
    """
    bits = sign_bits(x, planes)
    powers = 2 ** torch.arange(bits.shape[-1] - 1, -1, -1, device=x.device)
    return (bits * powers).sum(-1)


def rotation_hash(x: Tensor, rotation: Tensor) -> Tensor:
    """The nearest of the axes and their opposites after a random map: argmax of [x R; -x R].

    Shapes: `x (.., d)`, `rotation (d, n)` to int64 `(..)` in 0 .. 2 n - 1. Source: Andoni et al. 2015, section 3.

    Example:
        >>> rotation_hash(torch.tensor([[1.0, 0.0], [2.0, 1.0], [-1.0, -3.0]]), torch.eye(2))
        tensor([0, 0, 3])
    """
    turned = x @ rotation
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


HASHES = {"sign": sign_hash, "rotation": rotation_hash}
#: Below this many positions sorting costs more than it saves.
WORTHWHILE = 3000


class Sorted(NamedTuple):
    """Vectors in the order of their buckets, cut into chunks.

    qk `(B, H, R, n, chunk, d)`; bucket `(B, H, R, n, chunk)`; order, inverse `(B, H, R, n chunk)`, from sorted place to
    position and back.
    """

    qk: Tensor
    bucket: Tensor
    order: Tensor
    inverse: Tensor


class LSH(AtOnce):
    """Attention among positions that hash to the same bucket, in time n log n of the length.

        s_ij = q_i . k_j / sqrt(d),    k_j = q_j / norm(q_j)

    Queries and keys are one projection. Positions are sorted by bucket (stably, invalid ones last) and cut into chunks;
    a position attends to those of its bucket in its chunk and in the one before, and to itself only where no round has
    anything else for it. Rounds are joined by the logsumexp of their scores, so that a key found by several rounds
    counts several times. With one bucket and one chunk this is full attention.

    Arguments:
        dim: width D of x and y.
        heads: number of heads; divides D.
        buckets: number of buckets: a power of 2 for signs, even for rotations, or 1.
        chunk: length of a chunk; any length of x goes, the last chunk is filled up with invalid positions.
        rounds: number of hashes, each with buckets of its own.
        hash: `sign` of projections on random planes, or `rotation`, the nearest axis after a random map.
        redraw: whether every call in training draws anew; else, and in evaluation, the hashes are those drawn when
            the module was built, which the state dict holds.
        generator: where hashes are drawn from; None is torch's own.
        dropout: probability of dropping a weight, in training.
        bias: whether the projections have biases.

    Shapes: `x (B, L, D)`, `mask (B, 1, L)` bool, True = valid; y is `(B, L, D)`, zero at invalid positions.
    Errors: ValueError for buckets that the hash does not have, chunk or rounds < 1, a memory, a cache, a mask of pairs.
    Source: Kitaev et al. 2020, section 2.

    Example:
        >>> attention = LSH(8, 2, buckets=4, chunk=4, rounds=2)
        >>> attention(torch.randn(3, 11, 8))[0].shape
        torch.Size([3, 11, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        buckets: int = 16,
        chunk: int = 64,
        rounds: int = 2,
        hash: Literal["sign", "rotation"] = "rotation",
        redraw: bool = True,
        generator: torch.Generator | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__(dim, heads, dropout)
        if hash not in HASHES:
            raise ValueError(f"hash must be sign or rotation, got {hash!r}")
        if hash == "sign" and (buckets < 1 or buckets & (buckets - 1)):
            raise ValueError(f"k planes make 2^k buckets: buckets must be a power of 2, got {buckets}")
        if hash == "rotation" and buckets != 1 and (buckets < 1 or buckets % 2):
            raise ValueError(f"axes and their opposites make an even number of buckets, got {buckets}")
        if chunk < 1 or rounds < 1:
            raise ValueError(f"chunk and rounds must be at least 1, got {chunk} and {rounds}")
        self.buckets, self.chunk, self.rounds, self.hash = buckets, chunk, rounds, hash
        self.redraw, self.generator = redraw, generator
        self.register_buffer("directions", self._draw("cpu"))
        self.project_qk = nn.Linear(dim, dim, bias=bias)
        self.project_v = nn.Linear(dim, dim, bias=bias)
        self.project_out = nn.Linear(dim, dim, bias=bias)

    def hashes(self, qk: Tensor) -> Tensor:
        """The buckets of `qk (B, H, L, d)` in each round, int64 `(B, H, R, L)`."""
        if self.buckets == 1:
            return qk.new_zeros(*qk.shape[:2], self.rounds, qk.shape[2], dtype=torch.int64)
        directions = self._draw(qk.device) if self.training and self.redraw else self.directions
        return HASHES[self.hash](qk[:, :, None], directions.to(qk.dtype))

    def _draw(self, device: torch.device | str) -> Tensor:
        """Planes or maps of every head and round, `(H, R, d, k)`."""
        k = self.buckets.bit_length() - 1 if self.hash == "sign" else self.buckets // 2
        shape = (self.heads, self.rounds, self.head_dim, k)
        if self.generator is None:
            return torch.randn(shape, device=device)
        return normal(shape, self.generator, device=device)

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        reason = f"{self.rounds} rounds of {self.buckets} buckets in chunks of {self.chunk}"
        if Lk < WORTHWHILE:
            reason = f"{reason}; slower than full attention below about {WORTHWHILE:,} positions"
        chunk = min(self.chunk, max(Lq, 1))
        rows = self.heads * self.rounds * chunk * -(-Lq // chunk)
        return reason, rows * (2 * 2 * chunk + 6 * self.head_dim)

    def _mix(self, given: Inputs, values: Tensor, drop: float) -> Tensor:
        qk = split_heads(self.project_qk(given.x), self.heads)
        with torch.autocast(qk.device.type, enabled=False):
            qk, values = wide(qk), wide(values)
            if given.empty:
                return values
            length, chunk = qk.shape[2], min(self.chunk, qk.shape[2])
            missing = -length % chunk
            bucket = self.hashes(qk.detach())
            if given.keys is not None:
                bucket = bucket.masked_fill(~given.keys[:, :, None], self.buckets)
            arranged = self._sort(pad(qk, (0, 0, 0, missing)), pad(bucket, (0, missing), value=self.buckets), chunk)
            y, total, others = self._within(arranged, pad(values, (0, 0, 0, missing)), drop)
            share = masked_softmax(total.mT, others.mT)[..., :length, :]  # (B, H, L, R)
            y = (share.mT[..., None] * y[..., :length, :]).sum(2)
            return torch.where(others.any(2)[..., :length, None], y, values)

    def _sort(self, qk: Tensor, bucket: Tensor, chunk: int) -> Sorted:
        order = torch.argsort(bucket, dim=-1, stable=True)
        index = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        inverse = torch.zeros_like(order).scatter(-1, order, index)
        n = order.shape[-1] // chunk
        return Sorted(_take(qk, order).unflatten(3, (n, chunk)), bucket.gather(-1, order).unflatten(3, (n, chunk)),
                      order, inverse)  # fmt: skip

    def _within(self, arranged: Sorted, values: Tensor, drop: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of each round: means `(B, H, R, L, d)`, logsumexp of scores `(B, H, R, L)`, and whether there was a key."""
        qk, bucket = arranged.qk, arranged.bucket
        n, chunk = bucket.shape[3:]
        # The square is kept off 0, where the root has no derivative.
        k = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + 1e-12)
        v = _take(values, arranged.order).unflatten(3, (n, chunk))
        own = torch.eye(chunk, dtype=torch.bool, device=qk.device)
        key_bucket = bucket
        if n > 1:  # one chunk back; there is none before the first
            k, v = (torch.cat([_before(t, 0.0), t], dim=4) for t in (k, v))
            key_bucket = torch.cat([_before(bucket, -1), bucket], dim=4)
            own = pad(own, (chunk, 0))
        same = bucket[..., :, None] == key_bucket[..., None, :]
        allowed = same & (bucket < self.buckets)[..., None] & ~own
        others = allowed.any(-1)
        scores = qk @ k.mT / math.sqrt(self.head_dim)
        scores = torch.where(allowed | ~others[..., None], scores, -math.inf)
        total = scores.logsumexp(-1, keepdim=True)
        a = (scores - total).exp()
        y = (dropout(a, drop) if drop else a) @ v
        inverse = arranged.inverse
        y = y.flatten(3, 4)
        y = y.gather(3, inverse[..., None].expand_as(y))
        return y, total.flatten(3).gather(-1, inverse), others.flatten(3).gather(-1, inverse)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """`x (B, H, L, d)` in the order of each round, `(B, H, R, L, d)`."""
    rounds = order.shape[2]
    index = order[..., None].expand(-1, -1, -1, -1, x.shape[-1])
    return x[:, :, None].expand(-1, -1, rounds, -1, -1).gather(3, index)


def _before(x: Tensor, filler: float) -> Tensor:
    """The chunk before each chunk, `(B, H, R, n, chunk, ..)`, and the filler before the first."""
    return torch.cat([torch.full_like(x[:, :, :, :1], filler), x[:, :, :, :-1]], dim=3)
