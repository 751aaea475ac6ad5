"""Consistency models: their targets on the exact flow of a Gaussian, how the second point comes nearer, the sampler."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from genmodels.core.random import FrameKeyedGenerator
from genmodels.diffusion import (
    EDM,
    WEIGHTINGS,
    X0,
    Consistency,
    ConsistencySampler,
    CosineSchedule,
    Denoiser,
    Eps,
    EulerSampler,
    GaussianDenoiser,
    LinearPath,
    LinearSchedule,
    ProgressiveDistillation,
    V,
    Velocity,
    make_path,
    rescale_zero_terminal,
    sample,
    uniform_t,
)
from tests.diffusion.exact_map import MEAN, VARIANCE, lead

PATH = LinearPath()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def estimate(x_t, log_snr, cond=None):
    """(x_t - f(x_t, t))/t, with which a denoiser of `Velocity` has the exact consistency function as its x0."""
    t = PATH.time_of(log_snr)
    return (x_t - lead(x_t, t, torch.zeros_like(t))) / torch.where(t > 0, t, 1)[:, None]


def mean(x_t, log_snr, cond=None):
    """The velocity, with which x0 is the mean given x_t."""
    exact = GaussianDenoiser(PATH, MEAN, VARIANCE, parameterisation=Velocity())
    return exact(x_t / PATH.scale(PATH.time_of(log_snr))[:, None], PATH.time_of(log_snr)).output


class Exact(Consistency):
    """The second point is where the exact flow leads."""

    def previous_point(self, x, log_snr_t, log_snr_s, cond, mask):
        t, s = PATH.time_of(log_snr_t), PATH.time_of(log_snr_s)
        return lead(x * PATH.scale(t)[:, None], t, s) / PATH.scale(s)[:, None]


def misses(objective, network=estimate, progress=1.0):
    """The largest mean squared distance of both estimates."""
    x0 = MEAN + VARIANCE.sqrt() * torch.randn(256, 3, generator=seeded(), dtype=torch.float64)
    objective.progress = progress
    out = objective(Denoiser(network, PATH, Velocity()), x0, None, seeded(1))
    assert out.per_example.isfinite().all() and bool((out.per_example >= 0).all())
    return float(out.parts["mse"].max())


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_the_exact_consistency_function_meets_its_target(progress):
    assert misses(Exact(teacher=True), progress=progress) < 1e-20
    assert misses(Exact(teacher=True), mean, progress) > 1e-3 or progress == 1.0  # near points differ little


def test_a_step_of_the_teacher_is_of_second_order():
    """Heun's step by the exact denoiser against the exact flow: half the step, an eighth of the error."""
    teacher = GaussianDenoiser(make_path("cosine", 10), MEAN, VARIANCE)
    t = torch.full((64,), 0.6, dtype=torch.float64)
    x = (1 - t)[:, None] * MEAN + torch.randn(64, 3, generator=seeded(), dtype=torch.float64) / PATH.scale(t)[:, None]
    errors = []
    for step in (0.1, 0.05):
        ends = PATH.log_snr(t), PATH.log_snr(t - step)
        found, exact = (one.previous_point(x, *ends, None, None) for one in (Consistency(teacher=teacher), Exact()))
        errors.append(found - exact)
    first, second = (float(error.abs().max()) for error in errors)
    assert second < 5e-3 and 6 < first / second < 11


def test_a_pair_of_data_and_noise_is_right_in_the_mean():
    """E[f(x_s, s) | x_t] = f(x_t, t) + O((t - s)^2): an eighth of the way to s, about a sixty-fourth of the error."""
    t = torch.full((8,), 0.6, dtype=torch.float64)
    x_t = torch.linspace(-2, 2, 8, dtype=torch.float64)[:, None] + torch.zeros(3, dtype=torch.float64)
    errors = []
    for step in (0.08, 0.01):
        s, x0 = t - step, lead(x_t, t, torch.zeros(8, dtype=torch.float64))
        exact = GaussianDenoiser(PATH, MEAN, VARIANCE)(x_t / PATH.scale(t)[:, None], t)
        mean_s = (1 - s)[:, None] * exact.x0 + s[:, None] * exact.eps  # f(., s) is affine: the mean goes through it
        errors.append(float((lead(mean_s, s, torch.zeros(8, dtype=torch.float64)) - x0).abs().max()))
    assert 40 < errors[0] / errors[1] < 90


@pytest.mark.parametrize("kind", [V, Velocity, EDM])
def test_at_the_clean_end_nothing_is_left_to_do(kind):
    x = torch.randn(4, 3, generator=seeded(), dtype=torch.float64)
    clean = Denoiser(lambda x, log_snr, cond: 5 + x, PATH, kind()).at_log_snr(x, torch.full((4,), math.inf))
    torch.testing.assert_close(clean.x0, x)


