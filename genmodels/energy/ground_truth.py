"""Ground truth for energies: densities with known log Z, scores and samples; Z by quadrature in low dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.core.errors import InputError, RunError
from genmodels.core.random import Generator, uniform
from genmodels.core.tensors import hide, usable, wide
from genmodels.energy.function import EnergyFunction, NoiseConditionalScore, like, log_density_of, require_energy
from genmodels.energy.kernels import noise_like


class Quadratic(EnergyFunction):
    """E(x) = 1/2 (x - m)^T A (x - m) + c over the flattened event, with A a parameter.

    Score -A (x - m), exact loss |A (x - m)|^2/2 - tr A, log Z = D/2 log 2 pi - 1/2 log |A| - c.

    Arguments:
        matrix: A, symmetric (D, D).
        mean: m (D,), None for zero.
        offset: c.

    Errors: InputError for a matrix that is not symmetric; for log Z and samples, for one that is not positive definite.

    Example:
        >>> energy = Quadratic(torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
        >>> energy.score(torch.tensor([[1.0, -2.0]])).tolist()
        [[-1.0, 1.5]]
    """

    has_jet = True

    def __init__(self, matrix: Tensor, mean: Tensor | None = None, offset: float = 0.0):
        super().__init__()
        if not torch.allclose(matrix, matrix.mT):
            raise InputError("the matrix of a quadratic energy must be symmetric and finite")
        self.matrix = nn.Parameter(matrix.clone())
        self.register_buffer("mean", torch.zeros_like(matrix[0]) if mean is None else mean.clone())
        self.offset = offset

    @property
    def log_normaliser(self) -> float:
        """log Z."""
        half_logdet = float(self._lower().diagonal().log().sum())
        return 0.5 * len(self.matrix) * math.log(2 * math.pi) - half_logdet - self.offset

    def _lower(self) -> Tensor:
        """(D, D) lower triangular L with L L^T = A."""
        lower, fault = torch.linalg.cholesky_ex(self.matrix.detach())
        if int(fault):
            raise InputError("the matrix of a quadratic energy is not positive definite: no log Z, no samples")
        return lower

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        centred = x.flatten(1) - self.mean
        return 0.5 * (centred @ self.matrix * centred).sum(1) + self.offset

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        centred, v = x.flatten(1) - self.mean, v.flatten(1)
        slope, curvature = (v @ self.matrix * centred).sum(1), (v @ self.matrix * v).sum(1)
        return tuple(log_density_of(part) for part in (self.energy(x), slope, curvature))

    def sample(self, n: int, generator: Generator) -> Tensor:
        """(n, D) draws of the density itself."""
        lower = torch.linalg.cholesky(torch.cholesky_inverse(self._lower()))
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


class GaussianMixture(EnergyFunction):
    """A mixture of isotropic Gaussians, times exp(log_z).

        E(x) = -log_z - log sum_k w_k N(x; m_k, s^2 I)

    Arguments:
        weights: (K,) positive, normalised to sum to one.
        means: (K, D).
        spread: s.
        log_z: the logarithm of Z.

    Errors: InputError for weights or a spread that are not positive and finite.

    Example:
        >>> mixture = GaussianMixture(torch.tensor([0.5, 0.5]), torch.tensor([[-1.0], [1.0]]), 0.5)
        >>> mixture.score(torch.zeros(1, 1)).tolist()
        [[0.0]]
    """

    def __init__(self, weights: Tensor, means: Tensor, spread: float, log_z: float = 0.0):
        super().__init__()
        if not (bool(((weights > 0) & weights.isfinite()).all()) and 0 < spread < math.inf):
            raise InputError("the weights and the spread of a mixture must be positive and finite")
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


class GaussianBase(EnergyFunction):
    """A Gaussian with its energy, normalising constant and samples, in float64.

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

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        offset = (x.to(torch.float64) - self.mean).flatten(1)
        return 0.5 * (offset @ self.precision * offset).sum(1)

    def sample(self, n: int, generator: Generator, *, dtype=torch.float64) -> Tensor:
        """(n, *event) draws."""
        z = noise_like(self.mean.new_empty(n, *self.mean.shape), generator)
        return (self.mean + (z.flatten(1) @ self.lower.T).view_as(z)).to(dtype)


class Potential(nn.Module):
    """The gradient of a scalar potential of a network f, as the velocity of a diffusion x = alpha x_0 + sigma eps.

        Phi(x) = sum x f(x),    v = grad Phi
        E(x) = 1/2 |x|^2 + (alpha/sigma) Phi(x),    score = -grad E = -x - (alpha/sigma) v

    Any v gives a score; one that is a gradient gives a score with an energy. f is usually initialised to zero; then E
    is that of a standard Gaussian at every noise level. Computed in float32 or wider regardless of autocast, and with
    gradients even if the caller has disabled them.

    Arguments:
        network: maps `(x, log_snr, cond)`, and a mask as fourth argument if given, to a tensor like x; twice
            differentiable.

    Shapes: `x (B, *event)`, `log_snr (B,)`, `mask (B, 1, T)` bool or None; the gradient is like x, zero where the mask
    is False, energies are `(B,)`.
    Source: the product form of Salimans and Ho 2021, "Should EBMs model the energy or the score?", section 3.

    Example:
        >>> field = Potential(lambda x, log_snr, cond: 2 * x)
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> field(x, torch.zeros(1)).tolist(), field.energy(x, torch.zeros(1)).tolist()
        ([[4.0, 12.0]], [25.0])
    """

    def __init__(self, network: Callable[..., Tensor]):
        super().__init__()
        self.network = network

    def energy(self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B,) E(x), equal to -log p up to a constant for each noise level."""
        x = hide(wide(x), mask)
        return 0.5 * x.square().flatten(1).sum(1) + torch.exp(0.5 * log_snr) * self._scalar(x, log_snr, cond, mask)

    def forward(self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            x, log_snr, cond, mask = (usable(value) for value in (wide(x), log_snr, cond, mask))
            x = x if training and x.requires_grad else x.detach().requires_grad_()
            scalar = self._scalar(hide(x, mask), log_snr, cond, mask)
            return torch.autograd.grad(scalar.sum(), x, create_graph=training)[0]

    def _scalar(self, x: Tensor, log_snr: Tensor, cond: Tensor | None, mask: Tensor | None) -> Tensor:
        # The fused kernels of attention have no second derivative; the plain one has.
        with sdpa_kernel(SDPBackend.MATH), torch.autocast(x.device.type, enabled=False):
            f = like(x, self.network(x, log_snr, cond, *(() if mask is None else (mask,))), "the output of the network")
        return (x * f).flatten(1).sum(1)


Limits = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Quadrature:
    """log Z over a box.

    Arguments:
        log_z: the logarithm of the integral of exp(-E) over the limits.
        error: bound on its absolute error, as estimated by the rule.
        edge: the largest density on the border, relative to the largest inside; limits are wide enough if this is
            negligible.
    """

    log_z: float
    error: float
    edge: float


def quadrature(
    model: EnergyFunction, limits: Limits, *, cells: int = 8, tolerance: float | None = None,
    cond: Tensor | None = None, dtype=torch.float64, device=None,
) -> Quadrature:
    """log Z of an energy over a box, by adaptive Gauss-Kronrod rules on a grid of cells.

    Arguments:
        limits: (low, high) of each of one or two coordinates; Z excludes the mass outside.
        cells: cells per coordinate, each refined separately, so that narrow modes are not overlooked.
        tolerance: target relative error; None is 1e-10 in float64 and 1e-5 in float32.
        cond: condition (1,) or (1, ...) of all points.
        dtype: of the points at which the energy is evaluated.

    Errors: InputError in more than two dimensions, or for a score without energy; RunError if the rule does not
    converge, misses all modes because they are narrower than the cells, or the energy is not finite.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> normal = LogDensity(lambda x: -0.5 * x.square().sum(1))
        >>> round(quadrature(normal, [(-9, 9)]).log_z, 9) == round(0.5 * math.log(2 * math.pi), 9)
        True
    """
    model, limits = require_energy(model, "quadrature"), _checked(limits)
    energy = partial(_energies, model, cond=cond, dtype=dtype, device=device)
    lowest, edge = _survey(energy, limits)
    value, error = _integrate(lambda points: np.exp(lowest - energy(points)), limits, cells, tolerance, dtype)
    if not value > 0:
        raise RunError("quadrature missed all modes, which are narrower than the cells: narrow the limits or use more "
                       "cells=")
    return Quadrature(math.log(value) - lowest, error / value, edge)


def _energies(model: EnergyFunction, points: np.ndarray, cond: Tensor | None, dtype, device) -> np.ndarray:
    """The energies of NumPy points (N, D), in batches."""
    x = torch.as_tensor(np.ascontiguousarray(points)).to(device=device, dtype=dtype)
    values = []
    with torch.no_grad():
        for some in x.split(65536):
            own = None if cond is None else cond.expand(len(some), *cond.shape[1:])
            values.append(model.energy(some, own).to("cpu", torch.float64))
    energy = torch.cat(values).numpy()
    if np.isnan(energy).any():
        raise RunError(f"the energy is NaN at x = {points[np.isnan(energy)][0].tolist()}")
    return energy


def _checked(limits: Limits) -> tuple[tuple[float, float], ...]:
    limits = tuple((float(low), float(high)) for low, high in limits)
    if len(limits) not in (1, 2):
        raise InputError(f"quadrature is for one or two dimensions, not {len(limits)}: use importance sampling")
    if any(not (math.isfinite(low) and math.isfinite(high) and low < high) for low, high in limits):
        raise InputError(f"limits must be finite pairs (low, high) with low < high, got {limits}")
    return limits


def _survey(energy: Callable[[np.ndarray], np.ndarray], limits) -> tuple[float, float]:
    """The lowest energy on a grid, and the largest density on the border relative to the largest on the grid."""
    sides = [np.linspace(low, high, 129) for low, high in limits]
    grid = np.meshgrid(*sides, indexing="ij")
    values = energy(np.stack([g.ravel() for g in grid], axis=1))
    border = np.any([(g.ravel() == s[0]) | (g.ravel() == s[-1]) for g, s in zip(grid, sides, strict=True)], axis=0)
    lowest = float(values.min())
    return lowest, float(np.exp(lowest - values[border].min()))


def _integrate(function: Callable, limits, cells: int, tolerance: float | None, dtype):
    """(integral, error bound) over all cells, each of which has an equal share of the tolerance."""
    from scipy.integrate import cubature

    if tolerance is None:
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    edges = [np.linspace(low, high, cells + 1) for low, high in limits]
    middles = np.stack([g.ravel() for g in np.meshgrid(*(0.5 * (e[1:] + e[:-1]) for e in edges))], axis=1)
    volume = math.prod(high - low for low, high in limits)
    value = error = 0.0
    boxes = list(itertools.product(*(zip(e[:-1], e[1:], strict=True) for e in edges)))
    scale = function(middles).mean() * volume  # a first guess of the integral
    for box in boxes:
        low, high = (np.array(side) for side in zip(*box, strict=True))
        done = cubature(
            function, low, high, rule="gk21" if len(limits) == 1 else "gk15",
            rtol=tolerance, atol=tolerance * scale / len(boxes), max_subdivisions=2000,
        )  # fmt: skip
        if done.status != "converged":
            raise RunError(f"quadrature did not converge on {box}: narrow the limits or raise the tolerance")
        value, error = value + float(done.estimate), error + float(done.error)
    return value, error
