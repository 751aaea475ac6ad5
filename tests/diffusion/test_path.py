"""Paths: their derivatives, their inverse, and exact velocities of Gaussians and mixtures along every one of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

import genmodels.diffusion.path as process
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    SCHEDULES,
    CosineSchedule,
    GaussianDenoiser,
    LinearLogSnrSchedule,
    LinearPath,
    LinearSchedule,
    MixtureDenoiser,
    OdeDensity,
    OnPath,
    Velocity,
    make_path,
    sample,
    step_to_time,
    uniform_t,
)
from genmodels.diffusion.samplers import FlowSampler, SDESampler
from tests.mutants.densities import ForgottenNoise
from tests.mutants.diffusion import EqualShares

NAMES = ("linear", "cosine", "vp_linear_continuous", "vp_cosine", "vp_sigmoid", "vp_linear_log_snr", "vp_linear")
PATHS = {name: make_path(name, 1000) for name in NAMES}
PATHS["linear, sigma_min"] = LinearPath(sigma_min=0.1)
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
TIMES = torch.linspace(0.013, 0.987, 40, dtype=torch.float64)


def rates_are_derivatives(path):
    t = TIMES.clone().requires_grad_()
    for part, rate in zip(path.alpha_sigma(t), path.rates(TIMES), strict=True):
        (slope,) = torch.autograd.grad(part.sum(), t, retain_graph=True)
        torch.testing.assert_close(rate, slope, rtol=1e-8, atol=1e-10)


def log_snr_is_derived(path):
    alpha, sigma = path.alpha_sigma(TIMES)
    torch.testing.assert_close(path.log_snr(TIMES), 2 * torch.log(alpha / sigma), rtol=1e-10, atol=1e-10)
    fall, rise = path.rates(TIMES)
    expected = -2 * (alpha * rise - fall * sigma) / (alpha * sigma)
    torch.testing.assert_close(path.log_snr_rate(TIMES), expected, rtol=1e-8, atol=0)
    assert (path.time_of(path.log_snr(TIMES)) - TIMES).abs().max() < 1e-9


@every_path
@pytest.mark.parametrize("check", [rates_are_derivatives, log_snr_is_derived])
def test_every_path(check, path):
    check(path)


def test_a_forgotten_derivative_is_found():
    with pytest.raises(AssertionError):
        rates_are_derivatives(ForgottenNoise())


def test_ends_of_the_straight_path():
    assert LinearPath().end_points == (math.inf, -math.inf)
    first, last = LinearPath(sigma_min=0.1).end_points
    assert first == pytest.approx(-2 * math.log(0.1)) and last == -math.inf
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert LinearPath().time_of(LinearPath().log_snr(times)).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="below 1"):
        LinearPath(sigma_min=1.0)


# ---- velocities of the closed form ----

MEAN = torch.tensor([1.0, -0.5], dtype=torch.float64)
COVARIANCE = torch.tensor([[0.25, 0.1], [0.1, 0.5]], dtype=torch.float64)


def seen(path, x_t, t):
    """A path's own x_t as denoisers see it."""
    return x_t / path.scale(t)[:, None]


@every_path
def test_the_velocity_of_a_gaussian(path):
    """v* = alpha' m + (alpha alpha' S + sigma sigma' I) C^-1 (x - alpha m), C = alpha^2 S + sigma^2 I."""
    x = torch.randn(len(TIMES), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact, eye = GaussianDenoiser.from_covariance(path, MEAN, COVARIANCE), torch.eye(2, dtype=torch.float64)
    expected = []
    for (a, s), (da, ds), point in zip(
        zip(*path.alpha_sigma(TIMES), strict=True), zip(*path.rates(TIMES), strict=True), x, strict=True
    ):
        c = a**2 * COVARIANCE + s**2 * eye
        slope = (a * da * COVARIANCE + s * ds * eye) @ torch.linalg.solve(c, point - a * MEAN)
        expected.append(da * MEAN + slope)
    found = exact(seen(path, x, TIMES), TIMES).velocity
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-7, atol=1e-9)


