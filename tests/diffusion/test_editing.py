"""Sampling from a noised item, and the latents of the deterministic sampler."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.random import KeyedGenerator, normal
from genmodels.diffusion import (
    CosineSchedule,
    DDIMSampler,
    DDPMSampler,
    EulerSampler,
    GaussianDenoiser,
    HeunSampler,
    Inpainting,
    invert,
    noised_start,
    sample,
    times_from,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.process import kernel_variance, q_sample, renoise
from genmodels.diffusion.sampling import log_snrs
from tests.diffusion.table import INSTANCES, keyed

MEAN, SCALE = torch.tensor([0.5, -0.2], dtype=torch.float64), 0.4
EXACT = GaussianDenoiser(CosineSchedule(), MEAN, SCALE**2)
ITEM = torch.tensor([1.5, 0.4], dtype=torch.float64)


def test_times_from():
    times = uniform_t(EXACT.schedule, 4)
    assert times_from(times, 0.75).tolist() == [0.75, 0.5, 0.25, 0.0]
    assert times_from(times, 0.1).tolist() == [0.1, 0.0] and torch.equal(times_from(times, 1.0), times)
    for strength in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="strength"):
            times_from(times, strength)


def edited(strength, n=2000):
    generator = keyed(n)
    start = noised_start(EXACT.schedule, ITEM.expand(n, 2), strength, generator)
    times = times_from(uniform_log_snr(EXACT.schedule, 200), strength)
    return sample(EXACT, (n, 2), times, DDPMSampler(), generator, dtype=torch.float64, start=start).x


@pytest.mark.parametrize("strength", [0.3, 0.6, 0.95])
def test_an_edit_has_the_distribution_of_data_that_would_look_alike_under_the_noise(strength):
    """E over x_t of p(x_0 | x_t): mean m + g (x - m), variance c^2 (1 - g) + (g sigma/alpha)^2, g the gain."""
    alpha, sigma = (float(v) for v in EXACT.schedule.alpha_sigma(torch.tensor(strength).double()))
    gain = alpha**2 * SCALE**2 / (alpha**2 * SCALE**2 + sigma**2)
    variance = SCALE**2 * (1 - gain) + (gain * sigma / alpha) ** 2
    x = edited(strength)
    assert ((x.mean(0) - MEAN - gain * (ITEM - MEAN)).abs() < 4 * math.sqrt(variance / len(x)) + 5e-3).all()
    assert ((x.var(0) / variance - 1).abs() < 4 * math.sqrt(2 / len(x)) + 0.03).all()


def test_an_edit_is_addressable():
    def run(index):
        generator = KeyedGenerator(3, index, "sample")
        return noised_start(EXACT.schedule, ITEM.expand(len(index), 2), 0.5, generator)

    assert torch.equal(run(torch.arange(9))[4:5], run(torch.tensor([4])))


def test_the_latents_of_a_gaussian_are_its_standardised_values():
    x0 = MEAN + SCALE * torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    z = invert(EXACT, x0, uniform_log_snr(EXACT.schedule, 400))
    assert ((z - (x0 - MEAN) / SCALE).abs() < 2e-2).all()


def round_trip(sampler, steps):
    x0 = EXACT.sample(20, keyed(20))
    times = uniform_log_snr(EXACT.schedule, steps, 1000)
    z = invert(EXACT, x0, times, sampler=sampler)
    back = sample(EXACT, x0.shape, times, sampler, keyed(20), dtype=torch.float64, start=z).x
    return float((back - x0).abs().max())


def test_the_way_there_and_back_comes_home():
    assert round_trip(HeunSampler(), 100) < 5e-3
    assert round_trip(EulerSampler(), 100) > 5 * round_trip(HeunSampler(), 100)


# ---- inpainting: what is known comes back bit for bit, and the rest approaches the exact conditional distribution ----


POSITION = torch.arange(6)
COVARIANCE = 0.9 ** (POSITION[:, None] - POSITION).abs().double()
KNOWN = torch.tensor([1.5, 1.0, 0.0, 0.0, -1.0, 0.0], dtype=torch.float64)
MASK = torch.tensor([True, True, False, False, True, False])
CORRELATED = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(6), COVARIANCE)


def exact():
    """Mean and covariance of the unknown given the known."""
    gain = COVARIANCE[~MASK][:, MASK] @ torch.linalg.inv(COVARIANCE[MASK][:, MASK])
    return gain @ KNOWN[MASK], COVARIANCE[~MASK][:, ~MASK] - gain @ COVARIANCE[MASK][:, ~MASK]


def draw(rounds, n, kind=Inpainting, steps=20, inner=None):
    sampler = kind(inner or DDPMSampler(), KNOWN, MASK, rounds=rounds)
    times = uniform_log_snr(CORRELATED.schedule, steps)
    return sample(CORRELATED, (n, 6), times, sampler, keyed(n), dtype=torch.float64).x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INSTANCES)
def test_the_known_part_is_returned_bit_for_bit(name, dtype):
    sampler = Inpainting(INSTANCES[name], KNOWN, MASK, rounds=2)
    x = sample(CORRELATED, (4, 6), uniform_t(CORRELATED.schedule, 5), sampler, keyed(4), dtype=dtype).x
    assert torch.equal(x[:, MASK], KNOWN[MASK].to(dtype).expand(4, -1)) and x.isfinite().all()


def settles(kind=Inpainting):
    """The error of the mean falls with the rounds, and with many of them mean and covariance are near the truth."""
    n = 1000
    mean, covariance = exact()
    few, some, many = (draw(rounds, n, kind)[:, ~MASK] for rounds in (1, 10, 30))
    slack = 3 * math.sqrt(float(covariance.diag().max()) / n)
    errors = [float((x.mean(0) - mean).norm()) for x in (few, some, many)]
    assert errors[1] + slack < errors[0] and errors[1] < 0.25 * errors[0] + slack
    assert errors[2] < 0.06 + 3 * math.sqrt(float(covariance.trace()) / n)
    assert (torch.cov(many.T) - covariance).abs().max() < 0.04


def closed_form(variance, steps, rounds, known=1.5, correlation=0.8):
    """Mean and variance of the unknown of a pair with unit variances: RePaint on a Gaussian is linear in every step."""
    covariance = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(2, dtype=torch.float64), covariance)
    inner, eye = DDPMSampler(variance=variance), torch.eye(2, dtype=torch.float64)
    mean, spread = torch.zeros(2, dtype=torch.float64), eye
    times = uniform_t(denoiser.schedule, steps)
    for t, s in zip(times[:-1], times[1:], strict=True):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        step = inner(denoiser, eye, t, s, None, keyed(2), None, 0.0)[0].T  # linear, without its noise
        clean = bool(s == 0)
        own = 0.0 if clean else float(kernel_variance(inner.variance, None)(log_snr_s, log_snr_t))
        alpha2 = 1.0 if clean else float(torch.sigmoid(log_snr_s))
        shrink = float(torch.sigmoid(log_snr_t)) / alpha2  # alpha_t^2 / alpha_s^2
        for done in range(1 if clean else rounds):
            if done:
                mean, spread = shrink**0.5 * mean, shrink * spread + (1 - shrink) * eye
            mean, spread = step @ mean, step @ spread @ step.T + own * eye
            mean[0], spread[0, :], spread[:, 0] = alpha2**0.5 * known, 0, 0
            spread[0, 0] = 1 - alpha2
    return float(mean[1]), float(spread[1, 1])


class LateNoise(Inpainting):
    """The known part with the noise of t where that of s belongs."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        rounds = 1 if bool(s == 0) else self.rounds
        known = self.known.to(x).expand_as(x)
        for _ in range(rounds):
            drawn, memory = self.sampler(denoiser, x, t, s, None, generator, cond, temperature)
            first, second = (normal(x.shape, generator, dtype=x.dtype) for _ in range(2))
            given = known if bool(s == 0) else q_sample(known, log_snr_t, first)
            drawn = torch.where(self.mask, given, drawn)
            x = drawn if bool(s == 0) else renoise(drawn, log_snr_s, log_snr_t, second)
        return drawn, memory


