"""Bucketed distance bias of T5."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.attention.position import DistanceBias


class T5Bias(DistanceBias):
    """A learned bias for each head and each bucket of distances; buckets widen with the logarithm of the distance.

        b(i, j) = table[bucket(j - i), h]

    Distances below half the buckets of a direction have one each; the others share the rest, up to `max_distance`, and
    what lies beyond shares the last. The bias is not divided by sqrt(d).

    Arguments:
        dim, heads: as in the attention it serves.
        buckets: number of buckets, of both directions together.
        max_distance: where the last bucket begins at the latest.
        bidirectional: whether the future has buckets of its own (half of them); if not it shares that of distance 0.
        cross: whether queries and keys of two sequences share one clock.

    Shapes: table `(buckets, H)`. Errors: ValueError for an odd number of two-way buckets, fewer than two of a
    direction, or a `max_distance` that leaves nothing to share.
    Source: Raffel et al. 2020, section 2.1.

    Example:
        >>> T5Bias(8, 2).bucket(torch.tensor([-200, -12, -7, 0, 1, 8]))
        tensor([15,  9,  7,  0, 17, 24])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        cross: bool = False,
    ):
        super().__init__(dim, heads, cross=cross)
        if bidirectional and buckets % 2:
            raise ValueError(f"buckets = {buckets} cannot be halved between past and future")
        self.bidirectional, self.max_distance = bidirectional, max_distance
        self.one_way = buckets // 2 if bidirectional else buckets
        if self.one_way < 2:
            raise ValueError(f"buckets = {buckets} leaves {self.one_way} for a direction, at least 2 are needed")
        if max_distance <= self.one_way // 2:
            raise ValueError(f"max_distance = {max_distance} must exceed the {self.one_way // 2} exact buckets")
        starts = torch.tensor(bucket_starts(self.one_way, max_distance))
        self.register_buffer("starts", starts, persistent=False)
        self.weight = nn.Parameter(torch.randn(buckets, heads) * dim**-0.5)

    def bucket(self, r: Tensor) -> Tensor:
        """The bucket of distances r, int64 of any shape."""
        n = r.abs() if self.bidirectional else (-r).clamp(min=0)
        bucket = torch.bucketize(n, self.starts, right=True)
        return bucket + self.one_way * (r > 0) if self.bidirectional else bucket

    def table(self, r: Tensor) -> Tensor:
        return self.weight[self.bucket(r)].T


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """The least distance of buckets 1, 2, ...: exact ones first, then equal steps of the logarithm.

    With e exact buckets, bucket e + k begins where log(n / e) / log(max / e) >= k / (buckets - e). Both sides are
    raised to integers, so that no rounding of a logarithm can move a boundary.

    Example:
        >>> bucket_starts(16, 128)
        [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    """
    exact = buckets // 2
    wide = buckets - exact
    starts, n = list(range(1, exact + 1)), exact
    for k in range(1, wide):
        while n**wide * exact**k < exact**wide * max_distance**k:
            n += 1
        starts.append(n)
    return starts