def test_the_straight_path_in_numbers():
    """One dimension, m = 1, S = 1/4, t = 1/2: v*(0.5) = -1 and v*(1) = -0.4; x = x_t - .4 v, e = x_t + .6 v at .4."""
    path, t = LinearPath(), torch.full((2,), 0.5, dtype=torch.float64)
    exact = GaussianDenoiser(path, torch.ones(1), 0.25)
    x_t = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    assert exact(seen(path, x_t, t), t).velocity.flatten().tolist() == pytest.approx([-1.0, -0.4], abs=1e-12)
    t, u = torch.full((2,), 0.4, dtype=torch.float64), torch.tensor([[2.0], [-3.0]], dtype=torch.float64)
    found = Velocity().to_prediction(u, seen(path, x_t, t), path.log_snr(t))
    torch.testing.assert_close(found.x0, x_t - 0.4 * u)
    torch.testing.assert_close(found.eps, x_t + 0.6 * u)
    torch.testing.assert_close(found.along(path, t).velocity, u)


WEIGHTS = torch.tensor([0.3, 0.7], dtype=torch.float64)
MEANS = torch.tensor([[-1.0, 0.5], [1.0, 0.0]], dtype=torch.float64)
VARIANCES = torch.tensor([0.04, 0.25], dtype=torch.float64)


