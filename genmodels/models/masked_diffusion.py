"""Models of tokens: masked discrete diffusion (MD4, Shi et al. 2024; MDLM, Sahoo et al. 2024), and a language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, at_least, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import rank_world
from genmodels.core.random import KeyedGenerator, uniform
from genmodels.core.samples import Samples, SamplingOptions, Trajectory, require_events, require_guidance
from genmodels.diffusion.denoiser import TokenDenoiser
from genmodels.diffusion.masked import (
    MASKINGS,
    MaskingName,
    Predictor,
    bound_terms,
    draw_tokens,
    masked_bound,
    unmask,
)
from genmodels.diffusion.weighting import AntitheticTimes
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.build import NETWORKS, TARGET, construct, make_network
from genmodels.models.optimizer import Optimizer
from genmodels.nn import CausalTransformer, DiT, MLPDenoiser, UNet


class MaskedDiffusionModel(GenerativeModel):
    """A network that predicts masked integers; a sample starts fully masked and is unmasked over some steps.

        -log p(x) <= E_t E_q(x_t | x) [-alpha'(t) / (1 - alpha(t)) sum over masked of -log p(x_i | x_t)],   t uniform

    Every scalar of integer data is a token with `levels` values, masked with probability 1 - alpha(t). Training
    minimises the negative ELBO, at times spread evenly over each batch. Any part of an event can be given and the rest
    drawn.

    Arguments:
        spec: the data set this model is built for, of integers.
        masking: alpha(t): `linear`, 1 - t; `cosine`, 1 - sin(pi t/2); `quadratic`, 1 - t^2. The ELBO is the same for
            all, but training sees some shares of masked tokens more often.
        width: channels of the network's input and output for each token.
        num_steps: most steps of a sampler, and strata of the ELBO where all are taken.
        class_conditional: condition on the class where the data have classes.
        cond_drop: probability that training hides the class, which guidance needs; 0 for never.
        net: options of the network, by default a `DiT`, for vectors an MLP; or a module.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        ValueError: for options out of range, or continuous data.

    Example:
        >>> model = MaskedDiffusionModel(DataSpec("digits", (1, 8, 8), levels=17), net={"width": 16, "depth": 1})
        >>> model.sample(2, steps=3).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "masked_diffusion"
    samplers = ("ancestral", "confidence")
    sampling_options = ("sampler", "steps", "guidance", "known", "keep", "path", "progress")
    swept_steps = (4, 16, 64)

    def __init__(
        self,
        spec: DataSpec,
        *,
        masking: MaskingName = "linear",
        width: int = 32,
        num_steps: int = 1000,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        net: DiT | UNet | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters()
        if spec.levels is None:
            raise InputError(f"masked diffusion is for integers, not for {spec.name}: use model=flow_matching")
        one_of("masking", masking, MASKINGS)
        at_least(1, width=width)
        at_least(2, num_steps=num_steps)
        self.condition_on_class(class_conditional, cond_drop)
        self.masking, self.num_steps = masking, num_steps
        if not isinstance(net, nn.Module):
            usual = NETWORKS["mlp" if len(spec.event_shape) == 1 else "dit"]
            channels, *space = spec.event_shape
            net = make_network({TARGET: usual, **(net or {})}, (channels * width, *space), self.num_classes)
        self.core = TokenDenoiser(net, spec.levels, width, ordered=spec.encoding is None)
        self.finish_setup(optimizer, ema_decay)

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The negative ELBO at one time per example, in bits/dim, some of the classes hidden."""
        cond = self._hidden(self._cond(batch), generator)
        t, _ = AntitheticTimes()(len(batch), generator.child("times"), *rank_world())
        nats = bound_terms(self.core, batch.x.long(), t, self.spec.levels, generator, cond=cond, masking=self.masking)
        bits = nats / (math.log(2) * self.spec.dims)
        return Loss(bits.mean(), bits, times=t)

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, bound: Literal["continuous"] = "continuous",
        draws: int | None = None, replicates: int = 2, rows: int | None = None,
    ) -> Likelihood:
        """The lower bound on the log-likelihood in continuous time, from one time in each of `draws` strata.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            bound: `continuous`, the only one there is.
            draws: number of strata; None for one less than `num_steps`.
            replicates: number of draws from each stratum; their spread gives the standard error.
            rows: most rows in one network call.

        Raises:
            ValueError: for another bound, no draws, or fewer than two replicates.
        """
        one_of("bound", bound, ("continuous",))
        draws = self.num_steps - 1 if draws is None else draws
        at_least(1, draws=draws)
        at_least(2, replicates=replicates)
        index = batch.item_index
        found = masked_bound(
            self.weights(weights), batch.x.long(), self.spec.levels, KeyedGenerator(seed, index, "bound"),
            cond=self._cond(batch), draws=draws, replicates=replicates, rows=rows)
        made = {"estimate": "bound, continuous time", "draws": draws, "replicates": replicates, "seed": seed}
        made |= self._given(batch, weights)
        return Likelihood(-found.mean(1), "lower_bound", self.spec.dims, self.spec.levels,
                          found.std(1) / math.sqrt(replicates), made, index, parts={"diffusion": found.mean(1)})

    @torch.no_grad()
    def draw(self, options: SamplingOptions) -> Samples:
        """Samples by `ancestral` (the default) or `confidence`; the temperature divides log-probabilities, 0 for modes.

        100 steps by default. With `known` the tokens where `keep` is True are given, and the others drawn.
        """
        options = options.with_default(sampler="ancestral", steps=min(100, self.num_steps))
        one_of("sampler", options.sampler, self.samplers)
        if not 1 <= options.steps <= self.num_steps:
            raise InputError(f"steps must lie in 1..{self.num_steps}, got {options.steps}")
        index, levels = self.numbered(options.n, options.start), self.spec.levels
        labels, predict = self._conditioned(options, index)
        kind = torch.uint8 if levels <= 256 else torch.int64
        x, kept = _initial_tokens(options, self.spec, mask=levels)
        x = x.to(self.device)
        seen = Trajectory(options.path, options.steps, options.progress)
        x = unmask(
            predict, x, levels, KeyedGenerator(options.seed, index, "sample"), steps=options.steps, cond=labels,
            masking=self.masking, confident=options.sampler == "confidence", temperature=options.temperature,
            callback=lambda done, x: seen(done, lambda: x.masked_fill(x == levels, levels // 2).to(kind)))
        made = {"sampler": options.sampler, "steps": options.steps, "evaluations": options.steps, "seed": options.seed,
                "weights": str(options.weights), "temperature": options.temperature} | ({"kept": kept} if kept else {})
        made |= {"guidance": options.guidance} if options.guidance != 1 else {}
        return Samples(x.to(kind), labels, index, made, seen.kept)

    def _conditioned(self, options: SamplingOptions, index: Tensor) -> tuple[Tensor | None, Predictor]:
        """The labels of the samples (None without a class), and the network with guidance."""
        core, scale = self.weights(options.weights), options.guidance
        require_guidance(options, self.num_classes, self.has_null_class)
        if self.has_null_class and options.cond is None and (scale == 0 or options.from_item):
            return None, core
        if scale == 1:
            return self.labels(options.cond, index), core

        def guided(tokens: Tensor, cond: Tensor) -> Tensor:
            hidden = torch.full_like(cond, self.num_classes)
            without, given = core(torch.cat([tokens, tokens]), torch.cat([hidden, cond])).chunk(2)
            return torch.lerp(without, given, scale).log_softmax(-1)

        return self.labels(options.cond, index), guided


class LanguageModel(GenerativeModel):
    """A causal transformer of the bytes of a text, each predicted from those before it.

        log p(x) = sum_i log p(x_i | x_1, ..., x_{i-1})

    The likelihood is exact. Samples are drawn byte by byte; a beginning can be given. A recogniser can search with it,
    `genmodels transcribe lm=<checkpoint>`.

    Arguments:
        spec: the data set this model is built for, of bytes of text.
        net: options of the network.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for other data.

    Example:
        >>> spec = DataSpec("text", (1, 8), levels=256, encoding="utf-8")
        >>> LanguageModel(spec, net={"channels": 16, "depth": 1, "heads": 2}).eval().sample(2).x.shape
        torch.Size([2, 1, 8])
    """

    family = "language_model"
    sampling_options = ("known", "keep")

    def __init__(
        self,
        spec: DataSpec,
        *,
        net: CausalTransformer | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters()
        if spec.encoding is None:
            raise InputError(f"model={self.family} is for data=text, not for {spec.name}: use model=masked_diffusion")
        self.core = net if isinstance(net, nn.Module) else construct(CausalTransformer, spec.levels, **(net or {}))
        self.finish_setup(optimizer, ema_decay)

    def _nats(self, core: CausalTransformer, batch: Batch) -> Tensor:
        tokens = batch.x.flatten(1).long()
        return core(tokens).gather(2, tokens[..., None])[..., 0].sum(1)

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Bits per character."""
        bits = -self._nats(self.core, batch) / (math.log(2) * self.spec.dims)
        return Loss(bits.mean(), bits)

    @torch.no_grad()
    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """log p of sequences, exact; nothing is drawn."""
        made = {"estimate": "product of conditionals", "weights": str(weights)}
        return Likelihood(self._nats(self.weights(weights), batch), "exact", self.spec.dims, self.spec.levels, None,
                          made, batch.item_index)

    @torch.no_grad()
    def draw(self, options: SamplingOptions) -> Samples:
        """Samples byte by byte; the temperature divides log-probabilities, 0 for modes.

        Raises:
            InputError: for known bytes that are not a beginning.
            ValueError: for a class, of which texts have none.
        """
        core, index, length = self.weights(options.weights), self.numbered(options.n, options.start), self.spec.dims
        labels = self.labels(options.cond, index)  # None: texts have no classes
        initial, kept = _initial_tokens(options, self.spec, mask=-1)
        tokens = initial.flatten(1).to(self.device)
        if bool((tokens[:, :kept] < 0).any()):
            raise InputError("a language model continues a beginning: inpaint='Once upon' mask=_; gaps are filled by "
                             "model=masked_diffusion")
        values = uniform((options.n, length), KeyedGenerator(options.seed, index, "sample"), device=self.device)
        log_p, state = core.extend(tokens[:, :kept])
        for place in range(kept, length):
            tokens[:, place] = draw_tokens(log_p[:, -1], values[:, place], options.temperature)
            log_p, state = core.extend(tokens[:, place : place + 1], state)
        made = {"sampler": "ancestral", "seed": options.seed, "weights": str(options.weights),
                "temperature": options.temperature} | ({"kept": kept} if kept else {})
        return Samples(tokens.view(options.n, *self.spec.event_shape).to(torch.uint8), labels, index, made)

    def reader(self, weights: str | float = "ema") -> Callable:
        """The function `step` of `genmodels.speech.decoding.ByteLanguage`."""
        core = self.weights(weights).eval()

        @torch.no_grad()
        def step(read: list[int], state: tuple | None) -> tuple[Tensor, tuple]:
            log_p, state = core.extend(torch.tensor([read], dtype=torch.int64, device=self.device), state)
            return log_p[0].cpu(), state

        return step


def _initial_tokens(options: SamplingOptions, spec: DataSpec, mask: int) -> tuple[Tensor, int]:
    """The tokens at the start of sampling, (n, *event) with `mask` for all but the known ones, and their number.

    Raises:
        InputError: for a known event or a mask of another shape.
    """
    x, known = torch.full((options.n, *spec.event_shape), mask), options.known
    if known is None:
        return x, 0
    require_events(options, spec.event_shape)
    keep = options.keep.cpu().expand(spec.event_shape)
    return torch.where(keep, known.cpu().long(), x), int(keep.sum())
