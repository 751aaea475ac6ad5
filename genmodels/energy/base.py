"""The normal density that annealed importance sampling starts from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.energy.function import EnergyFunction
from genmodels.energy.kernels import noise_like
from genmodels.errors import InputError
from genmodels.random import Generator


class GaussianBase(EnergyFunction):
    """A normal density with its energy, its normalising constant and draws, in float64.

        E(x) = 1/2 (x - m)^T C^-1 (x - m),   log Z = D/2 log(2 pi) + 1/2 log |C|

    Arguments:
        mean: event-shaped.
        covariance: (D, D), over the flattened event.

    Errors: InputError for a covariance that is not positive definite.

    Example:
        >>> base = GaussianBase(torch.zeros(2), 4 * torch.eye(2))
        >>> round(base.log_normaliser, 6) == round(math.log(2 * math.pi * 4), 6)
        True
    """

    def __init__(self, mean: Tensor, covariance: Tensor):
        super().__init__()
        lower, fault = torch.linalg.cholesky_ex(covariance.to(torch.float64))
        if int(fault):
            raise InputError("the covariance of the base is not positive definite: drop columns that depend on others")
        self.register_buffer("mean", mean.to(torch.float64))
        self.register_buffer("lower", lower)
        self.register_buffer("precision", torch.cholesky_inverse(lower))
        self.log_normaliser = float(0.5 * len(lower) * math.log(2 * math.pi) + lower.diagonal().log().sum())

    @classmethod
    def fit(cls, x: Tensor, *, widen: float = 2.0) -> GaussianBase:
        """From training data, with `widen` times their covariance: broad, so that weights stay bounded.

        Directions in which the data hardly vary get 1e-6 of the largest variance.
        """
        rows = x.flatten(1).to(torch.float64)
        covariance = widen * torch.cov(rows.T).reshape(rows.shape[1], -1)
        floor = 1e-6 * covariance.diagonal().max() * torch.eye(len(covariance), dtype=torch.float64, device=x.device)
        return cls(x.to(torch.float64).mean(0), covariance + floor)

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        offset = (x.to(torch.float64) - self.mean).flatten(1)
        return 0.5 * (offset @ self.precision * offset).sum(1)

    def sample(self, n: int, generator: Generator, *, dtype=torch.float64) -> Tensor:
        """(n, *event) draws."""
        z = noise_like(self.mean.new_empty(n, *self.mean.shape), generator)
        return (self.mean + (z.flatten(1) @ self.lower.T).view_as(z)).to(dtype)
