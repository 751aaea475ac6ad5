"""From real durations to frames: rounding that keeps the total, and the path that durations stand for."""

from __future__ import annotations

import torch
from torch import Tensor


def path_of(durations: Tensor, length: int) -> Tensor:
    """The path (B, N, T) bool of durations (B, N): token i has the frames after those of the tokens before it.

    Example:
        >>> path_of(torch.tensor([[1, 2]]), 4).int()
        tensor([[[1, 0, 0, 0],
                 [0, 1, 1, 0]]], dtype=torch.int32)
    """
    end = durations.cumsum(1)[:, :, None]
    frame = torch.arange(length, device=durations.device)
    return (frame < end) & (frame >= end - durations[:, :, None])


def total_frames(widths: Tensor, mask: Tensor | None = None) -> Tensor:
    """Frames (B,) that real durations (B, N) come to: their sum rounded, at least one frame for each token.

    Example:
        >>> total_frames(torch.tensor([[1.4, 2.3, 0.4, 3.2], [0.1, 0.1, 0.1, 0.1]]))
        tensor([7, 4])
    """
    widths, count = _valid(widths, mask)
    return torch.maximum(count, torch.floor(widths.sum(1) + 0.5).long())


def integer_durations(widths: Tensor, total: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Whole frames for real durations, their sum exactly as asked, every token with one frame at least.

        c_k = w_1 + .. + w_k,    e_k = floor(T c_k / c_N + 1/2) clipped to [e_{k-1} + 1, T - (N - k)]
        d_k = e_k - e_{k-1}

    Rounding the ends and not the durations keeps every end within half a frame of its place, where no clipping is
    needed.

    Arguments:
        widths: w, non-negative and not all zero.
        total: T of each item; `total_frames` when None.
        mask: which tokens are valid.

    Shapes: `widths (B, N)`, `total (B,)` int64, `mask (B, 1, N)` bool; the result is `(B, N)` int64, zero outside.
    Errors: ValueError for negative or non-finite widths, and for a total of fewer frames than tokens.

    Example:
        >>> integer_durations(torch.tensor([[1.4, 2.3, 0.4, 3.2]]), torch.tensor([8]))
        tensor([[2, 2, 1, 3]])
    """
    total = total_frames(widths, mask) if total is None else total
    widths, count = _valid(widths, mask)
    if not bool(((widths >= 0) & widths.isfinite()).all()):
        raise ValueError("durations must be finite and not negative")
    if bool((total < count).any()):
        item = int((total < count).nonzero()[0])
        raise ValueError(f"item {item} has {int(count[item])} tokens, which do not fit in {int(total[item])} frames: "
                         f"it takes {int(count[item])} frames at least")
    ends = widths.cumsum(1)
    whole = ends[:, -1:].clamp(min=torch.finfo(ends.dtype).tiny)
    ends = torch.floor(total[:, None] * ends / whole + 0.5).long()
    last, found = torch.zeros_like(total), []
    for k in range(widths.shape[1]):
        # Padding has no frame of its own: beyond the last token both bounds are T.
        lowest = torch.where(k < count, last + 1, total)
        highest = torch.where(k < count, total - (count - (k + 1)), total)
        end = torch.minimum(torch.maximum(ends[:, k], lowest), highest)
        found.append(end - last)
        last = end
    return torch.stack(found, 1)


def _valid(widths: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Widths in float64 with zeros outside the mask, and the number of tokens."""
    if mask is None:
        return widths.double(), torch.full((len(widths),), widths.shape[1], device=widths.device)
    return torch.where(mask[:, 0], widths.double(), 0.0), mask[:, 0].sum(1)
