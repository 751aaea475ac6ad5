"""Texts out of the distributions of a recogniser: greedy and beam search, n-best lists, times of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from genmodels.core.errors import at_least

#: The number of the blank of CTC.
BLANK = 0


class Hypothesis(NamedTuple):
    """A text as numbers, and its score: log p, plus what a language model and its length add."""

    tokens: tuple[int, ...]
    score: float


def collapsed(path: Sequence[int]) -> tuple[int, ...]:
    """The text of a path of CTC: repetitions count once, blanks not at all.

    Example:
        >>> collapsed([0, 3, 3, 0, 3, 5, 5])
        (3, 3, 5)
    """
    return tuple(k for k, before in zip(path, [BLANK, *path], strict=False) if k not in (before, BLANK))


def ctc_greedy(log_probs: Tensor, frames: Tensor | None = None) -> list[Hypothesis]:
    """The text of the most probable path of each item, with the log-probability of that path.

    Shapes: `log_probs (B, T, V)`, of which the first `frames (B,)` of each item count.

    Example:
        >>> ctc_greedy(torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]]).log())[0].tokens
        (1, 1)
    """
    best = log_probs.max(-1)
    lengths = [log_probs.shape[1]] * len(log_probs) if frames is None else frames.tolist()
    return [Hypothesis(collapsed(path[:n].tolist()), float(scores[:n].double().sum()))
            for path, scores, n in zip(best.indices, best.values, lengths, strict=True)]


def ctc_beam(log_probs: Tensor, *, beam: int = 8, least: float = -9.0) -> list[Hypothesis]:
    """The most probable texts of one item, best first, by prefix beam search: paths of the same text are summed.

        p_b(y) <- (p_b(y) + p_n(y)) p(blank)
        p_n(y) <- p_n(y) p(last(y)) + p(last(y)) (p_b(y') + [last differs from that of y'] p_n(y')),    y = y' last(y)

    p_b and p_n are the probabilities of the paths of a text that end in a blank, and in its last character.

    Arguments:
        log_probs: `(T, V)`.
        beam: texts kept at each frame.
        least: characters with a lower log-probability are not tried at a frame.

    Errors: ValueError for a beam below 1.
    Source: Graves and Jaitly 2014, algorithm 1; Hannun et al. 2014.

    Example:
        >>> found = ctc_beam(torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log())
        >>> [(one.tokens, round(math.exp(one.score), 2)) for one in found]
        [((1,), 0.64), ((), 0.36)]
    """
    at_least(1, beam=beam)
    nothing = (-math.inf, -math.inf)
    kept: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for row in log_probs.double().tolist():
        found: dict[tuple[int, ...], tuple[float, float]] = {}
        tried = [(k, p) for k, p in enumerate(row) if k != BLANK and p > least]
        for text, (ends_blank, ends_symbol) in kept.items():
            total = _plus(ends_blank, ends_symbol)
            old = found.get(text, nothing)
            repeated = ends_symbol + row[text[-1]] if text else -math.inf
            found[text] = (_plus(old[0], total + row[BLANK]), _plus(old[1], repeated))
            for k, p in tried:
                longer = (*text, k)
                old = found.get(longer, nothing)
                before = ends_blank if text and text[-1] == k else total
                found[longer] = (old[0], _plus(old[1], before + p))
        best = sorted(found, key=lambda text: -_plus(*found[text]))[:beam]
        kept = {text: found[text] for text in best if _plus(*found[text]) > -math.inf}
    return [Hypothesis(text, _plus(*both)) for text, both in kept.items()]


def _plus(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log1p(math.exp(b - a))
