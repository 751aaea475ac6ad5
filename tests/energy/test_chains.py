"""Dual averaging finds the step of a wanted acceptance, each chain its own."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.random import KeyedGenerator
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
    effective_sample_size,
    run_chains,
    split_r_hat,
)
from genmodels.nn.energy_nets import EnergyMLP


def test_each_chain_finds_its_own_step():
    scales = torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64)
    state = DualAveraging.start(0.1, 3)
    for _ in range(1000):
        state = state.update(torch.exp(-state.step_size / scales), wanted=0.5)
    torch.testing.assert_close(state.averaged, 0.6931 * scales, rtol=0.03, atol=0)


def test_pure():
    state = DualAveraging.start(0.1, 2)
    state.update(torch.ones(2), wanted=0.5)
    assert state.count == 0 and (state.step_size - 0.1).abs().max() < 1e-12


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
    # Mutant: the number of the step is forgotten.
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
    result = run_chains(model, Watched(), start, keyed(torch.arange(32)), steps=50, warm_up=220)
    assert float(result.acceptance.mean()) == pytest.approx(wanted, abs=0.08)
    assert not torch.equal(sizes[10], sizes[20])
    assert all(torch.equal(size, result.step_size) for size in sizes[220:])


def test_what_the_summary_holds():
    start = torch.zeros(32, 2, dtype=torch.float64)
    result = run_chains(NORMAL, HMC(), start, keyed(torch.arange(32)), steps=100, warm_up=100, keep_every=2)
    figures = result.summary()
    assert result.draws.shape == (50, 32, 2) and torch.equal(result.draws[-1], result.samples)
    assert 0.4 < figures["acceptance"] < 1 and figures["r_hat"] < 1.1 and 300 < figures["ess"] < 1600 * 4
    assert figures["evaluations"] == 32 * (1 + 200 * 5) and figures["steps"] == 200
    assert figures["started"] == "given" and figures["exact"] and figures["divergences"] == 0
    # In the mean over draws the covariance is the model's.
    covariance = torch.cov(result.draws.flatten(0, 1).T)
    torch.testing.assert_close(covariance, torch.linalg.inv(NORMAL.matrix.detach()), rtol=0, atol=0.15)
    unadjusted = run_chains(NORMAL, ULA(step_size=0.1), start, keyed(torch.arange(32)), steps=20, keep_every=0)
    figures = unadjusted.summary()
    assert figures["acceptance"] is figures["ess"] is figures["r_hat"] is None and not figures["exact"]


def test_large_events_are_summarised_by_their_energy():
    model = Quadratic(torch.eye(100, dtype=torch.float64))
    start = torch.zeros(3, 1, 10, 10, dtype=torch.float64)
    result = run_chains(model, HMC(), start, keyed(torch.arange(3)), steps=20)
    assert result.draws.shape == (20, 3, 1, 10, 10) and result.ess.shape == (1,)


def test_starts():
    start = Start(torch.full((9, 2), 3.0), "a label")
    result = run_chains(NORMAL.float(), MALA(), start, keyed(torch.arange(9)), steps=1)
    NORMAL.double()
    assert result.started == "a label"
    assert result.samples.dtype == torch.float32 and not result.samples.requires_grad


def test_a_score_alone_has_no_acceptance():
    field, start = ScoreNetwork(lambda x: -x), torch.zeros(4, 2)
    for kernel in (MALA(), HMC()):
        with pytest.raises(ValueError, match="needs an energy, but ScoreNetwork has only a score"):
            run_chains(field, kernel, start, keyed(torch.arange(4)), steps=1)
    assert run_chains(field, ULA(), start, keyed(torch.arange(4)), steps=5).samples.isfinite().all()


def test_callback_and_condition():
    class Conditional(DoubleWell):
        def energy(self, x, cond=None):
            return 50 * (x[:, 0] - cond).square()

    seen, cond = [], torch.tensor([-1.0, 2.0, 5.0])
    result = run_chains(Conditional(), HMC(step_size=0.02), torch.zeros(3, 1), keyed(torch.arange(3)), steps=120,
                        warm_up=80, cond=cond, callback=lambda i, x: seen.append(i))  # fmt: skip
    assert seen == list(range(200))
    assert ((result.draws.mean(0)[:, 0] - cond).abs() < 0.1).all()


def autoregression(rho, draws=4000, chains=8, seed=0):
    noise = torch.randn(draws, chains, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = [noise[0]]
    for step in noise[1:]:
        x.append(rho * x[-1] + (1 - rho**2) ** 0.5 * step)
    return torch.stack(x)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_effective_sample_size(rho):
    found = float(effective_sample_size(autoregression(rho))) / (4000 * 8)
    assert found == pytest.approx((1 - rho) / (1 + rho), rel=0.15)


def test_effective_sample_size_sees_chains_that_disagree():
    apart = autoregression(0.5) + torch.arange(8, dtype=torch.float64)[:, None]
    assert float(effective_sample_size(apart)) < 40


def test_r_hat():
    mixed = autoregression(0.5)
    assert float(split_r_hat(mixed)) < 1.01
    assert float(split_r_hat(mixed + torch.arange(8)[:, None])) > 1.5
    # A drift that all chains share is seen by their halves alone.
    drifting = mixed + torch.linspace(0, 3, 4000, dtype=torch.float64)[:, None, None]
    assert float(split_r_hat(drifting)) > 1.2


def test_too_few_draws():
    assert split_r_hat(torch.zeros(3, 2, 1)) is None and effective_sample_size(torch.zeros(3, 2, 1)) is None


def test_quantities_are_summarised_one_by_one():
    both = torch.cat([autoregression(0.0), autoregression(0.9, seed=1)], dim=2)
    ess = effective_sample_size(both)
    assert ess.shape == (2,) and ess[0] > 10 * ess[1]
