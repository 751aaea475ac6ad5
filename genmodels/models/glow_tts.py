"""Glow-TTS (Kim et al. 2020) as a model: mels of a text by an exact density."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, an, at_least, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.mels import even_lengths
from genmodels.models.text_model import AlignedModel, SpeakerEmbeddings
from genmodels.nn.attention_block import AttentionKind, check_heads
from genmodels.nn.condition import Condition
from genmodels.speech.alignment import log_mean_over_paths
from genmodels.speech.glow_tts import GlowTTS as SpeakingFlow
from genmodels.speech.glow_tts import mel_decoder
from genmodels.speech.streaming import reach, stream_latent


class GlowTTS(AlignedModel):
    """Text to mel by a flow: all frames at once, with the exact likelihood of a mel given its text.

        z = f(u),  u the whitened noisy mel;    P_ij = log N(z_j; mu_i, sigma_i),    A* = the best monotonic alignment
        loss = -(sum P A* + log |det df/du|) / (80 T) + mean (log d - log d_A*)^2
        log p(x | text) = log sum_A exp(sum P A) - log C(T-1, N-1) + log |det df/du| - D log s

    Reported is the last line, the density of the mel with uniform noise of width `noise` under a uniform prior over all
    alignments. The density along A*, which depends on the mel, is reported separately.

    Arguments:
        steps: steps of the flow.
        hidden, depth, kernel_size, dropout: width, layers, kernel and dropout of the networks in its couplings.
        groups: size of the matrices that mix channels.
        attention: attention block in the couplings' networks; `xl_chunks`, `rope_window`, `local_dense` can stream.
        heads: heads of that block.
        memory: `store` activations for the backward pass, or recompute them through the `inverse`.
        spec, **shared: see `AlignedModel`.

    Raises:
        InputError: for data without texts or without mels.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> model = GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1)
        >>> model.sample(1, text="a cab", seconds=None).x.shape[1]
        4
    """

    family = "glow_tts"
    default_temperature = 0.667
    sampling_options = ("text", "speed", "seconds", "durations", "on_unknown")
    tolerates_tf32 = False

    def __init__(
        self,
        spec: DataSpec,
        *,
        steps: int = 12,
        hidden: int = 192,
        depth: int = 4,
        kernel_size: int = 5,
        dropout: float = 0.05,
        groups: int = 4,
        attention: AttentionKind = "none",
        heads: int = 2,
        memory: Literal["store", "inverse"] = "store",
        **shared,
    ):
        super().__init__(spec, **shared)
        at_least(1, steps=steps, hidden=hidden, depth=depth)
        check_heads(attention, heads, 2)
        width = self.speaker_channels if spec.speakers else 0
        encoder = self.make_encoder()
        decoder = mel_decoder(
            spec.event_shape[0], steps=steps, hidden=hidden, depth=depth, kernel_size=kernel_size, dropout=dropout,
            groups=groups, attention=attention, heads=heads, cond=Condition("vector", width) if width else None,
            memory=memory,
        )
        flow = SpeakingFlow(encoder, decoder, self.make_durations(encoder))
        self.assemble(SpeakerEmbeddings(len(spec.speakers), self.speaker_channels, tts=flow))

    def compiled_parts(self) -> list[nn.Module]:
        """The modules for torch.compile: the flow's map."""
        return [self.core.tts.decoder]

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """Activation normalisation from training mels, layer by layer; averages start from the same weights."""
        batch = even_lengths(batch)
        u, _ = self.units(batch, KeyedGenerator(self.seed, batch.item_index, "initialize"))
        flow = self.core.tts
        flow.decoder.initialize(u, self.core.voice(batch.cond) if flow.decoder.uses_cond else None, batch.mask)
        for average in self.cores()[1:]:
            average.load_state_dict(self.core.state_dict())

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Nats per cell of the noisy mel along the best alignment, plus the error of the log durations."""
        batch = even_lengths(batch)
        u, volume = self.units(batch, generator)
        aligned = self.align(self.core, u, batch)
        nll, duration = self.core.tts.loss(aligned, batch.mask, batch.cond.mask)
        nll = nll - volume / self.dims_of(batch)
        total = nll + duration
        return Loss(total.mean(), total, {"nll_per_dim": nll.detach(), "duration": duration.detach()})

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0,
        alignment: Literal["marginal", "best"] = "marginal",
    ) -> Likelihood:
        """log p(mel | text) of mels with uniform noise, summed over alignments: exact.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            alignment: `marginal`, or `best`: along the best alignment of the mel, an upper bound.
        """
        one_of("alignment", alignment, ("marginal", "best"))
        batch, noise = self.keyed(batch, seed)
        with torch.no_grad():
            u, volume = self.units(batch, noise)
            aligned = self.align(self.weights(weights), u, batch)
            nats = aligned.best + volume
            if alignment == "marginal":
                nats = log_mean_over_paths(aligned.scores, batch.cond.mask, batch.mask) + aligned.logdet + volume
        made = {"estimate": "density", "alignment": alignment, "noise": self.units.noise, "seed": seed,
                "weights": str(weights), "given": "text"}
        kind = "exact" if alignment == "marginal" else "upper_bound"
        return Likelihood(nats, kind, self.dims_of(batch), None, None, made, noise.index)

    def draw(self, options: SamplingOptions) -> Samples:
        """Mels of the texts in turn; the temperature scales the noise around the text's mean."""
        request = self.asked(options)
        noise = FrameKeyedGenerator(options.seed, request.rows, "sample")
        condition, core = request.condition, self.weights(options.weights)
        frames, given = self.frames_of(options.seconds, request, options.durations)
        with self.explained(condition, options.seconds):
            u, mask, used = core.tts.sample(
                condition.tokens, condition.mask, core.voice(condition), generator=noise,
                temperature=options.temperature, speed=request.speed(options.speed), frames=frames, durations=given,
            )
        made = {"sampler": "inverse", "seed": options.seed, "weights": str(options.weights),
                "temperature": options.temperature, "speed": options.speed}
        made |= {} if options.seconds is None else {"seconds": options.seconds}
        return self.as_samples(u, mask, used, request, made)


