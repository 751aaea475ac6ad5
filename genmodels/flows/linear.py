"""Linear maps of the channels at every position: learned invertible matrices, whitening among them; permutations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from genmodels.core.errors import one_of
from genmodels.flows.bijection import Channelwise, at_each_position, full_precision, undone_on_failure
from genmodels.flows.elementwise import bounded, per_channel, unbounded
from genmodels.flows.scaling import DataInitialized, channel_covariance

_LIMIT = 10.0


def random_rotation(size: int, generator: torch.Generator | None = None) -> Tensor:
    """A uniformly random rotation in float64, from the QR decomposition of a Gaussian matrix.

    Example:
        >>> w = random_rotation(3, torch.Generator().manual_seed(0))
        >>> bool(torch.allclose(w @ w.mT, torch.eye(3).double())), round(float(torch.det(w)), 6)
        (True, 1.0)
    """
    device = generator.device if generator is not None else None
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64, device=device)
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal().sign()
    return torch.cat([q[:, :1] * torch.linalg.slogdet(q).sign, q[:, 1:]], dim=1)  # det underflows where q is large


class LUMatrix(nn.Module):
    """A permutation times two triangular factors.

        W = P L (U + diag(sign exp(l))),    log|det W| = sum l,    l = 10 tanh(raw / 10)

    One parameter holds L (with ones on its diagonal) below, U above and raw on the diagonal. P and the signs are fixed.
    It starts as a random rotation. `genmodels.flows.replay.examine` reports the smallest singular value, which shows
    whether l approaches its bound in training.

    Arguments:
        size: rows and columns.
        generator: source of the initial rotation.

    Errors: see `set_weight`.
    Source: Kingma and Dhariwal 2018 (Glow), section 3.2 and equation 10.

    Example:
        >>> matrix = LUMatrix(2)
        >>> matrix.set_weight(torch.tensor([[2.0, 1.0], [1.0, -3.0]]))
        >>> matrix.weight(torch.float32).detach().round(decimals=4), matrix.log_abs_det(torch.float32).detach()
        (tensor([[ 2.,  1.],
                 [ 1., -3.]]), tensor(1.9459))
    """

    def __init__(self, size: int, generator: torch.Generator | None = None):
        super().__init__()
        self.factors = nn.Parameter(torch.empty(size, size))
        self.register_buffer("order", torch.arange(size))  # P: row i of W is row order[i] of L U
        self.register_buffer("sign", torch.ones(size))
        self.set_weight(random_rotation(size, generator))

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Set W.

        Raises:
            ValueError: for a singular matrix, or one whose |diag(U)| is not between exp(-9.99) and exp(9.99).
        """
        permutation, lower, upper = torch.linalg.lu(weight.to(torch.float64))
        diagonal = upper.diagonal()
        sizes = diagonal.abs()
        if not bool((sizes.log().abs() < 0.999 * _LIMIT).all()):  # NaN too
            raise ValueError(f"LUMatrix holds pivots |u| of W = P L U between {math.exp(-0.999 * _LIMIT):.2g} and "
                             f"{math.exp(0.999 * _LIMIT):.2g}, this matrix has {float(sizes.min()):.2g} to "
                             f"{float(sizes.max()):.2g}: scale it, or use kind = full")
        self.order.copy_(permutation.argmax(1))
        self.sign.copy_(torch.where(diagonal < 0, -1.0, 1.0))
        self.factors.copy_(lower.tril(-1) + upper.triu(1) + unbounded(sizes.log(), _LIMIT).diag())

    def log_diagonal(self, dtype: torch.dtype) -> Tensor:
        """l, between -10 and 10."""
        return bounded(self.factors.diagonal().to(dtype), _LIMIT)

    def weight(self, dtype: torch.dtype) -> Tensor:
        below, upper = self._triangles(dtype)
        return torch.addmm(upper, below, upper).index_select(0, self.order)  # (L - I) U + U, rows in order

    def inverse(self, dtype: torch.dtype) -> Tensor:
        below, upper = self._triangles(torch.float64)
        rows = torch.eye(len(upper), dtype=torch.float64, device=upper.device).index_select(0, self.order).mT  # P'
        rows = torch.linalg.solve_triangular(below, rows, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(upper, rows, upper=True).to(dtype)

    def log_abs_det(self, dtype: torch.dtype) -> Tensor:
        return self.log_diagonal(dtype).sum()

    def _triangles(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """L - I and U + diag(sign exp(l))."""
        factors = self.factors.to(dtype)
        diagonal = self.sign.to(dtype) * torch.exp(self.log_diagonal(dtype))
        return factors.tril(-1), factors.triu(1) + diagonal.diag()


class FullMatrix(nn.Module):
    """An unconstrained matrix; its log-determinant takes a factorisation in float64.

        log|det W| = sum log|diag U| of W = P L U   (slogdet: the determinant may be negative)

    Arguments:
        size: rows and columns.
        generator: source of the initial rotation.

    Source: Kingma and Dhariwal 2018 (Glow), section 3.2 and equation 9.

    Example:
        >>> matrix = FullMatrix(2)
        >>> matrix.set_weight(torch.tensor([[2.0, 1.0], [1.0, -3.0]]))
        >>> matrix.log_abs_det(torch.float32).detach()
        tensor(1.9459)
    """

    def __init__(self, size: int, generator: torch.Generator | None = None):
        super().__init__()
        self.entries = nn.Parameter(torch.empty(size, size))
        self.set_weight(random_rotation(size, generator))

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Set W."""
        self.entries.copy_(weight)

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self.entries.to(dtype)

    def inverse(self, dtype: torch.dtype) -> Tensor:
        # Without the check for singularity, which waits for the device: the result is then not finite.
        return torch.linalg.inv_ex(self.entries.to(torch.float64)).inverse.to(dtype)

    def log_abs_det(self, dtype: torch.dtype) -> Tensor:
        return torch.linalg.slogdet(self.entries.to(torch.float64)).logabsdet.to(dtype)


class HouseholderMatrix(nn.Module):
    """An orthogonal matrix, the product of as many reflections as it has columns.

        W = prod_i (I - 2 v_i v_i' / |v_i|^2),    log|det W| = 0,    W^-1 = W'

    The product is I - V T V' with V the unit vectors as columns and T^-1 = strict upper triangle of V'V + I/2, so it
    takes one triangular solve. A vector of zeros reflects nothing. The initial reflections are random.

    Arguments:
        size: rows and columns.
        generator: source of the vectors.

    Source: Tomczak and Welling 2016 (Householder flow); closed form: Joffrain et al. 2006.

    Example:
        >>> matrix = HouseholderMatrix(3)
        >>> w = matrix.weight(torch.float64)
        >>> bool(torch.allclose(w @ w.mT, torch.eye(3).double()))
        True
    """

    def __init__(self, size: int, generator: torch.Generator | None = None):
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(size, size))  # rows v_i
        device = generator.device if generator is not None else None
        with torch.no_grad():
            self.vectors.copy_(torch.randn(size, size, generator=generator, device=device))

    def weight(self, dtype: torch.dtype) -> Tensor:
        vectors = self.vectors.to(dtype)
        largest = vectors.detach().abs().amax(1, keepdim=True)  # W does not depend on |v|, whose square may underflow
        unit = normalize(vectors / (largest + (largest == 0)), dim=1)
        eye = torch.eye(unit.shape[1], dtype=dtype, device=unit.device)
        half = 0.5 * torch.eye(len(unit), dtype=dtype, device=unit.device)
        return eye - unit.mT @ torch.linalg.solve_triangular((unit @ unit.mT).triu(1) + half, unit, upper=True)

    def inverse(self, dtype: torch.dtype) -> Tensor:
        return self.weight(dtype).mT

    def log_abs_det(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype, device=self.vectors.device)


#: Each has `weight(dtype)`, `inverse(dtype)` and `log_abs_det(dtype)`.
MATRICES: dict[str, type[nn.Module]] = {"lu": LUMatrix, "full": FullMatrix, "householder": HouseholderMatrix}


class _Mixing(Channelwise):
    """A learned matrix W at every position, and its singular values for the monitor."""

    constant_logdet = True
    copies = 1  # number of groups of channels that W multiplies

    def __init__(self, channels: int, size: int, kind: str, generator: torch.Generator | None):
        super().__init__(channels)
        one_of("kind", kind, MATRICES)
        self.kind = kind
        self.matrix = MATRICES[kind](size, generator)

    def weight(self) -> Tensor:
        """W, float32 or wider."""
        wide = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        return self.matrix.weight(wide)

    @torch.no_grad()
    def singular_values(self) -> Tensor:
        """Singular values of W in float64, the largest first.

        The condition number, largest over smallest, bounds the growth of a relative error in the inverse.
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

    It is a matrix product, since convolutions on CUDA round to TF32 by default, and never in half precision.

    Arguments:
        channels: number of channels C; of dimensions for vectors.
        kind: parameterisation of W. `lu`: triangular factors, whose log|det W| is a sum; `full`: unconstrained, with
            slogdet in float64; `householder`: orthogonal, log|det W| = 0.
        generator: source of the initial rotation; torch's own when None.

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
        self, channels: int, *, kind: Literal["lu", "full", "householder"] = "lu",
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__(channels, channels, kind, generator)

    def _mix(self, x, weight):
        if x.dim() == 2:
            return linear(x, weight)
        return torch.bmm(weight.expand(len(x), -1, -1), x.flatten(2)).view(x.shape)


class Whitening(DataInitialized, InvertibleLinear):
    """An invertible 1x1 convolution that starts by decorrelating the channels.

        z_pos = W ((x_pos + b) / u),    log |det| = n_pos (log|det W| - sum log u)
        at the start b = -mean,   W = R^-1/2 diag(u) D^-1/2,   R = D^-1/2 cov D^-1/2 = Q E Q',   D = diag(cov)

    It starts as the identity; `initialize` takes mean and covariance over examples and valid positions. Directions
    whose variance in R is below 1e-6 are scaled as if it were that; channels with a standard deviation below 1e-3 are
    centred only. W holds scales between 5e-5 and 2e4; the units u, which are not trained, are therefore the standard
    deviations that are not between 1/20 and 20, and 1 elsewhere.

    Arguments:
        channels: number of channels C; of dimensions for vectors.
        principal: start from W = E^-1/2 Q' diag(u) D^-1/2, whose channels are the principal components, the largest
            first, instead of the symmetric root, which leaves every channel closest to what it was.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`, `logdet (B,)`.
    Errors: see `DataInitialized`; ValueError for fewer than ten valid positions a channel.
    Source: Kessy, Lewin and Strimmer 2018, "Optimal whitening and decorrelation" (ZCA-cor and PCA-cor).

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [4.0, 2.0]]).repeat(5, 1)
        >>> layer = Whitening(2)
        >>> layer.initialize(x)
        >>> (layer(x)[0].mT @ layer(x)[0] / 20).detach().round(decimals=4)
        tensor([[1., 0.],
                [0., 1.]])
    """

    def __init__(self, channels: int, *, principal: bool = False):
        super().__init__(channels)
        self.principal = principal
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("unit", torch.ones(channels))
        self.matrix.set_weight(torch.eye(channels))
        self.fewest = 10 * channels

    @torch.no_grad()
    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        with undone_on_failure(self):
            super().initialize(x, cond, mask, force=force)
            _, correlations = channel_covariance(self(x, cond, mask)[0], mask)  # of channels that are scaled already
            correlations.diagonal().clamp_(min=1.0)  # of constant channels, which then stay apart
            variances, directions = (part.flip(-1) for part in torch.linalg.eigh(correlations))
            # Signs of eigenvectors are arbitrary: the largest weight of each component is made positive.
            directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
            whiten = (directions * variances.clamp(min=1e-6).rsqrt()).mT
            whiten = whiten if self.principal else directions @ whiten
            self.matrix.set_weight(whiten @ self.matrix.weight(torch.float64))

    def _take(self, mean: Tensor, std: Tensor) -> None:
        self.bias.copy_(-mean)
        self.unit.copy_(torch.where((std > 0.05) & (std < 20), 1.0, std))
        self.matrix.set_weight((self.unit / std).diag())

    def _forward(self, x, cond, mask):
        bias, unit = self.bias.to(x.dtype), self.unit.to(x.dtype)
        z, logdet = super()._forward((x + per_channel(bias, x)) / per_channel(unit, x), cond, mask)
        return z, logdet - at_each_position(unit.log().sum(), x, mask)

    def _inverse(self, z, cond, mask):
        bias, unit = self.bias.to(z.dtype), self.unit.to(z.dtype)
        x, logdet = super()._inverse(z, cond, mask)
        return x * per_channel(unit, z) - per_channel(bias, z), logdet + at_each_position(unit.log().sum(), z, mask)


class GroupedLinear(_Mixing):
    """One small matrix for every group of channels: the 1x1 convolution of Glow-TTS.

        z_group = W x_group at every position,    log |det| = n_pos (C / g) log|det W|

    A group holds g/2 neighbouring channels of each half of the channels, so that both parts of the next coupling are
    mixed.

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
        self, channels: int, *, groups: int = 4, kind: Literal["lu", "full", "householder"] = "lu",
        generator: torch.Generator | None = None,
    ):  # fmt: skip
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
    """A fixed permutation of the channels.

        z_c = x_{index(c)},    log |det| = 0

    Arguments:
        index: for each channel of z the channel of x that it copies, a permutation of 0 .. C-1; dimensions for vectors.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`, or like x.
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
        # Both are saved, so that a loaded order has the right inverse.
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

    def out_mask(self, mask: Tensor) -> Tensor:
        return mask if mask.shape[1] == 1 else mask.index_select(1, self.index)

    def in_mask(self, mask: Tensor) -> Tensor:
        return mask if mask.shape[1] == 1 else mask.index_select(1, self.inverse_index)

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
