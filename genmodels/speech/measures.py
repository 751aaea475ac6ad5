"""Metrics of synthesised speech: durations, alignments, skipped words, failures, speed, distortion, pitch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from genmodels.speech.recognition import WordFaults
from genmodels.speech.text import Symbols


def duration_error(durations: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean absolute error of predicted durations with respect to those of the best alignment, (B,) in frames.

        mean over valid tokens of |d_i - d'_i|

    Arguments:
        durations: d, in frames, whole or not.
        reference: d', as of `monotonic_alignment_search`.
        mask: which tokens are valid.

    Shapes: `(B, N)` both, `mask (B, 1, N)` bool.
    Errors: ValueError for other shapes, or a reference of no frames.

    Example:
        >>> duration_error(torch.tensor([[2, 4]]), torch.tensor([[1, 5]]))
        tensor([1.])
    """
    if durations.shape != reference.shape or durations.dim() != 2:
        raise ValueError(f"durations are (B, N), got {tuple(durations.shape)} and {tuple(reference.shape)}")
    valid = torch.ones_like(reference, dtype=torch.bool) if mask is None else mask[:, 0]
    width = durations.dtype if durations.is_floating_point() else torch.get_default_dtype()
    own, other = (torch.where(valid, d.to(width), 0) for d in (durations, reference))
    if bool((other.sum(1) <= 0).any()):
        raise ValueError(f"item {int((other.sum(1) <= 0).nonzero()[0])} has a reference of no frames")
    return (own - other).abs().sum(1) / valid.sum(1)


@dataclass(frozen=True)
class AlignmentShape:
    """Statistics of the alignments of several items.

    Attributes:
        mean, std, longest: mean, standard deviation and maximum of the frames per token on the best path.
        single: share of tokens with one frame.
        off_diagonal: mean distance of a frame's expected token from the straight line, as a share of the text.
        entropy: of the posterior of a frame's token, nats, averaged over frames.
    """

    mean: float
    std: float
    longest: int
    single: float
    off_diagonal: float
    entropy: float


def alignment_shape(posterior: Tensor, durations: Tensor, text_mask: Tensor, frame_mask: Tensor) -> AlignmentShape:
    """Distance of alignments from the diagonal, entropy of their posterior, and distribution of frames over tokens.

        off = mean over frames |sum_i i p_i(t) / (N - 1) - t / (T - 1)|,    H = - mean over frames sum_i p_i log p_i

    Shapes: `posterior (B, N, T)`, `durations (B, N)`, `text_mask (B, 1, N)`, `frame_mask (B, 1, T)`.

    Example:
        >>> sure = torch.eye(3)[None]
        >>> whole = torch.ones(1, 1, 3).bool()
        >>> alignment_shape(sure, torch.ones(1, 3), whole, whole)
        AlignmentShape(mean=1.0, std=0.0, longest=1, single=1.0, off_diagonal=0.0, entropy=0.0)
    """
    found = durations[text_mask[:, 0]].double()
    p = posterior.double()
    surprise = -torch.special.xlogy(p, p.clamp(max=1)).sum(1)  # a gradient of float32 may exceed one by rounding
    tokens, frames = text_mask.sum((1, 2)), frame_mask.sum((1, 2))
    expected = (p * torch.arange(p.shape[1], device=p.device)[:, None]).sum(1) / (tokens - 1).clamp(min=1)[:, None]
    line = torch.arange(p.shape[2], device=p.device) / (frames - 1).clamp(min=1)[:, None]
    valid = frame_mask[:, 0]
    return AlignmentShape(
        float(found.mean()), float(found.std(unbiased=False)), int(found.max()), float((found == 1).double().mean()),
        float((expected - line).abs()[valid].mean()), float(surprise[valid].mean()) + 0.0,
    )  # fmt: skip


