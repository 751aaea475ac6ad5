"""The likelihood of a diffusion model by its probability-flow ODE: where its paths start."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.diffusion.masks import event_size, event_sum, hide
from genmodels.diffusion.ode import standard_normal
from genmodels.diffusion.process import alpha_sigma, sigma2_ts
from genmodels.diffusion.terms import reconstruction_term
from genmodels.models.ode_likelihood import OdeLikelihood
from genmodels.random import KeyedGenerator


class DiffusionOde(OdeLikelihood):
    """What a diffusion model adds to its bound: the density p_0 of its probability-flow ODE, at the noise level
    lambda_0 where the bound has its reconstruction.

        continuous data           log p(x) = log p_0(alpha_0 x) + D log alpha_0
        integers, `uniform`       w = log p_0(alpha_0 y) + D log (alpha_0 width),   y = x + width (u - 1/2)
        integers, `diffusion`     w = log p_0(x_0) - log q(x_0 | x) + log P(x | x_0),   x_0 ~ q(x_0 | x)
        nats = log (1/K) sum_k exp(w_k)

    The first line is a normalised density: that of the data as the model sees them at lambda_0, slightly blurred. The
    others bound the log-mass of the integers from below in the mean over the noise, as far as the ODE is solved and
    the divergence is exact; `diffusion` takes the model's own forward process for the noise and its decoder for the way
    back.
    """

    dequantisations = ("uniform", "diffusion")

    def _denoiser(self, weights: str | float):
        return self.weights(weights)

    def _start(
        self, denoiser, x: Tensor, mask: Tensor | None, cond: Tensor | None, noise: KeyedGenerator, dequantisation: str,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """alpha_0 x or x_0, and how volumes change till there."""
        x = hide(self.encode(x), mask)
        first = torch.tensor(self._first_log_snr(), dtype=torch.float64, device=x.device)
        (alpha, sigma), size = alpha_sigma(first), event_size(x, mask)
        levels, x = self.spec.levels, x.double()
        if levels is not None and dequantisation == "diffusion":
            eps = hide(noise.child("dequantise").normal(x.shape, dtype=torch.float64), mask)
            start = alpha * x + sigma * eps
            t = denoiser.schedule.time_of(first).to(x.device).expand(len(x))
            x0_hat = torch.cat([
                denoiser(*(None if v is None else v[part] for v in (start, t, cond, mask))).x0
                for part in (slice(i, i + rows) for i in range(0, len(x), rows))
            ])
            decoded = -reconstruction_term(x, start, x0_hat, first[None], self.decoder, sigma2_ts, mask)
            volume = decoded - (standard_normal(eps, mask) - size * torch.log(sigma))
        else:
            width = 2 / (levels - 1) if levels is not None else 1.0
            if levels is not None:
                u = noise.child("dequantise").uniform(x.shape, dtype=torch.float64)
                x = x + width * (u - 0.5)
            start, volume = alpha * x, size * (torch.log(alpha) + math.log(width))
        if levels is None:
            volume = volume - self._log_scale(mask)
        return start, volume

    def _first_log_snr(self) -> float:
        """Where the bound has its reconstruction, the cleanest level that the model is read at."""
        return float(self.core.schedule.log_snr(self.bound_times()[:1])[0])

    def _log_scale(self, mask: Tensor | None) -> Tensor:
        """log |det| of the map from standardised to continuous data, over the valid scalars of each item."""
        log_scale = self.scale.double().log()
        return log_scale.sum() if mask is None else event_sum(log_scale.expand(len(mask), *log_scale.shape), mask)
