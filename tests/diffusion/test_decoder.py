"""The discretised normal distribution: sums to one, exact values, usable gradients."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm

from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    PARAMETERISATIONS,
    CosineSchedule,
    Denoiser,
    DiscretisedGaussian,
    Gaussian,
    LevelSoftmax,
    elbo,
    to_levels,
    to_unit,
)

LEVELS = [2, 3, 17, 32, 256, 65536]
MEANS = [-1.7, -1.0, -0.3, 0.0, 0.004, 0.9, 1.0, 2.5]
LOG_SCALES = [-9.0, -5.0, -1.0, 0.0, 2.0]


# ---- D15 ----


def sums_to_one(decoder, levels, dtype, tolerance):
    k = torch.arange(levels)
    for mean in MEANS:
        for log_scale in LOG_SCALES:
            log_mass = decoder.log_mass(k, torch.tensor(mean, dtype=dtype), torch.tensor(log_scale, dtype=dtype).exp())
            assert log_mass.dtype == dtype and not log_mass.isnan().any()
            assert abs(float(log_mass.double().exp().sum()) - 1) < tolerance


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_sums_to_one(levels, dtype, tolerance):
    sums_to_one(DiscretisedGaussian(levels), levels, dtype, tolerance)


class ClosedEnds(DiscretisedGaussian):
    """The outer levels end half a step beyond their centres."""

    def log_mass(self, k, mean, scale):
        low, high = ((self._edge(k + i).double() - mean.double()) / scale.double() for i in (0, 1))
        return torch.log(torch.special.ndtr(high) - torch.special.ndtr(low)).to(mean.dtype)


class TanhCdf(DiscretisedGaussian):
    """The tanh approximation of the normal distribution function."""

    def log_mass(self, k, mean, scale):
        def cdf(z):
            return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

        low, high = ((self._edge(k + i).double() - mean.double()) / scale.double() for i in (0, 1))
        upper = torch.where(k == self.levels - 1, 1.0, cdf(high))
        return torch.log(upper - torch.where(k == 0, 0.0, cdf(low))).to(mean.dtype)


def matches_scipy(decoder):
    """Masses in the tails, where 1 - cdf has no digits left, against scipy's log-cdfs."""
    for k, mean, scale in [(5, 0.6, 0.2), (5, 0.9, 0.1), (12, -0.8, 0.15), (8, 0.02, 0.3)]:
        low, high = (((2 * (k + i) - 1) / 16 - 1 - mean) / scale for i in (0, 1))
        if low > 0:
            low, high = -high, -low
        expected = norm.logcdf(high) + math.log(-math.expm1(norm.logcdf(low) - norm.logcdf(high)))
        actual = decoder.log_mass(torch.tensor(k), torch.tensor(mean).double(), torch.tensor(scale).double())
        assert float(actual) == pytest.approx(expected, rel=1e-6)


def test_matches_scipy():
    matches_scipy(DiscretisedGaussian(17))


def test_mutants():
    with pytest.raises(AssertionError):
        sums_to_one(ClosedEnds(17), 17, torch.float64, 1e-10)
    with pytest.raises(AssertionError):
        matches_scipy(TanhCdf(17))


@pytest.mark.parametrize(
    "k, levels, mean, scale, expected",
    [
        (8, 17, 0.0, 0.1, -0.759225143),
        (0, 17, -0.9, 0.1, -1.03893805),
        (128, 256, 0.0, 0.01, -1.26028930),
        (255, 256, 0.0, 0.01, -4966.38149),
        (200, 256, -0.5, 0.02, -1421.89228),
    ],
)
def test_constants(k, levels, mean, scale, expected):
    mean, scale = torch.tensor(mean, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64)
    actual = DiscretisedGaussian(levels).log_mass(torch.tensor(k), mean, scale)
    assert float(actual) == pytest.approx(expected, rel=1e-8)


def test_edges_lie_between_centres():
    decoder, k = DiscretisedGaussian(256), torch.arange(255, dtype=torch.float64)
    centre = to_unit(torch.arange(256), 256, dtype=torch.float64)
    torch.testing.assert_close(decoder._edge(k + 1), (centre[1:] + centre[:-1]) / 2, rtol=0, atol=1e-15)


@pytest.mark.parametrize("log_scale", [-7.0, -5.0, -3.0, 0.0])
def test_gradients(log_scale):
    """d log P/d mean = -(phi(b) - phi(a)) / (s P), in the tails and at both open ends too, for float32 means."""
    decoder, n = DiscretisedGaussian(32), 32
    k = torch.arange(n)
    scale = torch.tensor(log_scale, dtype=torch.float64).exp()
    # Every level as seen from a mean a few scales away from its edge, and from very far.
    for shift in (0.3, -4.0, 9.0):
        mean = (to_unit(k, n, dtype=torch.float64) + shift * scale).float().requires_grad_()
        log_mass = decoder.log_mass(k, mean, scale)
        (gradient,) = torch.autograd.grad(log_mass.sum(), mean)
        edges = decoder._edge(torch.arange(n + 1, dtype=torch.float64))
        edges[0], edges[-1] = -torch.inf, torch.inf
        a, b = ((edge - mean.detach().double()) / scale for edge in (edges[:-1], edges[1:]))
        log_p = decoder.log_mass(k, mean.detach().double(), scale)

        def ratio(z, log_p=log_p):
            return torch.exp(-0.5 * z.square() - 0.5 * math.log(2 * math.pi) - log_p)

        expected = -(ratio(b) - ratio(a)) / scale
        # phi(b) - phi(a) nearly cancels where the level is wide and the mean central
        noise = 1e-12 * (ratio(b) + ratio(a)) / scale + 1e-37  # and float32 ends there
        assert ((gradient.double() - expected).abs() <= 1e-6 * expected.abs() + noise).all()


