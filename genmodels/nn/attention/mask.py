"""Who may attend to whom: one builder for causal, windowed, chunked, triggered and padded masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reach:
    """Which keys a query may attend to by index alone; all conditions given are intersected.

        causal: j <= i;   window (l, r): -l <= j - i <= r;   chunk (n, m): 0 <= i // n - j // n <= m

    Arguments:
        causal: the future is hidden.
        window: keys before and after the query, None = unbounded.
        chunk: size of a chunk, and how many chunks before its own a query sees, None = all.

    Errors: ValueError for a negative window, a size below 1, a negative number of chunks.

    Example:
        >>> i = torch.arange(5)
        >>> Reach(chunk=(2, 1)).allowed(i[:, None], i).int()[4]
        tensor([0, 0, 1, 1, 1], dtype=torch.int32)
        >>> Reach(chunk=(2, 1)).first(4), Reach(chunk=(2, 1)).last(4)
        (2, 5)
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    chunk: tuple[int, int | None] | None = None

    def __post_init__(self):
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Sequence) or len(value) != 2):
                raise ValueError(f"{name} must be a pair, got {value!r}")
        if self.window is not None and any(side is not None and side < 0 for side in self.window):
            raise ValueError(f"window must be (keys before, keys after), neither negative, got {tuple(self.window)}")
        if self.chunk is not None and self.chunk[0] < 1:
            raise ValueError(f"chunk must have a size of at least 1, got {tuple(self.chunk)}")
        if self.chunk is not None and self.chunk[1] is not None and self.chunk[1] < 0:
            raise ValueError(f"chunk cannot see a negative number of chunks before its own, got {tuple(self.chunk)}")

    @property
    def everywhere(self) -> bool:
        """Whether nothing is out of reach."""
        return not self.causal and self.chunk is None and (self.window is None or tuple(self.window) == (None, None))

    @property
    def causal_alone(self) -> bool:
        """Whether the future is all that is out of reach."""
        return self.causal and self.chunk is None and (self.window is None or self.window[0] is None)

    @property
    def no_future(self) -> bool:
        """Whether no query sees a later key."""
        return self.causal or (self.window is not None and self.window[1] == 0)

    def allowed(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether query i may attend to key j; absolute indices of any shapes that broadcast."""
        r = j - i
        allowed = torch.ones_like(r, dtype=torch.bool)
        if self.causal:
            allowed = allowed & (r <= 0)
        if self.window is not None:
            left, right = self.window
            if left is not None:
                allowed = allowed & (r >= -left)
            if right is not None:
                allowed = allowed & (r <= right)
        if self.chunk is not None:
            size, left_chunks = self.chunk
            past = torch.div(i, size, rounding_mode="floor") - torch.div(j, size, rounding_mode="floor")
            allowed = allowed & (past >= 0)
            if left_chunks is not None:
                allowed = allowed & (past <= left_chunks)
        return allowed

    def first(self, i: int) -> int | None:
        """The first key that query i reaches, None where the past is unbounded; never falls as i grows."""
        bounds = []
        if self.window is not None and self.window[0] is not None:
            bounds.append(i - self.window[0])
        if self.chunk is not None and self.chunk[1] is not None:
            bounds.append((i // self.chunk[0] - self.chunk[1]) * self.chunk[0])
        return max(bounds) if bounds else None  # torch 2.11 compiles no default=

    def last(self, i: int) -> int | None:
        """The last key that query i reaches, None where the future is unbounded; never falls as i grows."""
        bounds = [i] if self.causal else []
        if self.window is not None and self.window[1] is not None:
            bounds.append(i + self.window[1])
        if self.chunk is not None:
            bounds.append((i // self.chunk[0] + 1) * self.chunk[0] - 1)
        return min(bounds) if bounds else None


def build_mask(
    Lq: int,
    Lk: int,
    q0: int = 0,
    k0: int = 0,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    chunk: tuple[int, int | None] | None = None,
    trigger: tuple[Tensor, int] | None = None,
    padding: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The mask of a call: `(B or 1, 1, Lq, Lk)` bool, True = may attend; all conditions given are intersected.

    Arguments:
        Lq, Lk: numbers of queries and keys.
        q0, k0: absolute indices of the first query and of the first key.
        causal, window, chunk: see `Reach`.
        trigger: `(t (B, Lq), delay)`: a query sees keys up to absolute index t + delay.
        padding: `(B, 1, Lk)` bool, True = valid key.
        device: where to build it; the trigger's or padding's device by default.

    Errors: ValueError for a negative window or delay, a size below 1, a padding that is not bool or does not fit.
    Source: chunks: Zhang et al. 2020 (U2), section 3.2; triggers: Moritz et al. 2019, section 2.

    Example:
        >>> build_mask(2, 4, q0=2, causal=True)[0, 0].int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    if device is None:
        known = [t for t in (padding, None if trigger is None else trigger[0]) if t is not None]
        device = known[0].device if known else None
    i = torch.arange(q0, q0 + Lq, device=device)[:, None]
    j = torch.arange(k0, k0 + Lk, device=device)
    allowed = Reach(causal, window, chunk).allowed(i, j)[None, None]
    if trigger is not None:
        t, delay = trigger
        if delay < 0:
            raise ValueError(f"trigger cannot have a negative delay, got {delay}")
        if t.dim() != 2 or t.shape[1] != Lq:
            raise ValueError(f"trigger needs one index for each query, (B, {Lq}), got {tuple(t.shape)}")
        allowed = allowed & (j <= t.to(device)[:, None, :, None] + delay)
    if padding is not None:
        check_padding(padding, padding.shape[0], Lk, "padding")
        allowed = allowed & padding[:, :, None, :]
    return allowed


def check_boolean(mask: Tensor, name: str = "mask") -> None:
    """Raise ValueError unless a mask is boolean: masks of 0 and 1 have meant two opposite things."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean (True = may attend), got {mask.dtype}")


def check_padding(mask: Tensor, batch: int, length: int, name: str = "mask") -> None:
    """Raise ValueError unless `mask` is bool and `(batch or 1, 1, length)`: True = valid."""
    check_boolean(mask, name)
    if mask.dim() != 3 or mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, length):
        raise ValueError(f"{name} {tuple(mask.shape)} does not broadcast to (B, 1, L) = {(batch, 1, length)}")


def check_full(mask: Tensor, shape: tuple[int, int, int, int], name: str = "mask") -> None:
    """Raise ValueError unless `mask` is bool, of 2 or 4 dimensions, and broadcasts to `(B, H, Lq, Lk)`."""
    check_boolean(mask, name)
    fits = all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(shape), strict=False))
    if mask.dim() not in (2, 4) or not fits:
        raise ValueError(f"{name} {tuple(mask.shape)} does not broadcast to (B, H, Lq, Lk) = {tuple(shape)}")


def hide_rows(x: Tensor, padding: Tensor | None) -> Tensor:
    """`x (B, L, D)` with invalid positions set to zero; a choice, not a product, so that no NaN gets through.

    Hidden before the projections and not after: a NaN times a zero gradient would still poison their weights.
    """
    return x if padding is None else x.masked_fill(~padding.transpose(1, 2), 0)
