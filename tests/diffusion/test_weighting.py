"""Time samplers: one mean for all, strata filled, the same over one process or several, history well kept."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    EDM,
    PARAMETERISATIONS,
    TIME_SAMPLERS,
    WEIGHTINGS,
    CosineSchedule,
    GaussianDenoiser,
    LinearLogSnrSchedule,
    LinearSchedule,
    LossAwareTimes,
    Simple,
    V,
    rescale_zero_terminal,
)
from genmodels.diffusion.weighting import P2, WEIGHTING_TIMES, EDMWeighting, MinSNR, SigmoidWeighting, Unweighted


def taught(mixture=0.001):
    """A loss-aware sampler that has seen losses from 1 to 100."""
    times = LossAwareTimes(bins=7, history=2, mixture=mixture)
    t = torch.linspace(0, 0.999, 70)
    times.update(t, 1 + 99 * (t - 0.6).abs())
    return times


SAMPLERS = {name: sampler() for name, sampler in TIME_SAMPLERS.items()} | {"loss_aware, taught": taught()}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


def keyed(seed, n, rank=0, world=1):
    return KeyedGenerator(seed, torch.arange(n) * world + rank, "train")


def same_mean(sampler):
    """weight * f(t) has mean integral f, here of f(t) = t^3."""
    batches = torch.stack([_estimate(sampler, seed) for seed in range(150)])
    error = batches.std() / math.sqrt(len(batches))
    assert abs(batches.mean() - 0.25) < 4 * error + 1e-12


def _estimate(sampler, seed):
    t, weight = sampler(16, keyed(seed, 16))
    assert t.dtype == weight.dtype == torch.float64 and (t >= 0).all() and (t < 1).all()
    return (weight * t**3).mean()


@every_sampler
def test_same_mean(sampler):
    if isinstance(sampler, WEIGHTING_TIMES):  # their density is the weight of the loss
        with pytest.raises(AssertionError):
            same_mean(sampler)
    else:
        same_mean(sampler)


def test_same_mean_catches_a_missing_weight():
    def skewed(n, generator, rank=0, world=1):
        t, weight = SAMPLERS["uniform"](n, generator, rank, world)
        return t**2, weight  # p(t) = 1 / (2 sqrt(t)) was to be divided out

    with pytest.raises(AssertionError):
        same_mean(skewed)


def same_over_processes(sampler):
    together, _ = sampler(8, keyed(3, 8))
    parts = [sampler(4, keyed(3, 4, rank, 2), rank, 2)[0] for rank in range(2)]
    assert torch.equal(torch.stack(parts, 1).flatten(), together)


@every_sampler
def test_same_over_processes(sampler):
    same_over_processes(sampler)


def test_same_over_processes_catches_a_local_batch():
    def local(n, generator, rank=0, world=1):
        return SAMPLERS["antithetic"](n, generator)

    with pytest.raises(AssertionError):
        same_over_processes(local)


@pytest.mark.parametrize("name", ["stratified", "antithetic"])
def test_every_stratum_is_visited_once(name):
    for seed in range(20):
        t, _ = SAMPLERS[name](10, keyed(seed, 10))
        assert (t * 10).floor().sort().values.tolist() == list(range(10))


@every_sampler
def test_a_torch_generator_does_too(sampler):
    t, weight = sampler(5, torch.Generator().manual_seed(0))
    assert t.shape == weight.shape == (5,)
    assert torch.equal(t, sampler(5, torch.Generator().manual_seed(0))[0])


# ---- times drawn where the loss is large ----


class NoWeights(LossAwareTimes):
    def forward(self, *args):
        t, weight = super().forward(*args)
        return t, torch.ones_like(weight)


def test_same_mean_catches_importance_without_weights():
    bug = NoWeights(bins=7, history=2)
    bug.load_state_dict(taught().state_dict())
    with pytest.raises(AssertionError):
        same_mean(bug)


def test_times_follow_the_root_mean_square_of_the_last_losses():
    times = LossAwareTimes(bins=4, history=3, mixture=0.2)
    t, losses = torch.tensor([0.1, 0.4, 0.6, 0.9]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    times.update(t.repeat(2), torch.full((8,), 77.0))
    assert times.probabilities().tolist() == [0.25] * 4  # not yet three losses in every bin
    for factor in (1.0, 2.0, 3.0):
        times.update(t, factor * losses)
    expected = 0.8 * torch.tensor([0.1, 0.2, 0.3, 0.4]).double() + 0.05
    torch.testing.assert_close(times.probabilities(), expected)
    drawn, weight = times(100_000, torch.Generator().manual_seed(0))
    share = torch.bincount((drawn * 4).long(), minlength=4) / 100_000
    torch.testing.assert_close(share.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(weight, 1 / (4 * expected[(drawn * 4).long()]))


def variance_of(sampler, loss):
    """Of a batch's estimate of the mean loss."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([(w * loss(t)).mean() for t, w in (sampler(32, generator) for _ in range(300))]).var()


def test_importance_lowers_the_variance():
    """A noisy loss, ten thousand times larger at one end than at the other."""
    noise = torch.Generator().manual_seed(1)

    def loss(t):
        return torch.randn(t.shape, generator=noise, dtype=t.dtype).square() * 10 ** (4 * t)

    times, t = LossAwareTimes(bins=50), torch.rand(3000, generator=noise, dtype=torch.float64)
    times.update(t, loss(t))
    assert variance_of(times, loss) < 0.5 * variance_of(SAMPLERS["antithetic"], loss)


