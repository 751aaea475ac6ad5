"""The three kinds of terms in the variational bound, each for one noise level, in nats per example and in float64.

    -log p(x_0) <= L = KL(q(x_T|x_0) || N(0, I)) + sum_k KL(q(x_s|x_t, x_0) || p(x_s|x_t)) - E log p(x_0|x_{t_0})

Source: Ho et al. 2020, equation 5; Kingma et al. 2021, equation 11.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.diffusion.decoder import Decoder
from genmodels.diffusion.masks import event_sum
from genmodels.diffusion.process import Variance, alpha_sigma, expand, posterior


def prior_term(x0: Tensor, log_snr: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,) KL(q(x_T | x_0) || N(0, I)): per scalar 1/2 (alpha^2 x^2 + sigma^2 - 1 - log sigma^2).

    Example:
        >>> prior_term(torch.ones(1, 1), torch.tensor(0.0, dtype=torch.float64))  # 1/2 log 2
        tensor([0.3466], dtype=torch.float64)
    """
    log_snr = log_snr.to(x0.device, torch.float64)
    # sigma^2 - 1 = -alpha^2, and log sigma^2 = logsigmoid(-lambda) keeps its digits where alpha^2 is tiny
    alpha2, log_sigma2 = torch.sigmoid(log_snr), torch.nn.functional.logsigmoid(-log_snr)
    per_scalar = (expand(alpha2, x0.double()) * (x0.double().square() - 1) - expand(log_sigma2, x0.double())) / 2
    return event_sum(per_scalar, mask)


def diffusion_term(
    x0: Tensor,
    x0_hat: Tensor,
    log_snr_s: Tensor,
    log_snr_t: Tensor,
    variance: Variance,
    mask: Tensor | None = None,
) -> Tensor:
    """(B,) KL(q(x_s | x_t, x_0) || p(x_s | x_t)) where x_0 was predicted as x0_hat from x_t.

        per scalar 1/2 (v/s2 - 1 - log(v/s2) + c_0^2 (x_0 - x0_hat)^2 / s2),   s2 the model variance

    With s2 = v this is 1/2 (SNR_s - SNR_t) (x_0 - x0_hat)^2. Shapes: x0 and x0_hat (B, *event), log-SNRs (B,), s2 (B,)
    or (B, *event).
    """
    c_0, _, v = posterior(log_snr_s, log_snr_t)
    error = x0.double() - x0_hat.double()
    c_0, v, s2 = (per_scalar(value, error) for value in (c_0, v, variance(log_snr_s, log_snr_t)))
    excess = v / s2 - 1
    return event_sum(excess - torch.log1p(excess) + (c_0 * error).square() / s2, mask) / 2


def reconstruction_term(
    x0: Tensor,
    x: Tensor,
    x0_hat: Tensor,
    log_snr: Tensor,
    decoder: Decoder,
    variance: Variance,
    mask: Tensor | None = None,
) -> Tensor:
    """(B,) -log p(x_0 | x_{t_0}): the decoder at what it reads of the noisy x, x_{t_0}, or of the estimate x0_hat."""
    mean, scale = decoder_input(decoder, x, x0_hat, log_snr, variance)
    return event_sum(-decoder.log_prob(x0.double(), mean, scale), mask)


def decoder_input(
    decoder: Decoder, x: Tensor, x0_hat: Tensor, log_snr: Tensor, variance: Variance
) -> tuple[Tensor, Tensor]:
    """Mean and scale of a decoder: x0_hat and that of the last kernel, or x/alpha and sigma/alpha (`reads_noisy`)."""
    if getattr(decoder, "reads_noisy", False):
        alpha, _ = alpha_sigma(log_snr.to(x.device))
        return x.double() / expand(alpha, x), expand(torch.exp(-0.5 * log_snr.to(x.device)), x)
    mean = x0_hat.double()
    return mean, per_scalar(clean_scale(log_snr, variance), mean)


def clean_scale(log_snr: Tensor, variance: Variance) -> Tensor:
    """Standard deviation of the kernel from this log-SNR to the clean end; sigma_t for both fixed variances."""
    return variance(torch.full_like(log_snr, torch.inf), log_snr).sqrt()


def per_scalar(value: Tensor, like: Tensor) -> Tensor:
    """A value for each example, (B,) or (), or for each of its scalars, (B, *event), ready to meet `like`."""
    return value if value.dim() == like.dim() else expand(value, like)
