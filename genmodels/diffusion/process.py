"""The forward process and its posterior between two noise levels s < t, as functions of their log-SNRs.

    alpha_ts = alpha_t / alpha_s,   sigma2_ts = sigma_t^2 - alpha_ts^2 sigma_s^2 = -sigma_t^2 expm1(lambda_t - lambda_s)
    q(x_t | x_0) = N(alpha_t x_0, sigma_t^2 I),   q(x_t | x_s) = N(alpha_ts x_s, sigma2_ts I)
    q(x_s | x_t, x_0) = N(c_0 x_0 + c_t x_t, v I)

With s = t - 1/T these are DDPM's: sigma2_ts = beta_i, v = beta_tilde_i (Ho et al. 2020, equations 4, 6 and 7). The
clean end is log-SNR = +inf; all log-SNRs are float64 of any shape, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from genmodels.errors import InputError


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


def expand(value: Tensor, like: Tensor) -> Tensor:
    """One value per example, (B,) or (), shaped to multiply (B, *event), on its device and in its dtype."""
    return value.to(like.device, torch.promote_types(like.dtype, torch.float32)).reshape(-1, *[1] * (like.dim() - 1))


def _beta_tilde(log_snr_s: Tensor, log_snr_t: Tensor) -> Tensor:
    """`posterior_variance`, but `sigma2_ts` where s is the clean end and the posterior is a point."""
    clean = torch.isposinf(log_snr_s)
    return torch.where(clean, sigma2_ts(log_snr_s, log_snr_t), posterior_variance(log_snr_s, log_snr_t))


Variance = Callable[[Tensor, Tensor], Tensor]

#: Fixed variances of the model's kernel p(x_s | x_t), as functions (log_snr_s, log_snr_t) -> variance.
VARIANCES: dict[str, Variance] = {"beta": sigma2_ts, "beta_tilde": _beta_tilde}


def variance_function(variance: str | Variance) -> Variance:
    """The function of a name in VARIANCES; a function (log_snr_s, log_snr_t) -> variance is returned as it is."""
    if callable(variance):
        return variance
    if variance not in VARIANCES:
        raise InputError(f"variance = {variance!r}: choose one of {', '.join(VARIANCES)}")
    return VARIANCES[variance]
