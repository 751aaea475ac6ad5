"""Fixed orders of the channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genmodels.flows.bijection import Channelwise


class Permute(Channelwise):
    """The channels in another, fixed order.

        z_c = x_{index(c)},    log |det| = 0

    Arguments:
        index: where each channel of z comes from, a permutation of 0 .. C-1; dimensions for vectors.

    Shapes: `x (B, C, *space)`.
    Errors: ValueError for an index that is no permutation, and for another number of channels.

    Example:
        >>> Permute([2, 0, 1])(torch.tensor([[10.0, 11.0, 12.0]]))
        (tensor([[12., 10., 11.]]), tensor([0.]))
    """

    constant_logdet = True

    def __init__(self, index: Sequence[int] | Tensor):
        index = torch.as_tensor(index)
        wanted = torch.arange(index.numel(), device=index.device)
        if index.is_floating_point() or index.dim() != 1 or not index.sort().values.equal(wanted):
            raise ValueError(f"{type(self).__name__}: {index.tolist()} is not a permutation of 0 .. C-1")
        super().__init__(len(index))
        # Both are saved: a loaded order brings its own inverse.
        self.register_buffer("index", index.clone())
        self.register_buffer("inverse_index", index.argsort())

    @classmethod
    def random(cls, channels: int, generator: torch.Generator | None = None) -> Permute:
        """A random order, drawn from the generator.

        Example:
            >>> sorted(Permute.random(4, torch.Generator().manual_seed(0)).index.tolist())
            [0, 1, 2, 3]
        """
        return cls(torch.randperm(channels, generator=generator, device=generator.device if generator else None))

    def _forward(self, x, cond, mask):
        return x.index_select(1, self.index), x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return z.index_select(1, self.inverse_index), z.new_zeros(len(z))


class Flip(Permute):
    """The channels in reverse order.

        z_c = x_{C-1-c},    log |det| = 0

    Arguments:
        channels: number of channels C; of dimensions for vectors.

    Shapes: `x (B, C, *space)`.
    Errors: ValueError for another number of channels.

    Example:
        >>> Flip(3)(torch.tensor([[10.0, 11.0, 12.0]]))
        (tensor([[12., 11., 10.]]), tensor([0.]))
    """

    def __init__(self, channels: int):
        super().__init__(torch.arange(channels - 1, -1, -1))
