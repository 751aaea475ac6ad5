"""Guards: each one line that says what to do."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.errors import InputError, RunError
from genmodels.energy import DivergenceGuard, Energy, require_continuous, require_finite
from genmodels.nn.energy_nets import EnergyMLP


def rows(n=200, dims=3):
    return torch.randn(n, dims, generator=torch.Generator().manual_seed(0))


def one_line(excinfo):
    assert "\n" not in str(excinfo.value)


BAD_DATA = {
    "column b is constant": lambda x: torch.stack([x[:, 0], torch.full((200,), 3.0), x[:, 2]], 1),
    "column c has only": lambda x: torch.stack([x[:, 0], x[:, 1], x[:, 2].round()], 1),
    "100 of 200 rows are copies": lambda x: x[:100].repeat(2, 1),
    "columns a, c depend on each other": lambda x: torch.stack([x[:, 0], x[:, 1], -2 * x[:, 0] + 1], 1),
}


@pytest.mark.parametrize("message", BAD_DATA)
def test_data_without_a_density(message):
    with pytest.raises(InputError, match=message) as excinfo:
        require_continuous(BAD_DATA[message](rows()), ["a", "b", "c"])
    one_line(excinfo)


def test_sound_data_pass():
    for data in (rows(), rows(5, 8), torch.cat([rows(), rows()[:1]])):
        assert require_continuous(data) is None


def test_values_that_are_no_numbers():
    require_finite("score", rows(), 3)
    bad = rows()
    bad[17, 1] = torch.inf
    with pytest.raises(RunError, match="the score of item 117 is inf at step 3") as excinfo:
        require_finite("score", bad, 3, torch.arange(100, 300))
    one_line(excinfo)


def weights_that_are_no_numbers_stop(guard):
    torch.manual_seed(0)
    model = Energy(EnergyMLP((3,), hidden=(4,)))
    model.network.body[1].weight.data[0, 0] = torch.nan
    with pytest.raises(RunError, match="the energy of item 0 is nan at step 9"):
        guard("energy", model.energy(rows()), 9)


def test_weights_that_are_no_numbers():
    weights_that_are_no_numbers_stop(require_finite)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):  # mutant: they are swallowed
        weights_that_are_no_numbers_stop(lambda what, values, step: require_finite(what, values.nan_to_num(), step))


def test_runaway_energies():
    guard, loss = DivergenceGuard(2), torch.zeros(4)
    for step in range(99):
        guard.check(step, loss, torch.full((4,), 2e6))
    guard.check(99, loss, torch.zeros(4))  # one calm step begins a new count
    for step in range(99):
        guard.check(step, loss, torch.full((4,), 2e6))
    with pytest.raises(RunError, match="energy diverges at step 99: add noise, confinement or a lower learning rate"):
        guard.check(99, loss, torch.full((4,), -2e6))
    with pytest.raises(RunError, match="diverges at step 0"):
        DivergenceGuard(2).check(0, torch.full((4,), -2001.0))
    DivergenceGuard(2).check(0, torch.full((4,), -1999.0))
