"""Models of few steps: consistency models, progressive distillation, shortcut models and mean flows."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.core.errors import InputError, at_least, one_of
from genmodels.core.random import Generator, normal, uniform
from genmodels.core.tensors import event_mean, event_size, event_sum
from genmodels.diffusion.denoiser import AtAnyTime, FlowMap
from genmodels.diffusion.flow_matching import FlowMatching
from genmodels.diffusion.objectives import ObjectiveOutput, Simple, predict, step_above, times_of
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.path import NOISIEST, alpha_sigma, expand, q_sample
from genmodels.diffusion.sampling import Defaults, Memory, log_snrs
from genmodels.diffusion.sampling import predict as predict_at
from genmodels.diffusion.weighting import TimeSampler, TimeSamplerName, WeightingName

#: Factors of the distance as functions of the noise levels sigma/alpha at t and s.
CONSISTENCY_WEIGHTINGS = {
    "ict": lambda t, s: 1 / (t - s),
    "ect": lambda t, s: 1 / t.square() + 4,
    "none": lambda t, s: torch.ones_like(t),
}
ConsistencyWeighting = Literal["ict", "ect", "none"]


class Consistency(Simple):
    """f(x_t, t) learns f(x_s, s) of an earlier point of the same trajectory, without a gradient; f(x, 0) = x.

        w d(f(x_t, t), f(x_s, s)),   d(a, b) = sqrt(|a - b|^2 + c^2) - c,   f the estimate of x_0
        r_s = r_t max(0, 1 - n(r_t)/2^a),   n(r) = 1 + 8/(1 + e^r),   a = 0, 1, .. stages - 1,   r = sigma/alpha

    Without a teacher both points have the same x_0 and noise; with one, x_s is a Heun step of its probability-flow ODE
    from x_t. At first (a = 0) s = 0 and f learns to denoise; then s approaches t. With the parameterisations `v`, `edm`
    and `velocity` f(x, 0) = x for any network.

    Arguments:
        teacher: a denoiser on any path, or None.
        weighting: w, `ict` 1/(r_t - r_s), `ect` 1/r_t^2 + 1/0.5^2, or `none`.
        huber: c over the square root of the number of scalars.
        stages: number of values of a, in equal parts of the training.
        time_sampler: see `Objective`.

    `progress` in [0, 1] is the completed share of the training, set by the trainer.
    Errors: an unknown weighting, fewer than one stage, a c that is not positive.
    Source: Song et al., "Consistency models", 2023, algorithms 2 and 3; d, c and `ict`: Song and Dhariwal, "Improved
    techniques for training consistency models", 2024, table 1; s and `ect`: Geng et al., "Consistency models made
    easy", 2025, section 3.

    Example:
        >>> objective = Consistency(stages=3)
        >>> for objective.progress in (0.0, 0.5, 1.0):
        ...     print([round(r, 3) for r in objective.earlier(torch.tensor([0.5, 5.0])).tolist()])
        [0.0, 0.0]
        [0.0, 2.366]
        [0.0, 3.683]
    """

    def __init__(
        self, *, teacher: AtAnyTime | None = None, weighting: ConsistencyWeighting = "ict", huber: float = 0.00054,
        stages: int = 8, time_sampler: TimeSamplerName | TimeSampler = "antithetic",
    ):
        super().__init__(time_sampler=time_sampler)
        one_of("weighting", weighting, CONSISTENCY_WEIGHTINGS)
        if stages < 1 or not 0 < huber < math.inf:
            raise InputError(f"stages = {stages} and huber = {huber}: give at least one stage, and a finite huber > 0")
        self.teacher, self.factor = teacher, CONSISTENCY_WEIGHTINGS[weighting]
        self.huber, self.stages, self.progress = huber, stages, 1.0

    def earlier(self, r: Tensor) -> Tensor:
        """r_s of r_t (B,), in the stage of `progress`."""
        stage = min(int(self.progress * self.stages), self.stages - 1)
        return r * (1 - (1 + 8 * torch.sigmoid(-r)) / 2**stage).clamp(min=0)

    def at_times(self, denoiser, x0, cond, generator, u, weight, mask) -> ObjectiveOutput:
        t = times_of(denoiser.schedule, u)
        noise, log_snr_t = self.noise(x0, cond, generator), denoiser.schedule.log_snr(t).clamp(min=NOISIEST)
        r_t = torch.exp(-log_snr_t / 2)
        r_s = self.earlier(r_t)
        log_snr_s, x_t = -2 * torch.log(r_s), q_sample(x0, log_snr_t, noise)
        with torch.no_grad():
            if self.teacher is None:
                x_s = q_sample(x0, log_snr_s, noise)
            else:
                x_s = self.previous_point(x_t, log_snr_t, log_snr_s, cond, mask)
            goal = denoiser.at_log_snr(x_s, log_snr_s, cond, mask).x0
        torch.clear_autocast_cache()  # the next call must not reuse weights cast without a gradient
        found = predict(denoiser, x_t, log_snr_t, cond, mask, generator).x0
        squared, size = event_sum((found - goal).double().square(), mask), event_size(x0, mask)
        c = self.huber * size.sqrt()
        loss = self.factor(r_t.clamp(min=1e-6), r_s) * ((squared + c * c).sqrt() - c)
        per_example, mse = (weight * loss).to(x0.dtype), squared / size.clamp(min=1)
        return ObjectiveOutput(per_example.mean(), per_example, t, {"mse": mse}, u, loss.detach())

    def previous_point(
        self, x: Tensor, log_snr_t: Tensor, log_snr_s: Tensor, cond: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """x_s by a Heun step of the teacher from x_t (B, *event), by an Euler step for s = 0."""
        before = teacher_prediction(self.teacher, x, log_snr_t, cond, mask)
        noisy = log_snr_s.clamp(max=30)  # where s = 0 the noise need not exist
        alpha_s, sigma_s = (expand(value, x) for value in alpha_sigma(noisy))
        ahead = alpha_s * before.x0 + sigma_s * before.eps
        after = teacher_prediction(self.teacher, ahead, noisy, cond, mask)
        # y = x / alpha moves by (r_s - r_t) eps
        half = expand((torch.exp(-noisy / 2) - torch.exp(-log_snr_t / 2)) / 2, x) * alpha_s
        clean = expand(torch.isposinf(log_snr_s).double(), x) > 0
        return torch.where(clean, before.x0, ahead + half * (after.eps - before.eps))


class ConsistencySampler:
    """x_s = alpha_s f(x_t, t) + sigma_s z with fresh noise z, x_0 = f(x_t, t) at the end.

    For consistency models; with other denoisers, whose estimate is a mean, samples are blurred. Source: Song et al.
    2023, algorithm 1.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser, sample, uniform_t
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 0.0)
        >>> times, generator = uniform_t(exact.schedule, 2), torch.Generator().manual_seed(0)
        >>> sample(exact, (1, 2), times, ConsistencySampler(), generator).evaluations
        2
    """

    defaults = Defaults(2, "uniform_t")

    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        log_snr_s, log_snr_t = log_snrs(denoiser.schedule, t, s)
        x0 = predict_at(denoiser, x, t, cond, memory).x0
        if bool(s == 0):
            return x0, Memory(x0, log_snr_t)
        noise = temperature * normal(x.shape, generator, dtype=x.dtype, device=x.device)
        return q_sample(x0, log_snr_s, noise), Memory(x0, log_snr_t)


def teacher_prediction(
    teacher: AtAnyTime, x: Tensor, log_snr: Tensor, cond: Tensor | None, mask: Tensor | None
) -> Prediction:
    """The prediction of a teacher, at its noisiest level where the student's path has more noise."""
    return teacher.at_log_snr(x, log_snr.clamp(min=teacher.schedule.end_points[1]), cond, mask)