def words_of_tokens(tokens: Sequence[int], symbols: Symbols) -> list[int]:
    """The word that each token belongs to, counted from 0; -1 for blanks, spaces and marks.

    Example:
        >>> words_of_tokens(Symbols(blanks=False).encode("so, it's"), Symbols())
        [0, 0, -1, -1, 1, 1, 1, 1]
    """
    word, found, inside = -1, [], False
    for token in tokens:
        symbol = symbols.table[token]
        if len(symbol) == 1 and (symbol.isalpha() or symbol == "'"):
            word, inside = word if inside else word + 1, True
            found.append(word)
        else:
            # Blanks occur within words too; a space or a punctuation mark ends a word.
            inside = inside and len(symbol) > 1
            found.append(-1)
    return found


def read_faults(weights: Tensor, words: Sequence[int], *, shortest: int = 3) -> WordFaults:
    """Numbers of words that an attention skipped, and of words that it returned to.

    At each frame the attended token is that of the largest weight, whatever its sign: local monotonic attention weighs
    by raw scores. A return counts if it lasts `shortest` frames, because the maximum may alternate at the border of two
    words. An alignment by durations has neither fault.

    Arguments:
        weights: of one utterance.
        words: the word of each token, as from `words_of_tokens`.

    Shapes: `weights (N, T)`; a word for each of the N tokens.
    Errors: ValueError for another number of tokens, or no frames.

    Example:
        >>> weights = torch.eye(3)[:, [0, 0, 0, 2, 2, 2, 0, 0, 0]]
        >>> read_faults(weights, [0, 1, 2])
        WordFaults(missing=1, repeated=1)
    """
    if weights.dim() != 2 or weights.shape[0] != len(words) or weights.shape[1] == 0:
        raise ValueError(f"weights of {len(words)} tokens are ({len(words)}, T), got {tuple(weights.shape)}")
    attended = [words[k] for k in weights.abs().argmax(0).tolist() if words[k] >= 0]
    runs = [(word, sum(1 for _ in run)) for word, run in groupby(attended)]
    missing = len({word for word in words if word >= 0} - {word for word, _ in runs})
    # Short runs are dropped, and the runs on both sides of them are merged.
    steady = [word for word, _ in groupby(word for word, length in runs if length >= shortest)]
    return WordFaults(missing, len(steady) - len(set(steady)))


@dataclass(frozen=True)
class Outcome:
    """The result of synthesising one utterance.

    Attributes:
        words: numbers of skipped and repeated words.
        stopped: whether the decoder stopped by itself.
        length_ratio: its length over that of the recording.
    """

    words: WordFaults = WordFaults(0, 0)
    stopped: bool = True
    length_ratio: float = 1.0

    @property
    def failures(self) -> dict[str, bool]:
        """Whether this utterance failed in each way; a NaN length counts as a failure."""
        return {"missing word": self.words.missing > 0, "repeated word": self.words.repeated > 0,
                "no stop": not self.stopped, "length": not 0.5 <= self.length_ratio <= 2}


