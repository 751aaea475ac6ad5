"""Decoding of recognisers: greedy and beam search, a language model, times of characters."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from genmodels.core.errors import at_least, check_number
from genmodels.speech.recognition import Edits, word_edits

#: The number of the blank of CTC and of transducers, and of the beginning and the end of a text elsewhere.
BLANK = 0
#: The widest beam of the commands: a search takes time and memory in proportion.
LARGEST_BEAM = 1000


class Hypothesis(NamedTuple):
    """A text as numbers, and its score: log p, with what a language model adds, divided for its length."""

    tokens: tuple[int, ...]
    score: float


class NGram:
    """A language model that predicts a character from the n - 1 before it (Witten-Bell).

        p(k | c) = (count(c k) + s(c) p(k | c')) / (count(c) + s(c)),    p(k | nothing') = 1 / V

    c' is c without its first character, s(c) the number of different characters that follow c. Class 0 is the end of a
    text; texts begin with an empty context.

    Arguments:
        texts: as numbers from 1 on.
        classes: V, the number of characters and the end.
        order: n.

    Errors: ValueError for an order below 1, or a number that is no class.
    Source: Witten and Bell 1991, method C; interpolated as in Chen and Goodman 1998, section 2.4.

    Example:
        >>> model = NGram([(1, 2, 1, 2)], 3, order=2)
        >>> [round(math.exp(p), 2) for p in model.log_probs((1,))]  # after 1: 2 twice, else as without a context
        [0.08, 0.13, 0.79]
    """

    def __init__(self, texts: Iterable[Sequence[int]], classes: int, *, order: int = 6):
        at_least(1, order=order)
        self.classes, self.order = classes, order
        self.counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._known: dict[tuple[int, ...], np.ndarray] = {}
        for text in texts:
            whole = (*text, BLANK)
            if not all(0 < k < classes for k in text):
                raise ValueError(f"the text {tuple(text)} has numbers outside 1..{classes - 1}")
            for n, k in enumerate(whole):
                for length in range(min(order, n + 1)):
                    self.counts[whole[n - length : n]][k] += 1

    def log_probs(self, before: Sequence[int]) -> np.ndarray:
        """log p of every class (V,) after a text."""
        context = tuple(before)[max(0, len(before) - self.order + 1) :] if self.order > 1 else ()
        if context not in self._known:
            self._known[context] = np.log(self._probs(context))
        return self._known[context]

    def _probs(self, context: tuple[int, ...]) -> np.ndarray:
        shorter = self._probs(context[1:]) if context else np.full(self.classes, 1 / self.classes)
        followed = self.counts.get(context)
        if not followed:
            return shorter
        found = len(followed) * shorter
        for k, count in followed.items():
            found[k] += count
        return found / found.sum()

    def log_prob(self, text: Sequence[int]) -> float:
        """log p of a whole text, its end included."""
        return sum(float(self.log_probs(text[:n])[k]) for n, k in enumerate((*text, BLANK)))


class ByteLanguage:
    """A language model of bytes as one of the characters of a recogniser, each text a line of its own.

        p(k | y) = q(b_k | newline b_y) / sum_j q(b_j | newline b_y),    b_0 = newline, the end of a text

    Arguments:
        step: `step(bytes, state) -> (log q (n, 256) of the byte after each of n new ones, state)`; the state is None at
            the beginning, where the first row is for the first byte.
        table: the byte of every class.
        longest: bytes of the sequences that the model has learned from, at least 2; of longer texts it reads the end.

    Errors: ValueError for a number that is no byte.

    Example:
        >>> even = ByteLanguage(lambda read, state: (torch.zeros(len(read) + 1, 256), None), [10, 97, 98], longest=64)
        >>> [round(math.exp(p), 2) for p in even.log_probs((1,))]
        [0.33, 0.33, 0.33]
    """

    _STATES, _TEXTS = 128, 100_000  # kept: states are large

    def __init__(self, step: Callable, table: Sequence[int], *, longest: int):
        if not all(0 <= byte < 256 for byte in table):
            raise ValueError("a language model of bytes needs a byte for every character")
        self._step, self._table, self._longest = step, list(table), longest
        self._known: dict[tuple[int, ...], np.ndarray] = {}
        self._states: dict[tuple[int, ...], Any] = {}

    def log_probs(self, before: Sequence[int]) -> np.ndarray:
        """log p of every class (V,) after a text."""
        text = tuple(before)
        if text not in self._known:
            if len(self._known) >= self._TEXTS:
                self._known.clear()
            if text and text[:-1] in self._states and len(text) + 2 <= self._longest:
                rows, state = self._step([self._table[text[-1]]], self._states[text[:-1]])
            else:
                rows, state = self._step(self._bytes(text), None)
            while len(self._states) >= self._STATES:
                del self._states[next(iter(self._states))]
            self._states[text], self._known[text] = state, self._of_classes(rows[-1:])[0]
        return self._known[text]

    def log_prob(self, text: Sequence[int]) -> float:
        """log p of a whole text, its end included."""
        if len(text) + 2 > self._longest:
            return sum(float(self.log_probs(text[:n])[k]) for n, k in enumerate((*text, BLANK)))
        rows = self._of_classes(self._step(self._bytes(text), None)[0][1:])
        return sum(float(row[k]) for row, k in zip(rows, (*text, BLANK), strict=True))

    def share(self) -> float:
        """The mean probability of all classes among all bytes, along the likeliest text, character by character."""
        text: list[int] = []
        while len(text) < min(16, self._longest - 2):
            text.append(1 + int(self.log_probs(text)[1:].argmax()))
        rows = self._step(self._bytes(text), None)[0][-len(text) - 1 :]
        return float(rows[:, self._table].double().exp().sum(1).mean())

    def _bytes(self, text: Sequence[int]) -> list[int]:
        return [self._table[k] for k in (BLANK, *text)][1 - self._longest :]

    def _of_classes(self, rows: Tensor) -> np.ndarray:
        return rows[:, self._table].double().log_softmax(-1).numpy()


@dataclass(frozen=True, kw_only=True)
class Search:
    """The options of a search.

        score = (log p(y | x) + weight log p_language(y)) / ((5 + U) / 6)^length,    U characters

    Arguments:
        beam: number of texts that are kept.
        language: a language model, or None.
        weight: of its log-probabilities (shallow fusion).
        rescore: rank the texts of a search without the language model with it afterwards (n-best rescoring), which
            calls it for these texts alone; shallow fusion if False.
        length: exponent of the normalisation of `beam_search`, from 0 for none to 1.
        symbols: maximum number of characters that a transducer emits at a frame.
        least: characters with a lower log-probability are skipped at a frame of CTC.

    Errors: ValueError for a beam below 1 or numbers out of range.
    Source: length normalisation: Wu et al. 2016, equation 14; shallow fusion: Gulcehre et al. 2015, section 4.1;
        rescoring of an n-best list: Ostendorf et al. 1991.
    """

    beam: int = 1
    language: NGram | ByteLanguage | None = None
    weight: float = 0.3
    rescore: bool = False
    length: float = 0.0
    symbols: int = 3
    least: float = -9.0
    _fused: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        at_least(1, beam=self.beam, symbols=self.symbols)
        check_number("weight", self.weight, 0)
        check_number("length", self.length, 0)

    def fused(self, text: tuple[int, ...]) -> float:
        """The language model's contribution to the score of an unfinished text."""
        if self.language is None or not text:
            return 0.0
        if text not in self._fused:
            own = float(self.language.log_probs(text[:-1])[text[-1]])
            self._fused[text] = self.fused(text[:-1]) + self.weight * own
        return self._fused[text]

    def ended(self, text: tuple[int, ...]) -> float:
        """The language model's contribution to the score of a finished text."""
        end = 0.0 if self.language is None else self.weight * float(self.language.log_probs(text)[BLANK])
        return self.fused(text) + end

    def first_pass(self) -> Search:
        """The options of the search itself: with `rescore` without the language model."""
        return replace(self, language=None, rescore=False, _fused={}) if self.rescore else self

    def second_pass(self, found: list[Hypothesis], length: float = 0.0) -> list[Hypothesis]:
        """The texts of a search, best first; with `rescore` by the scores that shallow fusion gives them.

        `found` is of a search by `first_pass`, whose scores were divided by the exponent `length`.
        """
        if not self.rescore or self.language is None:
            return found
        weight, read = self.weight, self.language  # each text at once, not character by character as `ended`
        scores = [Hypothesis(text, score + weight * read.log_prob(text) / _divisor(len(text), length))
                  for text, score in found]
        return sorted(scores, key=lambda one: one.score, reverse=True)

    def ranked(self, item: tuple[tuple[int, ...], float]) -> float:
        """The score of an unfinished text, from a pair of the text and its log-probability."""
        return item[1] + self.fused(item[0])

    def best(self, found: dict[tuple[int, ...], float]) -> list[tuple[tuple[int, ...], float]]:
        """The texts to keep of those with these log-probabilities, best first."""
        return heapq.nlargest(self.beam, ((text, p) for text, p in found.items() if p > -math.inf), key=self.ranked)

    def finished(self, found: dict[tuple[int, ...], float]) -> list[Hypothesis]:
        """All of them as finished texts, best first."""
        ends = [Hypothesis(text, p + self.ended(text)) for text, p in found.items()]
        self._fused.clear()  # of one recording
        return sorted(ends, key=lambda one: one.score, reverse=True)


def collapsed(path: Sequence[int]) -> tuple[int, ...]:
    """The text of a path of CTC: repetitions are merged, then blanks removed.

    Example:
        >>> collapsed([0, 3, 3, 0, 3, 5, 5])
        (3, 3, 5)
    """
    return tuple(k for k, before in zip(path, [BLANK, *path], strict=False) if k not in (before, BLANK))


def ctc_greedy(log_probs: Tensor, frames: Tensor | None = None) -> list[Hypothesis]:
    """The text of the most probable path of each item, with the log-probability of that path.

    Shapes: `log_probs (B, T, V)`, `frames (B,)` valid frames.

    Example:
        >>> ctc_greedy(torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]]).log())[0].tokens
        (1, 1)
    """
    best = log_probs.max(-1)
    lengths = [log_probs.shape[1]] * len(log_probs) if frames is None else frames.tolist()
    return [Hypothesis(collapsed(path[:n].tolist()), float(scores[:n].double().sum()))
            for path, scores, n in zip(best.indices, best.values, lengths, strict=True)]


def ctc_beam(log_probs: Tensor, how: Search) -> list[Hypothesis]:
    """The most probable texts of one item, best first, by prefix beam search: paths of the same text are summed.

        p_b(y) <- (p_b(y) + p_n(y)) p(blank)
        p_n(y) <- p_n(y) p(last(y)) + p(last(y)) (p_b(y') + [last differs from that of y'] p_n(y')),    y = y' last(y)

    p_b and p_n are the probabilities of the paths of a text that end in a blank, and in its last character.

    Shapes: `log_probs (T, V)`.
    Source: Graves and Jaitly 2014, algorithm 1; Hannun et al. 2014.

    Example:
        >>> found = ctc_beam(torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log(), Search(beam=2))
        >>> [(one.tokens, round(math.exp(one.score), 2)) for one in found]
        [((1,), 0.64), ((), 0.36)]
    """
    nothing = (-math.inf, -math.inf)
    kept: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for row in log_probs.double().tolist():
        found: dict[tuple[int, ...], tuple[float, float]] = {}
        tried = [(k, p) for k, p in enumerate(row) if k != BLANK and p > how.least]
        for text, (ends_blank, ends_symbol) in kept.items():
            total = plus(ends_blank, ends_symbol)
            old = found.get(text, nothing)
            repeated = ends_symbol + row[text[-1]] if text else -math.inf
            found[text] = (plus(old[0], total + row[BLANK]), plus(old[1], repeated))
            for k, p in tried:
                longer = (*text, k)
                old = found.get(longer, nothing)
                before = ends_blank if text and text[-1] == k else total
                found[longer] = (old[0], plus(old[1], before + p))
        best = how.best({text: plus(*both) for text, both in found.items()})
        kept = {text: found[text] for text, _ in best}
    return how.finished({text: plus(*both) for text, both in kept.items()})


def plus(a: float, b: float) -> float:
    """log(exp(a) + exp(b)).

    Example:
        >>> plus(0.0, -math.inf), round(plus(1.0, 1.0) - 1, 6)
        (0.0, 0.693147)
    """
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log1p(math.exp(b - a))


def beam_search(
    step: Callable[[Tensor, Any], tuple[Tensor, Any]], state: Any, how: Search, *, longest: int,
    device: torch.device | str = "cpu",
) -> list[Hypothesis]:  # fmt: skip
    """The most probable texts of an autoregressive model, best first.

    A text ends where its end is one of the `beam` best continuations of all texts, so that a beam of 1 is greedy: the
    total score alone prefers short texts, above all after label smoothing.

    Arguments:
        step: `step(tokens (K,), state) -> (log_probs (K, V), state)`; the first token, and the end, are class 0.
        state: before the first step, with K = 1: tensors with K rows, in tuples.
        how: beam, language model, length normalisation.
        longest: maximum number of characters.
        device: of the tokens.

    The search stops when no unfinished text can become one of the best.

    Source: Sutskever et al. 2014, section 3.2.

    Example:
        >>> log_probs = torch.tensor([[0.3, 0.7]]).log()  # the end, a character
        >>> found = beam_search(lambda tokens, state: (log_probs.expand(len(tokens), 2), state), (), Search(beam=2),
        ...                     longest=9)
        >>> [(one.tokens, round(math.exp(one.score), 2)) for one in found]
        [((), 0.3), ((1,), 0.21)]
    """
    alive, ends = {(): 0.0}, []
    tokens = torch.tensor([BLANK], device=device)
    for length in range(longest + 1):
        log_probs, state = step(tokens, state)
        longer, places, finals = {}, {text: place for place, text in enumerate(alive)}, {}
        for (text, score), row in zip(alive.items(), log_probs.double().tolist(), strict=True):
            finals[text] = score + row[BLANK] + how.ended(text)
            longer |= {(*text, k): score + p for k, p in enumerate(row) if k != BLANK}
        alive = dict(how.best(longer))
        if length < longest:
            scores = [*finals.values(), *map(how.ranked, alive.items())]
            least = min(heapq.nlargest(how.beam, scores))
            finals = {text: score for text, score in finals.items() if score >= least}
        ends += [Hypothesis(text, score / _divisor(length, how.length)) for text, score in finals.items()]
        ends = heapq.nlargest(how.beam, ends, key=lambda one: one.score)
        if length == longest or not alive:
            break
        most = max(map(how.ranked, alive.items())) / _divisor(longest, how.length)
        if len(ends) == how.beam and ends[-1].score >= most:
            break
        state = _rows(state, torch.tensor([places[text[:-1]] for text in alive], device=device))
        tokens = torch.tensor([text[-1] for text in alive], device=device)
    how._fused.clear()  # of one recording
    return [one for one in ends if one.score > -math.inf]


def _divisor(characters: int, length: float) -> float:
    return ((5 + characters) / 6) ** length


def _rows(state: Any, chosen: Tensor) -> Any:
    """The chosen rows of every tensor of a state."""
    if isinstance(state, Tensor):
        return state[chosen]
    if isinstance(state, tuple):
        parts = [_rows(part, chosen) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def ctc_alignment(log_probs: Tensor, text: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last frame of every character of a text on its most probable path (Viterbi).

    Shapes: `log_probs (T, V)`. Errors: ValueError for a text that has no path in so few frames.
    Source: Graves et al. 2006, section 4; Kurzinger et al. 2020.

    Example:
        >>> ctc_alignment(torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1], [0.2, 0.8]]).log(), (1, 1))
        [(0, 1), (3, 3)]
    """
    rows = log_probs.detach().double().cpu().numpy()
    path = np.zeros(2 * len(text) + 1, dtype=np.int64)  # a blank between, before and after the characters
    path[1::2] = text
    may_skip = np.zeros(len(path), dtype=bool)
    may_skip[3::2] = path[3::2] != path[1:-2:2]
    score = np.full(len(path), -np.inf)
    score[:2] = rows[0, path[:2]]
    steps = np.zeros((len(rows), len(path)), dtype=np.int64)
    for t in range(1, len(rows)):
        before = np.full((3, len(path)), -np.inf)
        before[0], before[1, 1:] = score, score[:-1]
        before[2, 2:] = np.where(may_skip[2:], score[:-2], -np.inf)
        steps[t] = before.argmax(0)
        score = before.max(0) + rows[t, path]
    place = len(path) - 1 - int(len(path) > 1 and score[-2] > score[-1])
    if score[place] == -np.inf:
        raise ValueError(f"{len(text)} characters have no path in {len(rows)} frames")
    spans: list[list[int]] = [[] for _ in text]
    for t in range(len(rows) - 1, -1, -1):
        if place % 2:
            spans[place // 2].append(t)
        place -= int(steps[t, place])
    return [(found[-1], found[0]) for found in spans]


def ctc_triggers(log_probs: Tensor, frames: Tensor) -> list[list[int]]:
    """The frames at which the characters of each item's most probable path begin.

    Shapes: `log_probs (B, T, V)`, `frames (B,)` valid frames.

    Example:
        >>> ctc_triggers(torch.tensor([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]]).log(), torch.tensor([3]))
        [[0, 2]]
    """
    found = []
    for path, n in zip(log_probs.argmax(-1).tolist(), frames.tolist(), strict=True):
        found.append([t for t in range(n) if path[t] != BLANK and (t == 0 or path[t] != path[t - 1])])
    return found


def oracle(said: str, heard: Sequence[str]) -> Edits:
    """The fewest word edits of any text of a list (oracle WER).

    Example:
        >>> oracle("so it is", ["so it", "so it is", "it is"]).total
        0
    """
    return min((word_edits(said, text) for text in heard), key=lambda one: one.total)


def expected_errors(log_probs: Tensor, errors: Tensor) -> Tensor:
    """The expected number of errors over a list, less the mean of the list, whose gradient is zero, `(B,)`.

        L = sum_i P_i (W_i - mean W),    P_i = p(y_i | x) / sum_j p(y_j | x)

    Shapes: `log_probs`, `errors (B, N)`; entries with a log-probability of minus infinity are left out.
    Source: Prabhavalkar et al. 2018 (minimum word error rate training), equation 3.

    Example:
        >>> expected_errors(torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.0, 2.0]]))
        tensor([-0.5000])
    """
    inside = log_probs.isfinite()
    shares = log_probs.masked_fill(~inside, -torch.inf).softmax(1)
    mean = errors.masked_fill(~inside, 0).sum(1, keepdim=True) / inside.sum(1, keepdim=True).clamp(min=1)
    return (shares * (errors - mean)).masked_fill(~inside, 0).sum(1)
