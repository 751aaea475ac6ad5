"""Generation in one to four steps: networks that lead along the flow from noise to data in long steps."""

from __future__ import annotations

from typing import Literal

import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.core.tensors import hide
from genmodels.diffusion import Denoiser, Elbo, FlowMap
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
from genmodels.models.diffusion import DiffusionModel, load_teacher, no_likelihood
from genmodels.models.optimizer import Optimizer
from genmodels.nn import DiT, MLPDenoiser, UNet

TimesName = Literal["uniform", "stratified", "antithetic", "logit_normal", "cosmap"]


class FlowMapModel(DiffusionModel):
    """A flow map along the straight path, x_s = x_t - (t - s) u(x_t, t, s); a family writes its options and objective.

    For s = t it contains a velocity, so that the bound and the likelihood by the ODE are those of flow matching. They
    belong to the samples that many steps of this velocity make, not to those of a few long steps.
    """

    validates_by_ode = True
    usual_sampler = "flow_map"
    #: What `sweeps=[steps]` of an evaluation compares.
    swept_steps = (1, 2, 4, 20)

    def assemble_map(
        self, objective: FlowMapMatching, net: UNet | DiT | MLPDenoiser | dict | None,
        optimizer: Optimizer | dict | None, ema_decay: float | list[float],
    ) -> None:
        """Called last in a family's constructor, after `prepare`."""
        core = FlowMap(self.network(net, two_times=True))
        objective.check(core)
        elbo = Elbo(self.decoder, self.num_steps, "beta" if self.spec.levels is None else "beta_tilde")
        self.assemble(core, elbo, objective, optimizer, ema_decay)


class ShortcutModel(FlowMapModel):
    """A shortcut model (Frans et al. 2025): flow matching, and steps that do what two of half their length do.

        u(x_t, t, t) learns eps - x_0,    u(x_t, t, t - 2d) learns the mean of two steps of length d = 1/2, 1/4, ..

    Arguments:
        spec: the data set this model is built for.
        share: probability that an item learns a step rather than the velocity.
        finest: number M of shortest steps from noise to data, a power of two; a step of 1/M is the velocity itself.
        coupling, time_sampler: see `FlowMatchingModel`; any coupling has a velocity, hence a flow map.
        num_steps: T, the number of steps of the bound, and the most of a sampler.
        class_conditional, cond_drop, noise, net, optimizer, ema_decay: see `DDPM`; the network takes two times.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

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
        coupling: CouplingName = "independent",
        time_sampler: TimesName = "antithetic",
        num_steps: int = 1000,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        noise: float = 0.05,
        net: UNet | DiT | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        self.prepare(num_steps=num_steps, cond_drop=cond_drop, class_conditional=class_conditional, noise=noise)
        pairs = Coupling(coupling, whole=self._whole)
        objective = Shortcut(pairs, share=share, finest=finest, time_sampler=time_sampler)
        self.assemble_map(objective, net, optimizer, ema_decay)


class MeanFlowModel(FlowMapModel):
    """A mean flow (Geng et al. 2025): one network of the mean velocity between any two times of the flow.

        u(x_t, t, s) learns v - (t - s) d/dt u(x_t, t, s),    v = eps - x_0,    x_0 = x_1 - u(x_1, 1, 0)

    Arguments:
        spec: the data set this model is built for.
        share: probability that an item learns between two times, and not the velocity at one.
        mean, std: of the logits of the times.
        power: how much large errors count for less, see `MeanFlow`: 0 for the mean squared error, 1 for its logarithm.
        coupling: see `FlowMatchingModel`; any coupling has a velocity, hence a flow map.
        num_steps: T, the number of steps of the bound, and the most of a sampler.
        class_conditional, cond_drop, noise, net, optimizer, ema_decay: see `DDPM`; the network takes two times.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

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
        coupling: CouplingName = "independent",
        num_steps: int = 1000,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        noise: float = 0.05,
        net: UNet | DiT | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        self.prepare(num_steps=num_steps, cond_drop=cond_drop, class_conditional=class_conditional, noise=noise)
        pairs = Coupling(coupling, whole=self._whole)
        objective = MeanFlow(pairs, share=share, mean=mean, std=std, power=power)
        self.assemble_map(objective, net, optimizer, ema_decay)


