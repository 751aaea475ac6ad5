"""Learned variances: between their ends, tight bounds where they are optimal, and the hybrid objective."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    CosineSchedule,
    DDPMSampler,
    Denoiser,
    DiscretisedGaussian,
    Gaussian,
    GaussianDenoiser,
    Hybrid,
    LinearLogSnrSchedule,
    LinearSchedule,
    Prediction,
    V,
    Vlb,
    ddpm_times,
    elbo,
    kernel_variance,
    learned_variance,
    path_terms,
    posterior_variance,
    sample,
    sigma2_ts,
)


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---- the variance itself ----


def interpolates(variance):
    """beta .02 and beta_tilde .01 have .0141421356 in the middle; nu = 0 and 1 are the ends."""
    u_t = math.log(0.02 / 0.98)  # with log-SNR lambda_s chosen so that beta_tilde is half of beta
    t = wide(u_t)
    s = wide(0.0)
    beta, tilde = sigma2_ts(s, t), posterior_variance(s, t)
    nu = torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float64)
    expected = torch.stack([tilde, (beta * tilde).sqrt(), beta], 1)
    torch.testing.assert_close(variance(nu, s, t), expected, rtol=1e-12, atol=0)
    assert math.sqrt(0.02 * 0.01) == pytest.approx(0.0141421356, abs=5e-11)


def test_interpolates_in_the_logarithm():
    interpolates(learned_variance)


def test_interpolation_catches_an_arithmetic_mean():
    def bug(nu, s, t):
        return nu * sigma2_ts(s, t)[:, None] + (1 - nu) * posterior_variance(s, t)[:, None]

    with pytest.raises(AssertionError):
        interpolates(bug)


def test_the_last_step_takes_the_lower_end_of_the_step_before():
    """DDPM's beta_tilde_1 is 0; its place is taken by beta_tilde_2 = 5.45318766e-5, beta_1 is 1e-4."""
    log_snr = LinearSchedule().log_snr(ddpm_times(1000)[:2])
    clean = wide(math.inf)
    ends = learned_variance(wide(0.0, 1.0)[None], clean, log_snr[:1], log_snr[1:])[0]
    assert ends.tolist() == pytest.approx([5.45318766e-5, 1e-4], rel=1e-8)


def test_its_name_and_its_error():
    assert kernel_variance("learned", torch.zeros(2, 3))(wide(1.0), wide(0.0)).shape == (2, 3)
    with pytest.raises(ValueError, match="gives no variance"):
        kernel_variance("learned", None)


# ---- with the optimal one every bound is tight ----


class Optimal(GaussianDenoiser):
    """The exact denoiser whose nu gives the variance of q(x_s | x_t) on one grid of times (q has V_s beta / V_t)."""

    learned_variance = True

    def on(self, times):
        self.levels = torch.cat([wide(math.inf), self.schedule.log_snr(times.double())])
        return self

    def at_log_snr(self, x, log_snr, *args):
        prediction = super().at_log_snr(x, log_snr, *args)
        k = (self.levels[None] - log_snr[:, None]).abs().argmin(1)  # which t of the grid
        s, t = self.levels[(k - 1).clamp(min=0)], self.levels[k]
        after = self.levels[(k + 1).clamp(max=len(self.levels) - 1)]
        low = torch.where(k > 1, posterior_variance(s, t), posterior_variance(t, after))
        high, true = sigma2_ts(s, t), self.reverse_variance(s, t)
        nu = torch.log(true / low) / torch.log(high / low)
        return Prediction(
            prediction.output, prediction.sigma, x0=lambda: prediction.x0, eps=lambda: prediction.eps,
            v=lambda: prediction.v, nu=nu.reshape(-1, 1).expand_as(x),
        )  # fmt: skip


def optimal(times, c2=0.25, schedule=None):
    return Optimal(schedule or LinearLogSnrSchedule(), torch.tensor([0.5, -0.2]), c2).on(times)


