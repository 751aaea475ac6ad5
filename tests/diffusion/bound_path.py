"""The path form of the bound: what it is before any expectation is taken, on one path from the data to noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.errors import InputError
from genmodels.diffusion.bound import check_grid, decoder_input, per_scalar
from genmodels.diffusion.decoder import Decoder, Gaussian
from genmodels.diffusion.guidance import require_unaltered
from genmodels.diffusion.path import (
    Variance,
    alpha_ts,
    expand,
    kernel_variance,
    posterior,
    sigma2_ts,
    variance_function,
)


@dataclass
class PathTerms:
    """The path form of the bound on one path: total = prior + transitions.sum(1), in nats.

    `prior (B,)` is -log p(x_T); `transitions (B, T)` are log q(x_i | x_{i-1}) - log p(x_{i-1} | x_i), i = 1..T.
    """

    prior: Tensor
    transitions: Tensor

    @property
    def total(self) -> Tensor:
        """(B,) L on this path; its mean over q is the bound."""
        return self.prior + self.transitions.sum(1)


@torch.no_grad()
def path_terms(
    denoiser,
    path: list[Tensor] | Tensor,
    times: Tensor,
    *,
    decoder: Decoder | None = None,
    prior: Callable[[Tensor], Tensor] | None = None,
    cond: Tensor | None = None,
    variance: Literal["beta", "beta_tilde", "learned"] | Variance = "beta",
) -> PathTerms:
    """The bound before any expectation is taken, on a given path x_0, ..., x_T.

        L = -log p(x_T) - sum_{i >= 1} log p(x_{i-1} | x_i) / q(x_i | x_{i-1})

    Arguments:
        path: T + 1 tensors (B, *event): the data, then x at each of the T `times` (increasing, as for `elbo`).
        decoder: p(x_0 | x_1), a density by default.
        prior: log p(x_T) (B, *event) -> (B,), standard normal by default.
        variance: variance of the model's kernels.

    Source: Ho et al. 2020, equation 3.

    Example:
        >>> from genmodels.diffusion import GaussianDenoiser, LinearLogSnrSchedule
        >>> denoiser = GaussianDenoiser(LinearLogSnrSchedule(), torch.zeros(1), 1.0)
        >>> path = torch.randn(4, 5, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # any path
        >>> times = torch.tensor([0.2, 0.6, 1.0])
        >>> terms = path_terms(denoiser, path, times, variance=denoiser.reverse_variance)
        >>> bool((terms.total + denoiser.log_prob(path[0])).abs().max() < 1e-9)
        True
    """
    require_unaltered(denoiser)
    decoder, gaussian = decoder or Gaussian(), Gaussian()
    times = times.to(path[0].device, torch.float64)
    log_snr = check_grid(denoiser.schedule, times)
    if len(path) != len(times) + 1:
        raise InputError(f"a path over {len(times)} times has {len(times) + 1} points, not {len(path)}")
    model_variance = variance_function(variance)
    last = path[-1].double()
    log_prior = prior(path[-1]) if prior is not None else _sum(gaussian, last, torch.zeros(()), torch.ones(()))
    transitions = []
    for i in range(1, len(path)):
        before, x = path[i - 1].double(), path[i].double()
        t = log_snr[i - 1 : i]
        s = log_snr[i - 2 : i - 1] if i > 1 else torch.full_like(t, torch.inf)
        prediction = denoiser(path[i], times[i - 1].expand(len(x)), cond)
        x0_hat, s2 = prediction.x0.double(), kernel_variance(model_variance, prediction.nu, log_snr[1])
        forward = _sum(gaussian, x, expand(alpha_ts(s, t), x) * before, sigma2_ts(s, t).sqrt())
        if i == 1:
            backward = _sum(decoder, before, *decoder_input(decoder, x, x0_hat, t, s2))
        else:
            c_0, c_t, _ = posterior(s, t)
            mean = expand(c_0, x) * x0_hat + expand(c_t, x) * x
            backward = _sum(gaussian, before, mean, s2(s, t).sqrt())
        transitions.append(forward - backward)
    return PathTerms(-log_prior.double(), torch.stack(transitions, 1))


def _sum(decoder: Decoder, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return decoder.log_prob(x, mean.to(x), per_scalar(scale, x)).flatten(1).sum(1)
