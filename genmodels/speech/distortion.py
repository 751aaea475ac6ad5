"""How far one mel is from another, wherever in time its parts lie: mel-cepstral distortion along the best path."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.fft import dct
from torch import Tensor

#: 10 sqrt(2) / ln 10: from Euclidean distance of natural-log cepstra to decibels.
_DECIBELS = 10 * math.sqrt(2) / math.log(10)
_COEFFICIENTS = 13


def mel_cepstrum(mel: Tensor) -> np.ndarray:
    """Coefficients 1 to 13 of the orthonormal DCT-II along the bands of a log-mel, (T, 13) float64.

    Coefficient 0, the loudness, is left out: a gain changes nothing, where nothing is clamped.

    Shapes: `mel (n_mels, T)`.
    Errors: ValueError for 13 bands or fewer, for no frames, for values that are not finite.

    Example:
        >>> import torch
        >>> mel_cepstrum(torch.full((80, 2), -3.0)).shape
        (2, 13)
    """
    if mel.dim() != 2 or mel.shape[0] <= _COEFFICIENTS or mel.shape[1] == 0 or not bool(mel.isfinite().all()):
        raise ValueError(f"a mel is finite and (n_mels, T), more than {_COEFFICIENTS} bands, got {tuple(mel.shape)}")
    return dct(mel.detach().double().cpu().numpy(), axis=0, norm="ortho")[1 : _COEFFICIENTS + 1].T


class Warping(NamedTuple):
    """The cheapest path through a table: the sum of its cells, and how many they are."""

    total: float
    steps: int


def dynamic_time_warping(costs: np.ndarray) -> Warping:
    """The path of the smallest sum from the first cell to the last, by steps (1, 0), (0, 1) and (1, 1).

        D[i, j] = costs[i, j] + min(D[i-1, j-1], D[i-1, j], D[i, j-1]),    of equal sums the one of fewer cells

    Shapes: `costs (T, S)`.
    Errors: ValueError for an empty table, or one that is not finite.
    Source: Sakoe and Chiba 1978, symmetric form without weights.

    Example:
        >>> dynamic_time_warping(np.array([[0.0, 9.0, 9.0], [0.0, 1.0, 5.0], [9.0, 9.0, 0.0]]))
        Warping(total=1.0, steps=3)
    """
    if costs.ndim != 2 or costs.size == 0 or not np.isfinite(costs).all():
        raise ValueError(f"costs are a finite table (T, S), got {costs.shape}")
    rows, columns = costs.shape
    # Cell (i, j) stands at place i of diagonal i + j; a border of infinity stands before every diagonal.
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
            count = np.where(sums == best, counts, np.iinfo(np.int64).max).min(0)
        here[i + 1], taken[i + 1] = best + costs[i, diagonal - i], count + 1
        before, steps = [before[1], here], [steps[1], taken]
    return Warping(float(before[1][rows]), int(steps[1][rows]))


def mcd_mel13(mel: Tensor, reference: Tensor) -> float:
    """Mel-cepstral distortion in dB, from 13 coefficients of log-mels, along the cheapest path in time.

        10 sqrt(2) / ln 10 * mean over the path of |c_i - c'_j|,    the path of the smallest sum

    Named for what it is made of: it does not compare with figures from WORLD's cepstra.

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
    if mel.shape[:1] != reference.shape[:1]:
        raise ValueError(f"the mels have {mel.shape[0]} and {reference.shape[0]} bands")
    one, other = mel_cepstrum(mel), mel_cepstrum(reference)
    # Differences, not a product multiplied out: of equal frames the distance is exactly 0.
    distances = np.stack([np.sqrt(np.square(frame - other).sum(1)) for frame in one])
    path = dynamic_time_warping(_DECIBELS * distances)
    return path.total / path.steps
