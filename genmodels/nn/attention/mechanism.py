"""Common parts of attention mechanisms: checked inputs, heads, and the base class of those other than the core."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.random import checked
from genmodels.nn.attention.backend import Path, check_full, check_padding, hide_rows
from genmodels.nn.attention.position import head_width


class Inputs(NamedTuple):
    """Checked inputs, zero at invalid positions.

    x `(B, Lq, D)`; source `(B, Lk, D)`, the memory or x itself; queries `(B, 1, Lq)` and keys `(B, 1, Lk)`, which of
    them are valid, None = all; full `(B or 1, H or 1, Lq or 1, Lk or 1)`, who may attend to whom, None = everyone.
    """

    x: Tensor
    source: Tensor
    queries: Tensor | None
    keys: Tensor | None
    full: Tensor | None

    @property
    def allowed(self) -> Tensor | None:
        """Which keys a query may attend to, in a shape that broadcasts to `(B, H, Lq, Lk)`."""
        return self.full if self.keys is None else self.keys[:, :, None, :]

    @property
    def empty(self) -> bool:
        """Whether there are no pairs of positions."""
        return not (self.x.shape[1] and self.source.shape[1])

    def unseen(self, values: Tensor) -> Tensor:
        """Projected keys or values `(B, H, Lk, d)` with zeros where a full mask lets no query attend."""
        if self.full is None:
            return values
        seen = self.full.any((1, 2)).expand(len(values), values.shape[2])
        return values.masked_fill(~seen[:, None, :, None], 0)

    def finish(self, y: Tensor) -> Tensor:
        """The output in the dtype of x, and zero where a query is invalid."""
        return hide_rows(y.to(self.x.dtype), self.queries)


def check_tensors(dim: int, x: Tensor, memory: Tensor | None, memory_mask: Tensor | None) -> None:
    """Raise ValueError unless x and memory are `(B, L, dim)` of one batch, and the mask of a memory has one."""
    for tensor, what in ((x, "x"), (memory, "memory")):
        if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != dim):
            raise ValueError(f"{what} must be (B, L, {dim}), got {tuple(tensor.shape)}")
    if memory is not None and len(memory) != len(x):
        raise ValueError(f"memory {tuple(memory.shape)} and x {tuple(x.shape)} are of different batches")
    if memory is None and memory_mask is not None:
        raise ValueError("memory_mask without memory: the mask of x is mask")


def masked_inputs(
    x: Tensor, memory: Tensor | None, mask: Tensor | None, memory_mask: Tensor | None, heads: int, *, full: bool = True
) -> Inputs:
    """Check the masks of a call and set invalid positions to zero.

    Arguments:
        full: whether masks of (query, key) pairs are allowed.
    Errors: ValueError for masks that are not boolean or do not fit.
    """
    source, key_mask, key_name = (x, mask, "mask") if memory is None else (memory, memory_mask, "memory_mask")
    batch, queries, keys, pairs = len(x), None, None, None
    if memory is not None and mask is not None:
        check_padding(mask, batch, x.shape[1])
        queries = mask.expand(batch, -1, -1)
    if key_mask is not None and (key_mask.dim() == 3 or not full):
        check_padding(key_mask, batch, source.shape[1], key_name)
        keys = key_mask.expand(batch, -1, -1)
        queries = keys if memory is None else queries
    elif key_mask is not None:
        check_full(key_mask, (batch, heads, x.shape[1], source.shape[1]), key_name)
        pairs = key_mask if key_mask.dim() == 4 else key_mask[None, None]
        if memory is not None:  # in self-attention every position is a query too
            seen = pairs.any((1, 2)).expand(batch, source.shape[1])
            source = source.masked_fill(~seen[..., None], 0)
    x = hide_rows(x, queries)
    return Inputs(x, x if memory is None else hide_rows(source, keys), queries, keys, pairs)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(B, L, H d)` to `(B, H, L, d)`."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(1, 2)


def merge_heads(y: Tensor) -> Tensor:
    """`(B, H, L, d)` to `(B, L, H d)`."""
    return y.transpose(1, 2).flatten(2)


class Mechanism(nn.Module):
    """A mechanism of attention other than the core.

    A subclass sets `project_out` and defines `_output`, `_all_weights` and `_cost`.

    Attributes:
        cross: whether it can attend to a memory.
        full: whether it takes masks of (query, key) pairs.
        state: type of the state from one call along a memory to the next, None without one.

    Arguments:
        dim: width D of x, y and the memory.
        heads: number of heads; divides D.
        dropout: probability of dropping a weight, in training.

    Errors: ValueError for heads that do not divide, a probability outside of [0, 1).
    """

    cross: bool = False
    full: bool = False
    state: type | None = None

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_width(dim, heads)
        self.dropout = checked(dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, memory_mask: Tensor | None = None,
        cache: tuple | None = None, offset: int = 0,
    ) -> tuple[Tensor, tuple | None]:
        """The output, and the state after it (None unless a cache was given).

        Arguments:
            cache: the state after earlier queries of the same memory; `start` creates the first one.
            offset: index of the first query; unused.
        """
        given = self._admit(x, memory, mask, memory_mask, cache, full=self.full)
        y, state = self._output(given, cache)
        return given.finish(self.project_out(y)), None if cache is None else state

    def weights(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, memory_mask: Tensor | None = None,
        cache: tuple | None = None, offset: int = 0,
    ) -> Tensor:
        """The weights `(B, H, Lq, Lk)` of the same call, without dropout."""
        return self._all_weights(self._admit(x, memory, mask, memory_mask, cache, full=self.full), cache)

    def explain(
        self, Lq: int, Lk: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *,
        batch: int = 1, masked: bool = False,
    ) -> Path:
        """The path of such a call, the reason, and its memory in bytes beyond projections and result.

        Arguments: see `Attention.explain`.
        """
        reason, numbers = self._cost(Lq, Lk)
        return Path("explicit", reason, batch * numbers * max(dtype.itemsize, 4))

    def _admit(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None, memory_mask: Tensor | None,
        cache: tuple | None = None, *, full: bool = False,
    ) -> Inputs:  # fmt: skip
        """Check a call and set invalid positions to zero; ValueError for what the mechanism cannot do."""
        name = type(self).__name__
        check_tensors(self.dim, x, memory, memory_mask)
        if memory is not None and not self.cross:
            raise ValueError(f"{name} is self-attention: it has no queries and keys that could come from two sequences")
        if cache is not None and self.state is None:
            raise ValueError(f"{name} has no step by step form: leave the cache out")
        if cache is not None and not isinstance(cache, self.state):
            raise ValueError(f"the cache of {name} is a {self.state.__name__}, got {type(cache).__name__}")
        if cache is not None and memory is None:
            raise ValueError(f"the cache of {name} goes on along a memory: pass the memory too")
        return masked_inputs(x, memory, mask, memory_mask, self.heads, full=full)

    def _output(self, given: Inputs, state: tuple | None) -> tuple[Tensor, tuple | None]:
        """The heads' outputs `(B, Lq, D)` before the output projection, and the state after them."""
        raise NotImplementedError

    def _all_weights(self, given: Inputs, state: tuple | None) -> Tensor:
        """The weights `(B, H, Lq, Lk)`, without dropout."""
        raise NotImplementedError

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        """A description of the computation for one example, and the number of values that it holds at once."""
        raise NotImplementedError