class Stale(Inpainting):
    """Each round starts from the same x: the new noise is never used."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        for _ in range(self.rounds):
            out = Inpainting(self.sampler, self.known, self.mask, rounds=1)(
                denoiser, x, t, s, memory, generator, cond, temperature
            )
        return out


def test_the_unknown_part_settles_to_its_conditional_distribution():
    settles()


def test_the_check_catches_rounds_that_begin_anew():
    with pytest.raises(AssertionError):
        settles(Stale)


def as_noisy_as_the_step_says(kind, n=4000):
    """Half way down the known part is a draw of q(x_s | x_0)."""
    times = torch.tensor([0.8, 0.5], dtype=torch.float64)
    x = sample(CORRELATED, (n, 6), times, kind(DDIMSampler(), KNOWN, MASK, rounds=2), keyed(n), dtype=torch.float64).x
    alpha, sigma = CORRELATED.schedule.alpha_sigma(times[1])
    z = (x[:, MASK] - alpha * KNOWN[MASK]) / sigma
    assert (z.mean(0).abs() < 4 / math.sqrt(n)).all() and ((z.var(0) - 1).abs() < 4 * math.sqrt(2 / n)).all()


def test_the_known_part_has_the_noise_of_the_time_it_is_put_in():
    as_noisy_as_the_step_says(Inpainting)
    with pytest.raises(AssertionError):
        as_noisy_as_the_step_says(LateNoise)


def test_nothing_known_is_plain_sampling():
    nothing = torch.zeros(6, dtype=torch.bool)
    times = uniform_log_snr(CORRELATED.schedule, 12)
    a, b = (sample(CORRELATED, (5, 6), times, s, keyed(5), dtype=torch.float64).x
            for s in (Inpainting(DDIMSampler(), KNOWN, nothing, rounds=1), DDIMSampler()))  # fmt: skip
    assert torch.equal(a, b)


def test_sample_k_is_the_same_alone_and_in_any_batch():
    times = uniform_log_snr(CORRELATED.schedule, 8)

    def run(index):
        sampler = Inpainting(DDPMSampler(), KNOWN, MASK, rounds=3)
        return sample(CORRELATED, (len(index), 6), times, sampler, KeyedGenerator(1, index, "sample")).x

    whole = run(torch.arange(20))
    for index in (torch.tensor([7]), torch.tensor([19, 0])):
        assert (run(index) - whole[index]).abs().max() < 1e-5
    assert not torch.allclose(whole[0], whole[1])


def test_bad_options():
    with pytest.raises(ValueError, match="rounds = 0"):
        Inpainting(DDPMSampler(), KNOWN, MASK, rounds=0)
    with pytest.raises(ValueError, match="must be boolean"):
        Inpainting(DDPMSampler(), KNOWN, MASK.float())


#: (variance of the inner kernel, steps, rounds): (mean, variance) of what is drawn; the truth is 1.2 and 0.36.
BIAS = {
    ("beta", 25, 1): (0.717, 0.525), ("beta", 25, 10): (1.132, 0.383), ("beta", 50, 1): (0.733, 0.510),
    ("beta", 50, 10): (1.145, 0.377), ("beta", 50, 30): (1.180, 0.367), ("beta_tilde", 50, 10): (1.145, 0.291),
    ("beta_tilde", 50, 30): (1.180, 0.258),
}  # fmt: skip


@pytest.mark.parametrize("variance, steps, rounds", BIAS)
def test_the_bias_that_is_documented(variance, steps, rounds):
    assert closed_form(variance, steps, rounds) == pytest.approx(BIAS[variance, steps, rounds], abs=6e-4)


def test_samples_have_the_bias_of_the_closed_form():
    """Both the wide and the narrow kernel, 5 rounds of 25 steps, within four standard errors."""
    n, pair = 4000, torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=torch.float64)
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), torch.zeros(2, dtype=torch.float64), pair)
    known, mask = torch.tensor([1.5, 0.0], dtype=torch.float64), torch.tensor([True, False])
    for variance in ("beta", "beta_tilde"):
        sampler = Inpainting(DDPMSampler(variance=variance), known, mask, rounds=5)
        x = sample(denoiser, (n, 2), uniform_t(denoiser.schedule, 25), sampler, keyed(n), dtype=torch.float64).x[:, 1]
        mean, spread = closed_form(variance, 25, 5)
        assert abs(float(x.mean()) - mean) < 4 * math.sqrt(spread / n)
        assert abs(float(x.var()) - spread) < 4 * spread * math.sqrt(2 / n)


def test_many_rounds_and_steps_are_exact():
    """The errors of mean and variance fall with the rounds, and further with the steps; one without the other stays."""
    errors = [[abs(v - w) for v, w in zip(closed_form("beta", *how), (1.2, 0.36), strict=True)]
              for how in ((25, 1), (25, 10), (25, 60), (100, 60))]
    for worse, better in zip(errors[:-1], errors[1:], strict=True):
        assert better[0] < worse[0] and better[1] < worse[1]
    assert errors[-1][0] < 0.012 and errors[-1][1] < 0.005
