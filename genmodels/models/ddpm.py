"""Denoising diffusion (Ho, Jain, Abbeel 2020): trained on terms of the evidence lower bound, judged by all of it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.data.spec import Batch, DataSpec
from genmodels.diffusion import OBJECTIVES, PARAMETERISATIONS, SAMPLERS, SCHEDULES, SPACINGS, Denoiser, DiscreteSchedule
from genmodels.diffusion import sample as run_sampler
from genmodels.diffusion.bound import elbo
from genmodels.diffusion.decoder import DiscretisedGaussian, Gaussian, to_levels, to_unit
from genmodels.errors import InputError
from genmodels.evaluation.likelihood import Likelihood, Profile
from genmodels.models.base import GenerativeModel, Loss, Samples
from genmodels.models.build import construct
from genmodels.models.optimizer import Optimizer
from genmodels.nn import MLPDenoiser, UNet
from genmodels.random import KeyedGenerator


class DDPM(GenerativeModel):
    """A diffusion model: noise is added in steps and a network learns to take it away.

        x_t = alpha_t x_0 + sigma_t eps,    loss = E |target - net(x_t, log SNR)|^2   (objective `simple`)
        -log p(x) <= KL(q(x_1|x)||N(0,I)) + sum_k KL(q(x_s|x_t,x)||p(x_s|x_t)) - E log p(x|x_0)   (what is reported)

    Integers 0..L-1 are mapped to [-1, 1] and the decoder gives their log-mass; continuous data are standardised by
    their training mean and deviation, whose volume is part of the density.

    Arguments:
        spec: the data set this model is built for.
        schedule: noise schedule; `cosine` is the continuous one with log-SNR in [-15, 15].
        parameterisation: what the network predicts: `eps`, `x0` or `v`.
        objective: `simple` (mean squared error) or `vlb` (the bound itself).
        num_steps: T, the number of steps of the ancestral sampler and of the bound.
        time_sampler: how training draws its times: `uniform`, `stratified` or `antithetic`.
        variance: variance of the reverse steps: `beta` or `beta_tilde`.
        class_conditional: condition on the class where the data have classes.
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
        schedule: Literal[
            "cosine", "linear", "linear_continuous", "cosine_discrete", "sigmoid", "linear_log_snr"
        ] = "cosine",
        parameterisation: Literal["eps", "x0", "v"] = "v",
        objective: Literal["simple", "vlb"] = "simple",
        num_steps: int = 1000,
        time_sampler: Literal["uniform", "stratified", "antithetic"] = "antithetic",
        variance: Literal["beta", "beta_tilde"] = "beta_tilde",
        class_conditional: bool = True,
        net: UNet | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        if num_steps < 2:
            raise ValueError(f"num_steps must be at least 2, got {num_steps}")
        self.num_steps, self.variance = num_steps, variance
        self.conditional = class_conditional and spec.num_classes is not None
        if not isinstance(net, nn.Module):
            network = MLPDenoiser if len(spec.event_shape) == 1 else UNet
            net = construct(network, spec.event_shape, self.num_classes, **(net or {}))
        noise = SCHEDULES[schedule]
        noise = noise(num_steps=num_steps) if issubclass(noise, DiscreteSchedule) else noise()
        self.core = Denoiser(net, noise, PARAMETERISATIONS[parameterisation]())
        self.decoder = Gaussian() if spec.levels is None else DiscretisedGaussian(spec.levels)
        parts = {"variance": variance} if objective == "vlb" else {}
        self.objective = OBJECTIVES[objective](self.decoder, self.bound_times(), time_sampler=time_sampler, **parts)
        self.register_buffer("location", torch.zeros(spec.event_shape))
        self.register_buffer("scale", torch.ones(spec.event_shape))
        self.finish_setup(optimizer, ema_decay)

    @property
    def num_classes(self) -> int | None:
        """Number of classes the network is told, None for an unconditional model."""
        return self.spec.num_classes if self.conditional else None

    # ---- between the data's units and the network's --------------------------------------------------------------

    def initialize(self, batch: Batch) -> None:
        """Take mean and deviation of continuous training data, per scalar; integers have a fixed map."""
        if self.spec.levels is None:
            x = batch.x.double()
            deviation = x.std(0)
            if not bool((deviation > 0).all()):
                column = int((deviation <= 0).flatten().nonzero()[0, 0])
                raise InputError(f"column {column} of {self.spec.name} is constant and has no density: leave it out")
            self.location.copy_(x.mean(0))
            self.scale.copy_(deviation)

    def encode(self, x: Tensor) -> Tensor:
        """Data in their own units to the network's: [-1, 1] for integers, standardised otherwise."""
        if self.spec.levels is not None:
            return to_unit(x, self.spec.levels).to(self.location.dtype)
        return (x.to(self.location.dtype) - self.location) / self.scale

    def decode(self, x: Tensor) -> Tensor:
        """The inverse of `encode`; integers are rounded and clipped to their range."""
        if self.spec.levels is not None:
            kind = torch.uint8 if self.spec.levels <= 256 else torch.int64
            return to_levels(x, self.spec.levels).to(kind)
        return x * self.scale + self.location

    def _cond(self, batch: Batch) -> Tensor | None:
        return batch.cond if self.conditional else None

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The objective at one time per example; parts carry their unit in their name."""
        rank, world = self._rank_world
        out = self.objective(self.core, self.encode(batch.x), self._cond(batch), generator, rank, world)
        return Loss(out.value, out.per_example, out.parts, out.times)

    def bound_times(self, num_terms: int | None = None) -> Tensor:
        """Times t_0 < ... < t_K = 1 of the bound; (K + 1,) float64.

        A discrete schedule has DDPM's t_0 = 1/T. A continuous one starts where the noise first becomes smaller than the
        distance between levels, log SNR = 2 log(2 (L - 1)): below that the integers are certain and each further step
        would only charge for what the decoder gives away. Every t_0 yields a bound; this one is near the tightest.
        """
        steps = num_terms or self.num_steps
        schedule = self.core.schedule
        first = 1.0 / steps
        if schedule.num_steps is None:
            top = 2 * math.log(2 * (self.spec.levels - 1)) if self.spec.levels else 12.0
            reach = schedule.log_snr(torch.tensor([first], dtype=torch.float64))
            first = float(schedule.time_of(torch.minimum(reach, torch.tensor([top], dtype=torch.float64)))[0])
        return torch.linspace(first, 1.0, steps, dtype=torch.float64)

    def log_likelihood(
        self,
        batch: Batch,
        *,
        weights: str | float = "ema",
        seed: int = 0,
        draws: int | None = None,
        replicates: int = 2,
        rows: int = 1024,
    ) -> Likelihood:
        """The lower bound on the log-likelihood, over all terms or over `draws` stratified ones.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of the noise, which is keyed by (seed, item, term).
            draws: number of strata of 1..K, one term drawn from each; None for all K terms.
            replicates: independent repetitions of the stratified estimate (>= 2), for its standard error.
            rows: most rows in one call of the network.
        """
        if draws is not None and not 1 <= draws < self.num_steps:
            raise ValueError(f"draws must lie in 1..{self.num_steps - 1}, the terms of the bound, got {draws}")
        x0 = self.encode(batch.x)
        index = torch.arange(len(batch), device=x0.device) if batch.index is None else batch.index
        core = self.weights(weights)
        mode = {"mode": "all"} if draws is None else {"mode": "stratified", "draws": draws, "replicates": replicates}
        times = self.bound_times().to(x0.device)
        with torch.no_grad():
            out = elbo(
                core, x0, self.decoder, times, KeyedGenerator(seed, index, "elbo"),
                cond=self._cond(batch), variance=self.variance, chunk=rows, **mode,
            )
        volume = 0.0 if self.spec.levels is not None else float(self.scale.double().log().sum())
        made = {"estimate": "bound, all terms" if draws is None else "bound, stratified terms", "terms": len(times) - 1}
        if draws is not None:
            made |= {"draws": draws, "replicates": replicates}
        made |= {"variance": self.variance, "weights": str(weights), "seed": seed}
        return Likelihood(
            out.nats - volume, "lower_bound", self.spec.dims, self.spec.levels, out.stderr, made, index,
            parts={"prior": out.prior, "diffusion": out.diffusion.sum(1), "reconstruction": out.reconstruction},
            profile=self._profile(times, out.diffusion),
        )

    def _profile(self, times: Tensor, diffusion: Tensor, most: int = 40) -> Profile:
        """The terms summed over neighbours into at most `most` bins, whose edges are log-SNRs of the grid."""
        bins, terms = min(most, diffusion.shape[1]), diffusion.shape[1]
        cuts = torch.arange(bins + 1) * terms // bins
        nats = torch.stack([part.sum() for part in diffusion.sum(0).split(cuts.diff().tolist())])
        edges = self.core.schedule.log_snr(times)[cuts * (len(times) - 1) // terms]
        return Profile(edges.double(), nats, len(diffusion))

    def validation_options(self) -> dict:
        """A stratified bound: eight terms, twice."""
        return {"draws": min(8, self.num_steps - 1)}

    def sample(
        self,
        n: int,
        cond: int | str | list | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        start: int = 0,
        sampler: Literal["ddpm", "ddim", "dpmpp_2m"] = "dpmpp_2m",
        steps: int | None = None,
        spacing: str | None = None,
        eta: float = 0.0,
        clip: bool | None = None,
        weights: str | float = "ema",
        path: int = 0,
        size: list[int] | tuple[int, ...] | None = None,
        progress=None,
    ) -> Samples:
        """Samples `start` .. `start + n - 1` of a seed.

        Arguments:
            n: how many.
            cond: class, classes (cycled), or None for every class in turn.
            temperature: scale of all noise, 1 for the model's own distribution.
            seed: sample k of a seed depends on (seed, k) alone.
            start: number of the first sample.
            sampler: `ddpm` (ancestral), `ddim`, or `dpmpp_2m`.
            steps: network evaluations; default T for `ddpm`, 50 for `ddim`, 20 for `dpmpp_2m`.
            spacing: how the times are spaced; default integer steps for `ddpm`, `ddim`; uniform in log-SNR else.
            eta: share of ancestral noise in `ddim`.
            clip: clip the estimate of the data to its range at every step; default yes for integers.
            weights: `ema`, `raw`, or one of the decays kept.
            path: number of frames of the way from noise to data to keep, 0 for none.
            size: height and width, or length, where it is not that of the data; the channels stay.
            progress: called after every step with the number of steps done and their total.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
        if steps is None:
            steps = min(self.num_steps, {"ddpm": self.num_steps, "ddim": 50}.get(sampler, 20))
        if not 1 <= steps <= self.num_steps:
            raise ValueError(f"steps must lie in 1..{self.num_steps} (T of this model), got {steps}")
        clip = self.spec.levels is not None if clip is None else clip
        index = torch.arange(start, start + n, device=self.device)
        core = self.weights(weights)
        labels = self.labels(cond, index)
        times = self.sampling_times(sampler, steps, spacing).to(self.device)
        stepper = SAMPLERS[sampler](clip=clip, **self._sampler_options(sampler, eta))
        wanted = set(torch.linspace(0, steps - 1, min(path, steps)).round().int().tolist()) if path else set()
        frames: list[Tensor] = []

        def after(done: int, x: Tensor, x0: Tensor) -> None:
            if done in wanted:
                frames.append(self.decode(x))
            if progress is not None:
                progress(done + 1, steps)

        with torch.no_grad():
            out = run_sampler(
                core, (n, *self._shape_of(size)), times, stepper, KeyedGenerator(seed, index, "sample"),
                cond=labels, temperature=temperature, dtype=self.location.dtype, device=self.device, callback=after,
            )
        made = {"sampler": sampler, "steps": steps, "evaluations": out.evaluations, "seed": seed}
        made |= {"weights": str(weights), "temperature": temperature, "clip": clip}
        made |= {"eta": eta} if sampler == "ddim" else {}
        frames = torch.stack(frames) if frames else None
        return Samples(self.decode(out.x), labels, index, made, frames)

    def _shape_of(self, size: list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
        """The shape of events of such a size."""
        channels, *space = self.spec.event_shape
        if size is None or list(size) == space:
            return self.spec.event_shape
        if not space or len(size) != len(space) or min(size) < 1:
            like = "samples of vectors have no size" if not space else f"size has {len(space)} numbers of at least 1"
            raise ValueError(f"{like}, got {list(size)}")
        if self.spec.levels is None:
            raise ValueError(
                f"continuous data are standardised place by place: their size is {space}, not {list(size)}"
            )
        return channels, *size

    def _sampler_options(self, sampler: str, eta: float) -> dict:
        return {"ddpm": {"variance": self.variance}, "ddim": {"eta": eta}}.get(sampler, {})

    def sampling_times(self, sampler: str, steps: int, spacing: str | None) -> Tensor:
        """The decreasing times of a sampler, (steps + 1,), ending at the clean end."""
        name = spacing or ("integer_trailing" if sampler in ("ddpm", "ddim") else "uniform_log_snr")
        if name not in SPACINGS:
            raise ValueError(f"spacing must be one of {', '.join(SPACINGS)}, got {name!r}")
        return SPACINGS[name](self.core.schedule, steps, self.num_steps)