def velocity_of_the_mixture(kind, path):
    """v* = sum_k r_k v*_k with the shares r_k of the components at x_t."""
    x = torch.randn(len(TIMES), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (a, s), (da, ds) = path.alpha_sigma(TIMES), path.rates(TIMES)
    joint, velocities = [], []
    for w, m, v in zip(WEIGHTS, MEANS, VARIANCES, strict=True):
        c = a**2 * v + s**2
        offset = x - a[:, None] * m
        joint.append(w.log() - offset.square().sum(1) / (2 * c) - torch.log(2 * math.pi * c))
        velocities.append(da[:, None] * m + ((a * da * v + s * ds) / c)[:, None] * offset)
    shares = torch.stack(joint).softmax(0)
    expected = (shares[..., None] * torch.stack(velocities)).sum(0)
    found = kind(path, WEIGHTS, MEANS, VARIANCES)(seen(path, x, TIMES), TIMES).velocity
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@every_path
def test_the_velocity_of_a_mixture(path):
    velocity_of_the_mixture(MixtureDenoiser, path)


def test_shares_that_ignore_x_are_found():
    with pytest.raises(AssertionError):
        velocity_of_the_mixture(EqualShares, LinearPath())


def mass_is_kept(kind, path):
    """d log p_t / dt + v . grad log p_t + div v = 0 at every point: the velocity moves the marginals, its divergence
    is the change of log p along a trajectory. All derivatives by autograd, p_t the density of the path's own x_t."""
    exact, truth = kind(path, WEIGHTS, MEANS, VARIANCES), MixtureDenoiser(path, WEIGHTS, MEANS, VARIANCES)
    t = TIMES[::4].clone().requires_grad_()
    x = torch.randn(len(t), 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    r = path.scale(t)
    log_p = truth.marginal_log_prob(x / r[:, None], t) - 2 * torch.log(r)
    by_x, by_t = torch.autograd.grad(log_p.sum(), (x, t), retain_graph=True)
    v = exact(x / r[:, None], t).velocity
    divergence = sum(torch.autograd.grad(v[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(2))
    change = by_t + (v * by_x).sum(1) + divergence
    assert (change / (1 + divergence.abs())).abs().max() < 1e-7


@every_path
def test_the_continuity_equation(path):
    mass_is_kept(MixtureDenoiser, path)


def test_mass_that_is_lost_is_found():
    with pytest.raises(AssertionError):
        mass_is_kept(EqualShares, LinearPath())


# ---- one model on several paths ----


@every_path
def test_a_denoiser_of_another_path(path):
    """Moved to a path, the exact denoiser of a noise schedule has the velocity of the one built there."""
    moved = OnPath(MixtureDenoiser(CosineSchedule(), WEIGHTS, MEANS, VARIANCES), path)
    built = MixtureDenoiser(path, WEIGHTS, MEANS, VARIANCES)
    x = torch.randn(len(TIMES), 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(moved(x, TIMES).velocity, built(x, TIMES).velocity)


def test_a_denoiser_is_not_asked_beyond_its_noisiest_level():
    asked = []

    class Trained(MixtureDenoiser):
        def at_log_snr(self, x, log_snr, cond=None, mask=None, estimate=None):
            asked.append(log_snr)
            return super().at_log_snr(x, log_snr, cond, mask, estimate)

    ends = LinearLogSnrSchedule(log_snr_max=10.0, log_snr_min=-3.0)
    OnPath(Trained(ends, WEIGHTS, MEANS, VARIANCES), CosineSchedule())(torch.zeros(3, 2), torch.tensor([0.2, 0.9, 1.0]))
    assert float(asked[0][0]) == pytest.approx(float(CosineSchedule().log_snr(torch.tensor(0.2))))
    assert asked[0].min() == asked[0][2] == -3.0


@every_path
@pytest.mark.parametrize("sampler", [FlowSampler(), SDESampler()], ids=["flow", "sde"])
def test_samples_begin_where_no_signal_is_left(sampler, path):
    exact, keyed = GaussianDenoiser(path, MEAN, torch.tensor([0.25, 2.0])), KeyedGenerator(0, torch.arange(2000))
    if path is PATHS["vp_sigmoid"]:  # alpha^2 falls to 0 linearly: alpha' is infinite
        with pytest.raises(ValueError, match="has no bound at t = 1: choose sampler=dpmpp_2m"):
            sample(exact, (2, 2), uniform_t(path, 10), sampler, KeyedGenerator(0, torch.arange(2)))
        return
    x = sample(exact, (2000, 2), uniform_t(path, 100), sampler, keyed, dtype=torch.float64).x
    assert (x.mean(0) - MEAN).abs().max() < 0.2 and (x.var(0) / torch.tensor([0.25, 2.0]) - 1).abs().max() < 0.2


def test_the_flow_map_of_a_gaussian():
    """From t = 1 to s: x_s = alpha_s m + C_s^(1/2) x_1 (spec of commuting covariances), by many steps of `flow`."""
    path = LinearPath()
    exact = GaussianDenoiser(path, MEAN, torch.tensor([0.25, 2.0]))
    start = torch.randn(5, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    times = torch.cat([uniform_t(path, 400)[:-40]])  # down to t = 0.1
    x = sample(exact, (5, 2), times, FlowSampler(), KeyedGenerator(0, torch.arange(5)), start=start,
               dtype=torch.float64).x * path.scale(times[-1])
    alpha, sigma = path.alpha_sigma(times[-1])
    expected = alpha * MEAN + (alpha**2 * torch.tensor([0.25, 2.0]) + sigma**2).sqrt() * start
    assert (x - expected).abs().max() < 1e-4


def test_log_p_by_the_ode_is_that_of_the_gaussian_and_the_mixture():
    path = LinearPath()
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    level = 18.0
    alpha, sigma = (float(part) for part in path.alpha_sigma(path.time_of(torch.tensor(level))))
    r = math.hypot(alpha, sigma)
    for exact, log_prob in [
        (GaussianDenoiser.from_covariance(path, MEAN, COVARIANCE),
         MultivariateNormal(MEAN, COVARIANCE + (sigma / alpha) ** 2 * torch.eye(2)).log_prob(x)),
        (MixtureDenoiser(path, WEIGHTS, MEANS, VARIANCES),
         MixtureDenoiser(path, WEIGHTS, MEANS, VARIANCES + (sigma / alpha) ** 2).log_prob(x)),
    ]:
        found = OdeDensity(tolerance=1e-7)(exact, alpha / r * x, level).log_prob[:, 0] + 2 * math.log(alpha / r)
        assert (found - log_prob).abs().max() < 1e-3


SMOOTH = {name: schedule() for name, schedule in SCHEDULES.items()}
every_schedule = pytest.mark.parametrize("schedule", SMOOTH.values(), ids=SMOOTH.keys())


def grid(schedule, steps):
    """Log-SNRs of the clean end and of the times 1/T .. 1."""
    log_snr = schedule.log_snr(step_to_time(torch.arange(steps + 1), steps))
    log_snr[0] = torch.inf
    return log_snr


# ---- D3: kernels compose ----


def kernels_compose(schedule, sigma2_ts=process.sigma2_ts):
    log_snr = grid(schedule, 40)
    scale, variance = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for s, t in zip(log_snr[:-1], log_snr[1:], strict=True):
        a = process.alpha_ts(s, t)
        scale, variance = a * scale, a**2 * variance + sigma2_ts(s, t)
        alpha, sigma = process.alpha_sigma(t)
        assert abs(scale - alpha) < 1e-10 and abs(variance - sigma**2) < 1e-10


@every_schedule
def test_kernels_compose(schedule):
    kernels_compose(schedule)


def test_kernels_compose_catches_sigma_for_its_square():
    with pytest.raises(AssertionError):
        kernels_compose(SMOOTH["cosine"], lambda s, t: process.sigma2_ts(s, t).sqrt())


def moments(q_sample):
    n, generator = 200_000, torch.Generator().manual_seed(0)
    log_snr = torch.tensor(-0.7, dtype=torch.float64)
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    x = q_sample(torch.full((n, 1), 0.8, dtype=torch.float64), log_snr, noise)
    alpha2, sigma2 = torch.sigmoid(log_snr), torch.sigmoid(-log_snr)
    assert abs(x.mean() - 0.8 * alpha2.sqrt()) < 5 * (sigma2 / n).sqrt()
    assert abs(x.var() - sigma2) < 5 * sigma2 * math.sqrt(2 / n)


def test_moments_of_q_sample():
    moments(process.q_sample)


def test_moments_catch_sigma_squared():
    def bug(x0, log_snr, noise):
        return torch.sigmoid(log_snr).sqrt() * x0 + torch.sigmoid(-log_snr) * noise

    with pytest.raises(AssertionError):
        moments(bug)


# ---- D4: telescoping on any path ----


def log_normal(x, mean, variance):
    return -0.5 * ((x - mean) ** 2 / variance + torch.log(2 * math.pi * variance))


def telescopes(schedule, posterior=process.posterior, steps=60):
    log_snr = grid(schedule, steps)
    log_snr = log_snr[torch.isfinite(log_snr) | (log_snr > 0)]  # without t = 1 where the SNR is 0 there
    generator = torch.Generator().manual_seed(1)
    walk = 0.1 * torch.randn(len(log_snr), generator=generator, dtype=torch.float64)
    path = 0.4 + walk.cumsum(0)  # no path that q would draw
    forward = torch.zeros(())
    for i in range(1, len(log_snr)):
        s, t = log_snr[i - 1], log_snr[i]
        forward = forward + log_normal(path[i], process.alpha_ts(s, t) * path[i - 1], process.sigma2_ts(s, t))
    alpha, sigma = process.alpha_sigma(log_snr[-1])
    backward = log_normal(path[-1], alpha * path[0], sigma**2)
    for i in range(2, len(log_snr)):
        c_0, c_t, v = posterior(log_snr[i - 1], log_snr[i])
        backward = backward + log_normal(path[i - 1], c_0 * path[0] + c_t * path[i], v)
    forward, backward = forward.item(), backward.item()
    assert abs(forward - backward) < 1e-8 * max(1.0, abs(forward))


@every_schedule
def test_telescoping(schedule):
    telescopes(schedule)


def test_telescoping_catches_swapped_alpha_bars():
    def swapped(log_snr_s, log_snr_t):
        c_0, c_t, v = process.posterior(log_snr_s, log_snr_t)
        alpha_s, alpha_t = process.alpha_sigma(log_snr_s)[0], process.alpha_sigma(log_snr_t)[0]
        return c_0 * alpha_t / alpha_s, c_t, v

    with pytest.raises(AssertionError):
        telescopes(SMOOTH["linear"], swapped)


# ---- DDPM's names and numbers ----


def test_ddpm_coefficients():
    schedule = LinearSchedule()
    log_snr = grid(schedule, 1000)
    c_0, c_t, v = process.posterior(log_snr[499], log_snr[500])
    assert float(c_0) == pytest.approx(0.00307007111, rel=1e-8)
    assert float(c_t) == pytest.approx(0.994106670, rel=1e-8)
    assert float(v) == pytest.approx(0.0100313554, rel=1e-8)
    assert float(process.posterior_variance(log_snr[0], log_snr[1])) == 0
    assert float(process.posterior_variance(log_snr[1], log_snr[2])) == pytest.approx(5.45318766e-5, rel=1e-8)


def test_coefficients_from_betas():
    """The textbook formulas in betas and alpha_bars, for every step."""
    beta = LinearSchedule().betas(1000)
    alpha_bar = torch.cumprod(1 - beta, 0)
    before = torch.cat([torch.ones(1, dtype=torch.float64), alpha_bar[:-1]])
    log_snr = grid(LinearSchedule(), 1000)
    c_0, c_t, v = process.posterior(log_snr[:-1], log_snr[1:])
    close = {"rtol": 1e-9, "atol": 1e-15}
    torch.testing.assert_close(process.sigma2_ts(log_snr[:-1], log_snr[1:]), beta, **close)
    torch.testing.assert_close(c_0, before.sqrt() * beta / (1 - alpha_bar), **close)
    torch.testing.assert_close(c_t, (1 - beta).sqrt() * (1 - before) / (1 - alpha_bar), **close)
    torch.testing.assert_close(v, beta * (1 - before) / (1 - alpha_bar), **close)


def test_ends_are_exact():
    inf = torch.tensor(torch.inf, dtype=torch.float64)
    some = torch.tensor(0.3, dtype=torch.float64)
    assert [float(c) for c in process.posterior(inf, some)] == [1, 0, 0]
    c_0, c_t, v = process.posterior(some, -inf)  # from no signal at all: the prior of x_s given x_0
    alpha, sigma = process.alpha_sigma(some)
    assert float(c_0) == float(alpha) and float(c_t) == 0 and float(v) == pytest.approx(float(sigma**2), rel=1e-15)
    assert float(process.sigma2_ts(some, -inf)) == 1


def test_variances_at_the_clean_end():
    clean, t = torch.tensor(torch.inf, dtype=torch.float64), torch.tensor(5.0, dtype=torch.float64)
    for variance in process.VARIANCES.values():
        assert float(variance(clean, t)) == pytest.approx(float(torch.sigmoid(-t)), rel=1e-14)


def test_unknown_variance():
    with pytest.raises(ValueError, match="beta, beta_tilde"):
        process.variance_function("learnt")


def test_small_steps_keep_their_digits():
    """sigma2_ts of two nearly equal noise levels, against exact integers arithmetic in the first order."""
    t = torch.tensor(-3.0, dtype=torch.float64)
    step = 1e-13
    expected = float(torch.sigmoid(-t)) * step
    actual = float(process.sigma2_ts(t + step, t))
    exact_step = float((t + step) - t)  # what float64 made of the step
    assert actual == pytest.approx(expected * exact_step / step, rel=1e-10)


def test_dtype_of_the_data_is_kept():
    x = process.q_sample(torch.ones(2, 3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 3))
    assert x.dtype == torch.float32
