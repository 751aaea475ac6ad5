"""The autoregressive baseline (Shen et al. 2018) as a model: a mel frame by frame, each from those before it."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, refusals
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.models.base import Loss
from genmodels.models.build import construct
from genmodels.models.mels import even_lengths
from genmodels.models.text_model import SpeakerEmbeddings, TextModel
from genmodels.speech.measures import read_faults, words_of_tokens
from genmodels.speech.tacotron import AttentionKind, Decoded, Synthesised
from genmodels.speech.tacotron import Tacotron as Decoder
from genmodels.speech.text import Symbols

_FRAMES_A_SYMBOL, _FRAMES_MORE = 20, 100


class Tacotron(TextModel):
    """Text to mel frame by frame, by an LSTM with attention to the text: the baseline for parallel models.

        p(x_t | x_<t, text) = prod_c exp(-|u_tc - m_tc| / b_c) / 2 b_c s,    u the whitened noisy mel
        loss = -(1 / 80 T) sum_t log p(x_t | x_<t, text) + cross-entropy of the stop

    The prenet drops half of its units in sampling too, so that the density is a mean over these draws. Reported is
    log p for one draw of each item, by Jensen's inequality a lower bound in expectation. It is the density given the
    number of frames, as for `model=glow_tts`, without the probability of the stop.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        attention: of the decoder to the text: `location`; `location_previous` without the sum of earlier weights;
            `additive`, `scaled_dot`, `hard` or `local_monotonic`.
        hidden: width of the LSTM cells.
        prenet, dropout: width of the prenet's layers, and the probability of dropping one of their units.
        postnet: channels of the network that refines a finished mel, 0 for none; the likelihood is that of the frames
            before it.
        frames_per_step: how many frames a step of the decoder predicts, the reduction factor.
        checkpointing: recompute the decoder in the backward pass, 64 steps at a time, instead of storing its
            activations.
        **shared: what all models of texts take, see `TextModel`.

    Raises:
        InputError: for data without texts or without mels, and options that the decoder refuses.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> model = Tacotron(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, hidden=8, prenet=8)
        >>> model.sample(1, text="a cab", max_frames=6).x.shape[1]
        4
    """

    family = "tacotron"
    default_temperature = 0.0
    sampling_options = ("text", "speed", "seconds", "durations", "on_unknown", "max_frames")

    def __init__(
        self,
        spec: DataSpec,
        *,
        attention: AttentionKind = "location",
        hidden: int = 1024,
        prenet: int = 256,
        dropout: float = 0.5,
        postnet: int = 0,
        frames_per_step: int = 1,
        checkpointing: bool = False,
        **shared,
    ):
        super().__init__(spec, **shared)
        decoder = construct(Decoder, self.make_encoder(), attention=attention, hidden=hidden, prenet=prenet,
                            dropout=dropout, postnet=postnet, frames_per_step=frames_per_step,
                            checkpointing=checkpointing)
        self.assemble(SpeakerEmbeddings(len(spec.speakers), self.speaker_channels, tacotron=decoder))

    def compiled_parts(self) -> list[nn.Module]:
        """What torch.compile is applied to: the text encoder; the loop over frames is not unrolled."""
        return [self.core.tacotron.encoder]

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Nats per cell of the noisy mel by teacher forcing, cross-entropy of the stop, and the error of a post-net."""
        batch = even_lengths(batch)
        u, volume = self.units(batch, generator)
        condition = self.forced(self.core, u, batch, generator)
        nll, stop = self.core.tacotron.loss(u, condition, batch.mask)
        nll = nll - volume / self.dims_of(batch)
        parts = {"nll_per_dim": nll, "stop": stop}
        refined = self.core.tacotron.refinement(u, condition, batch.mask)
        if refined is not None:
            parts["refinement"] = refined
        total = sum(parts.values())
        return Loss(total.mean(), total, {name: part.detach() for name, part in parts.items()})

    def forced(self, core: SpeakerEmbeddings, u: Tensor, batch: Batch, generator: KeyedGenerator) -> Decoded:
        """Teacher forcing: every frame of whitened mels from the true ones before it."""
        condition = batch.cond
        memory = core.tacotron.remember(condition.tokens, condition.mask, core.voice(condition))
        return core.tacotron(u, memory, generator, batch.mask)

    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """log p(mel | text, number of frames) of mels with uniform noise, for one draw of the prenet's dropout.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of noise and dropout, which are keyed by (seed, item).
        """
        batch, generator = self.keyed(batch, seed)
        with torch.no_grad():
            u, volume = self.units(batch, generator)
            core = self.weights(weights)
            condition = self.forced(core, u, batch, generator)
            nats = core.tacotron.log_prob(u, condition, batch.mask) + volume
        made = {"estimate": "teacher forcing", "noise": self.units.noise, "seed": seed, "weights": str(weights),
                "given": "text"}
        return Likelihood(nats, "lower_bound", self.dims_of(batch), None, None, made, generator.index)

    def draw(self, options: SamplingOptions) -> Samples:
        """Mels of the texts in turn, each until the model predicts its stop; the temperature scales the frames' noise.

        A warning names mels that are broken off at `max_frames`, and `made` lists them. `speed`, `seconds` and
        `durations` are refused: an autoregressive model predicts the length.
        """
        refused = [name for name, given in (("speed", options.speed != 1), ("seconds", options.seconds is not None),
                                            ("durations", options.durations is not None)) if given]  # fmt: skip
        if refused:
            raise InputError(f"{refused[0]}: a tacotron stops by itself; with {refused[0]} take model=glow_tts")
        asked = self.asked(options)
        if asked.stretch is not None:
            raise InputError("[slow]: a tacotron chooses every duration by itself; model=glow_tts follows the mark")
        noise, condition = KeyedGenerator(options.seed, asked.rows, "sample"), asked.condition
        most = options.max_frames
        if most is None:
            most = _FRAMES_A_SYMBOL * (condition.tokens > 1).sum(1) + _FRAMES_MORE
        core = self.weights(options.weights)
        with refusals():
            drawn = core.tacotron.sample(condition.tokens, condition.mask, core.voice(condition), generator=noise,
                                         temperature=options.temperature, max_frames=most)
        broken_off = asked.index[~drawn.stopped].tolist()
        if broken_off:
            logging.getLogger(__name__).warning(
                "%d of %d mels did not come to a stop and were broken off (samples %s)", len(broken_off), options.n,
                ", ".join(map(str, broken_off[:8])))
        # The token with the largest attention weight, of any sign, of each frame; tokens may be skipped or repeated.
        looked = one_hot(drawn.weights.abs().argmax(1), condition.tokens.shape[1]) * drawn.mask.mT
        made = {"sampler": "autoregressive", "seed": options.seed, "weights": str(options.weights),
                "temperature": options.temperature, "not_stopped": broken_off,
                "words_missing_repeated": self._read(condition, drawn)}
        return self.as_samples(drawn.mel, drawn.mask, looked.sum(1), asked, made)

    def _read(self, condition: TextCondition, drawn: Synthesised) -> list[list[int]]:
        """The numbers of words of each text that the attention skipped, and that it repeated."""
        symbols = Symbols(tuple(self.spec.text["symbols"]), self.spec.text["blanks"])
        found = []
        rows = zip(condition.tokens, condition.mask[:, 0], drawn.weights, drawn.mask, strict=True)
        for tokens, valid, weights, frames in rows:
            own = tokens[valid].tolist()
            looked = weights[: len(own), : int(frames.sum()) : self.core.tacotron.frames_per_step]  # of each step
            found.append(list(read_faults(looked, words_of_tokens(own, symbols))))
        return found

    # ---- pictures while training --------------------------------------------------------------------------------

    @torch.no_grad()
    def attended(self, batch: Batch, weights: str | float = "ema", seed: int = 0) -> Tensor:
        """The attention weights (B, N, T) of items by teacher forcing."""
        batch, generator = self.keyed(batch, seed)
        u, _ = self.units(batch, generator)
        return self.forced(self.weights(weights), u, batch, generator).weights

    def seen_alignment(self, batch: Batch) -> Tensor:
        """The magnitudes of the attention weights."""
        return self.attended(batch).abs()
