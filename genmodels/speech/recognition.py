"""How well speech is understood: a recogniser as a plug, its errors against the length of the text, and ceilings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from genmodels.speech.audio import resample
from genmodels.speech.transcription import Edits, pooled

#: Sound (N,) between -1 and 1 and its rate to text, in any writing.
Recogniser = Callable[[Tensor, int], str]


class PocketSphinx:
    """A small recogniser of English with its model inside the package: weak, but everywhere the same.

    What it hears of a clip does not depend on the clips before it.

    Errors: ValueError where pocketsphinx is not installed.
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
        """The text heard in sound (N,); empty where nothing is.

        Raises:
            ValueError: for sound of another shape, empty, or not finite.
        """
        if wave.dim() != 1 or len(wave) == 0 or not bool(wave.isfinite().all()):
            raise ValueError(f"sound to recognise is finite and of shape (N,), got {tuple(wave.shape)}")
        heard = resample(wave.detach().double().cpu(), sample_rate, self.sample_rate)
        samples = (heard / heard.abs().max().clamp(min=1) * (2**15 - 1)).round().to(torch.int16)
        # The running mean of its features would otherwise go on from clip to clip.
        self._decoder.reinit_feat()
        self._decoder.start_utt()
        self._decoder.process_raw(samples.numpy().tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return "" if found is None else found.hypstr


@dataclass(frozen=True)
class Interval:
    """A figure with the 95 % of its bootstrap: not finite where fewer than two utterances say nothing of the spread."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Interval):
    """A rate less that of a ceiling, over the same utterances."""

    @property
    def claimed(self) -> bool:
        """Whether the recogniser may be believed: two points or more, and 0 outside the interval."""
        return abs(self.value) >= 0.02 and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class ErrorBin:
    """Utterances whose texts have `shortest` to `longest` characters.

    Attributes:
        utterances: how many.
        rate: pooled over them.
        ceilings: the pooled rates of each ceiling.
        differences: the rate less that of each ceiling.
    """

    shortest: int
    longest: int
    utterances: int
    rate: Interval
    ceilings: dict[str, Interval]
    differences: dict[str, Difference]


def error_curve(
    edits: Sequence[Edits], ceilings: Mapping[str, Sequence[Edits]] | None = None, *,
    lengths: Sequence[int] | None = None, width: int = 40, draws: int = 2000, seed: int = 0,
) -> list[ErrorBin]:  # fmt: skip
    """Error rates in bins of the length of the text, beside what the recogniser makes of ceilings; the last bin is all.

        rate = sum of edits / sum of lengths over a bin

    Whole utterances are drawn anew for the intervals, the same ones for a rate and its ceilings, so that a difference
    has the interval of a paired comparison.

    Arguments:
        edits: of each utterance.
        ceilings: name to the edits of the same utterances in other sound: recordings, and mels of recordings vocoded.
        lengths: characters of each text; of the references when None, which is right for edits of characters.
        width: characters of a bin.
        draws: of the bootstrap.
        seed: of its draws.

    Errors: ValueError for no utterances, or lists of different lengths.
    Source: Efron and Tibshirani 1993, chapter 6.

    Example:
        >>> found = error_curve([Edits(3, 0, 0, 30), Edits(1, 0, 0, 50)], {"recordings": [Edits(0, 0, 0, 30)] * 2})
        >>> [(bin.shortest, bin.longest, bin.rate.value) for bin in found]
        [(1, 40, 0.1), (41, 80, 0.02), (30, 50, 0.05)]
    """
    lengths = [e.length for e in edits] if lengths is None else lengths
    ceilings = {} if ceilings is None else ceilings
    sizes = {"edits": len(edits), "lengths": len(lengths), **{name: len(found) for name, found in ceilings.items()}}
    if not edits or len(set(sizes.values())) > 1:
        raise ValueError(f"a curve needs the same utterances everywhere, one at least, got {sizes}")
    bins: dict[int, list[int]] = {}
    for k, length in enumerate(lengths):
        bins.setdefault(max(0, length - 1) // width, []).append(k)
    ranges = [(b * width + 1, (b + 1) * width, members) for b, members in sorted(bins.items())]
    ranges.append((min(lengths), max(lengths), list(range(len(edits)))))
    generator = np.random.default_rng(seed)
    return [_bin(low, high, [edits[k] for k in members],
                 {name: [found[k] for k in members] for name, found in ceilings.items()}, draws, generator)
            for low, high, members in ranges]


def _bin(
    low: int, high: int, edits: list[Edits], ceilings: dict[str, list[Edits]], draws: int,
    generator: np.random.Generator,
) -> ErrorBin:  # fmt: skip
    chosen = generator.integers(0, len(edits), (draws, len(edits)))

    def drawn(found: list[Edits]) -> np.ndarray:
        total, length = (np.array([getattr(e, part) for e in found], dtype=np.float64) for part in ("total", "length"))
        # At least 1, for a draw of nothing but empty references.
        return total[chosen].sum(1) / np.maximum(length[chosen].sum(1), 1)

    own, rate = drawn(edits), pooled(edits).rate
    others = {name: (pooled(found).rate, drawn(found)) for name, found in ceilings.items()}
    return ErrorBin(
        low, high, len(edits), Interval(rate, *_middle(own, len(edits))),
        {name: Interval(value, *_middle(found, len(edits))) for name, (value, found) in others.items()},
        {name: Difference(rate - value, *_middle(own - found, len(edits))) for name, (value, found) in others.items()},
    )  # fmt: skip


def _middle(values: np.ndarray, utterances: int) -> tuple[float, float]:
    """The 95 % in the middle; not a number for a single utterance, whose draws are all the same."""
    if utterances < 2:
        return float("nan"), float("nan")
    return tuple(float(v) for v in np.quantile(values, (0.025, 0.975)))
