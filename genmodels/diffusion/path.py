"""Gaussian probability paths from data to noise, and the straight one of rectified flow.

    x_t = alpha(t) x_0 + sigma(t) eps,   velocity u = alpha'(t) x_0 + sigma'(t) eps,   log SNR = 2 log(alpha/sigma)

Two paths of equal SNR differ by a scale alone: x_t / r with r^2 = alpha^2 + sigma^2 is the noisy x of the diffusion at
that log-SNR. Networks, samplers and likelihoods of this package work on x_t / r, so each of them serves every path.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError


class Path(nn.Module):
    """A path on [0, 1], three small functions: `alpha_sigma`, their derivatives `rates`, and `time_of`.

        lambda = 2 log(alpha / sigma),   lambda' = -2 D / (alpha sigma),   D = alpha sigma' - alpha' sigma > 0

    A subclass writes the three, or its `log_snr` as `NoiseSchedule` does; the rest is derived.

    Shapes: every method is elementwise: times of any shape in, float64 of that shape out. lambda may be +inf at t = 0
    (no noise) and -inf at t = 1 (no signal). `num_steps` is T for paths defined at t = i / T, None otherwise.
    Source: Lipman et al., "Flow matching for generative modeling", 2023, section 4; Ma et al., "SiT", 2024, section 2.

    Example:
        >>> LinearPath().log_snr_rate(torch.tensor(0.5))
        tensor(-8., dtype=torch.float64)
    """

    num_steps: int | None = None

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha, sigma) at t."""
        raise NotImplementedError

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha', sigma') at t."""
        raise NotImplementedError

    def time_of(self, log_snr: Tensor) -> Tensor:
        """The time at which lambda has this value."""
        raise NotImplementedError

    def log_snr(self, t: Tensor) -> Tensor:
        """lambda(t)."""
        alpha, sigma = self.alpha_sigma(t)
        return 2 * (torch.log(alpha) - torch.log(sigma))

    def log_snr_rate(self, t: Tensor) -> Tensor:
        """d lambda / dt."""
        (alpha, sigma), (alpha_rate, sigma_rate) = self.alpha_sigma(t), self.rates(t)
        return 2 * (alpha_rate / alpha - sigma_rate / sigma)

    def scale(self, t: Tensor) -> Tensor:
        """r(t): the path's own x_t is r times the noisy x that networks and samplers see."""
        return torch.hypot(*self.alpha_sigma(t))

    def sigma_bar(self, t: Tensor) -> Tensor:
        """sigma / alpha, the noise level of the variance-exploding view (EDM's sigma)."""
        return torch.exp(-self.log_snr(t) / 2)

    @property
    def end_points(self) -> tuple[float, float]:
        """(lambda(0), lambda(1))."""
        first, last = self.log_snr(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
        return first, last


class LinearPath(Path):
    """alpha = 1 - t, sigma = s + (1 - s) t: a straight line from each item to its noise, at constant velocity.

    Arguments:
        sigma_min: s, the noise left at t = 0.

    Errors: a sigma_min outside [0, 1).
    Source: Lipman et al. 2023, equation 20; with s = 0 Liu et al., "Flow straight and fast", 2023.

    Example:
        >>> path = LinearPath()
        >>> [round(float(t), 9) for t in path.time_of(path.log_snr(torch.tensor([0.0, 0.25, 1.0])))]
        [0.0, 0.25, 1.0]
    """

    def __init__(self, *, sigma_min: float = 0.0):
        super().__init__()
        if not 0 <= sigma_min < 1:
            raise InputError(f"sigma_min = {sigma_min}: choose a standard deviation from 0 up to below 1")
        self.sigma_min = float(sigma_min)

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = wide(t)
        return 1 - t, self.sigma_min + (1 - self.sigma_min) * t

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(wide(t))
        return -one, (1 - self.sigma_min) * one

    def time_of(self, log_snr: Tensor) -> Tensor:
        half = wide(log_snr) / 2
        left = self.sigma_min * torch.sigmoid(half)
        return (torch.sigmoid(-half) - left) / (1 - left)


def wide(value: Tensor | float) -> Tensor:
    """Times and log-SNRs in the precision that paths are computed in.

    Example:
        >>> wide(0.5)
        tensor(0.5000, dtype=torch.float64)
    """
    return torch.as_tensor(value).to(torch.float64)
