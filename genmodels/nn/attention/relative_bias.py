"""Position biases that are added to the logits: ALiBi, T5, Swin, and the two axes of a mel-spectrogram."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.core.errors import at_least
from genmodels.nn.attention.position import DistanceBias, Position, Space


class ALiBi(DistanceBias):
    """A penalty that is linear in the distance, with a fixed slope for each head.

        b(i, j) = -m_h |j - i|,    m_h = 2^(-8h / H), h = 1 .. H

    When H is not a power of two: the slopes of the largest power p below H, then every other slope of 2p.

    Arguments:
        dim, heads: those of the attention.
        symmetric: whether the future is penalised like the past; if not, not at all (no difference for causal
            attention).
        cross: see `Position`.

    Source: Press et al. 2022, section 3.

    Example:
        >>> ALiBi(8, 2).table(torch.tensor([-2, 0, 1]))
        tensor([[-0.1250,  0.0000, -0.0625],
                [-0.0078,  0.0000, -0.0039]], dtype=torch.float64)
    """

    def __init__(self, dim: int, heads: int, *, symmetric: bool = True, cross: bool = False):
        super().__init__(dim, heads, cross=cross)
        self.symmetric = symmetric
        # Integers, so that a change of the module's precision does not round the slopes.
        self.register_buffer("steps", torch.tensor(exponents(heads)), persistent=False)

    def table(self, r: Tensor) -> Tensor:
        distance = r.abs() if self.symmetric else (-r).clamp(min=0)
        slopes = torch.pow(2.0, self.steps.to(torch.float64) * (-8 / (2 * largest_power(self.heads))))
        return slopes[:, None] * -distance


def largest_power(heads: int) -> int:
    """p, the largest power of two up to the number of heads."""
    return 1 << (heads.bit_length() - 1)


def exponents(heads: int) -> list[int]:
    """n of each slope 2^(-8 n / 2p): even for the slopes of p heads, odd for the slopes that only 2p heads have.

    Example:
        >>> [2.0 ** (-8 * n / 8) for n in exponents(6)]
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    power = largest_power(heads)
    return [2 * h for h in range(1, power + 1)] + [2 * h + 1 for h in range(heads - power)]