def test_the_second_point_comes_nearer_by_stages():
    objective, r = Consistency(stages=8), torch.tensor([0.01, 1.0, 50.0], dtype=torch.float64)
    ratios = []
    for objective.progress in (0.0, 0.3, 0.6, 1.0):
        ratios.append(objective.earlier(r) / r)
    assert bool((ratios[0] == 0).all()) and all(bool((b >= a).all()) for a, b in zip(ratios, ratios[1:], strict=False))
    n = 1 + 8 / (1 + r.exp())
    torch.testing.assert_close(ratios[3], 1 - n / 2**7)


@pytest.mark.parametrize("name, factor", [("ict", 1 / (2 - 0.5)), ("ect", 1 / 4 + 4), ("none", 1.0)])
def test_the_weighted_distance(name, factor):
    """A network that answers x_0 = 2 x at t and finds 1 at s."""

    class Fixed(Consistency):
        def earlier(self, r):
            return torch.full_like(r, 0.5)

    objective, one = Fixed(weighting=name, huber=0.1), torch.ones(1, dtype=torch.float64)
    t, x0 = PATH.time_of(-2 * torch.tensor([2.0]).double().log()), torch.zeros(1, 3, dtype=torch.float64)
    net = Denoiser(lambda x, log_snr, cond: torch.where(log_snr[:, None] < 0, 2 * x, 1), PATH, X0())
    out = objective.at_times(net, x0, None, seeded(), t, one, None)
    noise = torch.randn(1, 3, generator=seeded(), dtype=torch.float64)
    x_t = noise * 2 / 5**0.5  # of unit r
    c = 0.1 * 3**0.5
    expected = factor * (((2 * x_t - 1).square().sum() + c * c).sqrt() - c)
    torch.testing.assert_close(out.value, expected)


def test_padding_does_not_change_the_distance():
    objective, still = Consistency(huber=0.5), Denoiser(lambda x, log_snr, cond, mask=None: 0 * x, PATH, Velocity())
    found = []
    for frames in (8, 64):
        x0 = torch.zeros(1, 4, frames, dtype=torch.float64)
        x0[..., :8] = torch.linspace(-1, 1, 8)
        noise = FrameKeyedGenerator(0, torch.tensor([3]), "noise")
        one, valid = torch.ones(1, dtype=torch.float64), (torch.arange(frames) < 8)[None, None]
        found.append(objective.at_times(still, x0, None, noise, one / 2, one, valid).value)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("weighting", ["ict", "ect", "none"])
def test_a_schedule_that_ends_without_signal(weighting):
    """At its last step x_t is noise alone, and r infinite."""
    schedule = rescale_zero_terminal(LinearSchedule(25))
    objective = Consistency(stages=4, weighting=weighting)
    network = Denoiser(lambda x, log_snr, cond: 0.5 * x, schedule, V())
    u = torch.arange(1, 26, dtype=torch.float64) / 25
    for objective.progress in (0.0, 0.5, 1.0):
        out = objective.at_times(network, torch.zeros(25, 3), None, seeded(), u, torch.ones(25).double(), None)
        assert out.per_example.isfinite().all()


def test_a_teacher_without_noise_at_the_clean_end():
    """At first s = 0, where `eps` of a teacher that predicts x_0 does not exist."""
    teacher = Denoiser(lambda x, log_snr, cond: 0.5 * x, make_path("vp_cosine", 10), X0())
    assert misses(Consistency(teacher=teacher), progress=0.0) > 0
    assert misses(Consistency(teacher=Denoiser(estimate, make_path("vp_cosine", 10), Eps())), progress=0.5) > 0


def test_the_sampler_lands_on_the_data_and_draws_fresh_noise():
    """With the exact function every number of steps draws from the data: mean and variance in standard errors."""
    exact, n = Denoiser(estimate, PATH, Velocity()), 4000
    for steps in (1, 2, 4):
        out = sample(exact, (n, 3), uniform_t(PATH, steps), ConsistencySampler(), seeded(), dtype=torch.float64)
        assert out.evaluations == steps
        assert bool(((out.x.mean(0) - MEAN).abs() < 5 * (VARIANCE / n).sqrt()).all())
        assert bool(((out.x.var(0) / VARIANCE - 1).abs() < 5 * (2 / n) ** 0.5).all())


def test_what_it_refuses():
    with pytest.raises(ValueError, match="weighting must be one of ict"):
        Consistency(weighting="snr")
    for wrong in ({"stages": 0}, {"huber": math.inf}):
        with pytest.raises(ValueError, match="at least one stage"):
            Consistency(**wrong)


PATHS = {name: make_path(name, 16) for name in ("linear", "cosine", "vp_cosine")}


def noisy(n=6):
    return torch.randn(n, 3, generator=seeded(), dtype=torch.float64)


