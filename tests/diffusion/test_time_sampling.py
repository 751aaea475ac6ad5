"""Time samplers: one mean for all, strata filled, the same over one process or several."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.diffusion import TIME_SAMPLERS
from genmodels.random import KeyedGenerator

every_sampler = pytest.mark.parametrize("sampler", TIME_SAMPLERS.values(), ids=TIME_SAMPLERS.keys())


def keyed(seed, n, rank=0, world=1):
    return KeyedGenerator(seed, torch.arange(n) * world + rank, "train")


def same_mean(sampler):
    """weight * f(t) has mean integral f, here of f(t) = t^3."""
    batches = torch.stack([_estimate(sampler, seed) for seed in range(300)])
    error = batches.std() / math.sqrt(len(batches))
    assert abs(batches.mean() - 0.25) < 4 * error + 1e-12


def _estimate(sampler, seed):
    t, weight = sampler(16, keyed(seed, 16))
    assert t.dtype == weight.dtype == torch.float64 and (t >= 0).all() and (t < 1).all()
    return (weight * t**3).mean()


@every_sampler
def test_same_mean(sampler):
    same_mean(sampler)


def test_same_mean_catches_a_missing_weight():
    def skewed(n, generator, rank=0, world=1):
        t, weight = TIME_SAMPLERS["uniform"](n, generator, rank, world)
        return t**2, weight  # p(t) = 1 / (2 sqrt(t)) was to be divided out

    with pytest.raises(AssertionError):
        same_mean(skewed)


def same_over_processes(sampler):
    together, _ = sampler(8, keyed(3, 8))
    parts = [sampler(4, keyed(3, 4, rank, 2), rank, 2)[0] for rank in range(2)]
    assert torch.equal(torch.stack(parts, 1).flatten(), together)


@every_sampler
def test_same_over_processes(sampler):
    same_over_processes(sampler)


def test_same_over_processes_catches_a_local_batch():
    def local(n, generator, rank=0, world=1):
        return TIME_SAMPLERS["antithetic"](n, generator)

    with pytest.raises(AssertionError):
        same_over_processes(local)


@pytest.mark.parametrize("name", ["stratified", "antithetic"])
def test_every_stratum_is_visited_once(name):
    for seed in range(20):
        t, _ = TIME_SAMPLERS[name](10, keyed(seed, 10))
        assert (t * 10).floor().sort().values.tolist() == list(range(10))


@every_sampler
def test_a_torch_generator_does_too(sampler):
    t, weight = sampler(5, torch.Generator().manual_seed(0))
    assert t.shape == weight.shape == (5,)
    assert torch.equal(t, sampler(5, torch.Generator().manual_seed(0))[0])
