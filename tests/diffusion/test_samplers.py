"""The laws of samples: the exact distribution from exact denoisers, and what samplers have in common."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2

from genmodels.core.random import normal
from genmodels.diffusion import (
    CosineSchedule,
    DDIMSampler,
    DDPMSampler,
    Denoiser,
    EDMSampler,
    GaussianDenoiser,
    HeunSampler,
    MixtureDenoiser,
    V,
    posterior_variance,
    renoise,
    sample,
    sigma2_ts,
    uniform_log_snr,
    uniform_t,
)
from tests.diffusion.table import INSTANCES, keyed, seeded

MEAN = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
SPREAD = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.5, -0.2], [0.0, -0.2, 0.4]], dtype=torch.float64)


def distribution(sampler, oracle, times, covariance, n=3000):
    x = sample(oracle, (n, len(oracle.mean)), times, sampler, keyed(n, 5), dtype=torch.float64).x
    dims = x.shape[1]
    lower = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(lower, (x - oracle.mean).T, upper=False).T
    mean = n * white.mean(0).square().sum()
    assert chi2.sf(float(mean), dims) > 1e-4
    excess = white.T @ white / n - torch.eye(dims, dtype=torch.float64)
    assert chi2.sf(float(n / 2 * excess.square().sum()), dims * (dims + 1) / 2) > 1e-4


# The kernels with variance beta_tilde are too narrow between few steps: they need more of them.
CASES = [("ddpm, beta", 200), ("ddpm, beta_tilde", 1500), ("ddim, eta .5", 200), ("heun", 40), ("edm", 60),
         ("dpmpp_2m", 200), ("unipc 2", 60)]  # fmt: skip


@pytest.mark.parametrize("name, steps", CASES)
def test_covariance(name, steps):
    oracle = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    distribution(INSTANCES[name], oracle, uniform_log_snr(oracle.schedule, steps), SPREAD)


class Stays(EDMSampler):
    """Noise is added, but the step is taken from the old level."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr = denoiser.schedule.log_snr(t)
        if float(t) < 1:
            z = normal(x.shape, generator, dtype=x.dtype)
            x = renoise(x, log_snr, log_snr - 2 * math.log1p(self.rise), z)
        return HeunSampler.__call__(self, denoiser, x, t, s, memory, generator, cond, temperature)


@pytest.mark.parametrize("bug, steps", [
    (DDPMSampler(variance=lambda s, t: sigma2_ts(s, t).square()), 200),
    (DDPMSampler(variance=lambda s, t: posterior_variance(s, t) / 2), 200),
    (Stays(60, churn=10.0), 60),
], ids=["a forgotten root", "half the variance", "the old level after churning"])  # fmt: skip
def test_covariance_catches(bug, steps):
    oracle = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    with pytest.raises(AssertionError):
        distribution(bug, oracle, uniform_log_snr(oracle.schedule, steps), SPREAD)


def test_exact_kernels_are_exact_with_few_steps():
    oracle = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    times = uniform_log_snr(oracle.schedule, 12)
    distribution(DDPMSampler(variance=oracle.reverse_variance), oracle, times, 0.25 * torch.eye(3).double())


def step_by_step(eta_one, ancestral):
    oracle = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    times = uniform_t(oracle.schedule, 20)
    x = torch.randn(6, 3, generator=seeded(), dtype=torch.float64)
    for i in range(20):
        a, _ = eta_one(oracle, x, times[i], times[i + 1], None, keyed(6, i))
        b, _ = ancestral(oracle, x, times[i], times[i + 1], None, keyed(6, i))
        assert (a - b).abs().max() < 1e-12
        x = a


def test_ddim_with_eta_one_is_ancestral_sampling():
    step_by_step(DDIMSampler(eta=1.0), DDPMSampler(variance="beta_tilde"))
    with pytest.raises(AssertionError):
        step_by_step(DDIMSampler(eta=1.0), DDPMSampler(variance="beta"))


@pytest.mark.parametrize("nu, variance", [(1.0, "beta"), (0.0, "beta_tilde")])
def test_a_learned_variance_has_the_fixed_ones_at_its_ends(nu, variance):
    def net(x, log_snr, cond=None):
        return torch.cat([torch.tanh(x), torch.full_like(x, 2 * nu - 1)], 1)

    learned = Denoiser(net, CosineSchedule(), V(), learned_variance=True)
    plain = Denoiser(lambda x, log_snr, cond=None: torch.tanh(x), CosineSchedule(), V())
    times = uniform_t(learned.schedule, 8)
    a = sample(learned, (4, 3), times, DDPMSampler(variance="learned"), keyed(4), dtype=torch.float64).x
    b = sample(plain, (4, 3), times, DDPMSampler(variance=variance), keyed(4), dtype=torch.float64).x
    assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["ddpm, beta", "ddim", "edm", "dpmpp_2m", "unipc 2"])
def test_mixture_weights(name):
    oracle = MixtureDenoiser(CosineSchedule(), torch.tensor([0.3, 0.7]), torch.tensor([[-1.0], [1.0]]), 0.02)
    n = 3000
    x = sample(oracle, (n, 1), uniform_log_snr(oracle.schedule, 100), INSTANCES[name], keyed(n), dtype=torch.float64).x
    share = float((x < 0).double().mean())
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / n)
    assert float((x.abs() - 1).abs().mean()) < 0.15


def test_bad_options():
    with pytest.raises(ValueError, match="eta = 1.5"):
        DDIMSampler(eta=1.5)
    with pytest.raises(ValueError, match="beta, beta_tilde"):
        DDPMSampler(variance="learnt")
