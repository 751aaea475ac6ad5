"""Exact denoisers against autograd, brute force and their own draws."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.diffusion import (
    SCHEDULES,
    CosineSchedule,
    GaussianDenoiser,
    LinearPath,
    LinearSchedule,
    MixtureDenoiser,
    alpha_sigma,
    noised_start,
    posterior,
    posterior_variance,
    sigma2_ts,
    step_to_time,
)

MEAN = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
SPREAD = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.5, -0.2], [0.0, -0.2, 0.4]], dtype=torch.float64)
MEANS = torch.tensor([[-1.0, 0.5, 0.0], [1.0, 0.0, 0.3]], dtype=torch.float64)


def exact_denoisers(schedule):
    return {
        "scalar": GaussianDenoiser(schedule, MEAN, 0.25),
        "diagonal": GaussianDenoiser(schedule, MEAN, torch.tensor([0.25, 1.0, 0.04])),
        "full": GaussianDenoiser.from_covariance(schedule, MEAN, SPREAD),
        "mixture": MixtureDenoiser(schedule, torch.tensor([0.3, 0.7]), MEANS, torch.tensor([0.1, 0.3])),
    }


def points(n=6):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# ---- D5 ----


def score_is_gradient(denoiser):
    t = torch.tensor([0.02, 0.1, 0.3, 0.6, 0.9, 1.0], dtype=torch.float64)
    x = points().requires_grad_()
    (gradient,) = torch.autograd.grad(denoiser.marginal_log_prob(x, t).sum(), x)
    prediction = denoiser(x.detach(), t)
    assert (prediction.score - gradient).abs().max() < 1e-10 * max(1, float(gradient.abs().max()))
    alpha, sigma = (value[:, None] for value in denoiser.schedule.alpha_sigma(t))
    # Tweedie: E[x_0 | x] = (x + sigma^2 score) / alpha, wherever alpha leaves digits
    tweedie = (x.detach() + sigma**2 * gradient) / alpha
    assert ((prediction.x0 - tweedie) * alpha).abs().max() < 1e-10
    assert (prediction.eps + sigma * gradient).abs().max() < 1e-10
    assert (prediction.v - (alpha * prediction.eps - sigma * prediction.x0)).abs().max() < 1e-12


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "sigmoid"])
@pytest.mark.parametrize("kind", ["scalar", "diagonal", "full", "mixture"])
def test_score_is_gradient(schedule, kind):
    score_is_gradient(exact_denoisers(SCHEDULES[schedule]())[kind])


class ForgetsAlpha(GaussianDenoiser):
    """The mean is not scaled down with the signal."""

    def _moments(self, x, log_snr):
        alpha, sigma = (value[:, None] for value in alpha_sigma(log_snr))
        score = -(x - self.mean) / (alpha.square() * self.variance + sigma.square())
        return self.mean - alpha * self.variance * score, score


def test_score_catches_a_forgotten_alpha():
    with pytest.raises(AssertionError):
        score_is_gradient(ForgetsAlpha(CosineSchedule(), MEAN, 0.25))


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "full", "mixture"])
@pytest.mark.parametrize("t", [0.0, 0.4])
def test_densities_integrate_to_one(kind, t):
    denoiser = exact_denoisers(CosineSchedule())[kind]
    axis = torch.linspace(-5, 5, 81, dtype=torch.float64)
    x = torch.cartesian_prod(axis, axis, axis)
    mass = denoiser.marginal_log_prob(x, torch.tensor([t])).exp().sum() * float(axis[1] - axis[0]) ** 3
    assert float(mass) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "full", "mixture"])
def test_mean_by_brute_force(kind):
    """E[x_0 | x] as a ratio of two sums over draws of the data, within 4.5 standard errors of the ratio."""
    denoiser, n = exact_denoisers(CosineSchedule())[kind], 400_000
    t = torch.tensor([0.6], dtype=torch.float64)
    alpha, sigma = denoiser.schedule.alpha_sigma(t)
    x = torch.tensor([[0.3, -0.4, 0.6]], dtype=torch.float64)
    x0 = denoiser.sample(n, torch.Generator().manual_seed(3))
    weight = torch.exp(-0.5 * ((x - alpha * x0) / sigma).square().sum(1, keepdim=True))
    mean = (weight * x0).sum(0) / weight.sum()
    error = ((weight * (x0 - mean)).square().sum(0)).sqrt() / weight.sum()
    assert ((denoiser(x, t).x0[0] - mean).abs() < 4.5 * error).all()


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "full", "mixture"])
def test_draws_have_the_density_s_moments(kind):
    denoiser, n = exact_denoisers(CosineSchedule())[kind], 100_000
    source = torch.Generator().manual_seed(4)
    x = noised_start(denoiser.schedule, denoiser.sample(n, source), 0.3, source)
    # The mean of the score over the true density is 0, of x score^T it is -I: five standard errors.
    score = denoiser(x, torch.tensor([0.3]).expand(n)).score
    products = torch.einsum("bi,bj->bij", x, score)
    for values, truth in ((score, torch.zeros(3)), (products, -torch.eye(3))):
        assert ((values.mean(0) - truth).abs() < 5 * values.std(0) / math.sqrt(n)).all()


def test_log_prob_is_the_marginal_without_noise():
    for denoiser in exact_denoisers(LinearSchedule()).values():
        x = points()
        marginal = denoiser.marginal_log_prob(x, torch.zeros(1))
        torch.testing.assert_close(denoiser.log_prob(x), marginal, rtol=1e-12, atol=0)


def test_numbers():
    """Those of the specification: densities and scores of the data and of one noise level, entropies."""
    def of(*values):
        return torch.tensor(values, dtype=torch.float64)

    covariance = of((1.0, 0.5, 0.0), (0.5, 2.0, -0.3), (0.0, -0.3, 0.5))
    gaussian = GaussianDenoiser.from_covariance(CosineSchedule(), of(0.5, -1.0, 2.0), covariance)
    mixture = MixtureDenoiser(CosineSchedule(), of(0.3, 0.7), of((-2.0, 0.0), (2.0, 0.0)), of(0.25, 1.0))
    clean, noisy = of(math.inf), of(0.64 / 0.36).log()
    for exact, x, log_snr, log_prob, score in (
        (gaussian, [0.0, 0, 0], clean, -6.7615759974, (0.5159235669, -0.0318471338, 3.9808917197)),
        (mixture, [0.0, 0], clean, -4.1903117236, (1.9576869061, 0)),
        (mixture, [-1.0, 0.5], clean, -4.0882060384, (-3.5440790423, -1.9023026519)),
        (mixture, [0.0, 0], noisy, -3.2491211655, None),
    ):
        x = of(x)
        assert float(exact._log_marginal(x, log_snr)) == pytest.approx(log_prob, abs=1e-8)
        if score is not None:
            assert exact.at_log_snr(x, log_snr).score[0].tolist() == pytest.approx(score, abs=1e-8)
    assert gaussian.entropy == pytest.approx(4.1357798190, abs=1e-8)
    assert mixture.entropy == pytest.approx(3.0227, abs=5e-5)


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1, 2)])
def test_the_entropy_of_a_mixture_is_that_of_its_parts(shape):
    """Equal parts make a Gaussian; of parts far from one another it is the mean, plus that of the choice."""
    for apart in (0.0, 60.0):
        means = torch.stack([torch.zeros(shape), torch.full(shape, apart)])
        mixture = MixtureDenoiser(CosineSchedule(), torch.tensor([0.25, 0.75]), means, 0.5)
        chosen = (0.25 * math.log(4) + 0.75 * math.log(4 / 3)) if apart else 0.0
        gaussian = GaussianDenoiser(CosineSchedule(), torch.zeros(shape), 0.5).entropy
        assert mixture.entropy == pytest.approx(gaussian + chosen, abs=1e-9)


def test_the_entropy_of_a_mixture_of_many_scalars_is_refused(refuses):
    refuses(InputError, "3 scalars are too many for", getattr, exact_denoisers(CosineSchedule())["mixture"], "entropy")


def test_float32_in_float32_out():
    prediction = exact_denoisers(CosineSchedule())["full"](points().float(), torch.full((6,), 0.5))
    assert prediction.x0.dtype == prediction.output.dtype == prediction.score.dtype == torch.float32


def test_images_too():
    denoiser = MixtureDenoiser(CosineSchedule(), torch.ones(2), torch.zeros(2, 1, 4, 4), torch.tensor([0.1, 0.3]))
    x = denoiser.sample(5, torch.Generator().manual_seed(0))
    assert x.shape == denoiser(x, torch.rand(5)).x0.shape == (5, 1, 4, 4)


# ---- D7 ----


def optimal_variance(reverse_variance, schedule=None, c2=0.25):
    schedule = schedule or LinearSchedule()
    log_snr = schedule.log_snr(step_to_time(torch.arange(1, 1001), 1000))
    s, t = log_snr[:-1], log_snr[1:]
    marginal = torch.sigmoid(s) * c2 + torch.sigmoid(-s), torch.sigmoid(t) * c2 + torch.sigmoid(-t)
    truth = marginal[0] * sigma2_ts(s, t) / marginal[1]
    torch.testing.assert_close(reverse_variance(s, t), truth, rtol=1e-10, atol=0)


def test_optimal_reverse_variance():
    optimal_variance(exact_denoisers(LinearSchedule())["scalar"].reverse_variance)


def test_optimal_reverse_variance_catches_clipping():
    denoiser = exact_denoisers(LinearSchedule())["scalar"]

    def clipped(s, t):
        c_0, _, _ = posterior(s, t)
        floor = posterior_variance(s, t)[3]  # "the value at the fourth step"
        return posterior_variance(s, t).clamp(min=float(floor)) + c_0.square() * denoiser.mmse(t)[:, 0]

    with pytest.raises(AssertionError):
        optimal_variance(clipped)


def test_mmse_is_the_error_of_the_mean():
    denoiser = exact_denoisers(CosineSchedule())["diagonal"]
    log_snr = torch.tensor([2.0, -1.0], dtype=torch.float64)
    expected = denoiser.variance / (1 + denoiser.variance * log_snr.exp()[:, None])
    torch.testing.assert_close(denoiser.mmse(log_snr), expected, rtol=1e-12, atol=0)
    assert torch.equal(denoiser.mmse(torch.tensor(-torch.inf).double()), denoiser.variance)


def test_unlike_variances_have_no_single_reverse_variance():
    with pytest.raises(ValueError, match="variance differs"):
        exact_denoisers(CosineSchedule())["diagonal"].reverse_variance(torch.zeros(1), -torch.ones(1))


SQUARE = torch.tensor([[1.0, 2.0], [2.0, 1.0]])  # an eigenvalue of -1


@pytest.mark.parametrize(("reason", "build"), [
    ("variances must be finite and not negative", lambda s: GaussianDenoiser(s, torch.zeros(2), -1.0)),
    ("variances must be finite and not negative", lambda s: GaussianDenoiser(s, torch.zeros(2), math.nan)),
    ("variances must be", lambda s: GaussianDenoiser.from_covariance(s, torch.zeros(2), SQUARE)),
    ("must be symmetric", lambda s: GaussianDenoiser.from_covariance(s, torch.zeros(2), SQUARE.triu())),
    ("weights of a mixture", lambda s: MixtureDenoiser(s, torch.tensor([1.0, -0.5]), torch.zeros(2, 1), 1.0)),
    ("variances must be", lambda s: MixtureDenoiser(s, torch.ones(2), torch.zeros(2, 1), math.inf)),
])
def test_what_is_no_density_is_refused(refuses, reason, build):
    refuses(InputError, reason, build, CosineSchedule())


def test_a_covariance_of_smaller_rank_that_rounding_made_negative():
    covariance = torch.diag(torch.tensor([4.0, -1e-9]))
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(2), covariance)
    x = denoiser.sample(2000, torch.Generator().manual_seed(0))
    assert not x[:, 1].any() and abs(float(x[:, 0].var()) - 4) < 5 * 4 * math.sqrt(2 / 2000)


@pytest.mark.parametrize("name", ["scalar", "diagonal", "full", "mixture"])
def test_an_empty_batch_has_empty_predictions(name):
    denoiser, x, t = exact_denoisers(CosineSchedule())[name], torch.zeros(0, 3), torch.zeros(0)
    prediction = denoiser(x, t)
    assert prediction.x0.shape == prediction.score.shape == prediction.output.shape == (0, 3)
    assert denoiser.log_prob(x).shape == denoiser.marginal_log_prob(x, t).shape == (0,)
    assert denoiser.sample(0, torch.Generator().manual_seed(0)).shape == (0, 3)


@pytest.mark.parametrize("name", ["scalar", "diagonal", "full", "mixture"])
def test_a_denoiser_made_float32_says_the_same_to_its_precision(name):
    x, t = points(), torch.full((6,), 0.4, dtype=torch.float64)
    kept, rounded = exact_denoisers(CosineSchedule())[name], exact_denoisers(CosineSchedule())[name].float()
    assert (kept(x, t).x0 - rounded(x.float(), t).x0).abs().max() < 1e-5
    assert (kept.marginal_log_prob(x, t) - rounded.marginal_log_prob(x, t)).abs().max() < 1e-4


def test_points_of_no_variance_are_their_own_estimate():
    clean, mean = torch.tensor([0.0]), torch.tensor([1.0, -2.0])
    assert GaussianDenoiser(LinearPath(), mean, 0.0)(mean[None], clean).x0.tolist() == [mean.tolist()]
    line = GaussianDenoiser.from_covariance(LinearPath(), torch.zeros(2), torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
    x = torch.tensor([[0.5, 0.5]])
    assert torch.allclose(line(x, clean).x0, x, atol=1e-6)
    assert GaussianDenoiser(LinearPath(), mean, 0.0).mmse(torch.tensor([math.inf])).tolist() == [[0.0, 0.0]]


def test_a_mixture_has_a_weight_for_each_mean(refuses):
    refuses(InputError, "one for each mean", MixtureDenoiser, CosineSchedule(), torch.ones(1), torch.zeros(2, 1), 1.0)
