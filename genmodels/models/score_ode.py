"""The likelihood of a noise-conditional score model by its probability-flow ODE."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.diffusion import LinearLogSnrSchedule
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.process import alpha_sigma, expand
from genmodels.energy import NoiseConditionalScore
from genmodels.models.ode_likelihood import OdeLikelihood
from genmodels.random import KeyedGenerator


class ScoreAsDenoiser(nn.Module):
    """A field of scores at every noise level as the denoiser of a diffusion that scales its data down.

        y = x / alpha,   sigma_bar = sigma / alpha = exp(-lambda / 2)
        eps = -sigma_bar s(y, sigma_bar),   x0 = y - sigma_bar eps

    Arguments:
        core: the scores.
        largest, smallest: the noise levels sigma_bar it was trained on; the log-SNR is linear in time between them.

    Example:
        >>> exact = NoiseConditionalScore(lambda y, sigma, cond=None: -y / (1 + sigma[:, None] ** 2))  # of N(0, 1)
        >>> denoiser = ScoreAsDenoiser(exact, 50.0, 0.01)
        >>> found = denoiser(torch.tensor([[0.6]]), torch.tensor([0.5]))
        >>> abs(round(float(found.v), 6))  # of unit variance at every level nothing flows
        0.0
    """

    def __init__(self, core: NoiseConditionalScore, largest: float, smallest: float):
        super().__init__()
        self.core = core
        self.schedule = LinearLogSnrSchedule(log_snr_max=-2 * math.log(smallest), log_snr_min=-2 * math.log(largest))

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Prediction:
        log_snr = self.schedule.log_snr(t).to(x.device)
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        y, sigma_bar = x / alpha, torch.exp(-0.5 * log_snr)
        width = next((p.dtype for p in self.core.parameters()), x.dtype)
        score = self.core.score_at(y.to(width), sigma_bar.to(width), cond).to(x.dtype)
        eps = -expand(sigma_bar, x) * score
        x0 = y - expand(sigma_bar, x) * eps
        return Prediction(eps, sigma, x0=lambda: x0, eps=lambda: eps, v=lambda: alpha * eps - sigma * x0)


class ScoreOde(OdeLikelihood):
    """What a score model has instead of an energy: the density at its smallest noise level, by the probability flow.

        log p(x) = log p_0(z) + log |det dz/dx|,   z the encoded data, integers dequantised
        p at the largest level: N(0, (1 + largest^2) I)

    That density is of the data with the smallest noise on them. Source: Song et al., "Score-based generative modeling
    through stochastic differential equations", 2021, section 4.3.
    """

    def _denoiser(self, weights: str | float) -> ScoreAsDenoiser:
        return ScoreAsDenoiser(self.weights(weights), float(self.largest), self.smallest)

    def _first_log_snr(self) -> float:
        return -2 * math.log(self.smallest)

    def _start(
        self, denoiser, x: Tensor, mask: Tensor | None, cond: Tensor | None, noise: KeyedGenerator, dequantisation: str,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """alpha_0 z, and how volumes change till there."""
        z, volume = self.encoding(x, noise.child("dequantise"))
        first = torch.tensor(self._first_log_snr(), dtype=torch.float64, device=x.device)
        alpha, _ = alpha_sigma(first)
        return alpha * z.double(), volume.double() + self.spec.dims * torch.log(alpha)
