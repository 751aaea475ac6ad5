"""What sampling must give: the exact distribution from exact denoisers, and what samplers have in common."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2
from torch.distributions import Normal

from genmodels.core.random import normal
from genmodels.diffusion import (
    CosineSchedule,
    DDIMSampler,
    DDPMSampler,
    Denoiser,
    DPMSolverPP2MSampler,
    EDMSampler,
    EulerSampler,
    GaussianDenoiser,
    HeunSampler,
    Memory,
    MixtureDenoiser,
    UniPCSampler,
    V,
    karras,
    noised_start,
    posterior_variance,
    renoise,
    sample,
    sigma2_ts,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.path import alpha_sigma, expand
from genmodels.diffusion.sampling import log_snrs, predict
from tests.diffusion.table import INSTANCES, keyed, seeded

MEAN = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
SPREAD = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.5, -0.2], [0.0, -0.2, 0.4]], dtype=torch.float64)


def distribution(sampler, denoiser, times, covariance, n=1000):
    x = sample(denoiser, (n, len(denoiser.mean)), times, sampler, keyed(n, 5), dtype=torch.float64).x
    dims = x.shape[1]
    lower = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(lower, (x - denoiser.mean).T, upper=False).T
    mean = n * white.mean(0).square().sum()
    assert chi2.sf(float(mean), dims) > 1e-4
    excess = white.T @ white / n - torch.eye(dims, dtype=torch.float64)
    assert chi2.sf(float(n / 2 * excess.square().sum()), dims * (dims + 1) / 2) > 1e-4


# The kernels with variance beta_tilde are too narrow between few steps: they need more of them.
CASES = [("ddpm, beta", 200), ("ddpm, beta_tilde", 600), ("ddim, eta .5", 200), ("heun", 40), ("edm", 60),
         ("dpmpp_2m", 200), ("unipc 2", 60)]  # fmt: skip


@pytest.mark.parametrize("name, steps", CASES)
def test_covariance(name, steps):
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    distribution(INSTANCES[name], denoiser, uniform_log_snr(denoiser.schedule, steps), SPREAD)


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
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    with pytest.raises(AssertionError):
        distribution(bug, denoiser, uniform_log_snr(denoiser.schedule, steps), SPREAD)


def test_exact_kernels_are_exact_with_few_steps():
    denoiser = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    times = uniform_log_snr(denoiser.schedule, 12)
    distribution(DDPMSampler(variance=denoiser.reverse_variance), denoiser, times, 0.25 * torch.eye(3).double())


def step_by_step(eta_one, ancestral):
    denoiser = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    times = uniform_t(denoiser.schedule, 20)
    x = torch.randn(6, 3, generator=seeded(), dtype=torch.float64)
    for i in range(20):
        a, _ = eta_one(denoiser, x, times[i], times[i + 1], None, keyed(6, i))
        b, _ = ancestral(denoiser, x, times[i], times[i + 1], None, keyed(6, i))
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
    denoiser = MixtureDenoiser(CosineSchedule(), torch.tensor([0.3, 0.7]), torch.tensor([[-1.0], [1.0]]), 0.02)
    n = 3000
    times = uniform_log_snr(denoiser.schedule, 100)
    x = sample(denoiser, (n, 1), times, INSTANCES[name], keyed(n), dtype=torch.float64).x
    share = float((x < 0).double().mean())
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / n)
    assert float((x.abs() - 1).abs().mean()) < 0.15


def test_bad_options():
    with pytest.raises(ValueError, match="churn = nan"):
        EDMSampler(4, churn=math.nan)
    with pytest.raises(ValueError, match="noise = inf"):
        EDMSampler(4, noise=math.inf)
    with pytest.raises(ValueError, match="give the smaller noise level first"):
        EDMSampler(4, smallest=2.0, largest=1.0)
    with pytest.raises(ValueError, match="eta = 1.5"):
        DDIMSampler(eta=1.5)
    with pytest.raises(ValueError, match="beta, beta_tilde"):
        DDPMSampler(variance="learnt")


# ---- deterministic steps against the closed-form paths of the probability-flow ODE, and EDM's noise ----


RAW = CosineSchedule(log_snr_max=math.inf, log_snr_min=-math.inf)
START, END = 0.9, 0.05


def follow(denoiser, sampler, x, steps):
    """Where the sampler arrives at END from x at START."""
    times = torch.linspace(START, END, steps + 1, dtype=torch.float64)
    begin = torch.tensor([[x]], dtype=torch.float64)
    return sample(denoiser, (1, 1), times, sampler, seeded(), dtype=torch.float64, start=begin).x


def gaussian_error(sampler, steps):
    """Of a Gaussian every trajectory is alpha_s m + sqrt(V_s/V_t) (x - alpha_t m)."""
    m, c, x = 0.7, 0.4, 1.3
    denoiser = GaussianDenoiser(RAW, torch.tensor([m], dtype=torch.float64), c**2)
    (a_t, s_t), (a_s, s_s) = (denoiser.schedule.alpha_sigma(torch.tensor(t).double()) for t in (START, END))
    scale = ((a_s**2 * c**2 + s_s**2) / (a_t**2 * c**2 + s_t**2)).sqrt()
    return abs(float(follow(denoiser, sampler, x, steps) - (a_s * m + scale * (x - a_t * m))))


def mixture_error(sampler, steps):
    """On the line the ODE keeps the order of points, hence the value of the distribution function along every path."""
    weights, means, variance, x = torch.tensor([0.4, 0.6]).double(), torch.tensor([-1.0, 0.8]).double(), 0.16, 0.3

    def below(value, t):
        alpha, sigma = RAW.alpha_sigma(torch.tensor(t).double())
        return float((weights * Normal(alpha * means, (alpha**2 * variance + sigma**2).sqrt()).cdf(value)).sum())

    end = follow(MixtureDenoiser(RAW, weights, means[:, None], variance), sampler, x, steps)
    return abs(below(end, END) - below(torch.tensor(x).double(), START))


def converges(sampler, order, last_error=None, error=gaussian_error, steps=80):
    found = [error(sampler, n) for n in (steps, 2 * steps)]
    assert last_error is None or found[-1] == pytest.approx(last_error, rel=5e-3)
    assert abs(math.log2(found[-2] / found[-1]) - order) < 0.15


# Errors after 160 steps; computed once, they also tell samplers of one order apart.
ORDERS = {
    "ddim": (DDIMSampler(), 1, 3.60e-3),
    "euler": (EulerSampler(), 1, 3.60e-3),
    "heun": (HeunSampler(), 2, 3.86e-5),
    "edm without churn": (EDMSampler(160), 2, 3.86e-5),
    "dpmpp_2m": (DPMSolverPP2MSampler(), 2, 1.22e-4),
    "unipc 1": (UniPCSampler(order=1), 2, None),
    "unipc 2": (UniPCSampler(), 3, 2.22e-5),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order(name):
    converges(*ORDERS[name])


@pytest.mark.parametrize("name", ["euler", "heun", "dpmpp_2m", "unipc 2"])
def test_order_on_a_mixture(name):
    sampler, order, _ = ORDERS[name]
    converges(sampler, order, error=mixture_error, steps=160)


class OldSlope(HeunSampler):
    """The second slope at the old time."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        before = predict(denoiser, x, t, cond)
        (alpha_s, sigma_s), (alpha_t, sigma_t) = alpha_sigma(log_snr_s), alpha_sigma(log_snr_t)
        ahead = expand(alpha_s, x) * before.x0 + expand(sigma_s, x) * before.eps
        after = predict(denoiser, ahead, t, cond)
        half = (sigma_s - alpha_s * sigma_t / alpha_t) / 2
        return ahead + expand(half, x) * (after.eps - before.eps), Memory(before.x0, log_snr_t)


