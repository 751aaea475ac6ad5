"""Dropout whose masks belong to the items of the global batch, so that the number of processes does not change them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.core.processes import rank_world
from genmodels.core.random import seed_of

_STEPS = tuple(seed_of("dropout", d) | 1 for d in range(8))  # odd numbers, one for each dimension
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of SplitMix64, as signed 64-bit integers
_PER_WORD = 4  # decisions that one 64-bit word gives, with 16 bits each


def checked(dropout: float) -> float:
    """A probability of dropping a value.

    Raises:
        ValueError: unless it lies in [0, 1).

    Example:
        >>> checked(float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: dropout must lie in [0, 1), got nan
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    return dropout


def dropout(x: Tensor, p: float) -> Tensor:
    """x with values dropped with probability p, to the next 2^-16, and the others divided by 1 - p.

        word = mix(key + row s_0 + i_1 s_1 + ... + i_n s_n)  mod 2^64,    four values along dimension 1 share a word

    The key is one draw of torch's generator. Whether a value is dropped depends on it, on the number of its row in the
    batch that all processes have together, and on its place in the row: not on the number of processes, nor on the
    length that a sequence is padded to. The processes have to seed their generators alike.

    Shapes: `x (B, *event)` of at most eight dimensions; the result is like x.
    Source: the mixing function of Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dropout(torch.ones(2, 6), 0.5)
        tensor([[2., 2., 0., 0., 0., 0.],
                [0., 2., 2., 2., 2., 2.]])
    """
    limit = min(round(checked(p) * 2**16), 2**16 - 1)
    if limit == 0 or x.numel() == 0:
        return x
    keep = _words(torch.randint(2**62, (), device=x.device), list(x.shape), *rank_world()) >= limit - 2**15
    return torch.where(keep, x * (2**16 / (2**16 - limit)), 0.0)


# One operation to torch.compile: in the code it would make, products of loop counters wrap, which C++ leaves undefined.
@torch.library.custom_op("genmodels::dropout_words", mutates_args=(),
                         schema="(Tensor key, SymInt[] shape, int rank, int world) -> Tensor")
def _words(key: Tensor, shape: list[int], rank: int, world: int) -> Tensor:
    """A number of -2^15 .. 2^15 - 1 for each value, int16."""
    rows = [*shape, 1] if len(shape) == 1 else shape
    sizes = [rows[0], -(-rows[1] // _PER_WORD), *rows[2:]]
    word = key
    for d, size in enumerate(sizes):
        place = torch.arange(size, device=key.device)
        place = place * world + rank if d == 0 else place
        word = word + (place * _STEPS[d]).view(-1, *[1] * (len(sizes) - 1 - d))
    word = (word ^ _shifted(word, 30)) * _MIX[0]
    word = (word ^ _shifted(word, 27)) * _MIX[1]
    word = word ^ _shifted(word, 31)
    found = word[..., None].view(torch.int16).movedim(-1, 2).flatten(1, 2)[:, : rows[1]]
    return found.reshape(shape).contiguous()


@_words.register_fake
def _(key: Tensor, shape: list[int], rank: int, world: int) -> Tensor:
    return key.new_empty(shape, dtype=torch.int16)


def _shifted(word: Tensor, places: int) -> Tensor:
    """A logical shift to the right; torch's keeps the sign."""
    return (word >> places) & (2 ** (64 - places) - 1)


class Dropout(nn.Dropout):
    """`dropout` as a layer, for training alone; p in [0, 1): torch takes NaN, and 1, with which nothing is left."""

    def __init__(self, p: float = 0.5):
        super().__init__(checked(p))

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x
