"""Figures of speech: a model that plays the recordings back is perfect, one that does not is seen to fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from genmodels.data.speech import Speech
from genmodels.evaluation import speech_stage
from genmodels.evaluation.opened import Opened
from genmodels.evaluation.request import Request
from genmodels.models.base import Samples
from genmodels.speech.alignment import Alignment

COUNT = 3


class Parrot:
    """A model that has heard the recordings: it says each as it is, or `slow`: every frame several times."""

    family = "parrot"

    def __init__(self, data: Speech, slow: int = 1, stops: bool = True):
        self.spec, self.device, self.slow, self.stops = data.spec, torch.device("cpu"), slow, stops
        self.items, self.split = data.split("test").items, data.split("test")

    def sample(self, n, cond=None, *, text, seed, weights):
        (k,) = [k for k, item in enumerate(self.items) if item.text == text]
        batch = self.split.__getitems__([k])
        mel = batch.x[:, :, : int(batch.mask.sum())].repeat_interleave(self.slow, 2)
        made = {"not_stopped": [] if self.stops else [0], "words_missing_repeated": [[0, 0 if self.stops else 2]]}
        mask = torch.ones(1, 1, mel.shape[2], dtype=torch.bool)
        return Samples(mel, batch.cond, torch.tensor([0]), made, mask=mask,
                       durations=torch.ones_like(batch.cond.tokens) * self.slow * batch.cond.mask[:, 0])

    def aligned(self, batch, weights, seed):
        return Alignment(batch.cond.mask[:, 0].long(), batch.cond.mask, torch.zeros(len(batch)))


@pytest.fixture(scope="module")
def data() -> Speech:
    return Speech().prepare()


def opened(data: Speech, **manner) -> Opened:
    return Opened(None, Parrot(data, **manner), {}, data, Request(samples=COUNT), COUNT)


def figures(own: Opened) -> dict:
    batch = own.judged(COUNT)
    texts = speech_stage._texts(batch, own.spec.text)
    return speech_stage._beside(own, batch, *speech_stage._spoken(own, batch, texts))


def test_texts_are_those_that_were_read(data):
    own = opened(data)
    assert speech_stage._texts(own.judged(COUNT), own.spec.text) == [i.text for i in data.split("test").items[:COUNT]]


def test_recordings_played_back_are_perfect(data):
    found = figures(opened(data))
    assert found["mcd_mel13"] == 0 and found["length_ratio"] == 1 and found["duration_error"] == 0
    assert not any(found["failures_per_100"].values()) and found["utterances"] == COUNT
    assert found["real_time_factor"] > 0 and sum(found["sound"]) == pytest.approx(
        sum(int(m.sum()) for m in opened(data).judged(COUNT).mask) * 256 / 22050)


def test_what_is_wrong_is_seen(data):
    found = figures(opened(data, slow=3, stops=False))
    assert found["mcd_mel13"] == 0  # time is warped
    assert found["length_ratio"] == 3 and found["duration_error"] == 2
    failures = {"missing word": 0, "repeated word": 100, "no stop": 100, "length": 100, "any": 100}
    assert found["failures_per_100"] == failures


def test_recognition_is_under_its_ceilings(data, monkeypatch):
    own = opened(data)
    batch = own.judged(COUNT)
    texts = speech_stage._texts(batch, own.spec.text)
    monkeypatch.setattr(speech_stage, "GriffinLim", lambda config: lambda mel: mel.sum(0))
    spoken = speech_stage._spoken(own, batch, texts)[0]
    spoken[0]["mel"] = spoken[0]["mel"] + 1.0

    # It understands what it knows, and of all else nothing.
    known = {float(speech_stage._own(batch, k)[:, 0].sum()): text for k, text in enumerate(texts)}
    found = speech_stage._recognised(
        own, batch, texts, spoken, lambda wave, rate: known.get(float(wave[0]), ""))
    whole = found["curve"][-1]
    assert whole["ceilings"]["recordings' mels vocoded"]["value"] < whole["rate"]["value"]
    assert whole["ceilings"]["recordings"]["value"] == 1  # waves, which are not among the sums
    assert found["word_error_rate"]["recordings"] == 1
    assert len(found["heard"]) == COUNT and found["heard"][0] == ""


def test_recordings_are_found_by_name(data):
    paths = speech_stage._recordings(opened(data), COUNT)
    assert [p.stem for p in paths] == [p.stem for p in paths if p.is_file()] and len(set(paths)) == COUNT
    assert speech_stage._recordings(SimpleNamespace(datamodule=SimpleNamespace(split=lambda name: []),
                                                    request=Request()), 1) is None


def test_a_recogniser_hears_a_few_seconds(data, monkeypatch):
    own = opened(data)
    batch = own.judged(COUNT)
    seconds = batch.mask.sum((1, 2)) * 256 / 22050
    monkeypatch.setattr(speech_stage, "_HEARD", float(seconds.sum()) + 0.01)
    assert speech_stage._heard(own, batch) == COUNT
    monkeypatch.setattr(speech_stage, "_HEARD", 0.1)
    assert speech_stage._heard(own, batch) == 2


def test_notes_say_what_is_missing(data):
    found = figures(opened(data)) | {"recognition": {"skipped": "no recogniser"}}
    lines = speech_stage.spoken_notes(found)
    assert "mcd_mel13" in lines[0] and "durations off by 0.00" in lines[0]
    assert lines[-1] == "errors of characters were not counted: no recogniser"
