"""Generation in one to four steps: shortcut models, mean flows, consistency models, progressive distillation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.data import Batch, DataSpec, Latents
from genmodels.core.errors import InputError, an
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.diffusion import Denoiser, Elbo, FlowMap, default_variance
from genmodels.diffusion.few_steps import (
    Consistency,
    ConsistencyWeighting,
    FlowMapMatching,
    MeanFlow,
    ProgressiveDistillation,
    Shortcut,
)
from genmodels.diffusion.flow_matching import Coupling, CouplingName, PathName, make_path, velocity_of
from genmodels.diffusion.weighting import WeightingName
from genmodels.models.base import Loss
from genmodels.models.diffusion import COMPARED, DiffusionModel, load_teacher

TimesName = Literal["uniform", "stratified", "antithetic", "logit_normal", "cosmap", "log_uniform"]


class FlowMapModel(DiffusionModel):
    """A flow map along the straight path, x_s = x_t - (t - s) u(x_t, t, s); a family adds its objective.

    For s = t it is a velocity, so that the ELBO and the likelihood by the ODE are those of flow matching. They belong
    to the samples that many steps of this velocity make, not to those of a few long steps.

    Arguments:
        coupling: how items are paired with noise: `independent`, or by minibatch optimal transport, `ot` or `sinkhorn`.
        spec, **shared: see `DiffusionModel`; the network takes two times.
    """

    validates_by_ode = True
    default_sampler = "flow_map"
    #: The numbers of steps that `sweeps=[steps]` of an evaluation compares.
    swept_steps = (1, 2, 4, 20)

    def __init__(self, spec: DataSpec, *, coupling: CouplingName = "independent", **shared):
        super().__init__(spec, **shared)
        self.coupling = Coupling(coupling, whole=self._global_batch)

    def assemble_map(self, objective: FlowMapMatching) -> None:
        """Build the flow map for an objective; called last in a family's constructor."""
        core = FlowMap(self.network(two_times=True))
        objective.check(core)
        elbo = Elbo(self.decoder, self.num_steps, default_variance("simple", self.spec.levels))
        self.assemble(core, elbo, objective)

    def draw(self, options: SamplingOptions) -> Samples:
        """As for every diffusion model; along another path by the samplers of a velocity."""
        by_map = options.sampler == "flow_map" or options.sampler is None and options.known is None
        if options.along is not None and by_map:
            raise InputError("the steps of a flow map are those of its own path: give along with another sampler, "
                             "such as sampler=dpmpp_2m, or leave it out")
        return super().draw(options)


