"""Samples of an energy model: one chain for each, annealed from a broad normal density or run at the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from genmodels.energy import HMC, KERNELS, AnnealedImportanceSampling, EnergyFunction, GaussianBase, Start, run_chains
from genmodels.errors import check_temperature
from genmodels.flows.boundary import one_of
from genmodels.models.normaliser import inverse_mass
from genmodels.random import KeyedGenerator

#: What `sampler=` may be for energies.
SAMPLERS = ("annealed", *KERNELS)
#: Steps of each where nobody says: densities between base and model, or moves of a chain.
STEPS = {"annealed": 100, "hmc": 200, "mala": 1000, "ula": 1000}
#: First step sizes, in standard deviations of the data (HMC: of a leapfrog step; Langevin: h).
STEP_SIZES = {"annealed": 0.1, "hmc": 0.1, "mala": 0.01, "ula": 0.001}


class Tempered(EnergyFunction):
    """p^beta: the energy times an inverse temperature.

    Example:
        >>> from genmodels.energy import Quadratic
        >>> Tempered(Quadratic(torch.eye(1)), 0.5).energy(torch.tensor([[2.0]])).tolist()
        [1.0]
    """

    def __init__(self, model: EnergyFunction, inverse_temperature: float):
        super().__init__()
        self.model, self.inverse_temperature = model, inverse_temperature

    def energy(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.inverse_temperature * self.model.energy(x, cond)


def check_tempering(inverse_temperature: float, temperature: float = 1.0) -> None:
    """Raise a ValueError unless p^beta exists, or where the factor of other families' noise was asked for.

    Example:
        >>> check_tempering(1.0, temperature=0.5)
        Traceback (most recent call last):
        ...
        ValueError: temperature=0.5 is a factor on the noise of flows and diffusion; this model samples p^beta by \
inverse_temperature=beta (what was p^(1/T) by temperature=0.5 is inverse_temperature=2)
    """
    check_temperature(temperature)
    check_temperature(inverse_temperature, "inverse_temperature", positive=True)
    if temperature != 1:
        former = temperature and f" (what was p^(1/T) by {temperature=:g} is inverse_temperature={1 / temperature:g})"
        raise ValueError(f"{temperature=:g} is a factor on the noise of flows and diffusion; this model samples p^beta "
                         f"by inverse_temperature=beta{former or ''}")


class Sampler:
    """One way to draw from an energy.

    Chains multiply rounding errors, so they run in float64 where the device has it: then a sample is itself in any
    batch. `annealed` takes one HMC move at each density between base and model, with step sizes from a pilot run of
    chains of its own. The others are chains at the model itself, the first half of them a warm-up: they find the modes
    they start near, and keep to them.

    Arguments:
        model: the energy, in units of standard deviations of the data.
        base: the broad normal density where all chains begin.
        name: `annealed`, `hmc`, `mala` or `ula`.
        steps: densities in between, or moves; None for the default of each.
        step_size: first step size, None for the default of each; it adapts, except for `ula`.
        inverse_temperature: beta of the density p^beta.

    Raises:
        ValueError: for values that make no sense.
    """

    def __init__(
        self, model: EnergyFunction, base: GaussianBase, *, name: str = "annealed", steps: int | None = None,
        step_size: float | None = None, inverse_temperature: float = 1.0,
    ):  # fmt: skip
        one_of("sampler", name, SAMPLERS)
        check_tempering(inverse_temperature)
        self.steps = STEPS[name] if steps is None else steps
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
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
        """(n, *event) samples, one for each row of the generator, and what is known of them."""
        with torch.no_grad():
            return (self._annealed if self.name == "annealed" else self._straight)(n, generator, callback)

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

    def _straight(self, n: int, generator: KeyedGenerator, callback) -> tuple[Tensor, dict]:
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


_STARTED = "normal density with twice the covariance of the data"
