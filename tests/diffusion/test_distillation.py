"""Progressive distillation: where the student's step ends, against the teacher's steps and against the exact flow."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import (
    Denoiser,
    EulerSampler,
    GaussianDenoiser,
    LinearPath,
    ProgressiveDistillation,
    V,
    Velocity,
    make_path,
)
from tests.diffusion.exact_map import MEAN, VARIANCE, lead

PATHS = {name: make_path(name, 16) for name in ("linear", "cosine", "vp_cosine")}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


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


def test_what_it_refuses():
    with pytest.raises(ValueError, match="at least 1"):
        ProgressiveDistillation(None, steps=0)
