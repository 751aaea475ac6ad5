"""Samples and log Z of an energy-based model: chains annealed from a broad Gaussian, or run at the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError, at_least, check_number, one_of
from genmodels.core.random import KeyedGenerator
from genmodels.energy import (
    HMC,
    KERNELS,
    AnnealedImportanceSampling,
    EnergyFunction,
    GaussianBase,
    LogDensity,
    Start,
    quadrature,
    run_chains,
)
from genmodels.models.score_matching import MOST_PAIRS

#: Half-widths of the boxes of quadrature in standard deviations of the data, of which the first is taken with a density
#: below _EDGE at its border, relative to the largest.
_BOXES = (8.0, 12.0, 18.0, 27.0, 40.0)
_EDGE = 1e-9
_BROAD = 2.0  # ratio of the base's covariance to that of the data


@dataclass(frozen=True)
class Normaliser:
    """An estimate of log Z.

    Arguments:
        log_z: its value, 0 if there is none.
        kind: the kind of the resulting likelihood: `exact`, `ais` or `unnormalised`.
        made: how it was computed, plain values; the `reason` if there is none.
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


def by_quadrature(model: EnergyFunction, event_shape: tuple[int, ...]) -> Normaliser:
    """log Z of events of one or two numbers, on a box that is widened until the density at its edge is negligible.

    Raises:
        RunError: when exp(-E) does not fall off.
    """
    device = next(model.parameters()).device
    precise, dims = copy.deepcopy(model).double(), math.prod(event_shape)
    of_points = LogDensity(lambda x: -precise.energy(x.unflatten(1, event_shape)), second_derivatives=False)
    for half in _BOXES:
        found = quadrature(of_points, [(-half, half)] * dims, tolerance=1e-7, device=device)
        if found.edge < _EDGE:
            made = {"estimate": "quadrature", "log_z": found.log_z, "log_z_error": float(found.error), "box": half}
            return Normaliser(found.log_z, "exact", made)
    raise RunError(f"exp(-E) does not fall off within {_BOXES[-1]:g} standard deviations: train longer, or with noise "
                   "(model.noise=0.05)")


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
    """The base of annealing: a Gaussian with twice the covariance (D, D), or variances (D,), of the data."""
    if covariance.dim() == 1:
        covariance = covariance.diag()
    covariance = _BROAD * covariance
    floor = 1e-6 * covariance.diagonal().max() * torch.eye(len(covariance), dtype=torch.float64, device=mean.device)
    return GaussianBase(mean, covariance + floor)


def unit_covariance(dims: int) -> Tensor:
    """The covariance before initialisation, in the shape of `covariance_of`."""
    return torch.ones(dims, dtype=torch.float64) if dims > MOST_PAIRS else torch.eye(dims, dtype=torch.float64)


def inverse_mass(base: GaussianBase) -> Tensor:
    """(*event) variances of the data, the inverse masses of Hamiltonian moves."""
    variances = base.lower.square().sum(1) / _BROAD
    return variances.view_as(base.mean)


#: The values of `sampler=` for energies.
SAMPLERS = ("annealed", *KERNELS)
#: Default steps of each: densities between base and model, or moves of a chain.
STEPS = {"annealed": 100, "hmc": 200, "mala": 1000, "ula": 1000}
#: First step sizes, in standard deviations of the data (HMC: of a leapfrog step; Langevin: h).
STEP_SIZES = {"annealed": 0.1, "hmc": 0.1, "mala": 0.01, "ula": 0.001}


class Tempered(EnergyFunction):
    """p^beta: the energy times an inverse temperature, for chains that keep their positions in float32.

    Example:
        >>> from genmodels.energy import Quadratic
        >>> Tempered(Quadratic(torch.eye(1)), 0.5).energy(torch.tensor([[2.0]])).tolist()
        [1.0]
    """

    def __init__(self, model: EnergyFunction, inverse_temperature: float):
        super().__init__()
        self.model, self.inverse_temperature = model, inverse_temperature
        self.grain = torch.float32

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.inverse_temperature * self.model.energy(x, cond)


