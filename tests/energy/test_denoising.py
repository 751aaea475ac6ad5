"""Denoising: its limit, the mean over noise levels, the levels themselves."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.energy import (
    DenoisingScoreMatching,
    ExactScoreMatching,
    MultiScaleDenoising,
    NoiseConditionalScore,
    NormalMixture,
    Quadratic,
    largest_distance,
    noise_levels,
)

A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tends_to_exact(loss_of, sigma=0.02, n=400_000):
    """(loss - D/2)/sigma^2 is the exact loss, up to order sigma^2."""
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64).expand(n, 2)
    energy = Quadratic(A)
    with torch.no_grad():
        values = loss_of(sigma)(energy, x, seeded())
        # The same noise alone has the mean D/2: taking it away takes the variance with it.
        noise = torch.randn(n, 2, generator=seeded(), dtype=torch.float64)
        found = (values - 0.5 * noise.square().sum(1)) / sigma**2
    assert abs(float(found.mean()) + 1.375) < 4 * float(found.std()) / math.sqrt(n) + 2 * sigma**2


def test_limit_is_the_exact_loss():
    assert ExactScoreMatching()(Quadratic(A), torch.tensor([[1.0, -2.0]]).double()).tolist() == [-1.375]
    tends_to_exact(lambda sigma: DenoisingScoreMatching(sigma=sigma))


def test_limit_catches_a_weight_of_sigma():
    class Lighter(DenoisingScoreMatching):
        def __call__(self, model, x, generator, cond=None):
            return super().__call__(model, x, generator, cond) / self.sigma

    with pytest.raises(AssertionError):
        tends_to_exact(lambda sigma: Lighter(sigma=sigma), n=20_000)


MIXTURE = NormalMixture(torch.tensor([0.3, 0.7]).double(), torch.tensor([[-1.0], [2.0]]).double(), 0.3)
SIGMAS = (2.0, 0.7, 0.2)


def mean_over_levels(loss, n=40_000):
    x, model = MIXTURE.sample(n, seeded(1)), MIXTURE.with_noise()
    with torch.no_grad():
        each = [DenoisingScoreMatching(sigma=s)(model.at(s), x, seeded(2 + i)) for i, s in enumerate(SIGMAS)]
        expected = torch.stack(each).mean(0)
        found = loss(model, x, seeded(9))
    error = (found.std() ** 2 / n + expected.std() ** 2 / n) ** 0.5
    assert abs(float(found.mean() - expected.mean())) < 4 * float(error)


@pytest.mark.parametrize("levels", ["one", "all"])
def test_mean_over_levels(levels):
    mean_over_levels(MultiScaleDenoising(sigmas=SIGMAS, levels=levels))


def test_mean_catches_a_sum_and_a_weight():
    class Sum(MultiScaleDenoising):
        def __call__(self, model, x, generator, cond=None):
            return len(self.sigmas) * super().__call__(model, x, generator, cond)

    with pytest.raises(AssertionError):
        mean_over_levels(Sum(sigmas=SIGMAS))


def test_the_exact_score_is_the_best_at_every_level():
    x, right = MIXTURE.sample(20_000, seeded(1)), MIXTURE.with_noise()
    loss = MultiScaleDenoising(sigmas=SIGMAS, levels="all")
    best = loss(right, x, seeded(2)).mean()
    for factor in (0.9, 1.1):
        other = NoiseConditionalScore(lambda y, sigma, cond, f=factor: f * right.score_at(y, sigma))
        assert loss(other, x, seeded(2)).mean() > best + 1e-3


def test_an_example_has_its_own_noise_and_level():
    x, model = MIXTURE.sample(16, seeded(1)), MIXTURE.with_noise()
    for levels in ("one", "all"):
        loss = MultiScaleDenoising(sigmas=SIGMAS, levels=levels)
        whole = loss(model, x, KeyedGenerator(0, torch.arange(16), "loss"))
        alone = loss(model, x[5:6], KeyedGenerator(0, torch.tensor([5]), "loss"))
        torch.testing.assert_close(whole[5:6], alone, rtol=1e-12, atol=1e-12)


def test_levels():
    levels = noise_levels(30.0)
    ratios = [a / b for a, b in zip(levels[:-1], levels[1:], strict=True)]
    assert levels[0] == 30 and levels[-1] == pytest.approx(0.01)
    assert max(ratios) <= 1.3 + 1e-12 and max(ratios) - min(ratios) < 1e-9
    assert len(noise_levels(30.0, ratio=2.0)) < len(levels)
    x = torch.randn(70, 3, generator=seeded())
    assert largest_distance(x, chunk=16) == pytest.approx(float(torch.cdist(x, x).max()), rel=1e-5)
    far = x.double() + 1e7  # no product of values out there holds a distance of this size
    assert largest_distance(far, chunk=16) == pytest.approx(largest_distance(x), rel=1e-5)
    for wrong in ((0.01, 0.01), (1.0, -1.0)):
        with pytest.raises(ValueError, match="0 < smallest < largest"):
            noise_levels(*wrong)


def test_errors():
    with pytest.raises(ValueError, match="must be positive"):
        DenoisingScoreMatching(sigma=0.0)
    with pytest.raises(ValueError, match="must be positive"):
        MultiScaleDenoising(sigmas=())
    with pytest.raises(ValueError, match="one of one, all"):
        MultiScaleDenoising(sigmas=(1.0,), levels="some")
