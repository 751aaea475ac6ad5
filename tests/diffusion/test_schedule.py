"""Noise schedules: every schedule passes the same checks, and hits the constants of the papers' tables."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from genmodels.diffusion import (
    SCHEDULES,
    CosineDiscreteSchedule,
    CosineSchedule,
    DiscreteSchedule,
    LearnedSchedule,
    LinearContinuousSchedule,
    LinearLogSnrSchedule,
    LinearSchedule,
    NoiseSchedule,
    SigmoidSchedule,
    make_schedule,
    rescale_zero_terminal,
    step_to_time,
)
from genmodels.diffusion.path import in_float64
from tests.parameters import scattered


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


class Numerical(NoiseSchedule):
    """A schedule that gives its log-SNR only: rate and inverse are those of the base class."""

    def log_snr(self, t):
        return 8 - 12 * t.double() - 4 * t.double() ** 3


INSTANCES = {name: schedule() for name, schedule in SCHEDULES.items()}
INSTANCES |= {f"{name}, zero terminal": rescale_zero_terminal(schedule()) for name, schedule in SCHEDULES.items()}
INSTANCES |= {
    "linear, T=100": LinearSchedule(num_steps=100),
    "linear, T=4000": LinearSchedule(num_steps=4000),
    "cosine, raw": CosineSchedule(log_snr_max=math.inf, log_snr_min=-math.inf),
    "cosine, lopsided": CosineSchedule(log_snr_max=9.0, log_snr_min=-4.0),
    "numerical": Numerical(),
}
every_schedule = pytest.mark.parametrize("schedule", INSTANCES.values(), ids=INSTANCES.keys())


# ---- the checks ----


def variance_preserving(schedule):
    alpha, sigma = schedule.alpha_sigma(torch.linspace(0, 1, 1001, dtype=torch.float64))
    assert (alpha**2 + sigma**2 - 1).abs().max() < 1e-12


def decreasing(schedule):
    log_snr = schedule.log_snr(torch.linspace(0, 1, 2001, dtype=torch.float64))
    assert log_snr.dtype == torch.float64 and not log_snr.isnan().any()
    assert (log_snr.diff() < 0).all()


def inverted(schedule):
    t = torch.linspace(0, 1, 2001, dtype=torch.float64)
    assert (schedule.time_of(schedule.log_snr(t)) - t).abs().max() < 1e-10


def rate_is_derivative(schedule):
    t = torch.linspace(0.0003, 0.9997, 997, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(schedule.log_snr(t).sum(), t)
    torch.testing.assert_close(schedule.log_snr_rate(t.detach()), slope, rtol=1e-9, atol=0)


def betas_multiply_up(schedule):
    kept = torch.cumprod(1 - schedule.betas(50), 0)
    torch.testing.assert_close(kept, schedule.alpha_bars(50), rtol=1e-12, atol=1e-15)


CHECKS = [variance_preserving, decreasing, inverted, rate_is_derivative, betas_multiply_up]


@every_schedule
@pytest.mark.parametrize("check", CHECKS)
def test_checks(check, schedule):
    check(schedule)


@every_schedule
def test_end_points(schedule):
    assert schedule.end_points == tuple(schedule.log_snr(wide(0, 1)).tolist())


@pytest.mark.parametrize("width", [30.0, 700.0])
def test_the_time_of_a_wide_sigmoid_schedule(width):
    inverted(SigmoidSchedule(width=width))


class SigmaOfWrongSign(LinearLogSnrSchedule):
    def alpha_sigma(self, t):
        log_snr = self.log_snr(t)
        return torch.exp(logsigmoid(log_snr) / 2), torch.exp(logsigmoid(log_snr) / 2)


class Rising(LinearLogSnrSchedule):
    def log_snr(self, t):
        return -super().log_snr(t)


class ForgetsStart(CosineSchedule):
    def time_of(self, log_snr):
        return 2 / math.pi * torch.atan(torch.exp(-log_snr / 2))


class RateWithoutSpan(CosineSchedule):
    def log_snr_rate(self, t):
        return super().log_snr_rate(t) / self.span


class LooseEnds(NoiseSchedule):
    """Betas that forget the noise already there at the first step."""

    def log_snr(self, t):
        return INSTANCES["cosine"].log_snr(t)

    def betas(self, num_steps):
        log_alpha_bar = logsigmoid(self.log_snr(step_to_time(torch.arange(num_steps + 1), num_steps)))
        return -torch.expm1(log_alpha_bar.diff())


@pytest.mark.parametrize(
    "check, bug",
    [
        (variance_preserving, SigmaOfWrongSign()),
        (decreasing, Rising()),
        (inverted, ForgetsStart()),
        (rate_is_derivative, RateWithoutSpan()),
        (betas_multiply_up, LooseEnds()),
    ],
)
def test_mutants(check, bug):
    with pytest.raises(AssertionError):
        check(bug)


# ---- constants ----

TABLE = {  # schedule, {step of T = 1000: alpha_bar}
    "linear": {1: 0.9999, 500: 0.0785872429, 1000: 4.03582977e-5},
    "linear_continuous": {500: 0.0790638125, 1000: 4.31857491e-5},
    "cosine_discrete": {1: 0.9999587158, 500: 0.4938435904, 999: 2.42876691e-6, 1000: 2.42876691e-9},
    "sigmoid": {1: 0.9996997208, 500: 0.5, 999: 3.00279e-4, 1000: 0.0},
    "linear, zero terminal": {1: 0.9999, 500: 0.0760287505, 999: 4.21326e-9, 1000: 0.0},
}


@pytest.mark.parametrize("name", TABLE)
def test_alpha_bar_constants(name):
    table = INSTANCES[name].alpha_bars(1000)
    for step, value in TABLE[name].items():
        digits = len(f"{value:.12g}".split("e")[0].replace(".", "").strip("0"))
        assert float(table[step - 1]) == pytest.approx(value, rel=max(10.0 ** (1 - digits), 1e-9), abs=0)


def test_log_snr_constants():
    at = step_to_time(torch.tensor([1, 500, 1000]), 1000)
    assert INSTANCES["linear"].log_snr(at).tolist() == pytest.approx([9.21024, -2.46170, -10.11767], abs=5e-6)
    assert float(INSTANCES["grad_tts"].alpha_sigma(wide(1))[0]) == pytest.approx(math.exp(-10.025 / 2), rel=1e-12)
    assert float(INSTANCES["linear_continuous"].log_snr(wide(1))) == pytest.approx(-10.0499568, abs=5e-8)
    assert INSTANCES["cosine, raw"].log_snr(wide(0.1, 0.5)).tolist() == pytest.approx([3.68546007, 0], abs=5e-9)
    cosine = INSTANCES["cosine"]
    assert (cosine.from_zero, 1 - cosine.from_one) == pytest.approx((3.52104e-4, 0.999647896), abs=5e-10)
    assert cosine.end_points == pytest.approx((15, -15), abs=1e-12)
    assert INSTANCES["linear_log_snr"].end_points == (10, -10)


def test_one_beta_of_the_discrete_cosine_is_capped():
    betas = CosineDiscreteSchedule().betas(1000)
    assert int((betas > 0.999 - 1e-9).sum()) == 1


def test_tables_are_ddpm_s():
    expected = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    torch.testing.assert_close(LinearSchedule().betas(1000), expected, rtol=1e-11, atol=0)


def test_interpolation_is_a_constant_rate_between_steps():
    schedule = LinearSchedule(num_steps=50)
    inside = -torch.log(schedule.alpha_bar(wide(0.20, 0.205, 0.21, 0.215, 0.22)))
    torch.testing.assert_close(inside.diff(), inside.diff()[:1].expand(4), rtol=1e-9, atol=0)
    assert schedule.end_points[0] == math.inf  # t = 0 is the data


def test_views_agree():
    t = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    schedule = CosineSchedule()
    alpha, sigma = schedule.alpha_sigma(t)
    torch.testing.assert_close(schedule.alpha_bar(t), alpha**2)
    torch.testing.assert_close(schedule.sigma_bar(t), sigma / alpha)


def test_integer_steps():
    assert step_to_time(torch.tensor([1, 1000]), 1000).tolist() == [0.001, 1.0]
    assert torch.equal(step_to_time(torch.arange(10), 10, zero_based=True), step_to_time(torch.arange(1, 11), 10))


# ---- dtype, device, module ----


def test_float64_inside_whatever_the_model_is_cast_to():
    schedule = torch.nn.Sequential(LinearSchedule()).to(torch.bfloat16)[0]
    assert schedule.decay.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        inside = schedule.log_snr(torch.tensor([0.3, 0.5]))
    assert torch.equal(inside, LinearSchedule().log_snr(torch.tensor([0.3, 0.5])))


def test_state_dict_holds_what_is_learned_and_nothing_else():
    assert all(set(s.state_dict()) == {name for name, _ in s.named_parameters()} for s in INSTANCES.values())
    assert [name for name, s in INSTANCES.items() if s.state_dict()] == ["learned", "learned, zero terminal"]


# ---- errors ----


def test_an_unknown_name_is_one_line():
    with pytest.raises(ValueError, match="schedule must be one of .*, got 'cosin'"):
        make_schedule("cosin", 10)


@pytest.mark.parametrize("num_steps", [1, 10, 20])
def test_linear_refuses_small_T_and_names_the_smallest(num_steps):
    with pytest.raises(ValueError, match="num_steps >= 21"):
        LinearSchedule(num_steps=num_steps)
    assert float(LinearSchedule(num_steps=21).betas(21)[-1]) < 1


@pytest.mark.parametrize(
    "build",
    [
        lambda: CosineDiscreteSchedule(num_steps=0),
        lambda: DiscreteSchedule(torch.tensor([0.1, 1.0])),
        lambda: LinearContinuousSchedule(beta_min=2.0, beta_max=1.0),
        lambda: CosineSchedule(log_snr_max=-1.0, log_snr_min=1.0),
        lambda: LinearLogSnrSchedule(log_snr_max=math.inf),
        lambda: SigmoidSchedule(width=0.0),
        lambda: SigmoidSchedule(width=1e3),
        lambda: LinearContinuousSchedule(beta_max=math.inf),
        lambda: LinearSchedule(beta_end=math.inf),
        lambda: LinearSchedule(beta_end=math.nan),
    ],
)
def test_bad_arguments_raise_one_line(build, refuses):
    refuses(ValueError, None, build)


def shaken(schedule, rounds=100):
    """The schedule after random updates of its parameters."""
    torch.manual_seed(0)
    for _ in range(rounds):
        scattered(schedule, 0.3)
    return schedule


def ends_hold(schedule):
    """Exactly, alone and among other times, after any update."""
    shaken(schedule)
    assert schedule.end_points == (8.1, -6.3)
    for n in (1, 2, 7, 1000):
        t = torch.cat([torch.rand(n, dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)])
        assert schedule.log_snr(t)[-2:].tolist() == [8.1, -6.3]


def made(kind=LearnedSchedule, **options):
    return kind(log_snr_max=8.1, log_snr_min=-6.3, **options)


def test_ends_hold():
    ends_hold(made())


def test_ends_catch_a_missing_normalisation():
    class Loose(LearnedSchedule):
        def log_snr(self, t):
            rise, _ = self._rise(t)
            return self.first + (self.last - self.first) * rise / 2

    with pytest.raises(AssertionError):
        ends_hold(made(Loose))


def test_it_stays_monotone_and_invertible():
    schedule = shaken(made(hidden=32))
    t = torch.linspace(0, 1, 3001, dtype=torch.float64)
    log_snr = schedule.log_snr(t)
    assert (log_snr.diff() < 0).all() and (schedule.log_snr_rate(t) < 0).all()
    assert (schedule.time_of(log_snr) - t).abs().max() < 1e-10
    assert not schedule.time_of(log_snr).requires_grad


def test_it_starts_near_a_straight_line_and_in_float64():
    t = torch.linspace(0, 1, 11)
    straight = 8.1 + (-6.3 - 8.1) * t.double()
    log_snr = made().log_snr(t)
    assert log_snr.dtype == torch.float64
    assert (log_snr - straight).abs().max() < 1.0


def test_its_rate_has_the_parameters_in_its_graph():
    schedule = made(hidden=8)
    t = torch.rand(5, dtype=torch.float64)
    for value in (schedule.log_snr(t), schedule.log_snr_rate(t)):
        gradients = torch.autograd.grad(value.square().sum(), list(schedule.parameters()))
        assert all(float(g.abs().max()) > 0 for g in gradients)


@pytest.mark.parametrize("options", [{"log_snr_max": -11.0}, {"log_snr_min": -float("inf")}, {"hidden": 0}])
def test_errors(options, refuses):
    refuses(ValueError, None, LearnedSchedule, **options)


class Squared(NoiseSchedule):
    def log_snr(self, t):
        return 10 - 20 * t.double() ** 2


def test_rates_have_gradients_to_the_time():
    t = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    rate = Squared().log_snr_rate(t)
    assert rate.tolist() == pytest.approx([-8.0, -28.0])
    assert torch.autograd.grad(rate.sum(), t)[0].tolist() == pytest.approx([-40.0, -40.0])
    with torch.no_grad():
        assert not Squared().log_snr_rate(t).requires_grad


def test_steep_schedules_do_not_overflow():
    schedule = LinearContinuousSchedule(beta_max=1e4)
    t = torch.tensor([0.001, 0.1, 0.5, 1.0], dtype=torch.float64)
    decay = t * (schedule.beta_min + schedule.slope * t / 2)
    assert schedule.log_snr(t)[-1].item() == pytest.approx(-float(decay[-1]))
    assert torch.allclose(schedule.log_snr(t)[:2], -torch.log(torch.expm1(decay[:2])), rtol=1e-12)


def test_numbers_of_python_keep_their_digits():
    assert float(in_float64(0.1)) == 0.1 and in_float64(torch.tensor(0.5)).dtype == torch.float64


def test_units_of_a_new_learned_schedule_bend_it_each_in_its_own_place():
    schedule, times = LearnedSchedule(hidden=5), torch.linspace(0, 1, 101, dtype=torch.float64)
    bends = torch.stack([torch.autograd.grad(schedule.log_snr_rate(t[None]).sum(), schedule.heights)[0] for t in times])
    assert bends.argmin(dim=0).tolist() == [0, 25, 50, 75, 100]  # steepest there
