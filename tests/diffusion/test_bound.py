"""The bound against closed forms, on every path, under every way of computing it."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.likelihood import bits_per_dim
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    CosineSchedule,
    Denoiser,
    DiscretisedGaussian,
    ElboTerms,
    Gaussian,
    GaussianDenoiser,
    LevelSoftmax,
    LinearLogSnrSchedule,
    LinearSchedule,
    MixtureDenoiser,
    SigmoidSchedule,
    V,
    ddpm_times,
    elbo,
    path_terms,
    posterior,
    q_sample,
    sigma2_ts,
    step_to_time,
    to_levels,
    to_unit,
)
from genmodels.diffusion.bound import diffusion_term, prior_term, reconstruction_term


class Signs(KeyedGenerator):
    """"Noise" that is +1 or -1: with data at mean plus and minus c, averages of squares are exact expectations."""

    def __init__(self):
        super().__init__(0, torch.arange(4))

    def at(self, step):
        return self

    def rows(self, selection):
        part = Signs()
        part.index = self.index[selection]
        return part

    def normal(self, shape, *, dtype=torch.float64, device=None):
        return (1.0 - 2.0 * (self.index % 2)).to(dtype).reshape(-1, 1).expand(shape)


def exact(mean, c):
    """Four examples that go with `Signs`."""
    return mean + c * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)


# ---- prior and single terms ----


def test_prior_constant():
    last = LinearSchedule().log_snr(torch.tensor(1.0))
    assert float(prior_term(torch.ones(1, 1), last)) == pytest.approx(2.01796e-5, rel=3e-6)
    assert float(prior_term(torch.ones(1, 1), torch.tensor(-torch.inf))) == 0


def test_prior_is_the_kl_of_two_normals():
    x0, log_snr = torch.tensor([[0.3, -1.2]], dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    q = torch.distributions.Normal(torch.sigmoid(log_snr).sqrt() * x0, torch.sigmoid(-log_snr).sqrt())
    p = torch.distributions.Normal(torch.zeros(1, 2).double(), 1.0)
    torch.testing.assert_close(prior_term(x0, log_snr), torch.distributions.kl_divergence(q, p).sum(1))


def one_over_snr_units(variance, term=diffusion_term):
    """The coefficient of |eps - eps_hat|^2 against DDPM's beta^2 / (2 s2 alpha (1 - alpha_bar)), every step."""
    beta = LinearSchedule().betas(1000)
    alpha_bar = torch.cumprod(1 - beta, 0)
    before = alpha_bar[:-1]
    beta, alpha_bar = beta[1:], alpha_bar[1:]
    s2 = beta if variance is sigma2_ts else beta * (1 - before) / (1 - alpha_bar)
    expected = beta**2 / (2 * s2 * (1 - beta) * (1 - alpha_bar))
    log_snr = LinearSchedule().log_snr(ddpm_times(1000))
    x0 = torch.zeros(999, 1, dtype=torch.float64)
    off = torch.exp(-log_snr[1:, None] / 2)  # the error of x0 when eps is off by one
    actual = term(x0, x0 + off, log_snr[:-1], log_snr[1:], variance) - term(
        x0, x0, log_snr[:-1], log_snr[1:], variance
    )
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)
    return actual


def test_diffusion_coefficients():
    tilde = one_over_snr_units(posterior_variance_)
    assert tilde[[0, 498, 998]].tolist() == pytest.approx([0.599671512, 0.00550819651, 0.0102045019], rel=1e-8)
    beta = one_over_snr_units(sigma2_ts)
    assert beta[[0, 498, 998]].tolist() == pytest.approx([0.27269208, 0.00550343, 0.01020449], rel=2e-6)


def posterior_variance_(s, t):
    return posterior(s, t)[2]


def test_diffusion_coefficients_catch_a_missing_half():
    def bug(*args):
        return 2 * diffusion_term(*args)

    with pytest.raises(AssertionError):
        one_over_snr_units(sigma2_ts, bug)


