"""Samplers against the exact flow, the exact distribution and each other."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2

from genmodels.diffusion import (
    SAMPLERS,
    CosineSchedule,
    DDIMSampler,
    DDPMSampler,
    Denoiser,
    DPMSolverPP2MSampler,
    GaussianDenoiser,
    LinearSchedule,
    Memory,
    MixtureDenoiser,
    V,
    rescale_zero_terminal,
    sample,
    sigma2_ts,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.process import expand
from genmodels.random import KeyedGenerator, normal

RAW = CosineSchedule(log_snr_max=math.inf, log_snr_min=-math.inf)
INSTANCES = {
    "ddpm, beta": DDPMSampler(),
    "ddpm, beta_tilde": DDPMSampler(variance="beta_tilde"),
    "ddim": DDIMSampler(),
    "ddim, eta .5": DDIMSampler(eta=0.5),
    "ddim, eta 1": DDIMSampler(eta=1.0),
    "dpmpp_2m": DPMSolverPP2MSampler(),
}
every_sampler = pytest.mark.parametrize("sampler", INSTANCES.values(), ids=INSTANCES.keys())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def keyed(n, seed=0):
    return KeyedGenerator(seed, torch.arange(n), "sample")


# ---- D12: order of convergence on the probability-flow ODE ----


def errors(sampler):
    m, c, x, start, end = 0.7, 0.4, 1.3, 0.9, 0.05
    oracle = GaussianDenoiser(RAW, torch.tensor([m], dtype=torch.float64), c**2)
    (a_t, s_t), (a_s, s_s) = (oracle.schedule.alpha_sigma(torch.tensor(t).double()) for t in (start, end))
    scale = ((a_s**2 * c**2 + s_s**2) / (a_t**2 * c**2 + s_t**2)).sqrt()
    truth = a_s * m + scale * (x - a_t * m)
    found = []
    for steps in (20, 40, 80, 160):
        times = torch.linspace(start, end, steps + 1, dtype=torch.float64)
        begin = torch.tensor([[x]], dtype=torch.float64)
        out = sample(oracle, (1, 1), times, sampler, seeded(), dtype=torch.float64, start=begin)
        found.append(abs(float(out.x - truth)))
    return found


def converges(sampler, order, last_error):
    found = errors(sampler)
    assert found[-1] == pytest.approx(last_error, rel=5e-3)
    assert abs(math.log2(found[-2] / found[-1]) - order) < 0.15


ORDERS = [(DDIMSampler(), 0.99, 3.60e-3), (DPMSolverPP2MSampler(), 2.00, 1.22e-4)]


@pytest.mark.parametrize("sampler, order, last_error", ORDERS, ids=["ddim", "dpmpp_2m"])
def test_order(sampler, order, last_error):
    converges(sampler, order, last_error)


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


def test_order_catches_wrong_slopes():
    with pytest.raises(AssertionError):
        converges(WholeSlope(), 2.00, 1.22e-4)
    with pytest.raises(AssertionError):
        converges(OldAlpha(), 0.99, 3.60e-3)


@every_sampler
def test_a_point_mass_is_found_in_one_step(sampler):
    point = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
    oracle = GaussianDenoiser(CosineSchedule(), point, 0.0)
    out = sample(oracle, (5, 3), torch.tensor([1.0, 0.0]), sampler, keyed(5), dtype=torch.float64)
    assert (out.x - point).abs().max() < 1e-12 and out.evaluations == 1


# ---- D11: the distribution ----


def distribution(sampler, oracle, times, covariance, n=3000):
    x = sample(oracle, (n, len(oracle.mean)), times, sampler, keyed(n, 5), dtype=torch.float64).x
    dims = x.shape[1]
    lower = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(lower, (x - oracle.mean).T, upper=False).T
    mean = n * white.mean(0).square().sum()
    assert chi2.sf(float(mean), dims) > 1e-4
    excess = white.T @ white / n - torch.eye(dims, dtype=torch.float64)
    assert chi2.sf(float(n / 2 * excess.square().sum()), dims * (dims + 1) / 2) > 1e-4


MEAN = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64)
SPREAD = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.5, -0.2], [0.0, -0.2, 0.4]], dtype=torch.float64)


# The kernels with variance beta_tilde are too narrow between few steps: they need more of them.
@pytest.mark.parametrize(
    "name, steps", [("ddpm, beta", 200), ("ddpm, beta_tilde", 1500), ("ddim, eta .5", 200), ("dpmpp_2m", 200)]
)
def test_covariance(name, steps):
    oracle = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    distribution(INSTANCES[name], oracle, uniform_log_snr(oracle.schedule, steps), SPREAD)


def test_covariance_catches_a_forgotten_root():
    oracle = GaussianDenoiser.from_covariance(CosineSchedule(), MEAN, SPREAD)
    bug = DDPMSampler(variance=lambda log_snr_s, log_snr_t: sigma2_ts(log_snr_s, log_snr_t).square())
    with pytest.raises(AssertionError):
        distribution(bug, oracle, uniform_log_snr(oracle.schedule, 200), SPREAD)


def test_exact_kernels_are_exact_with_few_steps():
    oracle = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    times = uniform_log_snr(oracle.schedule, 12)
    distribution(DDPMSampler(variance=oracle.reverse_variance), oracle, times, 0.25 * torch.eye(3).double())


class NoisyEnd(DDPMSampler):
    """Noise at the last step too."""

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        out, memory = super().__call__(denoiser, x, t, s, memory, generator, cond, temperature)
        if float(s) == 0:
            _, sigma = denoiser.schedule.alpha_sigma(t)
            out = out + sigma * normal(x.shape, generator, dtype=x.dtype)
        return out, memory


def last_step_is_the_mean(sampler):
    oracle = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    kept = []
    out = sample(oracle, (50, 3), uniform_t(oracle.schedule, 10), sampler, keyed(50), dtype=torch.float64,
                 callback=lambda i, x, x0: kept.append(x0))  # fmt: skip
    assert (out.x - kept[-1]).abs().max() < 1e-12


@every_sampler
def test_last_step_is_the_mean(sampler):
    last_step_is_the_mean(sampler)


def test_noise_at_the_last_step_is_caught():
    with pytest.raises(AssertionError):
        last_step_is_the_mean(NoisyEnd())


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


@pytest.mark.parametrize("name", ["ddpm, beta", "ddim", "dpmpp_2m"])
def test_mixture_weights(name):
    oracle = MixtureDenoiser(CosineSchedule(), torch.tensor([0.3, 0.7]), torch.tensor([[-1.0], [1.0]]), 0.02)
    n = 3000
    x = sample(oracle, (n, 1), uniform_log_snr(oracle.schedule, 100), INSTANCES[name], keyed(n), dtype=torch.float64).x
    share = float((x < 0).double().mean())
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / n)
    assert float((x.abs() - 1).abs().mean()) < 0.15


# ---- D22: addressable samples ----


class Net(torch.nn.Module):
    """A small float32 network with a real dependence on x and noise level."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(0.5 * torch.randn(65, 64, generator=generator))

    def forward(self, x, log_snr, cond=None):
        flat = torch.cat([x.flatten(1), log_snr.clamp(-20, 20)[:, None] / 10], 1)
        out = torch.tanh(flat @ self.weight).reshape(x.shape)
        return out if cond is None else out + cond.reshape(-1, 1, 1, 1)


