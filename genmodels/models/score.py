"""Noise-conditional score models (Song and Ermon 2019): the scores of the data at every noise level, by one network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, one_of
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions, Trajectory
from genmodels.data.base import spread_rows
from genmodels.diffusion import Denoiser, Eps, LinearLogSnrSchedule, alpha_sigma, default_variance
from genmodels.energy import NoiseConditionalScore, annealed_langevin, largest_distance, predictor_corrector
from genmodels.models.diffusion import DiffusionModel
from genmodels.models.energy_sampling import check_tempering
from genmodels.models.mels import frames_of, silent_beyond
from genmodels.plots.images import picture_of_fields

#: Langevin steps at each level of `annealed_langevin`.
_EACH = 10
#: The samplers of score models besides those of diffusion, with their default numbers of levels.
SAMPLERS = {"predictor_corrector": 200, "annealed_langevin": 40}
_FEW = 16  # dimensions up to which the corrector is left out, since norms of scores vary too much there
_LANGEVIN_OPTIONS = ("sampler", "steps", "lengths", "path", "progress")
_STEPS = 100  # of the default sampler


def sample_levels(
    model: NoiseConditionalScore, shape: tuple[int, ...], largest: float, smallest: float, generator: KeyedGenerator, *,
    sampler: str, steps: int, inverse_temperature: float = 1.0, cond: Tensor | None = None, mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None, callback: Callable[[int, Tensor], None],
) -> tuple[Tensor, int]:
    """(samples like `shape`, evaluations of the network for each), by `steps` levels that fall geometrically.

    The last step is to the mean of the clean data given the last point; `callback(number, x)` is called `steps` times.

    Example:
        >>> exact = NoiseConditionalScore(lambda x, sigma, cond=None: (3 - x) / sigma[:, None] ** 2)  # data: 3
        >>> keyed = KeyedGenerator(0, torch.arange(2), "sample")
        >>> x, evaluations = sample_levels(exact, (2, 1), 4.0, 0.1, keyed, sampler="annealed_langevin", steps=5,
        ...                              callback=lambda done, x: None)
        >>> [round(value, 4) for value in x.flatten().tolist()], evaluations
        ([3.0, 3.0], 51)
    """
    sigmas = torch.logspace(0, 1, steps, base=smallest / largest, dtype=torch.float64).mul(largest).tolist()
    if sampler == "annealed_langevin":
        walk, options = annealed_langevin, {"steps_per_level": _EACH}
        evaluations = steps * _EACH + 1
    else:
        corrections = 0 if torch.Size(shape[1:]).numel() <= _FEW else 1
        walk, options = predictor_corrector, {"corrector_steps": corrections, "mask": mask}
        evaluations = (steps - 1) * (1 + corrections) + 1
    tempered = NoiseConditionalScore(lambda *given: inverse_temperature * model.score_at(*given))  # of p^beta
    z = walk(tempered, shape, sigmas, generator, denoise=False, cond=cond,
             dtype=dtype, device=device, **options,
             callback=lambda done, x: callback(done, x) if done < steps - 1 else None)
    last = torch.full((len(z),), sigmas[-1], dtype=z.dtype, device=z.device)
    z = z + sigmas[-1] ** 2 * model.score_at(z, last, cond)
    callback(steps - 1, z)
    return z, evaluations


class VarianceExplodingScore(NoiseConditionalScore):
    """The scores of a denoiser as scores of unscaled data with added noise (variance exploding), for Langevin dynamics.

        y = x/alpha,   sigma_bar = sigma/alpha = exp(-lambda/2),   score(y) = -eps/sigma_bar

    Arguments:
        denoiser: predicts at any log-SNR lambda.
        mask: `(B, 1, T)`, of the valid frames, or None.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1, 1), 3.0)
        >>> y = torch.ones(1, 1, 2, dtype=torch.float64)
        >>> VarianceExplodingScore(exact).score_at(y, torch.ones(1).double()).flatten().tolist()  # -y/(3 + 1)
        [-0.25, -0.25]
    """

    def __init__(self, denoiser: nn.Module, mask: Tensor | None = None):
        super(NoiseConditionalScore, self).__init__()  # without its check for dropout, which sampling has switched off
        self.network, self.mask = denoiser, mask

    def score_at(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        log_snr = -2 * torch.log(sigma.double())
        alpha, _ = alpha_sigma(log_snr)
        column = (-1, *(1,) * (x.dim() - 1))
        eps = self.network.at_log_snr(x * alpha.to(x).view(column), log_snr, cond, self.mask).eps
        return -eps / sigma.view(column)


class NoiseLevelSchedule(LinearLogSnrSchedule):
    """Noise levels sigma/alpha that grow geometrically with time, from `smallest` to `largest`, which the data decide.

        lambda = -2 log(smallest) - 2 t log(largest/smallest)

    `largest` is a buffer, so that checkpoints hold it; `reach` changes it.

    Example:
        >>> schedule = NoiseLevelSchedule(smallest=0.1, largest=2.0)
        >>> schedule.reach(10.0)
        >>> [round(float(level), 4) for level in schedule.sigma_bar(torch.tensor([0.0, 0.5, 1.0]))]
        [0.1, 1.0, 10.0]
    """

    of_data = ("largest",)  # which a model that starts from the weights of another one keeps

    def __init__(self, *, smallest: float, largest: float):
        super().__init__(log_snr_max=-2 * math.log(smallest), log_snr_min=-2 * math.log(largest))
        self.register_buffer("largest", torch.tensor(float(largest)))

    def _load_from_state_dict(self, *arguments) -> None:
        super()._load_from_state_dict(*arguments)
        self.reach(float(self.largest))

    def reach(self, largest: float) -> None:
        """Change the largest noise level."""
        self.largest.fill_(largest)
        self.slope = -2 * math.log(float(self.largest)) - self.start


_ITEMS = 4096  # items between which the largest distance is taken
_CONTINUOUS = 0.01  # smallest noise level of continuous data, in standard deviations


class ScoreModel(DiffusionModel):
    """A score model: denoising score matching at every noise level, by one network f.

        s(z, sigma) = -f(z / sqrt(1 + sigma^2), log sigma) / sigma
        loss = E sigma^2 |s(x_0 + sigma n, sigma) + n/sigma|^2 per scalar,   log sigma uniform

    x_0 is the data in the network's units: integers in [-1, 1], continuous data standardised. The noise levels reach
    from `smallest` to the largest distance between two items. Divided by sqrt(1 + sigma^2), x_0 + sigma n is the x_t of
    a diffusion and f predicts its noise: all samplers, guidance, edits, the ELBO and the probability flow are those of
    `DDPM`. Those of score models, `predictor_corrector` and `annealed_langevin`, take the scores themselves.

    Arguments:
        smallest: the smallest noise level; by default a quarter of the distance between two levels of integers, and
            0.01 for continuous data. A likelihood of integers needs noise that is smaller than this distance.
        time_sampler: how training draws its noise levels, see `DDPM`.
        spec, **shared: see `DiffusionModel`.

    Source: Song and Ermon 2019, section 4.2; the largest level: 2020, technique 1; the samplers: Song et al. 2021.

    Example:
        >>> model = ScoreModel(DataSpec("digits", (1, 8, 8), levels=17), net={"channels": 8, "multipliers": [1, 2]})
        >>> model.initialize(Batch(torch.randint(0, 17, (16, 1, 8, 8), dtype=torch.uint8)))
        >>> model.sample(2, steps=3, sampler="predictor_corrector").x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "score"
    validates_by_ode = True
    samplers = (*DiffusionModel.samplers, *SAMPLERS)
    sampling_options = (*DiffusionModel.sampling_options, "inverse_temperature")

    def __init__(
        self,
        spec: DataSpec,
        *,
        smallest: float | None = None,
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        **shared,
    ):
        super().__init__(spec, **shared)
        if smallest is None:
            smallest = _CONTINUOUS if spec.levels is None else math.exp(-self.decoder.finest_log_snr / 2)
        if not 0 < smallest < math.inf:
            raise InputError(f"smallest is a noise level above 0, got {smallest}")
        variance = default_variance("simple", spec.levels)
        self.decide(smallest=smallest)
        core = Denoiser(self.network(), NoiseLevelSchedule(smallest=smallest, largest=2 * smallest), Eps())
        self.assemble_denoiser(core, "simple", variance, time_sampler=time_sampler)

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """Mean and standard deviation of continuous data, and the largest distance between two items."""
        super().initialize(batch)
        x0, smallest = self._network_input(batch), self.hparams["smallest"]
        largest = largest_distance(x0[spread_rows(len(x0), min(len(x0), _ITEMS))])
        if largest <= smallest:
            raise InputError(f"model.smallest={smallest:g} is not below the largest distance between two items of "
                             f"{self.spec.name}, {largest:g}: lower it, or take other data")
        for core in self.cores():
            core.schedule.reach(largest)

    @torch.no_grad()
    def draw(self, options: SamplingOptions) -> Samples:
        """Samples by any sampler of diffusion (`ddpm` in 100 steps), `predictor_corrector` or `annealed_langevin`.

        Samplers that add no noise keep the errors that a prediction of the noise makes at the largest levels, so that
        some of their samples are noisy; fresh noise corrects these errors. `steps` of the last two samplers are noise
        levels: 200 (predictor_corrector), 40 (annealed_langevin, with ten Langevin steps at each). An
        `inverse_temperature` multiplies the score at every level; `annealed_langevin` then aims at p^beta.
        """
        if options.sampler is None and options.known is None:
            options = options.with_default(sampler="ddpm", steps=min(_STEPS, self.num_steps))
        if options.sampler is not None:
            one_of("sampler", options.sampler, self.samplers)
        if options.sampler not in SAMPLERS:
            if options.inverse_temperature != 1:
                raise InputError(f"inverse_temperature is an option of {' and '.join(SAMPLERS)}: give sampler=")
            return super().draw(options)
        for name in options.given():
            if name in DiffusionModel.sampling_options and name not in _LANGEVIN_OPTIONS:
                called = "inpaint" if name in ("known", "keep") else name
                raise InputError(f"{called} is an option of the other samplers, not of {options.sampler}")
        index = self.numbered(options.n, options.start)
        check_tempering(options.inverse_temperature, options.temperature)
        options = options.with_default(steps=SAMPLERS[options.sampler])
        if options.steps < 2:
            raise InputError(f"steps must be at least 2, the number of noise levels, got {options.steps}")
        labels, core = self.labels(options.cond, index), self.weights(options.weights)
        mask = frames_of(options.lengths, index, self.spec)
        seen = Trajectory(options.path, options.steps, options.progress)
        z, evaluations = sample_levels(
            VarianceExplodingScore(core, mask), (options.n, *self.spec.event_shape), float(core.schedule.largest),
            self.hparams["smallest"], KeyedGenerator(options.seed, index, "sample"), sampler=options.sampler,
            steps=options.steps, inverse_temperature=options.inverse_temperature, cond=labels, mask=mask,
            dtype=self.location.dtype, device=self.device, callback=lambda done, z: seen(done, lambda: self.decode(z)),
        )
        made = {"sampler": options.sampler, "steps": options.steps, "evaluations": evaluations, "seed": options.seed,
                "weights": str(options.weights), "inverse_temperature": options.inverse_temperature}
        return Samples(silent_beyond(self.decode(z), mask, self.spec), labels, index, made, seen.kept, mask=mask)

    def pictures(self) -> dict[str, Image.Image]:
        """For data in the plane: the score at the smallest noise level, and the exact score if it is known."""
        needs_class = self.conditional and not self.has_null_class
        if self.spec.event_shape != (2,) or self.spec.levels is not None or needs_class:
            return {}
        level = VarianceExplodingScore(self.weights()).at(self.hparams["smallest"])

        def score(x: Tensor) -> Tensor:
            with torch.no_grad():
                return (level.score((x.to(self.scale) - self.location) / self.scale) / self.scale).cpu()

        return {"fields": picture_of_fields(self.spec, score, None, self.location.cpu(), self.scale.cpu())}
