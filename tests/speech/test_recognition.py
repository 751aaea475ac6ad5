"""Recognition: the same sound is heard alike, and curves of errors are counted by hand."""

from __future__ import annotations

import importlib.util
import math
import sys

import numpy as np
import pytest
import torch

from genmodels.speech.audio import read_wav
from genmodels.speech.recognition import Difference, PocketSphinx, error_curve
from genmodels.speech.transcription import Edits, character_edits, pooled
from tests.speech.test_mel import CLIPS

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
    words = error_curve([Edits(1, 0, 0, 5)] * 2, lengths=[30, 70], width=50)
    assert [(b.shortest, b.longest) for b in words] == [(1, 50), (51, 100), (30, 70)]


def test_intervals_cover_the_truth():
    # Of 200 experiments 95 % should; four standard errors below that still counts.
    covered = 0
    for seed in range(200):
        interval = error_curve(utterances(40, 0.2, seed), draws=200, width=1000, seed=seed)[-1].rate
        covered += interval.low <= 0.2 <= interval.high
    assert covered / 200 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 200)


def test_differences_are_paired():
    edits = utterances(60, 0.3)
    worse = [Edits(e.substitutions + 2, 0, 0, e.length) for e in edits]
    bin = error_curve(worse, {"ceiling": edits}, width=1000)[-1]
    difference = bin.differences["ceiling"]
    assert difference.value == pytest.approx(pooled(worse).rate - pooled(edits).rate)
    assert difference.claimed and difference.high - difference.low < 0.5 * (bin.rate.high - bin.rate.low)
    same = error_curve(edits, {"ceiling": edits}, width=1000)[-1].differences["ceiling"]
    assert same.value == same.low == same.high == 0 and not same.claimed
    # Under two points nothing is claimed, however sure.
    assert not Difference(0.019, 0.018, 0.0195).claimed and not Difference(0.05, -0.01, 0.1).claimed
    assert Difference(-0.05, -0.08, -0.01).claimed
    again = error_curve(worse, {"ceiling": edits}, width=1000)[-1]
    assert again == bin and error_curve(worse, {"ceiling": edits}, width=1000, seed=1)[-1] != bin


def test_bad_input(monkeypatch):
    for edits, ceilings in (([], None), ([Edits(0, 0, 0, 1)], {"recordings": []})):
        with pytest.raises(ValueError, match="same utterances everywhere"):
            error_curve(edits, ceilings)
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