class ShortcutModel(FlowMapModel):
    """A shortcut model (Frans et al. 2025): flow matching, and steps that equal two steps of half their length.

        u(x_t, t, t) learns eps - x_0,    u(x_t, t, t - 2d) learns the mean of two steps of length d = 1/2, 1/4, ..

    Arguments:
        share: probability that an item learns a step rather than the velocity.
        finest: number M of shortest steps from noise to data, a power of two; a step of 1/M is the velocity itself.
        time_sampler: how training draws its times, see `FlowMatchingModel`.
        spec, **shared: see `FlowMapModel`.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = ShortcutModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=1).made["evaluations"]
        1
    """

    family = "shortcut"

    def __init__(
        self,
        spec: DataSpec,
        *,
        share: float = 0.25,
        finest: int = 128,
        time_sampler: TimesName = "antithetic",
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble_map(Shortcut(self.coupling, share=share, finest=finest, time_sampler=time_sampler))


class MeanFlowModel(FlowMapModel):
    """A mean flow (Geng et al. 2025): one network of the mean velocity between any two times of the flow.

        u(x_t, t, s) learns v - (t - s) d/dt u(x_t, t, s),    v = eps - x_0,    x_0 = x_1 - u(x_1, 1, 0)

    Arguments:
        share: probability that an item learns between two times rather than the velocity at one.
        mean, std: of the logits of the times.
        power: how strongly large errors are weighted down: 0 for the mean squared error, 1 for its logarithm.
        spec, **shared: see `FlowMapModel`.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = MeanFlowModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=1).made["evaluations"]
        1
    """

    family = "mean_flow"

    def __init__(
        self,
        spec: DataSpec,
        *,
        share: float = 0.25,
        mean: float = -0.4,
        std: float = 1.0,
        power: float = 1.0,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble_map(MeanFlow(self.coupling, share=share, mean=mean, std=std, power=power))


class StepModel(DiffusionModel):
    """A denoiser made for few steps, which is not the mean of the data given x_t: no velocity, latents or likelihood.

    A family adds its objective and `usual_steps`. A student starts from its teacher's weights where their shapes fit
    and both have one parameterisation. Validation prints the energy distance of samples by the usual steps,
    2 E|x - y| - E|x - x'| - E|y - y'|, in the network's units.

    Arguments:
        path: `linear`, `cosine`, or a noise schedule of `DDPM` by its name after `vp_`.
        distill: checkpoint of the teacher, a diffusion or flow matching.
        spec, **shared: see `DiffusionModel`.
    """

    has_velocity = False
    has_ode_likelihood = False
    swept_steps: tuple[int, ...] = (1, 2, 4, 20)
    usual_steps = 1

    def __init__(self, spec: DataSpec, *, path: PathName = "linear", distill: str | None = None, **shared):
        super().__init__(spec, **shared)
        self.distill = distill

    def assemble_steps(self, objective: Consistency | ProgressiveDistillation) -> None:
        """Build the denoiser for an objective; called last in a family's constructor."""
        path = make_path(self.hparams["path"], self.num_steps)
        self.assemble(Denoiser(self.network(), path, velocity_of(path)), None, objective)

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """As for every model; a student takes its teacher's scale of the data, and its weights if they fit."""
        self.objective.check(self.core)
        super().initialize(batch)
        if self.distill is None:
            return
        teacher = load_teacher(self, "distill", self.distill)
        self.location.copy_(teacher.location)
        self.scale.copy_(teacher.scale)
        denoiser = teacher.weights()
        state, own = denoiser.net.state_dict(), self.core.net.state_dict()
        same = denoiser.parameterisation.name == self.core.parameterisation.name
        if same and {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in own.items()}:
            for core in self.cores():
                core.net.load_state_dict(state)

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The objective at one time per example."""
        if self.distill is not None and self.objective.teacher is None:
            self.objective.check(self.core)  # here too, as a plain trainer does not initialise
            self.objective.teacher = load_teacher(self, "distill", self.distill).weights()
        return super().loss(batch, generator)

    def draw(self, options: SamplingOptions) -> Samples:
        """As for every diffusion model, by the sampler of the family; the others follow a velocity."""
        if options.sampler not in (None, *self.samplers):
            raise InputError(f"{an(self.family)} has no velocity, which sampler={options.sampler} follows: leave "
                             "sampler out")
        return super().draw(options.with_default(sampler=self.default_sampler))

    def ode_likelihood(self, batch: Batch, **options) -> Likelihood:
        """Raise InputError: there is no velocity to follow."""
        raise InputError(f"{an(self.family)} has no velocity, and no likelihood by the ODE")

    def latents(self, batch: Batch, *args, **options) -> Latents:
        """Raise InputError: there is no velocity to follow."""
        raise InputError(f"{an(self.family)} has no velocity, and no latents that lead to an item")

    def follow(self, noise: Tensor, *args, **options) -> Tensor:
        """Raise InputError: there is no velocity to follow."""
        raise InputError(f"{an(self.family)} has no velocity to follow from noise: use sample")

    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """No likelihood (NaN): the density of samples in few steps cannot be computed.

        Arguments:
            batch: items in the data's own units.
            weights, seed: no effect.
        """
        return self.no_likelihood(batch, f"{an(self.family)} has no velocity, hence no density of its samples", weights)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The first items of the validation split, and as many samples by the usual steps."""
        self.keep_samples(batch.rows(batch.item_index < COMPARED), steps=self.usual_steps)

    def on_validation_epoch_end(self) -> None:
        """Log the figure by which checkpoints are chosen."""
        self.log_energy_distance()


class ConsistencyModel(StepModel):
    """A consistency model (Song et al. 2023): from any point of a trajectory to its end in one step.

        f(x_t, t) learns f(x_s, s), s < t on the same trajectory,    f(x, 0) = x,    x_0 = f(x_1, 1)

    Arguments:
        distill: checkpoint of a diffusion or flow matching whose trajectories are learned; by default they are made of
            pairs of data and noise alone (consistency training).
        weighting: of the distances, `ict`, `ect` or `none`; see `Consistency`.
        huber: c of the pseudo-Huber distance over the square root of the number of scalars.
        stages: equal parts of the training, in each of which s is closer to t.
        time_sampler: how training draws its times, see `FlowMatchingModel`.
        spec, **shared: see `StepModel`.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = ConsistencyModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=1).made["evaluations"]
        1
    """

    family = "consistency"
    default_sampler = "consistency"
    samplers = ("consistency",)

    def __init__(
        self,
        spec: DataSpec,
        *,
        weighting: ConsistencyWeighting = "ict",
        huber: float = 0.00054,
        stages: int = 8,
        time_sampler: TimesName = "antithetic",
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble_steps(Consistency(weighting=weighting, huber=huber, stages=stages, time_sampler=time_sampler))

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The distance of two estimates at one time per example, at the stage of this step."""
        if self._trainer is not None:
            total = self.trainer.max_steps if self.trainer.max_steps > 0 else self.trainer.estimated_stepping_batches
            if 0 < total < math.inf:  # which a loader of unknown length does not tell
                self.objective.progress = self.trainer.global_step / total
        return super().loss(batch, generator)


class ProgressiveModel(StepModel):
    """Progressive distillation (Salimans and Ho 2022): a student whose N steps replace more steps of its teacher.

        f(x_t, t) learns the x_0 whose DDIM step from t to t - 1/N ends where the teacher's steps end

    Repeated with each student as the teacher of the next, it halves the steps until one is left.

    Arguments:
        steps: N, equal in the time of the path.
        teacher_steps: steps of the teacher in one of the student.
        weighting: of the noise levels, see `DDPM`.
        time_sampler: how training draws its times, see `FlowMatchingModel`.
        spec, **shared: see `StepModel`.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = ProgressiveModel(spec, distill="teacher.ckpt", steps=4, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2).made["steps"]
        4
    """

    family = "progressive"
    learns_from = ("progressive",)
    default_sampler = "flow_map"
    samplers = ("flow_map",)
    sampling_options = tuple(key for key in StepModel.sampling_options
                             if key not in ("spacing", "along", "known", "keep", "rounds"))

    def __init__(
        self,
        spec: DataSpec,
        *,
        steps: int = 4,
        teacher_steps: int = 2,
        weighting: WeightingName = "none",
        time_sampler: TimesName = "antithetic",
        **shared,
    ):
        super().__init__(spec, **shared)
        if self.distill is None:
            raise InputError("progressive distillation needs a teacher: model.distill=<checkpoint of a diffusion or "
                             "flow matching>")
        if steps > self.num_steps:
            raise InputError(f"steps={steps}: a sampler of this model takes at most num_steps={self.num_steps}")
        self.usual_steps, self.swept_steps = steps, (steps,)
        self.assemble_steps(ProgressiveDistillation(None, steps=steps, teacher_steps=teacher_steps,
                                                    weighting=weighting, time_sampler=time_sampler))

    def draw(self, options: SamplingOptions) -> Samples:
        """As for every model of few steps, in its own N steps; an edit starts from the nearest of their ends.

        Raises:
            InputError: for other steps, which it has not learned.
        """
        steps = self.usual_steps
        if options.steps not in (None, steps):
            raise InputError(f"steps={options.steps}: this model has learned {steps} equal steps of its path: leave "
                             "steps out, or train one for others with model.steps=")
        nearest = max(1, round(options.strength * steps)) / steps if 0 < options.strength <= 1 else options.strength
        return super().draw(replace(options, steps=steps, strength=nearest))