class AtOnce(Mechanism):
    """A mechanism for whole sequences, without a state.

        y = W_O concat(heads),    heads = mix(x, V)

    A subclass sets `project_v` and `project_out` and defines `_mix`, which is linear in the values; the weights are its
    result for unit vectors as values.

    Example:
        >>> class Mean(AtOnce):
        ...     def __init__(self, dim, heads):
        ...         super().__init__(dim, heads)
        ...         self.project_v, self.project_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        ...     def _mix(self, given, values, drop):
        ...         return values.mean(2, keepdim=True).expand(-1, -1, given.x.shape[1], -1)
        >>> Mean(4, 2).weights(torch.randn(1, 3, 4))[0, 0, 0]
        tensor([0.3333, 0.3333, 0.3333])
    """

    def _output(self, given: Inputs, state: None) -> tuple[Tensor, None]:
        values = split_heads(self.project_v(given.source), self.heads)
        y = self._mix(given, values, self.dropout if self.training else 0.0)
        return merge_heads(y.to(values.dtype)), None

    def _all_weights(self, given: Inputs, state: None) -> Tensor:
        unit = torch.eye(given.source.shape[1], dtype=given.x.dtype, device=given.x.device)
        a = self._mix(given, unit.expand(len(given.x), self.heads, -1, -1), 0.0)
        return a if given.queries is None else a.masked_fill(~given.queries[..., None], 0)

    def _mix(self, given: Inputs, values: Tensor, drop: float) -> Tensor:
        """The heads' outputs `(B, H, Lq, n)` for values `(B, H, Lk, n)`, in float32 or wider."""
        raise NotImplementedError
