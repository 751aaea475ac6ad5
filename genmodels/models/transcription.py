"""A trained recogniser in use: the options of its search, and a function from sound to text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from genmodels.core.checkpoint import checkpoint_hash
from genmodels.core.data import Batch, TextCondition
from genmodels.core.errors import InputError, an, as_input_errors, check_number
from genmodels.core.files import located, read_text
from genmodels.data.utterances import FLOOR, multiple_of, padded_tokens
from genmodels.models.checkpoint import load_model
from genmodels.models.recognizer import Recognizer
from genmodels.speech.audio import MelConfig, log_mel, resample
from genmodels.speech.decoding import LARGEST_BEAM, ByteLanguage, NGram, Search
from genmodels.speech.text import in_form

_FOREIGN = 0.1  # share of letters of a language model's text that may be unknown to the recogniser


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of the search for the text of a recording.

    Arguments:
        beam: texts kept in a recogniser's search, at most 1,000; 1 takes the most probable character of every frame.
        nbest: texts for each recording, the most probable first, at most `beam`.
        lm: a file of texts, one per line, from which a character language model for the search is made; or a checkpoint
            of model=language_model. It needs a beam.
        lm_order: order n of the n-grams of lm, 6 by default.
        lm_weight: weight of the language model's log-probabilities, 0.3 by default.
        rescore: search without lm and rank the texts that are found with it; false for a search with it
            (shallow fusion).
        length: exponent of the length normalisation in a beam search of recognisers with an attention decoder alone, or
            with triggers, 0 (none, the default) to 1.

    Raises:
        InputError: for options that are out of range or do not go together.
    """

    beam: int = 1
    nbest: int = 1
    lm: str | None = None
    lm_order: int | None = None
    lm_weight: float | None = None
    rescore: bool = False
    length: float | None = None

    def __post_init__(self):
        check_number("beam", self.beam, 1, LARGEST_BEAM)
        if not 1 <= self.nbest <= self.beam:
            raise InputError(f"nbest must lie in 1..beam, got {self.nbest} with beam={self.beam}")
        if self.lm is not None and self.beam == 1:
            raise InputError(f"lm={self.lm} needs a beam search: give beam=8 too")
        for key in ("lm_weight", "lm_order", "rescore"):
            value = getattr(self, key)
            if value is not None and value is not False and self.lm is None:
                raise InputError(f"{key}={str(value).lower()} is for a language model: give lm= too")
        for key, least, most in (("lm_weight", 0, 1e6), ("lm_order", 1, 100), ("length", 0, 1)):
            if getattr(self, key) is not None:
                check_number(key, getattr(self, key), least, most)
        if self.length and self.beam == 1:
            raise InputError(f"length={self.length:g} compares the texts of a beam search: give beam=8 too")


def search_of(model: Recognizer, how: SearchOptions, trust: Iterable[str] = ()) -> Search:
    """The search of a recogniser, with its language model.

    Raises:
        InputError: for an option that the model does not have, or a language model that cannot be read.
    """
    if how.length and not model.compares_lengths:
        raise InputError(f"length={how.length:g} is for model.criterion=attention, or joint with a delay, and this "
                         f"model has criterion={model.criterion}")
    language = None if how.lm is None else language_of(model, how.lm, how.lm_order or 6, trust)
    if how.lm_order is not None and isinstance(language, ByteLanguage):
        raise InputError(f"lm_order={how.lm_order} is for n-grams of a text, and lm={how.lm} is a checkpoint")
    own = {"weight": how.lm_weight, "length": how.length, "language": language, "rescore": how.rescore}
    with as_input_errors():
        return Search(beam=how.beam, **{key: value for key, value in own.items() if value is not None})