_LEAST_WEIGHT = 1e-3  # of the first step of a sample, over the largest


class ProgressiveDistillation(Simple):
    """The squared error of a student whose step of 1/N should equal two (or more) DDIM steps of the teacher.

        x = (x_s - (sigma_s/sigma_t) x_t) / (alpha_s - (sigma_s/sigma_t) alpha_t),   t = i/N,   s = (i - 1)/N

    is the estimate of x_0 with which one DDIM step from x_t ends at x_s; the target is the student's own output for it.

    Arguments:
        teacher: a denoiser on any path.
        steps: N, the number of steps of the student.
        teacher_steps: steps of the teacher within one step of the student.
        weighting, time_sampler: see `Simple`.

    Errors: fewer than one step; `check` refuses a weighting that is nearly 0 at the end of the path.
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
        at_least(1, steps=steps, teacher_steps=teacher_steps)
        self.teacher, self.steps, self.teacher_steps = teacher, steps, teacher_steps

    def check(self, denoiser) -> None:
        """Raise where the first step of a sample would hardly be trained."""
        super().check(denoiser)
        t = torch.arange(1, self.steps + 1, dtype=torch.float64) / self.steps
        log_snr, rate = denoiser.schedule.log_snr(t), denoiser.schedule.log_snr_rate(t)
        weights = self.weighting(denoiser.parameterisation, log_snr, rate)
        if float(weights[-1]) <= _LEAST_WEIGHT * float(weights.max()):
            raise InputError("weighting: the chosen one is nearly 0 at the noisy end of the path, where every sample "
                             "begins: choose none")

    def at_times(self, denoiser, x0, cond, generator, u, weight, mask) -> ObjectiveOutput:
        t = step_above(u, self.steps) / self.steps
        log_snr = denoiser.schedule.log_snr(t)
        x_t = q_sample(x0, log_snr, self.noise(x0, cond, generator))
        with torch.no_grad():
            x, eps = self.target(denoiser.schedule, x_t, t, cond, mask)
        torch.clear_autocast_cache()  # the next call must not reuse weights cast without a gradient
        prediction = predict(denoiser, x_t, log_snr, cond, mask, generator)
        mse, weighted = self.errors(denoiser, prediction, x, eps, t, log_snr, mask)
        per_example = weight.to(mse.dtype) * weighted
        return ObjectiveOutput(per_example.mean(), per_example, t, {"mse": mse}, u, weighted.detach())

    def target(self, path, x_t: Tensor, t: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x_0, eps) with x_t = alpha x_0 + sigma eps whose DDIM step of 1/N ends where the teacher's steps end."""
        x, total = x_t, self.steps * self.teacher_steps
        for k in range(self.teacher_steps):
            found = teacher_prediction(self.teacher, x, path.log_snr(t - k / total), cond, mask)
            # In integers, so that the last time is exactly 0, which is clean data even if the path has noise there.
            left = (t * total).round() - (k + 1)
            log_snr_s = torch.where(left == 0, torch.inf, path.log_snr(left / total))
            alpha_s, sigma_s = (expand(value, x) for value in alpha_sigma(log_snr_s))
            x = alpha_s * found.x0 + sigma_s * found.eps
        alpha_t, sigma_t = (expand(value, x) for value in alpha_sigma(path.log_snr(t)))
        shrink = sigma_s / sigma_t
        x0 = (x - shrink * x_t) / (alpha_s - shrink * alpha_t)
        return x0, (x_t - alpha_t * x0) / sigma_t


