"""Integrals of known densities over the plane."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.models import density
from genmodels.models.density import over_the_plane


def peaks(centres, deviation):
    """A mixture of round Gaussians: its log-density, and samples."""
    centres = torch.tensor(centres, dtype=torch.float64)

    def log_density(x):
        squares = ((x[:, None] - centres) / deviation).square().sum(2)
        return torch.logsumexp(-squares / 2, 1) - math.log(2 * math.pi * deviation**2 * len(centres))

    def draw(n, generator):
        which = torch.randint(len(centres), (n,), generator=generator)
        return centres[which] + deviation * torch.randn(n, 2, dtype=torch.float64, generator=generator)

    return log_density, draw


def bent(deviation):
    """A parabola with Gaussian noise across."""
    def log_density(x):
        across = (x[:, 1] - x[:, 0].square()) / deviation
        return -(x[:, 0].square() + across.square()) / 2 - math.log(2 * math.pi * deviation)

    def draw(n, generator):
        z = torch.randn(n, 2, dtype=torch.float64, generator=generator)
        return torch.stack([z[:, 0], z[:, 0].square() + deviation * z[:, 1]], 1)

    return log_density, draw


def correlated(r):
    def log_density(x):
        across = (x[:, 1] - r * x[:, 0]) / math.sqrt(1 - r**2)
        return -(x[:, 0].square() + across.square()) / 2 - math.log(2 * math.pi) - math.log(1 - r**2) / 2

    def draw(n, generator):
        z = torch.randn(n, 2, dtype=torch.float64, generator=generator)
        return torch.stack([z[:, 0], r * z[:, 0] + math.sqrt(1 - r**2) * z[:, 1]], 1)

    return log_density, draw


def spike():
    """A wide Gaussian, and a peak with one per cent of the mass."""
    (wide, draw_wide), (narrow, draw_narrow) = peaks([[0, 0]], 1.0), peaks([[1, 1]], 1e-3)

    def log_density(x):
        return torch.logaddexp(wide(x) + math.log(0.99), narrow(x) + math.log(0.01))

    def draw(n, generator):
        few = n // 100
        return torch.cat([draw_wide(n - few, generator), draw_narrow(few, generator)])

    return log_density, draw


LINE = [[-4.0, 1.0], [0.0, 0.0], [4.0, -1.0]]
CIRCLE = [[4 * math.cos(k * math.pi / 4), 4 * math.sin(k * math.pi / 4)] for k in range(8)]
DENSITIES = {
    "two peaks": (*peaks(LINE[::2], 1e-3), 500),
    "three peaks": (*peaks(LINE, 0.01), 2000),
    "eight peaks": (*peaks(CIRCLE, 0.01), 500),
    "bent": (*bent(0.1), 8192),
    "correlated": (*correlated(0.999), 2000),
    "spike": (*spike(), 500),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", DENSITIES)
def test_integrals_are_one_within_their_errors(name, seed):
    log_density, draw, n = DENSITIES[name]
    mass, error, points = over_the_plane(log_density, draw(n, torch.Generator().manual_seed(seed)))
    assert abs(mass - 1) < 5e-4 and error <= 2e-4 and points < 400_000


BLIND = {"_quarter_of": lambda points, low, size: torch.zeros(len(points), dtype=torch.long)}


@pytest.mark.parametrize(("name", "seed", "mutant"), [
    ("two peaks", 0, BLIND), ("spike", 0, BLIND), ("eight peaks", 9, {"_beyond": lambda samples: samples[:0]})
])  # fmt: skip
def test_what_samples_show_is_needed(name, seed, mutant, monkeypatch):
    for key, value in mutant.items():
        monkeypatch.setattr(density, key, value)
    log_density, draw, n = DENSITIES[name]
    mass, error, _ = over_the_plane(log_density, draw(n, torch.Generator().manual_seed(seed)))
    assert abs(mass - 1) > 5e-4 or error > 2e-4


def test_few_and_bad_samples():
    log_density, draw = peaks([[2.0, -3.0]], 0.5)
    samples = draw(12, torch.Generator().manual_seed(0))
    samples[3] = math.nan
    assert abs(over_the_plane(log_density, samples)[0] - 1) < 2e-4
    assert abs(over_the_plane(log_density, samples[:3])[0] - 1) < 2e-4
