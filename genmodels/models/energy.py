"""Energy-based models trained by score matching: unnormalised densities."""

from __future__ import annotations

from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, at_least, one_of
from genmodels.core.likelihood import Likelihood, check_importance_samples, log_mean_exp
from genmodels.core.processes import rank_world
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions, Trajectory
from genmodels.core.tensors import outside_inference
from genmodels.data.base import spread_rows
from genmodels.energy import (
    LOSSES,
    ContrastiveDivergence,
    DeepKernel,
    DeepKernelLoss,
    DenoisingScoreMatching,
    Energy,
    ExactScoreMatching,
    FiniteDifferenceScoreMatching,
    LogDensity,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
    require_continuous,
)
from genmodels.models.base import Loss
from genmodels.models.build import construct
from genmodels.models.density import has_gaps
from genmodels.models.energy_sampling import (
    SAMPLERS,
    Normaliser,
    Sampler,
    base_of,
    by_annealing,
    by_quadrature,
    check_tempering,
    unit_covariance,
)
from genmodels.models.optimizer import Optimizer
from genmodels.models.score_matching import MOST_PAIRS, Encoding, ScoreMatched, covariance_of
from genmodels.nn.energy_nets import DeepKernelEnergy, EnergyConv, EnergyMLP, UNetEnergy
from genmodels.plots.images import picture_of_fields

NETWORKS = {"mlp": EnergyMLP, "conv": EnergyConv, "unet": UNetEnergy, "deep_kernel": DeepKernelEnergy}
_FIT_ROWS = 8192  # training items on which the last weights of a deep kernel are fitted


