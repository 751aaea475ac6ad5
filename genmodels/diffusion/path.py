"""Gaussian probability paths from data to noise, and the forward process with its posterior between two noise levels.

    x_t = alpha(t) x_0 + sigma(t) eps,   velocity u = alpha'(t) x_0 + sigma'(t) eps,   log SNR = 2 log(alpha/sigma)

Two paths of equal SNR differ by a scale alone: x_t / r with r^2 = alpha^2 + sigma^2 is the noisy x of the
variance-preserving diffusion at that log-SNR. Networks, samplers and likelihoods work on x_t / r, hence on every path.
Between two levels s < t, as functions of their log-SNRs:

    alpha_ts = alpha_t / alpha_s,   sigma2_ts = sigma_t^2 - alpha_ts^2 sigma_s^2 = -sigma_t^2 expm1(lambda_t - lambda_s)
    q(x_t | x_0) = N(alpha_t x_0, sigma_t^2 I),   q(x_t | x_s) = N(alpha_ts x_s, sigma2_ts I)
    q(x_s | x_t, x_0) = N(c_0 x_0 + c_t x_t, v I)

With s = t - 1/T these are DDPM's: sigma2_ts = beta_i, v = beta_tilde_i (Ho et al. 2020, equations 4, 6 and 7). The
clean end is log-SNR = +inf; all log-SNRs are float64 of any shape, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from genmodels.core.errors import InputError, one_of

#: Stands for log-SNR -inf (no signal) at the end of a schedule; cutting there costs under 1e-8 nats.
NOISIEST = -20.0


class Path(nn.Module):
    """A path on [0, 1], given by `alpha_sigma`, its derivatives `rates`, and `time_of`; the rest is derived.

        lambda = 2 log(alpha / sigma),   lambda' = -2 D / (alpha sigma),   D = alpha sigma' - alpha' sigma > 0

    A subclass defines these three, or `log_snr` as a `NoiseSchedule`.

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
        """r(t): x_t of this path is r times the noisy x of networks and samplers."""
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
        t = in_float64(t)
        return 1 - t, self.sigma_min + (1 - self.sigma_min) * t

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(in_float64(t))
        return -one, (1 - self.sigma_min) * one

    def time_of(self, log_snr: Tensor) -> Tensor:
        half = in_float64(log_snr) / 2
        left = self.sigma_min * torch.sigmoid(half)
        return (torch.sigmoid(-half) - left) / (1 - left)


def in_float64(value: Tensor | float) -> Tensor:
    """Times and log-SNRs in float64, the precision of paths.

    Example:
        >>> in_float64(0.5)
        tensor(0.5000, dtype=torch.float64)
    """
    return torch.as_tensor(value, dtype=torch.float64)


def alpha_sigma(log_snr: Tensor) -> tuple[Tensor, Tensor]:
    """(alpha, sigma): log alpha = logsigmoid(lambda) / 2, log sigma = logsigmoid(-lambda) / 2.

    Example:
        >>> alpha_sigma(torch.tensor([float("inf"), 0.0, -float("inf")], dtype=torch.float64))[0].tolist()
        [1.0, 0.7071067811865476, 0.0]
    """
    return torch.exp(logsigmoid(log_snr) / 2), torch.exp(logsigmoid(-log_snr) / 2)


