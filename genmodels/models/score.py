"""Noise-conditional score models (Song and Ermon 2019): the scores of the data at every noise level, by one network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import gather
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions, Trajectory
from genmodels.data.base import spread_rows
from genmodels.diffusion import LinearLogSnrSchedule, OdeLikelihood
from genmodels.diffusion.parameterisation import Prediction
from genmodels.diffusion.path import alpha_sigma, expand
from genmodels.energy import (
    MultiScaleDenoising,
    NoiseConditionalScore,
    annealed_langevin,
    largest_distance,
    noise_levels,
    predictor_corrector,
)
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.build import make_network
from genmodels.models.energy_sampling import check_tempering
from genmodels.models.optimizer import Optimizer
from genmodels.models.score_matching import Encoding
from genmodels.nn import DiT, MLPDenoiser, UNet
from genmodels.plots.images import picture_of_fields


class _LevelSampler(NamedTuple):
    """A sampler: its function, the default number of levels, and its evaluations at each level."""

    function: Callable[..., Tensor]
    steps: int
    evaluations: int


#: Langevin steps at each level of `annealed_langevin`.
_EACH = 10
#: What `sampler=` may be for score models.
SAMPLERS = {
    "predictor_corrector": _LevelSampler(predictor_corrector, 200, 2),
    "annealed_langevin": _LevelSampler(annealed_langevin, 40, _EACH),
}
_FEW = 16  # dimensions up to which the corrector is left out: norms of scores vary too much there


class _Tempered(nn.Module):
    """The scores of p^beta at every level."""

    def __init__(self, model: NoiseConditionalScore, inverse_temperature: float):
        super().__init__()
        self.model, self.inverse_temperature = model, inverse_temperature

    def score_at(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        return self.inverse_temperature * self.model.score_at(x, sigma, cond)


def sample_levels(
    model: NoiseConditionalScore,
    shape: tuple[int, ...],
    largest: float,
    smallest: float,
    generator: KeyedGenerator,
    *,
    sampler: str,
    steps: int,
    inverse_temperature: float = 1.0,
    cond: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    callback: Callable[[int, Tensor], None],
) -> tuple[Tensor, int]:
    """(samples like `shape`, evaluations of the network), by `steps` levels that fall geometrically.

    The last step is to the mean of the clean data given the last point; `callback(number, x)` is called `steps` times.

    Example:
        >>> exact = NoiseConditionalScore(lambda x, sigma, cond=None: (3 - x) / sigma[:, None] ** 2)  # data: 3
        >>> keyed = KeyedGenerator(0, torch.arange(2), "sample")
        >>> x, evaluations = sample_levels(exact, (2, 1), 4.0, 0.1, keyed, sampler="annealed_langevin", steps=5,
        ...                              callback=lambda done, x: None)
        >>> [round(value, 4) for value in x.flatten().tolist()], evaluations
        ([3.0, 3.0], 102)
    """
    walk = SAMPLERS[sampler]
    sigmas = torch.logspace(0, 1, steps, base=smallest / largest, dtype=torch.float64).mul(largest).tolist()
    if sampler == "annealed_langevin":
        options: dict = {"steps_per_level": _EACH}
        evaluations = steps * _EACH + 1
    else:
        corrections = 0 if torch.Size(shape[1:]).numel() <= _FEW else 1
        options = {"corrector_steps": corrections}
        evaluations = (steps - 1) * (1 + corrections) + 1
    z = walk.function(
        _Tempered(model, inverse_temperature), shape, sigmas, generator, denoise=False, cond=cond, dtype=dtype,
        device=device, callback=lambda done, x: callback(done, x) if done < steps - 1 else None, **options,
    )  # fmt: skip
    last = torch.full((len(z),), sigmas[-1], dtype=z.dtype, device=z.device)
    z = z + sigmas[-1] ** 2 * model.score_at(z, last, cond)
    callback(steps - 1, z)
    return z, evaluations * len(z)


class NoiseConditionalNet(nn.Module):
    """The score of data with noise N(0, sigma^2), for every sigma, by a network f conditioned on the noise level.

        s(x, sigma) = f(x / sqrt(1 + sigma^2), log sigma) / sigma

    Dividing by sigma gives f the same scale at all levels, since |score| is about sqrt(D)/sigma; the input is brought
    to unit scale for data of unit scale.

    Arguments:
        network: `(x, log_snr (B,), cond) -> like x`, as `MLPDenoiser` and `UNet`; its log_snr is -2 log sigma.

    Shapes: `x (B, *event)`, `sigma (B,)` positive, `cond` as the network takes it; the result is like `x`.
    Source: Song and Ermon 2019, section 4.2 (division by sigma), and 2020, technique 3.

    Example:
        >>> from genmodels.nn.perceptron import MLPDenoiser
        >>> net = NoiseConditionalNet(MLPDenoiser((2,), hidden=16, depth=1))
        >>> net(torch.randn(3, 2), torch.tensor([0.1, 1.0, 10.0])).shape
        torch.Size([3, 2])
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        if sigma.shape != x.shape[:1]:
            raise ValueError(f"one sigma for each of {len(x)} examples is needed, got shape {tuple(sigma.shape)}")
        sigma = sigma.to(x.dtype)
        scale = sigma.reshape(-1, *(1,) * (x.dim() - 1))
        return self.network(x * torch.rsqrt(1 + scale.square()), -2 * sigma.log(), cond) / scale


