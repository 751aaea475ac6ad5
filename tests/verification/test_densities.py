"""The checks of noise schedules and energies: what this package has keeps them, and each notices its mutants."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import SCHEDULES, DiscreteSchedule
from genmodels.energy import Energy
from genmodels.nn.energy_nets import EnergyConv, EnergyMLP
from genmodels.verification.check import PASSED
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
