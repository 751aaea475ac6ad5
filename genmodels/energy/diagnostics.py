"""How far chains can be trusted: split R-hat and effective sample size."""

from __future__ import annotations

import torch
from torch import Tensor


def split_r_hat(draws: Tensor) -> Tensor | None:
    """Split R-hat of each quantity: the spread over halves of chains against the spread within them; 1 when mixed.

        R = sqrt(((n - 1)/n W + B/n) / W)

    with B/n the variance of the means of the half-chains and W the mean of their variances.

    Shapes: `draws (N, B, K)` for N draws of B chains; the result is `(K,)`, or None for fewer than 4 draws.
    Source: Gelman et al. 2013, "Bayesian data analysis", section 11.4.

    Example:
        >>> draws = torch.randn(1000, 4, 1, generator=torch.Generator().manual_seed(0))
        >>> bool((split_r_hat(draws) < 1.01).all()), bool((split_r_hat(draws + torch.arange(4)[:, None]) > 1.3).all())
        (True, True)
    """
    if len(draws) < 4:
        return None
    halves = _halves(draws.to(torch.float64))
    n = len(halves)
    within = halves.var(0).mean(0)
    between = halves.mean(0).var(0)
    return (((n - 1) / n * within + between) / within).sqrt()


def effective_sample_size(draws: Tensor) -> Tensor | None:
    """Number of independent draws that would know the mean of each quantity as well.

        ESS = N B / (1 + 2 sum_t rho_t),   rho_t = 1 - (W - mean autocovariance at lag t) / var_plus

    The sum ends where the sum of a pair of neighbouring rho is no longer positive, and pairs do not increase.

    Shapes: `draws (N, B, K)`; the result is `(K,)`, or None for fewer than 4 draws.
    Source: Geyer 1992 (initial monotone sequence); Vehtari et al. 2021, section 3 (several chains, split).

    Example:
        >>> draws = torch.randn(1000, 4, 1, generator=torch.Generator().manual_seed(0))
        >>> 3200 < float(effective_sample_size(draws)) < 4800
        True
    """
    if len(draws) < 4:
        return None
    halves = _halves(draws.to(torch.float64))
    n, chains, _ = halves.shape
    centred = halves - halves.mean(0)
    # Autocovariances by the Fourier transform, padded so that the ends do not meet.
    spectrum = torch.fft.rfft(centred, n=2 * n, dim=0)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * n, dim=0)[:n].mean(1) / n  # (n, K)
    within = covariance[0] * n / (n - 1)
    plus = covariance[0] + (halves.mean(0).var(0) if chains > 1 else 0)
    rho = 1 - (within - covariance) / plus
    rho[0] = 1
    pairs = rho[: n // 2 * 2].view(n // 2, 2, -1).sum(1)  # rho_{2k} + rho_{2k + 1}
    positive = (pairs > 0).long().cumprod(0)
    pairs = pairs.cummin(0).values * positive
    length = (2 * pairs.sum(0) - 1).clamp(min=1 / torch.tensor(float(n * chains)).log10())
    return n * chains / length


def _halves(draws: Tensor) -> Tensor:
    """(N, B, K) to (N // 2, 2 B, K)."""
    half = len(draws) // 2
    return torch.cat([draws[:half], draws[half : 2 * half]], dim=1)
