"""Positions of mel-spectrograms as maps: time is relative, frequency absolute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.attention.position import Position, Space


class MelPosition(Position):
    """Any sequence scheme along time, and a learned bias for each pair of frequency bands.

        b(i, j) = time(t_j - t_i) + F[h, f_i, f_j]

    A sound shifted in time is the same sound, one shifted in frequency is not: the scores are invariant to the first
    and not to the second. The number of bands is fixed, the duration is not. A map `(n_freq, T)` is flattened row by
    row, place = f T + t.

    Arguments:
        dim, heads: as in the attention it serves.
        n_freq: number of frequency bands of the maps.
        time: scheme for the time axis, built for the same `dim` and `heads`; None leaves time unordered.

    Shapes: F `(H, n_freq, n_freq)`, zero at the start.
    Errors: ValueError for n_freq < 1, a time scheme of other sizes, in two dimensions, or for the past only; for maps
    of another number of bands.

    Example:
        >>> from genmodels.nn.attention.alibi import ALiBi
        >>> position = MelPosition(8, 2, n_freq=3, time=ALiBi(8, 2))
        >>> position.score_bias(torch.randn(1, 2, 12, 4), 0, 0, 12, 12).shape
        torch.Size([1, 2, 12, 12])
    """

    dims = 2

    def __init__(self, dim: int, heads: int, *, n_freq: int, time: Position | None = None):
        super().__init__(dim, heads)
        time = Position(dim, heads) if time is None else time
        if n_freq < 1:
            raise ValueError(f"n_freq must be at least 1, got {n_freq}")
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
            # Each band of a query is an example of its own to the time scheme.
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
