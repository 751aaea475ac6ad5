"""Mels around the means of their texts by annealed Langevin, along the scores of any denoiser."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.diffusion import Denoiser, NoiseSchedule, alpha_sigma
from genmodels.energy import NoiseConditionalScore, annealed_langevin
from genmodels.random import KeyedGenerator
from genmodels.speech.glow_tts import Latent

FINEST = 10.0  # log-SNR of the last level at most: a hundred and fiftieth of the deviation of the data
_NOISIEST = -12.0  # log-SNR of the first level at least: the data are lost in four hundred times their deviation
_LEVELS = 50  # where nobody says
_FEWEST = 10  # levels; fewer leave noise of one level in the next
_EACH = 2  # Langevin steps at each of them
_STEP = 1.0  # step size over the squared noise level: a tenth of it, as is usual, needs ten times as many levels


class Unscaled(NoiseConditionalScore):
    """The scores of a denoiser as those of data with noise added and nothing scaled down, for annealed Langevin.

        y = x/alpha,   sigma_bar = sigma/alpha = exp(-lambda/2),   score(y) = -eps/sigma_bar

    Arguments:
        denoiser: predicts at any log-SNR lambda.
        mask: `(B, 1, T)`, of the valid frames, or None.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1, 1), 3.0)
        >>> y = torch.ones(1, 1, 2, dtype=torch.float64)
        >>> Unscaled(exact).score_at(y, torch.ones(1).double()).flatten().tolist()  # -y/(3 + 1)
        [-0.25, -0.25]
    """

    def __init__(self, denoiser: nn.Module, mask: Tensor | None = None):
        super().__init__(denoiser)
        self.mask = mask

    def score_at(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        log_snr = -2 * torch.log(sigma.double())
        alpha, _ = alpha_sigma(log_snr)
        column = (-1, *(1,) * (x.dim() - 1))
        eps = self.network.at_log_snr(x * alpha.to(x).view(column), log_snr, cond, self.mask).eps
        return -eps / sigma.view(column)


def langevin_levels(schedule: NoiseSchedule, steps: int | None = None) -> list[float]:
    """The noise levels sigma/alpha of annealed Langevin, geometric from that of t = 1 down.

    Raises:
        ValueError: for fewer than ten.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> levels = langevin_levels(CosineSchedule(), 10)
        >>> len(levels), round(levels[0], 1), round(levels[-1], 4)
        (10, 403.4, 0.0067)
    """
    steps = _LEVELS if steps is None else steps
    if steps < _FEWEST:
        raise ValueError(f"steps must be at least {_FEWEST} noise levels for annealed_langevin, got {steps}: "
                         "sampler=dpmpp_2m takes fewer")
    ends = schedule.log_snr(torch.tensor([1.0, 0.0], dtype=torch.float64)).clamp(_NOISIEST, FINEST)
    return torch.exp(-0.5 * torch.linspace(*ends.tolist(), steps, dtype=torch.float64)).tolist()


def by_langevin(
    denoiser: Denoiser, levels: list[float], mean: Latent, beside: Tensor, generator: KeyedGenerator,
    temperature: float,
) -> tuple[Tensor, int]:
    """What is drawn around the means from N(0, temperature^2 I) down, and the evaluations of the network it took."""
    u = annealed_langevin(
        Unscaled(denoiser, mean.mask), mean.z.shape, levels, generator, cond=beside, steps_per_level=_EACH,
        step=_STEP * levels[-1] ** 2, temperature=temperature, dtype=mean.z.dtype, device=mean.z.device,
    )
    return u, len(levels) * _EACH + 1
