"""Common parts of the mechanisms other than the core: checked inputs, sizes, cost, the call of a whole sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.random import checked
from genmodels.nn.attention.backend import Path, check_full, check_padding, hide_rows
from genmodels.nn.attention.core import check_tensors
from genmodels.nn.attention.position import head_width


class Inputs(NamedTuple):
    """Checked inputs, with zeros where padding says that nothing is valid.

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
        """Whether there is no pair of positions at all."""
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


def admit(
    module,
    x: Tensor,
    memory: Tensor | None,
    mask: Tensor | None,
    memory_mask: Tensor | None,
    cache: object | None = None,
    *,
    cross: bool = True,
    full: bool = False,
    carries: type | None = None,
) -> Inputs:
    """Check a call of `module`, which has a `dim` and `heads`, and hide what is invalid in it.

    Arguments:
        cross: whether the module can attend to a memory.
        full: whether it takes masks of (query, key) pairs.
        carries: the type of what it hands from one call along a memory to the next, None when there is no such thing.
    Errors: ValueError for what the module cannot do, and for sizes and masks that do not fit.
    """
    name = type(module).__name__
    check_tensors(module.dim, x, memory, memory_mask)
    if memory is not None and not cross:
        raise ValueError(f"{name} is self-attention: it has no queries and keys that could come from two sequences")
    if cache is not None and carries is None:
        raise ValueError(f"{name} has no step by step form: leave the cache out")
    if cache is not None and not isinstance(cache, carries):
        raise ValueError(f"the cache of {name} is a {carries.__name__}, got {type(cache).__name__}")
    if cache is not None and memory is None:
        raise ValueError(f"the cache of {name} goes on along a memory: pass the memory too")
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
        check_full(key_mask, (batch, module.heads, x.shape[1], source.shape[1]), key_name)
        pairs = key_mask if key_mask.dim() == 4 else key_mask[None, None]
        if memory is not None:  # of x itself, a position that nobody attends to is a query all the same
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
    """Sizes of a mechanism, and what a call of it costs.

    A subclass defines `_cost`.

    Arguments:
        dim: width D of x and y.
        heads: number of heads; divides D.
        dropout: probability of dropping a weight, in training.

    Errors: ValueError for heads that do not divide, a probability outside of [0, 1).
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_width(dim, heads)
        checked(dropout)
        self.dropout = dropout

    def explain(
        self,
        Lq: int,
        Lk: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        batch: int = 1,
        masked: bool = False,
    ) -> Path:
        """The path that such a call takes, why, and the bytes it needs in addition to projections and the result.

        Arguments:
            Lq, Lk: numbers of queries and keys.
            device, dtype: where and in what precision it would run.
            batch: number of examples.
            masked: whether a mask comes with the call.
        """
        reason, numbers = self._cost(Lq, Lk)
        return Path("explicit", reason, batch * numbers * max(dtype.itemsize, 4))

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        """In words what is done with one example of such lengths, and how many numbers that needs at once."""
        raise NotImplementedError


class AtOnce(Mechanism):
    """A mechanism that takes a sequence as a whole: nothing is carried from one call to the next.

        y = W_O concat(heads),    heads = mix(x, V)

    A subclass sets `project_v` and `project_out`, whether it can attend to a memory (`cross`), and defines `_mix`,
    which is linear in the values: weights are what it makes of the unit vectors.

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

    cross: bool = False

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: None = None,
        offset: int = 0,
    ) -> tuple[Tensor, None]:
        """The output and None, since nothing is carried over; an offset changes nothing."""
        given = admit(self, x, memory, mask, memory_mask, cache, cross=self.cross)
        values = split_heads(self.project_v(given.source), self.heads)
        y = self._mix(given, values, self.dropout if self.training else 0.0)
        return given.finish(self.project_out(merge_heads(y.to(values.dtype)))), None

    def weights(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: None = None,
        offset: int = 0,
    ) -> Tensor:
        """The weights `(B, H, Lq, Lk)` of the same call, without dropout; rows of invalid queries are 0."""
        given = admit(self, x, memory, mask, memory_mask, cache, cross=self.cross)
        unit = torch.eye(given.source.shape[1], dtype=x.dtype, device=x.device)
        a = self._mix(given, unit.expand(len(x), self.heads, -1, -1), 0.0)
        return a if given.queries is None else a.masked_fill(~given.queries[..., None], 0)

    def _mix(self, given: Inputs, values: Tensor, drop: float) -> Tensor:
        """The heads' outputs `(B, H, Lq, n)` for values `(B, H, Lk, n)`, in float32 or wider."""
        raise NotImplementedError