def check_tempering(inverse_temperature: float, temperature: float = 1.0) -> None:
    """Raise a ValueError for an inverse temperature that is not positive, or a temperature other than 1.

    Example:
        >>> check_tempering(1.0, temperature=0.5)
        Traceback (most recent call last):
        ...
        ValueError: temperature=0.5 is a factor on the noise of flows and diffusion; this sampler draws from p^beta by \
inverse_temperature=beta (the noise of a Gaussian times 0.5 is inverse_temperature=4)
    """
    check_number("temperature", temperature, 0)
    check_number("inverse_temperature", inverse_temperature, 0)
    if inverse_temperature == 0:
        raise InputError("inverse_temperature must be positive, got 0")
    if temperature != 1:
        same = f" (the noise of a Gaussian times {temperature:g} is inverse_temperature={temperature**-2:g})"
        raise ValueError(f"{temperature=:g} is a factor on the noise of flows and diffusion; this sampler draws from "
                         f"p^beta by inverse_temperature=beta{same if temperature else ''}")


class Sampler:
    """A sampler of an energy.

    `annealed` takes one HMC move at each density between base and model, with step sizes from a pilot run of further
    chains. The others are chains at the model, whose first half is a warm-up: they stay in the modes they start near.

    A matrix product rounds differently for another number of rows, and chains amplify such differences from 1e-16 to 1
    in some fifty moves. Therefore chains compute in float64, if the device has it, and round positions, and the
    acceptances by which step sizes adapt, to float32 after each move, which removes the difference (but for one in
    10^8): a sample is the same in any batch.

    Arguments:
        model: the energy, in units of standard deviations of the data.
        base: the broad Gaussian from which all chains start.
        name: `annealed`, `hmc`, `mala` or `ula`.
        steps: intermediate densities, or moves; None for the sampler's default.
        step_size: first step size, None for the sampler's default; it adapts, except for `ula`.
        inverse_temperature: beta of the density p^beta.

    Raises:
        ValueError: for values out of range.
    """

    def __init__(
        self, model: EnergyFunction, base: GaussianBase, *, name: str = "annealed", steps: int | None = None,
        step_size: float | None = None, inverse_temperature: float = 1.0,
    ):  # fmt: skip
        one_of("sampler", name, SAMPLERS)
        check_tempering(inverse_temperature)
        self.steps = STEPS[name] if steps is None else steps
        at_least(1, steps=self.steps)
        wide = next(model.parameters()).device.type != "mps"
        self.model = Tempered(copy.deepcopy(model).double() if wide else model, inverse_temperature)
        self.base, self.name, self.dtype = base, name, torch.float64 if wide else torch.float32
        size = STEP_SIZES[name] if step_size is None else step_size
        kernel, mass = KERNELS.get(name, HMC), inverse_mass(base)
        self.kernel = kernel(step_size=size, **({"inverse_mass": mass} if kernel is HMC else {}))
        self._path: tuple[AnnealedImportanceSampling, Tensor] | None = None

    def __call__(
        self, n: int, generator: KeyedGenerator, callback: Callable[[int, Tensor], None]
    ) -> tuple[Tensor, dict]:
        """(n, *event) samples, one for each row of the generator, and statistics of their chains."""
        with torch.no_grad():
            return (self._annealed if self.name == "annealed" else self._at_the_model)(n, generator, callback)

    def _annealed(self, n: int, generator: KeyedGenerator, callback) -> tuple[Tensor, dict]:
        if self._path is None:
            path = AnnealedImportanceSampling(steps=self.steps, kernel=self.kernel)
            self._path = path, path.step_sizes(self.model, self.base, generator, dtype=self.dtype)
        path, sizes = self._path
        run = path.forward(
            self.model, self.base, generator, n, sizes, dtype=self.dtype, callback=lambda k, x: callback(k - 1, x)
        )
        evaluations = n * (1 + self.steps * self.kernel.leapfrog_steps)
        return run.x, {"acceptance": run.acceptance, "evaluations": evaluations, "started": _STARTED}

    def _at_the_model(self, n: int, generator: KeyedGenerator, callback) -> tuple[Tensor, dict]:
        start = Start(self.base.sample(n, generator.at(0), dtype=self.dtype), _STARTED)
        warm_up = self.steps // 2
        kept = self.steps - warm_up
        result = run_chains(
            self.model, self.kernel, start, generator, steps=kept, warm_up=warm_up, keep_every=max(1, kept // 100),
            callback=callback,
        )  # fmt: skip
        found = result.summary()
        found.pop("steps")
        return result.samples, found


_STARTED = "Gaussian with twice the covariance of the data"
