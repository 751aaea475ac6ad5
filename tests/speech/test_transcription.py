"""Edits against brute force, texts in the form they are compared in, and words left out or said twice."""

from __future__ import annotations

import random
from functools import cache

import pytest

from genmodels.speech.transcription import (
    Edits,
    Pair,
    aligned,
    character_edits,
    edits,
    heard_faults,
    pooled,
    spoken_form,
    word_edits,
)


@cache
def best(a: str, b: str) -> tuple[int, int]:
    """The fewest edits, and of those the most equal pairs (negative), by recursion over all alignments."""
    if not a or not b:
        return len(a) + len(b), 0
    pair, left, added = best(a[:-1], b[:-1]), best(a[:-1], b), best(a, b[:-1])
    equal = a[-1] == b[-1]
    return min((pair[0] + (not equal), pair[1] - equal), (left[0] + 1, left[1]), (added[0] + 1, added[1]))


def test_edits_are_the_fewest():
    draw = random.Random(0)
    for _ in range(600):
        a, b = ("".join(draw.choice("abc") for _ in range(draw.randrange(8))) for _ in range(2))
        pairs, found = aligned(a, b), edits(a, b)
        equal = sum(None not in p and a[p.reference] == b[p.heard] for p in pairs)
        assert (found.total, -equal) == best(a, b)
        assert [p.reference for p in pairs if p.reference is not None] == list(range(len(a)))
        assert [p.heard for p in pairs if p.heard is not None] == list(range(len(b)))
        assert found.length == len(a) and len(b) == len(a) - found.deletions + found.insertions
        # Turned round, what was left out was added.
        assert edits(b, a).total == found.total


def test_rates():
    assert edits("abc", "abc").rate == 0 and edits("", "").rate == 0
    assert edits("", "a").rate == float("inf") and edits("abc", "").rate == 1
    assert edits("ab", "xyzxyz").rate == 3
    assert pooled([]) == Edits(0, 0, 0, 0)
    # Pooled over characters, not a mean of rates.
    assert pooled([Edits(1, 0, 0, 1), Edits(0, 0, 0, 99)]).rate == 0.01
    assert aligned(["a"], []) == [Pair(0, None)] and aligned([], ["a"]) == [Pair(None, 0)]


@pytest.mark.parametrize(("text", "expected"), [
    ("Gunther Zeiner, at Augsburg; followed suit.", "gunther zeiner at augsburg followed suit"),
    ("the \u201cwell-known\u201d Mr. O\u2019Neill", "the well known mister o'neill"),
    ("snake_case -- twice", "snake case twice"),
])  # fmt: skip
def test_the_form_in_which_texts_are_compared(text, expected):
    assert spoken_form(text) == expected
    assert spoken_form(spoken_form(text)) == expected


def test_marks_and_case_are_not_errors():
    text = "In being comparatively modern, too."
    assert character_edits(text, "in being comparatively modern too").total == 0
    assert word_edits(text, "In being -- comparatively modern... too").total == 0
    assert character_edits(text, "").rate == word_edits(text, " . ").rate == 1
    pytest.importorskip("num2words", reason="num2words is not installed")
    assert word_edits("in 1455", "in fourteen fifty five").total == 0


@pytest.mark.parametrize(("heard", "missing", "repeated"), [
    ("one two three four", 0, 0), ("one two four", 1, 0), ("one two two three four", 0, 1), ("two three", 2, 0),
    ("one two too three four", 0, 0), ("one to three four", 0, 0), ("one one one two three four", 0, 2), ("", 4, 0),
])  # fmt: skip
def test_words_left_out_and_said_again(heard, missing, repeated):
    assert heard_faults("One, two: three, four!", heard) == (missing, repeated)
