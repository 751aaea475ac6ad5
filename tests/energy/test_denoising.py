"""Denoising: its limit, the noise levels and their energies."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.errors import RunError
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import alpha_sigma
from genmodels.energy import (
    ContrastiveDivergence,
    DenoisingScoreMatching,
    DiffusionImportanceSampling,
    ExactScoreMatching,
    NoiseLevels,
    Potential,
    Quadratic,
    largest_distance,
)
from genmodels.energy.denoising import _Step

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


def test_the_largest_distance():
    x = torch.randn(70, 3, generator=seeded())
    assert largest_distance(x, chunk=16) == pytest.approx(float(torch.cdist(x, x).max()), rel=1e-5)
    far = x.double() + 1e7  # no product of values out there holds a distance of this size
    assert largest_distance(far, chunk=16) == pytest.approx(largest_distance(x), rel=1e-5)


def test_errors():
    for sigma in (0.0, math.nan):
        with pytest.raises(ValueError, match="must be a positive"):
            DenoisingScoreMatching(sigma=sigma)


# ---- the energies of all noise levels --------------------------------------------------------------------------------

MEAN, SPREAD, CLEANEST = torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64), 0.3, 5.0


class OfGaussian(torch.nn.Module):
    """f whose `Potential` is that of data N(m, s^2 I):  E = (|x - alpha m|^2 - |alpha m|^2)/(2 var),
    var = (alpha s)^2 + sigma^2."""

    def forward(self, x, log_snr, cond):
        alpha, sigma = (value[:, None] for value in alpha_sigma(log_snr))
        variance = (alpha * SPREAD) ** 2 + sigma**2
        return -sigma * (0.5 * alpha * (SPREAD**2 - 1) * x + MEAN) / variance


def moments_at(log_snr: float) -> tuple[torch.Tensor, float]:
    alpha, sigma = alpha_sigma(torch.tensor(log_snr).double())
    return alpha * MEAN, float((alpha * SPREAD) ** 2 + sigma**2)


def test_the_energy_of_every_level_is_that_of_a_gaussian_and_the_score_its_gradient():
    model, x = NoiseLevels(Potential(OfGaussian()), CLEANEST), torch.randn(4, 3, generator=seeded()).double()
    path = model.path(4)
    assert [level.log_snr for level in path] == [-8.0, -4.75, -1.5, 1.75, 5.0]
    for level in path:
        mean, variance = moments_at(level.log_snr)
        exact = 0.5 * ((x - mean).square().sum(1) - mean.square().sum()) / variance
        assert torch.allclose(level.energy(x), exact) and torch.allclose(level.score(x), (mean - x) / variance)
        other = NoiseLevels(level.network, level.log_snr + 0.1)  # of another level it is not
        assert not torch.allclose(other.energy(x), exact)


def log_z_of_the_gaussian(scale: float = 1.0, steps: int = 40, chains: int = 400, samples: int | None = None,
                          generator=None):
    """The estimate, with energies that are `scale` times too large at all levels but the last, and the truth."""

    class Scaled(Potential):
        def energy(self, x, log_snr, cond=None, mask=None):
            return (scale if float(log_snr[0]) < CLEANEST else 1.0) * super().energy(x, log_snr, cond, mask)

    mean, variance = moments_at(CLEANEST)
    truth = 1.5 * math.log(2 * math.pi * variance) + 0.5 * float(mean.square().sum()) / variance
    draws = mean + variance**0.5 * torch.randn(samples or chains, 3, generator=seeded(5), dtype=torch.float64)
    sampling = DiffusionImportanceSampling(steps=steps)
    found = sampling(NoiseLevels(Scaled(OfGaussian()), CLEANEST), (3,), generator or seeded(), chains=chains,
                     samples=draws, dtype=torch.float64)
    return found, truth


def lies_between(found, truth):
    assert abs(found.log_z - truth) < 4 * found.stderr and found.upper > truth - 4 * found.upper_stderr
    assert found.least < truth < found.most and found.reverse == "exact"


@pytest.mark.parametrize("scale, width, ess", [(1.0, 0.05, 300), (1.1, 0.2, 100)])
def test_log_z_lies_between_both_directions_even_if_the_levels_do_not_fit_together(scale, width, ess):
    found, truth = log_z_of_the_gaussian(scale)
    lies_between(found, truth)
    assert found.width < width and found.ess > ess


@pytest.mark.parametrize("samples", [200, 700])
def test_other_numbers_of_samples_than_chains(samples):
    lies_between(*log_z_of_the_gaussian(samples=samples, generator=KeyedGenerator(0, torch.arange(400), "ais")))


def without_the_noising_kernel(self, x, x_next, mean):
    return 0.5 * ((x_next - mean) / self.spread).square().sum(1) + self.spread.log().sum()


def score_forgotten(self, x, score):
    return x / self.r


@pytest.mark.parametrize("name, wrong", [("log_ratio", without_the_noising_kernel)])
def test_check_catches_wrong_weights(name, wrong, monkeypatch):
    monkeypatch.setattr(_Step, name, wrong)
    with pytest.raises(AssertionError):
        lies_between(*log_z_of_the_gaussian())


def test_steps_without_the_score_have_few_chains_that_count(monkeypatch):
    right = log_z_of_the_gaussian()[0].ess
    monkeypatch.setattr(_Step, "mean", score_forgotten)
    assert log_z_of_the_gaussian()[0].ess < 0.05 * right


def test_without_exact_draws_the_reverse_chains_start_at_the_forward_ones():
    model = NoiseLevels(Potential(OfGaussian()).float(), CLEANEST)
    keyed = KeyedGenerator(0, torch.arange(200), "log Z")
    found = DiffusionImportanceSampling(steps=20, tune=64)(model, (3,), keyed, chains=200, dtype=torch.float64)
    assert found.reverse == "approximate" and found.least < log_z_of_the_gaussian()[1] < found.most
    again = DiffusionImportanceSampling(steps=20, tune=64)(model, (3,), keyed, chains=200, dtype=torch.float64)
    assert again == found


def test_a_chain_that_diverges_leaves_the_buffer(refuses):
    loss = ContrastiveDivergence((2,), size=8, steps=400, step_size=5.0)
    before, x = loss.chains.clone(), torch.randn(4, 2)
    refuses(RunError, "a chain of contrastive divergence left all bounds", loss, Quadratic(100 * torch.eye(2)), x,
            torch.Generator())
    assert torch.equal(loss.chains, before)