class EnergyModel(ScoreMatched):
    """An energy-based model: a network gives -log p up to a constant, which score matching does not need.

        p(x) = exp(-E(z)) / Z |det dz/dx|,   s = -grad E,   loss = E[v^T (grad s) v + 1/2 |s|^2]   (`sliced_vr`)

    z is the data after `Encoding`; losses are in units of z. Z is estimated afterwards: by quadrature in one and two
    dimensions, else by annealed importance sampling, with a bracket.

    Arguments:
        spec: the data set this model is built for.
        network: kind of the network; `auto` is `mlp` for vectors, `conv` for images and sequences.
        net: options of the network.
        loss: training loss; `contrastive` (contrastive divergence) is a baseline that is not a score-matching loss.
        objective: options of the loss.
        noise: standard deviation of Gaussian noise that training adds to z; the density of the noisy data is fitted.
        alpha: margin of the logit of dequantised integers.
        whitening: continuous data are standardised (`scale`), or made white (`pca`).
        gaps: fill the gaps of columns that take few values with uniform noise.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> model = EnergyModel(DataSpec("plane", (2,)), net={"hidden": [16, 16]})
        >>> model.initialize(Batch(torch.randn(100, 2, generator=torch.Generator().manual_seed(0))))
        >>> model.sample(3, steps=4).x.shape
        torch.Size([3, 2])
    """

    family = "energy"
    samplers = SAMPLERS
    sampling_options = ("sampler", "steps", "step_size", "inverse_temperature", "path", "progress")

    def __init__(
        self,
        spec: DataSpec,
        *,
        network: Literal["auto", "mlp", "conv", "unet", "deep_kernel"] = "auto",
        net: EnergyMLP | EnergyConv | UNetEnergy | DeepKernelEnergy | dict | None = None,
        loss: Literal["sliced_vr", "sliced", "exact", "finite_difference", "denoising", "contrastive"] = "sliced_vr",
        objective: SlicedScoreMatchingVR | SlicedScoreMatching | ExactScoreMatching | FiniteDifferenceScoreMatching
        | DenoisingScoreMatching | ContrastiveDivergence | dict | None = None,
        noise: float = 0.0,
        alpha: float = 1e-6,
        whitening: Literal["scale", "pca"] = "scale",
        gaps: bool = False,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec, Encoding(spec, alpha=alpha, whitening=whitening, gaps=gaps), noise)
        self.save_hyperparameters()
        if spec.mel is not None:
            raise InputError("model=energy would take the silence that pads mels for data: use model=ddpm, score, "
                             "flow_matching or glow")
        one_of("network", network, ("auto", *NETWORKS))
        one_of("loss", loss, ("contrastive", *LOSSES))
        one_of("whitening", whitening, ("scale", "pca"))
        usual = "mlp" if len(spec.event_shape) == 1 else "conv"
        network = usual if network == "auto" else network
        self.decide(network=network)
        self.kind = network
        try:
            built = construct(NETWORKS[network], spec.event_shape, **(net or {}))
        except InputError as error:
            if network == usual or "has no option" not in str(error):
                raise
            raise InputError(f"{error}; ~preset leaves out what a preset sets for network={usual}") from error
        self.core = DeepKernel(built) if network == "deep_kernel" else Energy(built)
        self.objective = self._objective(loss, objective or {})
        self.register_buffer("mean", torch.zeros(spec.event_shape, dtype=torch.float64))
        self.register_buffer("covariance", unit_covariance(spec.dims))
        rows = (_FIT_ROWS, spec.dims) if network == "deep_kernel" else (0, spec.dims)
        self.register_buffer("fit_rows", torch.zeros(rows))
        self.register_buffer("fit_count", torch.zeros((), dtype=torch.int64))
        self._forget()
        self.finish_setup(optimizer, ema_decay)

    def _objective(self, name: str, options: dict):
        if name == "contrastive":
            if self.kind == "deep_kernel":
                raise ValueError("loss=contrastive is not for deep_kernel, whose last weights a score loss gives")
            return construct(ContrastiveDivergence, self.spec.event_shape, **options)
        found = construct(LOSSES[name], **options)
        return DeepKernelLoss(loss=found) if self.kind == "deep_kernel" else found

    def _forget(self) -> None:
        """Drop what was cached for former weights."""
        self._fitted: dict = {}
        self._normalisers: dict = {}
        self._samplers: dict = {}

    # ---- data ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """Scale, mean and covariance of training data; data on which score matching diverges are refused."""
        noise = KeyedGenerator(self.seed, torch.arange(len(batch)), "initialize")
        self.encoding.fit(batch.x, noise)
        z = self.points(batch.x, noise)
        if self.spec.levels is None and self.spec.dims <= MOST_PAIRS:
            try:
                require_continuous(z, self.spec.names_of_columns)
            except InputError as error:
                raise InputError(f"{self.spec.name}: {error} (model.gaps=true, or model.noise=0.05)") from error
        self.mean.copy_(z.double().mean(0))
        self.covariance.copy_(covariance_of(z))
        if self.kind == "deep_kernel":
            self._take_points(z)
        self._forget()

    def _take_points(self, z: Tensor) -> None:
        """Choose the inducing points and the rows for fitting the last weights, spread evenly over the data."""
        chosen = spread_rows(len(z), min(len(z), _FIT_ROWS))
        self.fit_rows[: len(chosen)] = z[chosen]
        self.fit_count.fill_(len(chosen))
        inducing = len(self.core.network.points)
        if len(z) < inducing:
            raise InputError(f"net.inducing={inducing} is more than the {len(z)} training items: set "
                             f"model.net.inducing={len(z)} or less")
        for core in self.cores():
            core.network.set_points(z[spread_rows(len(z), inducing)])

    # ---- training -----------------------------------------------------------------------------------------------

    def weights(self, which: str | float = "ema") -> nn.Module:
        """The core with averaged or raw weights; the last weights of a deep kernel are fitted at their first use."""
        core = super().weights(which)
        if self.kind == "deep_kernel" and self._fitted.get(which) != self._state_of(core):
            rows = self.fit_rows[: int(self.fit_count)]
            noise = KeyedGenerator(self.seed, torch.arange(len(rows), device=rows.device), "fit")
            core.fit(rows, self.objective.loss, noise)
            self._fitted[which] = self._state_of(core)
        return core

    def _state_of(self, core: nn.Module) -> tuple[int, int]:
        """A value that changes with every change of the weights, by training or in place."""
        return self.batches_seen, sum(0 if p.is_inference() else p._version for p in core.parameters())

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The loss in units of z; a deep kernel is evaluated on the second half of the batch."""
        z = self.points(batch.x, generator)
        per_example = self.objective(self.core, z, generator.child("loss"))
        value = per_example.mean()
        if rank_world()[1] > 1:
            # No score depends on the last bias, but processes wait for the gradient of every parameter.
            value = value + 0 * sum(p.sum() for p in self.core.parameters())
        return Loss(value, per_example)

    def on_fit_start(self) -> None:
        """Refuse contrastive divergence on several processes."""
        if isinstance(self.objective, ContrastiveDivergence) and self.trainer.world_size > 1:
            raise InputError("loss=contrastive keeps one buffer of chains: train it on one process, trainer.devices=1")

    def energies(self, z: Tensor) -> Tensor | None:
        """(B,) energies for the divergence guard; None for a deep kernel, whose last weights are fitted later."""
        return None if self.kind == "deep_kernel" else self.core.energy(z)

    # ---- likelihood ---------------------------------------------------------------------------------------------

    @outside_inference()
    def normaliser(
        self, weights: str | float = "ema", seed: int = 0, method: str = "auto", chains: int = 256, steps: int = 1000
    ) -> Normaliser:
        """log Z in units of z, computed once for the same weights and options."""
        one_of("normaliser", method, ("auto", "quadrature", "ais", "none"))
        core = self.weights(weights)
        if method == "auto":
            method = "quadrature" if self.spec.dims <= 2 else "ais"
        if method == "none":
            return Normaliser.missing("a normaliser was not asked for")
        if core.network.confinement is None:
            return Normaliser.missing("without confinement exp(-E) may have no finite integral")
        if method == "quadrature" and self.spec.dims > 2:
            raise InputError(f"normaliser=quadrature is for one or two dimensions, not {self.spec.dims}: use ais")
        key = (weights, method, self._state_of(core), *((seed, chains, steps) if method == "ais" else ()))
        if key not in self._normalisers:
            if method == "quadrature":
                found = by_quadrature(core, self.spec.event_shape)
            else:
                noise = KeyedGenerator(seed, torch.arange(chains, device=self.device), "ais")
                base = base_of(self.mean, self.covariance)
                found = by_annealing(core, base, noise, chains=chains, steps=steps)
            self._normalisers = {key: found}
        return self._normalisers[key]

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, importance_samples: int = 1,
        normaliser: Literal["auto", "quadrature", "ais", "none"] = "auto", chains: int = 256, densities: int = 1000,
        rows: int = 1024,
    ) -> Likelihood:
        """The log-density of continuous data, or a lower bound on the log-mass of integers, up to the error of log Z.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            importance_samples: K dequantisations of each item; the lower bound rises with K.
            normaliser: estimate of log Z; `auto` is quadrature in one and two dimensions, else annealed importance
                sampling; `none` gives the energy alone, which cannot be compared.
            chains: number of chains of annealed importance sampling.
            densities: number of densities between its base and the model.
            rows: most rows in one pass through the network.
        """
        at_least(1, importance_samples=importance_samples, chains=chains, densities=densities)
        if not has_gaps(self):
            check_importance_samples(importance_samples, self.spec)
        core, found = self.weights(weights), self.normaliser(weights, seed, normaliser, chains, densities)
        index = batch.item_index
        noise = KeyedGenerator(seed, index, "dequantise")
        draws = []
        with torch.no_grad():
            for k in range(importance_samples):
                z, volume = self.encoding(batch.x, noise.at(k))
                values = torch.cat([core.log_density(some).double() for some in z.split(rows)])
                draws.append(values + volume.double() - found.log_z)
        nats, stderr = log_mean_exp(torch.stack(draws, 1))
        made = dict(found.made)
        if (gaps := has_gaps(self)) or self.spec.levels is not None:
            made |= {"importance_samples": importance_samples, "dequantisation": "uniform" + " within gaps" * gaps}
        made |= {"weights": str(weights), "seed": seed}
        kind = "lower_bound" if found.kind == "exact" and "dequantisation" in made else found.kind
        # All items share the error of log Z: it is in `made`, since a mean over items does not reduce it.
        return Likelihood(nats, kind, self.spec.dims, self.spec.levels, stderr, made, index)

    # ---- samples ------------------------------------------------------------------------------------------------

    @outside_inference()
    def draw(self, options: SamplingOptions) -> Samples:
        """Samples, the ends of independent chains.

        `sampler` is `annealed` (the default), from a broad Gaussian to the model by HMC moves, or `hmc`, `mala`, `ula`
        at the model, with half of their steps as warm-up. `steps` are intermediate densities, or moves: 100 (annealed),
        200 (hmc), 1000 (mala, ula).
        """
        options = options.with_default(sampler="annealed")
        check_tempering(options.inverse_temperature, options.temperature)
        index = self.numbered(options.n, options.start)
        self.labels(options.cond, torch.zeros(1, dtype=torch.int64))
        own = {"steps": options.steps, "step_size": options.step_size,
               "inverse_temperature": options.inverse_temperature}
        core = self.weights(options.weights)
        key = (options.weights, self._state_of(core), options.seed, options.sampler, *own.values())
        if key not in self._samplers:
            base = base_of(self.mean, self.covariance)
            self._samplers = {key: Sampler(core, base, name=options.sampler, **own)}
        chosen = self._samplers[key]
        seen = Trajectory(options.path, chosen.steps, options.progress)
        noise = KeyedGenerator(options.seed, index, "sample")
        z, found = chosen(options.n, noise, lambda done, z: seen(done, lambda: self._decode(z)))
        made = {"sampler": options.sampler, "steps": chosen.steps, "seed": options.seed,
                "weights": str(options.weights), "inverse_temperature": options.inverse_temperature, **found}
        with torch.no_grad():
            outside = self.encoding.outside(z.to(self.encoding.scale.dtype))
        return Samples(self._decode(z), None, index, made, seen.kept, outside=outside)

    def _decode(self, z: Tensor) -> Tensor:
        with torch.no_grad():
            return self.encoding.decode(z.to(self.encoding.scale.dtype))

    def pictures(self) -> dict[str, Image.Image]:
        """In the plane: the learned density and score, and the exact ones where they are known."""
        if self.spec.event_shape != (2,) or self.spec.levels is not None or self.core.network.confinement is None:
            return {}
        core, log_z = self.weights(), self.normaliser().log_z

        def log_density(x: Tensor) -> Tensor:
            unused = KeyedGenerator(0, torch.zeros(len(x), dtype=torch.int64, device=x.device), "no noise")
            z, volume = self.encoding(x, unused)
            return core.log_density(z) - log_z + volume

        def shown(x: Tensor) -> Tensor:
            with torch.no_grad():
                return log_density(x.to(self.device)).cpu()

        def score(x: Tensor) -> Tensor:
            return LogDensity(log_density, second_derivatives=False).score(x.to(self.device)).cpu()

        where = self.encoding.location.cpu(), self.encoding.scale.cpu()
        return {"fields": picture_of_fields(self.spec, score, shown, *where)}
