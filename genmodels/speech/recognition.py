"""Intelligibility of speech: CER and WER by a recogniser, compared with toplines and by length of the text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from genmodels.speech.audio import resample
from genmodels.speech.text import normalise


def spoken_form(text: str, language: str = "en") -> str:
    """The form of a text for comparison: its normal form, reduced to letters, apostrophes and single spaces.

    Raises:
        ValueError: for text without a letter, or with numbers that cannot be read (see `normalise`).

    Example:
        >>> spoken_form("Well-known, Mr. O'Neill!")
        "well known mister o'neill"
    """
    return " ".join(re.sub(r"[^\w' ]|_", " ", normalise(text, language)).split())


@dataclass(frozen=True)
class Edits:
    """The smallest number of edits from a reference to the recognised text.

        rate = (substitutions + deletions + insertions) / length,    which may exceed 1

    Attributes:
        substitutions, deletions, insertions: how many of each.
        length: of the reference.
    """

    substitutions: int
    deletions: int
    insertions: int
    length: int

    @property
    def total(self) -> int:
        """The number of edits."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Edits per item of the reference; for an empty reference 0, or infinity if something was recognised."""
        if self.length == 0:
            return float("inf") if self.total else 0.0
        return self.total / self.length


def pooled(edits: Iterable[Edits]) -> Edits:
    """The sum of the edits of many utterances, so that long ones have more weight.

    Example:
        >>> pooled([Edits(1, 0, 0, 4), Edits(0, 0, 1, 16)]).rate
        0.1
    """
    sums = [(e.substitutions, e.deletions, e.insertions, e.length) for e in edits]
    return Edits(*(sum(column) for column in zip(*sums, strict=True))) if sums else Edits(0, 0, 0, 0)


class Pair(NamedTuple):
    """Corresponding positions in the reference and in the recognised text; None for a deletion or insertion."""

    reference: int | None
    heard: int | None


def aligned(reference: Sequence, heard: Sequence) -> list[Pair]:
    """The alignment with the fewest edits, and among those with the most equal pairs.

        D[i, j] = min(D[i-1, j-1] + (b if a_i != b_j else -1), D[i-1, j] + b, D[i, j-1] + b),    b > any number of pairs

    Remaining ties are resolved from the end: match first, then deletion, then insertion.

    Source: Levenshtein 1966; Wagner and Fischer 1974.

    Example:
        >>> aligned("cat", "at")
        [Pair(reference=0, heard=None), Pair(reference=1, heard=0), Pair(reference=2, heard=1)]
    """
    # Not by jiwer, whose alignment has the fewest edits but not always the most equal pairs, from which repeated words
    # are counted.
    numbers = {item: k for k, item in enumerate(dict.fromkeys([*reference, *heard]))}
    code = np.array([numbers[item] for item in heard], dtype=np.int64)
    change = 1 + max(len(reference), len(heard))
    place = change * np.arange(len(heard) + 1)
    table = np.empty((len(reference) + 1, len(heard) + 1), dtype=np.int64)
    table[0] = place
    for i, item in enumerate(reference, 1):
        row = table[i - 1] + change
        row[1:] = np.minimum(row[1:], table[i - 1, :-1] + np.where(code != numbers[item], change, -1))
        # Insertions since an earlier position cost one edit each.
        table[i] = np.minimum.accumulate(row - place) + place
    i, j, found = len(reference), len(heard), []
    while i or j:
        together = change if i and j and reference[i - 1] != heard[j - 1] else -1
        if i and j and table[i, j] == table[i - 1, j - 1] + together:
            i, j = i - 1, j - 1
            found.append(Pair(i, j))
        elif i and table[i, j] == table[i - 1, j] + change:
            i -= 1
            found.append(Pair(i, None))
        else:
            j -= 1
            found.append(Pair(None, j))
    return found[::-1]


def edits(reference: Sequence, heard: Sequence) -> Edits:
    """The edits of the best alignment: of characters for strings, of words for lists.

    Example:
        >>> edits("kitten", "sitting"), edits("a b c".split(), "a c".split()).rate
        (Edits(substitutions=2, deletions=0, insertions=1, length=6), 0.3333333333333333)
    """
    pairs = aligned(reference, heard)
    deletions = sum(pair.heard is None for pair in pairs)
    insertions = sum(pair.reference is None for pair in pairs)
    both = [pair for pair in pairs if None not in pair]
    substitutions = sum(reference[pair.reference] != heard[pair.heard] for pair in both)
    return Edits(substitutions, deletions, insertions, len(reference))


