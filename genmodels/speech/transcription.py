"""What was heard beside what was to be said: edits of characters and of words, words left out and said twice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from genmodels.speech.text import normalise


def spoken_form(text: str, language: str = "en") -> str:
    """A text as it is compared: its normal form, letters, apostrophes and single spaces alone.

    Raises:
        ValueError: for text without a letter, or with numbers that cannot be read (see `normalise`).

    Example:
        >>> spoken_form("Well-known, Mr. O'Neill!")
        "well known mister o'neill"
    """
    return " ".join(re.sub(r"[^\w' ]|_", " ", normalise(text, language)).split())


@dataclass(frozen=True)
class Edits:
    """The fewest changes from a reference to what was heard.

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
        """All the changes."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Changes for each item of the reference; of an empty reference 0, or infinity where something was heard."""
        if self.length == 0:
            return float("inf") if self.total else 0.0
        return self.total / self.length


def pooled(edits: Iterable[Edits]) -> Edits:
    """Edits of many utterances added up: a long one counts for more.

    Example:
        >>> pooled([Edits(1, 0, 0, 4), Edits(0, 0, 1, 16)]).rate
        0.1
    """
    sums = [(e.substitutions, e.deletions, e.insertions, e.length) for e in edits]
    return Edits(*(sum(column) for column in zip(*sums, strict=True))) if sums else Edits(0, 0, 0, 0)


class Pair(NamedTuple):
    """Places in the reference and in what was heard that belong together; None where there is none."""

    reference: int | None
    heard: int | None


def aligned(reference: Sequence, heard: Sequence) -> list[Pair]:
    """The alignment of the fewest edits, among those of the most equal pairs.

        D[i, j] = min(D[i-1, j-1] + (b if a_i != b_j else -1), D[i-1, j] + b, D[i, j-1] + b),    b > any number of pairs

    Of what is still equal, from the end: together, then left out, then added.

    Source: Levenshtein 1966; Wagner and Fischer 1974.

    Example:
        >>> aligned("cat", "at")
        [Pair(reference=0, heard=None), Pair(reference=1, heard=0), Pair(reference=2, heard=1)]
    """
    numbers = {item: k for k, item in enumerate(dict.fromkeys([*reference, *heard]))}
    code = np.array([numbers[item] for item in heard], dtype=np.int64)
    change = 1 + max(len(reference), len(heard))
    place = change * np.arange(len(heard) + 1)
    table = np.empty((len(reference) + 1, len(heard) + 1), dtype=np.int64)
    table[0] = place
    for i, item in enumerate(reference, 1):
        row = table[i - 1] + change
        row[1:] = np.minimum(row[1:], table[i - 1, :-1] + np.where(code != numbers[item], change, -1))
        # What was added since an earlier place costs a change for each place between.
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
    """The edits of an alignment, of characters for strings, of words for lists of them.

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
    """Edits of the characters of two texts in their spoken form, spaces among them; nothing heard is all left out.

    Example:
        >>> character_edits("In being, modern.", "in being modem").total
        2
    """
    return edits(spoken_form(text), _form_of_heard(heard))


def word_edits(text: str, heard: str) -> Edits:
    """Edits of the words of two texts in their spoken form.

    Example:
        >>> word_edits("In being, modern.", "in being modem").rate
        0.3333333333333333
    """
    return edits(spoken_form(text).split(), _form_of_heard(heard).split())


def _form_of_heard(heard: str) -> str:
    """A recogniser may hear nothing, which a text may not be."""
    return spoken_form(heard) if any(c.isalnum() for c in heard) else ""


class WordFaults(NamedTuple):
    """How many words were left out, and how many were said again."""

    missing: int
    repeated: int


def heard_faults(text: str, heard: str) -> WordFaults:
    """Words of a text that were not heard, and words that were heard once more beside where they belong.

    A word heard as another counts as neither. A weak recogniser leaves out words of good speech too: compare with what
    it makes of recordings.

    Example:
        >>> heard_faults("one two three", "one one two")
        WordFaults(missing=1, repeated=1)
    """
    words, found = spoken_form(text).split(), _form_of_heard(heard).split()
    pairs = aligned(words, found)
    missing = sum(pair.heard is None for pair in pairs)
    repeated = 0
    for k, pair in enumerate(pairs):
        if pair.reference is None:
            beside = [p for p in (*pairs[max(0, k - 1) : k], *pairs[k + 1 : k + 2]) if p.heard is not None]
            repeated += any(found[p.heard] == found[pair.heard] for p in beside)
    return WordFaults(missing, repeated)
