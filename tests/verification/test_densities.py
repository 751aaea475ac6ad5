"""The laws of noise schedules and energies: what this package has keeps them, and each notices the error planted."""

from __future__ import annotations

import pytest

from genmodels.diffusion import SCHEDULES, DiscreteSchedule
from genmodels.energy import Energy
from genmodels.nn.energy_nets import EnergyConv, EnergyMLP
from genmodels.verification.densities import ENERGY_LAWS, check_energy, check_schedule
from genmodels.verification.densities import LAWS as SCHEDULE_LAWS
from tests.mutants.densities import PLANTED


@pytest.mark.parametrize("name", PLANTED)
def test_exactly_the_right_laws_are_broken(name):
    assert set(PLANTED[name].judge().broken) == PLANTED[name].broken, str(PLANTED[name].judge())


def test_every_law_notices_something():
    noticed = {law for planted in PLANTED.values() for law in planted.broken}
    idle = {*SCHEDULE_LAWS.laws, *ENERGY_LAWS.laws} - noticed
    assert idle == {"end points", "nothing modified"}  # the one is held by all of them, the other by autograd's copy


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_keeps_the_laws(name):
    kind = SCHEDULES[name]
    check_schedule(kind(num_steps=1000) if issubclass(kind, DiscreteSchedule) else kind()).raise_if_failed()


@pytest.mark.parametrize("make, shape", [(lambda: EnergyMLP((3,), hidden=(8,)), (3,)),
                                         (lambda: EnergyConv((1, 8, 8)), (1, 8, 8))])
def test_energies_of_networks_keep_the_laws(make, shape):
    check_energy(Energy(make()), shape).raise_if_failed()