def language_of(model: Recognizer, file: str, order: int = 6, trust: Iterable[str] = ()) -> NGram | ByteLanguage:
    """A language model in the symbols of a recogniser: n-grams of the lines of a file, or a checkpoint of one.

    Raises:
        InputError: for a file that cannot be read, has no text or that of another alphabet, and a checkpoint of another
            family or alphabet.
    """
    path = located(file)
    if str(file).startswith("hf://") or path.suffix in (".ckpt", ".safetensors"):
        read, header = load_model(path, device=str(model.device), trust=trust)
        if not hasattr(read, "reader"):
            raise InputError(f"lm={file} holds {an(header['family'])}: train one by model=language_model data=text")
        table = [ord("\n"), *(ord(symbol) if len(symbol) == 1 else -1 for symbol in model.symbols.table[2:])]
        with as_input_errors():
            language = ByteLanguage(read.reader(), table, longest=read.spec.dims)
        if (share := language.share()) < 2 * len(table) / 256:  # a model that knows nothing gives them half of that
            raise InputError(f"lm={file} gives the characters of the recogniser {share:.0%} of its probability: train "
                             "it on texts of the same language, with data.spoken=true, or for longer")
        return language
    lines = read_text(file, "lm").split("\n")
    text, number = model.spec.text, {symbol: k for k, symbol in enumerate(model.symbols.table)}
    form, forms = (text.get("form", "characters"), text["language"]), []
    for place, line in enumerate(lines, 1):
        try:
            forms += [in_form(line, *form)] if any(c.isalpha() for c in line) else []
        except ValueError as error:
            raise InputError(f"lm={file}, line {place}: {error}") from error
    with as_input_errors():
        letters = Counter(c for own in forms for c in own if c.isalpha())
        foreign = [(c, n) for c, n in letters.most_common() if c not in number]
        if not letters:
            raise InputError(f"lm={file} has no line with letters")
        share = sum(n for _, n in foreign) / letters.total()
        if share > _FOREIGN:
            raise InputError(f"lm={file}: the recogniser does not write {share:.0%} of its letters, such as "
                             f"{foreign[0][0]!r}: give texts of its language")
        texts = [[number[c] - 1 for c in own if c in number] for own in forms]
        return NGram(texts, len(number) - 1, order=order)


class TrainedRecogniser:
    """A trained recogniser as a function of sound and sample rate.

    Arguments:
        ckpt: its checkpoint.
        device: `auto`, `cpu`, ...
        beam: number of texts that the search keeps.
        trust: further packages whose classes the checkpoint may name.

    Raises:
        InputError: for a checkpoint of another family, or of a recogniser of phonemes.
    """

    def __init__(self, ckpt: str, device: str, beam: int = 1, trust: Iterable[str] = ()):
        path = located(ckpt)
        self.model, header = load_model(path, device=device, trust=trust)
        if not isinstance(self.model, Recognizer):
            raise InputError(f"recognizer={ckpt} holds {an(header['family'])}: train one by model=recognizer")
        if not self.model.writes_words:
            raise InputError(f"recognizer={ckpt} writes phonemes, which cannot be compared with words: train one with "
                             "data.symbols=characters")
        self.config, self.multiple = MelConfig(**self.model.spec.mel), length_multiple(header)
        self.how = Search(beam=beam)
        self.name = f"recognizer {checkpoint_hash(path)[:8]}" + f", beam {beam}" * (beam > 1)

    def __call__(self, wave: Tensor, sample_rate: int) -> str:
        """The text heard in sound (N,); sound shorter than a frame is filled up with silence."""
        return self.model.written(self.model.transcribe(Batch(self._mel(wave, sample_rate)), self.how)[0][0])

    def bits(self, waves: Iterable[Tensor], sample_rate: int, texts: Iterable[str]) -> float | None:
        """-log2 p(text | sound) per character, over all texts; None if one of them has probability zero.

        It measures how well sounds of a text-to-speech model convey their texts.
        """
        nats, characters = 0.0, 0
        for wave, text in zip(waves, texts, strict=True):
            if not bool(wave.isfinite().all()):
                return None
            said = TextCondition(*padded_tokens([self.model.symbols.encode(text)]))
            batch = Batch(self._mel(wave, sample_rate), said.to(self.model.device))
            found = self.model.log_likelihood(batch)
            nats, characters = nats - float(found.nats), characters + int(found.dims)
        return nats / characters / math.log(2) if math.isfinite(nats) else None

    def _mel(self, wave: Tensor, sample_rate: int) -> Tensor:
        heard = resample(wave.detach().double().cpu(), sample_rate, self.config.sample_rate).float()
        heard = pad(heard, (0, max(0, self.config.shortest - len(heard))))
        return with_silence(log_mel(heard, self.config), self.multiple)[None].to(self.model.device)


def length_multiple(header: dict) -> int:
    """The number of which all lengths were multiples in the training of a checkpoint, in frames; 1 if none is known.

    The statistics of the data state it; in checkpoints of earlier versions the configuration of `data=speech` does.
    """
    stated = (header["data"].get("statistics") or {}).get("multiple")
    return stated or multiple_of(header["config"].get("data") or {}) or 1


def with_silence(mel: Tensor, multiple: int) -> Tensor:
    """A mel (n_mels, T) with frames of silence up to a multiple of some length, as a recogniser has them in training.

    Example:
        >>> import torch
        >>> with_silence(torch.zeros(80, 5), 4).shape
        torch.Size([80, 8])
    """
    return pad(mel, (0, -mel.shape[-1] % multiple), value=FLOOR)