class TextStream(NamedTuple):
    """The synthesis of a text: its tokens and their durations, and the pieces `(n_mels, chunk)` of its mel.

    A piece is computed when it is requested; `made` is as in `Samples`.
    """

    tokens: list[int]
    durations: list[int]
    pieces: Iterator[Tensor]
    made: dict


def check_streams(model: GenerativeModel) -> None:
    """Raise an InputError for a model that cannot make its mels in pieces."""
    if not isinstance(model, GlowTTS):
        raise InputError(f"stream: {an(model.family)} makes its mels whole, not in pieces: use model=glow_tts")


@torch.no_grad()
def stream_text(model: GlowTTS, text: str, *, chunk: int = 64, **options) -> TextStream:
    """One text by `model.sample` with the same options, its mel in pieces.

    Arguments:
        model: one whose decoder has a bounded receptive field.
        chunk: frames of a piece; the last one may be shorter.
        options: those of `model.sample`; `start` is the number of the text's sample.

    Raises:
        InputError: for a model that cannot be streamed, a chunk below 1, and options that `sample` refuses.

    Example:
        >>> from genmodels.core.data import DataSpec
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={"hop": 256, "sample_rate": 22050},
        ...                 statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> model = GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1).eval()
        >>> found = stream_text(model, "hello", durations=[[2] * 11], chunk=8)
        >>> [piece.shape[1] for piece in found.pieces]
        [8, 8, 6]
    """
    check_streams(model)
    model.require_options(options)
    if chunk < 1:
        raise InputError(f"chunk is a number of frames, at least 1, got {chunk}")
    wanted = SamplingOptions(text=text, **options).with_default(temperature=model.default_temperature)
    request = model.asked(wanted)
    frames, given = model.frames_of(wanted.seconds, request, wanted.durations)
    noise = FrameKeyedGenerator(wanted.seed, request.rows, "sample")
    condition, core = request.condition, model.weights(wanted.weights)
    voice = core.voice(condition)
    with model.explained(condition, wanted.seconds):
        reach(core.tts.decoder)
        drawn = core.tts.latent(
            condition.tokens, None, voice, generator=noise, temperature=wanted.temperature,
            speed=request.speed(wanted.speed), frames=frames, durations=given)
    pieces = (model.units.inverse(piece) for piece in stream_latent(core.tts, drawn, voice, chunk=chunk))
    made = {"sampler": "inverse", "temperature": wanted.temperature}
    return TextStream(condition.tokens[0].tolist(), drawn.durations[0].tolist(), pieces, made)
