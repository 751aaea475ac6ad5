"""What goes into a call of the attention, and what is remembered between calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.nn.attention.mask import Reach
from genmodels.nn.attention.position import Position, Space


class Cache(NamedTuple):
    """What an attention remembers of the past, never changed in place.

    k, v `(B, H, N, d)`, as the backend needs them (rotated where positions rotate); mask `(B, 1, N)` or None; start,
    the absolute index of the first of them.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None
    start: int

    @property
    def end(self) -> int:
        """The absolute index of what comes next."""
        return self.start + self.k.shape[2]


class Call(NamedTuple):
    """A call made ready: projected, rotated, joined with the past, and whatever restricts it."""

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
        """Whether there is no pair of positions at all, which distances have no answer for."""
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


def check_tensors(dim: int, x: Tensor, memory: Tensor | None, memory_mask: Tensor | None) -> None:
    """Raise ValueError unless x and memory are `(B, L, dim)` of one batch, and the mask of a memory has one."""
    for tensor, what in ((x, "x"), (memory, "memory")):
        if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != dim):
            raise ValueError(f"{what} must be (B, L, {dim}), got {tuple(tensor.shape)}")
    if memory is not None and len(memory) != len(x):
        raise ValueError(f"memory {tuple(memory.shape)} and x {tuple(x.shape)} are of different batches")
    if memory is None and memory_mask is not None:
        raise ValueError("memory_mask without memory: the mask of x is mask")


def check_call(
    dim: int,
    position: Position,
    reach: Reach,
    x: Tensor,
    memory: Tensor | None,
    mask: Tensor | None,
    memory_mask: Tensor | None,
    cache: Cache | None,
    offset: int,
) -> None:
    """Raise ValueError for a call that has no meaning, or whose result a cache could not make equal to the whole."""
    name = type(position).__name__
    check_tensors(dim, x, memory, memory_mask)
    if memory is not None and type(position) is not Position and not position.cross:
        raise ValueError(f"{name} has not declared cross: distances to a memory need a clock that both share")
    if position.dims == 2 and offset:
        raise ValueError(f"{name} is for whole maps: offset = {offset} has no place there")
    if cache is None:
        return
    if memory is not None or position.dims == 2:
        raise ValueError("a cache is for self-attention along a sequence, not for " +
                         ("a memory" if memory is not None else f"maps ({name})"))  # fmt: skip
    if offset:
        raise ValueError(f"the cache knows where x begins: leave offset = {offset} out")
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
    """The padding of past and present together; what has none is valid."""
    if cache.mask is None and padding is None:
        return None
    batch, past = cache.k.shape[0], cache.k.shape[2]
    device = cache.k.device
    before = torch.ones(batch, 1, past, dtype=torch.bool, device=device) if cache.mask is None else cache.mask
    now = torch.ones(batch, 1, new, dtype=torch.bool, device=device) if padding is None else padding
    return torch.cat([before, now], dim=-1)
