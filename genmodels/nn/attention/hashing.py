"""Hashes under which vectors of similar direction fall into the same bucket."""

from __future__ import annotations

import torch
from torch import Tensor


def sign_bits(x: Tensor, planes: Tensor) -> Tensor:
    """On which side of each hyperplane a vector lies: bit k is x . planes_k > 0, so that exactly 0 is bit 0.

    Two vectors at angle theta share a bit with probability 1 - theta / pi when the planes are normal draws.

    Shapes: `x (.., d)`, `planes (d, k)` to bool `(.., k)`. Source: Charikar 2002, section 3.

    Example:
        >>> sign_bits(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.eye(2)).int()
        tensor([[1, 0],
                [0, 1]], dtype=torch.int32)
    """
    return x @ planes > 0


def sign_hash(x: Tensor, planes: Tensor) -> Tensor:
    """The bucket of the sign bits read as a binary number, the first bit leading: int64 in 0 .. 2^k - 1.

    Example:
        >>> sign_hash(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.eye(2))
        tensor([2, 1])
    """
    bits = sign_bits(x, planes)
    powers = 2 ** torch.arange(bits.shape[-1] - 1, -1, -1, device=x.device)
    return (bits * powers).sum(-1)


def rotation_hash(x: Tensor, rotation: Tensor) -> Tensor:
    """The nearest of the axes and their opposites after a random map: argmax of [x R; -x R].

    Shapes: `x (.., d)`, `rotation (d, n)` to int64 `(..)` in 0 .. 2 n - 1. Source: Andoni et al. 2015, section 3.

    Example:
        >>> rotation_hash(torch.tensor([[1.0, 0.0], [2.0, 1.0], [-1.0, -3.0]]), torch.eye(2))
        tensor([0, 0, 3])
    """
    turned = x @ rotation
    return torch.cat([turned, -turned], dim=-1).argmax(-1)
