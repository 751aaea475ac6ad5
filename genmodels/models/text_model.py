"""What all text-to-speech models have in common: text encoder, speakers, requests for texts, alignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, as_input_errors, at_least
from genmodels.core.files import read_text
from genmodels.core.random import KeyedGenerator, seed_of
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.data.utterances import padded_tokens
from genmodels.models.base import GenerativeModel
from genmodels.models.build import construct
from genmodels.models.mels import MelUnits, even_lengths, silent_beyond
from genmodels.models.optimizer import Optimizer
from genmodels.speech.alignment import forward_sum
from genmodels.speech.glow_tts import Aligned
from genmodels.speech.text import Symbols, factors_of, in_form, phrases, without_marks
from genmodels.speech.text_encoder import DurationPredictor, TextEncoder

_WORD = 2**32 - 1  # indices of keyed noise lie below
_LONGEST = 3600  # seconds of one text: an hour is a gigabyte
_MOST_FRAMES = 2**19  # frames of a token: as many as the longest text may have


def noise_rows(condition: TextCondition, takes: Sequence[int]) -> Tensor:
    """Indices (B,) of keyed noise for texts, which depend only on the text and the number of its take.

    Example:
        >>> mask = torch.tensor([[[1, 1, 0]], [[1, 1, 1]]]).bool()
        >>> texts = TextCondition(torch.tensor([[2, 3, 0], [2, 3, 4]]), mask)
        >>> rows = noise_rows(texts, [0, 0])
        >>> bool(rows[0] != rows[1]), bool(noise_rows(texts, [1, 0])[0] != rows[0])
        (True, True)
    """
    each = zip(condition.tokens, condition.mask[:, 0], takes, strict=True)
    return torch.tensor([seed_of(tokens[valid].tolist(), take) % _WORD for tokens, valid, take in each])


class TextReader:
    """Maps texts to tokens as in training.

    Arguments:
        spec: the data the model was built for.
        on_unknown: `error` for characters without a symbol, or `drop` them.

    Errors: InputError for text that is empty or has unknown symbols, and for an unknown speaker.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> spec = DataSpec("speech", (80, 9), mel={}, text={"symbols": CHARACTERS, "blanks": False, "language": "en"})
        >>> TextReader(spec)(["A cab"]).tokens
        tensor([[ 2, 28,  4,  2,  3]])
    """

    def __init__(self, spec: DataSpec, on_unknown: Literal["error", "drop"] = "error"):
        if spec.text is None:
            raise InputError(f"a model of {spec.name} was trained without texts: leave text out")
        self.spec, self.language = spec, spec.text["language"]
        self.form = spec.text.get("form", "characters")  # older checkpoints have no other
        self.symbols = Symbols(tuple(spec.text["symbols"]), spec.text["blanks"], on_unknown)

    def normal_form(self, text: str) -> str:
        """The text as the model reads it, without marks."""
        with as_input_errors():
            found = in_form(without_marks(text), self.form, self.language)
        if self.symbols.on_unknown == "drop":
            unknown = self.symbols.unknown(found)
            found = " ".join("".join(c for c in found if c not in unknown).split())
        return found

    def tokens(self, text: str) -> list[int]:
        """The numbers of a text's symbols."""
        normal = self.normal_form(text)
        if not any(c.isalpha() for c in normal):
            raise InputError(f"the text {text!r} has no letters that this model was trained on")
        with as_input_errors():
            return self.symbols.encode(normal)

    def lines_of(self, file: str) -> list[str]:
        """The texts of a file, one in each line.

        Raises:
            InputError: for a file that cannot be read, and for a text, with its line.
        """
        found = [(number, line) for number, line in enumerate(read_text(file, "text_file").split("\n"), 1)
                 if line.strip()]
        for number, line in found:
            try:
                for part, _ in phrases(line, 0.0):
                    self.tokens(part)
            except InputError as error:
                raise InputError(f"{file}, line {number}: {error}") from None
        return [line for _, line in found]

    def stretch(self, texts: Sequence[str]) -> Tensor | None:
        """Factors (B, N) on the length of each token from marks `[slow]...[/slow]`; None for texts without marks.

        A blank has the factor of the symbol after it.
        """
        with as_input_errors():
            rows = [factors_of(text, self.normal_form) for text in texts]
        if all(factor == 1 for row in rows for factor in row):
            return None
        if self.symbols.blanks:
            rows = [[*(factor for factor in row for _ in (0, 1)), row[-1]] for row in rows]
        found = torch.ones(len(rows), max(map(len, rows)))
        for line, row in zip(found, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        return found

    def __call__(self, texts: Sequence[str], speaker: int | str | None = None) -> TextCondition:
        """The condition of these texts, all by one speaker."""
        tokens, mask = padded_tokens([self.tokens(text) for text in texts])
        number = self.speaker(speaker)
        return TextCondition(tokens, mask, None if number is None else torch.full((len(texts),), number))

    def speaker(self, wanted: int | str | None) -> int | None:
        """The number of a speaker given by name, else by number; by default the first; None without speakers."""
        names = list(self.spec.speakers)
        if not names:
            if wanted is not None:
                raise InputError(f"this model has one voice: leave cond={wanted} out")
            return None
        if wanted is None:
            return 0
        if str(wanted) in names:  # names may be numbers
            return names.index(str(wanted))
        if isinstance(wanted, int) and 0 <= wanted < len(names):
            return wanted
        raise InputError(f"cond={wanted!r} is no speaker of this model: there are {', '.join(names)}")


class TextRequest(NamedTuple):
    """Texts to be synthesised, one for each sample.

    Attributes:
        condition: tokens and speakers.
        index: numbers of the samples, (n,).
        rows: indices of their keyed noise, (n,); see `noise_rows`.
        which: the number of each sample's text.
        stretch: factors on the length of each token, (n, N), from marks in the texts; None for texts without marks.
    """

    condition: TextCondition
    index: Tensor
    rows: Tensor
    which: list[int]
    stretch: Tensor | None = None

    def to(self, device: torch.device | str) -> TextRequest:
        """The same on a device."""
        return TextRequest(self.condition.to(device), self.index.to(device), self.rows.to(device), self.which,
                     None if self.stretch is None else self.stretch.to(device))

    def speed(self, speed: float) -> float | Tensor:
        """The speed of every token: one number, or (n, N) where the texts have marks."""
        return speed if self.stretch is None else speed / self.stretch

    def durations(self, listed: Sequence[Sequence[int]]) -> Tensor:
        """Frames (n, N) of every token, as the user lists them for each text.

        Raises:
            InputError: for no lists, lists of another length than the text, or anything but whole
                numbers from 1 on.
        """
        if not listed or not all(isinstance(own, list | tuple) for own in listed):
            raise InputError("durations are a list of numbers of frames for each text, "
                             f"got {listed}")
        found = torch.zeros_like(self.condition.tokens)
        for row, valid, k in zip(found, self.condition.mask[:, 0], self.which, strict=True):
            own, tokens = listed[k % len(listed)], int(valid.sum())
            if len(own) != tokens:
                raise InputError(f"durations: text {k} has {tokens} tokens and needs as many "
                                 f"numbers of frames, got {len(own)}")
            for i, frames in enumerate(own):
                if not (type(frames) is int and 1 <= frames <= _MOST_FRAMES):
                    raise InputError(f"durations: token {i} of text {k} lasts {frames!r} frames; "
                                     f"it needs a whole number from 1 to {_MOST_FRAMES}")
            row[:tokens] = torch.tensor(own)
        return found


def text_request(spec: DataSpec, options: SamplingOptions) -> TextRequest:
    """The texts of samples `start` .. `start + n - 1`, taken in turn; by default the examples of the data.

    Raises:
        InputError: for texts without a known symbol, and where there are none.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": CHARACTERS, "blanks": False, "language": "en", "examples": ["a cab"]}
        >>> spec = DataSpec("speech", (80, 9), mel={}, text=text)
        >>> found = text_request(spec, SamplingOptions(n=3, start=1, text=["so", "ha"]))
        >>> found.index, found.which, bool(found.rows[0] == found.rows[2])
        (tensor([1, 2, 3]), [1, 0, 1], False)
    """
    text, start = options.text, options.start
    texts = [text] if isinstance(text, str) else list(text or spec.text["examples"])
    if not texts:
        raise InputError("this checkpoint has no example texts: give text=")
    numbers = range(start, start + options.n)
    which = [k % len(texts) for k in numbers]
    reader, chosen = TextReader(spec, options.on_unknown), [texts[k] for k in which]
    condition = reader(chosen, options.cond)
    rows = noise_rows(condition, [k // len(texts) for k in numbers])
    return TextRequest(condition, torch.tensor(numbers), rows, which, reader.stretch(chosen))


class SpeakerEmbeddings(nn.Module):
    """The parts of a text-to-speech model and the vectors of its speakers, each of length one.

    Arguments:
        speakers: how many, 0 for a model of one voice.
        channels: length of the vectors.
        parts: the modules of the model, by name.

    Example:
        >>> voices = SpeakerEmbeddings(2, 4, head=nn.Linear(4, 1))
        >>> condition = TextCondition(torch.ones(1, 1).long(), torch.ones(1, 1, 1).bool(), torch.tensor([1]))
        >>> round(float(voices.voice(condition).detach().norm()), 5), SpeakerEmbeddings(0, 4).voice(condition)
        (1.0, None)
    """

    def __init__(self, speakers: int, channels: int, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        if speakers:
            at_least(1, speaker_channels=channels)
        self.embedding = nn.Embedding(speakers, channels) if speakers else None

    def voice(self, cond: TextCondition) -> Tensor | None:
        """The vectors (B, channels) of the speakers of a batch."""
        return None if self.embedding is None else normalize(self.embedding(cond.speaker), dim=1)


class TextModel(GenerativeModel):
    """A model of mels conditioned on texts; a subclass adds its decoder and `seen_alignment`.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        encoder: options of the text encoder.
        speaker_channels: length of the speakers' vectors, where there are several.
        noise: width of the noise in log-mel units.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for data without texts or without mels.
    """

    takes_text = True

    def __init__(
        self,
        spec: DataSpec,
        *,
        encoder: TextEncoder | dict | None = None,
        speaker_channels: int = 64,
        noise: float = 0.05,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters()
        if spec.text is None:
            raise InputError(f"{spec.name} has no texts: model={self.family} is for data=speech with texts")
        self.units = MelUnits(spec, noise=noise)
        self.speaker_channels = speaker_channels

    def make_encoder(self) -> TextEncoder:
        """The text encoder, conditioned on the speaker where there are several."""
        speakers = self.speaker_channels if self.spec.speakers else 0
        return construct(TextEncoder, len(self.spec.text["symbols"]), self.spec.event_shape[0], speakers,
                         **(self.hparams["encoder"] or {}))

    def assemble(self, core: nn.Module) -> None:
        """Set the core and finish the setup; called last in a subclass' constructor."""
        self.core = core
        self.finish_setup(self.hparams["optimizer"], self.hparams["ema_decay"])

    def keyed(self, batch: Batch, seed: int) -> tuple[Batch, KeyedGenerator]:
        """A batch with even lengths, and its noise for evaluation, keyed by item."""
        return even_lengths(batch), KeyedGenerator(seed, batch.item_index, "likelihood")

    def dims_of(self, batch: Batch) -> Tensor:
        """The number of valid cells of each item, (B,)."""
        return batch.mask.sum((1, 2)) * self.spec.event_shape[0]

    # ---- samples ------------------------------------------------------------------------------------------------

    def asked(self, options: SamplingOptions) -> TextRequest:
        """The texts of samples `start` .. `start + n - 1`, on this model's device."""
        return text_request(self.spec, options).to(self.device)

    def as_samples(self, u: Tensor, mask: Tensor, durations: Tensor, request: TextRequest, made: dict) -> Samples:
        """Whitened mels as samples: in log units, silent where the mask is False."""
        x = silent_beyond(self.units.inverse(u), mask, self.spec)
        return Samples(x, request.condition, request.index, made, mask=mask, durations=durations)

    # ---- pictures while training --------------------------------------------------------------------------------

    def seen_alignment(self, batch: Batch) -> Tensor:
        """The alignment (B, N, T) that pictures show, of items with even lengths."""
        raise NotImplementedError

    def pictures(self) -> dict[str, Image.Image]:
        """Alignments of a few validation items."""
        from genmodels.plots.images import alignments

        loader = self.trainer.val_dataloaders
        if loader is None:
            return {}
        batch = even_lengths(next(iter(loader)).rows(slice(0, 3)).to(self.device))
        self.core.eval()  # without dropout; the caller restores the mode
        return {"alignments": alignments(self.seen_alignment(batch), batch, self.spec)}


class AlignedModel(TextModel):
    """A model of texts whose `core.tts` aligns mels by a monotonic search and predicts how long tokens last.

    Arguments:
        duration_channels: width of the duration predictor.
        spec, **shared: see `TextModel`.
    """

    def __init__(self, spec: DataSpec, *, duration_channels: int = 256, **shared):
        super().__init__(spec, **shared)
        self.duration_channels = duration_channels

    def make_durations(self, encoder: TextEncoder) -> DurationPredictor:
        """The predictor of durations that belongs to a text encoder."""
        at_least(1, duration_channels=self.duration_channels)
        return DurationPredictor(encoder.channels, hidden=self.duration_channels)

    def align(self, core: SpeakerEmbeddings, u: Tensor, batch: Batch) -> Aligned:
        """The alignment of whitened mels with their texts.

        Raises:
            InputError: for more tokens than frames, naming the items.
        """
        condition = batch.cond
        try:
            return core.tts.align(u, condition.tokens, batch.mask, condition.mask, core.voice(condition))
        except ValueError as error:
            items = [] if batch.index is None else batch.index.tolist()
            raise InputError(f"{error} (items {items} of {self.spec.name})") from error

    @torch.no_grad()
    def aligned(self, batch: Batch, weights: str | float = "ema", seed: int = 0) -> Aligned:
        """The alignment of items with their texts: the best path, its durations, the scores of all cells."""
        batch, noise = self.keyed(batch, seed)
        return self.align(self.weights(weights), self.units(batch, noise)[0], batch)

    def posterior(self, batch: Batch, weights: str | float = "ema", seed: int = 0) -> Tensor:
        """(B, N, T) probability that a frame belongs to a token given mel and text: the gradient of log p(x|text)."""
        batch = even_lengths(batch)
        scores = self.aligned(batch, weights, seed).scores.requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(forward_sum(scores, batch.cond.mask, batch.mask).sum(), scores)[0]

    @torch.no_grad()
    def evidence(
        self, batch: Batch, others: list[list[list[int]]], weights: str | float = "ema", seed: int = 0
    ) -> Tensor:
        """How much better each mel fits its own text than other texts, (B,) nats a frame.

            e = 1/T [log p(x | own text) - log (1/K) sum_k p(x | text k)]

        All K + 1 densities are sums over alignments, of the same mel with the same noise, so that e does not depend on
        the room, the voice or how well the model fits the recording. A transcript that fits no better than those of
        other recordings has e near 0 or below.

        Arguments:
            batch: items in the data's own units.
            others: for each item the tokens of K other texts, none of more tokens than the item has frames.
            weights, seed: see `log_likelihood`.

        Raises:
            ValueError: for a text of more tokens than frames.
        """
        batch, noise = self.keyed(batch, seed)
        core, condition, found = self.weights(weights), batch.cond, []
        u, _ = self.units(batch, noise)
        voices = core.voice(condition)
        for k, texts in enumerate(others):
            frames, own = int(batch.mask[k].sum()), condition.tokens[k, condition.mask[k, 0]].tolist()
            tokens, valid = (tensor.to(u.device) for tensor in padded_tokens([own, *texts]))
            voice = None if voices is None else voices[k : k + 1]
            nats = core.tts.text_log_probs(u[k : k + 1, :, :frames], tokens, valid, voice).double()
            found.append((nats[0] - nats[1:].logsumexp(0) + math.log(len(texts))) / frames)
        return torch.stack(found)

    def seen_alignment(self, batch: Batch) -> Tensor:
        """The posterior of the alignment."""
        return self.posterior(batch)

    def frames_of(
        self, seconds: float | None, request: TextRequest, durations: list[list[int]] | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The numbers of frames (n,) of so many seconds, and the given durations (n, N); each None if not given.

        Raises:
            InputError: for a time that is not positive, or that is not the sum of the durations.
        """
        given = None if durations is None else request.durations(durations)
        if seconds is None:
            return None, given
        if not 0 < seconds <= _LONGEST:
            raise InputError(f"seconds must be positive and at most {_LONGEST}, got {seconds:g}")
        rate, hop = self.spec.mel["sample_rate"], self.spec.mel["hop"]
        further = self.spec.mel.get("padding") == "tacotron"  # N frames are then N - 1 hops
        frames = torch.full((len(request.index),), -(-round(seconds * rate) // hop) + further, device=self.device)
        if given is not None and not torch.equal(given.sum(1), frames):
            lasting = (float(given.sum(1)[0]) - further) * hop / rate
            raise InputError(f"durations come to {lasting:.2f} s, not to seconds={seconds:g}: leave one of them out")
        return frames, given

    @contextmanager
    def explained(self, condition: TextCondition, seconds: float | None) -> Iterator[None]:
        """Turn a ValueError of the decoder into an InputError that names a sufficient time."""
        try:
            yield
        except ValueError as error:
            lasting = condition.tokens.shape[1] * self.spec.mel["hop"] / self.spec.mel["sample_rate"]
            raise InputError(f"{error}{'' if seconds is None else f'; seconds={lasting:.2f} is enough'}") from error
