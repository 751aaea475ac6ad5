"""Approximate attention: through a few landmarks (Nystrom), or within buckets of similar vectors (LSH)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.core.errors import at_least, one_of
from genmodels.core.random import dropout, normal
from genmodels.core.tensors import wide
from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.mechanism import AtOnce, Inputs, split_heads

#: Approximate ratio of the times of many small products and of a fused kernel.
SMALL_PRODUCTS = 8


def nystrom(A: Tensor, S: Tensor, rcond: float = 1e-6) -> Tensor:
    """The Nystrom approximation of a matrix from some of its rows and columns: A[:, S] pinv(A[S, S]) A[S, :].

    Exact in the rows and columns S when A[S, S] is regular, and everywhere when S spans the rank of A. Singular values
    below `rcond` times the largest count as zero.

    Shapes: `A (.., L, L)`, `S (m,)` indices.
    Source: Williams and Seeger 2001, section 3.

    Example:
        >>> u = torch.tensor([[1.0, 2.0, 3.0]])
        >>> nystrom(u.T @ u, torch.tensor([0]))
        tensor([[1., 2., 3.],
                [2., 4., 6.],
                [3., 6., 9.]])
    """
    rows = A[..., S, :]
    return A[..., S] @ torch.linalg.pinv(rows[..., S], rtol=rcond) @ rows


def iterated_inverse(A: Tensor, iterations: int) -> Tensor:
    """The pseudo-inverse by a convergent iteration of third order.

        Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4,    Z_0 = A^T / (norm_1(A) norm_inf(A))

    Each matrix of a batch has its own norms. Rows and columns of zeros stay zero. The error of six iterations is a few
    per cent.

    Source: Razavi et al. 2014, equation 11; Xiong et al. 2021, section 3.3.

    Example:
        >>> iterated_inverse(torch.diag(torch.tensor([2.0, 0.0])), 12)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.0000]])
    """
    columns, rows = A.abs().sum(-2).amax(-1), A.abs().sum(-1).amax(-1)
    scale = (columns * rows)[..., None, None]
    Z = A.mT / torch.where(scale > 0, scale, 1.0)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ))) / 4
    return Z


def pseudo_inverse(A: Tensor) -> Tensor:
    """The pseudo-inverse of square matrices, with derivatives as accurate as the inverse where they are regular.

        dZ = -Z dA Z                                                    for regular A
        dZ = -Z dA Z + Z Z^T dA^T (I - A Z) + (I - Z A) dA^T Z^T Z      else (constant rank)

    For regular A the projections are only rounding errors, which the second form would multiply by cond(A)^2.

    Source: Golub and Pereyra 1973, equation 4.12.

    Example:
        >>> pseudo_inverse(torch.tensor([[[2.0, 0.0], [0.0, 4.0]], [[2.0, 0.0], [0.0, 0.0]]])).diagonal(dim1=1, dim2=2)
        tensor([[0.5000, 0.2500],
                [0.5000, 0.0000]])
    """
    with torch.no_grad():
        regular = (torch.linalg.matrix_rank(A) == A.shape[-1])[..., None, None]
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    inverse = torch.linalg.inv(torch.where(regular, A, identity))
    return torch.where(regular, inverse, torch.linalg.pinv(torch.where(regular, identity, A)))


def segments(valid: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights `(B, count, L)` of the means over `count` segments of the valid positions.

    The n valid positions of an example are divided into segments of n / count each, without regard to the padding. Of
    fewer than `count` positions some segments are empty, with weights 0.

    Shapes: `valid (B, 1, L)` bool.

    Example:
        >>> segments(torch.tensor([[[True, True, False, True]]]), 2)
        tensor([[[0.5000, 0.5000, 0.0000, 0.0000],
                 [0.0000, 0.0000, 0.0000, 1.0000]]])
    """
    number = valid.cumsum(-1)
    total = number[..., -1:].clamp(min=1)
    own = torch.div((number - 1) * count, total, rounding_mode="floor")
    member = (valid & (own == torch.arange(count, device=valid.device)[:, None])).to(dtype)
    return member / member.sum(-1, keepdim=True).clamp(min=1)


