"""Linear maps of the channels at every position: learned invertible matrices (1x1 convolutions), and permutations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from genmodels.flows.bijection import Channelwise, at_each_position, full_precision
from genmodels.flows.matrix import MATRICES


class _Mixing(Channelwise):
    """What both mixings share: a matrix W, its use at every position, and its figures for a monitor."""

    constant_logdet = True
    copies = 1  # how often W acts at one position

    def __init__(self, channels: int, size: int, kind: str, generator: torch.Generator | None):
        super().__init__(channels)
        if kind not in MATRICES:
            raise ValueError(f"{type(self).__name__}: kind must be one of {', '.join(MATRICES)}, got {kind!r}")
        self.kind = kind
        self.matrix = MATRICES[kind](size, generator)

    def weight(self) -> Tensor:
        """W as it is now, float32 or wider."""
        wide = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        return self.matrix.weight(wide)

    @torch.no_grad()
    def singular_values(self) -> Tensor:
        """Singular values of W in float64, the largest first.

        The inverse stretches by at most one over the last; largest over smallest, the condition number, is how much a
        relative error can grow on the way back.
        """
        return torch.linalg.svdvals(self.weight().to(torch.float64))

    def _forward(self, x, cond, mask):
        with full_precision(x):
            z = self._mix(x, self.matrix.weight(x.dtype))
            return z, at_each_position(self.copies * self.matrix.log_abs_det(x.dtype), x, mask)

    def _inverse(self, z, cond, mask):
        with full_precision(z):
            x = self._mix(z, self.matrix.inverse(z.dtype))
            return x, at_each_position(-self.copies * self.matrix.log_abs_det(z.dtype), z, mask)

    def _mix(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError


class InvertibleLinear(_Mixing):
    """An invertible 1x1 convolution: one matrix for the channels of every position.

        z_pos = W x_pos,    log |det| = n_pos log|det W|

    It is a matrix product, never a convolution, because convolutions on CUDA round to TF32 by default, and never in
    half precision under autocast. W, its inverse and its determinant are made from the parameters at every call.

    Arguments:
        channels: number of channels C; of dimensions for vectors.
        kind: how W is kept invertible. `lu`: triangular factors, log|det W| for free; `full`: plain, by slogdet in
            float64; `householder`: orthogonal, log|det W| = 0.
        generator: source of the random rotation that W starts as; torch's own when None.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`.
    Errors: ValueError for an unknown kind, and for another number of channels.
    Source: Kingma and Dhariwal 2018 (Glow), section 3.2.

    Example:
        >>> layer = InvertibleLinear(2)
        >>> layer.matrix.set_weight(torch.tensor([[2.0, 1.0], [1.0, -3.0]]))
        >>> z, logdet = layer(torch.tensor([[1.0, 2.0]]))
        >>> z.detach().round(decimals=4), logdet.detach()
        (tensor([[ 4., -5.]]), tensor([1.9459]))
    """

    def __init__(
        self,
        channels: int,
        *,
        kind: Literal["lu", "full", "householder"] = "lu",
        generator: torch.Generator | None = None,
    ):
        super().__init__(channels, channels, kind, generator)

    def _mix(self, x, weight):
        if x.dim() == 2:
            return linear(x, weight)
        return torch.bmm(weight.expand(len(x), -1, -1), x.flatten(2)).view(x.shape)


class GroupedLinear(_Mixing):
    """One small matrix for every group of channels: the 1x1 convolution of Glow-TTS.

        z_group = W x_group at every position,    log |det| = n_pos (C / g) log|det W|

    A group holds g/2 neighbouring channels of the first half of the channels and the same of the second half, so that
    both parts of the coupling after it are mixed.

    Arguments:
        channels: number of channels C.
        groups: size g of the matrix and of each group; C / g groups share it.
        kind, generator: as for `InvertibleLinear`.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`.
    Errors: ValueError for g odd or not dividing C, an unknown kind, and another number of channels.
    Source: Kim et al. 2020 (Glow-TTS), on the architecture of the decoder.

    Example:
        >>> layer = GroupedLinear(8, groups=4)
        >>> layer.matrix.set_weight(torch.eye(4).flip(0))
        >>> layer(torch.arange(8.0)[None])[0].detach()
        tensor([[5., 4., 7., 6., 1., 0., 3., 2.]])
    """

    def __init__(
        self,
        channels: int,
        *,
        groups: int = 4,
        kind: Literal["lu", "full", "householder"] = "lu",
        generator: torch.Generator | None = None,
    ):
        if groups < 2 or groups % 2 or channels % groups:
            raise ValueError(f"GroupedLinear: groups must be even and divide the channels, got {groups} of {channels}")
        super().__init__(channels, groups, kind, generator)
        self.groups, self.copies = groups, channels // groups

    def _mix(self, x, weight):
        batch, half, length = len(x), self.groups // 2, math.prod(x.shape[2:])
        grouped = x.reshape(batch, 2, self.copies, half, length).transpose(1, 2)  # (B, C/g, 2, g/2, N)
        count = batch * self.copies
        mixed = torch.bmm(weight.expand(count, -1, -1), grouped.reshape(count, self.groups, length))
        return mixed.view(batch, self.copies, 2, half, length).transpose(1, 2).reshape(x.shape)


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
