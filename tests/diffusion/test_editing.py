"""Sampling from a noised item, and the latents of the deterministic sampler."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    CosineSchedule,
    DDPMSampler,
    EulerSampler,
    GaussianDenoiser,
    HeunSampler,
    invert,
    noised_start,
    sample,
    times_from,
    uniform_log_snr,
    uniform_t,
)
from tests.diffusion.table import keyed

MEAN, DEVIATION = torch.tensor([0.5, -0.2], dtype=torch.float64), 0.4
ORACLE = GaussianDenoiser(CosineSchedule(), MEAN, DEVIATION**2)
ITEM = torch.tensor([1.5, 0.4], dtype=torch.float64)


def test_times_from():
    times = uniform_t(ORACLE.schedule, 4)
    assert times_from(times, 0.75).tolist() == [0.75, 0.5, 0.25, 0.0]
    assert times_from(times, 0.1).tolist() == [0.1, 0.0] and torch.equal(times_from(times, 1.0), times)
    for strength in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="strength"):
            times_from(times, strength)


def edited(strength, n=2000):
    generator = keyed(n)
    start = noised_start(ORACLE.schedule, ITEM.expand(n, 2), strength, generator)
    times = times_from(uniform_log_snr(ORACLE.schedule, 200), strength)
    return sample(ORACLE, (n, 2), times, DDPMSampler(), generator, dtype=torch.float64, start=start).x


@pytest.mark.parametrize("strength", [0.3, 0.6, 0.95])
def test_an_edit_has_the_law_of_data_that_would_look_alike_under_the_noise(strength):
    """E over x_t of p(x_0 | x_t): mean m + g (x - m), variance c^2 (1 - g) + (g sigma/alpha)^2, g the gain."""
    alpha, sigma = (float(v) for v in ORACLE.schedule.alpha_sigma(torch.tensor(strength).double()))
    gain = alpha**2 * DEVIATION**2 / (alpha**2 * DEVIATION**2 + sigma**2)
    variance = DEVIATION**2 * (1 - gain) + (gain * sigma / alpha) ** 2
    x = edited(strength)
    assert ((x.mean(0) - MEAN - gain * (ITEM - MEAN)).abs() < 4 * math.sqrt(variance / len(x)) + 5e-3).all()
    assert ((x.var(0) / variance - 1).abs() < 4 * math.sqrt(2 / len(x)) + 0.03).all()


def test_an_edit_is_addressable():
    def run(index):
        generator = KeyedGenerator(3, index, "sample")
        return noised_start(ORACLE.schedule, ITEM.expand(len(index), 2), 0.5, generator)

    assert torch.equal(run(torch.arange(9))[4:5], run(torch.tensor([4])))


def test_the_latents_of_a_normal_law_are_its_standardised_values():
    x0 = MEAN + DEVIATION * torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    z = invert(ORACLE, x0, uniform_log_snr(ORACLE.schedule, 400))
    assert ((z - (x0 - MEAN) / DEVIATION).abs() < 2e-2).all()


def round_trip(sampler, steps):
    x0 = ORACLE.sample(20, keyed(20))
    times = uniform_log_snr(ORACLE.schedule, steps, 1000)
    z = invert(ORACLE, x0, times, sampler=sampler)
    back = sample(ORACLE, x0.shape, times, sampler, keyed(20), dtype=torch.float64, start=z).x
    return float((back - x0).abs().max())


def test_the_way_there_and_back_comes_home():
    assert round_trip(HeunSampler(), 100) < 5e-3
    assert round_trip(EulerSampler(), 100) > 5 * round_trip(HeunSampler(), 100)
