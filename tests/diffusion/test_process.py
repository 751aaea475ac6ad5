"""The forward process: composition of kernels, moments, telescoping, DDPM's coefficients."""

from __future__ import annotations

import math

import pytest
import torch

import genmodels.diffusion.process as process
from genmodels.diffusion import SCHEDULES, LinearSchedule, step_to_time

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
