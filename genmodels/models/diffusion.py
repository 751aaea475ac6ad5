"""What diffusion and flow matching have in common: data in the network's units, likelihoods, samples and latents."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.checkpoint import checkpoint_hash
from genmodels.core.data import Batch, DataSpec, Latents, require_spread
from genmodels.core.errors import InputError, an, at_least, check_number, one_of, require_finite_rows
from genmodels.core.files import located
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import gather, rank_world
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions, Trajectory, require_events, require_guidance
from genmodels.core.tensors import event_size, event_sum, hide
from genmodels.diffusion import (
    SAMPLERS,
    Denoiser,
    DiffusionSampler,
    Elbo,
    Objective,
    OdeLikelihood,
    OnPath,
    make_objective,
)
from genmodels.diffusion.decoder import Decoder, DiscretisedGaussian, Gaussian, to_levels, to_unit
from genmodels.diffusion.flow_matching import PATHS, make_path
from genmodels.diffusion.generation import follow, invert
from genmodels.diffusion.ode import EXACT_UP_TO
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.build import make_network
from genmodels.models.checkpoint import load_model
from genmodels.models.mels import frames_of, moments, silent_beyond, with_noise
from genmodels.models.optimizer import Optimizer
from genmodels.nn import DiT, MLPDenoiser, UNet

_LATENT_STEPS = 100  # of Heun between data and their latents, each way
COMPARED = 1000  # held-out items, and as many samples, between which validation takes the energy distance
_VALIDATION_ODE = {"solver": "rk4", "steps": 12, "variable": "time"}
#: Network evaluations in validation at each stage of this solver; an item takes one for its velocity and D for the
#: divergence, so that a thousand items in the plane are solved.
_VALIDATION_EVALUATIONS = 3000


class DiffusionModel(GenerativeModel):
    """A denoiser on a path from data to noise; a family adds its options, its denoiser and its objective.

    The constructor of a family builds its denoiser around `self.network()` and ends with `self.assemble(...)`.

    Arguments:
        spec: the data set this model is built for.
        num_steps: T, the number of steps of the ELBO, and the most that a sampler takes.
        class_conditional: condition on the class where the data have classes.
        cond_drop: probability that training hides the class, so that the model also learns the data of all classes,
            which guidance needs; 0 for never.
        noise: width of the noise on mels, in log units, without which they have no density; other data have none.
        net: options of the network, a U-Net for images and sequences, a residual MLP for vectors, or of the class that
            `_target_` names (`model.net=dit`); or a module.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.
    """

    samplers = tuple(SAMPLERS)
    sampling_options = (
        "sampler", "steps", "spacing", "eta", "churn", "diffusion", "along", "clip", "guidance", "guidance_rescale",
        "guidance_interval", "known", "keep", "rounds", "edit", "strength", "path", "size", "lengths", "progress",
    )  # fmt: skip

    #: The default sampler.
    default_sampler = "dpmpp_2m"
    #: Whether validation on small continuous vectors solves the ODE: for families whose model is the flow. The ELBO
    #: belongs to a stochastic sampler, and a small error of the velocity near the data lowers it far more.
    validates_by_ode = False
    has_ode_likelihood = True
    #: Whether it predicts the mean of the data given x_t, which determines the velocity of a flow.
    has_velocity = True
    #: Families without a velocity that can nevertheless be its teachers.
    learns_from: tuple[str, ...] = ()

    def __init__(
        self,
        spec: DataSpec,
        *,
        num_steps: int = 1000,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        noise: float = 0.05,
        net: UNet | DiT | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.taught_by: dict[str, str] = {}  # hashes of the checkpoints that options name
        self.save_hyperparameters()
        at_least(2, num_steps=num_steps)
        self.condition_on_class(class_conditional, cond_drop)
        check_number("noise", noise, 0)
        if noise not in (0, 0.05) and spec.mel is None:
            raise ValueError(f"noise={noise} is for mels, and {spec.name} has none")
        self.noise = noise if spec.mel is not None else 0.0
        self.num_steps = num_steps
        self.decoder: Decoder = Gaussian() if spec.levels is None else DiscretisedGaussian(spec.levels)
        self.register_buffer("location", torch.zeros(spec.event_shape))
        self.register_buffer("scale", torch.ones(spec.event_shape))

    def network(
        self, *, learned_variance: bool = False, self_conditioning: bool = False, two_times: bool = False
    ) -> nn.Module:
        """The network of the option `net`, built by `make_network` unless it is a module already."""
        net = self.hparams["net"]
        if isinstance(net, nn.Module):
            return net
        estimate = self.spec.event_shape[0] if self_conditioning else 0
        return make_network(net, self.spec.event_shape, self.num_classes, learned_variance, estimate, two_times)

    def assemble(self, core: Denoiser, elbo: Elbo | None, objective: Objective) -> None:
        """Set the denoiser, its bound (if it has one) and its objective; called last in a family's constructor."""
        self.core, self.objective, self.variance = core, objective, "beta" if elbo is None else elbo.variance
        if elbo is not None:
            self.elbo = elbo
        if isinstance(objective.time_sampler, nn.Module):
            self.time_sampler = objective.time_sampler  # registered, so that checkpoints hold its history
        self.sampler = DiffusionSampler(
            self.num_steps, self.variance, clip=None if self.spec.levels is None else "static", null=self.num_classes,
            name=self.default_sampler)
        self.finish_setup(self.hparams["optimizer"], self.hparams["ema_decay"])

    def assemble_denoiser(self, core: Denoiser, objective: str, variance: str, **options) -> None:
        """As `assemble`, with the ELBO of these variances and the objective of `make_objective`."""
        elbo = Elbo(self.decoder, self.num_steps, variance)
        self.assemble(core, elbo, make_objective(
            objective, core, self.decoder, elbo.steps(core.schedule), variance=variance, **options))

    def _global_batch(self, rows: Tensor) -> tuple[Tensor, slice]:
        """The rows of all processes in the order of the global batch, and the slice of this process in them."""
        rank, world = rank_world()
        if world == 1:
            return rows, slice(None)
        return self.all_gather(rows).transpose(0, 1).flatten(0, 1), slice(rank, None, world)

    def sharded_networks(self) -> list[nn.Module]:
        """The network; refused for a learned schedule, whose weights are outside of it."""
        if any(True for _ in self.core.schedule.parameters()):
            raise InputError("trainer.strategy=fsdp spreads the weights of the network: not with schedule=learned")
        return [self.core.net]

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """As for every model, and which teacher it has."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["taught_by"] = dict(self.taught_by)

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """The inverse of `on_save_checkpoint`."""
        super().on_load_checkpoint(checkpoint)
        self.taught_by = dict(checkpoint.get("taught_by", {}))

    def initialize(self, batch: Batch) -> None:
        """Mean and standard deviation of continuous training data, per scalar; integers have a fixed map."""
        if self.spec.levels is None:
            mean, std = moments(self._with_noise(batch).double(), batch.mask)
            require_spread(self.spec, std)
            self.location.copy_(mean)
            self.scale.copy_(std)

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

    def _with_noise(self, batch: Batch, generator: KeyedGenerator | None = None) -> Tensor:
        """Mels with noise, by default noise keyed by item; other data unchanged."""
        return with_noise(batch.x, self.noise, generator or KeyedGenerator(0, batch.item_index, "likelihood"))

    def _network_input(self, batch: Batch, generator: KeyedGenerator | None = None) -> Tensor:
        """The batch as the network sees it, zero where it is padded."""
        return hide(self.encode(self._with_noise(batch, generator)), batch.mask)

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The objective at one time per example, bounds in bits/dim; the names of the parts contain their units."""
        cond = self._hidden(self._cond(batch), generator)
        x0 = self._network_input(batch, generator)
        out = self.objective(self.core, x0, cond, generator, *rank_world(), batch.mask)
        self.objective.observe(out)
        if not self.objective.in_nats:
            return Loss(out.value, out.per_example, out.parts, out.times)
        bits = out.per_example / (math.log(2) * event_size(x0, batch.mask).clamp(min=1))
        return Loss(bits.mean(), bits, out.parts, out.times)

    def on_before_optimizer_step(self, optimizer) -> None:
        """As for every model, which stops at a non-finite loss; then a loss-aware time sampler learns from it."""
        super().on_before_optimizer_step(optimizer)
        self.objective.learn(self.all_gather)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The ELBO of every item; for flows of small continuous vectors the ODE likelihood of the first items."""
        spec = self.spec
        if not self.validates_by_ode or spec.levels is not None or spec.mel is not None or spec.dims > EXACT_UP_TO:
            super().validation_step(batch, batch_idx)
            return
        first = batch.rows(batch.item_index < _VALIDATION_EVALUATIONS // (1 + spec.dims))
        if len(first):
            self._pending.append(self.ode_likelihood(first, seed=self.seed, **_VALIDATION_ODE).cpu())

    @torch.no_grad()
    def keep_samples(self, batch: Batch, *, steps: int | None = None, start: Tensor | None = None) -> None:
        """In validation: keep items, and as many samples of their classes, from `start` or from noise keyed by item."""
        if len(batch) == 0:
            return
        x0, options = self._network_input(batch), SamplingOptions(steps=steps)
        drawn = self.sampler(
            self.sampler.plan(self.core.schedule, options), self.weights(), x0.shape, options,
            KeyedGenerator(self.seed, batch.item_index, "validate"), cond=self._cond(batch), mask=batch.mask,
            start=start, dtype=x0.dtype, device=x0.device,
        ).x
        self._pending.append(torch.stack([x0, hide(drawn, batch.mask)]).flatten(2).double().cpu())

    def log_energy_distance(self) -> None:
        """Log the energy distance between the items and the samples of `keep_samples`, each (2, n, D)."""
        x, y = torch.cat(gather(self._pending), 1)
        self._pending = []
        pairs = max(1, math.comb(len(x), 2))
        across, within = torch.cdist(x, y).mean(), (torch.pdist(x).sum() + torch.pdist(y).sum()) / (2 * pairs)
        self.figures["val/energy_distance"] = value = float(2 * (across - within))
        self.log("val/energy_distance", value, rank_zero_only=False)

    def denoiser_and_cond(self, batch: Batch) -> tuple[Denoiser, Tensor | None]:
        """The denoiser, and its condition for a batch."""
        return self.core, self._cond(batch)

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0,
        bound: Literal["discrete", "continuous"] = "discrete", draws: int | None = None, replicates: int = 2,
        rows: int | None = None,
    ) -> Likelihood:
        """The lower bound on the log-likelihood, over all terms or over `draws` stratified ones.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            bound, draws, replicates, rows: see `Elbo`.
        """
        x0, index = self._network_input(batch), batch.item_index
        found, profile, made = self.elbo(
            self.weights(weights), x0, self.elbo.times(self.core.schedule), KeyedGenerator(seed, index, "elbo"),
            cond=self._cond(batch), mask=batch.mask, bound=bound, draws=draws, replicates=replicates, rows=rows,
        )
        made |= {"noise": self.noise} if self.noise else {}
        made |= {"variance": self.elbo.variance, "seed": seed} | self._given(batch, weights)
        parts = found.parts
        if self.spec.levels is None:
            parts["scale"] = self._log_scale(batch.mask).expand(len(index))
        return Likelihood(
            -sum(parts.values()), "lower_bound", event_size(batch.x, batch.mask).long(), self.spec.levels,
            found.stderr, made, index, parts=parts, profile=profile,
        )

    def ode_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, **options) -> Likelihood:
        """The log-likelihood by the probability-flow ODE, from the noise level of the ELBO's reconstruction.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            options: see `OdeLikelihood`.
        """
        ode, denoiser = OdeLikelihood(**options), self.weights(weights)
        log_snr = self.elbo.first_log_snr(self.core.schedule)

        def start(x: Tensor, cond: Tensor | None, mask: Tensor | None, noise: KeyedGenerator):
            x0 = hide(self.encode(x), mask)
            z, volume = ode.start(denoiser, x0, log_snr, noise, self.decoder, cond=cond, mask=mask)
            return z, volume if self.spec.levels is not None else volume - self._log_scale(mask)

        noisy = replace(batch, x=self._with_noise(batch))
        found = ode(denoiser, self.spec, noisy, self._cond(batch), start, log_snr, seed=seed)
        found.made |= {"noise": self.noise} if self.noise else {}
        found.made |= {"seed": seed} | self._given(batch, weights)
        return found

    def _log_scale(self, mask: Tensor | None) -> Tensor:
        """log |det| of the map from standardised to continuous data, over the valid scalars of each item."""
        log_scale = self.scale.double().log()
        return log_scale.sum() if mask is None else event_sum(log_scale.expand(len(mask), *log_scale.shape), mask)

    # ---- samples ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, options: SamplingOptions) -> Samples:
        """Samples by any sampler of diffusion: free, around a known part (`known`), or from an item (`edit`)."""
        self._check_events(options)
        index, known, edit = self.numbered(options.n, options.start), options.known, options.edit
        denoiser, generator = self.weights(options.weights), KeyedGenerator(options.seed, index, "sample")
        if options.along is not None:
            one_of("along", options.along, PATHS)
            denoiser = OnPath(denoiser, make_path(options.along, self.num_steps))
        plan = self.sampler.plan(denoiser.schedule, options)
        labels, shape = self._labels(options, index), (options.n, *self._shape_of(options.size))
        whole = options.lengths is None and any(given is not None for given in (options.size, known, edit))
        mask = None if whole else frames_of(options.lengths, index, replace(self.spec, event_shape=shape[1:]))
        seen = Trajectory(options.path, plan.steps, options.progress)

        def finished(x: Tensor) -> Tensor:
            """x in the data's units, with the known part as given, and silent beyond the last frame."""
            x = silent_beyond(self.decode(x), mask, self.spec)
            return x if known is None else torch.where(options.keep.to(x.device), known.to(x.device), x)

        def after(done: int, x: Tensor, x0: Tensor) -> None:
            seen(done, lambda: finished(x) if done + 1 == seen.steps else self.decode(x))

        out = self.sampler(
            plan, denoiser, shape, options, generator, cond=labels, mask=mask,
            known=None if known is None else self.encode(known[None].to(self.device)),
            edit=None if edit is None else self.encode(edit[None].to(self.device)),
            start=self._start(options, index, labels), dtype=self.location.dtype, device=self.device, callback=after,
        )
        there = True if mask is None else mask[0].to(self.device)
        kept = {} if known is None else {
            "kept": int((options.keep.to(self.device) & there).expand(self.spec.event_shape).sum())}  # fmt: skip
        recorded = ("along", "size", "lengths", "guidance", "guidance_rescale", "guidance_interval")
        kept |= {key: value for key, value in options.given().items() if key in recorded}
        made = plan.made | kept | {"evaluations": out.evaluations, "seed": options.seed}
        made |= {"weights": str(options.weights), "temperature": options.temperature}
        made |= {"clip": self.sampler.threshold(options) or "none"}
        return Samples(finished(out.x), labels, index, made, seen.kept, mask=mask)

    def _check_events(self, options: SamplingOptions) -> None:
        """Raise InputError for an event of another shape than the data, and a range of data that have none."""
        if self.spec.levels is None and self.sampler.threshold(options) is not None:
            raise InputError("clip is for integers: continuous data have no range, leave it out")
        for event in (options.known, options.edit):
            if event is not None and options.size is not None:
                raise InputError(f"size={list(options.size)} does not go with a given event: leave size out")
        require_events(options, self.spec.event_shape)

    def _start(self, options: SamplingOptions, index: Tensor, labels: Tensor | None) -> Tensor | None:
        """Where the samples start, in the network's units; None for noise."""
        return None

    def _labels(self, options: SamplingOptions, index: Tensor) -> Tensor | None:
        """The labels of the samples; None for samples without a class."""
        require_guidance(options, self.num_classes, self.has_null_class)
        if options.guidance == 0 or (options.cond is None and options.from_item and self.has_null_class):
            return None
        return self.labels(options.cond, index)

    def _shape_of(self, size: list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
        """The event shape for a size."""
        channels, *space = self.spec.event_shape
        if size is None or list(size) == space:
            return self.spec.event_shape
        if not space or len(size) != len(space) or min(size) < 1:
            rule = "samples of vectors have no size" if not space else f"size has {len(space)} numbers of at least 1"
            raise InputError(f"{rule}, got {list(size)}")
        if self.spec.levels is None:
            raise InputError(
                f"continuous data are standardised at each position: their size is {space}, not {list(size)}"
            )
        return channels, *size

    # ---- latents: the start of the deterministic sampler ---------------------------------------------------------

    @torch.no_grad()
    def latents(self, batch: Batch, weights: str | float = "ema", steps: int = _LATENT_STEPS) -> Latents:
        """The noise from which the probability-flow ODE leads to these data; without labels, under no class."""
        x0, times = self.encode(batch.x), self._latent_times(steps)
        return Latents((invert(self.weights(weights), x0, times, cond=self._cond(batch), mask=batch.mask),))

    @torch.no_grad()
    def from_latents(
        self, latents: Latents, cond: Tensor | None = None, weights: str | float = "ema", steps: int = _LATENT_STEPS,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The data of latents, in the data's own units; the inverse of `latents`, where `mask` was that of the data.

        Sequences are silent where the mask is False, as samples are.
        """
        self.require_class(cond)
        return silent_beyond(self.decode(self.follow(latents[0], cond, weights, steps, mask)), mask, self.spec)

    @torch.no_grad()
    def follow(
        self, noise: Tensor, cond: Tensor | None = None, weights: str | float = "ema", steps: int = _LATENT_STEPS,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The end of the probability-flow ODE from noise (B, *event), in the network's units, by Heun's method."""
        return follow(self.weights(weights), noise, self._latent_times(steps), cond=cond, mask=mask)

    def _latent_times(self, steps: int) -> Tensor:
        return self.sampler.times(self.core.schedule, "dpmpp_2m", min(steps, self.num_steps))


def load_teacher(student: DiffusionModel, option: str, path: str) -> DiffusionModel:
    """The diffusion or flow-matching model of a checkpoint, on the device of a student of the same data.

    Arguments:
        student: the model that learns from it.
        option: the student's option that names the checkpoint.
        path: the checkpoint, as `ckpt=` of the commands takes it: a run folder too.

    Raises:
        InputError: for another kind of model, other data or other classes, a student that needs predictions without a
            class from a teacher that always has one, or a file that has changed since the student began.
    """
    with torch.random.fork_rng():  # building the teacher must not change the random numbers of training
        trust = (student.run_config or {}).get("trust") or ()
        teacher, _ = load_model(place := located(path), device=str(student.device), trust=trust)
    if student.taught_by.setdefault(option, content := checkpoint_hash(place)) != content:
        raise InputError(f"{option}={path}: {place} has changed since this run began: restore it, or begin a new run")
    if not isinstance(teacher, DiffusionModel) or teacher.spec.event_shape != student.spec.event_shape:
        raise InputError(f"{option}={path} holds {an(teacher.family)} of {tuple(teacher.spec.event_shape)}, not "
                         f"a diffusion or flow matching of {tuple(student.spec.event_shape)}")
    if teacher.spec.source != student.spec.source:
        starts = [(model.spec.source or {"name": "noise"})["name"] for model in (teacher, student)]
        raise InputError(f"{option}={path} starts from {starts[0]}, and this model from {starts[1]}")
    if (teacher.spec.levels is None) != (student.spec.levels is None):
        kinds = ["continuous" if model.spec.levels is None else "integer" for model in (teacher, student)]
        raise InputError(f"{option}={path} was trained on {kinds[0]} data, and this model is for {kinds[1]} data")
    if student.conditional and teacher.num_classes != student.num_classes:
        raise InputError(f"{option}={path} has other classes: model.class_conditional=false leaves them out")
    if not teacher.has_velocity and teacher.family not in student.learns_from:
        raise InputError(f"{option}={path} holds {an(teacher.family)}, which has no velocity to follow: take a "
                         "diffusion or flow-matching model")
    without_class = option == "distill" and not (student.conditional and student.cond_drop == 0)
    if teacher.conditional and not teacher.has_null_class and without_class:
        raise InputError(f"{option}={path} was trained with cond_drop=0 and so has no output without a class: "
                         "give model.class_conditional=true model.cond_drop=0")
    return teacher