class ScoreAsDenoiser(nn.Module):
    """Scores at every noise level as the denoiser of a diffusion that scales its data down.

        y = x / alpha,   sigma_bar = sigma / alpha = exp(-lambda / 2)
        eps = -sigma_bar s(y, sigma_bar),   x0 = y - sigma_bar eps

    Arguments:
        core: the scores.
        largest, smallest: the noise levels sigma_bar it was trained on; the log-SNR is linear in time between them.

    Example:
        >>> exact = NoiseConditionalScore(lambda y, sigma, cond=None: -y / (1 + sigma[:, None] ** 2))  # of N(0, 1)
        >>> denoiser = ScoreAsDenoiser(exact, 50.0, 0.01)
        >>> found = denoiser(torch.tensor([[0.6]]), torch.tensor([0.5]))
        >>> abs(round(float(found.v), 6))  # of unit variance at every level nothing flows
        0.0
    """

    def __init__(self, core: NoiseConditionalScore, largest: float, smallest: float):
        super().__init__()
        self.core = core
        self.schedule = LinearLogSnrSchedule(log_snr_max=-2 * math.log(smallest), log_snr_min=-2 * math.log(largest))

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Prediction:
        log_snr = self.schedule.log_snr(t).to(x.device)
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        y, sigma_bar = x / alpha, torch.exp(-0.5 * log_snr)
        width = next((p.dtype for p in self.core.parameters()), x.dtype)
        score = self.core.score_at(y.to(width), sigma_bar.to(width), cond).to(x.dtype)
        eps = -expand(sigma_bar, x) * score
        x0 = y - expand(sigma_bar, x) * eps
        return Prediction(eps, sigma, x0=lambda: x0, eps=lambda: eps, v=lambda: alpha * eps - sigma * x0)


_ITEMS = 4096  # items between which the largest distance is taken


