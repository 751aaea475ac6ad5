"""The checks of noise schedules and energies: what this package has keeps them, and each notices its mutants."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.diffusion import SCHEDULES, DiscreteSchedule, NoiseSchedule
from genmodels.energy import Energy, EnergyFunction
from genmodels.nn.energy_nets import EnergyConv, EnergyMLP
from genmodels.verification.check import NOT_VERIFIED, PASSED
from genmodels.verification.densities import ENERGY_CHECKS, SCHEDULE_CHECKS, check_energy, check_schedule
from tests.mutants.densities import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_exactly_the_right_checks_fail(name):
    assert set(MUTANTS[name].run().failed) == MUTANTS[name].failing, str(MUTANTS[name].run())


def test_every_check_has_a_mutant():
    noticed = {check for mutant in MUTANTS.values() for check in mutant.failing}
    assert noticed == {*SCHEDULE_CHECKS.specs, *ENERGY_CHECKS.specs}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes_the_checks(name):
    kind = SCHEDULES[name]
    check_schedule(kind(num_steps=1000) if issubclass(kind, DiscreteSchedule) else kind()).raise_if_failed()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_tables_of_few_steps_pass_the_checks(steps):
    check_schedule(DiscreteSchedule(torch.full((steps,), 0.4))).raise_if_failed()


@pytest.mark.parametrize("make, shape", [(lambda: EnergyMLP((1, 28, 28), hidden=(8,), spread=5.0), (1, 28, 28)),
                                         (lambda: EnergyConv((3, 64, 64), channels=(8, 8), spread=2.0), (3, 64, 64))])
def test_energies_with_an_integral_fall_off_in_many_dimensions(make, shape):
    assert check_energy(Energy(make()), shape)["falls off"].status == PASSED


@pytest.mark.parametrize("make, shape", [(lambda: EnergyMLP((3,), hidden=(8,)), (3,)),
                                         (lambda: EnergyConv((1, 8, 8)), (1, 8, 8))])
def test_energies_of_networks_pass_the_checks(make, shape):
    check_energy(Energy(make()), shape).raise_if_failed()


class Kinked(EnergyFunction):
    """Piecewise linear beside a bowl, of any size; keeps its last energies."""

    def __init__(self, size=1.0):
        super().__init__()
        kinds = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten()
        self.net, self.size = nn.Sequential(*kinds, nn.Linear(1024, 1)), size

    def energy(self, x, cond=None):
        self.last = self.net(x)[:, 0] + self.size * x.flatten(1).square().sum(1)
        return self.last


@pytest.mark.parametrize("size", [1.0, 1e5])
def test_gradients_of_scores_with_kinks_and_of_large_ones_are_right(size):
    torch.manual_seed(0)
    assert not check_energy(Kinked(size), (1, 8, 8)).failed


def test_lost_digits_of_scores_are_not_verified():
    report = check_energy(Kinked(1e15), (1, 8, 8))
    assert not report.failed and report["gradients of the score"].status == NOT_VERIFIED


class Ends(NoiseSchedule):
    """10 - 20 t with another value at an end."""

    def __init__(self, at, value):
        super().__init__()
        self.at, self.value = at, value

    def log_snr(self, t):
        t = t.double()
        return torch.where(t == self.at, self.value, 10 - 20 * t)


@pytest.mark.parametrize("at, value, passes", [
    (1.0, 12.0, False), (0.0, -12.0, False), (1.0, -10.0, True), (0.0, math.inf, True), (1.0, -math.inf, True),
    (0.5, math.nan, False),
])  # fmt: skip
def test_schedules_decrease_to_their_ends(at, value, passes):
    (check,) = [check for check in check_schedule(Ends(at, value), points=199).checks if check.name == "decreasing"]
    assert (check.status == "passed") == passes


def test_an_energy_is_checked_without_dropout(refuses):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def energy(self, x):
            return self.dropout(0.5 * x.square()).sum(1)

        def score(self, x):
            return -self.dropout(x)

    assert check_energy(Dropping().train(), iter([2])).passed
    refuses(ValueError, "at least two examples", check_energy, Dropping(), (2,), batch=1)
