"""Softmax attention: masks, implementations (fused SDPA, explicit, FlexAttention), and the choice between these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from genmodels.core.errors import one_of
from genmodels.core.random import dropout
from genmodels.core.tensors import wide
from genmodels.nn.attention.position import DistanceBias, Position, distances


@dataclass(frozen=True)
class Reach:
    """Which keys a query may attend to by index alone; all conditions given are intersected.

        causal: j <= i;   window (l, r): -l <= j - i <= r;   chunk (n, m): 0 <= i // n - j // n <= m

    Arguments:
        causal: whether later keys are masked.
        window: numbers of keys before and after the query, None = unbounded.
        chunk: size of a chunk, and number of earlier chunks that a query attends to, None = all.

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
        """Whether all keys are allowed."""
        return not self.causal and self.chunk is None and (self.window is None or tuple(self.window) == (None, None))

    @property
    def causal_alone(self) -> bool:
        """Whether exactly the later keys are masked."""
        return self.causal and self.chunk is None and (self.window is None or self.window[0] is None)

    @property
    def no_future(self) -> bool:
        """Whether no query attends to a later key."""
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
        """The first key of query i, None where the past is unbounded; does not decrease with i."""
        bounds = []
        if self.window is not None and self.window[0] is not None:
            bounds.append(i - self.window[0])
        if self.chunk is not None and self.chunk[1] is not None:
            bounds.append((i // self.chunk[0] - self.chunk[1]) * self.chunk[0])
        return max(bounds) if bounds else None  # torch 2.11 compiles no default=

    def last(self, i: int) -> int | None:
        """The last key of query i, None where the future is unbounded; does not decrease with i."""
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
) -> Tensor:
    """An attention mask `(B or 1, 1, Lq, Lk)` bool, True = may attend: the intersection of all conditions given.

    Arguments:
        Lq, Lk: numbers of queries and keys.
        q0, k0: absolute indices of the first query and of the first key.
        causal, window, chunk: see `Reach`.
        trigger: `(t (B, Lq), delay)`: a query attends to keys up to absolute index t + delay.
        padding: `(B, 1, Lk)` bool, True = valid key. The mask is on its device, or on that of t.

    Errors: ValueError for a negative window or delay, a size below 1, a padding that is not bool or does not fit.
    Source: chunks: Zhang et al. 2020 (U2), section 3.2; triggers: Moritz et al. 2019, section 2.

    Example:
        >>> build_mask(2, 4, q0=2, causal=True)[0, 0].int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    given = padding if trigger is None or padding is not None else trigger[0]
    device = None if given is None else given.device
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
    """Raise ValueError unless a mask is boolean, since conventions for 0 and 1 differ."""
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
    """`x (B, L, D)` with invalid positions set to zero, NaN too.

    To be used before projections, since a NaN times a zero gradient would make the gradients of their weights NaN.
    """
    return x if padding is None else x.masked_fill(~padding.transpose(1, 2), 0)


BACKENDS = ("auto", "sdpa", "explicit", "flex")


class Path(NamedTuple):
    """The implementation of a call, `sdpa`, `explicit` or `flex`, the reason, and its memory beyond q, k, v and y."""

    kind: str
    reason: str
    extra_bytes: int


def check_backend(backend: str, derivatives: int, dropout: float, position: Position) -> None:
    """Raise ValueError for a backend that cannot compute this attention."""
    one_of("backend", backend, BACKENDS)
    if derivatives not in (1, 2):
        raise ValueError(f"derivatives must be 1 or 2, got {derivatives}")
    if backend in ("sdpa", "flex") and derivatives == 2:
        raise ValueError(f"backend = {backend!r} has no second derivatives: use auto or explicit, or derivatives = 1")
    if backend in ("sdpa", "flex") and position.adds_values:
        raise ValueError(f"backend = {backend!r} never forms the weights that relative values need: use auto")
    if backend == "flex" and dropout:
        raise ValueError("FlexAttention has no dropout on weights: use backend = 'auto' or dropout = 0")
    if backend == "flex" and position.score != "none" and not isinstance(position, DistanceBias):
        raise ValueError(f"backend = 'flex' takes biases that depend on the distance alone, unlike "
                         f"{type(position).__name__}: use backend = 'auto'")


def choose(backend: str, derivatives: int, position: Position, device_type: str) -> tuple[str, str]:
    """The kind of path and the reason, which depend only on the configuration."""
    if backend == "flex":
        if device_type != "cuda":
            raise ValueError(f"FlexAttention has no backward on {device_type}: backend = 'flex' needs CUDA, use 'auto'")
        return "flex", "asked for"
    if backend != "auto":
        return backend, "asked for"
    if derivatives == 2:
        return "explicit", "fused kernels have no second derivatives and no forward mode"
    if position.adds_values:
        return "explicit", "relative values need the weights themselves"
    # Torch's fused kernel for the CPU has no derivative of the mask.
    learned = position.score == "content" or next(position.parameters(), None) is not None
    training = "; in training unfused, since its derivative is needed" if learned and device_type == "cpu" else ""
    if position.score == "content":
        return "sdpa", f"fused; the bias of content and distance goes in as a mask of floats{training}"
    if position.score == "shared":
        return "sdpa", f"fused; the bias goes in as a mask of floats that the batch shares{training}"
    return "sdpa", "fused; positions turn q and k beforehand" if position.rotates else "fused; nothing is added to q.k"


def count(
    kind: str, reason: str, position: Position, reach: Reach, batch: int, Lq: int, Lk: int, itemsize: int, masked: bool,
    rotated: int,
) -> Path:
    """The path with its memory beyond q, k, v and the result, of a block of Lq queries and Lk keys.

    `itemsize` is the number of bytes of a value; `rotated` the number of queries and keys in all blocks, all of which
    are rotated first.
    """
    rotation = batch * position.dim * rotated * itemsize if position.rotates else 0
    if kind == "flex":
        return Path(kind, reason, rotation + position.heads * (Lq + Lk) * 4)
    bias = position.score_elements(batch, Lq, Lk)
    if kind == "explicit":
        # The scores and the weights, in float32 at least.
        scores = 2 * max(itemsize, 4) * batch * position.heads * Lq * Lk
        return Path(kind, reason, rotation + bias * itemsize + scores)
    restricted = masked or not reach.everywhere
    if restricted and bias:
        rows = (batch if masked or position.score == "content" else 1) * position.heads
        return Path(kind, f"{reason}, joined with the mask", rotation + (bias + rows * Lq * Lk) * itemsize)
    if reach.causal_alone and not masked and Lq == Lk:
        return Path(kind, f"{reason}; causal within the kernel", rotation)
    if restricted:
        return Path(kind, f"{reason}; with a boolean mask", rotation + batch * Lq * Lk)
    return Path(kind, reason, rotation + bias * itemsize)


def masked_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the allowed keys, in float32 or wider; a query without allowed keys has weights exactly 0.

    The softmax of such a row is over all keys and then dropped, so that its gradient is zero and not NaN.

    Shapes: `scores (.., Lq, Lk)` finite, `allowed` bool of a shape that broadcasts, None = all.

    Example:
        >>> masked_softmax(torch.zeros(2, 2), torch.tensor([[True, False], [False, False]]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    scores = wide(scores)
    if allowed is None:
        return scores.softmax(-1)
    some = allowed.any(-1, keepdim=True)
    weights = torch.where(allowed | ~some, scores, -math.inf).softmax(-1)
    return torch.where(some, weights, 0.0)


def explicit_weights(q: Tensor, k: Tensor, bias: Tensor | None, allowed: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) over allowed keys, `(B, H, Lq, Lk)`, float32 or wider, also under autocast."""
    with torch.autocast(q.device.type, enabled=False):
        scores = wide(q) @ wide(k).mT / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + wide(bias)
        return masked_softmax(scores, allowed)


def attend_explicitly(weights: Tensor, v: Tensor, drop: float) -> tuple[Tensor, Tensor]:
    """The weighted sum of v, and the weights after dropout."""
    weights = dropout(weights, drop) if drop else weights
    with torch.autocast(v.device.type, enabled=False):
        return weights @ wide(v), weights


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Tensor | None, causal: bool = False
) -> Tensor:
    """Torch's scaled dot-product attention, with bias and mask as one mask; empty rows are exactly 0.

    Empty rows attend to all keys and are zeroed afterwards, since kernels differ on them.

    Arguments:
        causal: whether exactly the later keys are masked; kernels then need no mask.
    """
    if allowed is None:
        mask = None if bias is None else bias.to(q.dtype)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    some = allowed.any(-1, keepdim=True)
    opened = allowed | ~some
    mask = opened if bias is None else torch.where(opened, bias.to(q.dtype), -math.inf)
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return torch.where(some, y, 0.0)


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, position: Position, reach: Reach, allowed: Tensor | None, q0: int, k0: int,
    kernel=None,
) -> Tensor:
    """FlexAttention: the kernel looks up the bias by distance and computes the reach, in O(L) memory.

    Arguments:
        allowed: a mask in addition to the reach, `(B or 1, H or 1, Lq or 1, Lk)`.
        kernel: a replacement for the compiled `flex_attention`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads, Lq, _ = q.shape
    Lk = k.shape[-2]
    table = None
    if isinstance(position, DistanceBias):
        r = distances(Lq, Lk, q0, k0, device=q.device)
        table = position.table(r).to(torch.promote_types(q.dtype, torch.float32))
    full = None if allowed is None else allowed.expand(batch, -1, -1, Lk)

    def bias(score, b, h, i, j):
        return score + table[h, j - i + Lq - 1]

    def may_attend(b, h, i, j):
        within = reach.allowed(i + q0, j + k0)
        if full is None:
            return within
        own_head, own_row = (h if full.shape[1] > 1 else 0), (i if full.shape[2] > 1 else 0)
        return within & full[b, own_head, own_row, j]

    block_mask = None
    if full is not None or not reach.everywhere:
        many_heads = full is not None and full.shape[1] > 1
        block_mask = create_block_mask(
            may_attend, None if full is None else batch, heads if many_heads else None, Lq, Lk, device=q.device
        )
    kernel = compiled_flex() if kernel is None else kernel
    return kernel(q, k, v, score_mod=None if table is None else bias, block_mask=block_mask)


@cache
def compiled_flex():
    """Compiled FlexAttention; it is fused only when compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
