"""What all normalizing flows share: exact likelihoods, dequantised integers, sampling by the inverse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.data import Batch, DataSpec, Latents, require_continuous
from genmodels.core.errors import InputError, at_least, check_number, one_of, only_for, require_finite_rows
from genmodels.core.likelihood import Likelihood, check_importance_samples
from genmodels.core.processes import rank_world
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.core.tensors import hide
from genmodels.data.base import DataModule, spread_rows
from genmodels.flows.bases import BASES
from genmodels.flows.bijection import Bijection, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling_flows import dequantisation_flow
from genmodels.flows.dequantize import OfLevel, UniformDequantize, VariationalDequantize
from genmodels.flows.discrete import ContinuousFlow, DiscreteFlow, NoisyFlow
from genmodels.flows.flow import Flow, frames_together
from genmodels.flows.linear import Whitening
from genmodels.flows.replay import Health, examine
from genmodels.flows.scaling import Logit, Shift, Standardise, channel_moments
from genmodels.flows.squeeze import Flatten, Squeeze2d, require_division
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.mels import frames_of, silent_beyond, with_noise
from genmodels.models.optimizer import Optimizer
from genmodels.nn.condition import Condition

#: Scalars that the first forward pass of an initialisation may hold; more would only fill the memory.
_INITIAL_SCALARS = 2_000_000
_DRIFT = 1e-3  # round-trip error of a layer that is worth a warning


class FlowModel(GenerativeModel):
    """A normalizing flow: an invertible map to a simple distribution, trained by its exact likelihood.

        log p(x) = log N(f(x)) + log |det df/dx|                                  continuous data, exact
        log p(x) >= E_q(u|x) [log p((x + u) / L) - D log L - log q(u|x)]          integers 0..L-1, a lower bound

    Integers are dequantised, then mapped by a logit or only centred; continuous data are standardised. These maps are
    part of the model, and their volume is part of the likelihood. A subclass builds its bijection and calls `assemble`.

    Arguments:
        spec: the data set this model is built for.
        class_conditional: condition on the class; only for data with labels.
        dequantisation: noise that fills the gaps between integers: `uniform`, or learned: for each `level` a location
            and a width, which costs nothing, or by a flow that sees all of the item (`variational`).
        preprocess: map of dequantised integers: `logit`, or `centre`, which subtracts 1/2.
        alpha: the logit's margin: y = alpha + (1 - 2 alpha) v.
        whiten: side of the squares of an image whose numbers are decorrelated first, by a learned matrix that starts
            from their covariance; 1 for the channels of every position (the numbers of a vector), 0 for nothing.
        base: distribution of the latents: `normal`, `diagonal` (learned scales), or `class` (one Gaussian a class; it
            needs class_conditional=true).
        memory: `store` activations for the backward pass, or recompute them through the `inverse`.
        noise: width of the noise on mels, in log units, without which they have no density; other data have none.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.
    """

    tolerates_tf32 = False
    needs_whole_weights = "its layers also use their weights in inverses and log-determinants"
    sampling_options = ("lengths",)
    principal = False  # whether `whiten` maps to principal components, not to numbers close to the pixels

    def __init__(
        self,
        spec: DataSpec,
        *,
        class_conditional: bool = False,
        dequantisation: Literal["uniform", "level", "variational"] = "uniform",
        preprocess: Literal["logit", "centre"] = "logit",
        alpha: float = 0.05,
        whiten: int = 0,
        base: Literal["normal", "diagonal", "class"] = "normal",
        memory: Literal["store", "inverse"] = "store",
        noise: float = 0.05,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters()
        one_of("dequantisation", dequantisation, ("uniform", "level", "variational"))
        one_of("preprocess", preprocess, ("logit", "centre"))
        one_of("base", base, ("normal", "diagonal", "class"))
        if class_conditional and spec.num_classes is None:
            raise ValueError(f"class_conditional=true needs labels, and {spec.name} has none: leave it out")
        if base == "class" and not (class_conditional and spec.num_classes):
            raise ValueError("base=class needs data with classes and class_conditional=true")
        self.conditional = class_conditional and spec.num_classes is not None
        at_least(0, whiten=whiten)
        if whiten > 1 and len(spec.event_shape) != 3:
            raise ValueError(f"whiten={whiten} is the side of squares of an image, and {spec.name} has none: give 1")
        self.dequantisation, self.preprocess, self.alpha, self.base, self.memory = (
            dequantisation, preprocess, alpha, base, memory)
        self.whiten = whiten
        check_number("noise", noise, 0)
        if noise not in (0, 0.05) and spec.mel is None:
            raise ValueError(f"noise={noise} is for mels, and {spec.name} has none")
        of_integers = {f"dequantisation={dequantisation}": dequantisation != "uniform",
                       f"preprocess={preprocess}": preprocess != "logit", f"alpha={alpha}": alpha != 0.05}  # fmt: skip
        for given, changed in of_integers.items():
            if changed and spec.levels is None:
                raise ValueError(f"{given} is for integers, and {spec.name} has real numbers")
        if preprocess == "centre":
            only_for("preprocess=logit", alpha=(alpha, 0.05))
        self.noise = noise if spec.mel is not None else 0.0
        self._probe: Batch | None = None

    @property
    def condition(self) -> Condition | None:
        """The condition of the flow's networks."""
        return Condition("labels", self.spec.num_classes) if self.conditional else None

    def _cond(self, batch: Batch) -> Tensor | None:
        return self._or_null(super()._cond(batch), len(batch))

    def _or_null(self, cond: Tensor | None, n: int) -> Tensor | None:
        """The classes; where there are none, the null class of a model that has it."""
        missing = cond is None and self.has_null_class
        return torch.full((n,), self.num_classes, device=self.device) if missing else cond

    def assemble(self, bijection: Bijection) -> None:
        """Compose preprocessing, bijection and base; called last in a subclass' constructor."""
        shape, levels = self.spec.event_shape, self.spec.levels
        if levels is None:
            first: Bijection = Standardise(shape)
        else:
            first = Logit(self.alpha) if self.preprocess == "logit" else Shift(-0.5)
        whole = Compose([first, *self._whitening(), bijection], shape)
        classes = {"num_classes": self.spec.num_classes} if self.base == "class" else {}
        self.core = self.around(Flow(whole, BASES[self.base](whole.shape_after, **classes)))
        self.finish_setup(self.hparams["optimizer"], self.hparams["ema_decay"])

    def _whitening(self) -> list[Bijection]:
        """The layers that decorrelate the numbers of squares; they keep the shape of an image."""
        side, shape = self.whiten, self.spec.event_shape
        if not side:
            return []
        require_division(side, shape, "whiten")
        squares = [Squeeze2d(side)] if side > 1 else []
        return [*squares, Whitening(shape[0] * side**2, principal=self.principal), *map(Inverse, squares)]

    def around(self, flow: Flow) -> ContinuousFlow | DiscreteFlow:
        """The flow as a model of the data: with dequantisation for integers, as it is for continuous data."""
        levels = self.spec.levels
        if levels is None:
            return ContinuousFlow(flow)
        if self.dequantisation == "uniform":
            return DiscreteFlow(UniformDequantize(levels), flow)
        level = self.dequantisation == "level"
        noise = OfLevel(levels) if level else dequantisation_flow(self.spec.event_shape)
        return DiscreteFlow(VariationalDequantize(levels, noise), flow)

    def assemble_flat(self, bijection: Bijection) -> None:
        """As `assemble`, with a bijection of vectors, to which images are flattened.

        Raises:
            ValueError: for sequences, whose lengths differ.
        """
        shape = self.spec.event_shape
        if len(shape) == 2:
            raise ValueError(f"{self.family} takes vectors and images, not events of shape {shape}: use model=glow")
        self.assemble(bijection if len(shape) == 1 else Compose([Flatten(shape), bijection], shape))

    def _dims(self, batch: Batch) -> Tensor:
        """(B,) valid dimensions of masked sequences."""
        return batch.mask.flatten(1).sum(1) * self.spec.event_shape[0]

    def check_items(self, data: DataModule) -> None:
        """Raise InputError for mels whose lengths are not multiples of the frames that the flow takes together."""
        group, multiple = frames_together(self.core.flow.bijection), getattr(data, "multiple", None)
        if multiple is not None and multiple % group:
            raise InputError(f"data.multiple={multiple}: this flow takes {group} frames together, give data.multiple="
                             f"{group}")

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """Data-dependent initialisation of every layer that has one, in order; averages start from the same weights.

        Errors: NotFinite for such a value; InputError for constant columns and too few items; RuntimeError when called
        a second time.
        """
        require_finite_rows(hide(batch.x, batch.mask))
        rows = max(2, self._rows_to_whiten(len(batch)), min(len(batch), _INITIAL_SCALARS // self.spec.dims))
        chosen = spread_rows(len(batch), rows)
        part = self._with_noise(batch.rows(chosen), KeyedGenerator(self.seed, chosen, "initialize"))
        if self.spec.levels is None:
            self._refuse_constants(batch)
            self._warn_of_degenerate_data(batch)
        noise = KeyedGenerator(self.seed, chosen, "initialize")
        self.core.initialize(part.x, self._cond(part), part.mask, generator=noise)
        for average in self.cores()[1:]:
            average.load_state_dict(self.core.state_dict())

    def _rows_to_whiten(self, rows: int) -> int:
        """The number of items that the covariance of `whiten` needs at least; 0 without it.

        Raises:
            InputError: for fewer items.
        """
        layer = next((part for part in self.core.modules() if isinstance(part, Whitening)), None)
        if layer is None:
            return 0
        fewest = math.ceil(layer.fewest * layer.channels / self.spec.dims)
        if rows < fewest:
            raise InputError(f"whiten={self.whiten} takes the covariance of {layer.channels} numbers from at least "
                             f"{fewest} items, and {self.spec.name} has {rows}: give a smaller whiten, or 0")
        return fewest

    def _refuse_constants(self, batch: Batch) -> None:
        """Raise InputError for a constant column, whose density would grow without bound."""
        _, mean, std = channel_moments(batch.x, batch.mask)
        constant = std <= 1e-6 * mean.abs()
        if bool(constant.any()):
            kind = "column" if len(self.spec.event_shape) == 1 else "channel"
            name = self.spec.column(int(constant.nonzero()[0, 0]))
            raise InputError(f"{kind} {name} of {self.spec.name} is constant (its standard deviation is below a "
                             "millionth of its mean) and has no density: leave it out")

    def _warn_of_degenerate_data(self, batch: Batch) -> None:
        """Print a warning for vectors with repeated or dependent columns, whose likelihood has no upper bound."""
        if len(self.spec.event_shape) != 1 or rank_world()[0] > 0:
            return
        try:
            require_continuous(batch.x, self.spec.names_of_columns)
        except InputError as error:
            fault = str(error).split(":")[0]
            print(f"{self.spec.name}: {fault}. Such data have no density: a flow can raise their likelihood without "
                  "bound, and its value means little")

    def compiled_parts(self) -> list[torch.nn.Module]:
        """The modules for torch.compile: the density (map and base), without dequantisation."""
        return [self.core.flow]

    def _with_noise(self, batch: Batch, generator: KeyedGenerator) -> Batch:
        """Mels with their noise; other data unchanged."""
        return replace(batch, x=with_noise(batch.x, self.noise, generator))

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Bits/dim of one dequantisation for integers; nats for continuous data, for sequences per dimension."""
        batch = self._with_noise(batch, generator)
        nats, _ = self.core.log_prob(batch.x, self._cond(batch), batch.mask, generator=generator)
        dims = self._dims(batch) if batch.mask is not None else 1 if self.spec.levels is None else self.spec.dims
        per_example = -nats / (dims * (1 if self.spec.levels is None else math.log(2)))
        return Loss(per_example.mean(), per_example)

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, importance_samples: int = 1,
        rows: int | None = None,
    ) -> Likelihood:
        """The exact log-likelihood of continuous data, or the lower bound on the log-mass of integers.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            importance_samples: K dequantisations of each item; the lower bound rises with K to the exact value.
            rows: most rows in one pass through the flow; 128 on the CPU, 1024 elsewhere for None.
        """
        if rows is None:  # on a CPU, tensors above 32 MiB cost page faults at every allocation
            rows = 128 if batch.x.device.type == "cpu" else 1024
        check_importance_samples(importance_samples, self.spec)
        core = self.weights(weights)
        index = batch.item_index
        noise = KeyedGenerator(seed, index, "dequantise")
        batch = self._with_noise(batch, KeyedGenerator(seed, index, "likelihood"))
        x = batch.x
        if x.is_floating_point():
            x = x.to(next((p.dtype for p in self.core.parameters()), x.dtype))
        with torch.no_grad():
            nats, stderr = core.log_prob(
                x, self._cond(batch), batch.mask, generator=noise, samples=importance_samples, rows=rows)
        made: dict = {"estimate": "density"} if self.spec.levels is None else {
            "estimate": "importance-weighted bound", "importance_samples": importance_samples,
            "dequantisation": self.dequantisation, "seed": seed,
        }
        made |= self._given(batch, weights)
        made |= {"noise": self.noise} if self.noise else {}
        dims = self.spec.dims if batch.mask is None else self._dims(batch)
        return Likelihood(nats, core.kind, dims, self.spec.levels, stderr, made, index)

    def draw(self, options: SamplingOptions) -> Samples:
        """Samples by the inverse; the temperature is a factor on the standard deviation of the latents at every level,
        0 for the mode. Sequences are silent beyond `lengths`.
        """
        return self._sample(options, self.labels(options.cond, self.numbered(options.n, options.start)))

    def _sample(self, options: SamplingOptions, labels: Tensor | None) -> Samples:
        index, temperature = self.numbered(options.n, options.start), options.temperature
        noise = KeyedGenerator(options.seed, index, "sample")
        mask = frames_of(options.lengths, index, self.spec)
        group = frames_together(self.core.flow.bijection)
        for length in () if mask is None else mask.flatten(1).sum(1).tolist():
            if length % group:
                raise InputError(f"lengths must be multiples of {group} frames, which this flow takes together, got "
                                 f"{length}")
        with torch.no_grad():
            core, outside = self.weights(options.weights), None
            if self.spec.levels is None:
                x = core.sample(options.n, labels, temperature=temperature, generator=noise, mask=mask)
            else:
                v = core.points(options.n, labels, temperature=temperature, generator=noise, mask=mask)
                x, outside = core.quantise(v), core.dequantize.outside(v, mask)
        made = {"sampler": "inverse", "seed": options.seed, "weights": str(options.weights), "temperature": temperature}
        return Samples(silent_beyond(x, mask, self.spec), labels, index, made, mask=mask, outside=outside)

    @torch.no_grad()
    def latents(self, batch: Batch, weights: str | float = "ema") -> Latents:
        """The latents of data at every scale, fine to coarse; integers are taken at the median of their noise."""
        core, cond = self.weights(weights), self._cond(batch)
        return core.flow.latents(core.centre(batch.x, batch.mask), cond, batch.mask)

    @torch.no_grad()
    def from_latents(
        self, latents: Latents, cond: Tensor | None = None, weights: str | float = "ema", mask: Tensor | None = None
    ) -> Tensor:
        """The data of latents, in the data's own units; the inverse of `latents`, where `mask` was that of the data.

        Sequences are silent where the mask is False, as samples are.
        """
        core, cond = self.weights(weights), self._or_null(cond, len(latents[0]))
        v = core.flow.from_latents(latents, cond, mask)
        x = core.quantise(core.denoise(v, cond, mask) if isinstance(core, NoisyFlow) else v)
        return silent_beyond(x, mask, self.spec)

    # ---- the invertibility monitor ------------------------------------------------------------------------------

    def examine(self, batch: Batch, weights: str | float = "raw") -> Health:
        """The health of every layer on a batch: round-trip errors, scales, condition numbers."""
        core, cond = self.weights(weights), self._cond(batch)
        return examine(core.flow.bijection, core.centre(batch.x, batch.mask), cond, batch.mask)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The likelihood of the batch; a few items of the first one are kept for the monitor."""
        super().validation_step(batch, batch_idx)
        if batch_idx == 0:
            self._probe = batch.rows(slice(0, max(1, 16 // rank_world()[1])))  # 16 over all processes

    def on_validation_epoch_end(self) -> None:
        """Log the likelihood and the monitor's figures; name the first layer with a large round-trip error."""
        super().on_validation_epoch_end()
        health = self.examine(self._probe)
        self._probe = None
        for name, value in health.figures().items():
            extreme = "min" if name == "smallest_singular_value" else "max"
            self.log(f"monitor/{name}", value, sync_dist=rank_world()[1] > 1, reduce_fx=extreme)
        drifting = health.first_drifting(_DRIFT)
        if drifting is not None:
            scale = "" if drifting.log_scale is None else f", largest log-scale {drifting.log_scale:.1f}"
            self.print(
                f"step {self.trainer.global_step}: layer {drifting.name} ({drifting.kind}) is the first that does not "
                f"invert: round-trip error {drifting.drift:.1e}{scale}. Try a lower model.optimizer.lr"
            )
