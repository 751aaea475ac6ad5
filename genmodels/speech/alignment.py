"""Monotonic alignment of texts and frames: the best path, the sum over all paths, and integer durations."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Alignment(NamedTuple):
    """The best path of each item.

    Shapes: `durations (B, N)` int64, frames of each token; `path (B, N, T)` bool, one token for each valid frame;
    `score (B,)`, the sum of the scores on the path, like the scores.
    """

    durations: Tensor
    path: Tensor
    score: Tensor


@torch.no_grad()
def monotonic_alignment_search(
    scores: Tensor, text_mask: Tensor | None = None, frame_mask: Tensor | None = None, *,
    names: list[str] | None = None, implementation: Literal["auto", "torch", "numba"] = "auto",
) -> Alignment:
    """The monotonic path of the largest score, in which every token has a frame and every frame one token.

        Q[i, j] = max(Q[i-1, j-1], Q[i, j-1]) + P[i, j],    Q[0, 0] = P[0, 0],    unreachable cells -inf

    A path starts at (0, 0), ends at (N-1, T-1), and at each frame stays or advances by one token. On a tie, seen from
    the end, it stays, so that early tokens are the short ones. There is no gradient.

    Arguments:
        scores: P, for example log N(z_j; mu_i, sigma_i).
        text_mask, frame_mask: valid tokens and frames, contiguous from the first. Scores outside are not read.
        names: of the items, for errors; default their positions.
        implementation: `torch` on the device of the scores; compiled, `numba` on the CPU; or `auto`, the faster one
            that is available.

    Shapes: `scores (B, N, T)` float32 or float64, also the precision of the sums; `text_mask (B, 1, N)`, `frame_mask
        (B, 1, T)`.
    Errors: ValueError for an item with more tokens than frames, without tokens or frames, or with a score that is not
        finite, each by name.
    Source: Kim et al. 2020 (Glow-TTS), algorithm 1.

    Example:
        >>> scores = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
        >>> found = monotonic_alignment_search(scores)
        >>> found.durations, found.score
        (tensor([[1, 2]]), tensor([3.]))
    """
    tokens, frames = lengths(scores, text_mask, frame_mask, names)
    search = IMPLEMENTATIONS[chosen(scores, implementation)]
    visited = search(scores, tokens, frames)[:, None]  # the token of each frame
    valid = _within(frames, scores.shape[2])[:, None]
    path = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, visited, valid)
    durations = torch.zeros_like(scores[:, :, 0], dtype=torch.int64).scatter_add_(1, visited[:, 0], valid[:, 0].long())
    score = torch.where(valid, scores.gather(1, visited), 0)[:, 0].sum(1)
    return Alignment(durations, path, score)


def chosen(scores: Tensor, implementation: str) -> str:
    """The name of the implementation to use.

    Raises:
        ValueError: for an unknown implementation, or one that cannot run here.
    """
    if implementation == "auto":
        return "numba" if scores.device.type == "cpu" and _has_numba() else "torch"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be auto, {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation == "numba" and not _has_numba():
        raise ValueError("implementation=numba needs numba: pip install 'genmodels[speech]'")
    if implementation != "torch" and scores.device.type != "cpu":
        raise ValueError(f"implementation={implementation} is for scores on the CPU, these are on {scores.device.type}")
    return implementation


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def lengths(
    scores: Tensor, text_mask: Tensor | None, frame_mask: Tensor | None, names: list[str] | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and frames (B,) of every item, after validating scores and masks.

    Raises:
        ValueError: see `monotonic_alignment_search`.
    """
    if scores.dim() != 3 or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are (B, N, T), float32 or float64, got {tuple(scores.shape)} {scores.dtype}")
    tokens, frames = (_length(scores, dim, mask) for dim, mask in ((1, text_mask), (2, frame_mask)))
    for item, (n, t) in enumerate(zip(tokens.tolist(), frames.tolist(), strict=True)):
        name = f"item {item}" if names is None else names[item]
        if n == 0 or t == 0:
            raise ValueError(f"{name} has {n} tokens and {t} frames: there is nothing to align, drop it")
        if n > t:
            raise ValueError(f"{name} has {n} tokens but only {t} frames: drop it, or leave out blanks between tokens")
    if bool(scores.sum().isfinite()):
        return tokens, frames  # a fast test that nearly always suffices
    valid = _within(tokens, scores.shape[1])[:, :, None] & _within(frames, scores.shape[2])[:, None, :]
    wrong = (valid & ~scores.isfinite()).nonzero()
    if len(wrong):
        item, token, frame = wrong[0].tolist()
        name = f"item {item}" if names is None else names[item]
        raise ValueError(f"{name}: the score of token {token} at frame {frame} is {float(scores[item, token, frame])}")
    return tokens, frames


