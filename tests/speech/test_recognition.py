"""Recognition: the same sound is heard alike, and curves of errors are counted by hand."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from functools import cache

import numpy as np
import pytest
import torch

from genmodels.speech.audio import read_wav
from genmodels.speech.recognition import (
    Difference,
    Edits,
    Pair,
    PocketSphinx,
    aligned,
    character_edits,
    edits,
    error_curve,
    pooled,
    spoken_form,
    word_edits,
)
from tests.speech.test_audio import CLIPS

CLIP = CLIPS / "LJ001-0002.wav"


def utterances(count: int, rate: float, seed: int = 0) -> list[Edits]:
    draw = np.random.default_rng(seed)
    return [Edits(int(draw.binomial(n, rate)), 0, 0, int(n)) for n in draw.integers(20, 100, count)]


def test_bins_are_counted_by_hand():
    edits = [Edits(1, 0, 0, 10), Edits(0, 2, 0, 40), Edits(0, 0, 3, 41), Edits(4, 0, 0, 80), Edits(0, 0, 0, 130)]
    found = error_curve(edits, {"recordings": [Edits(0, 0, 0, e.length) for e in edits]})
    assert [(b.shortest, b.longest, b.utterances) for b in found] == [
        (1, 40, 2), (41, 80, 2), (121, 160, 1), (10, 130, 5)]  # fmt: skip
    assert [b.rate.value for b in found] == pytest.approx([3 / 50, 7 / 121, 0, 10 / 301])
    assert [b.differences["recordings"].value for b in found] == pytest.approx([3 / 50, 7 / 121, 0, 10 / 301])
    # A single utterance says nothing of the spread.
    assert math.isnan(found[2].rate.low) and not found[2].differences["recordings"].claimed
    none = error_curve([Edits(0, 0, 0, 20)] * 5)[-1].rate
    assert (none.value, none.low, none.high) == (0.0, 0.0, 0.6)  # of five utterances without an error
    words = error_curve([Edits(1, 0, 0, 5)] * 2, lengths=[30, 70], width=50)
    assert [(b.shortest, b.longest) for b in words] == [(1, 50), (51, 100), (30, 70)]


@pytest.mark.parametrize("count", [3, 6, 40])
def test_intervals_cover_the_truth(count):
    # Of 200 experiments 95 % should; four standard errors below that still counts.
    covered = 0
    for seed in range(200):
        interval = error_curve(utterances(count, 0.2, seed), draws=200, width=1000, seed=seed)[-1].rate
        covered += interval.low <= 0.2 <= interval.high
    assert covered / 200 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 200)


def test_few_utterances_claim_no_difference_that_is_not_there():
    """Five per cent may be, and four standard errors more."""
    claimed = 0
    for seed in range(200):
        one, other = utterances(3, 0.2, seed), utterances(3, 0.2, 1000 + seed)
        claimed += error_curve(one, {"other": other}, draws=200, width=1000, seed=seed)[-1].differences["other"].claimed
    assert claimed / 200 < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 200)


def test_differences_are_paired():
    edits = utterances(60, 0.3)
    worse = [Edits(e.substitutions + 2, 0, 0, e.length) for e in edits]
    bin = error_curve(worse, {"topline": edits}, width=1000)[-1]
    difference = bin.differences["topline"]
    assert difference.value == pytest.approx(pooled(worse).rate - pooled(edits).rate)
    assert difference.claimed and difference.high - difference.low < 0.5 * (bin.rate.high - bin.rate.low)
    same = error_curve(edits, {"topline": edits}, width=1000)[-1].differences["topline"]
    assert same.value == same.low == same.high == 0 and not same.claimed
    # Under two points nothing is claimed, however sure.
    assert not Difference(0.019, 0.018, 0.0195).claimed and not Difference(0.05, -0.01, 0.1).claimed
    assert Difference(-0.05, -0.08, -0.01).claimed
    again = error_curve(worse, {"topline": edits}, width=1000)[-1]
    assert again == bin and error_curve(worse, {"topline": edits}, width=1000, seed=1)[-1] != bin


def test_bad_input(monkeypatch):
    for errors, toplines in (([], None), ([Edits(0, 0, 0, 1)], {"recordings": []})):
        with pytest.raises(ValueError, match="same utterances everywhere"):
            error_curve(errors, toplines)
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(ValueError, match=r"genmodels\[speech\]"):
        PocketSphinx()


@pytest.mark.skipif(importlib.util.find_spec("pocketsphinx") is None, reason="pocketsphinx is not installed")
@pytest.mark.skipif(not CLIP.is_file(), reason=f"{CLIP.name} of LJSpeech is not there")
def test_a_recording_is_heard():
    recognise, (wave, rate) = PocketSphinx(), read_wav(CLIP)
    heard = recognise(wave, rate)
    assert character_edits("in being comparatively modern.", heard).rate < 0.5
    noise = 0.1 * torch.randn(2 * rate, generator=torch.Generator().manual_seed(0))
    recognise(noise, rate)
    assert recognise(wave, rate) == heard
    # At half the rate it is other sound.
    assert character_edits("in being comparatively modern.", recognise(wave, 2 * rate)).rate > 0.6
    assert recognise(torch.zeros(400), rate) == ""
    with pytest.raises(ValueError, match="finite and of shape"):
        recognise(torch.zeros(0), rate)


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


def test_rates_are_those_of_jiwer():
    jiwer = pytest.importorskip("jiwer", reason="jiwer is not installed")
    draw, words = random.Random(1), ["a", "bad", "cab", "dad's"]
    said, heard = ([" ".join(draw.choices(words, k=draw.randrange(1, 9))) for _ in range(200)] for _ in range(2))
    pairs = list(zip(said, heard, strict=True))
    assert pooled(word_edits(*pair) for pair in pairs).rate == pytest.approx(jiwer.wer(said, heard), abs=1e-12)
    assert pooled(character_edits(*pair) for pair in pairs).rate == pytest.approx(jiwer.cer(said, heard), abs=1e-12)
    assert pooled(word_edits(*pair[::-1]) for pair in pairs).rate != pytest.approx(jiwer.wer(said, heard), abs=1e-3)


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
