"""Denoisers whose answers are changed for sampling: they fit wherever a denoiser does, but have no likelihood."""

from __future__ import annotations

from torch import Tensor

from genmodels.diffusion.parameterisation import Prediction
from genmodels.errors import InputError


class AlteredDenoiser:
    """A denoiser around another; a subclass defines `forward`.

    Arguments:
        denoiser: a `Denoiser`, or anything called like one, with a schedule and a parameterisation.
    """

    #: What was done to the denoiser, in the words of the error.
    alteration: str

    def __init__(self, denoiser):
        self.denoiser = denoiser
        self.schedule, self.parameterisation = denoiser.schedule, denoiser.parameterisation
        self.self_conditioning = getattr(denoiser, "self_conditioning", False)

    def __call__(
        self, x: Tensor, t: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, **estimate: Tensor
    ) -> Prediction:
        return self.forward(x, t, cond, mask, **estimate)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None, mask: Tensor | None, **estimate: Tensor) -> Prediction:
        """The changed prediction."""
        raise NotImplementedError


def require_unaltered(denoiser) -> None:
    """Raise where a likelihood is asked of a denoiser that was changed for sampling.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, GuidedDenoiser, require_unaltered
        >>> import torch
        >>> guided = GuidedDenoiser(GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0), 3.0, null=10)
        >>> require_unaltered(guided)
        Traceback (most recent call last):
        ...
        genmodels.errors.InputError: a guided denoiser has no likelihood: ask the denoiser itself
    """
    if isinstance(denoiser, AlteredDenoiser):
        raise InputError(f"a {denoiser.alteration} denoiser has no likelihood: ask the denoiser itself")