def test_its_history_is_state_and_continues():
    whole, first, second = (LossAwareTimes(bins=5, history=10) for _ in range(3))
    t, losses = torch.rand(80, generator=torch.Generator().manual_seed(0)), torch.arange(80.0)
    whole.update(t, losses)
    first.update(t[:60], losses[:60])
    second.load_state_dict(first.state_dict())
    second.update(t[60:], losses[60:])
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    lost = LossAwareTimes(bins=5, history=10)  # the mutant: a history that is not saved
    lost.update(t[60:], losses[60:])
    assert not torch.equal(lost.probabilities(), whole.probabilities())


@pytest.mark.parametrize("options", [{"bins": 0}, {"history": 0}, {"mixture": 1.5}])
def test_bad_options_of_the_loss_aware_sampler(options):
    with pytest.raises(ValueError, match="at least 1"):
        LossAwareTimes(**options)


LEVELS = torch.linspace(-10, 10, 21, dtype=torch.float64)
RATES = torch.full_like(LEVELS, -20.0)


def one_weight_of_x0(weighting):
    """weight / loss_weight is the weight of |x0 - x0_hat|^2: the same function of the log-SNR for all outputs."""
    weights = [weighting(kind(), LEVELS, RATES) / kind().loss_weight(LEVELS) for kind in PARAMETERISATIONS.values()]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [name for name in WEIGHTINGS if name != "none"])
def test_one_weight_of_x0(name):
    one_weight_of_x0(WEIGHTINGS[name]())


def test_one_weight_of_x0_catches_a_weight_of_the_output():
    with pytest.raises(AssertionError):
        one_weight_of_x0(Unweighted())


FIVE = torch.tensor([5.0], dtype=torch.float64)
TABLE = [  # weighting, parameterisation, weight at log-SNR 5
    (MinSNR(), "eps", 0.0336897350),
    (MinSNR(), "x0", 5.0),
    (MinSNR(), "v", 0.0334642546),
    (P2(), "eps", 1 / (1 + math.exp(5))),
    (P2(k=2.0, gamma=0.5), "eps", (2 + math.exp(5)) ** -0.5),
    (SigmoidWeighting(), "eps", 20 / (1 + math.exp(3))),
    (EDMWeighting(), "edm", 20 * math.exp(-((5 - 2.4) ** 2) / 2 / 2.4**2) / (2.4 * math.sqrt(2 * math.pi))),
]


@pytest.mark.parametrize("weighting, name, value", TABLE)
def test_values(weighting, name, value):
    weight = weighting(PARAMETERISATIONS[name](), FIVE, torch.tensor([-20.0]))
    assert float(weight) == pytest.approx(value, rel=1e-8)


def test_edm_is_a_normal_distribution_of_noise_levels():
    """Over uniform times the weights of F integrate to the mass of N(2.4, 2.4^2) within the schedule's ends."""
    t = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    for schedule in (CosineSchedule(), LinearLogSnrSchedule()):
        mean = EDMWeighting()(EDM(), schedule.log_snr(t), schedule.log_snr_rate(t)).mean()
        first, last = schedule.end_points
        inside = torch.special.ndtr((torch.tensor([first, last]).double() - 2.4) / 2.4)
        assert float(mean) == pytest.approx(float(inside[0] - inside[1]), rel=1e-4)


@pytest.mark.parametrize("name", ["edm", "sigmoid"])
def test_weights_of_the_bound_do_not_depend_on_the_schedule(name):
    """int w(lambda) mse(lambda) d lambda is the same whichever way lambda is run through."""
    values = []
    for schedule in (CosineSchedule(log_snr_max=10, log_snr_min=-10), LinearLogSnrSchedule()):
        t = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
        log_snr = schedule.log_snr(t)
        denoiser = GaussianDenoiser(schedule, torch.zeros(1), 0.25)
        error = denoiser.mmse(log_snr)[:, 0] / V().loss_weight(log_snr)
        values.append(float((WEIGHTINGS[name]()(V(), log_snr, schedule.log_snr_rate(t)) * error).mean()))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_last_step_of_zero_terminal_snr_has_a_finite_weight(name):
    schedule = rescale_zero_terminal(LinearSchedule())
    t = torch.tensor([0.999, 1.0], dtype=torch.float64)
    before, last = WEIGHTINGS[name]()(V(), schedule.log_snr(t), schedule.log_snr_rate(t))
    assert before > 0 and torch.isfinite(last)
    assert last == 1 if name == "none" else last == 0


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_in_the_objective(name):
    """per_example = weight * mse, with the unweighted error among the parts."""
    denoiser, n = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 0.5), 50
    x0 = denoiser.sample(n, torch.Generator().manual_seed(0))
    out = Simple(weighting=name)(denoiser, x0, None, torch.Generator().manual_seed(1))
    plain = Simple()(denoiser, x0, None, torch.Generator().manual_seed(1))
    schedule = denoiser.schedule
    weight = WEIGHTINGS[name]()(V(), schedule.log_snr(out.times), schedule.log_snr_rate(out.times))
    torch.testing.assert_close(out.per_example, weight * plain.per_example)
    assert torch.equal(out.parts["mse"], plain.parts["mse"])


@pytest.mark.parametrize(
    "build",
    [lambda: MinSNR(gamma=0), lambda: P2(k=-1), lambda: EDMWeighting(std=math.inf), lambda: EDM(sigma_data=0),
     lambda: EDM(sigma_data=math.inf)],
)
def test_errors(build):
    with pytest.raises(ValueError, match="must be a positive finite number"):
        build()