class FlowMapMatching(FlowMatching):
    """E |u(x_t, t, s) - target|^2 per scalar: on most rows s = t and the target is the path's velocity eps - x_0.

    On a share of the rows s < t, and a subclass computes the target from the network, without a gradient or dropout.

    Arguments:
        coupling, time_sampler: see `FlowMatching`.
        share: probability that a row has s < t.

    Errors: a share outside (0, 1); a denoiser that is no `FlowMap`.
    """

    def __init__(
        self, coupling: Callable[..., Tensor] | None = None, *, share: float,
        time_sampler: TimeSamplerName = "antithetic",
    ):
        super().__init__(coupling, time_sampler=time_sampler)
        if not 0 < share < 1:
            raise InputError(f"share = {share} of the rows that learn steps: choose a number between 0 and 1")
        self.share = share

    def ends(self, u: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """(t, s) (B,) float64, s <= t, of the draws u of the time sampler."""
        raise NotImplementedError

    def target(
        self, denoiser: FlowMap, x_t: Tensor, t: Tensor, s: Tensor, velocity: Tensor, cond: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """The target of u(x_t, t, s), like x_t, on rows with s < t."""
        raise NotImplementedError

    def weigh(self, mse: Tensor) -> Tensor:
        """(B,) the loss of rows with these mean squared errors."""
        return mse

    def check(self, denoiser) -> None:
        """Raise where this objective cannot train the denoiser."""
        super().check(denoiser)
        if not isinstance(denoiser, FlowMap):
            raise InputError("steps are learned by a network of two times: take a FlowMap as the denoiser")

    def at_times(self, denoiser, x0, cond, generator, u, weight, mask) -> ObjectiveOutput:
        noise = self.noise(x0, cond, generator)
        t, s = self.ends(u, generator)
        x_t, velocity = x0 + expand(t, x0) * (noise - x0), noise - x0
        steps = s < t
        rows = steps.nonzero()[:, 0] if bool(steps.any()) else t.new_zeros(1, dtype=torch.long)
        given = (None if part is None else part[rows] for part in (cond, mask))
        training = [part for part in denoiser.modules() if part.training]
        denoiser.eval()  # masks of dropout belong to the rows of whole batches
        try:
            with torch.no_grad():  # at least one row: sharded weights are gathered from every process
                found = self.target(denoiser, x_t[rows], t[rows], s[rows], velocity[rows], *given)
        finally:
            for part in training:
                part.training = True
        torch.clear_autocast_cache()  # the next call must not reuse weights cast without a gradient
        found = torch.where(expand(steps[rows], found).bool(), found, velocity[rows])
        target = velocity.index_copy(0, rows, found.to(velocity))
        mse = event_mean((target - denoiser.mean_velocity(x_t, t, s, cond, mask)).square(), mask)
        per_example = weight.to(mse.dtype) * self.weigh(mse)
        return ObjectiveOutput(per_example.mean(), per_example, t, {"mse": mse}, u, per_example.detach())


class Shortcut(FlowMapMatching):
    """A step of length 2d does what two steps of length d do, for d = 1/2, 1/4, .. 1/M.

        target of u(x_t, t, t - 2d) = (u_1 + u_2)/2,   u_1 = u(x_t, t, t - d),   u_2 = u(x_t - d u_1, t - d, t - 2d)

    t is drawn from the multiples of 2d, at which samplers arrive. Steps of 1/M are the velocity itself, s = t.

    Arguments:
        coupling, time_sampler: see `FlowMatching`.
        share: probability that a row learns a step rather than the velocity.
        finest: M, a power of two.

    Errors: an M that is no power of two from 2 on.
    Source: Frans et al., "One step diffusion via shortcut models", 2025, equation 5 and algorithm 1, where the weights
    that make the target are averaged ones.

    Example:
        >>> objective = Shortcut(finest=4)
        >>> t, s = objective.ends(torch.rand(1000).double(), torch.Generator().manual_seed(0))
        >>> (t - s).unique().tolist()
        [0.0, 0.5, 1.0]
    """

    def __init__(
        self, coupling: Callable[..., Tensor] | None = None, *, share: float = 0.25, finest: int = 128,
        time_sampler: TimeSamplerName = "antithetic",
    ):
        super().__init__(coupling, share=share, time_sampler=time_sampler)
        if finest < 2 or finest & (finest - 1):
            raise InputError(f"finest = {finest} steps: choose a power of two, such as 128")
        self.finest = int(finest)

    def ends(self, u: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        chosen, halvings, place = uniform((len(u), 3), generator, dtype=torch.float64, device=u.device).unbind(1)
        length = 0.5 ** (halvings * (self.finest.bit_length() - 1)).floor()  # 2d
        t = length * ((place / length).floor() + 1)
        return torch.where(chosen < self.share, t, u), torch.where(chosen < self.share, t - length, u)

    def target(self, denoiser, x_t, t, s, velocity, cond, mask) -> Tensor:
        d = (t - s) / 2
        step = torch.where(d * self.finest > 1, d, 0)
        first = denoiser.mean_velocity(x_t, t, t - step, cond, mask)
        x = x_t - expand(d, x_t) * first
        return (first + denoiser.mean_velocity(x, t - d, t - d - step, cond, mask)) / 2


class MeanFlow(FlowMapMatching):
    """The identity between a mean velocity and the velocity, from (t - s) u = int_s^t v, differentiated in t.

        target of u(x_t, t, s) = v - (t - s) d/dt u,   d/dt u = (v grad_x + d_t) u(x_t, t, s),   v = eps - x_0

    d/dt u is one product of the Jacobian with (v, 1, 0), in forward mode and without a gradient. Fused attention and
    compiled networks have no forward mode, so the plain formulas run uncompiled.

        loss = mse / (mse + c)^p,   the divisor without a gradient

    Arguments:
        coupling: see `FlowMatching`.
        share: probability that a row has s < t.
        mean, std: of the logits of the times: two in rows with s < t, the later of which is t, and one in others.
        power: p, 0 for the mean squared error itself; above 0 large errors count less.
        c: least divisor, to the power of p.

    Errors: a power outside [0, 1], a c or std that is not positive.
    Source: Geng et al., "Mean flows for one-step generative modeling", 2025, equations 6 to 11 and 22; the logits' mean
    and standard deviation of table 1d.

    Example:
        >>> objective = MeanFlow(share=0.5)
        >>> t, s = objective.ends(torch.tensor([0.2, 0.7]), torch.Generator().manual_seed(0))
        >>> (s < t).tolist()
        [True, False]
    """

    def __init__(
        self, coupling: Callable[..., Tensor] | None = None, *, share: float = 0.25, mean: float = -0.4,
        std: float = 1.0, power: float = 1.0, c: float = 1e-3,
    ):
        super().__init__(coupling, share=share)
        if not 0 <= power <= 1 or not 0 < c < math.inf or not 0 < std < math.inf:
            raise InputError(f"power = {power}, c = {c}, std = {std}: choose power from 0 to 1, finite c and std > 0")
        self.mean, self.std, self.power, self.c = mean, std, power, c

    def ends(self, u: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        logits = self.mean + self.std * normal((len(u), 2), generator, dtype=torch.float64, device=u.device)
        one, other = torch.sigmoid(logits).unbind(1)
        apart = u < self.share  # of antithetic draws the same number in every batch
        t = torch.where(apart, torch.maximum(one, other), one)
        return t, torch.where(apart, torch.minimum(one, other), one)

    def target(self, denoiser, x_t, t, s, velocity, cond, mask) -> Tensor:
        def u(x: Tensor, at: Tensor) -> Tensor:
            return denoiser.mean_velocity(x, at, s, cond, mask)

        # On a CPU group norms under autocast have derivatives of another precision than their values.
        whole = nullcontext() if x_t.is_cuda else torch.autocast(x_t.device.type, enabled=False)
        with whole, sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            _, rate = jvp(u, (x_t, t), (velocity, torch.ones_like(t)))
        return velocity - expand(t - s, x_t) * rate

    def weigh(self, mse: Tensor) -> Tensor:
        return mse / (mse.detach() + self.c) ** self.power