class HalfTheWay(ProgressiveDistillation):
    """The teacher takes one of its two steps."""

    def target(self, path, x_t, t, cond, mask):
        return ProgressiveDistillation(self.teacher, steps=2 * self.steps, teacher_steps=1).target(
            path, x_t, t, cond, mask)  # fmt: skip


def ends_apart(objective, path, teacher_steps):
    """How far the student's DDIM step, if it met its target, ends from the teacher's steps by our Euler sampler."""
    n, x = objective.steps, noisy()
    worst = 0.0
    for i in range(1, n + 1):
        t = torch.full((6,), i / n, dtype=torch.float64)
        x0, eps = objective.target(path, x, t, None, None)
        alpha, sigma = (v / path.scale(t) for v in path.alpha_sigma(t))
        assert (alpha[:, None] * x0 + sigma[:, None] * eps - x).abs().max() < 1e-10
        times = torch.linspace(i / n, (i - 1) / n, teacher_steps + 1, dtype=torch.float64)
        y = x
        for now, then in zip(times[:-1], times[1:], strict=True):
            y, _ = EulerSampler()(objective.teacher, y, now, then, None, None)
        if i == 1:
            end = x0
        else:
            alpha, sigma = (v / path.scale(t - 1 / n) for v in path.alpha_sigma(t - 1 / n))
            end = alpha[:, None] * x0 + sigma[:, None] * eps
        worst = max(worst, float((end - y).abs().max()))
    return worst


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("teacher_steps", [2, 3])
def test_the_students_step_ends_where_the_teachers_do(name, teacher_steps):
    path = PATHS[name]
    teacher = GaussianDenoiser(path, MEAN, VARIANCE)
    objective = ProgressiveDistillation(teacher, steps=4, teacher_steps=teacher_steps)
    assert ends_apart(objective, path, teacher_steps) < 1e-8
    if teacher_steps == 2:
        assert ends_apart(HalfTheWay(teacher, steps=4), path, 2) > 1e-2


def test_many_steps_of_an_exact_teacher_are_the_flow():
    """Of one step to the clean end the target is the exact flow map's, up to the first order's error."""
    path, x = LinearPath(), noisy()
    one = torch.ones(6, dtype=torch.float64)
    errors = []
    for steps in (50, 100):
        objective = ProgressiveDistillation(GaussianDenoiser(path, MEAN, VARIANCE), steps=1, teacher_steps=steps)
        errors.append(float((objective.target(path, x, one, None, None)[0] - lead(x, one, 0 * one)).abs().max()))
    assert errors[1] < 0.05 and 1.8 < errors[0] / errors[1] < 2.2


@pytest.mark.parametrize("path, kind", [(PATHS["linear"], Velocity), (PATHS["cosine"], V)])
def test_a_student_that_meets_the_target_has_no_loss(path, kind):
    """The student is the teacher of the same number of steps; with a teacher of one step they agree."""
    teacher = GaussianDenoiser(path, MEAN, VARIANCE, parameterisation=kind())
    x0 = MEAN + VARIANCE.sqrt() * noisy(64)
    same = ProgressiveDistillation(teacher, steps=4, teacher_steps=1)(teacher, x0, None, seeded())
    halved = ProgressiveDistillation(teacher, steps=4)(teacher, x0, None, seeded())
    assert float(same.value) < 1e-20 < 1e-5 < float(halved.value)
    assert same.times.unique().tolist() == [0.25, 0.5, 0.75, 1.0]
    zero = Denoiser(lambda x, log_snr, cond: 0 * x, path, kind())
    assert float(ProgressiveDistillation(teacher, steps=4)(zero, x0, None, seeded()).value) > 0.1


def test_what_it_refuses_of_distillation():
    with pytest.raises(ValueError, match="at least 1"):
        ProgressiveDistillation(None, steps=0)
    for weighting in WEIGHTINGS:
        objective = ProgressiveDistillation(None, steps=1, weighting=weighting)
        objective.check(GaussianDenoiser(CosineSchedule(log_snr_min=-8.0), MEAN, VARIANCE))
        student = Denoiser(lambda x, log_snr, cond: x, LinearPath(), Velocity())
        if weighting == "none":
            objective.check(student)
        else:
            with pytest.raises(ValueError, match="nearly 0 at the noisy end"):
                objective.check(student)
    path = make_path("vp_cosine", 1000)  # ends at a log-SNR of -15, where weights are small but not 0
    for weighting, fine in {"none": True, "min_snr": False, "p2": False, "edm": False, "sigmoid": False}.items():
        objective = ProgressiveDistillation(None, steps=4, weighting=weighting)
        with contextlib.nullcontext() if fine else pytest.raises(ValueError, match="nearly 0 at the noisy end"):
            objective.check(Denoiser(lambda x, log_snr, cond: x, path, V()))
