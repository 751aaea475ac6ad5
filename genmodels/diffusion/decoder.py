"""Decoders p(x_0 | x_{t_0}), the last step of the chain: from a mean and a scale to the probability of the data."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.special import log_ndtr

from genmodels.core.errors import InputError, positive


def to_unit(k: Tensor, levels: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Integer levels 0..n-1 to [-1, 1]: -1 + 2k/(n-1), in `dtype`.

    Example:
        >>> to_unit(torch.tensor([0, 8, 16]), 17).tolist()
        [-1.0, 0.0, 1.0]
    """
    return (2 * k.to(torch.float64) / (levels - 1) - 1).to(dtype)


def to_levels(x: Tensor, levels: int) -> Tensor:
    """[-1, 1] to the nearest integer level 0..n-1 (int64); values outside go to the end levels.

    Example:
        >>> to_levels(torch.tensor([-1.2, 0.01, 1.0]), 17).tolist()
        [0, 8, 16]
    """
    return ((x.to(torch.float64) + 1) * ((levels - 1) / 2)).round().clamp(0, levels - 1).long()


class Decoder(Protocol):
    """`log_prob(x, mean, scale)`: the log-probability of each scalar of x, all in the model's units, same shapes.

    `finest_log_snr` is where less noise changes nothing more: for integers where the noise is a quarter of the distance
    between levels.
    """

    levels: int | None
    finest_log_snr: float

    def log_prob(self, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """log P(x) or log p(x) of each scalar, given the mean and the standard deviation of its level; same shapes."""


class DiscretisedGaussian:
    """A Gaussian discretised to n levels, the outer two open: integer data get a probability, not a density.

        P(k) = Phi((e_{k+1} - mean)/s) - Phi((e_k - mean)/s),   e_k = (2k - 1)/(n - 1) - 1,   e_0 = -inf, e_n = +inf

    Neighbouring levels share their edge bit for bit, so the levels sum to one. Computed in float64 (in float32 the
    gradient is wrong in the tails) from log Phi, mirrored into the lower tail where differences keep their digits.

    Arguments:
        levels: the number of levels n >= 2.

    Errors: `levels` None (continuous data); `log_prob` of values that lie on no level.

    Source: Ho et al. 2020, equation 13.

    Example:
        >>> round(float(DiscretisedGaussian(17).log_mass(torch.tensor(8), torch.tensor(0.0), torch.tensor(0.1))), 6)
        -0.759225
    """

    def __init__(self, levels: int | None):
        if levels is None or levels < 2:
            raise InputError(f"levels = {levels}: a discrete decoder needs 2 or more; for continuous data use Gaussian")
        self.levels = int(levels)
        self.finest_log_snr = 2 * math.log(2 * (self.levels - 1))

    def log_mass(self, k: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """log P(k) of integer levels k (broadcast with mean and scale), in the dtype of mean, float32 at least."""
        dtype = torch.promote_types(mean.dtype, torch.float32)
        k, mean, scale = torch.broadcast_tensors(k.to(torch.float64), mean.to(torch.float64), scale.to(torch.float64))
        a = (self._edge(k) - mean) / scale
        b = (self._edge(k + 1) - mean) / scale
        first, last = k == 0, k == self.levels - 1
        mirrored = ~first & (last | (a > 0))
        a, b = torch.where(mirrored, -b, a), torch.where(mirrored, -a, b)
        upper = log_ndtr(b)
        # On the open side a = -inf: a finite stand-in keeps infinities, whose gradient is nan, out of the graph.
        lower = torch.where(first | last, upper.detach() - 1, log_ndtr(a))
        inside = torch.log(-torch.expm1(lower - upper))
        return (upper + torch.where(first | last, 0.0, inside)).to(dtype)

    def log_prob(self, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """The same for x = to_unit(k) in [-1, 1]."""
        k = to_levels(x, self.levels)
        off = (x - to_unit(k, self.levels, dtype=torch.float64)).abs().max() if x.numel() else 0.0
        if not off <= 0.01 / self.levels + 1e-6:  # NaN too
            raise InputError(f"the data do not lie on {self.levels} levels in [-1, 1]: a value is {float(off):.3g} off")
        return self.log_mass(k, mean, scale)

    def _edge(self, k: Tensor) -> Tensor:
        return (2 * k - 1) / (self.levels - 1) - 1


class LevelSoftmax:
    """The posterior of the level given the noisy data, without a network, so that the KL terms count all other bits.

        P(k | x_{t_0}) proportional to N(x_{t_0} / alpha; c_k, 1/SNR),   c_k = -1 + 2k/(n-1)

    Arguments:
        levels: the number of levels n >= 2.

    Errors: `levels` None (continuous data).
    Source: Kingma et al., "Variational diffusion models", 2021, section 3.3.

    Example:
        >>> LevelSoftmax(2).log_mass(torch.tensor(0), torch.tensor(-1.0), torch.tensor(1.0))  # 1 / (1 + e^-2)
        tensor(-0.1269)
    """

    #: Mean and scale are x_{t_0} / alpha and sigma / alpha, not the estimate of a network.
    reads_noisy = True

    def __init__(self, levels: int | None):
        if levels is None or levels < 2:
            raise InputError(f"levels = {levels}: a softmax needs 2 or more; for continuous data use Gaussian")
        self.levels = int(levels)
        # No network helps here: levels have to lie twice as many standard deviations apart to be distinguished.
        self.finest_log_snr = 2 * math.log(4 * (self.levels - 1))

    def log_mass(self, k: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """log P(k) of integer levels k (broadcast with mean and scale), in the dtype of mean, float32 at least."""
        dtype = torch.promote_types(mean.dtype, torch.float32)
        mean, scale = torch.broadcast_tensors(mean.to(torch.float64), scale.to(torch.float64))
        near = to_unit(to_levels(mean.detach(), self.levels), self.levels, dtype=torch.float64)

        def log_weight(k: Tensor | int) -> Tensor:
            # Squared distances minus the squared distance of the nearest level, in a form that keeps its digits.
            centre = 2 * k / (self.levels - 1) - 1
            return -0.5 * (centre - near) * (centre + near - 2 * mean) / scale.square()

        # Level by level: all at once would take as many times the memory of the data as there are levels.
        total = torch.full_like(mean, -math.inf)
        for level in range(self.levels):
            total = torch.logaddexp(total, log_weight(level))
        return (log_weight(k.to(torch.float64)) - total).to(dtype)

    def log_prob(self, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """The same for x = to_unit(k) in [-1, 1]."""
        return self.log_mass(to_levels(x, self.levels), mean, scale)


class Gaussian:
    """N(x; mean, scale^2), for continuous data: the ELBO becomes a bound on a density (`levels` is None).

    Arguments:
        scale: a fixed standard deviation, above 0, in place of the last kernel's.

    Example:
        >>> Gaussian().log_prob(torch.zeros(1), torch.zeros(1), torch.ones(1))
        tensor([-0.9189])
    """

    levels, finest_log_snr = None, 12.0

    def __init__(self, *, scale: float | None = None):
        self.scale = None if scale is None else positive("scale", scale)

    def log_prob(self, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Log-density of each scalar."""
        scale = scale if self.scale is None else torch.full_like(scale, self.scale)
        return -0.5 * ((x - mean) / scale).square() - torch.log(scale) - 0.5 * math.log(2 * math.pi)
