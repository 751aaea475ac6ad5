"""Denoising diffusion (Ho, Jain, Abbeel 2020): trained on terms of the evidence lower bound, judged by all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, require_finite_rows
from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import event_size, hide, spread
from genmodels.diffusion import (
    OBJECTIVES,
    PARAMETERISATIONS,
    SCHEDULES,
    Denoiser,
    DiscreteSchedule,
    LearnedSchedule,
    LossAwareTimes,
    NoiseSchedule,
    rescale_zero_terminal,
)
from genmodels.diffusion.decoder import DiscretisedGaussian, Gaussian, LevelSoftmax, to_levels, to_unit
from genmodels.diffusion.objectives import ObjectiveOutput
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.build import construct, keywords
from genmodels.models.diffusion_likelihood import DiffusionBound, DiffusionOde
from genmodels.models.diffusion_sampling import DiffusionSampling
from genmodels.models.mels import with_noise
from genmodels.models.optimizer import Optimizer
from genmodels.nn import MLPDenoiser, UNet

ScheduleName = Literal[
    "cosine", "linear", "linear_continuous", "grad_tts", "cosine_discrete", "sigmoid", "linear_log_snr", "learned"
]


class DiffusionTraining:
    """What trains the denoiser of a diffusion model, mixed into a GenerativeModel with `num_steps`, `variance`,
    `decoder` and the times of `DiffusionBound`.
    """

    def make_schedule(
        self, name: ScheduleName, zero_terminal_snr: bool = False, ends: Sequence[float] | None = None
    ) -> NoiseSchedule:
        """The noise schedule of this name for this model's number of steps and its data.

        Arguments:
            name: an entry of SCHEDULES.
            zero_terminal_snr: change it so that no signal is left at t = 1.
            ends: log-SNR at t = 0 and at t = 1.

        Raises:
            InputError: for ends of a schedule that has its own, or not two of them.
        """
        kind = SCHEDULES[name]
        if ends is not None:
            if "log_snr_max" not in keywords(kind):
                raise InputError(f"log_snr_ends is for schedule=cosine, linear_log_snr and learned: {name} has its own")
            if len(ends) != 2:
                raise InputError(f"log_snr_ends are two log-SNRs, at t = 0 and at t = 1, got {list(ends)}")
            schedule = kind(log_snr_max=float(ends[0]), log_snr_min=float(ends[1]))
        elif issubclass(kind, DiscreteSchedule):
            schedule = kind(num_steps=self.num_steps)
        elif issubclass(kind, LearnedSchedule):
            schedule = kind(log_snr_max=self._finest, log_snr_min=-15.0)
        else:
            schedule = kind()
        return rescale_zero_terminal(schedule) if zero_terminal_snr else schedule

    def train_by(self, denoiser: Denoiser, name: str, weighting: str, time_sampler: str) -> None:
        """Take the objective of this name for a denoiser.

        Raises:
            InputError: for options that do not go together.
        """
        kind = OBJECTIVES[name]
        takes = keywords(kind)
        if weighting != "none" and "weighting" not in takes:
            raise InputError(f"weighting={weighting} is for objective=simple and hybrid: {name} has its own")
        if self.variance == "learned" and name not in ("vlb", "hybrid"):
            raise InputError(f"objective={name} trains no variance: choose hybrid or vlb, or variance=beta")
        given = {"weighting": weighting, "variance": self.variance, "time_sampler": time_sampler}
        self.objective = kind(self.decoder, self.training_times(), **{k: v for k, v in given.items() if k in takes})
        self.objective.check(denoiser)
        if isinstance(self.objective.time_sampler, nn.Module):
            self.time_sampler = self.objective.time_sampler  # registered, so that checkpoints hold its history
        self._drawn: list[Tensor] = []

    def measure(
        self, denoiser: Denoiser, x0: Tensor, cond: Tensor | None, generator: KeyedGenerator, mask: Tensor | None
    ) -> ObjectiveOutput:
        """The objective on a batch as the network sees it, at one time for each example.

        Shapes: `x0 (B, *event)`, zero where `mask (B, 1, T)` is False; `cond` as the network takes it.
        """
        rank, world = self._rank_world
        out = self.objective(denoiser, x0, cond, generator, rank, world, mask)
        if isinstance(self.objective.time_sampler, LossAwareTimes) and torch.is_grad_enabled():
            self._drawn.append(torch.stack([out.drawn, out.integrand.double()]))
        return out

    def on_before_optimizer_step(self, optimizer) -> None:
        """As for every model; then, the loss being finite, a loss-aware time sampler learns of it."""
        super().on_before_optimizer_step(optimizer)
        for drawn in self._drawn:
            # (world, 2, n) or (2, n) to the order of the global batch, the same in every process
            t, loss = self.all_gather(drawn).reshape(-1, *drawn.shape).permute(1, 2, 0).flatten(1)
            self.time_sampler.update(t, loss)
        self._drawn.clear()

    def validation_options(self) -> dict:
        """An estimate of the bound: eight terms, twice."""
        return {"draws": min(8, self.num_steps - 1)}


def default_variance(objective: str, levels: int | None) -> Literal["beta", "beta_tilde", "learned"]:
    """The variance of the reverse steps where nobody names one: `hybrid` is there to learn it, the others cannot all.

    Example:
        >>> default_variance("hybrid", 256), default_variance("simple", 256), default_variance("simple", None)
        ('learned', 'beta_tilde', 'beta')
    """
    return "learned" if objective == "hybrid" else "beta" if levels is None else "beta_tilde"


class DDPM(DiffusionTraining, DiffusionBound, DiffusionOde, DiffusionSampling, GenerativeModel):
    """A diffusion model: noise is added in steps and a network learns to take it away.

        x_t = alpha_t x_0 + sigma_t eps,    loss = E |target - net(x_t, log SNR)|^2   (objective `simple`)
        -log p(x) <= KL(q(x_1|x)||N(0,I)) + sum_k KL(q(x_s|x_t,x)||p(x_s|x_t)) - E log p(x|x_0)   (what is reported)

    Integers 0..L-1 are mapped to [-1, 1] and the decoder gives their log-mass; continuous data are standardised by
    their training mean and deviation, whose volume is part of the density.

    Arguments:
        spec: the data set this model is built for.
        schedule: noise schedule; `cosine` is the continuous one with log-SNR in [-15, 15], `learned` is trained with
            the network, by the objectives `continuous` and `vlb`.
        log_snr_ends: log-SNR at t = 0 and at t = 1 of the schedules `cosine`, `linear_log_snr` and `learned`; their own
            by default.
        zero_terminal_snr: change the schedule so that no signal is left at t = 1.
        parameterisation: what the network predicts: `eps`, `x0`, `v` or `edm` (F of Karras et al. 2022).
        objective: `simple` (mean squared error), `vlb` (the bound itself), `hybrid` (simple, and the bound for learned
            variances) or `continuous` (the bound of infinitely many steps).
        weighting: of the noise levels in `simple` and `hybrid`: `none`, `min_snr`, `p2`, `edm` or `sigmoid`.
        num_steps: T, the number of steps of the ancestral sampler and of the bound.
        time_sampler: how training draws its times: `uniform`, `stratified`, `antithetic`, or `loss_aware` (more often
            where the loss has been large).
        variance: variance of the reverse steps: `beta`, exact for Gaussian data; `beta_tilde`, exact for a single
            point; or `learned` with `hybrid` and `vlb`. By default learned with `hybrid`, else beta for continuous data
            and beta_tilde for integers.
        decoder: how integers are read from the cleanest level: a normal law around the network's estimate, cut into
            levels (`gaussian`), or from the noisy data alone (`level_softmax`).
        self_conditioning: the network also sees its last estimate of the data.
        class_conditional: condition on the class where the data have classes.
        cond_drop: probability that training hides the class, so that the model also learns what holds for all of them,
            which guidance needs; 0 for never.
        noise: width of the noise on mels, in log units, without which they have no density; other data have none.
        net: options of the network, a U-Net for images and sequences, a residual MLP for vectors; or a module.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = DDPM(spec, net={"channels": 8, "multipliers": [1, 2]}, num_steps=10)
        >>> model.sample(2, steps=3).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "ddpm"

    def __init__(
        self,
        spec: DataSpec,
        *,
        schedule: ScheduleName = "cosine",
        log_snr_ends: list[float] | None = None,
        zero_terminal_snr: bool = False,
        parameterisation: Literal["eps", "x0", "v", "edm"] = "v",
        objective: Literal["simple", "vlb", "hybrid", "continuous"] = "simple",
        weighting: Literal["none", "min_snr", "p2", "edm", "sigmoid"] = "none",
        num_steps: int = 1000,
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde", "learned"] | None = None,
        decoder: Literal["gaussian", "level_softmax"] = "gaussian",
        self_conditioning: bool = False,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        noise: float = 0.05,
        net: UNet | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        if num_steps < 2:
            raise ValueError(f"num_steps must be at least 2, got {num_steps}")
        if not 0 <= cond_drop < 1:
            raise ValueError(f"cond_drop is a probability below 1, got {cond_drop}")
        if not noise >= 0:
            raise ValueError(f"noise is a width in log units, 0 or more, got {noise}")
        self.noise = noise if spec.mel is not None else 0.0
        variance = variance or default_variance(objective, spec.levels)
        self.num_steps, self.variance, self.cond_drop = num_steps, variance, cond_drop
        self.conditional = class_conditional and spec.num_classes is not None
        if not isinstance(net, nn.Module):
            network = MLPDenoiser if len(spec.event_shape) == 1 else UNet
            estimate = spec.event_shape[0] if self_conditioning else 0
            net = construct(network, spec.event_shape, self.num_classes, variance == "learned", estimate, **(net or {}))
        if decoder == "level_softmax" and spec.levels is None:
            raise InputError(f"decoder=level_softmax is for integers, and {spec.name} is continuous: use gaussian")
        kind = LevelSoftmax if decoder == "level_softmax" else DiscretisedGaussian
        self.decoder = Gaussian() if spec.levels is None else kind(spec.levels)
        self.core = Denoiser(
            net, self.make_schedule(schedule, zero_terminal_snr, log_snr_ends), PARAMETERISATIONS[parameterisation](),
            learned_variance=variance == "learned", self_conditioning=self_conditioning,
        )
        self.train_by(self.core, objective, weighting, time_sampler)
        self.register_buffer("location", torch.zeros(spec.event_shape))
        self.register_buffer("scale", torch.ones(spec.event_shape))
        self.finish_setup(optimizer, ema_decay)

    # ---- between the data's units and the network's --------------------------------------------------------------

    def initialize(self, batch: Batch) -> None:
        """Take mean and deviation of continuous training data, per scalar; integers have a fixed map."""
        if self.spec.levels is None:
            mean, deviation = _moments(self._filled(batch).double(), batch.mask)
            if not bool((deviation > 0).all()):
                column = self.spec.column(int((deviation <= 0).flatten().nonzero()[0, 0]))
                raise InputError(f"column {column} of {self.spec.name} is constant and has no density: leave it out")
            self.location.copy_(mean)
            self.scale.copy_(deviation)

    def encode(self, x: Tensor) -> Tensor:
        """Data in their own units to the network's: [-1, 1] for integers, standardised otherwise."""
        if self.spec.levels is not None:
            return to_unit(x, self.spec.levels).to(self.location.dtype)
        return (x.to(self.location.dtype) - self.location) / self.scale

    def decode(self, x: Tensor) -> Tensor:
        """The inverse of `encode`; integers are rounded and clipped to their range.

        Raises:
            NotFinite: for integers, where x is not finite.
        """
        if self.spec.levels is not None:
            kind = torch.uint8 if self.spec.levels <= 256 else torch.int64
            return to_levels(require_finite_rows(x), self.spec.levels).to(kind)
        return x * self.scale + self.location

    def _filled(self, batch: Batch, generator: KeyedGenerator | None = None) -> Tensor:
        """Mels with their noise, which is that of their item where nobody draws another; other data as they are."""
        if self.noise == 0:
            return batch.x
        return with_noise(batch.x, self.noise, generator or KeyedGenerator(0, batch.item_index, "likelihood"))

    def _entered(self, batch: Batch, generator: KeyedGenerator | None = None) -> Tensor:
        """The batch as the network sees it, zero where it is padded."""
        return hide(self.encode(self._filled(batch, generator)), batch.mask)

    def _hidden(self, cond: Tensor | None, generator: KeyedGenerator) -> Tensor | None:
        """The condition with some of its classes hidden: replaced by the null class (Ho and Salimans 2022)."""
        if cond is None or not self.cond_drop:
            return cond
        hide = generator.child("condition").uniform((len(cond),), device=cond.device) < self.cond_drop
        return torch.where(hide, self.num_classes, cond)

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The objective at one time per example: bounds in bits/dim; parts carry their unit in their name."""
        cond = self._hidden(self._cond(batch), generator)
        x0 = self._entered(batch, generator)
        out = self.measure(self.core, x0, cond, generator, batch.mask)
        if not self.objective.in_nats:
            return Loss(out.value, out.per_example, out.parts, out.times)
        bits = out.per_example / (math.log(2) * event_size(x0, batch.mask))
        return Loss(bits.mean(), bits, out.parts, out.times)


def _moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation, each event-shaped or broadcastable to it: of every scalar, or of a channel's valid ones."""
    if mask is None:
        return x.mean(0), x.std(0)
    axes = [0, *range(2, x.dim())]
    valid = spread(mask, x).expand_as(x)
    count = valid.sum(axes, keepdim=True)
    mean = hide(x, mask).sum(axes, keepdim=True) / count
    variance = hide((x - mean).square(), mask).sum(axes, keepdim=True) / (count - 1).clamp(min=1)
    return mean[0], variance.sqrt()[0]
