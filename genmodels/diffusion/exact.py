"""Exact denoisers of known data distributions, the ground truth for bounds and samplers.

For x_0 ~ N(m, c^2) per scalar, V = alpha^2 c^2 + sigma^2:

    score = -(x - alpha m)/V,   E[x_0 | x] = m + alpha c^2 (x - alpha m)/V,   eps = sigma (x - alpha m)/V
    mmse = c^2 / (1 + c^2 SNR)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.core.errors import InputError
from genmodels.core.random import Generator, normal, uniform
from genmodels.diffusion.denoiser import AtAnyTime
from genmodels.diffusion.parameterisation import Parameterisation, Prediction, V
from genmodels.diffusion.path import Path, alpha_sigma, expand, posterior


class _ExactDenoiser(AtAnyTime):
    """Base of the exact denoisers: predictions from `_moments`, densities of noised marginals."""

    event_shape: torch.Size

    def __init__(self, schedule: Path, parameterisation: Parameterisation | None):
        super().__init__()
        self.schedule, self.parameterisation = schedule, parameterisation or V()
        self.parameterisation.check(schedule)

    def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None) -> Prediction:
        log_snr = log_snr.to(x.device)
        wide = x.double()
        x0, score = self._moments(wide, log_snr)
        alpha, sigma = (expand(value, wide) for value in alpha_sigma(log_snr))
        eps = -sigma * score
        dtype = torch.promote_types(x.dtype, torch.float32)
        output = self.parameterisation.target(x0, eps, log_snr).to(dtype)
        return Prediction(
            output,
            sigma.to(dtype),
            x0=lambda: x0.to(dtype),
            eps=lambda: eps.to(dtype),
            v=lambda: (alpha * eps - sigma * x0).to(dtype),
            score=lambda: score.to(dtype),
        )

    def _moments(self, x: Tensor, log_snr: Tensor) -> tuple[Tensor, Tensor]:
        """(E[x_0 | x], score), float64."""
        raise NotImplementedError

    def log_prob(self, x0: Tensor) -> Tensor:
        """(B,) log-density of the data."""
        return self._log_marginal(x0.double(), torch.full((1,), torch.inf, dtype=torch.float64, device=x0.device))

    def marginal_log_prob(self, x: Tensor, t: Tensor) -> Tensor:
        """(B,) log-density of the noised marginal at time t."""
        return self._log_marginal(x.double(), self.schedule.log_snr(t).to(x.device).reshape(-1))

    def _log_marginal(self, x: Tensor, log_snr: Tensor) -> Tensor:
        raise NotImplementedError

    def sample(self, n: int, generator: Generator) -> Tensor:
        """(n, *event) float64 draws of the data."""
        raise NotImplementedError


class GaussianDenoiser(_ExactDenoiser):
    """The exact denoiser of x_0 ~ N(mean, diag(variance)), or of any covariance given by its eigenvectors.

    Arguments:
        schedule: the noise schedule.
        mean: event-shaped.
        variance: c^2, event-shaped or one number; with `basis`, the eigenvalues (D,).
        basis: (D, D) whose columns are the eigenvectors, for events of shape (D,).
        parameterisation: units of `Prediction.output`, v by default.

    Errors: InputError for a variance that is negative or not finite.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.tensor([0.5]), 0.25)
        >>> round(float(exact(torch.zeros(1, 1), torch.tensor([1.0])).x0), 3)  # nothing but noise: the mean
        0.5
    """

    def __init__(
        self, schedule: Path, mean: Tensor, variance: Tensor | float, *, basis: Tensor | None = None,
        parameterisation: Parameterisation | None = None,
    ):
        super().__init__(schedule, parameterisation)
        self.event_shape = mean.shape
        self.register_buffer("mean", mean.to(torch.float64))
        self.register_buffer("variance", _variances(variance).expand(mean.shape).clone())
        self.register_buffer("basis", None if basis is None else basis.to(torch.float64))

    @classmethod
    def from_covariance(cls, schedule: Path, mean: Tensor, covariance: Tensor) -> GaussianDenoiser:
        """For x_0 ~ N(mean (D,), covariance (D, D)).

        Errors: InputError for a covariance that is not symmetric or has a negative eigenvalue.
        """
        covariance = covariance.to(torch.float64)
        if not torch.allclose(covariance, covariance.mT):
            raise InputError("the covariance must be symmetric and finite")
        values, vectors = torch.linalg.eigh(covariance)
        # Rounding makes an eigenvalue of zero as negative as this, in the precision the covariance was computed in.
        values = torch.where((values < 0) & (values > -1e-6 * values.abs().amax()), 0.0, values)
        return cls(schedule, mean, values, basis=vectors)

    def _to_basis(self, x: Tensor) -> Tensor:
        return x if self.basis is None else x @ self.basis.to(x.dtype)  # of another precision after .float()

    def _from_basis(self, y: Tensor) -> Tensor:
        return y if self.basis is None else y @ self.basis.T.to(y.dtype)

    def _moments(self, x: Tensor, log_snr: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        white = _over(self._to_basis(x - alpha * self.mean), alpha.square() * self.variance + sigma.square())
        return self.mean + alpha * self._from_basis(self.variance * white), -self._from_basis(white)

    def _log_marginal(self, x: Tensor, log_snr: Tensor) -> Tensor:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        return _log_normal(self._to_basis(x - alpha * self.mean), alpha.square() * self.variance + sigma.square())

    def sample(self, n: int, generator: Generator) -> Tensor:
        z = normal((n, *self.event_shape), generator, dtype=torch.float64, device=self.mean.device)
        return self.mean + self._from_basis(self.variance.sqrt() * z)

    @property
    def entropy(self) -> float:
        """-E log p of the data, nats."""
        return float(0.5 * torch.log(2 * math.pi * math.e * self.variance).sum())

    def mmse(self, log_snr: Tensor) -> Tensor:
        """(*log_snr.shape, *event) variance of x_0 given x, per scalar (per eigenvalue)."""
        alpha, sigma = (v.reshape(*v.shape, *[1] * len(self.event_shape)) for v in alpha_sigma(log_snr))
        return _over(self.variance * sigma.square(), alpha.square() * self.variance + sigma.square())

    def reverse_variance(self, log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
        """The variance of q(x_s | x_t), v + c_0^2 mmse, the same shape as the log-SNRs.

        With it as the model's variance the ELBO is tight. Errors: scalars of different variance.
        """
        if not torch.allclose(self.variance, self.variance.flatten()[0]):
            raise InputError("the variance differs between scalars: no single reverse variance is exact")
        c_0, _, v = posterior(log_snr_s, log_snr_t)
        return v + c_0.square() * self.mmse(log_snr_t).flatten(log_snr_t.dim())[..., 0]


class MixtureDenoiser(_ExactDenoiser):
    """The exact denoiser of a mixture of K Gaussians with diagonal covariances.

    Arguments:
        schedule: the noise schedule.
        weights: (K,) positive, normalised to sum to one.
        means: (K, *event).
        variances: (K, *event), (K,) for one number each, or one number.
        parameterisation: units of `Prediction.output`, v by default.

    Errors: InputError for weights that are not positive, or a variance that is negative or not finite.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> exact = MixtureDenoiser(CosineSchedule(), torch.ones(2), torch.tensor([[-1.0], [1.0]]), 0.01)
        >>> round(float(exact(torch.zeros(1, 1), torch.tensor([0.5])).x0), 6)
        0.0
    """

    def __init__(
        self, schedule: Path, weights: Tensor, means: Tensor, variances: Tensor | float, *,
        parameterisation: Parameterisation | None = None,
    ):
        super().__init__(schedule, parameterisation)
        self.event_shape = means.shape[1:]
        variances = _variances(variances)
        if variances.dim() == 1:
            variances = variances.reshape(-1, *[1] * len(self.event_shape))
        weights = weights.to(torch.float64)
        if weights.shape != means.shape[:1] or not bool(((weights > 0) & weights.isfinite()).all()):
            raise InputError("the weights of a mixture must be positive and finite, one for each mean")
        self.register_buffer("log_weights", torch.log(weights / weights.sum()))
        self.register_buffer("means", means.to(torch.float64))
        self.register_buffer("variances", variances.expand(means.shape).clone())

    def _parts(self, x: Tensor, log_snr: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(joint log-density (B, K), x - alpha m_k, V_k, alpha), the middle two (B, K, *event)."""
        alpha, sigma = (expand(value, x)[:, None] for value in alpha_sigma(log_snr))
        offset = x[:, None] - alpha * self.means
        variance = (alpha.square() * self.variances + sigma.square()).expand_as(offset)
        log_prob = _log_normal(offset.flatten(0, 1), variance.flatten(0, 1)).view(offset.shape[:2])
        return self.log_weights + log_prob, offset, variance, alpha

    def _moments(self, x: Tensor, log_snr: Tensor) -> tuple[Tensor, Tensor]:
        joint, offset, variance, alpha = self._parts(x, log_snr)
        share = joint.softmax(1).reshape(*joint.shape, *[1] * len(self.event_shape))
        white = offset / variance
        return (share * (self.means + alpha * self.variances * white)).sum(1), -(share * white).sum(1)

    def _log_marginal(self, x: Tensor, log_snr: Tensor) -> Tensor:
        return self._parts(x, log_snr)[0].logsumexp(1)

    def sample(self, n: int, generator: Generator) -> Tensor:
        device = self.means.device
        u = uniform((n,), generator, dtype=torch.float64, device=device)
        which = torch.searchsorted(self.log_weights.exp().cumsum(0), u).clamp(max=len(self.means) - 1)
        z = normal((n, *self.event_shape), generator, dtype=torch.float64, device=device)
        return self.means[which] + self.variances[which].sqrt() * z

    @property
    def entropy(self) -> float:
        """-E log p of the data, nats, by a sum over a grid; of one or two scalars.

        Errors: InputError for more scalars, whose entropy has no closed form.
        """
        if self.means[0].numel() > 2:
            raise InputError(f"the entropy of a mixture is a sum over a grid, which {self.means[0].numel()} scalars "
                             "are too many for: take the mean of -log_prob over samples")
        means, spread = self.means.flatten(1), self.variances.flatten(1).sqrt()
        cell, ends = spread.amin(0) / 4, zip((means - 9 * spread).amin(0), (means + 9 * spread).amax(0), strict=True)
        grid = [torch.arange(*end, step, dtype=torch.float64) for end, step in zip(ends, cell, strict=True)]
        grid = torch.cartesian_prod(*grid).view(-1, *self.event_shape).to(means.device)
        log_prob = torch.cat([self.log_prob(some) for some in grid.split(65536)])
        return float(-(log_prob.exp() * log_prob).sum() * cell.prod())


def _variances(given: Tensor | float) -> Tensor:
    """The variances in float64. Errors: InputError for one that is negative or not finite."""
    given = torch.as_tensor(given, dtype=torch.float64)
    if not bool(((given >= 0) & given.isfinite()).all()):
        raise InputError("variances must be finite and not negative")
    return given


def _log_normal(offset: Tensor, variance: Tensor) -> Tensor:
    """(B,) log N(offset; 0, variance), summed over the event."""
    return -0.5 * (offset.square() / variance + torch.log(2 * math.pi * variance)).flatten(1).sum(1)


def _over(offset: Tensor, variance: Tensor) -> Tensor:
    """offset / variance, and 0 where the variance is 0: x is the mean there."""
    return offset / torch.where(variance > 0, variance, math.inf)
