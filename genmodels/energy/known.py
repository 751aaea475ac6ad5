"""Densities whose energy, score, constant and moments are known: what losses and samplers are held against."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.energy.function import EnergyFunction, NoiseConditionalScore, log_density_of
from genmodels.energy.kernels import noise_like
from genmodels.random import Generator, uniform


class Quadratic(EnergyFunction):
    """E(x) = 1/2 (x - m)^T A (x - m) + c over the flattened event, with A a parameter.

    Score -A (x - m), exact loss |A (x - m)|^2/2 - tr A, log Z = D/2 log 2 pi - 1/2 log |A| - c.

    Arguments:
        matrix: A, symmetric (D, D).
        mean: m (D,), None for zero.
        offset: c.

    Example:
        >>> energy = Quadratic(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
        >>> energy.score(torch.tensor([[1.0, -2.0]])).tolist()
        [[-1.0, 1.5]]
    """

    has_jet = True

    def __init__(self, matrix: Tensor, mean: Tensor | None = None, offset: float = 0.0):
        super().__init__()
        self.matrix = nn.Parameter(matrix.clone())
        self.register_buffer("mean", torch.zeros_like(matrix[0]) if mean is None else mean.clone())
        self.offset = offset

    @property
    def log_normaliser(self) -> float:
        """log Z."""
        return 0.5 * len(self.matrix) * math.log(2 * math.pi) - 0.5 * float(self.matrix.detach().logdet()) - self.offset

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        centred = x.flatten(1) - self.mean
        return 0.5 * (centred @ self.matrix * centred).sum(1) + self.offset

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        centred, v = x.flatten(1) - self.mean, v.flatten(1)
        slope, bend = (v @ self.matrix * centred).sum(1), (v @ self.matrix * v).sum(1)
        return tuple(log_density_of(part) for part in (self.energy(x), slope, bend))

    def sample(self, n: int, generator: Generator) -> Tensor:
        """(n, D) draws of the density itself."""
        lower = torch.linalg.cholesky(torch.linalg.inv(self.matrix.detach()))
        return self.mean + noise_like(self.mean.new_empty(n, len(self.mean)), generator) @ lower.T


class DoubleWell(EnergyFunction):
    """E(x) = (|x|^2 - 1)^2: two wells on a line, a ring in the plane.

    One dimension: log Z = .679926243, E[x^2] = .832745487; two: Z = pi^{3/2}/2 (1 + erf 1), log Z = 1.63517997.

    Example:
        >>> DoubleWell().energy(torch.tensor([[0.0], [1.0], [2.0]])).tolist()
        [1.0, 0.0, 9.0]
    """

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return (x.square().flatten(1).sum(1) - 1).square()


class NormalMixture(EnergyFunction):
    """A mixture of round normal densities, times exp(log_z).

        E(x) = -log_z - log sum_k w_k N(x; m_k, s^2 I)

    Arguments:
        weights: (K,) positive, made to sum to one.
        means: (K, D).
        spread: s.
        log_z: the logarithm of Z.

    Example:
        >>> mixture = NormalMixture(torch.tensor([0.5, 0.5]), torch.tensor([[-1.0], [1.0]]), 0.5)
        >>> mixture.score(torch.zeros(1, 1)).tolist()
        [[0.0]]
    """

    def __init__(self, weights: Tensor, means: Tensor, spread: float, log_z: float = 0.0):
        super().__init__()
        self.register_buffer("log_weights", (weights / weights.sum()).log())
        self.register_buffer("means", means.clone())
        self.spread, self.log_normaliser = spread, log_z

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        variance = self.spread**2
        squared = (x[:, None] - self.means).square().sum(2)
        log_parts = self.log_weights - 0.5 * squared / variance
        constant = self.log_normaliser - 0.5 * self.means.shape[1] * math.log(2 * math.pi * variance)
        return log_density_of(torch.logsumexp(log_parts, 1) + constant)

    def sample(self, n: int, generator: Generator) -> Tensor:
        """(n, D) draws."""
        u = uniform((n,), generator, dtype=torch.float64, device=self.means.device)
        which = torch.searchsorted(self.log_weights.double().exp().cumsum(0), u).clamp(max=len(self.means) - 1)
        return self.means[which] + self.spread * noise_like(self.means[which], generator)

    def with_noise(self) -> NoiseConditionalScore:
        """The exact scores of this density with noise N(0, sigma^2), for every sigma."""

        def score(x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
            variance = (self.spread**2 + sigma.square())[:, None]
            offset = self.means - x[:, None]  # (B, K, D)
            share = torch.softmax(self.log_weights - 0.5 * offset.square().sum(2) / variance, 1)
            return (share[..., None] * offset).sum(1) / variance

        return NoiseConditionalScore(score)
