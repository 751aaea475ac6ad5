"""Progressive distillation: a student whose every step does what several steps of its teacher do."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.core.errors import InputError
from genmodels.core.random import Generator
from genmodels.diffusion.denoiser import AtAnyTime
from genmodels.diffusion.objectives import ObjectiveOutput, Simple, predict, step_above
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.process import alpha_sigma, expand, q_sample
from genmodels.diffusion.weighting import TimeSampler, TimeSamplerName, WeightingName


def ask(teacher: AtAnyTime, x: Tensor, log_snr: Tensor, cond: Tensor | None, mask: Tensor | None) -> Prediction:
    """What a teacher predicts, at the noisiest level that it knows where a student's path has more noise."""
    return teacher.at_log_snr(x, log_snr.clamp(min=teacher.schedule.end_points[1]), cond, mask)


class ProgressiveDistillation(Simple):
    """The squared error of a student whose step of 1/N is to end where two (or more) DDIM steps of the teacher end.

        x = (x_s - (sigma_s/sigma_t) x_t) / (alpha_s - (sigma_s/sigma_t) alpha_t),   t = i/N,   s = (i - 1)/N

    is the estimate of x_0 with which one DDIM step from x_t ends at x_s; the target is the student's own output for it.

    Arguments:
        teacher: a denoiser on any path.
        steps: N, the steps of the student.
        teacher_steps: those of the teacher within one step of the student.
        weighting, time_sampler: see `Simple`.

    Errors: no step at all.
    Source: Salimans and Ho, "Progressive distillation for fast sampling of diffusion models", 2022, algorithm 2.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 0.5)
        >>> objective = ProgressiveDistillation(exact, steps=4)
        >>> objective(exact, torch.zeros(2, 3), None, torch.Generator().manual_seed(0)).times.tolist()
        [1.0, 0.5]
    """

    def __init__(
        self, teacher: AtAnyTime | None, *, steps: int, teacher_steps: int = 2, weighting: WeightingName = "none",
        time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        super().__init__(weighting=weighting, time_sampler=time_sampler)
        if steps < 1 or teacher_steps < 1:
            raise InputError(f"steps = {steps} and teacher_steps = {teacher_steps} must be at least 1")
        self.teacher, self.steps, self.teacher_steps = teacher, steps, teacher_steps

    def at_times(
        self, denoiser, x0: Tensor, cond: Tensor | None, generator: Generator, u: Tensor, weight: Tensor,
        mask: Tensor | None,
    ) -> ObjectiveOutput:
        t = step_above(u, self.steps) / self.steps
        log_snr = denoiser.schedule.log_snr(t)
        x_t = q_sample(x0, log_snr, self.noise(x0, cond, generator))
        with torch.no_grad():
            x, eps = self.target(denoiser.schedule, x_t, t, cond, mask)
        torch.clear_autocast_cache()  # the weights it cast without a gradient are not for the call below
        prediction = predict(denoiser, x_t, log_snr, cond, mask, generator)
        mse, weighed = self.errors(denoiser, prediction, x, eps, t, log_snr, mask)
        per_example = weight.to(mse.dtype) * weighed
        return ObjectiveOutput(per_example.mean(), per_example, t, {"mse": mse}, u, weighed.detach())

    def target(self, path, x_t: Tensor, t: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x_0, eps) with x_t = alpha x_0 + sigma eps whose DDIM step of 1/N ends where those of the teacher do."""
        x, total = x_t, self.steps * self.teacher_steps
        for k in range(self.teacher_steps):
            found = ask(self.teacher, x, path.log_snr(t - k / total), cond, mask)
            # In integers, so that the last time is exactly 0: there the data are meant, whatever noise the path leaves.
            left = (t * total).round() - (k + 1)
            log_snr_s = torch.where(left == 0, torch.inf, path.log_snr(left / total))
            alpha_s, sigma_s = (expand(value, x) for value in alpha_sigma(log_snr_s))
            x = alpha_s * found.x0 + sigma_s * found.eps
        alpha_t, sigma_t = (expand(value, x) for value in alpha_sigma(path.log_snr(t)))
        shrink = sigma_s / sigma_t
        x0 = (x - shrink * x_t) / (alpha_s - shrink * alpha_t)
        return x0, (x_t - alpha_t * x0) / sigma_t
