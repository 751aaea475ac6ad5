"""Annealed Langevin and predictor-corrector from exact scores: the weights of modes that plain Langevin cannot find."""

from __future__ import annotations

import pytest
import torch

import genmodels.energy.annealed as annealed_module
from genmodels.core.random import KeyedGenerator
from genmodels.energy import (
    ULA,
    NoiseConditionalScore,
    NormalMixture,
    annealed_langevin,
    noise_levels,
    predictor_corrector,
    run_chains,
)

# Two modes five standard deviations apart on either side.
MIXTURE = NormalMixture(torch.tensor([0.3, 0.7]).double(), torch.tensor([[-2.5, 0.0], [2.5, 0.0]]).double(), 0.5)
LEVELS = noise_levels(10.0, 0.1)
SAMPLERS = {"annealed": annealed_langevin, "predictor-corrector": predictor_corrector}


def keyed(rows, seed=0):
    return KeyedGenerator(seed, rows, "sample")


def finds_the_weights(sample, levels=LEVELS, n=2000, mixture=MIXTURE):
    dims = mixture.means.shape[1]
    x = sample(mixture.with_noise(), (n, dims), levels, keyed(torch.arange(n)), dtype=torch.float64)
    assert abs(float((x[:, 0] < 0).double().mean()) - 0.3) < 0.05
    nearest = (x[:, None] - mixture.means).norm(dim=2).min(1).values
    assert float(nearest.square().mean() / dims) == pytest.approx(0.25, abs=0.06)  # the spread inside a mode


def with_more_steps(model, shape, levels, generator, **options):
    return annealed_langevin(model, shape, levels, generator, steps_per_level=20, step=0.002, **options)


def test_annealed_langevin():
    finds_the_weights(with_more_steps)


def test_predictor_corrector():
    means = torch.zeros(2, 16, dtype=torch.float64)
    means[:, 0] = MIXTURE.means[:, 0]
    wide = NormalMixture(torch.tensor([0.3, 0.7]).double(), means, 0.5)
    finds_the_weights(predictor_corrector, noise_levels(10.0, 0.02, 1.1), mixture=wide)
    finds_the_weights(lambda *a, **o: predictor_corrector(*a, corrector_steps=0, **o), noise_levels(10.0, 0.02, 1.1))


def test_check_catches_rising_levels(monkeypatch):
    with pytest.raises(ValueError, match="from the largest to the smallest"):
        annealed_langevin(MIXTURE.with_noise(), (4, 2), LEVELS[::-1], keyed(torch.arange(4)))
    monkeypatch.setattr(annealed_module, "require_decreasing", lambda sigmas: None)
    with pytest.raises(AssertionError):
        finds_the_weights(with_more_steps, LEVELS[::-1], 500)


def test_plain_langevin_stays_in_its_mode():
    start = MIXTURE.means[:1].expand(300, 2)
    x = run_chains(MIXTURE, ULA(step_size=0.02), start, keyed(torch.arange(300)), steps=200, keep_every=0).samples
    assert (x[:, 0] < 0).all()


def addressable(sample, generator_of):
    model, index = MIXTURE.with_noise(), torch.arange(10)

    def run(rows):
        return sample(model, (len(rows), 2), LEVELS[::4], generator_of(rows), dtype=torch.float64)

    whole = run(index)
    for rows in (index[7:8], index[2:9], index[[5, 9, 0]]):
        assert (run(rows) - whole[rows]).abs().max() < 1e-10


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sample_is_the_same_alone_and_in_any_batch(name):
    addressable(SAMPLERS[name], keyed)


def test_addressable_catches_lengths_of_the_batch(monkeypatch):
    each = annealed_module._length
    monkeypatch.setattr(annealed_module, "_length", lambda x: each(x).mean(0, keepdim=True))
    with pytest.raises(AssertionError):
        addressable(predictor_corrector, keyed)


@pytest.mark.parametrize("name", SAMPLERS)
def test_options(name):
    point = NoiseConditionalScore(lambda x, sigma, cond=None: (cond[:, None] - x) / sigma[:, None] ** 2)
    cond, seen = torch.tensor([3.0, -1.0]), []
    x = SAMPLERS[name](point, (2, 1), LEVELS, keyed(torch.arange(2)), cond=cond, callback=lambda i, x: seen.append(i))
    torch.testing.assert_close(x[:, 0], cond)
    assert seen == list(range(len(LEVELS) - (name != "annealed"))) and x.dtype == torch.float32
    noisy = SAMPLERS[name](point, (2, 1), LEVELS, keyed(torch.arange(2)), cond=cond, denoise=False,
                           start=torch.zeros(2, 1))  # fmt: skip
    assert 1e-4 < float((noisy[:, 0] - cond).abs().max()) < 1