class Nystrom(AtOnce):
    """Softmax attention through m landmarks, in time and memory linear in the length.

        y = W_O softmax(q k_L^T) Z softmax(q_L k^T) v,    Z = pinv(softmax(q_L k_L^T))

    q and k are scaled by d^(-1/4); landmarks q_L, k_L are means over segments of the valid positions. With as many
    landmarks as positions and the exact pseudo-inverse this is full attention; with fewer it is an approximation whose
    weights may be negative and need not sum to 1.

    Arguments:
        dim, heads: see `Mechanism`.
        landmarks: number m of segments; shorter sequences use fewer.
        iterations: steps of the iteration for the pseudo-inverse, None for the exact one.
        causal: not supported, since a landmark averages over the future.

    Shapes: `x (B, Lq, D)`, `memory (B, Lk, D)`, x itself by default; `mask (B, 1, Lq)` and `memory_mask (B, 1, Lk)`
    bool, True = valid. y is `(B, Lq, D)`.
    Errors: ValueError for `causal`, landmarks or iterations < 1, a cache, a mask of pairs.
    Source: Xiong et al. 2021, equations 13 to 15.

    Example:
        >>> attention = Nystrom(8, 2, landmarks=3)
        >>> attention(torch.randn(3, 7, 8))[0].shape
        torch.Size([3, 7, 8])
    """

    cross = True

    def __init__(self, dim: int, heads: int, *, landmarks: int = 32, iterations: int | None = 6):
        super().__init__(dim, heads)
        at_least(1, landmarks=landmarks)
        if iterations is not None and iterations < 1:
            raise ValueError(f"iterations must be at least 1, or None for the exact inverse, got {iterations}")
        self.landmarks, self.iterations = landmarks, iterations
        self.project_q = nn.Linear(dim, dim)
        self.project_k = nn.Linear(dim, dim)
        self.project_v = nn.Linear(dim, dim)
        self.project_out = nn.Linear(dim, dim)

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        m = self.landmarks
        reason = f"through {m} landmarks, linear in the length"
        # Products: with the landmarks and through them, and four of m x m in each iteration.
        work = 2 * m * (Lq + Lk) * self.head_dim + 4 * m**3 * (self.iterations or 20)
        if work * SMALL_PRODUCTS >= 2 * Lq * Lk * self.head_dim:
            reason = f"{reason}; slower than full attention at this length"
        return reason, self.heads * (2 * m * (Lq + Lk) + 5 * m * m) + m * (Lq + Lk)

    def _mix(self, given: Inputs, values: Tensor, drop: float) -> Tensor:
        q = split_heads(self.project_q(given.x), self.heads)
        k = split_heads(self.project_k(given.source), self.heads)
        with torch.autocast(q.device.type, enabled=False):
            q, k, values = wide(q) * self.head_dim**-0.25, wide(k) * self.head_dim**-0.25, wide(values)
            if given.empty:
                return q @ k.mT @ values
            ones = torch.ones(len(q), 1, 1, dtype=torch.bool, device=q.device)
            q_mean = self._means(ones.expand(-1, -1, q.shape[2]) if given.queries is None else given.queries, q.dtype)
            k_mean = self._means(ones.expand(-1, -1, k.shape[2]) if given.keys is None else given.keys, k.dtype)
            qL, kL = q_mean @ q, k_mean @ k  # (B, H, m, d)
            q_there, k_there = q_mean.any(-1), k_mean.any(-1)[:, :, None]  # (B, 1, m), (B, 1, 1, m)
            middle = masked_softmax(qL @ kL.mT, k_there)
            middle = torch.where(q_there[..., None], middle, 0)  # rows and columns of empty segments are zero
            if self.iterations is None:
                # Ones on the diagonal for segments that are empty on both sides, so that the matrix is regular.
                neither = ~(q_there[..., None] | k_there) & torch.eye(self.landmarks, dtype=torch.bool, device=q.device)
                Z = pseudo_inverse(torch.where(neither, 1, middle))
            else:
                Z = iterated_inverse(middle, self.iterations)
            right = masked_softmax(qL @ k.mT, given.allowed) @ values
            return masked_softmax(q @ kL.mT, k_there) @ (Z @ right)

    def _means(self, valid: Tensor, dtype: torch.dtype) -> Tensor:
        return segments(valid, self.landmarks, dtype)[:, None]  # (B, 1, m, L)