def test_diffusion_term_is_the_kl_of_two_normals():
    generator = torch.Generator().manual_seed(0)
    x0, x0_hat, x = (torch.randn(5, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    s, t = torch.linspace(8, 0, 5, dtype=torch.float64), torch.linspace(6, -4, 5, dtype=torch.float64)
    c_0, c_t, v = (value[:, None] for value in posterior(s, t))
    for variance in (sigma2_ts, posterior_variance_):
        q = torch.distributions.Normal(c_0 * x0 + c_t * x, v.sqrt())
        p = torch.distributions.Normal(c_0 * x0_hat + c_t * x, variance(s, t)[:, None].sqrt())
        truth = torch.distributions.kl_divergence(q, p).sum(1)
        torch.testing.assert_close(diffusion_term(x0, x0_hat, s, t, variance), truth, rtol=1e-9, atol=1e-12)


# ---- D6: tight on every path ----


class OffByOnePercent(GaussianDenoiser):
    def _moments(self, x, log_snr):
        x0, score = super()._moments(x, log_snr)
        return 1.01 * x0, score


def tight_on_every_path(kind, steps):
    schedule = LinearSchedule(num_steps=steps) if steps > 20 else CosineSchedule(log_snr_max=6.0, log_snr_min=-6.0)
    denoiser = kind(schedule, torch.tensor([0.5], dtype=torch.float64), 0.25)
    generator = torch.Generator().manual_seed(0)
    times = ddpm_times(steps)
    start = torch.tensor([[-3.0], [0.5], [0.9], [4.0]], dtype=torch.float64)
    hop = 0.03 if steps > 100 else 1.0
    path = [start]
    for _ in range(steps):
        path.append(path[-1] + hop * torch.randn(4, 1, generator=generator, dtype=torch.float64))
    last = times[-1:]
    terms = path_terms(
        denoiser, path, times, variance=denoiser.reverse_variance, prior=lambda x: denoiser.marginal_log_prob(x, last)
    )
    assert terms.transitions.shape == (4, steps)
    assert (terms.total + denoiser.log_prob(start)).abs().max() < 1e-9


@pytest.mark.parametrize("steps", [4, 1000])
def test_true_kernels_make_the_bound_tight_on_every_path(steps):
    tight_on_every_path(GaussianDenoiser, steps)


@pytest.mark.parametrize("steps", [4, 1000])
def test_tightness_catches_one_percent(steps):
    with pytest.raises(AssertionError):
        tight_on_every_path(OffByOnePercent, steps)


# ---- D9: the sum over T steps, log-SNR 10 to -10 ----

SUMS = {
    1.0: {1: 11012.7329, 2: 5506.86640, 4: 110.563215, 10: 14.3755212, 100: 5.47972329, 1000: 5.04528513},
    0.25: {1: 2753.27697, 2: 2202.67157, 4: 86.6382921, 10: 12.1627359, 100: 4.71249999, 1000: 4.34524653},
}


def sum_of_terms(c2, steps):
    denoiser = GaussianDenoiser(LinearLogSnrSchedule(), torch.zeros(1), c2)
    x0 = exact(0.0, math.sqrt(c2))
    times = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    terms = elbo(denoiser, x0, Gaussian(), times, Signs(), variance="beta_tilde")
    return float(terms.diffusion.sum(1).mean())


@pytest.mark.parametrize("c2", SUMS)
def test_diffusion_sums(c2):
    sums = [sum_of_terms(c2, steps) for steps in SUMS[c2]]
    assert sums == pytest.approx(list(SUMS[c2].values()), rel=1e-8)
    limit = 0.5 * math.log((1 + c2 * math.exp(10)) / (1 + c2 * math.exp(-10)))
    assert all(a > b for a, b in zip(sums, sums[1:] + [limit], strict=True))


def test_diffusion_sums_catch_a_reversed_difference():
    """With the log-SNRs of s and t exchanged the sum is not even positive."""
    s, t = torch.tensor([-1.0, 0.0]).double(), torch.tensor([1.0, 2.0]).double()
    reversed_terms = diffusion_term(torch.ones(2, 1), torch.zeros(2, 1), s, t, posterior_variance_)
    assert (reversed_terms < 0).all()


# ---- D10: the whole bound of DDPM's own chain ----


def whole_bound(variance, keep=("prior", "diffusion", "reconstruction"), factor=1.0):
    schedule = LinearSchedule()
    denoiser = GaussianDenoiser(schedule, torch.tensor([0.5]), 0.25)
    first = schedule.log_snr(step_to_time(1, 1000))
    decoder = Gaussian(scale=float(denoiser.mmse(first).sqrt()))
    terms = elbo(denoiser, exact(0.5, 0.5), decoder, ddpm_times(1000), Signs(), variance=variance)
    parts = {"prior": terms.prior, "diffusion": factor * terms.diffusion.sum(1), "reconstruction": terms.reconstruction}
    return float(sum(parts[name] for name in keep).mean())


@pytest.mark.parametrize("variance, total", [("beta", 0.726888630), ("beta_tilde", 1.18214481)])
def test_whole_bound(variance, total):
    assert whole_bound(variance) == pytest.approx(total, abs=1e-7)
    assert total > 0.725791353  # the entropy


def test_whole_bound_catches_a_dropped_prior_and_a_missing_half():
    assert whole_bound("beta", keep=("diffusion", "reconstruction")) != pytest.approx(0.726888630, abs=1e-7)
    assert whole_bound("beta", factor=2.0) != pytest.approx(0.726888630, abs=1e-7)


# ---- D17: below the truth ----


def mixture():
    means = torch.tensor([[-0.6, 0.1], [0.5, -0.3]], dtype=torch.float64)
    return MixtureDenoiser(CosineSchedule(), torch.tensor([0.3, 0.7]), means, torch.tensor([0.02, 0.05]))


def gaussian():
    return GaussianDenoiser(CosineSchedule(), torch.tensor([0.3, -0.2]), torch.tensor([0.09, 0.25]))


def gap(denoiser, drop=()):
    """Mean and standard error of log p - bound over draws of the data."""
    n = 400
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    terms = elbo(denoiser, x0, Gaussian(), ddpm_times(100), KeyedGenerator(0, torch.arange(n)))
    parts = {"prior": terms.prior, "diffusion": terms.diffusion.sum(1), "reconstruction": terms.reconstruction}
    difference = denoiser.log_prob(x0) + sum(value for name, value in parts.items() if name not in drop)
    return float(difference.mean()), float(difference.std() / math.sqrt(n))


@pytest.mark.parametrize("denoiser", [gaussian, mixture])
def test_bound_is_below_the_truth(denoiser):
    mean, error = gap(denoiser())
    assert mean > -4 * error
    assert mean < 1.0  # and not by much: a true denoiser, a hundred steps


def test_bound_below_the_truth_catches_a_dropped_sum():
    mean, error = gap(mixture(), drop=("diffusion",))
    assert mean < -4 * error


# ---- D18: every way of computing it agrees ----


def agrees(stratified, everything):
    for part in ("diffusion", "reconstruction"):
        difference = stratified.parts[part] - everything.parts[part]
        assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(len(difference))


def both_modes(n=600, draws=7, replicates=3):
    denoiser = mixture()
    x0 = denoiser.sample(n, torch.Generator().manual_seed(1))
    arguments = (denoiser, x0, Gaussian(), ddpm_times(41))
    everything = elbo(*arguments, KeyedGenerator(3, torch.arange(n)))
    stratified = elbo(
        *arguments, KeyedGenerator(3, torch.arange(n)), mode="stratified", draws=draws, replicates=replicates
    )
    return stratified, everything


def test_stratified_agrees_with_all():
    stratified, everything = both_modes()
    assert stratified.diffusion.shape == (600, 7) and stratified.log_snr.shape == (7,)
    assert everything.diffusion.shape == (600, 40) and everything.stderr is None
    agrees(stratified, everything)


def test_stratified_catches_a_missing_weight():
    stratified, everything = both_modes()
    stratified.diffusion = stratified.diffusion / (40 / 7)
    with pytest.raises(AssertionError):
        agrees(stratified, everything)


def test_one_draw_for_each_term_is_all_of_them():
    stratified, everything = both_modes(n=5, draws=40)
    torch.testing.assert_close(stratified.diffusion, everything.diffusion)
    assert stratified.stderr is None
    torch.testing.assert_close(stratified.log_snr, everything.log_snr)


@pytest.mark.parametrize("draws, replicates, known", [
    (2, 2, True), (2, 6, True), (10, 2, True), (10, 8, True), (11, 2, False), (20, 2, False),
])  # fmt: skip
def test_the_error_of_the_draws_is_that_between_seeds_or_unknown(draws, replicates, known):
    """Replicates that draw the same term share its noise: of 20 strata of two terms half of them do."""
    denoiser = mixture()
    x0, times = denoiser.sample(8, torch.Generator().manual_seed(1)), ddpm_times(41)
    given = (denoiser, x0, Gaussian(), times)
    options = {"mode": "stratified", "draws": draws, "replicates": replicates}
    found = [elbo(*given, KeyedGenerator(seed, torch.arange(8)), **options) for seed in range(150)]
    assert all((one.stderr is not None) == known for one in found)
    if known:
        between = torch.stack([one.total for one in found]).var(0).mean().sqrt()
        claimed = torch.stack([one.stderr for one in found]).square().mean().sqrt()
        most = 1.45 if draws * replicates > 40 else 1.15  # the allowance is for noise alone, where many share a term
        assert 0.85 < float(claimed / between) < most


def test_path_form_has_the_mean_of_the_kl_form():
    denoiser, n = gaussian(), 3000
    schedule, times = denoiser.schedule, ddpm_times(8)
    generator = torch.Generator().manual_seed(2)
    x0 = denoiser.sample(n, generator)
    log_snr = [torch.tensor(torch.inf).double(), *schedule.log_snr(times)]
    path = [x0]
    for s, t in zip(log_snr[:-1], log_snr[1:], strict=True):
        noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        scale = (torch.sigmoid(t) / torch.sigmoid(s)).sqrt()
        path.append(scale * path[-1] + sigma2_ts(s, t).sqrt() * noise)
    by_path = path_terms(denoiser, path, times).total
    by_kl = elbo(denoiser, x0, Gaussian(), times, KeyedGenerator(5, torch.arange(n))).total
    difference = by_path - by_kl
    assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(n)


# ---- D16: bits per dimension ----


@pytest.mark.parametrize("levels", [2, 17, 256])
def test_masses_of_a_decoder_are_a_distribution_over_levels(levels):
    """The mean bits/dim of data drawn from the decoder itself is the decoder's entropy, for any number of levels."""
    decoder, mean, scale = DiscretisedGaussian(levels), torch.tensor(0.2).double(), torch.tensor(0.6).double()
    log_mass = decoder.log_mass(torch.arange(levels), mean, scale)
    entropy = -(log_mass.exp() * log_mass).sum() / math.log(2)
    bits = bits_per_dim(3 * log_mass, 3, levels)
    assert float((log_mass.exp() * bits).sum()) == pytest.approx(float(entropy), rel=1e-10)


def uniform_costs_log2_levels(bits_of, levels):
    """A model that gives every integer the same mass."""
    nats = torch.full((3,), -5 * math.log(levels), dtype=torch.float64)
    assert bits_of(nats, 5, levels).tolist() == pytest.approx([math.log2(levels)] * 3, rel=1e-10)


@pytest.mark.parametrize("levels, expected", [(2, 1.0), (17, 4.08746284), (256, 8.0)])
def test_uniform_model_costs_log2_levels(levels, expected):
    assert math.log2(levels) == pytest.approx(expected, rel=1e-8)
    uniform_costs_log2_levels(bits_per_dim, levels)


def test_uniform_model_catches_eight_bits():
    def bug(nats, dims, levels):
        return -nats / (dims * math.log(2)) + 8 - math.log2(levels)

    uniform_costs_log2_levels(bug, 256)
    with pytest.raises(AssertionError):
        uniform_costs_log2_levels(bug, 17)


def level_data(n=6, levels=17):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, levels, (n, 1, 4, 4), generator=generator)


class Small(torch.nn.Module):
    """A small float32 network on images."""

    def __init__(self, scale=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.scale = scale
        self.weight = torch.nn.Parameter(0.3 * torch.randn(17, 16, generator=generator))

    def forward(self, x, log_snr, cond=None):
        flat = torch.cat([x.flatten(1) / self.scale, log_snr.clamp(-20, 20)[:, None] / 10], 1)
        out = torch.tanh(flat @ self.weight).reshape(x.shape)
        return out if cond is None else out + 0.1 * cond.reshape(-1, 1, 1, 1)


def bits(n=6, **options):
    k, levels = level_data(n), 17
    denoiser = Denoiser(Small(), CosineSchedule(), V())
    generator = options.pop("generator", KeyedGenerator(0, torch.arange(n), "evaluate"))
    terms = elbo(denoiser, to_unit(k, levels), DiscretisedGaussian(levels), ddpm_times(20), generator, **options)
    return bits_per_dim(terms.nats, 16, levels)


def test_invariant_to_batches_and_chunks():
    whole = bits()
    for chunk in (1, 5, 37, 4096):
        torch.testing.assert_close(bits(chunk=chunk), whole, rtol=0, atol=1e-5)
    k, rows = level_data(), torch.tensor([4, 1])
    denoiser = Denoiser(Small(), CosineSchedule(), V())
    part = elbo(denoiser, to_unit(k[rows], 17), DiscretisedGaussian(17), ddpm_times(20),
                KeyedGenerator(0, rows, "evaluate"))  # fmt: skip
    torch.testing.assert_close(bits_per_dim(part.nats, 16, 17), whole[rows], rtol=0, atol=1e-5)
    whole, part = bits(mode="stratified", draws=4), bits(mode="stratified", draws=4, chunk=3)
    torch.testing.assert_close(part, whole, rtol=0, atol=1e-5)


def test_invariance_catches_a_batch_generator():
    whole = bits(generator=torch.Generator().manual_seed(0))
    part = bits(n=3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(level_data(3), level_data()[:3])
    assert (part - whole[:3]).abs().max() > 1e-3


def test_the_number_of_levels_matters():
    """Eight bits written into the code would show: the same pixels as 17 or as 33 levels cost one bit more."""
    k = level_data()
    denoiser = Denoiser(Small(), CosineSchedule(), V())
    costs = []
    for levels, data in ((17, k), (33, 2 * k)):
        generator = KeyedGenerator(0, torch.arange(6))
        terms = elbo(denoiser, to_unit(data, levels), DiscretisedGaussian(levels), ddpm_times(20), generator)
        costs.append(bits_per_dim(terms.nats, 16, levels).mean())
    first_noise = float(CosineSchedule().alpha_sigma(torch.tensor(1 / 20))[1])
    assert first_noise > 1 / 33  # the decoder is wider than a level, so halving the levels halves the mass
    assert 0.3 < float(costs[1] - costs[0]) < 1.2


def test_uniform_data_cost_at_least_log2_levels():
    """No model beats the entropy: 1, 2, 4.087 bits for uniform integers (up to draws)."""
    for levels in (2, 4, 17):
        n = 300
        k = torch.randint(0, levels, (n, 4), generator=torch.Generator().manual_seed(0))
        denoiser = GaussianDenoiser(CosineSchedule(), torch.zeros(4), (levels + 1) / (3 * (levels - 1)))
        decoder = DiscretisedGaussian(levels)
        terms = elbo(denoiser, to_unit(k, levels, dtype=torch.float64), decoder, ddpm_times(50),
                     KeyedGenerator(0, torch.arange(n)), variance="beta_tilde")  # fmt: skip
        cost = bits_per_dim(terms.nats, 4, levels)
        assert float(cost.mean()) > math.log2(levels) - 4 * float(cost.std()) / math.sqrt(n)


# ---- the interface ----


def test_terms_add_up():
    values = ([1.0, 2.0], [[1.0, 2.0], [3.0, 4.0]], [0.5, 0.25], [3.0, -3.0])
    terms = ElboTerms(*(torch.tensor(value, dtype=torch.float64) for value in values))
    assert terms.total.tolist() == [4.5, 9.25] and terms.nats.tolist() == [-4.5, -9.25]


def test_condition_and_progress():
    seen = []
    cond = torch.arange(6)
    with_cond = bits(cond=cond, chunk=50, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (120, 120) and len(seen) == 3
    assert not torch.allclose(with_cond, bits())
    assert torch.equal(with_cond[:1], bits(cond=torch.zeros(6), chunk=50)[:1])


def test_x0_hat_is_not_clipped():
    """An estimate far outside the data range is charged for."""
    denoiser = Denoiser(lambda x, log_snr, cond: torch.full_like(x, 5.0), CosineSchedule(), V())
    data, decoder = to_unit(level_data(), 17), DiscretisedGaussian(17)
    terms = elbo(denoiser, data, decoder, ddpm_times(20), KeyedGenerator(0, torch.arange(6)))
    log_snr = CosineSchedule().log_snr(ddpm_times(20))
    noise = KeyedGenerator(0, torch.arange(6)).at(19).normal(data.shape)
    x0_hat = denoiser(q_sample(data, log_snr[-1:], noise), torch.ones(6)).x0
    assert x0_hat.abs().max() > 3
    expected = diffusion_term(data, x0_hat, log_snr[-2:-1], log_snr[-1:], sigma2_ts)
    torch.testing.assert_close(terms.diffusion[:, -1], expected, rtol=1e-5, atol=0)
    assert torch.equal(to_levels(data, 17), level_data())


def test_zero_terminal_snr():
    denoiser = GaussianDenoiser(SigmoidSchedule(), torch.zeros(2), 0.3)
    x0 = denoiser.sample(4, torch.Generator().manual_seed(0))
    terms = elbo(denoiser, x0, Gaussian(), ddpm_times(10), KeyedGenerator(0, torch.arange(4)))
    assert terms.total.isfinite().all() and torch.equal(terms.prior, torch.zeros(4).double())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"times": torch.tensor([0.5, 0.2])}, "increase within"),
        ({"times": torch.tensor([0.5])}, "at least two"),
        ({"times": torch.tensor([0.5, 1.5])}, "within"),
        ({"mode": "stratified", "draws": 20}, "draws <= 19"),
        ({"mode": "stratified", "draws": 4, "replicates": 1}, "at least 2"),
        ({"mode": "some"}, "all or stratified"),
        ({"variance": "learnt"}, "beta, beta_tilde"),
    ],
)
def test_errors(change, message):
    denoiser = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
    times = change.pop("times", ddpm_times(20))
    with pytest.raises(ValueError, match=message):
        elbo(denoiser, torch.zeros(3, 2), Gaussian(), times, KeyedGenerator(0, torch.arange(3)), **change)