class T5Bias(DistanceBias):
    """A learned bias for each head and each bucket of distances; buckets widen with the logarithm of the distance.

        b(i, j) = table[bucket(j - i), h]

    Distances below half the buckets of a direction have one each; larger ones up to `max_distance` share the rest, and
    those beyond the last. The bias is not divided by sqrt(d).

    Arguments:
        dim, heads: those of the attention.
        buckets: number of buckets of both directions together.
        max_distance: upper limit of the start of the last bucket.
        bidirectional: whether half of the buckets are for the future; else the future shares the bucket of distance 0.
        cross: see `Position`.

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

    With e exact buckets, bucket e + k begins where log(n / e) / log(max / e) >= k / (buckets - e), evaluated in
    integers, since rounded logarithms could move a boundary.

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


class Swin2d(Position):
    """A learned bias for each head and each offset (dy, dx) between two places of a map.

        b(i, j) = table[(dy + H_m - 1)(2 W_m - 1) + dx + W_m - 1, h],    (dy, dx) = query minus key

    The offset is query minus key, unlike distances elsewhere here, as in published checkpoints. For a map of another
    size than `size` the table is resampled bicubically with fixed corners, so that offsets keep their meaning relative
    to the size of the map.

    Arguments:
        dim, heads: those of the attention.
        size: height and width of the map of the table.

    Shapes: table `((2 H_m - 1)(2 W_m - 1), H)`. Errors: ValueError for a size below 1.
    Source: Liu et al. 2021, section 3.2, equation 4.

    Example:
        >>> Swin2d.index((2, 2))
        tensor([[4, 3, 1, 0],
                [5, 4, 2, 1],
                [7, 6, 4, 3],
                [8, 7, 5, 4]])
    """

    dims = 2
    score = "shared"

    def __init__(self, dim: int, heads: int, *, size: tuple[int, int]):
        super().__init__(dim, heads)
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"size must be (height, width), at least 1 each, got {tuple(size)}")
        self.size = tuple(size)
        self.table = nn.Parameter(torch.randn((2 * size[0] - 1) * (2 * size[1] - 1), heads) * 0.02)

    @staticmethod
    def index(space: Space, *, device=None) -> Tensor:
        """The row of a table made for `space`, for each query and key: int64 `(H W, H W)`."""
        height, width = space
        place = torch.arange(height * width, device=device)
        y, x = torch.div(place, width, rounding_mode="floor"), place % width
        dy, dx = y[:, None] - y, x[:, None] - x
        return (dy + height - 1) * (2 * width - 1) + dx + width - 1

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        space = self.space_of(Lq) if space is None else space
        table = self.table
        if tuple(space) != self.size:
            table = resample(table, self.size, space)
        return table[self.index(space, device=q.device)].permute(2, 0, 1)[None]

    def space_of(self, length: int) -> Space:
        if length != self.size[0] * self.size[1]:
            raise ValueError(
                f"{length} positions are not the {self.size[0]} x {self.size[1]} of Swin2d: pass space, (height, width)"
            )
        return self.size


def resample(table: Tensor, size: Space, space: Space) -> Tensor:
    """A table made for maps of `size`, resampled for maps of `space`: bicubic, corners and centre kept in place.

    Two small products, since `interpolate` has no centre for maps of one row, and gradients that vary between runs.

    Shapes: `((2 H_m - 1)(2 W_m - 1), heads)` to `((2 H - 1)(2 W - 1), heads)`.

    Example:
        >>> resample(torch.ones(9, 1), (2, 2), (1, 2)).flatten()
        tensor([1., 1., 1.])
    """
    rows, columns = (cubic_weights(2 * a - 1, 2 * b - 1, like=table) for a, b in zip(size, space, strict=True))
    grid = table.unflatten(0, (2 * size[0] - 1, 2 * size[1] - 1))
    return torch.einsum("ya,xb,abh->yxh", rows, columns, grid).flatten(0, 1)


def cubic_weights(source: int, target: int, *, like: Tensor) -> Tensor:
    """The matrix `(target, source)` of cubic convolution (a = -0.75) with the ends aligned and kept beyond the border.

    Source: Keys 1981, equation 15.

    Example:
        >>> cubic_weights(3, 1, like=torch.zeros(()))
        tensor([[0., 1., 0.]])
    """
    place = torch.arange(target, dtype=torch.float64, device=like.device)
    # A single sample is at the centre.
    place = place * ((source - 1) / (target - 1)) if target > 1 else place + (source - 1) / 2
    first = place.floor()
    weights = torch.zeros(target, source, dtype=torch.float64, device=like.device)
    for tap in range(-1, 3):
        t = (place - (first + tap)).abs()
        near = (1.25 * t - 2.25) * t * t + 1
        far = ((-0.75 * t + 3.75) * t - 6) * t + 3
        column = (first + tap).clamp(0, source - 1).long()
        weights = weights.scatter_add(1, column[:, None], torch.where(t <= 1, near, far)[:, None])
    return weights.to(like.dtype)


class MelPosition(Position):
    """Any sequence scheme along time, and a learned bias for each pair of frequency bands.

        b(i, j) = time(t_j - t_i) + F[h, f_i, f_j]

    The scores are invariant to shifts in time, not in frequency. The number of bands is fixed, the duration is not. A
    map `(n_freq, T)` is flattened in row-major order, index = f T + t.

    Arguments:
        dim, heads: those of the attention.
        n_freq: number of frequency bands of the maps.
        time: scheme for the time axis, built for the same `dim` and `heads`; None for none.

    Shapes: F `(H, n_freq, n_freq)`, zero at the start.
    Errors: ValueError for n_freq < 1, a time scheme of other sizes, in two dimensions, or for the past only; for maps
    of another number of bands.

    Example:
        >>> position = MelPosition(8, 2, n_freq=3, time=ALiBi(8, 2))
        >>> position.score_bias(torch.randn(1, 2, 12, 4), 0, 0, 12, 12).shape
        torch.Size([1, 2, 12, 12])
    """

    dims = 2

    def __init__(self, dim: int, heads: int, *, n_freq: int, time: Position | None = None):
        super().__init__(dim, heads)
        time = Position(dim, heads) if time is None else time
        at_least(1, n_freq=n_freq)
        if (time.dim, time.heads) != (dim, heads):
            raise ValueError(f"time has (dim, heads) = {(time.dim, time.heads)}, MelPosition {(dim, heads)}")
        if time.dims != 1 or time.past_only:
            raise ValueError(f"time must be a sequence scheme of both directions, {type(time).__name__} is not")
        self.n_freq, self.time = n_freq, time
        self.rotates, self.adds_values = time.rotates, time.adds_values
        self.score = "content" if time.score == "content" else "shared"
        self.F = nn.Parameter(torch.zeros(heads, n_freq, n_freq))

    def space_of(self, length: int) -> Space:
        if length % self.n_freq:
            raise ValueError(f"{length} positions are no map of {self.n_freq} frequency bands")
        return self.n_freq, length // self.n_freq

    def rotate(self, q: Tensor, k: Tensor, q0: int, k0: int, space: Space | None = None) -> tuple[Tensor, Tensor]:
        if not self.rotates:
            return q, k
        bands, frames = self._space(q.shape[-2], space)
        turned = self.time.rotate(*(x.unflatten(2, (bands, frames)).flatten(1, 2) for x in (q, k)), 0, 0)
        return tuple(x.view_as(q) for x in turned)

    def query_bias(self) -> Tensor | None:
        return self.time.query_bias()

    def score_bias(self, q: Tensor, q0: int, k0: int, Lq: int, Lk: int, space: Space | None = None) -> Tensor:
        bands, frames = self._space(Lq, space)
        bias = self.F[None, :, :, None, :, None]  # (1, H, f_i, t_i, f_j, t_j)
        if self.time.score != "none":
            # Each band of the queries is an example for the time scheme.
            rows = q.unflatten(2, (bands, frames)).transpose(1, 2).flatten(0, 1)  # (B f_i, H, t_i, d)
            times = self.time.score_bias(rows, 0, 0, frames, frames)
            shared = times.shape[0] == 1
            times = times[:, None] if shared else times.unflatten(0, (-1, bands))  # (B|1, f_i|1, H, t_i, t_j)
            bias = bias + times.transpose(1, 2)[:, :, :, :, None, :]
        return bias.expand(-1, -1, bands, frames, bands, frames).flatten(4, 5).flatten(2, 3)

    def value_bias(self, a: Tensor, q0: int, k0: int, space: Space | None = None) -> Tensor | None:
        if not self.adds_values:
            return None
        bands, frames = self._space(a.shape[-2], space)
        a = a.unflatten(3, (bands, frames)).sum(3)  # (B, H, f_i t_i, t_j): the value depends on time alone
        rows = a.unflatten(2, (bands, frames)).transpose(1, 2).flatten(0, 1)
        return self.time.value_bias(rows, 0, 0).unflatten(0, (-1, bands)).transpose(1, 2).flatten(2, 3)

    def score_elements(self, batch: int, Lq: int, Lk: int) -> int:
        frames = Lq // self.n_freq
        rows = batch * self.n_freq if self.score == "content" else 1
        return super().score_elements(batch, Lq, Lk) + self.time.score_elements(rows, frames, frames)

    def _space(self, length: int, space: Space | None) -> Space:
        space = self.space_of(length) if space is None else space
        if space[0] != self.n_freq:
            raise ValueError(f"MelPosition was built for {self.n_freq} frequency bands, the map has {space[0]}")
        return space
