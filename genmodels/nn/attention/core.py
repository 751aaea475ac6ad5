"""The attention core: one softmax, with position, mask and backend plugged in."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from genmodels.core.random import checked
from genmodels.core.tensors import wide
from genmodels.nn.attention import backend as paths
from genmodels.nn.attention.backend import Reach, hide_rows
from genmodels.nn.attention.mechanism import check_tensors, masked_inputs, merge_heads, split_heads
from genmodels.nn.attention.position import Position, Space, head_width


class Cache(NamedTuple):
    """The past keys and values of an attention, never changed in place.

    k, v `(B, H, N, d)`, as the backend needs them (rotated where positions rotate); mask `(B, 1, N)` or None; start,
    the absolute index of the first of them.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None
    start: int

    @property
    def end(self) -> int:
        """The absolute index of the next position."""
        return self.start + self.k.shape[2]


class StaticCache:
    """A preallocated cache of the keys and values of `length` positions of a sequence.

    It is allocated at the first call and written in place at `filled`, which the caller advances; with gradients
    enabled the past is copied instead.

    Arguments:
        length: number of positions.
    """

    def __init__(self, length: int):
        self.length, self.filled = length, 0
        self.kept: tuple[Tensor, Tensor] | None = None

    def put(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values up to and with these new ones, `(B, H, filled + m, d)`."""
        end = self.filled + k.shape[2]
        if end > self.length:
            raise ValueError(f"a cache of {self.length} positions cannot hold {end}")
        if torch.is_grad_enabled():
            past = (k[:, :, :0], v[:, :, :0]) if self.kept is None else self.kept
            self.kept = tuple(torch.cat([old[:, :, : self.filled], new], dim=2)
                              for old, new in zip(past, (k, v), strict=True))  # fmt: skip
            return self.kept
        past = self.kept
        if past is None or past[0].shape[2] < self.length:  # after a call with gradients it is as long as the past
            self.kept = tuple(new.new_empty(*new.shape[:2], self.length, new.shape[3]) for new in (k, v))
            for kept, old in zip(self.kept, past or (), strict=False):
                kept[:, :, : self.filled] = old[:, :, : self.filled]
        for kept, new in zip(self.kept, (k, v), strict=True):
            kept[:, :, self.filled : end] = new
        return tuple(kept[:, :, :end] for kept in self.kept)


class Call(NamedTuple):
    """The projected and rotated inputs of a call, joined with the past, and its masks."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None
    full: Tensor | None
    q0: int
    k0: int
    space: Space | None

    @property
    def empty(self) -> bool:
        """Whether there are no pairs of positions."""
        return not (self.q.shape[2] and self.k.shape[2])

    def part(self, queries: slice, keys: slice) -> Call:
        """Some queries and some keys of this call."""
        padding = None if self.padding is None else self.padding[..., keys]
        full = self.full
        if full is not None:
            rows = queries if full.shape[-2] > 1 else slice(None)
            full = full[..., rows, keys if full.shape[-1] > 1 else slice(None)]
        q, k, v = self.q[:, :, queries], self.k[:, :, keys], self.v[:, :, keys]
        return Call(q, k, v, padding, full, self.q0 + queries.start, self.k0 + keys.start, self.space)


def check_call(
    dim: int, position: Position, reach: Reach, x: Tensor, memory: Tensor | None, mask: Tensor | None,
    memory_mask: Tensor | None, cache: Cache | None, offset: int,
) -> None:
    """Raise ValueError for an invalid call, or one whose result with a cache would differ from the whole sequence's."""
    name = type(position).__name__
    check_tensors(dim, x, memory, memory_mask)
    if memory is not None and type(position) is not Position and not position.cross:
        shared = ", or build it with cross=True if both share one index" if position.dims == 1 else ""
        raise ValueError(f"{name} has no distances between x and a memory: attend to it without a position{shared}")
    if position.dims == 2 and offset:
        raise ValueError(f"{name} is for whole maps: leave offset = {offset} out")
    if cache is None:
        return
    if memory is not None or position.dims == 2:
        raise ValueError("a cache is for self-attention along a sequence, not for " +
                         ("a memory" if memory is not None else f"maps ({name})"))  # fmt: skip
    if offset:
        raise ValueError(f"the cache says where x begins: leave offset = {offset} out")
    if mask is not None and mask.dim() != 3:
        raise ValueError(f"with a cache the mask says which new keys are valid, (B, 1, L), got {tuple(mask.shape)}")
    if cache.k.shape[0] != len(x):
        raise ValueError(f"the cache is of a batch of {cache.k.shape[0]}, x of {len(x)}")
    if reach.no_future:
        return
    if reach.chunk is None:
        raise ValueError("a cache holds the past: use causal, window = (left, 0), or chunk")
    if cache.end % reach.chunk[0]:
        raise ValueError(f"the cache ends at {cache.end}, within a chunk of {reach.chunk[0]} whose frames see "
                         "each other: pass whole chunks (the last may be shorter)")  # fmt: skip


def joined(cache: Cache, padding: Tensor | None, new: int) -> Tensor | None:
    """The padding masks of past and present together; all True where there is none."""
    if cache.mask is None and padding is None:
        return None
    batch, past = cache.k.shape[0], cache.k.shape[2]
    device = cache.k.device
    before = torch.ones(batch, 1, past, dtype=torch.bool, device=device) if cache.mask is None else cache.mask
    now = torch.ones(batch, 1, new, dtype=torch.bool, device=device) if padding is None else padding
    return torch.cat([before, now], dim=-1)


SMALLEST_BLOCK = 128


class Attention(nn.Module):
    """Multi-head attention with relative positions, masks, a cache, and the fastest path that gives the same numbers.

        a = softmax_j(s(i, j) + M(i, j)),    y_i = W_O [sum_j a_ij v_j + value_bias_i]
        s(i, j) = ((q_i + u) . k_j) / sqrt(d) + b(i, j)

    q is a projection of x; k and v of `memory`, else of x. `position` defines u, b and the value bias, or rotates q and
    k; M is the intersection of reach and masks. A query without keys gives exactly 0 before W_O. With a reach that is
    bounded on both sides, blocks of queries make time and memory linear in the length.

    Arguments:
        dim: width D of x and y.
        heads: number of heads; divides D.
        position: position scheme, built for the same dim and heads; None attends to content alone.
        window: number of keys before and after each query, None = unbounded.
        chunk: size of a chunk and number of earlier chunks that a query attends to, None = all.
        causal: whether the future is hidden.
        dropout: probability of dropping a weight, in training.
        backend: `auto` takes the fused path where there is one; `flex` is for CUDA.
        derivatives: 2 where the output is differentiated twice, or in forward mode; takes the explicit path.
        bias: whether the four projections have biases.

    Shapes: `x (B, Lq, D)`, `memory (B, Lk, D)`, `mask (B, 1, Lq)` bool, True = valid, or for self-attention a full one
    that broadcasts to `(B, H, Lq, Lk)` (2 or 4 dimensions); `memory_mask` likewise for memory. y is `(B, Lq, D)` in the
    dtype of x, and zero at positions that padding declares invalid.
    Errors: ValueError for sizes that do not divide, masks that are not boolean or do not broadcast, a position in
    cross-attention that has not declared `cross`, a cache with memory, with a map, or with a future.

    Example:
        >>> from genmodels.nn.attention.position import Rotary
        >>> attention = Attention(8, 2, Rotary(8, 2), causal=True)
        >>> y, _ = attention(torch.randn(3, 5, 8))
        >>> y.shape, attention.explain(5, 5).kind
        (torch.Size([3, 5, 8]), 'sdpa')
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Position | None = None,
        *,
        window: tuple[int | None, int | None] | None = None,
        chunk: tuple[int, int | None] | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        backend: Literal["auto", "sdpa", "explicit", "flex"] = "auto",
        derivatives: Literal[1, 2] = 1,
        bias: bool = True,
    ):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_width(dim, heads)
        self.position = Position(dim, heads) if position is None else position
        if (self.position.dim, self.position.heads) != (dim, heads):
            sizes = (self.position.dim, self.position.heads)
            raise ValueError(f"{type(position).__name__} has (dim, heads) = {sizes}, the attention {(dim, heads)}")
        checked(dropout)
        self.reach = Reach(causal or self.position.past_only, window, chunk)
        if self.position.dims == 2 and not self.reach.everywhere:
            raise ValueError(f"{type(position).__name__} is for maps: window, chunk and causal are for sequences")
        paths.check_backend(backend, derivatives, dropout, self.position)
        self.dropout, self.backend, self.derivatives = dropout, backend, derivatives
        self.project_q = nn.Linear(dim, dim, bias=bias)
        self.project_k = nn.Linear(dim, dim, bias=bias)
        self.project_v = nn.Linear(dim, dim, bias=bias)
        self.project_out = nn.Linear(dim, dim, bias=bias)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, memory_mask: Tensor | None = None,
        cache: Cache | None = None, offset: int = 0, space: Space | None = None,
    ) -> tuple[Tensor, Cache | None]:
        """The output, and the cache for the next call (None unless one was given).

        Arguments:
            cache: the past; `empty_cache` creates the first one.
            offset: absolute index of the first query (and of the first key, without memory) when there is no cache.
            space: height and width of the map that the rows of x are, for positions of maps.
        """
        call = self._prepare(x, memory, mask, memory_mask, cache, offset, space)
        kind, _ = paths.choose(self.backend, self.derivatives, self.position, x.device.type)
        dropping = self.training and self.dropout > 0
        # Dropout in kernels and blocks would depend on the number of processes and on the padding.
        kind = "explicit" if dropping else kind
        Lq, Lk = call.q.shape[2], call.k.shape[2]
        blocks = None if kind == "flex" or dropping else self._blocks(Lq, Lk, call.q0, call.k0)
        if blocks is None:
            y = self._attend(call, kind)
        else:
            y = torch.cat([self._attend(call.part(*block), kind) for block in blocks], dim=2)
        y = self.project_out(merge_heads(y.to(call.q.dtype))).to(x.dtype)
        if mask is not None and mask.dim() == 3:
            y = hide_rows(y, mask)
        return y, None if cache is None else self._remember(call)

    def weights(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, memory_mask: Tensor | None = None,
        cache: Cache | None = None, offset: int = 0, space: Space | None = None,
    ) -> Tensor:
        """The weights `(B, H, Lq, Lk)` of the same call, by the explicit path and without dropout."""
        return self._weights(self._prepare(x, memory, mask, memory_mask, cache, offset, space))

    def decode(self, x: Tensor, cache: StaticCache, mask: Tensor | None = None) -> Tensor:
        """The output for new positions of a causal sequence, which are added to the past in the cache.

        Shapes: `x (B, m, D)` to the same; `mask (B, 1, filled + m)` bool, True = valid, of past and present.
        """
        start = cache.filled
        x = x if mask is None else hide_rows(x, mask[..., start:])
        layers = self.project_q, self.project_k, self.project_v
        q, k, v = (split_heads(layer(x), self.heads) for layer in layers)
        q, k = self.position.rotate(q, k, start, start)
        k, v = cache.put(k, v)
        kind, _ = paths.choose(self.backend, self.derivatives, self.position, x.device.type)
        y = self._attend(Call(q, k, v, mask, None, start, 0, None), kind)
        y = self.project_out(merge_heads(y.to(q.dtype))).to(x.dtype)
        return y if mask is None else hide_rows(y, mask[..., start:])

    def empty_cache(self, x: Tensor) -> Cache:
        """A cache without a past, for a batch like x."""
        nothing = x.new_empty(len(x), self.heads, 0, self.head_dim)
        return Cache(nothing, nothing, None, 0)

    def explain(
        self, Lq: int, Lk: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *,
        batch: int = 1, masked: bool = False,
    ) -> paths.Path:
        """The path of such a call, the reason, and its memory in bytes beyond q, k, v and the result.

        Arguments:
            Lq, Lk: numbers of queries and keys.
            device, dtype: device and precision.
            batch: number of examples.
            masked: whether there is a mask.
        """
        kind, reason = paths.choose(self.backend, self.derivatives, self.position, torch.device(device).type)
        dropping = self.training and self.dropout > 0
        if dropping and kind != "explicit":
            kind, reason = "explicit", f"{kind} in evaluation: dropout in training takes the weights themselves"
        blocks, rotated = None if kind == "flex" or dropping else self._blocks(Lq, Lk, 0, 0), Lq + Lk
        if blocks is not None:
            reason = f"{reason}; in {len(blocks)} blocks of queries, since the reach is bounded"
            Lq = max(queries.stop - queries.start for queries, _ in blocks)
            Lk = max(keys.stop - keys.start for _, keys in blocks)
        return paths.count(kind, reason, self.position, self.reach, batch, Lq, Lk, dtype.itemsize, masked, rotated)

    def _prepare(self, x, memory, mask, memory_mask, cache, offset, space) -> Call:
        """Check and project the inputs of a call, rotate them and join them with the past."""
        check_call(self.dim, self.position, self.reach, x, memory, mask, memory_mask, cache, offset)
        given, Lq = masked_inputs(x, memory, mask, memory_mask, self.heads), x.shape[1]
        q, k, v = (split_heads(part, self.heads) for part in self._projected(given.x, given.source))
        k, v, padding = given.unseen(k), given.unseen(v), given.keys
        q0 = offset if cache is None else cache.end
        k0 = q0 if memory is None else 0
        if self.position.dims == 2 and space is None:
            space = self.position.space_of(Lq)
        if space is not None and space[0] * space[1] != Lq:
            raise ValueError(f"space = {tuple(space)} does not hold the {Lq} positions of x")
        q, k = self.position.rotate(q, k, q0, k0, space)
        if cache is not None:
            k0 = cache.start
            padding = joined(cache, padding, Lq)
            if cache.k.shape[2]:
                k, v = torch.cat([cache.k, k], dim=2), torch.cat([cache.v, v], dim=2)
        return Call(q, k, v, padding, given.full, q0, k0, space)

    def _projected(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the source, each (B, L, D)."""
        layers = self.project_q, self.project_k, self.project_v
        if source is not x:
            return tuple(layer(given) for layer, given in zip(layers, (x, source, source), strict=True))
        # One product of three times the width is faster than three, above all backward.
        bias = None if self.project_q.bias is None else torch.cat([layer.bias for layer in layers])
        return linear(x, torch.cat([layer.weight for layer in layers]), bias).chunk(3, dim=-1)

    def _attend(self, call: Call, kind: str) -> Tensor:
        """The heads' outputs `(B, H, Lq, d)` of (a part of) a call."""
        if call.empty:
            return torch.zeros_like(call.q)
        drop = self.dropout if self.training else 0.0
        if kind == "explicit":
            y, a = paths.attend_explicitly(self._weights(call), call.v, drop)
            added = self.position.value_bias(a, call.q0, call.k0, call.space)
            return y if added is None else y + added
        q, bias = self._biased(call) if kind == "sdpa" else (call.q, None)
        if kind == "flex":
            allowed = self._masks(call)
            return paths.attend_flex(q, call.k, call.v, self.position, self.reach, allowed, call.q0, call.k0)
        square = call.q0 == call.k0 and call.q.shape[2] == call.k.shape[2]
        causal = square and bias is None and self.reach.causal_alone and call.padding is None and call.full is None
        allowed = None if causal else self._allowed(call)
        return paths.attend_fused(q, call.k, call.v, bias, allowed, causal)

    def _weights(self, call: Call) -> Tensor:
        if call.empty:
            return wide(call.q @ call.k.mT)
        q, bias = self._biased(call)
        return paths.explicit_weights(q, call.k, bias, self._allowed(call))

    def _biased(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """q + u, and b."""
        Lq, Lk = call.q.shape[2], call.k.shape[2]
        bias = self.position.score_bias(call.q, call.q0, call.k0, Lq, Lk, call.space)
        u = self.position.query_bias()
        return (call.q if u is None else call.q + u[:, None].to(call.q.dtype)), bias

    def _masks(self, call: Call) -> Tensor | None:
        """Padding or full mask of a call, as `(B or 1, H or 1, Lq or 1, Lk)`."""
        return call.full if call.padding is None else call.padding[:, :, None, :]

    def _allowed(self, call: Call) -> Tensor | None:
        """The mask of a call, `(B or 1, H or 1, Lq or 1, Lk)`, None where all pairs are allowed."""
        masks = self._masks(call)
        if self.reach.everywhere:
            return masks
        i = torch.arange(call.q.shape[2], device=call.q.device)[:, None] + call.q0
        j = torch.arange(call.k.shape[2], device=call.q.device) + call.k0
        within = self.reach.allowed(i, j)[None, None]
        return within if masks is None else within & masks

    def _blocks(self, Lq: int, Lk: int, q0: int, k0: int) -> list[tuple[slice, slice]] | None:
        """Blocks of queries with the keys in their reach, where that is less work than all at once."""
        first, last = self.reach.first(q0), self.reach.last(q0)
        if first is None or last is None:
            return None
        size = max(SMALLEST_BLOCK, last - first + 1)
        if Lq <= 2 * size:
            return None
        blocks = []
        for start in range(0, Lq, size):
            stop = min(start + size, Lq)
            low = min(max(self.reach.first(q0 + start) - k0, 0), Lk - 1)
            high = min(max(self.reach.last(q0 + stop - 1) - k0 + 1, low + 1), Lk)
            blocks.append((slice(start, stop), slice(low, high)))
        return blocks

    def _remember(self, call: Call) -> Cache:
        """The cache after a call, without keys out of the reach of later queries."""
        end = call.k0 + call.k.shape[2]
        first = self.reach.first(end)
        cut = 0 if first is None else min(max(first - call.k0, 0), call.k.shape[2])
        padding = None if call.padding is None else call.padding[..., cut:]
        return Cache(call.k[:, :, cut:], call.v[:, :, cut:], padding, call.k0 + cut)
