"""The search for the best monotonic path as compiled loops; numba is imported when the first search is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np


@cache
def compiled() -> Callable:
    """The function search(scores, tokens, frames, visited), compiled at its first call and kept on disk.

    It fills `visited (B, T)` with the token of each frame on the best path through `scores (B, T, N)`; frames beyond
    an item's last one keep its last token.
    """
    import numba

    prange = numba.prange

    def search(scores, tokens, frames, visited):
        for item in prange(scores.shape[0]):
            n, t = tokens[item], frames[item]
            best = np.empty((t, n + 1), dtype=scores.dtype)  # the first cell of each row is one that nothing reaches
            best[:, 0] = -np.inf
            best[0, 1:] = -np.inf
            best[0, 1] = scores[item, 0, 0]
            for j in range(1, t):
                before, here, at = best[j - 1], best[j], scores[item, j]
                for i in range(n):
                    stay, move = before[i + 1], before[i]
                    here[i + 1] = (move if move > stay else stay) + at[i]
            i = n - 1
            for j in range(scores.shape[1] - 1, -1, -1):
                visited[item, j] = i
                if 0 < j < t and best[j - 1, i] > best[j - 1, i + 1]:
                    i -= 1

    return numba.njit(parallel=True, cache=True, nogil=True)(search)
