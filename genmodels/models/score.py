"""Noise-conditional score models (Song and Ermon 2019): the scores of the data at every noise level, by one network."""

from __future__ import annotations

from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from genmodels.data.base import spread_rows
from genmodels.data.spec import Batch, DataSpec
from genmodels.energy import MultiScaleDenoising, NoiseConditionalScore, largest_distance, noise_levels
from genmodels.errors import InputError
from genmodels.evaluation.fields import picture_of_fields
from genmodels.evaluation.likelihood import Likelihood
from genmodels.flows.boundary import one_of
from genmodels.models.base import GenerativeModel, Loss, Samples, gather
from genmodels.models.build import construct
from genmodels.models.chains import check_tempering
from genmodels.models.encoding import Encoding
from genmodels.models.levels import SAMPLERS, walk_levels
from genmodels.models.optimizer import Optimizer
from genmodels.models.path import Path
from genmodels.models.score_ode import ScoreOde
from genmodels.nn import MLPDenoiser, UNet
from genmodels.nn.noise_conditional import NoiseConditionalNet
from genmodels.random import KeyedGenerator

_ITEMS = 4096  # items among which the largest distance is sought


class ScoreModel(ScoreOde, GenerativeModel):
    """A noise-conditional score model: denoising score matching at many noise levels, sampled from the largest down.

        s(z, sigma) = f(z / sqrt(1 + sigma^2), log sigma) / sigma
        loss = E 1/2 sigma^2 |s(z + sigma n, sigma) + n/sigma|^2

    z is the data in the unit range (integers, dequantised) or standardised. The levels fall geometrically from the
    largest distance between two items. The field need not be the gradient of anything: there is no energy, and the
    only likelihood is that of its probability-flow ODE (`ode_likelihood`).

    Arguments:
        spec: the data set this model is built for.
        smallest: the smallest noise level.
        ratio: most by which neighbouring levels differ.
        levels: whether a step draws `one` level for each item, or computes `all`.
        class_conditional: condition on the class where the data have classes.
        net: options of the network, a U-Net for images and sequences, a residual MLP for vectors.
        whitening: continuous data are standardised (`scale`), or made white (`pca`).
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> model = ScoreModel(DataSpec("digits", (1, 8, 8), levels=17), net={"channels": 8, "multipliers": [1, 2]})
        >>> model.initialize(Batch(torch.randint(0, 17, (16, 1, 8, 8), dtype=torch.uint8)))
        >>> model.sample(2, steps=3).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "score"

    def __init__(
        self,
        spec: DataSpec,
        *,
        smallest: float = 0.01,
        ratio: float = 1.05,
        levels: Literal["one", "all"] = "one",
        class_conditional: bool = True,
        net: UNet | MLPDenoiser | dict | None = None,
        whitening: Literal["scale", "pca"] = "scale",
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        noise_levels(2 * smallest if smallest > 0 else 1.0, smallest, ratio)  # refuses what makes no sense
        self.smallest, self.ratio, self.drawn = smallest, ratio, levels
        self.conditional = class_conditional and spec.num_classes is not None
        network = MLPDenoiser if len(spec.event_shape) == 1 else UNet
        built = construct(network, spec.event_shape, self.num_classes, **(net or {}))
        self.core = NoiseConditionalScore(NoiseConditionalNet(built))
        self.encoding = Encoding(spec, integers="unit", whitening=whitening)
        self.register_buffer("largest", torch.tensor(1.0))
        self.finish_setup(optimizer, ema_decay)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The noise levels of training, from the largest down."""
        return noise_levels(float(self.largest), self.smallest, self.ratio)

    def compiled_parts(self) -> list[nn.Module]:
        """The network alone: noise levels are not worth compiling."""
        return [self.core.network.network]

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """Scale of the data, and the largest distance between two items."""
        noise = KeyedGenerator(self.seed, torch.arange(len(batch)), "initialize")
        self.encoding.fit(batch.x, noise)
        z, _ = self.encoding(batch.x, noise)
        chosen = spread_rows(len(z), min(len(z), _ITEMS))
        largest = largest_distance(z[chosen])
        if largest <= self.smallest:
            raise InputError(f"no two items of {self.spec.name} are further apart than model.smallest={self.smallest}")
        self.largest.fill_(largest)

    def _per_example(self, core: nn.Module, batch: Batch, generator: KeyedGenerator) -> Tensor:
        z, _ = self.encoding(batch.x, generator.child("encode"))
        objective = MultiScaleDenoising(sigmas=self.sigmas, levels=self.drawn)
        return objective(core, z, generator.child("loss"), self._cond(batch))

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The denoising loss per scalar, half a mean square: 1/2 at the start, where the network is zero."""
        per_example = self._per_example(self.core, batch, generator) / self.spec.dims
        return Loss(per_example.mean(), per_example)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The same loss of a validation batch under the averaged weights, its noise keyed by item."""
        noise = KeyedGenerator(self.seed, batch.index, "validate")
        with torch.no_grad():
            # Several levels for each item: one alone would make the figure jump from run to run.
            values = [self._per_example(self.weights(), batch, noise.at(k)) for k in range(4)]
        self._pending.append(torch.stack(values).mean(0).cpu() / self.spec.dims)

    def on_validation_epoch_end(self) -> None:
        """Log the figure that checkpoints are chosen by."""
        value = float(torch.cat(gather(self._pending)).double().mean())
        self._pending = []
        self.log("val/denoising", value, rank_zero_only=False)
        self.figures["val/denoising"] = value

    # ---- the contract -------------------------------------------------------------------------------------------

    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """None: a field of scores has no energy whose integral could be taken; `ode_likelihood` goes another way.

        Arguments:
            batch: items in the data's own units.
            weights, seed: as for every model; they change nothing.
        """
        reason = "a field of scores has no energy (ode=true follows its probability flow)"
        made = {"estimate": "none", "reason": reason, "weights": str(weights)}
        nats = torch.full((len(batch),), float("nan"), dtype=torch.float64, device=batch.x.device)
        return Likelihood(nats, "unnormalised", self.spec.dims, self.spec.levels, None, made, batch.item_index)

    def sample(
        self,
        n: int,
        cond: int | str | list | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        start: int = 0,
        sampler: Literal["predictor_corrector", "annealed_langevin"] = "predictor_corrector",
        steps: int | None = None,
        inverse_temperature: float = 1.0,
        weights: str | float = "ema",
        path: int = 0,
        progress=None,
    ) -> Samples:
        """Samples `start` .. `start + n - 1` of a seed.

        Arguments:
            n: how many.
            cond: class, classes (cycled), or None for every class in turn.
            temperature: 1; it is for families whose noise it scales.
            seed: sample k of a seed depends on (seed, k) alone.
            start: number of the first sample.
            sampler: `predictor_corrector` or `annealed_langevin`.
            steps: number of noise levels walked through; default 200 (predictor_corrector), 40 (annealed_langevin, with
                ten Langevin steps at each).
            inverse_temperature: positive factor of the score at every level; `annealed_langevin` then aims at p^beta.
            weights: `ema`, `raw`, or one of the decays kept.
            path: number of frames of the way from noise to data to keep, 0 for none.
            progress: called after every level with the number of levels done and their total.
        """
        index = self.numbered(n, start)
        check_tempering(inverse_temperature, temperature)
        one_of("sampler", sampler, SAMPLERS)
        steps = SAMPLERS[sampler].steps if steps is None else steps
        if steps < 2:
            raise ValueError(f"steps must be at least 2, the number of noise levels, got {steps}")
        labels = self.labels(cond, index)
        seen = Path(path, steps, progress)
        with torch.no_grad():
            z, evaluations = walk_levels(
                self.weights(weights), (n, *self.spec.event_shape), float(self.largest), self.smallest,
                KeyedGenerator(seed, index, "sample"), sampler=sampler, steps=steps,
                inverse_temperature=inverse_temperature, cond=labels, dtype=self.encoding.scale.dtype,
                device=self.device,
                callback=lambda done, z: seen(done, lambda: self.encoding.decode(z)),
            )  # fmt: skip
            x = self.encoding.decode(z)
        made = {"sampler": sampler, "steps": steps, "evaluations": evaluations, "seed": seed}
        made |= {"weights": str(weights), "inverse_temperature": inverse_temperature}
        return Samples(x, labels, index, made, seen.kept)

    def pictures(self) -> dict[str, Image.Image]:
        """In the plane: the field of scores at the smallest noise level, beside the truth where it is known."""
        if self.spec.event_shape != (2,) or self.spec.levels is not None or self.encoding.rotation is not None:
            return {}
        core = self.weights().at(self.smallest)

        def score(x: Tensor) -> Tensor:
            z = (x.to(self.encoding.scale) - self.encoding.location) / self.encoding.scale
            with torch.no_grad():
                return (core.score(z) / self.encoding.scale).cpu()

        where = self.encoding.location.cpu(), self.encoding.scale.cpu()
        return {"fields": picture_of_fields(self.spec, score, None, *where)}
