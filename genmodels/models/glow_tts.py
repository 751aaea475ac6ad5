"""Glow-TTS (Kim et al. 2020) as a model: mels of a text by an exact density."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from genmodels.data.spec import Batch, DataSpec, TextCondition
from genmodels.errors import InputError
from genmodels.evaluation.likelihood import Likelihood
from genmodels.models.base import GenerativeModel, Loss, Samples
from genmodels.models.build import construct
from genmodels.models.mels import MelUnits, even_lengths
from genmodels.models.optimizer import Optimizer
from genmodels.models.texts import TextReader, given_durations, noise_rows
from genmodels.nn.condition import Condition
from genmodels.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.speech.alignment import forward_sum, log_paths
from genmodels.speech.glow_tts import Aligned, mel_decoder
from genmodels.speech.glow_tts import GlowTTS as SpeakingFlow
from genmodels.speech.text_encoder import DurationPredictor, TextEncoder


class Voices(nn.Module):
    """A speaking flow and the vectors of its speakers, each of length one.

    Arguments:
        tts: the flow.
        speakers: how many, 0 for a model of one voice.
        channels: length of the vectors.
    """

    def __init__(self, tts: SpeakingFlow, speakers: int, channels: int):
        super().__init__()
        self.tts = tts
        self.embedding = nn.Embedding(speakers, channels) if speakers else None

    def voice(self, cond: TextCondition) -> Tensor | None:
        """The vectors (B, channels) of the speakers of a batch."""
        return None if self.embedding is None else normalize(self.embedding(cond.speaker), dim=1)

    def align(self, u: Tensor, cond: TextCondition, mask: Tensor) -> Aligned:
        """Whitened mels against their texts."""
        return self.tts.align(u, cond.tokens, mask, cond.mask, self.voice(cond))


class GlowTTS(GenerativeModel):
    """Text to mel by a flow: all frames at once, with the exact likelihood of a mel given its text.

        z = f(u),  u the whitened noisy mel;    P_ij = log N(z_j; mu_i, sigma_i),    A* = the best monotonic alignment
        loss = -(sum P A* + log |det df/du|) / (80 T) + mean (log d - log d_A*)^2
        log p(x | text) = log sum_A exp(sum P A) - log C(T-1, N-1) + log |det df/du| - D log s

    What is reported is the last line, the density of the mel with uniform noise of width `noise` under a uniform prior
    of all alignments. The one along A* has seen the mel and is told apart.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        encoder: options of the text encoder.
        steps: steps of the flow.
        hidden, depth, kernel_size, dropout: of the networks in its couplings.
        groups: size of the matrices that mix channels.
        duration_channels: width of the duration predictor.
        speaker_channels: length of the speakers' vectors, where there are several.
        noise: width of the noise in log-mel units.
        memory: `store` activations for the backward pass, or recompute them through the `inverse`.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

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
    tolerates_tf32 = False
    takes_text = True

    def __init__(
        self,
        spec: DataSpec,
        *,
        encoder: TextEncoder | dict | None = None,
        steps: int = 12,
        hidden: int = 192,
        depth: int = 4,
        kernel_size: int = 5,
        dropout: float = 0.05,
        groups: int = 4,
        duration_channels: int = 256,
        speaker_channels: int = 64,
        noise: float = 0.05,
        memory: Literal["store", "inverse"] = "store",
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        if spec.text is None:
            raise InputError(f"{spec.name} has no texts: model=glow_tts is for data=speech with texts")
        self.units = MelUnits(spec, noise=noise)
        speakers, n_mels = len(spec.speakers), spec.event_shape[0]
        told = speaker_channels if speakers else 0
        reader = construct(TextEncoder, len(spec.text["symbols"]), n_mels, speaker_channels=told, **(encoder or {}))
        decoder = mel_decoder(
            n_mels, steps=steps, hidden=hidden, depth=depth, kernel_size=kernel_size, dropout=dropout, groups=groups,
            cond=Condition("vector", told) if told else None, memory=memory,
        )
        durations = DurationPredictor(reader.channels, hidden=duration_channels)
        self.core = Voices(SpeakingFlow(reader, decoder, durations), speakers, speaker_channels)
        self.finish_setup(optimizer, ema_decay)

    def compiled_parts(self) -> list[nn.Module]:
        """What torch.compile is applied to: the flow's map."""
        return [self.core.tts.decoder]

    @torch.no_grad()
    def initialize(self, batch: Batch) -> None:
        """Activation normalisation from training mels, layer by layer; averages start from the same weights."""
        batch = even_lengths(batch)
        u, _ = self.units(batch, KeyedGenerator(self.seed, batch.index, "initialize"))
        flow = self.core.tts
        flow.decoder.initialize(u, self.core.voice(batch.cond) if flow.decoder.uses_cond else None, batch.mask)
        for average in self.ema.averages if self.ema is not None else ():
            average.load_state_dict(self.core.state_dict())

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Nats per cell of the noisy mel along the best alignment, plus the error of the log durations."""
        batch = even_lengths(batch)
        u, volume = self.units(batch, generator)
        aligned = self._named(lambda: self.core.align(u, batch.cond, batch.mask), batch)
        nll, duration = self.core.tts.loss(aligned, batch.mask, batch.cond.mask)
        nll = nll - volume / self._dims(batch)
        total = nll + duration
        return Loss(total.mean(), total, {"nll_per_dim": nll.detach(), "duration": duration.detach()})

    def _named(self, work, batch: Batch):
        try:
            return work()
        except ValueError as error:
            items = [] if batch.index is None else batch.index.tolist()
            raise InputError(f"{error} (items {items} of {self.spec.name})") from error

    def _dims(self, batch: Batch) -> Tensor:
        return batch.mask.sum((1, 2)) * self.spec.event_shape[0]

    def log_likelihood(
        self,
        batch: Batch,
        *,
        weights: str | float = "ema",
        seed: int = 0,
        alignment: Literal["marginal", "best"] = "marginal",
    ) -> Likelihood:
        """log p(mel | text) of mels with uniform noise, summed over alignments: exact.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of the noise, which is keyed by (seed, item, frame).
            alignment: `marginal`, or `best`: along the alignment that suits the mel best, an upper bound.
        """
        if alignment not in ("marginal", "best"):
            raise ValueError(f"alignment must be marginal or best, got {alignment!r}")
        batch = even_lengths(batch)
        index = torch.arange(len(batch), device=batch.x.device) if batch.index is None else batch.index
        with torch.no_grad():
            u, volume = self.units(batch, KeyedGenerator(seed, index, "likelihood"))
            aligned = self._named(lambda: self.weights(weights).align(u, batch.cond, batch.mask), batch)
            nats = aligned.best + volume
            if alignment == "marginal":
                tokens, frames = batch.cond.mask.sum((1, 2)), batch.mask.sum((1, 2))
                over_paths = forward_sum(aligned.scores, batch.cond.mask, batch.mask)
                nats = over_paths.double() - log_paths(tokens, frames) + aligned.logdet + volume
        made = {"estimate": "density", "alignment": alignment, "noise": self.units.noise, "seed": seed,
                "weights": str(weights), "given": "text"}
        kind = "exact" if alignment == "marginal" else "upper_bound"
        return Likelihood(nats, kind, self._dims(batch), None, None, made, index)

    def sample(
        self,
        n: int,
        cond: int | str | None = None,
        temperature: float = 0.667,
        seed: int = 0,
        *,
        start: int = 0,
        text: str | list[str] | None = None,
        speed: float = 1.0,
        seconds: float | None = None,
        durations: list[list[int]] | None = None,
        weights: str | float = "ema",
        on_unknown: Literal["error", "drop"] = "error",
    ) -> Samples:
        """Mels number `start` .. `start + n - 1` of a seed, of the texts in turn.

        Arguments:
            n: how many.
            cond: the speaker, by name or number; None for the first.
            temperature: scale of the latent's noise; 0 for its mean.
            seed: the noise depends on (seed, text, which of that text's samples it is) alone.
            start: number of the first sample.
            text: a text, or several that are taken in turn; None for the examples that the checkpoint carries.
            speed: above 1 is faster.
            seconds: total time, instead of what the durations come to.
            durations: frames of every token, a list for each text, instead of predicted ones.
            weights: `ema`, `raw`, or one of the decays kept.
            on_unknown: `drop` characters without a symbol, or stop with an `error`.

        Raises:
            InputError: for texts or durations that cannot be spoken.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        texts = [text] if isinstance(text, str) else list(text or self.spec.text["examples"])
        if not texts:
            raise InputError("this checkpoint carries no examples: give text=")
        index = torch.arange(start, start + n)
        chosen = [texts[k % len(texts)] for k in index.tolist()]
        said = TextReader(self.spec, on_unknown)(chosen, cond)
        takes, which = [k // len(texts) for k in index.tolist()], [k % len(texts) for k in index.tolist()]
        given = None if durations is None else given_durations(said, durations, which).to(self.device)
        noise = FrameKeyedGenerator(seed, noise_rows(said, takes).to(self.device), "sample")
        said, core, frames = said.to(self.device), self.weights(weights), self.frames_of(seconds, n)
        with self.speakable(said, seconds):
            u, mask, used = core.tts.sample(
                said.tokens, said.mask, core.voice(said), generator=noise, temperature=temperature, speed=speed,
                frames=frames, durations=given,
            )
        x = self.units.inverse(u).masked_fill(~mask, float(torch.tensor(1e-5).log()))
        made = {"sampler": "inverse", "seed": seed, "weights": str(weights), "temperature": temperature,
                "speed": speed} | ({} if seconds is None else {"seconds": seconds})
        return Samples(x, said, index.to(self.device), made, mask=mask, durations=used)

    def frames_of(self, seconds: float | None, n: int) -> Tensor | None:
        """The frames (n,) that hold so many seconds of sound; None for None."""
        if seconds is None:
            return None
        if not seconds > 0:
            raise InputError(f"seconds must be positive, got {seconds}")
        samples = round(seconds * self.spec.mel["sample_rate"])
        return torch.full((n,), -(-samples // self.spec.mel["hop"]), device=self.device)

    @contextmanager
    def speakable(self, said: TextCondition, seconds: float | None) -> Iterator[None]:
        """What the flow refuses, as an InputError that says which time would be enough."""
        try:
            yield
        except ValueError as error:
            lasting = said.tokens.shape[1] * self.spec.mel["hop"] / self.spec.mel["sample_rate"]
            raise InputError(f"{error}{'' if seconds is None else f'; seconds={lasting:.2f} is enough'}") from error

    # ---- what is seen of it while it trains ---------------------------------------------------------------------

    @torch.no_grad()
    def aligned(self, batch: Batch, weights: str | float = "ema", seed: int = 0) -> Aligned:
        """Items against their texts: the best path, its durations, and the scores of all."""
        batch = even_lengths(batch)
        index = torch.arange(len(batch), device=batch.x.device) if batch.index is None else batch.index
        u, _ = self.units(batch, KeyedGenerator(seed, index, "likelihood"))
        return self._named(lambda: self.weights(weights).align(u, batch.cond, batch.mask), batch)

    def posterior(self, batch: Batch, weights: str | float = "ema", seed: int = 0) -> Tensor:
        """(B, N, T) probability that a frame belongs to a token, given mel and text: the gradient of the sum."""
        batch = even_lengths(batch)
        scores = self.aligned(batch, weights, seed).scores.requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(forward_sum(scores, batch.cond.mask, batch.mask).sum(), scores)[0]

    def pictures(self) -> dict[str, Image.Image]:
        """Alignments of a few validation items."""
        from genmodels.evaluation.mel_pictures import alignments

        loader = self.trainer.val_dataloaders
        if loader is None:
            return {}
        batch = even_lengths(next(iter(loader)).rows(slice(0, 3)).to(self.device))
        self.core.eval()  # dropout would blur what has been learnt; the caller puts the mode back
        return {"alignments": alignments(self.posterior(batch), batch, self.spec)}
