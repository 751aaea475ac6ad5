"""Random directions v with E[v v^T] = I over the whole event, whatever its shape.

For a symmetric A the variance of v^T A v, an unbiased estimate of tr A, is

    Rademacher   2 (|A|_F^2 - sum_i A_ii^2)
    Gaussian     2 |A|_F^2
    sphere       2 D/(D + 2) (|A|_F^2 - (tr A)^2/D)
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from genmodels.errors import InputError
from genmodels.random import Generator, normal, uniform


class Projection(Protocol):
    """A law of random directions."""

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) directions, independent over the batch."""

    def variance(self, matrix: Tensor) -> Tensor:
        """The variance of v^T A v for a symmetric A (D, D)."""


class Rademacher:
    """Every coordinate is +1 or -1 with probability one half: the trace of a diagonal matrix is exact.

    Source: Hutchinson 1990.

    Example:
        >>> v = Rademacher().draw((2, 3), torch.Generator().manual_seed(0))
        >>> bool((v.abs() == 1).all())
        True
    """

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) coordinates of +1 and -1, independent."""
        side = uniform(shape, generator, dtype=torch.float32, device=device) < 0.5
        return 1 - 2 * side.to(dtype)

    def variance(self, matrix: Tensor) -> Tensor:
        """2 (sum_ij A_ij^2 - sum_i A_ii^2) for a symmetric A (D, D)."""
        return 2 * (matrix.square().sum() - matrix.diagonal().square().sum())


class Gaussian:
    """Standard normal coordinates.

    Example:
        >>> float(Gaussian().variance(torch.eye(3)))
        6.0
    """

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) standard normal coordinates, independent."""
        return normal(shape, generator, dtype=dtype, device=device)

    def variance(self, matrix: Tensor) -> Tensor:
        """2 sum_ij A_ij^2 for a symmetric A (D, D)."""
        return 2 * matrix.square().sum()


class Sphere:
    """sqrt(D) times a uniform direction of the whole event.

    Example:
        >>> v = Sphere().draw((2, 3, 4), torch.Generator().manual_seed(0))
        >>> [round(float(length), 4) for length in v.flatten(1).square().sum(1)]
        [12.0, 12.0]
    """

    def draw(self, shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) directions of length sqrt(D), D the scalars of an event."""
        v = normal(shape, generator, dtype=dtype, device=device)
        length = v.flatten(1).norm(dim=1).reshape(-1, *(1,) * (v.dim() - 1))
        return v * (math.sqrt(math.prod(shape[1:])) / length)

    def variance(self, matrix: Tensor) -> Tensor:
        """2 D / (D + 2) (sum_ij A_ij^2 - (tr A)^2 / D) for a symmetric A (D, D)."""
        dims = len(matrix)
        return 2 * dims / (dims + 2) * (matrix.square().sum() - matrix.trace().square() / dims)


#: What `projection=` may be.
PROJECTIONS: dict[str, type[Projection]] = {"rademacher": Rademacher, "gaussian": Gaussian, "sphere": Sphere}


def projection_law(name: str) -> Projection:
    """The law of that name.

    Errors: InputError for an unknown one.

    Example:
        >>> type(projection_law("sphere")).__name__
        'Sphere'
    """
    if name not in PROJECTIONS:
        raise InputError(f"projection = {name!r} is not one of {', '.join(PROJECTIONS)}")
    return PROJECTIONS[name]()
