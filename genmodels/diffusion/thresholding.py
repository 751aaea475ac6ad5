"""Estimates of x_0 kept in the range of the data while sampling; never part of a likelihood."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from genmodels.diffusion.altered import AlteredDenoiser
from genmodels.diffusion.parameterisation import X0, Prediction
from genmodels.errors import InputError

Threshold = Callable[[Tensor], Tensor]


def static(x0: Tensor) -> Tensor:
    """Clip to [-1, 1].

    Example:
        >>> static(torch.tensor([[-3.0, 0.5]]))
        tensor([[-1.0000,  0.5000]])
    """
    return x0.clamp(-1, 1)


def dynamic(x0: Tensor, percentile: float = 0.995) -> Tensor:
    """Clip to [-s, s] and divide by s, where s is a percentile of |x_0| in each example, at least 1.

    Source: Saharia et al., "Photorealistic text-to-image diffusion models", 2022, section 2.3.

    Example:
        >>> dynamic(torch.tensor([[-3.0, 1.5], [0.5, -0.5]]), 1.0)
        tensor([[-1.0000,  0.5000],
                [ 0.5000, -0.5000]])
    """
    s = torch.quantile(x0.flatten(1).abs(), percentile, dim=1).clamp(min=1).reshape(-1, *[1] * (x0.dim() - 1))
    return x0.clamp(-s, s) / s


#: Names of thresholds; data in [-1, 1] is what they are for.
THRESHOLDS: dict[str, Threshold] = {"static": static, "dynamic": dynamic}


class ThresholdedDenoiser(AlteredDenoiser):
    """A denoiser whose estimate of x_0 is kept in range; eps, v and score follow from the new estimate.

    Arguments:
        denoiser: the denoiser.
        threshold: a name in THRESHOLDS, or a function of x_0 (B, *event).

    Errors: an unknown name.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> far = GaussianDenoiser(CosineSchedule(), torch.full((2,), 3.0), 0.01)
        >>> ThresholdedDenoiser(far, "static")(torch.zeros(1, 2), torch.tensor([1.0])).x0
        tensor([[1., 1.]])
    """

    alteration = "thresholded"

    def __init__(self, denoiser, threshold: str | Threshold = "static"):
        super().__init__(denoiser)
        if not callable(threshold) and threshold not in THRESHOLDS:
            raise InputError(f"threshold = {threshold!r}: choose one of {', '.join(THRESHOLDS)}")
        self.threshold = threshold if callable(threshold) else THRESHOLDS[threshold]

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None, mask: Tensor | None, **estimate: Tensor) -> Prediction:
        prediction = self.denoiser(x, t, cond, mask, **estimate)
        return X0().to_prediction(self.threshold(prediction.x0), x, self.schedule.log_snr(t), prediction.nu)
