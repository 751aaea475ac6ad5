"""What the mechanisms beside the core have in common: their sizes, their bill, and the call of a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.attention.backend import Path
from genmodels.nn.attention.inputs import Inputs, admit, merge_heads, split_heads
from genmodels.nn.attention.position import head_width
from genmodels.nn.dropout import checked


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
        """The path that such a call takes, why, and the bytes it needs beside projections and the result.

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