def sign_bits(x: Tensor, planes: Tensor) -> Tensor:
    """The side of each hyperplane on which a vector lies: bit k is x . planes_k > 0.

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
    """The nearest of all axes and their negatives after a random map: argmax of [x R; -x R].

    Shapes: `x (.., d)`, `rotation (d, n)` to int64 `(..)` in 0 .. 2 n - 1. Source: Andoni et al. 2015, section 3.

    Example:
        >>> rotation_hash(torch.tensor([[1.0, 0.0], [2.0, 1.0], [-1.0, -3.0]]), torch.eye(2))
        tensor([0, 0, 3])
    """
    turned = x @ rotation
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


HASHES = {"sign": sign_hash, "rotation": rotation_hash}
#: Length from which the sorting pays off.
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
    """Attention among positions in the same hash bucket, in time n log n of the length.

        s_ij = q_i . k_j / sqrt(d),    k_j = q_j / norm(q_j)

    Queries and keys share a projection. Positions are sorted by bucket (stably, invalid ones last) and cut into chunks;
    a position attends to those of its bucket in its chunk and the one before, and to itself only where no round finds
    another key. Rounds are weighted by the exponential of the logsumexp of their scores, so that a key found in several
    rounds counts several times. With one bucket and one chunk this is full attention.

    Arguments:
        buckets: number of buckets: a power of 2 for signs, even for rotations, or 1.
        chunk: length of a chunk; the last one is padded with invalid positions.
        rounds: number of independent hashes.
        hash: `sign` of projections on random planes, or `rotation`, the nearest axis after a random map.
        redraw: whether every call in training draws new hashes; else, and in evaluation, they are those drawn at
            construction, which are in the state dict.
        generator: source of the hashes; None is torch's own.
        dim, heads, dropout: see `Mechanism`.

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
    ):
        super().__init__(dim, heads, dropout)
        one_of("hash", hash, HASHES)
        if hash == "sign" and (buckets < 1 or buckets & (buckets - 1)):
            raise ValueError(f"k planes make 2^k buckets: buckets must be a power of 2, got {buckets}")
        if hash == "rotation" and buckets != 1 and (buckets < 1 or buckets % 2):
            raise ValueError(f"axes and their opposites make an even number of buckets, got {buckets}")
        at_least(1, chunk=chunk, rounds=rounds)
        self.buckets, self.chunk, self.rounds, self.hash = buckets, chunk, rounds, hash
        self.redraw, self.generator = redraw, generator
        self.register_buffer("directions", self._draw("cpu"))
        self.project_qk = nn.Linear(dim, dim)
        self.project_v = nn.Linear(dim, dim)
        self.project_out = nn.Linear(dim, dim)

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
        """For each round: outputs `(B, H, R, L, d)`, logsumexp of scores `(B, H, R, L)`, and whether there is a key."""
        qk, bucket = arranged.qk, arranged.bucket
        n, chunk = bucket.shape[3:]
        # The root has no derivative at 0.
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
        y = ((dropout(a, drop) if drop else a) @ v).flatten(3, 4)
        inverse = arranged.inverse
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
