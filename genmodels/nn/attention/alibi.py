"""Linear distance bias: ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.nn.attention.position import DistanceBias


class ALiBi(DistanceBias):
    """A penalty that grows with the distance, at a fixed rate for each head.

        b(i, j) = -m_h |j - i|,    m_h = 2^(-8h / H), h = 1 .. H

    When H is no power of two: the slopes of the largest power p below H, then every other slope of 2p. Nothing is
    learned, nothing is stored.

    Arguments:
        dim, heads: as in the attention it serves.
        symmetric: whether the future is penalised as the past; if not it is free of charge, which only a causal
            attention should want, and for it the two are the same.
        cross: whether queries and keys of two sequences share one clock.

    Source: Press et al. 2022, section 3.

    Example:
        >>> ALiBi(8, 2).table(torch.tensor([-2, 0, 1]))
        tensor([[-0.1250,  0.0000, -0.0625],
                [-0.0078,  0.0000, -0.0039]], dtype=torch.float64)
    """

    def __init__(self, dim: int, heads: int, *, symmetric: bool = True, cross: bool = False):
        super().__init__(dim, heads, cross=cross)
        self.symmetric = symmetric
        # Integers, so that no change of precision of the module can round a slope.
        self.register_buffer("steps", torch.tensor(exponents(heads)), persistent=False)

    def table(self, r: Tensor) -> Tensor:
        distance = r.abs() if self.symmetric else (-r).clamp(min=0)
        slopes = torch.pow(2.0, self.steps.to(torch.float64) * (-8 / (2 * largest_power(self.heads))))
        return slopes[:, None] * -distance


def largest_power(heads: int) -> int:
    """p, the largest power of two that is not above the number of heads."""
    return 1 << (heads.bit_length() - 1)


def exponents(heads: int) -> list[int]:
    """n of each slope 2^(-8 n / 2p): even ones are the slopes for p heads, odd ones those that only 2p heads have.

    Example:
        >>> [2.0 ** (-8 * n / 8) for n in exponents(6)]
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    power = largest_power(heads)
    return [2 * h for h in range(1, power + 1)] + [2 * h + 1 for h in range(heads - power)]