class WholeSlope(DPMSolverPP2MSampler):
    """1/r in place of 1/2r."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        if memory is not None:
            memory = Memory(memory.x0, (memory.log_snr + denoiser.schedule.log_snr(t)) / 2)
        return super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)


class OldAlpha(DDIMSampler):
    """x0 put back with the signal of the old time."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        out, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        alpha_s, alpha_t = denoiser.schedule.alpha_sigma(torch.stack([s, t]))[0]
        return out + expand(alpha_t - alpha_s, x) * memory.x0, memory


@pytest.mark.parametrize("bug, order, error", [
    (OldSlope(), 2, 3.86e-5), (WholeSlope(), 2, 1.22e-4), (OldAlpha(), 1, 3.60e-3), (DPMSolverPP2MSampler(), 3, 2.22e-5)
], ids=["Heun's slope at the old time", "1/r", "the old alpha", "no correction"])  # fmt: skip
def test_order_catches(bug, order, error):
    with pytest.raises(AssertionError):
        converges(bug, order, error)


def test_euler_is_ddim_without_noise():
    denoiser = GaussianDenoiser(CosineSchedule(), torch.tensor([0.3, -0.2]), torch.tensor([0.5, 0.1]))
    for times in (uniform_log_snr(denoiser.schedule, 12), karras(denoiser.schedule, 12)):
        a, b = (sample(denoiser, (6, 2), times, step, keyed(6), dtype=torch.float64).x
                for step in (EulerSampler(), DDIMSampler()))  # fmt: skip
        assert (a - b).abs().max() < 1e-12


def test_edm_without_churn_is_heun_bit_for_bit_and_with_it_is_not():
    denoiser = GaussianDenoiser(CosineSchedule(), torch.tensor([0.3, -0.2]), torch.tensor([0.5, 0.1]))
    times = karras(denoiser.schedule, 12)

    def run(sampler):
        return sample(denoiser, (6, 2), times, sampler, keyed(6)).x

    heun = run(HeunSampler())
    assert torch.equal(run(EDMSampler(12)), heun)
    assert torch.equal(run(EDMSampler(12, churn=5.0, smallest=1e4)), heun)  # no level lies in the range
    assert not torch.allclose(run(EDMSampler(12, churn=5.0)), heun)


def test_edm_returns_to_the_level_it_names():
    """One step, seen from the denoiser: it is asked at sigma_bar (1 + g), where x has that level's variance."""
    asked = []

    class Watched(GaussianDenoiser):
        def forward(self, x, t, cond=None, mask=None):
            asked.append((x, float(t[0])))
            return super().forward(x, t, cond, mask)

    denoiser = Watched(CosineSchedule(), torch.zeros(2, dtype=torch.float64), 0.25)
    n, t, source = 20_000, torch.tensor(0.5, dtype=torch.float64), seeded()
    x = noised_start(denoiser.schedule, denoiser.sample(n, source), 0.5, source)
    EDMSampler(10, churn=2.0)(denoiser, x, t, t / 2, None, keyed(n))
    seen, time = asked[0]
    level = denoiser.schedule.sigma_bar(torch.tensor([time, float(t)]).double())
    assert float(level[0] / level[1]) == pytest.approx(1.2)
    alpha, sigma = denoiser.schedule.alpha_sigma(torch.tensor(time).double())
    ratio = float(seen.var(0).mean() / (0.25 * alpha**2 + sigma**2))
    assert abs(ratio - 1) < 4 * math.sqrt(2 / (2 * n))


def test_bad_options_of_ode_steps():
    with pytest.raises(ValueError, match="churn = -1"):
        EDMSampler(10, churn=-1)
    with pytest.raises(ValueError, match="order = 4"):
        UniPCSampler(order=4)