def test_a_grid_without_noise_at_its_start_is_refused():
    denoiser = GaussianDenoiser(LinearSchedule(), torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match="start at 1/T"):
        elbo(denoiser, torch.zeros(3, 2), Gaussian(), torch.linspace(0, 1, 11), KeyedGenerator(0, torch.arange(3)))


def test_a_path_has_one_point_more_than_times():
    denoiser = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match="has 5 points, not 3"):
        path_terms(denoiser, [torch.zeros(3, 2)] * 3, ddpm_times(4))
    with pytest.raises(ValueError, match=r"prior is one number for each row, \(3,\), got shape \(3, 1\)"):
        path_terms(denoiser, [torch.zeros(3, 2)] * 5, ddpm_times(4), prior=lambda x: x[:, :1])


@pytest.mark.parametrize("log_snr", [-1.0, 0.5, 4.0])
def test_a_softmax_decoder_is_bayes_rule_for_the_noisy_data(log_snr):
    levels, draw = 5, torch.Generator().manual_seed(0)
    k = torch.randint(levels, (6, 3), generator=draw)
    x0, time = to_unit(k, levels, dtype=torch.float64), torch.full((6,), log_snr, dtype=torch.float64)
    x = q_sample(x0, time, torch.randn(x0.shape, generator=draw, dtype=torch.float64))
    alpha, sigma = (math.sqrt(1 / (1 + math.exp(sign * log_snr))) for sign in (-1, 1))
    centres = torch.linspace(-1, 1, levels, dtype=torch.float64)
    each = torch.distributions.Normal(alpha * centres, sigma).log_prob(x[..., None])
    exact = -each.log_softmax(dim=-1).gather(-1, k[..., None]).sum(dim=(1, 2))
    found = reconstruction_term(x0, x, torch.zeros_like(x0), time, LevelSoftmax(levels), sigma2_ts)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
