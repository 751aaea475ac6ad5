"""Objectives: expectation against closed form and against the bound itself."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.diffusion import (
    OBJECTIVES,
    PARAMETERISATIONS,
    TIME_SAMPLERS,
    CosineSchedule,
    Denoiser,
    Gaussian,
    GaussianDenoiser,
    LinearSchedule,
    Simple,
    V,
    Vlb,
    ddpm_times,
    elbo,
)
from genmodels.random import KeyedGenerator


def oracle(parameterisation="v", schedule=None):
    mean, variance = torch.tensor([0.5, -0.2, 0.1]), torch.tensor([0.25, 0.09, 1.0])
    return GaussianDenoiser(
        schedule or CosineSchedule(), mean, variance, parameterisation=PARAMETERISATIONS[parameterisation]()
    )


def expectation(objective, denoiser, n=6000, seed=0):
    """Mean and standard error (of the batches' means, as antithetic rows are not independent)."""
    values = []
    for batch in range(40):
        generator = torch.Generator().manual_seed(1000 * seed + batch)
        x0 = denoiser.sample(n // 40, generator)
        values.append(objective(denoiser, x0, None, generator).value)
    values = torch.stack(values)
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def simple_is_mmse(parameterisation, objective=None):
    """The oracle's error: mmse(t) / loss_weight(t), averaged over t and scalars."""
    denoiser = oracle(parameterisation)
    t = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    log_snr = denoiser.schedule.log_snr(t)
    truth = (denoiser.mmse(log_snr) / denoiser.parameterisation.loss_weight(log_snr)[:, None]).mean()
    mean, error = expectation(objective or Simple(), denoiser)
    assert abs(mean - float(truth)) < 4 * error


@pytest.mark.parametrize("parameterisation", PARAMETERISATIONS)
def test_simple_is_the_mmse_of_the_oracle(parameterisation):
    simple_is_mmse(parameterisation)


class Summed(Simple):
    def __call__(self, denoiser, x0, *args):
        out = super().__call__(denoiser, x0, *args)
        return type(out)(out.value * x0[0].numel(), out.per_example, out.times, out.parts)


def test_simple_catches_a_sum_in_place_of_the_mean():
    with pytest.raises(AssertionError):
        simple_is_mmse("v", Summed())


def vlb_is_the_bound(time_sampler, variance="beta"):
    denoiser, times = oracle(), ddpm_times(12)
    objective = Vlb(Gaussian(), times, variance=variance)
    objective.time_sampler = time_sampler
    n = 4000
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    exact = elbo(denoiser, x0, Gaussian(), times, KeyedGenerator(9, torch.arange(n)), variance=variance).total
    mean, error = expectation(objective, denoiser)
    both = math.hypot(error, float(exact.std()) / math.sqrt(n))
    assert abs(mean - float(exact.mean())) < 4 * both


@pytest.mark.parametrize("name", TIME_SAMPLERS)
@pytest.mark.parametrize("variance", ["beta", "beta_tilde"])
def test_vlb_is_unbiased(name, variance):
    vlb_is_the_bound(TIME_SAMPLERS[name], variance)


def skewed(weighted):
    def sampler(n, generator, rank=0, world=1):
        u, _ = TIME_SAMPLERS["uniform"](n, generator)
        t = u ** (1 / 2)  # density 2 t
        return t, 1 / (2 * t) if weighted else torch.ones_like(t)

    return sampler


def test_vlb_is_unbiased_for_a_weighted_sampler_and_catches_a_missing_weight():
    vlb_is_the_bound(skewed(weighted=True))
    with pytest.raises(AssertionError):
        vlb_is_the_bound(skewed(weighted=False))


def test_vlb_of_a_fixed_path_is_its_three_terms():
    out = Vlb(Gaussian(), ddpm_times(12))(oracle(), torch.zeros(5, 3), None, KeyedGenerator(0, torch.arange(5)))
    assert list(out.parts) == ["prior_nats", "diffusion_nats", "reconstruction_nats"]
    torch.testing.assert_close(out.per_example, sum(out.parts.values()))
    torch.testing.assert_close(out.value, out.per_example.mean())
    assert ((out.times * 12 - (out.times * 12).round()).abs() < 1e-12).all() and out.times.min() >= 2 / 12


# ---- the interface of every objective ----


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, log_snr, cond=None):
        out = self.layer(torch.cat([x, log_snr[:, None] / 10], 1))
        return out if cond is None else out + cond[:, None]


def every(name):
    return OBJECTIVES[name](decoder=Gaussian(), times=ddpm_times(20), time_sampler="antithetic")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_reach_the_network(name):
    torch.manual_seed(0)
    denoiser = Denoiser(Net(), CosineSchedule(), V())
    out = every(name)(denoiser, torch.randn(8, 3), torch.ones(8), KeyedGenerator(0, torch.arange(8)), 0, 1)
    out.value.backward()
    assert out.value.dim() == 0 and out.per_example.shape == out.times.shape == (8,)
    assert all(part.shape == (8,) for part in out.parts.values())
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in denoiser.parameters())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("schedule", [CosineSchedule(), LinearSchedule(num_steps=100)], ids=["cosine", "linear"])
def test_one_process_or_two(name, schedule):
    torch.manual_seed(0)
    denoiser, x0 = Denoiser(Net(), schedule, V()), torch.randn(8, 3)
    together = every(name)(denoiser, x0, None, KeyedGenerator(4, torch.arange(8), "train", 7)).per_example
    for rank in range(2):
        rows = torch.arange(4) * 2 + rank
        alone = every(name)(denoiser, x0[rows], None, KeyedGenerator(4, rows, "train", 7), rank, 2).per_example
        torch.testing.assert_close(alone, together[rows], rtol=1e-5, atol=1e-6)


def test_times_of_a_table_are_its_steps():
    denoiser = oracle(schedule=LinearSchedule(num_steps=50))
    out = Simple()(denoiser, torch.zeros(200, 3), None, torch.Generator().manual_seed(0))
    steps = out.times * 50
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-12)
    assert sorted(set(steps.round().tolist())) == list(range(1, 51))


def test_errors():
    with pytest.raises(ValueError, match="uniform, stratified, antithetic"):
        Simple(time_sampler="often")
    with pytest.raises(ValueError, match="decoder and its grid"):
        Vlb()
    with pytest.raises(ValueError, match="beta, beta_tilde"):
        Vlb(Gaussian(), ddpm_times(3), variance="learnt")