def addressable(sampler, generator_of, steps=15):
    denoiser = Denoiser(Net(), CosineSchedule(), V())
    times = uniform_log_snr(denoiser.schedule, steps)
    index = torch.arange(64)

    def run(rows):
        return sample(denoiser, (len(rows), 1, 8, 8), times, sampler, generator_of(rows)).x

    whole = run(index)
    assert whole.std() > 0.1
    for rows in (index[37:38], index[10:30], index[[5, 63, 0]]):
        assert (run(rows) - whole[rows]).abs().max() < 1e-5


@every_sampler
def test_sample_k_is_the_same_alone_and_in_any_batch(sampler):
    addressable(sampler, lambda rows: KeyedGenerator(3, rows, "sample"))


def test_addressable_catches_a_batch_generator():
    with pytest.raises(AssertionError):
        addressable(DDIMSampler(), lambda rows: seeded(3))


def test_seeds_differ_and_repeat():
    oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(4), 1.0)
    times = uniform_t(oracle.schedule, 4)
    a, b, again = (sample(oracle, (2, 4), times, DDPMSampler(), keyed(2, seed)).x for seed in (0, 1, 0))
    assert torch.equal(a, again) and not torch.allclose(a, b)


# ---- options and interface ----


@every_sampler
def test_dtype_evaluations_and_callback(sampler):
    oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(4), 1.0)
    for dtype in (torch.float32, torch.float64):
        seen = []

        def keep(i, x, x0, seen=seen):
            seen.append((i, x, x0))

        out = sample(oracle, (2, 4), uniform_t(oracle.schedule, 6), sampler, keyed(2), dtype=dtype, callback=keep)
        assert out.x.dtype == dtype and out.evaluations == 6 and out.x.isfinite().all()
        assert [i for i, *_ in seen] == list(range(6)) and torch.equal(seen[-1][1], out.x)
        assert all(x0.shape == (2, 4) for *_, x0 in seen)