def alpha_ts(log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
    """alpha_t / alpha_s, the signal kept from s to t."""
    return torch.exp((logsigmoid(log_snr_t) - logsigmoid(log_snr_s)) / 2)


def sigma2_ts(log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
    """-sigma_t^2 expm1(lambda_t - lambda_s), the variance added from s to t (DDPM's beta)."""
    return -torch.sigmoid(-log_snr_t) * torch.expm1(log_snr_t - log_snr_s)


def posterior_variance(log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
    """v = sigma2_ts sigma_s^2 / sigma_t^2 (DDPM's beta_tilde); 0 at the clean end."""
    return -torch.sigmoid(-log_snr_s) * torch.expm1(log_snr_t - log_snr_s)


def posterior(log_snr_s: Tensor, log_snr_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(c_0, c_t, v) of q(x_s | x_t, x_0) = N(c_0 x_0 + c_t x_t, v I).

        c_0 = alpha_s sigma2_ts / sigma_t^2,  c_t = alpha_ts sigma_s^2 / sigma_t^2,  v = sigma2_ts sigma_s^2 / sigma_t^2

    Example:
        >>> c_0, c_t, v = posterior(torch.tensor(float("inf")), torch.tensor(0.0))  # to the clean end: x_0 itself
        >>> float(c_0), float(c_t), float(v)
        (1.0, 0.0, 0.0)
    """
    c_0 = -torch.exp(logsigmoid(log_snr_s) / 2) * torch.expm1(log_snr_t - log_snr_s)
    shrink = torch.exp(logsigmoid(-log_snr_s) - logsigmoid(-log_snr_t))
    return c_0, alpha_ts(log_snr_s, log_snr_t) * shrink, posterior_variance(log_snr_s, log_snr_t)


def q_sample(x0: Tensor, log_snr: Tensor, noise: Tensor) -> Tensor:
    """x_t = alpha_t x_0 + sigma_t noise; x0 and noise (B, *event), log_snr (B,).

    Example:
        >>> q_sample(torch.ones(1, 2), torch.zeros(1), torch.zeros(1, 2))
        tensor([[0.7071, 0.7071]])
    """
    alpha, sigma = alpha_sigma(log_snr)
    return expand(alpha, x0) * x0 + expand(sigma, x0) * noise


def renoise(x: Tensor, log_snr_s: Tensor, log_snr_t: Tensor, noise: Tensor) -> Tensor:
    """A draw of q(x_t | x_s): alpha_ts x + sqrt(sigma2_ts) noise; x and noise (B, *event), log-SNRs (B,) or ().

    Example:
        >>> s, t = torch.tensor([float("inf"), 0.0], dtype=torch.float64)
        >>> renoise(torch.ones(1, 2), s, t, torch.zeros(1, 2))  # from the clean end it is q_sample
        tensor([[0.7071, 0.7071]])
    """
    kept, added = alpha_ts(log_snr_s, log_snr_t), sigma2_ts(log_snr_s, log_snr_t).sqrt()
    return expand(kept, x) * x + expand(added, x) * noise


def expand(value: Tensor, like: Tensor) -> Tensor:
    """One value per example, (B,) or (), shaped to multiply (B, *event), on its device and in its dtype."""
    return value.to(like.device, torch.promote_types(like.dtype, torch.float32)).reshape(-1, *[1] * (like.dim() - 1))


def _beta_tilde(log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
    """`posterior_variance`, but `sigma2_ts` where s is the clean end, at which the posterior variance is 0."""
    clean = torch.isposinf(log_snr_s)
    return torch.where(clean, sigma2_ts(log_snr_s, log_snr_t), posterior_variance(log_snr_s, log_snr_t))


Variance = Callable[[Tensor, Tensor], Tensor]

#: Fixed variances of the model's kernel p(x_s | x_t), as functions (log_snr_s, log_snr_t) -> variance.
VARIANCES: dict[str, Variance] = {"beta": sigma2_ts, "beta_tilde": _beta_tilde}


def variance_function(variance: str | Variance) -> Variance | Literal["learned"]:
    """The function of a name in VARIANCES; a function is returned as it is, and so is "learned" (`kernel_variance`)."""
    if callable(variance) or variance == "learned":
        return variance
    one_of("variance", variance, (*VARIANCES, "learned"))
    return VARIANCES[variance]


def learned_variance(nu: Tensor, log_snr_s: Tensor, log_snr_t: Tensor, log_snr_after: Tensor | None = None) -> Tensor:
    """log s2 = nu log beta + (1 - nu) log beta_tilde, for each scalar (Nichol and Dhariwal 2021, equation 15).

    Where s is the clean end beta_tilde is 0; the next step's, from `log_snr_after` down to t, takes its place.
    Shapes: nu (B, *event), the log-SNRs (B,) or (); float64 (B, *event).

    Example:
        >>> s, t = torch.tensor([2.0, 0.0], dtype=torch.float64)
        >>> ends = learned_variance(torch.tensor([[0.0], [1.0]]), s, t).flatten()
        >>> bool(torch.allclose(ends, torch.stack([posterior_variance(s, t), sigma2_ts(s, t)])))
        True
    """
    beta, beta_tilde = sigma2_ts(log_snr_s, log_snr_t), _beta_tilde(log_snr_s, log_snr_t)
    if log_snr_after is not None:
        beta_tilde = torch.where(torch.isposinf(log_snr_s), posterior_variance(log_snr_t, log_snr_after), beta_tilde)
    nu = nu.double()
    return torch.exp(nu * expand(torch.log(beta), nu) + (1 - nu) * expand(torch.log(beta_tilde), nu))


def kernel_variance(
    variance: Variance | Literal["learned"], nu: Tensor | None, log_snr_after: Tensor | None = None
) -> Variance:
    """The variance of p(x_s | x_t) as a function of the log-SNRs; a learned one from the nu of the network.

    Errors: a learned variance without nu.
    """
    if variance != "learned":
        return variance_function(variance)
    if nu is None:
        raise InputError("this denoiser gives no variance: build it with learned_variance, or take beta")
    return lambda log_snr_s, log_snr_t: learned_variance(nu, log_snr_s, log_snr_t, log_snr_after)