def failures_per_100(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Failures per 100 utterances for each kind of failure, and for `any` of them.

    Errors: ValueError for no utterances.

    Example:
        >>> failures_per_100([Outcome(), Outcome(stopped=False, length_ratio=3.0)])
        {'missing word': 0.0, 'repeated word': 0.0, 'no stop': 50.0, 'length': 50.0, 'any': 50.0}
    """
    if not outcomes:
        raise ValueError("there are no utterances to count failures of")
    found = [outcome.failures for outcome in outcomes]
    share = 100 / len(found)
    return {**{name: share * sum(f[name] for f in found) for name in found[0]},
            "any": share * sum(any(f.values()) for f in found)}


#: 10 sqrt(2) / ln 10: from Euclidean distance of natural-log cepstra to decibels.
_DECIBELS = 10 * math.sqrt(2) / math.log(10)
_COEFFICIENTS = 13


def mel_cepstrum(mel: Tensor) -> np.ndarray:
    """Coefficients 1 to 13 of the orthonormal DCT-II along the bands of a log-mel, (T, 13) float64.

    Coefficient 0, the loudness, is omitted, so that a gain changes nothing unless values are clamped.

    Shapes: `mel (n_mels, T)`.
    Errors: ValueError for 13 bands or fewer, for no frames, for values that are not finite.

    Example:
        >>> import torch
        >>> mel_cepstrum(torch.full((80, 2), -3.0)).shape
        (2, 13)
    """
    if mel.dim() != 2 or mel.shape[0] <= _COEFFICIENTS or mel.shape[1] == 0 or not bool(mel.isfinite().all()):
        raise ValueError(f"a mel is finite and (n_mels, T), more than {_COEFFICIENTS} bands, got {tuple(mel.shape)}")
    from scipy.fft import dct

    return dct(mel.detach().double().cpu().numpy(), axis=0, norm="ortho")[1 : _COEFFICIENTS + 1].T


class Warping(NamedTuple):
    """The cheapest path through a table: the sum and the number of its cells."""

    total: float
    steps: int


def dynamic_time_warping(costs: np.ndarray) -> Warping:
    """The path with the smallest sum from the first cell to the last, by steps (1, 0), (0, 1) and (1, 1).

        D[i, j] = costs[i, j] + min(D[i-1, j-1], D[i-1, j], D[i, j-1]),    of equal sums the one with fewer cells

    Shapes: `costs (T, S)`.
    Errors: ValueError for an empty table, or one that is not finite.
    Source: Sakoe and Chiba 1978, symmetric form without weights.

    Example:
        >>> dynamic_time_warping(np.array([[0.0, 9.0, 9.0], [0.0, 1.0, 5.0], [9.0, 9.0, 0.0]]))
        Warping(total=1.0, steps=3)
    """
    return _warped(costs)[0]


def warping_path(costs: np.ndarray) -> np.ndarray:
    """The cells (n, 2) of the path of `dynamic_time_warping`, from the first to the last.

    Example:
        >>> warping_path(np.array([[0.0, 9.0, 9.0], [0.0, 1.0, 5.0], [9.0, 9.0, 0.0]])).tolist()
        [[0, 0], [1, 1], [2, 2]]
    """
    steps = _warped(costs)[1]
    cells = [(costs.shape[0] - 1, costs.shape[1] - 1)]
    while cells[-1] != (0, 0):
        i, j = cells[-1]
        back = steps[i, j]  # 0: both, 1: a row, 2: a column
        cells.append((i - (back < 2), j - (back != 1)))
    return np.array(cells[::-1])


def _warped(costs: np.ndarray) -> tuple[Warping, np.ndarray]:
    """The cheapest path, and the step (T, S) that leads to each cell."""
    if costs.ndim != 2 or costs.size == 0 or not np.isfinite(costs).all():
        raise ValueError(f"costs are a finite table (T, S), got {costs.shape}")
    rows, columns = costs.shape
    came = np.zeros((rows, columns), dtype=np.int8)
    # Cell (i, j) is element i of diagonal i + j; every diagonal starts with a border of infinity.
    before = [np.full(rows + 1, np.inf), np.full(rows + 1, np.inf)]
    steps = [np.zeros(rows + 1, dtype=np.int64), np.zeros(rows + 1, dtype=np.int64)]
    for diagonal in range(rows + columns - 1):
        low, high = max(0, diagonal - columns + 1), min(diagonal, rows - 1) + 1
        i = np.arange(low, high)
        here, taken = np.full(rows + 1, np.inf), np.zeros(rows + 1, dtype=np.int64)
        if diagonal == 0:
            best, count = np.zeros(1), np.zeros(1, dtype=np.int64)
        else:
            sums = np.stack([before[0][i], before[1][i], before[1][i + 1]])
            counts = np.stack([steps[0][i], steps[1][i], steps[1][i + 1]])
            best = sums.min(0)
            counts = np.where(sums == best, counts, np.iinfo(np.int64).max)
            count = counts.min(0)
            came[i, diagonal - i] = counts.argmin(0)
        here[i + 1], taken[i + 1] = best + costs[i, diagonal - i], count + 1
        before, steps = [before[1], here], [steps[1], taken]
    return Warping(float(before[1][rows]), int(steps[1][rows])), came


def mcd_mel13(mel: Tensor, reference: Tensor) -> float:
    """Mel-cepstral distortion in dB, from 13 coefficients of log-mels, along the cheapest path in time.

        10 sqrt(2) / ln 10 * mean over the path of |c_i - c'_j|,    the path with the smallest sum

    The name states the features: values are not comparable with those from WORLD's cepstra.

    Arguments:
        mel, reference: log-mels of the same settings; their lengths may differ.

    Shapes: `(n_mels, T)` and `(n_mels, S)`.
    Errors: ValueError for mels of different numbers of bands, and what `mel_cepstrum` refuses.
    Source: Kubichek 1993; Sakoe and Chiba 1978.

    Example:
        >>> import torch
        >>> mel = torch.randn(80, 20, generator=torch.Generator().manual_seed(0))
        >>> mcd_mel13(mel, mel), mcd_mel13(mel.repeat_interleave(2, 1), mel)
        (0.0, 0.0)
    """
    path = dynamic_time_warping(_distortions(mel, reference))
    return path.total / path.steps


def _distortions(mel: Tensor, reference: Tensor) -> np.ndarray:
    """The distortion in dB of every pair of frames (T, S)."""
    if mel.shape[:1] != reference.shape[:1]:
        raise ValueError(f"the mels have {mel.shape[0]} and {reference.shape[0]} bands")
    one, other = mel_cepstrum(mel), mel_cepstrum(reference)
    # Explicit differences instead of an expanded square, so that equal frames have a distance of exactly 0.
    return _DECIBELS * np.stack([np.sqrt(np.square(frame - other).sum(1)) for frame in one])


@dataclass(frozen=True)
class Pitch:
    """Log F0 of synthesised utterances, compared with that of recordings.

    Attributes:
        rmse: root mean square difference in semitones, of pairs of voiced frames; None without one.
        voicing: share of pairs of which one frame is voiced and the other is not.
        spread, recorded: standard deviation of log F0 within utterances, in semitones: synthesised, and of the
            recordings; None without a voiced frame.
    """

    rmse: float | None
    voicing: float
    spread: float | None
    recorded: float | None


def compared_pitch(
    mels: Sequence[Tensor], references: Sequence[Tensor], own: Sequence[np.ndarray], true: Sequence[np.ndarray]
) -> Pitch:
    """The pitch of utterances against that of recordings, aligned by the path of `mcd_mel13`.

        rmse^2 = mean over pairs (i, j) of voiced frames of (12 log2 F_i/F'_j)^2

    Arguments:
        mels, references: log-mels of each utterance, and of its recording.
        own, true: their pitch, from `log_pitch`.

    Errors: ValueError for no utterances, and what `mcd_mel13` refuses.

    Example:
        >>> mel = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
        >>> compared_pitch([mel], [mel], [np.array([80.0, np.nan, 84.0])], [np.array([81.0, 80.0, 85.0])]).rmse
        1.0
    """
    if not mels:
        raise ValueError("there are no utterances to compare the pitch of")
    squares, unlike, pairs = [], 0, 0
    for mel, reference, mine, given in zip(mels, references, own, true, strict=True):
        i, j = warping_path(_distortions(mel, reference)).T
        difference = mine[i] - given[j]
        squares.append(np.square(difference[np.isfinite(difference)]))
        unlike, pairs = unlike + int((np.isnan(mine[i]) != np.isnan(given[j])).sum()), pairs + len(i)
    whole = np.concatenate(squares)
    rmse = float(np.sqrt(whole.mean())) if len(whole) else None
    return Pitch(rmse, unlike / pairs, _spread(own), _spread(true))


def _spread(tracks: Sequence[np.ndarray]) -> float | None:
    """The standard deviation of the voiced frames of utterances, each about its own mean."""
    voiced = [track[np.isfinite(track)] for track in tracks]
    centred = [track - track.mean() for track in voiced if len(track)]
    return float(np.sqrt(np.square(np.concatenate(centred)).mean())) if centred else None


@dataclass(frozen=True)
class SpokenAt:
    """Metrics of texts synthesised at one value of an option of sampling."""

    key: str
    value: float
    utterances: int
    mcd_mel13: float
    length_ratio: float
    pitch: Pitch | None
