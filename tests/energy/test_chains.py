"""Running chains: the same alone and in a batch, resumed as never stopped, adapted and then frozen, told about."""

from __future__ import annotations

import pytest
import torch

from genmodels.energy import (
    HMC,
    MALA,
    ULA,
    DoubleWell,
    DualAveraging,
    Energy,
    Quadratic,
    ScoreNetwork,
    Start,
    run_chains,
)
from genmodels.nn.energy_nets import EnergyMLP
from genmodels.random import KeyedGenerator

KERNELS = {"ula": ULA(step_size=0.05), "mala": MALA(), "hmc": HMC(leapfrog_steps=3)}
NORMAL = Quadratic(torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64))


def net():
    torch.manual_seed(0)
    return Energy(EnergyMLP((3,), hidden=(16,))).double()


def keyed(rows, seed=0):
    return KeyedGenerator(seed, rows, "chains")


def addressable(kernel, generator_of=keyed, warm_up=15):
    model, index = net(), torch.arange(12)
    start = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(rows):
        return run_chains(model, kernel, start[rows], generator_of(rows), steps=15, warm_up=warm_up).samples

    whole = run(index)
    assert (whole - start).abs().max() > 0.1
    for rows in (index[7:8], index[2:9], index[[5, 11, 0]]):
        assert (run(rows) - whole[rows]).abs().max() < 1e-10


@pytest.mark.parametrize("name", KERNELS)
def test_a_chain_is_the_same_alone_and_in_any_batch(name):
    addressable(KERNELS[name])


def test_addressable_catches_noise_of_the_batch():
    with pytest.raises(AssertionError):
        addressable(KERNELS["mala"], lambda rows: torch.Generator().manual_seed(0))


def test_addressable_catches_a_common_step_size(monkeypatch):
    right = DualAveraging.update
    monkeypatch.setattr(DualAveraging, "update", lambda self, acceptance, *, wanted: right(
        self, acceptance.mean().expand_as(acceptance), wanted=wanted))  # fmt: skip
    with pytest.raises(AssertionError):
        addressable(KERNELS["mala"])


@pytest.mark.parametrize("name", KERNELS)
def test_resumed_is_as_never_stopped(name):
    model, start = net(), torch.zeros(5, 3, dtype=torch.float64)
    generator = keyed(torch.arange(5))
    whole = run_chains(model, KERNELS[name], start, generator, steps=40, warm_up=10)
    first = run_chains(model, KERNELS[name], start, generator, steps=20, warm_up=10)
    second = run_chains(model, KERNELS[name], first.state, generator, steps=20)
    assert torch.equal(second.samples, whole.samples) and second.state.step == whole.state.step == 50
    assert torch.equal(torch.cat([first.draws, second.draws]), whole.draws)
    # Planted bug: the number of the step is forgotten.
    forgot = run_chains(model, KERNELS[name], first.state._replace(step=10), generator, steps=20)
    assert not torch.equal(forgot.samples, whole.samples)


@pytest.mark.parametrize("name, wanted", [("mala", 0.574), ("hmc", 0.65)])
def test_adaptation_finds_the_wanted_acceptance_and_then_stands_still(name, wanted):
    sizes = []

    class Watched(type(KERNELS[name])):
        def __call__(self, target, point, generator, step_size):
            sizes.append(step_size)
            return super().__call__(target, point, generator, step_size)

    # In few dimensions the acceptance of long moves falls off a cliff, and no step has just that one.
    model, start = Quadratic(torch.eye(30, dtype=torch.float64)), torch.zeros(32, 30, dtype=torch.float64)
    result = run_chains(model, Watched(), start, keyed(torch.arange(32)), steps=100, warm_up=300)
    assert float(result.acceptance.mean()) == pytest.approx(wanted, abs=0.08)
    assert not torch.equal(sizes[10], sizes[20])
    assert all(torch.equal(size, result.step_size) for size in sizes[300:])


def test_what_is_told():
    start = torch.zeros(32, 2, dtype=torch.float64)
    result = run_chains(NORMAL, HMC(), start, keyed(torch.arange(32)), steps=100, warm_up=100, keep_every=2)
    told = result.summary()
    assert result.draws.shape == (50, 32, 2) and torch.equal(result.draws[-1], result.samples)
    assert 0.4 < told["acceptance"] < 1 and told["r_hat"] < 1.1 and 300 < told["ess"] < 1600 * 4
    assert told["evaluations"] == 32 * (1 + 200 * 5) and told["steps"] == 200
    assert told["started"] == "given" and told["exact"] and told["divergences"] == 0
    # In the mean over draws the covariance is the model's.
    covariance = torch.cov(result.draws.flatten(0, 1).T)
    torch.testing.assert_close(covariance, torch.linalg.inv(NORMAL.matrix.detach()), rtol=0, atol=0.15)
    unadjusted = run_chains(NORMAL, ULA(step_size=0.1), start, keyed(torch.arange(32)), steps=20, keep_every=0)
    told = unadjusted.summary()
    assert told["acceptance"] is told["ess"] is told["r_hat"] is None and not told["exact"]


def test_large_events_are_judged_by_their_energy():
    model = Quadratic(torch.eye(100, dtype=torch.float64))
    start = torch.zeros(3, 1, 10, 10, dtype=torch.float64)
    result = run_chains(model, HMC(), start, keyed(torch.arange(3)), steps=20)
    assert result.draws.shape == (20, 3, 1, 10, 10) and result.ess.shape == (1,)


def test_starts():
    generator, x = keyed(torch.arange(500)), torch.full((500, 2), 3.0)
    prior, data = Start.prior((500, 2), 2.0, generator), Start.data(x, 0.1, generator)
    assert prior.x.std() == pytest.approx(2, rel=0.1) and prior.label == "prior of the confinement"
    assert (data.x - x).std() == pytest.approx(0.1, rel=0.1)
    result = run_chains(NORMAL.float(), MALA(), data, generator, steps=1)
    NORMAL.double()
    assert result.started == "data plus noise"
    assert result.samples.dtype == torch.float32 and not result.samples.requires_grad


def test_a_score_alone_has_no_acceptance():
    field, start = ScoreNetwork(lambda x: -x), torch.zeros(4, 2)
    for kernel in (MALA(), HMC()):
        with pytest.raises(ValueError, match="needs an energy, and ScoreNetwork is a score alone"):
            run_chains(field, kernel, start, keyed(torch.arange(4)), steps=1)
    assert run_chains(field, ULA(), start, keyed(torch.arange(4)), steps=5).samples.isfinite().all()


def test_callback_and_condition():
    class Conditional(DoubleWell):
        def energy(self, x, cond=None):
            return 50 * (x[:, 0] - cond).square()

    seen, cond = [], torch.tensor([-1.0, 2.0, 5.0])
    result = run_chains(Conditional(), HMC(step_size=0.02), torch.zeros(3, 1), keyed(torch.arange(3)), steps=200,
                        warm_up=100, cond=cond, callback=lambda i, x: seen.append(i))  # fmt: skip
    assert seen == list(range(300))
    assert ((result.draws.mean(0)[:, 0] - cond).abs() < 0.1).all()