@pytest.mark.parametrize("steps", [2, 4, 10, 100])
def test_the_bound_is_exact_on_every_path_for_every_number_of_steps(steps):
    times = ddpm_times(steps)
    denoiser = optimal(times)
    path = torch.randn(steps + 1, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = path_terms(
        denoiser, path, times, variance="learned", prior=lambda x: denoiser.marginal_log_prob(x, torch.ones(1))
    )
    torch.testing.assert_close(-terms.total, denoiser.log_prob(path[0]), rtol=1e-9, atol=1e-9)
    with pytest.raises(AssertionError):  # the mutant: a variance one percent off
        denoiser.levels = denoiser.levels * 1.01
        terms = path_terms(denoiser, path, times, variance="learned")
        torch.testing.assert_close(-terms.total, denoiser.log_prob(path[0]), rtol=1e-9, atol=1e-9)


def test_the_bound_with_learned_variance_is_tighter_than_with_either_end():
    """Its mean over the data is the entropy and the KL of the prior, for few steps too."""
    times, n = torch.linspace(0, 1, 7, dtype=torch.float64), 4000
    denoiser = optimal(times)
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    totals = {
        name: elbo(denoiser, x0, Gaussian(), times, KeyedGenerator(0, torch.arange(n)), variance=name).total
        for name in ("beta", "beta_tilde", "learned")
    }
    assert totals["learned"].mean() < min(totals["beta"].mean(), totals["beta_tilde"].mean()) - 0.3
    gap = totals["learned"] + denoiser.log_prob(x0)
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / math.sqrt(n) + 1e-3


def test_all_ways_of_computing_the_bound_agree_with_learned_variances():
    times, n = ddpm_times(21), 300
    denoiser = optimal(times)
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    keyed = KeyedGenerator(0, torch.arange(n))
    whole = elbo(denoiser, x0, Gaussian(), times, keyed, variance="learned")
    few = elbo(denoiser, x0, Gaussian(), times, keyed, variance="learned", chunk=7)
    torch.testing.assert_close(few.total, whole.total)
    objective = Vlb(Gaussian(), times, variance="learned", time_sampler="stratified")
    values = torch.stack([objective(denoiser, x0, None, torch.Generator().manual_seed(k)).value for k in range(20)])
    assert abs(values.mean() - whole.total.mean()) < 4 * math.hypot(
        float(values.std()) / math.sqrt(20), float(whole.total.std()) / math.sqrt(n)
    )


def test_ancestral_samples_have_the_right_variance_in_few_steps():
    """With the optimal variances every marginal of the chain is exact, however coarse; with beta_tilde it is not."""
    times, n = torch.linspace(0, 1, 5, dtype=torch.float64), 20_000
    denoiser, spread = optimal(times), {}
    for name in ("learned", "beta_tilde"):
        out = sample(
            denoiser, (n, 2), times.flip(0)[:-1], DDPMSampler(variance=name), torch.Generator().manual_seed(0),
            dtype=torch.float64,
        )  # fmt: skip
        first = denoiser.schedule.log_snr(times[1:2])
        truth = torch.sigmoid(first) * 0.25 + torch.sigmoid(-first)
        spread[name] = float((out.x.var(0) / truth).mean())
    assert spread["learned"] == pytest.approx(1, abs=0.03) and spread["beta_tilde"] < 0.95


# ---- the hybrid objective ----


class Doubled(nn.Module):
    """Separate weights for the mean and for the variance, so that their gradients can be told apart."""

    def __init__(self):
        super().__init__()
        self.mean, self.variance = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, log_snr, cond=None, mask=None):
        return torch.cat([self.mean(x), self.variance(x)], 1)


def denoiser():
    torch.manual_seed(0)
    return Denoiser(Doubled(), CosineSchedule(), V(), learned_variance=True)


def gradients(objective, model):
    x0 = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    objective(model, x0, None, KeyedGenerator(0, torch.arange(64))).value.backward()
    return model.net.mean.weight.grad, model.net.variance.weight.grad


def the_mean_learns_from_the_simple_part_alone(kind):
    """Whatever its share, the bound leaves the gradient of the mean as it is, and moves that of the variance."""
    of_mean, of_variance = [], []
    for share in (0.0, 1.0):
        mean, variance = gradients(kind(Gaussian(), ddpm_times(8), share=share), denoiser())
        of_mean.append(mean)
        of_variance.append(variance)
    assert torch.equal(of_mean[0], of_mean[1])
    assert float(of_variance[0].abs().max()) == 0 and float(of_variance[1].abs().min()) > 0


def test_the_mean_learns_from_the_simple_part_alone():
    the_mean_learns_from_the_simple_part_alone(Hybrid)


def test_that_catches_a_mean_that_is_not_detached():
    class Attached(Hybrid):
        def bits(self, prediction, *args):
            prediction.x0.detach = lambda: prediction.x0
            return super().bits(prediction, *args)

    with pytest.raises(AssertionError):
        the_mean_learns_from_the_simple_part_alone(Attached)


@pytest.mark.parametrize("decoder", [Gaussian(), DiscretisedGaussian(9)], ids=["density", "levels"])
def test_its_second_part_is_the_bound_in_bits(decoder):
    """Without the prior, which no network changes; over all its terms and the reconstruction."""
    model, times, n = denoiser(), ddpm_times(9), 3000
    generator = torch.Generator().manual_seed(3)
    x0 = torch.randint(0, 9, (n, 3), generator=generator) / 4 - 1.0
    exact = elbo(model, x0, decoder, times, KeyedGenerator(1, torch.arange(n)), variance="learned")
    expected = (exact.total - exact.prior) / (3 * math.log(2))
    objective = Hybrid(decoder, times, time_sampler="stratified")
    estimate = objective(model, x0, None, KeyedGenerator(2, torch.arange(n))).parts["variance_bits_per_dim"].detach()
    error = math.hypot(float(estimate.std()), float(expected.std())) / math.sqrt(n)
    assert abs(float(estimate.mean() - expected.mean())) < 4 * error


def test_training_finds_the_optimal_variance():
    """Data N(0, c^2): the network's bias alone must become nu of the true reverse kernel, at one noise level."""
    times = torch.tensor([0.5, 0.55], dtype=torch.float64)
    schedule = CosineSchedule(log_snr_max=6.0, log_snr_min=-6.0)
    denoiser = GaussianDenoiser(schedule, torch.zeros(3), 0.3)
    s, t = schedule.log_snr(times)
    low, high, true = posterior_variance(s, t), sigma2_ts(s, t), denoiser.reverse_variance(s, t)
    nu = nn.Parameter(torch.zeros((), dtype=torch.float64))

    class Fitted(GaussianDenoiser):
        learned_variance = True

        def at_log_snr(self, x, log_snr, *args):
            prediction = super().at_log_snr(x, log_snr, *args)
            prediction.nu = nu.expand_as(x)
            return prediction

    model = Fitted(schedule, torch.zeros(3), 0.3)
    objective = Vlb(Gaussian(scale=1.0), times, variance="learned")
    optimizer = torch.optim.Adam([nu], lr=0.05)
    for step in range(150):
        optimizer.zero_grad()
        keyed = KeyedGenerator(0, torch.arange(256), step=step)
        objective(model, model.sample(256, keyed.child("data")), None, keyed).value.backward()
        optimizer.step()
    assert float(nu.detach()) == pytest.approx(float(torch.log(true / low) / torch.log(high / low)), abs=0.05)