def character_edits(text: str, heard: str) -> Edits:
    """Character edits of two texts in their spoken form, including spaces, for the CER.

    Example:
        >>> character_edits("In being, modern.", "in being modem").total
        2
    """
    return edits(spoken_form(text), _form_of_heard(heard))


def word_edits(text: str, heard: str) -> Edits:
    """Word edits of two texts in their spoken form, for the WER.

    Example:
        >>> word_edits("In being, modern.", "in being modem").rate
        0.3333333333333333
    """
    return edits(spoken_form(text).split(), _form_of_heard(heard).split())


def _form_of_heard(heard: str) -> str:
    """The spoken form of a recognised text, which may be empty."""
    return spoken_form(heard) if any(c.isalpha() or c.isdecimal() for c in heard) else ""


class WordFaults(NamedTuple):
    """Numbers of skipped and of repeated words."""

    missing: int
    repeated: int


#: Sound (N,) between -1 and 1 and its rate to text, in any writing.
Recogniser = Callable[[Tensor, int], str]


class PocketSphinx:
    """A small English recogniser whose model is part of its package: weak, but reproducible.

    The result for a clip does not depend on the clips before it.

    Errors: ValueError if pocketsphinx is not installed.
    Source: Huggins-Daines et al. 2006.
    """

    sample_rate = 16000

    def __init__(self):
        try:
            from pocketsphinx import Decoder
        except ImportError as error:
            raise ValueError("the recogniser needs pocketsphinx: pip install 'genmodels[speech]', or pass another "
                             "recogniser, any function of sound and rate to text") from error
        self._decoder = Decoder(samprate=self.sample_rate, loglevel="FATAL")

    def __call__(self, wave: Tensor, sample_rate: int) -> str:
        """The text recognised in sound (N,), possibly empty.

        Raises:
            ValueError: for sound of another shape, empty, or not finite.
        """
        if wave.dim() != 1 or len(wave) == 0 or not bool(wave.isfinite().all()):
            raise ValueError(f"sound to recognise is finite and of shape (N,), got {tuple(wave.shape)}")
        heard = resample(wave.detach().double().cpu(), sample_rate, self.sample_rate)
        samples = (heard / heard.abs().max().clamp(min=1) * (2**15 - 1)).round().to(torch.int16)
        # Otherwise the running mean of its features would continue from clip to clip.
        self._decoder.reinit_feat()
        self._decoder.start_utt()
        self._decoder.process_raw(samples.numpy().tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return "" if found is None else found.hypstr


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % bootstrap interval, NaN for fewer than two utterances.

    Example:
        >>> print(Interval(0.5, 0.25, 0.75))
        50.0 % (25.0 to 75.0)
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{100 * self.value:.1f} % (of one utterance, without an interval)"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


@dataclass(frozen=True)
class Difference(Interval):
    """An error rate minus that of a topline, on the same utterances."""

    @property
    def claimed(self) -> bool:
        """Whether the difference is large enough to claim: two points or more, and 0 outside the interval."""
        return abs(self.value) >= 0.02 and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class ErrorBin:
    """Utterances whose texts have `shortest` to `longest` characters.

    Attributes:
        utterances: their number.
        rate: pooled over them.
        toplines: the pooled rate of each topline.
        differences: the rate minus that of each topline.
    """

    shortest: int
    longest: int
    utterances: int
    rate: Interval
    toplines: dict[str, Interval]
    differences: dict[str, Difference]


@dataclass(kw_only=True)
class Recognition:
    """Recognition of synthesised texts: CER by length and, last, over all; WER; transcripts.

    `wer` is that of the `model` and of each topline by name; `claimed` whether the CER differs from a topline's; `bits`
    are those per character of log p(text | sound), by a trained recogniser, None where a text has probability zero.
    """

    recogniser: str
    vocoder: str
    wer: dict[str, float]
    curve: list[ErrorBin]
    claimed: dict[str, bool]
    heard: list[str]
    bits: dict[str, float | None] = field(default_factory=dict)


@dataclass(kw_only=True)
class Transcription:
    """Recognition of recordings: CER by length of the text and, last, over all; WER; transcripts.

    `said` and `heard` are the texts of all recordings; `shown` are the numbers of those in the page. `oracle_wer` is
    that of the best of `nbest` texts of the search.
    """

    search: str
    wer: float
    curve: list[ErrorBin]
    said: list[str]
    heard: list[str]
    shown: list[int]
    real_time_factor: float
    nbest: int = 1
    oracle_wer: float | None = None


def error_curve(
    edits: Sequence[Edits], toplines: Mapping[str, Sequence[Edits]] | None = None, *,
    lengths: Sequence[int] | None = None, width: int = 40, draws: int = 2000, seed: int = 0,
) -> list[ErrorBin]:  # fmt: skip
    """Error rates in bins of the length of the text, with those of toplines; the last bin holds all utterances.

        rate = sum of edits / sum of lengths over a bin

    The intervals resample whole utterances, the same ones for a rate and its toplines, so that the interval of a
    difference is that of a paired comparison.

    Arguments:
        edits: of each utterance.
        toplines: edits of the same utterances for each topline by name: recordings, and vocoded mels of recordings.
        lengths: characters of each text; default the lengths of the references, which is right for character edits.
        width: characters per bin.
        draws: number of bootstrap samples.
        seed: of the bootstrap.

    Errors: ValueError for no utterances, or lists of different lengths.
    Source: Efron and Tibshirani 1993, chapter 6.

    Example:
        >>> found = error_curve([Edits(3, 0, 0, 30), Edits(1, 0, 0, 50)], {"recordings": [Edits(0, 0, 0, 30)] * 2})
        >>> [(bin.shortest, bin.longest, bin.rate.value) for bin in found]
        [(1, 40, 0.1), (41, 80, 0.02), (30, 50, 0.05)]
    """
    lengths = [e.length for e in edits] if lengths is None else lengths
    toplines = {} if toplines is None else toplines
    sizes = {"edits": len(edits), "lengths": len(lengths), **{name: len(found) for name, found in toplines.items()}}
    if not edits or len(set(sizes.values())) > 1:
        raise ValueError(f"a curve needs the same utterances everywhere, one at least, got {sizes}")
    bins: dict[int, list[int]] = {}
    for k, length in enumerate(lengths):
        bins.setdefault(max(0, length - 1) // width, []).append(k)
    ranges = [(b * width + 1, (b + 1) * width, members) for b, members in sorted(bins.items())]
    ranges.append((min(lengths), max(lengths), list(range(len(edits)))))
    generator = np.random.default_rng(seed)
    return [_bin(low, high, [edits[k] for k in members],
                 {name: [found[k] for k in members] for name, found in toplines.items()}, draws, generator)
            for low, high, members in ranges]


def _bin(
    low: int, high: int, edits: list[Edits], toplines: dict[str, list[Edits]], draws: int,
    generator: np.random.Generator,
) -> ErrorBin:  # fmt: skip
    chosen = generator.integers(0, len(edits), (draws, len(edits)))

    def drawn(found: list[Edits]) -> np.ndarray:
        total, length = (np.array([getattr(e, part) for e in found], dtype=np.float64) for part in ("total", "length"))
        # At least 1, for a sample with only empty references.
        return total[chosen].sum(1) / np.maximum(length[chosen].sum(1), 1)

    own, rate = drawn(edits), pooled(edits).rate
    others = {name: (pooled(found).rate, drawn(found)) for name, found in toplines.items()}
    return ErrorBin(
        low, high, len(edits), Interval(rate, *_of_rate(rate, own, len(edits))),
        {name: Interval(value, *_of_rate(value, found, len(edits))) for name, (value, found) in others.items()},
        {name: Difference(rate - value, *_interval(rate - value, own - found, len(edits)))
         for name, (value, found) in others.items()},
    )  # fmt: skip


def _interval(value: float, values: np.ndarray, utterances: int) -> tuple[float, float]:
    """The central 95 % of bootstrap samples, wider for few utterances; NaN for one, of which all samples are equal.

    The bootstrap's spread lacks a factor of sqrt(n / (n - 1)), and a t distribution of n - 1 degrees of freedom is
    wider than a Gaussian; both ends are moved away from the value by the product.
    """
    if utterances < 2:
        return float("nan"), float("nan")
    from scipy.stats import norm, t

    wider = math.sqrt(utterances / (utterances - 1)) * t.ppf(0.975, utterances - 1) / norm.ppf(0.975)
    return tuple(float(value + wider * (end - value)) for end in np.quantile(values, (0.025, 0.975)))


def _of_rate(value: float, values: np.ndarray, utterances: int) -> tuple[float, float]:
    """`_interval` of a rate, which is not below 0. Without a spread, as without any error, it ends 3/n above.

    This is the rule of three: what is more frequent is missed with a probability below 5 %.
    """
    low, high = _interval(value, values, utterances)
    if low == high:
        low, high = value - 3 / utterances, value + min(1.0, 3 / utterances)
    return tuple(end if math.isnan(end) else max(0.0, end) for end in (low, high))
