"""Flow matching (Lipman et al. 2023; rectified flow, Liu et al. 2023): learning the velocity from noise to data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import rank_world
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.diffusion import Denoiser, Elbo, default_variance
from genmodels.diffusion.decoder import to_unit
from genmodels.diffusion.flow_matching import (
    BetweenData,
    Coupling,
    CouplingName,
    FlowMatching,
    PathName,
    make_path,
    velocity_of,
)
from genmodels.diffusion.weighting import TimeSamplerName
from genmodels.models.base import Loss
from genmodels.models.build import build
from genmodels.models.diffusion import COMPARED, DiffusionModel, load_teacher

_REFLOW_STEPS, _ROWS = 20, 256  # Heun steps from noise to data, and pairs in one batch
_WITHOUT_NOISE = ("flow", "euler", "heun")  # samplers that follow the flow from any start


class Pairs(NamedTuple):
    """Data and the noise that they come from, (N, *event) in the network's units, and their classes (N,) or None."""

    x0: Tensor
    noise: Tensor
    cond: Tensor | None


class FlowMatchingModel(DiffusionModel):
    """A flow from noise to data along a path, whose velocity a network learns by regression.

        x_t = alpha(t) x_0 + sigma(t) eps,    loss = E |alpha' x_0 + sigma' eps - v(x_t, t)|^2,    dx_t/dt = v(x_t, t)

    With pairs of two data sets (`data=transport`) eps is an encoded item of the source, and the flow leads from one set
    to the other. Then there is no score, no likelihood, and no stochastic sampler: samples start from held-out items of
    the source, and validation prints their energy distance to held-out items of the target.

    The network is also a denoiser, since v, x0, eps and score are views of one prediction: samplers, guidance,
    inpainting, editing, the evidence lower bound and the likelihood by the ODE are those of `DDPM`.

    Arguments:
        path: `linear`, straight lines (rectified flow), `cosine`, which preserves the variance, or a noise schedule of
            `DDPM` by its name after `vp_`.
        sigma_min: noise that `linear` leaves at t = 0.
        coupling: how items are paired with noise: `independent`, or minibatch optimal transport, exact (`ot`) or
            entropic (`sinkhorn`, for batches of thousands); in a conditional model within each class.
        time_sampler: how training draws its times: those of `DDPM`, `logit_normal`, `cosmap`, or for likelihood
            `log_uniform`.
        reflow: a checkpoint of this family or of `DDPM`: train on pairs of noise and the sample to which its flow leads
            (Liu et al. 2023) instead of the data; their straighter paths need fewer steps.
        reflow_pairs: number of pairs, drawn again whenever training starts or resumes; of a class-conditional model of
            each class in turn.
        spec, **shared: see `DiffusionModel`.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = FlowMatchingModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=3).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "flow_matching"
    validates_by_ode = True
    takes_source = True
    sampling_options = (*DiffusionModel.sampling_options, "source")

    def __init__(
        self,
        spec: DataSpec,
        *,
        path: PathName = "linear",
        sigma_min: float = 0.0,
        coupling: CouplingName = "independent",
        time_sampler: TimeSamplerName = "antithetic",
        reflow: str | None = None,
        reflow_pairs: int = 4096,
        **shared,
    ):
        super().__init__(spec, **shared)
        # Along noise schedules velocities may be unbounded: at SNR 0 alpha' of some is infinite.
        self.default_sampler = "dpmpp_2m" if path.startswith("vp_") else "flow"
        schedule = make_path(path, self.num_steps, sigma_min=sigma_min)
        kind = Denoiser if spec.source is None else BetweenData
        core = kind(self.network(), schedule, velocity_of(schedule))
        self.coupling = Coupling(coupling, whole=self._global_batch)
        objective = FlowMatching(self.coupling, time_sampler=time_sampler)
        objective.check(core)
        elbo = Elbo(self.decoder, self.num_steps, default_variance("simple", spec.levels))
        self.assemble(core, elbo if spec.source is None else None, objective)
        if spec.source is not None:
            if path.startswith("vp_"):
                raise InputError(f"path={path} still has data at t = 1: between two data sets take linear or cosine")
            self.samplers, self.has_ode_likelihood = _WITHOUT_NOISE, False
            self.register_buffer("source_location", torch.zeros(spec.event_shape))
            self.register_buffer("source_scale", torch.ones(spec.event_shape))
        self._held_out: dict[str, Batch] = {}
        if reflow is not None and (spec.mel is not None or reflow_pairs < 1 or coupling != "independent"):
            raise InputError("reflow is for vectors and images, with reflow_pairs of at least 1 and, since its pairs "
                             f"are given, coupling=independent; got reflow_pairs={reflow_pairs}, coupling={coupling}")
        self.reflow, self.reflow_pairs = reflow, reflow_pairs
        self.pairs: Pairs | None = None

    # ---- reflow -------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The squared error of the velocity at one time per example, on the batch or on as many pairs of `reflow`."""
        if self.reflow is None and self.spec.source is None:
            return super().loss(batch, generator)
        if self.reflow is None:
            x0, cond, source = self._network_input(batch), self._cond(batch), self.encode_source(batch.source)
            noise = self.coupling(x0, source, cond, generator)
        else:
            if self.pairs is None:
                self.pairs = self._make_pairs()
            rows = (generator.child("pairs").uniform((len(batch),), device=self.device) * len(self.pairs.x0)).long()
            x0, noise, cond = (None if part is None else part[rows] for part in self.pairs)
        objective = FlowMatching(lambda *_: noise, time_sampler=self.objective.time_sampler)
        out = objective(self.core, x0, self._hidden(cond, generator), generator, *rank_world())
        objective.observe(out)
        return Loss(out.value, out.per_example, out.parts, out.times)

    @torch.no_grad()
    def _make_pairs(self) -> Pairs:
        """The pairs of the checkpoint `reflow`, in this network's units; a function of the seed."""
        teacher = load_teacher(self, "reflow", self.reflow)
        index = torch.arange(self.reflow_pairs, device=self.device)
        of_class = self.conditional or not teacher.has_null_class  # else as many of each class as in the data
        cond = teacher.labels(None, index) if of_class else None
        if self.spec.source is None:
            start = noise = KeyedGenerator(self.seed, index, "reflow").normal((len(index), *self.spec.event_shape))
        else:  # the teacher has its own scale of the source
            items = self._items("train", index, cond)
            start, noise = teacher.encode_source(items), self.encode_source(items)
        x0 = torch.cat([teacher.follow(start[part], None if cond is None else cond[part], steps=_REFLOW_STEPS)
                        for part in index.split(_ROWS)])
        if self.spec.levels is None:
            x0 = self.encode(x0 * teacher.scale + teacher.location)
        return Pairs(x0, noise.to(x0), cond if self.conditional else None)

    # ---- another data set in place of noise ---------------------------------------------------------------------

    def initialize(self, batch: Batch) -> None:
        """As for every model; the source is standardised by its own moments."""
        super().initialize(batch)
        if self.spec.source is not None and self.spec.source["levels"] is None:
            x = batch.source.double()
            if not bool((x.std(0) > 0).all()):
                raise InputError(f"a scalar of {self.spec.source['name']}, the source, is constant: leave it out")
            self.source_location.copy_(x.mean(0))
            self.source_scale.copy_(x.std(0))

    def encode_source(self, x: Tensor) -> Tensor:
        """Items of the source in the network's units: [-1, 1] for integers, standardised otherwise."""
        levels, x = self.spec.source["levels"], x.to(self.device)
        if levels is not None:
            return to_unit(x, levels).to(self.location.dtype)
        return (x.to(self.location.dtype) - self.source_location) / self.source_scale

    def _items(self, split: str, index: Tensor, labels: Tensor | None) -> Tensor:
        """(n, *event) items of the source in the training data, of the classes `labels` where they are known."""
        if split not in self._held_out:
            config = self.run_config.get("data")
            if not config:
                raise InputError(f"samples start from items of {self.spec.source['name']}: give source=(N, *event)")
            data = build(config, trust=self.run_config.get("trust") or []).prepare()
            self._held_out[split] = data.sources(split)
        x, classes = self._held_out[split].x, self._held_out[split].cond
        index = index.cpu()
        if classes is None or labels is None:
            return x[index % len(x)]
        rows = torch.empty_like(index)
        for label in labels.cpu().unique():
            items, here = (classes == label).nonzero().flatten(), labels.cpu() == label
            if len(items) == 0:
                raise InputError(f"{self.spec.source['name']} has no items of class {int(label)} in its {split} split: "
                                 "choose other classes by cond=, or give source=(N, *event)")
            rows[here] = items[index[here] % len(items)]
        return x[rows]

    def _start(self, options: SamplingOptions, index: Tensor, labels: Tensor | None) -> Tensor | None:
        return None if self.spec.source is None else self.encode_source(self._sources(options, index, labels))

    def _sources(self, options: SamplingOptions, index: Tensor, labels: Tensor | None) -> Tensor:
        if options.source is None:
            return self._items("test", index, labels)
        if options.source.shape[1:] != self.spec.event_shape:
            raise InputError(f"source has items of {tuple(options.source.shape[1:])}, not of {self.spec.event_shape}")
        return options.source[index.cpu() % len(options.source)]

    def draw(self, options: SamplingOptions) -> Samples:
        """As for every diffusion model; from another data set sample k is its item k carried along the flow."""
        if self.spec.source is None:
            if options.source is not None:
                raise InputError("source is for a model whose flow starts from other data (data=transport)")
            return super().draw(options)
        sampler = options.sampler or self.default_sampler
        one_of("sampler (from other data)", sampler, self.samplers)
        given = {"known": options.known, "edit": options.edit, "along": options.along, "size": options.size}
        given["temperature"] = None if options.temperature in (None, 1) else options.temperature
        unused = [key for key, value in given.items() if value is not None]
        if unused:
            raise InputError(f"{unused[0]} is for models that start from Gaussian noise, and this one starts from "
                             f"{self.spec.source['name']}: leave it out")
        found = super().draw(options)
        found.source = self._sources(options, found.index, found.cond)
        return found

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """As for every diffusion model; from another data set keep the first items, and as many samples."""
        if self.spec.source is None:
            super().validation_step(batch, batch_idx)
        else:
            first = batch.rows(batch.item_index < COMPARED)
            self.keep_samples(first, start=self.encode_source(first.source))

    def on_validation_epoch_end(self) -> None:
        """Log the figure by which checkpoints are chosen."""
        if self.spec.source is None:
            super().on_validation_epoch_end()
        else:
            self.log_energy_distance()

    def ode_likelihood(self, batch: Batch, **options) -> Likelihood:
        """As for every diffusion model; from another data set, whose density is unknown, an InputError."""
        if not self.has_ode_likelihood:
            raise InputError(self._no_density)
        return super().ode_likelihood(batch, **options)

    @property
    def log_likelihood(self):
        """As for every diffusion model; from another data set a method without the options of a bound."""
        return super().log_likelihood if self.spec.source is None else self._no_log_likelihood

    def _no_log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        return self.no_likelihood(batch, self._no_density, weights)

    @property
    def _no_density(self) -> str:
        return f"a flow from {self.spec.source['name']} transforms a density that is not known"