def _length(scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    size = scores.shape[dim]
    if mask is None:
        return torch.full((len(scores),), size, device=scores.device)
    if mask.dtype != torch.bool or tuple(mask.shape) != (len(scores), 1, size):
        raise ValueError(f"a mask of scores {tuple(scores.shape)} is boolean ({len(scores)}, 1, {size}), "
                         f"got {tuple(mask.shape)} {mask.dtype}")
    length = mask[:, 0].sum(1)
    if bool((mask[:, 0] != _within(length, size)).any()):
        raise ValueError("a mask must be one run from the front: valid tokens or frames first, padding after")
    return length


def _within(length: Tensor, size: int) -> Tensor:
    """(B, size) bool: positions before each length."""
    return torch.arange(size, device=length.device) < length[:, None]


def _search_torch(scores: Tensor, tokens: Tensor, frames: Tensor) -> Tensor:
    """The token (B, T) of each frame: a loop over frames, all items and tokens at once, on the device of the scores."""
    batch, size, length = scores.shape
    # The batch is the last axis, so that neighbouring tokens are contiguous blocks; an unreachable extra row precedes
    # the first token.
    best = scores.new_full((length, size + 1, batch), -torch.inf)
    best[0, 1] = scores[:, 0, 0]
    at = scores.permute(2, 1, 0).contiguous().unbind()
    before, here = best[:, :-1].unbind(), best[:, 1:].unbind()
    for j in range(1, length):
        torch.maximum(before[j - 1], here[j - 1], out=here[j]).add_(at[j])
    advance = best[:-1, :-1] > best[:-1, 1:]
    # No step back in the frames beyond an item's last one.
    advance &= torch.arange(1, length, device=scores.device)[:, None, None] < frames
    token = tokens[None] - 1
    visited = [token]
    for step in reversed(advance.view(torch.uint8).unbind()):
        token = token - step.gather(0, token)
        visited.append(token)
    return torch.cat(visited[::-1]).mT


def _search_numba(scores: Tensor, tokens: Tensor, frames: Tensor) -> Tensor:
    """The token (B, T) of each frame: compiled loops, the items on as many cores as torch may use."""
    import numba

    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    visited = torch.empty(scores.shape[0], scores.shape[2], dtype=torch.int64)
    # Tokens of a frame are contiguous.
    compiled()(scores.mT.contiguous().numpy(), tokens.numpy(), frames.numpy(), visited.numpy())
    if torch.get_num_threads() != threads:
        # numba changes OpenMP's number of threads, which torch shares: rounding, and so a resumed run, would change.
        torch.set_num_threads(threads)
    return visited


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": _search_torch, "numba": _search_numba,
}


def forward_sum(scores: Tensor, text_mask: Tensor | None = None, frame_mask: Tensor | None = None) -> Tensor:
    """The log of the sum, over all monotonic paths, of the exponential of their scores.

        a[i, j] = log(exp a[i-1, j-1] + exp a[i, j-1]) + P[i, j],    result a[N-1, T-1]

    Its gradient is the posterior probability that frame j belongs to token i. Minus `log_paths` it is the
    log-likelihood of the frames under a uniform prior of the alignments.

    Arguments:
        scores, text_mask, frame_mask: as for `monotonic_alignment_search`.

    Shapes: the result is `(B,)`; it is computed in float64.
    Errors: those of `monotonic_alignment_search`; there are no second derivatives.

    Example:
        >>> scores = torch.tensor([[[1.0, 3.0, 1.0, 1.0], [1.0, 2.0, 2.0, 2.0], [4.0, 2.0, 1.0, 0.0]]])
        >>> forward_sum(scores)
        tensor([6.4076])
    """
    tokens, frames = lengths(scores.detach(), text_mask, frame_mask)
    return _ForwardSum.apply(scores, tokens, frames).to(scores.dtype)


def log_paths(tokens: Tensor, frames: Tensor) -> Tensor:
    """Log of the number of monotonic paths, log C(T-1, N-1), float64.

    Example:
        >>> log_paths(torch.tensor([3]), torch.tensor([4])).exp()
        tensor([3.0000], dtype=torch.float64)
    """
    n, t = tokens.double(), frames.double()
    return torch.lgamma(t) - torch.lgamma(n) - torch.lgamma(t - n + 1)


def log_mean_over_paths(scores: Tensor, text_mask: Tensor | None = None, frame_mask: Tensor | None = None) -> Tensor:
    """The log of the mean, over all monotonic paths, of the exponential of their scores: a uniform prior of alignments.

    Shapes and errors: those of `forward_sum`; the result is float64.

    Example:
        >>> round(float(log_mean_over_paths(torch.full((1, 3, 4), 0.5))), 4)  # every path has four frames
        2.0
    """
    tokens, frames = lengths(scores.detach(), text_mask, frame_mask)
    return _ForwardSum.apply(scores, tokens, frames) - log_paths(tokens, frames)