class ScoreModel(GenerativeModel):
    """A noise-conditional score model: denoising score matching at many noise levels, sampled from the largest down.

        s(z, sigma) = f(z / sqrt(1 + sigma^2), log sigma) / sigma
        loss = E 1/2 sigma^2 |s(z + sigma n, sigma) + n/sigma|^2

    z is the data in the unit range (integers, dequantised) or standardised. The levels fall geometrically from the
    largest distance between two items. The scores need not be gradients: there is no energy, and the only likelihood is
    that of the probability-flow ODE (`ode_likelihood`).

    Arguments:
        spec: the data set this model is built for.
        smallest: the smallest noise level.
        ratio: largest ratio of neighbouring levels.
        levels: whether a training step draws `one` level for each item, or takes `all`.
        class_conditional: condition on the class where the data have classes.
        net: options of the network, a U-Net for images and sequences, a residual MLP for vectors, or of the class that
            `_target_` names (`model.net=dit`).
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
    samplers = tuple(SAMPLERS)
    sampling_options = ("sampler", "steps", "inverse_temperature", "path", "progress")
    has_ode_likelihood = True

    def __init__(
        self,
        spec: DataSpec,
        *,
        smallest: float = 0.01,
        ratio: float = 1.05,
        levels: Literal["one", "all"] = "one",
        class_conditional: bool = True,
        net: UNet | DiT | MLPDenoiser | dict | None = None,
        whitening: Literal["scale", "pca"] = "scale",
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        noise_levels(2 * smallest if smallest > 0 else 1.0, smallest, ratio)  # checks both options
        self.smallest, self.ratio, self.drawn = smallest, ratio, levels
        self.condition_on_class(class_conditional)
        network = make_network(net, spec.event_shape, self.num_classes)
        self.core = NoiseConditionalScore(NoiseConditionalNet(network))
        self.encoding = Encoding(spec, integers="unit", whitening=whitening)
        self.register_buffer("largest", torch.tensor(1.0))
        self.finish_setup(optimizer, ema_decay)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The noise levels of training, from the largest down."""
        return noise_levels(float(self.largest), self.smallest, self.ratio)

    def compiled_parts(self) -> list[nn.Module]:
        """The modules for torch.compile: the network."""
        return [self.core.network.network]

    def sharded_networks(self) -> list[nn.Module]:
        """The network."""
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
        noise = KeyedGenerator(self.seed, batch.item_index, "validate")
        with torch.no_grad():
            # Four levels for each item: with one the figure would vary too much.
            values = [self._per_example(self.weights(), batch, noise.at(k)) for k in range(4)]
        self._pending.append(torch.stack(values).mean(0).cpu() / self.spec.dims)

    def on_validation_epoch_end(self) -> None:
        """Log the figure by which checkpoints are chosen."""
        value = float(torch.cat(gather(self._pending)).double().mean())
        self._pending = []
        self.log("val/denoising", value, rank_zero_only=False)
        self.figures["val/denoising"] = value

    # ---- the contract -------------------------------------------------------------------------------------------

    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """None: a score-based model has no energy to normalise; `ode_likelihood` follows its probability flow.

        Arguments:
            batch: items in the data's own units.
            weights, seed: without effect.
        """
        reason = "a score-based model has no energy (ode=true follows its probability flow)"
        return self.no_likelihood(batch, reason, weights)

    def ode_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, **options
    ) -> Likelihood:
        """The log-likelihood of the data with the smallest noise on them, by the probability-flow ODE.

            log p(x) = log p_0(z) + log |det dz/dx|,   z the encoded data, integers dequantised
            p at the largest level: N(0, (1 + largest^2) I)

        Source: Song et al., "Score-based generative modeling through stochastic differential equations", 2021,
        section 4.3.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of dequantisation and probes.
            options: see `OdeLikelihood`; `dequantisation` is `uniform`.
        """
        ode, log_snr = OdeLikelihood(**options), -2 * math.log(self.smallest)
        if ode.dequantisation != "uniform":
            raise InputError(f"dequantisation = {ode.dequantisation!r}: choose uniform")
        denoiser = ScoreAsDenoiser(self.weights(weights), float(self.largest), self.smallest)

        def start(x: Tensor, cond: Tensor | None, mask: Tensor | None, noise: KeyedGenerator):
            """alpha_0 z, and the change of volume up to there."""
            z, volume = self.encoding(x, noise.child("dequantise"))
            alpha, _ = alpha_sigma(torch.tensor(log_snr, dtype=torch.float64, device=x.device))
            return alpha * z.double(), volume.double() + self.spec.dims * torch.log(alpha)

        found = ode(denoiser, self.spec, batch, self._cond(batch), start, log_snr, seed=seed)
        found.made |= self._given(weights, seed)
        return found

    def draw(self, options: SamplingOptions) -> Samples:
        """Samples by `predictor_corrector` (the default) or `annealed_langevin`, from the largest noise level down.

        `steps` are noise levels: 200 (predictor_corrector), 40 (annealed_langevin, with ten Langevin steps at each). An
        `inverse_temperature` multiplies the score at every level; `annealed_langevin` then aims at p^beta.
        """
        index = self.numbered(options.n, options.start)
        options = options.with_default(sampler="predictor_corrector")
        check_tempering(options.inverse_temperature, options.temperature)
        one_of("sampler", options.sampler, self.samplers)
        options = options.with_default(steps=SAMPLERS[options.sampler].steps)
        if options.steps < 2:
            raise InputError(f"steps must be at least 2, the number of noise levels, got {options.steps}")
        labels = self.labels(options.cond, index)
        seen = Trajectory(options.path, options.steps, options.progress)
        with torch.no_grad():
            z, evaluations = sample_levels(
                self.weights(options.weights), (options.n, *self.spec.event_shape), float(self.largest), self.smallest,
                KeyedGenerator(options.seed, index, "sample"), sampler=options.sampler, steps=options.steps,
                inverse_temperature=options.inverse_temperature, cond=labels, dtype=self.encoding.scale.dtype,
                device=self.device, callback=lambda done, z: seen(done, lambda: self.encoding.decode(z)),
            )
            x, outside = self.encoding.decode(z), self.encoding.outside(z)
        made = {"sampler": options.sampler, "steps": options.steps, "evaluations": evaluations, "seed": options.seed,
                "weights": str(options.weights), "inverse_temperature": options.inverse_temperature}
        return Samples(x, labels, index, made, seen.kept, outside=outside)

    def pictures(self) -> dict[str, Image.Image]:
        """For data in the plane: the score at the smallest noise level, and the exact score if it is known."""
        if self.spec.event_shape != (2,) or self.spec.levels is not None or self.encoding.rotation is not None:
            return {}
        core = self.weights().at(self.smallest)

        def score(x: Tensor) -> Tensor:
            z = (x.to(self.encoding.scale) - self.encoding.location) / self.encoding.scale
            with torch.no_grad():
                return (core.score(z) / self.encoding.scale).cpu()

        where = self.encoding.location.cpu(), self.encoding.scale.cpu()
        return {"fields": picture_of_fields(self.spec, score, None, *where)}