def test_far_tails_stay_finite():
    decoder = DiscretisedGaussian(256)
    mean = torch.tensor([-30.0, 30.0, 0.0]).requires_grad_()
    log_mass = decoder.log_mass(torch.tensor([255, 0, 0]), mean, torch.tensor(1e-3))
    (gradient,) = torch.autograd.grad(log_mass.sum(), mean)
    assert log_mass.isfinite().all() and gradient.isfinite().all()
    mean = torch.tensor([-30.0, 30.0]).requires_grad_()
    certain = decoder.log_mass(torch.tensor([0, 255]), mean, torch.tensor(1e-3))
    (gradient,) = torch.autograd.grad(certain.sum(), mean)
    assert torch.equal(certain, torch.zeros(2)) and torch.equal(gradient, torch.zeros(2))


# ---- the softmax over levels ----


@pytest.mark.parametrize("levels", [2, 17, 256])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_a_softmax_sums_to_one(levels, dtype, tolerance):
    sums_to_one(LevelSoftmax(levels), levels, dtype, tolerance)


def test_a_softmax_is_bayes_rule_under_equal_levels():
    k, mean = torch.arange(17), torch.linspace(-1.3, 1.3, 9, dtype=torch.float64)
    scale = torch.tensor(0.07, dtype=torch.float64)
    centres = to_unit(k, 17, dtype=torch.float64)
    weights = torch.exp(torch.distributions.Normal(centres[:, None], scale).log_prob(mean))
    found = LevelSoftmax(17).log_mass(k[:, None], mean, scale)
    assert (found.exp() - weights / weights.sum(0)).abs().max() < 1e-9


class OfTheEstimate(LevelSoftmax):
    """Reads the estimate of the network."""

    reads_noisy = False


def reconstruction(decoder, last: float) -> float:
    """Nats per scalar of the reconstruction under a network that knows nothing, at t = last of the cosine schedule."""
    k = torch.randint(0, 5, (64, 8), generator=torch.Generator().manual_seed(0))
    blind = Denoiser(lambda x, log_snr, cond: torch.zeros_like(x), CosineSchedule(), PARAMETERISATIONS["x0"]())
    times = torch.tensor([last, 0.5, 1.0], dtype=torch.float64)
    terms = elbo(blind, to_unit(k, 5), decoder, times, KeyedGenerator(0, torch.arange(64), "elbo"))
    return float(terms.reconstruction.mean()) / 8


def test_a_softmax_needs_no_network():
    def check(decoder):
        assert reconstruction(decoder, 0.02) < 1e-3 < 0.1 < reconstruction(decoder, 0.2)

    check(LevelSoftmax(5))
    with pytest.raises(AssertionError):
        check(OfTheEstimate(5))


# ---- maps and errors ----


@pytest.mark.parametrize("levels", LEVELS)
def test_levels_and_back(levels):
    k = torch.arange(levels)
    for dtype in (torch.float32, torch.float64):
        x = to_unit(k, levels, dtype=dtype)
        assert x.dtype == dtype and float(x[0]) == -1 and float(x[-1]) == 1
        assert torch.equal(to_levels(x, levels), k)
    assert to_levels(torch.tensor([-9.0, 9.0]), levels).tolist() == [0, levels - 1]


def test_uint8_levels_do_not_wrap():
    k = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_levels(to_unit(k, 256), 256), k.long())


def test_log_prob_reads_levels():
    decoder, mean, scale = DiscretisedGaussian(17), torch.tensor([0.1, -0.4]), torch.tensor(0.2)
    k = torch.tensor([3, 16])
    assert torch.equal(decoder.log_prob(to_unit(k, 17), mean, scale), decoder.log_mass(k, mean, scale))


def test_data_between_levels_are_refused():
    with pytest.raises(ValueError, match="do not lie on 17 levels"):
        DiscretisedGaussian(17).log_prob(torch.tensor([0.05]), torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize("levels", [None, 1])
def test_discrete_decoder_needs_levels(levels):
    with pytest.raises(ValueError, match="for continuous data use Gaussian"):
        DiscretisedGaussian(levels)


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan])
def test_a_fixed_scale_is_positive(scale):
    with pytest.raises(ValueError, match="must be a positive finite number"):
        Gaussian(scale=scale)


def test_gaussian_is_a_density():
    grid = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    mean, scale = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    assert float(torch.trapezoid(Gaussian().log_prob(grid, mean, scale).exp(), grid)) == pytest.approx(1, abs=1e-12)
    fixed = Gaussian(scale=0.7).log_prob(grid, mean, torch.tensor(5.0, dtype=torch.float64))
    torch.testing.assert_close(fixed, Gaussian().log_prob(grid, mean, scale), rtol=1e-12, atol=0)


def test_values_that_are_no_number_lie_on_no_level():
    mean, scale = torch.zeros(2), torch.ones(2)
    for x in ([math.nan, 0.03], [0.0, math.nan], [0.0, math.inf]):
        with pytest.raises(InputError, match="do not lie on 17 levels"):
            DiscretisedGaussian(17).log_prob(torch.tensor(x), mean, scale)