class _ForwardSum(torch.autograd.Function):
    """The forward recursion; in the backward pass the backward recursion, and the posterior from both."""

    @staticmethod
    def forward(ctx, scores, tokens, frames):
        batch, size, length = scores.shape
        valid = _within(tokens, size)[:, :, None] & _within(frames, length)[:, None, :]
        # In float64: the posterior is a difference of sums over all frames, which float32 rounds by 0.01 nats at 1e5.
        hidden = torch.where(valid, scores.double(), -torch.inf).permute(2, 0, 1)  # (T, B, N)
        ctx.dtype = scores.dtype
        forward = hidden.new_full((length, batch, size + 1), -torch.inf)
        forward[0, :, 1] = hidden[0, :, 0]
        for j in range(1, length):
            forward[j, :, 1:] = torch.logaddexp(forward[j - 1, :, :-1], forward[j - 1, :, 1:]) + hidden[j]
        total = forward[frames - 1, torch.arange(batch, device=scores.device), tokens]
        ctx.save_for_backward(hidden, forward, total, tokens, frames)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, forward, total, tokens, frames = ctx.saved_tensors
        length, batch, size = hidden.shape
        end = torch.where(torch.arange(size, device=hidden.device) == tokens[:, None] - 1, 0.0, -torch.inf)
        end = end.double()
        rest = hidden.new_full((batch, size + 1), -torch.inf)  # of the paths from (i, j) on, without (i, j) itself
        posterior = torch.zeros_like(hidden)
        for j in reversed(range(length)):
            onward = torch.logaddexp(rest[:, :-1], rest[:, 1:])
            onward = torch.where((frames == j + 1)[:, None], end, onward)
            posterior[j] = torch.exp(forward[j, :, 1:] + onward - total[:, None])
            rest[:, :-1] = onward + hidden[j]
        return (posterior * grad[:, None]).permute(1, 2, 0).to(ctx.dtype), None, None


@cache
def compiled() -> Callable:
    """The function search(scores, tokens, frames, visited), compiled at its first call and kept on disk.

    It fills `visited (B, T)` with the token of each frame on the best path through `scores (B, T, N)`; frames beyond
    an item's last one keep its last token.
    """
    import numba

    prange = numba.prange

    def search(scores, tokens, frames, visited):
        for item in prange(scores.shape[0]):
            n, t = tokens[item], frames[item]
            best = np.empty((t, n + 1), dtype=scores.dtype)  # the first cell of each row is unreachable
            best[:, 0] = -np.inf
            best[0, 1:] = -np.inf
            best[0, 1] = scores[item, 0, 0]
            for j in range(1, t):
                before, here, at = best[j - 1], best[j], scores[item, j]
                for i in range(n):
                    stay, move = before[i + 1], before[i]
                    here[i + 1] = (move if move > stay else stay) + at[i]
            i = n - 1
            for j in range(scores.shape[1] - 1, -1, -1):
                visited[item, j] = i
                if 0 < j < t and best[j - 1, i] > best[j - 1, i + 1]:
                    i -= 1

    return numba.njit(parallel=True, cache=True, nogil=True)(search)


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
    """Total frames (B,) of real durations (B, N): their sum rounded, at least one frame per token.

    Example:
        >>> total_frames(torch.tensor([[1.4, 2.3, 0.4, 3.2], [0.1, 0.1, 0.1, 0.1]]))
        tensor([7, 4])
    """
    widths, count = _valid(widths, mask)
    return torch.maximum(count, torch.floor(widths.sum(1) + 0.5).long())


def integer_durations(widths: Tensor, total: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Integer durations from real ones, with an exact total and at least one frame per token.

        c_k = w_1 + .. + w_k,    e_k = floor(T c_k / c_N + 1/2) clipped to [e_{k-1} + 1, T - (N - k)]
        d_k = e_k - e_{k-1}

    Rounding the ends instead of the durations keeps every end within half a frame of its position, unless clipped.

    Arguments:
        widths: w, non-negative; where all are 0, frames are spread evenly.
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
                         f"it needs at least {int(count[item])} frames")
    nothing = widths.sum(1, keepdim=True) == 0
    present = torch.arange(widths.shape[1], device=widths.device) < count[:, None]
    widths = torch.where(nothing & present, 1.0, widths)
    largest = widths.amax(1, keepdim=True)
    # So that no sum overflows; by a power of two, which changes no digit.
    ends = (widths / (largest / (2 * largest.frexp().mantissa))).cumsum(1)
    ends = torch.floor(total[:, None] * ends / ends[:, -1:] + 0.5).long()
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
