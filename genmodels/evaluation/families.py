"""Which family a model is of, by what it offers: checks and figures ask this, never for a class of `models`."""

from __future__ import annotations

from genmodels.flows.flow import Flow
from genmodels.models.base import GenerativeModel


def is_flow(model: GenerativeModel) -> bool:
    """Whether the model is a normalizing flow: its core has a `flow`, whose layers can be looked at one by one.

    Example:
        >>> from genmodels.data.spec import DataSpec
        >>> from genmodels.models.oracle import GaussianEnergy, GaussianFlow
        >>> models = [kind(DataSpec("line", (1,)), mean=[0.0], covariance=[[1.0]]) for kind in
        ...           (GaussianFlow, GaussianEnergy)]
        >>> [is_flow(model) for model in models], [is_energy(model) for model in models]
        ([True, False], [False, True])
    """
    return isinstance(getattr(model.core, "flow", None), Flow)


def is_diffusion(model: GenerativeModel) -> bool:
    """Whether the model is a diffusion with a bound: its core has a `schedule`, and it has the times of a bound.

    Example:
        >>> from genmodels.data.spec import DataSpec
        >>> from genmodels.models.oracle import GaussianDiffusion
        >>> is_diffusion(GaussianDiffusion(DataSpec("line", (1,)), mean=[0.0], covariance=[[1.0]], num_steps=4))
        True
    """
    return hasattr(model, "bound_times") and hasattr(model.core, "schedule")


def is_energy(model: GenerativeModel) -> bool:
    """Whether the model is an energy: its core has one, and the model can look for its constant."""
    return hasattr(model, "normaliser") and hasattr(model.core, "energy")
