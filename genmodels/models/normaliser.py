"""log Z of an energy model for its likelihood: by quadrature, by annealed importance sampling, or not at all."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from genmodels.energy import HMC, AnnealedImportanceSampling, EnergyFunction, GaussianBase, quadrature
from genmodels.errors import RunError
from genmodels.models.encoding import covariance_shape
from genmodels.random import KeyedGenerator

#: Half-widths of the boxes that are tried until nothing is left outside, in standard deviations of the data.
_BOXES = (8.0, 12.0, 18.0, 27.0, 40.0)
_EDGE = 1e-9
_BROAD = 2.0  # the base has so many times the covariance of the data


@dataclass(frozen=True)
class Normaliser:
    """What is known of log Z.

    Arguments:
        log_z: its value; 0 where there is none.
        kind: the kind of likelihood it leaves: `exact`, `ais` or `unnormalised`.
        made: how it was made, plain values; `reason` where there is none.
    """

    log_z: float
    kind: str
    made: dict = field(default_factory=dict)

    @classmethod
    def missing(cls, reason: str) -> Normaliser:
        """No log Z, and why.

        Example:
            >>> Normaliser.missing("not asked for").kind
            'unnormalised'
        """
        return cls(0.0, "unnormalised", {"estimate": "energy alone", "reason": reason})


def by_quadrature(model: EnergyFunction, dims: int) -> Normaliser:
    """log Z in one or two dimensions, on a box that is widened until the density at its edge is negligible.

    Raises:
        RunError: when exp(-E) does not fall off.
    """
    device = next(model.parameters()).device
    precise = copy.deepcopy(model).double()
    for half in _BOXES:
        found = quadrature(precise, [(-half, half)] * dims, tolerance=1e-7, device=device)
        if found.edge < _EDGE:
            made = {"estimate": "quadrature", "log_z": found.log_z, "log_z_error": float(found.error), "box": half}
            return Normaliser(found.log_z, "exact", made)
    raise RunError(f"exp(-E) does not fall off within {_BOXES[-1]:g} standard deviations: train longer, or with noise")


def by_annealing(
    model: EnergyFunction, base: GaussianBase, generator: KeyedGenerator, *, chains: int, steps: int
) -> Normaliser:
    """log Z by annealed importance sampling in both directions, with its bracket."""
    mass = inverse_mass(base)
    ais = AnnealedImportanceSampling(steps=steps, kernel=HMC(inverse_mass=mass), reverse_steps=max(steps, 20))
    dtype = next(model.parameters()).dtype
    found = ais(model, base, generator, chains=chains, dtype=dtype)
    made = {"estimate": "annealed importance sampling", **found.made()}
    return Normaliser(found.log_z, "ais", made)


def base_of(mean: Tensor, covariance: Tensor) -> GaussianBase:
    """The broad normal density of the data: twice their covariance, all of it or its diagonal."""
    if covariance.dim() == 1:
        covariance = covariance.diag()
    covariance = _BROAD * covariance
    floor = 1e-6 * covariance.diagonal().max() * torch.eye(len(covariance), dtype=torch.float64, device=mean.device)
    return GaussianBase(mean, covariance + floor)


def unit_covariance(dims: int) -> Tensor:
    """The covariance before any data have been seen."""
    shape = covariance_shape(dims)
    return torch.ones(shape, dtype=torch.float64) if len(shape) == 1 else torch.eye(dims, dtype=torch.float64)


def inverse_mass(base: GaussianBase) -> Tensor:
    """(*event) variances of the data, the inverse masses of Hamiltonian moves."""
    variances = base.lower.square().sum(1) / _BROAD
    return variances.view_as(base.mean)