@pytest.mark.parametrize("name", SAMPLERS)
def test_clip(name):
    oracle = GaussianDenoiser(CosineSchedule(), torch.full((2,), 3.0), 0.01)
    times = uniform_t(oracle.schedule, 8)
    estimates = []
    out = sample(oracle, (3, 2), times, SAMPLERS[name](clip=True), keyed(3), callback=lambda *a: estimates.append(a[2]))
    assert torch.stack(estimates).abs().max() <= 1 and out.x.abs().max() <= 1
    assert sample(oracle, (3, 2), times, SAMPLERS[name](), keyed(3)).x.mean() > 2


def test_clip_that_does_not_bind_changes_nothing():
    oracle = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1e-4)
    times = uniform_t(oracle.schedule, 8)
    for name in SAMPLERS:
        a, b = (sample(oracle, (3, 3), times, SAMPLERS[name](clip=clip), keyed(3), dtype=torch.float64).x
                for clip in (True, False))  # fmt: skip
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["ddpm, beta", "ddim", "ddim, eta 1", "dpmpp_2m"])
def test_temperature_zero_is_one_path(name):
    oracle = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    times = uniform_t(oracle.schedule, 10)
    x = sample(oracle, (4, 3), times, INSTANCES[name], keyed(4), temperature=0.0, dtype=torch.float64).x
    assert (x - x[:1]).abs().max() == 0
    hot = sample(oracle, (500, 3), times, INSTANCES[name], keyed(500), temperature=1.5, dtype=torch.float64).x
    cool = sample(oracle, (500, 3), times, INSTANCES[name], keyed(500), temperature=0.5, dtype=torch.float64).x
    assert float(hot.std(0).mean() / cool.std(0).mean()) == pytest.approx(3, rel=1e-6)  # everything here is linear


def test_condition_reaches_the_network():
    denoiser = Denoiser(Net(), CosineSchedule(), V())
    times = uniform_t(denoiser.schedule, 3)
    a, b = (sample(denoiser, (2, 1, 8, 8), times, DDIMSampler(), keyed(2), cond=torch.full((2,), value)).x
            for value in (0.0, 0.5))  # fmt: skip
    assert (a - b).abs().max() > 0.1


def test_zero_terminal_snr():
    schedule = rescale_zero_terminal(LinearSchedule())
    oracle = GaussianDenoiser(schedule, MEAN, 0.25)
    for sampler in INSTANCES.values():
        x = sample(oracle, (2000, 3), uniform_t(schedule, 100), sampler, keyed(2000), dtype=torch.float64).x
        assert x.isfinite().all()
        assert ((x.mean(0) - MEAN).abs() < 5 * 0.5 / math.sqrt(2000)).all()


def test_no_graph_is_kept():
    denoiser = Denoiser(Net(), CosineSchedule(), V())
    assert not sample(denoiser, (1, 1, 8, 8), torch.tensor([1.0, 0.0]), DDIMSampler(), keyed(1)).x.requires_grad


def test_a_step_is_pure():
    oracle = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    x = torch.randn(4, 3, generator=seeded(), dtype=torch.float64)
    before = x.clone()
    t, s = torch.tensor([0.5, 0.4], dtype=torch.float64)
    for sampler in INSTANCES.values():
        one, _ = sampler(oracle, x, t, s, None, keyed(4))
        two, _ = sampler(oracle, x, t, s, None, keyed(4))
        assert torch.equal(one, two) and torch.equal(x, before)


@pytest.mark.parametrize(
    "times", [[0.1, 0.9], [1.0, 0.5, 0.5], [1.0], [1.2, 0.5], [0.5, -0.1], [[1.0, 0.0]]]
)
def test_bad_times(times):
    oracle = GaussianDenoiser(CosineSchedule(), MEAN, 0.25)
    with pytest.raises(ValueError, match="must decrease within"):
        sample(oracle, (1, 3), torch.tensor(times), DDIMSampler(), keyed(1))


def test_bad_options():
    with pytest.raises(ValueError, match="eta = 1.5"):
        DDIMSampler(eta=1.5)
    with pytest.raises(ValueError, match="beta, beta_tilde"):
        DDPMSampler(variance="learnt")