class StepModel(DiffusionModel):
    """A denoiser that is made for few steps and is no mean of the data given x_t: it has no velocity, no likelihood.

    A family writes its options, `objective` and `usual_steps`; `distill` is its teacher's checkpoint, or None. A
    student begins with its teacher's weights where these fit and mean the same. Validation prints the energy distance
    of samples by the usual steps, 2 E|x - y| - E|x - x'| - E|y - y'|, in the network's units.
    """

    has_velocity = False
    swept_steps = (1, 2, 4, 20)
    usual_steps = 1
    distill: str | None = None

    def assemble_steps(
        self, objective: Consistency | ProgressiveDistillation, path: PathName,
        net: UNet | DiT | MLPDenoiser | dict | None, optimizer: Optimizer | dict | None,
        ema_decay: float | list[float],
    ) -> None:
        """Called last in a family's constructor, after `prepare`."""
        followed = make_path(path, self.num_steps)
        core = Denoiser(self.network(net), followed, velocity_of(followed))
        objective.check(core)
        self.assemble(core, None, objective, optimizer, ema_decay)

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """As for every model; a student takes its teacher's scale of the data, and its weights if they fit."""
        super().initialize(batch)
        if self.distill is None:
            return
        teacher = load_teacher(self, "distill", self.distill)
        self.location.copy_(teacher.location)
        self.scale.copy_(teacher.scale)
        theirs = teacher.weights()
        state, own = theirs.net.state_dict(), self.core.net.state_dict()
        same = theirs.parameterisation.name == self.core.parameterisation.name
        if same and {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in own.items()}:
            for core in (self.core, *(() if self.ema is None else self.ema.averages)):
                core.net.load_state_dict(state)

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The objective at one time per example."""
        if self.distill is not None and self.objective.teacher is None:
            self.objective.teacher = load_teacher(self, "distill", self.distill).weights()
        return super().loss(batch, generator)

    @property
    def ode_likelihood(self):
        """None: there is no velocity to follow."""
        raise AttributeError(f"a {self.family} has no velocity, and no likelihood by the ODE")

    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """None: a map from noise to data in few steps has no density that could be computed.

        Arguments:
            batch: items in the data's own units.
            weights, seed: as for every model; they change nothing.
        """
        return no_likelihood(self, batch, f"a {self.family} has no velocity, hence no density of its samples", weights)

    @torch.no_grad()
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Items of the validation split, and as many samples of their classes from noise keyed by item."""
        x0 = self._entered(batch)
        plan = self.sampler.plan(self.core.schedule, SamplingOptions(steps=self.usual_steps))
        generator = KeyedGenerator(self.seed, batch.item_index, "validate")
        drawn = self.sampler(plan, self.weights(), x0.shape, SamplingOptions(), generator, cond=self._cond(batch),
                             mask=batch.mask, dtype=x0.dtype, device=x0.device).x
        self._pending.append(torch.stack([x0, hide(drawn, batch.mask)]).flatten(2).double().cpu())

    def on_validation_epoch_end(self) -> None:
        """Log the figure that checkpoints are chosen by."""
        self.log_energy_distance()


class ConsistencyModel(StepModel):
    """A consistency model (Song et al. 2023): from any point of a trajectory to its end in one step.

        f(x_t, t) learns f(x_s, s), s < t on the same trajectory,    f(x, 0) = x,    x_0 = f(x_1, 1)

    Arguments:
        spec: the data set this model is built for.
        path: see `FlowMatchingModel`.
        distill: a checkpoint of a diffusion or flow matching whose trajectories are learned; by default they are made
            of pairs of data and noise alone (consistency training).
        weighting: of the distances, `ict`, `ect` or `none`; see `Consistency`.
        huber: c of the pseudo-Huber distance over the square root of the number of scalars.
        stages: how often s comes nearer to t, in equal parts of the training.
        time_sampler: how training draws its times, see `FlowMatchingModel`.
        num_steps: T, the most steps of a sampler.
        class_conditional, cond_drop, noise, net, optimizer, ema_decay: see `DDPM`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = ConsistencyModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=1).made["evaluations"]
        1
    """

    family = "consistency"
    usual_sampler = "consistency"

    def __init__(
        self,
        spec: DataSpec,
        *,
        path: PathName = "linear",
        distill: str | None = None,
        weighting: ConsistencyWeighting = "ict",
        huber: float = 0.00054,
        stages: int = 8,
        time_sampler: TimesName = "antithetic",
        num_steps: int = 1000,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        noise: float = 0.05,
        net: UNet | DiT | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        self.prepare(num_steps=num_steps, cond_drop=cond_drop, class_conditional=class_conditional, noise=noise)
        self.distill = distill
        objective = Consistency(weighting=weighting, huber=huber, stages=stages, time_sampler=time_sampler)
        self.assemble_steps(objective, path, net, optimizer, ema_decay)

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The distance of two estimates at one time per example, at the stage of this step."""
        if self._trainer is not None and self.trainer.max_steps > 0:
            self.objective.progress = self.trainer.global_step / self.trainer.max_steps
        return super().loss(batch, generator)


class ProgressiveModel(StepModel):
    """A student whose N steps do what those of a diffusion or flow-matching checkpoint do (Salimans and Ho 2022).

        f(x_t, t) learns the x_0 whose DDIM step from t to t - 1/N ends where the teacher's steps end

    A chain of runs, each the teacher of the next, halves the steps until one is left.

    Arguments:
        spec: the data set this model is built for.
        distill: the teacher's checkpoint.
        steps: N.
        teacher_steps: of the teacher in one step of the student.
        path: see `FlowMatchingModel`; the student's steps are equal in its time.
        weighting: of the noise levels, see `DDPM`.
        time_sampler: how training draws its times, see `FlowMatchingModel`.
        num_steps: T, the most steps of a sampler.
        class_conditional, cond_drop, noise, net, optimizer, ema_decay: see `DDPM`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = ProgressiveModel(spec, distill="teacher.ckpt", steps=4, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2).made["steps"]
        4
    """

    family = "progressive"
    learns_from = ("progressive",)
    usual_sampler = "flow_map"

    def __init__(
        self,
        spec: DataSpec,
        *,
        distill: str | None = None,
        steps: int = 4,
        teacher_steps: int = 2,
        path: PathName = "linear",
        weighting: WeightingName = "none",
        time_sampler: TimesName = "antithetic",
        num_steps: int = 1000,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        noise: float = 0.05,
        net: UNet | DiT | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        if distill is None:
            raise InputError("progressive distillation needs a teacher: model.distill=<checkpoint of a diffusion or "
                             "flow matching>")
        self.prepare(num_steps=num_steps, cond_drop=cond_drop, class_conditional=class_conditional, noise=noise)
        self.distill, self.usual_steps = distill, steps
        objective = ProgressiveDistillation(None, steps=steps, teacher_steps=teacher_steps, weighting=weighting,
                                            time_sampler=time_sampler)
        self.assemble_steps(objective, path, net, optimizer, ema_decay)

    def draw(self, options: SamplingOptions) -> Samples:
        """As for every diffusion, by N steps where nobody says."""
        return super().draw(options.with_default(steps=self.usual_steps) if options.sampler is None else options)
