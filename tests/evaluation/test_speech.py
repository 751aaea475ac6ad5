"""Synthesised and recognised texts compared with recordings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genmodels.data.clips import read_clips
from genmodels.data.speech import Speech
from genmodels.diffusion import CosineSchedule
from genmodels.evaluation import speech as speech_stage
from genmodels.evaluation.checkpoint import Opened, Request
from genmodels.evaluation.features import Cache, key_of
from genmodels.evaluation.report import Skipped, SpeechFigures, plain
from genmodels.evaluation.samples import playable
from genmodels.models.base import Samples
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.mel_diffusion import langevin_levels
from genmodels.models.recognizer import Recognizer
from genmodels.models.text_to_mel import MelEnergy
from genmodels.report.quality import transcripts
from genmodels.speech.alignment import Alignment
from genmodels.speech.audio import read_wav
from genmodels.speech.measures import compared_pitch

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


class Sums:
    """A vocoder of one sample for each frame, the sum of its bands times a scale."""

    def __init__(self, config, scale: float = 1.0):
        self.config, self.scale = config, scale

    def __call__(self, mel, generator=None, *, first_frame=0):
        return mel.sum(-2).flatten() * self.scale


@pytest.fixture(autouse=True)
def no_librosa(monkeypatch):
    """The pitch is measured where a test says how."""
    monkeypatch.setattr(speech_stage, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def data() -> Speech:
    return Speech().prepare()


def opened(data: Speech, **manner) -> Opened:
    return Opened(None, Parrot(data, **manner), {}, data, Request(samples=COUNT), COUNT)


def figures(own: Opened) -> SpeechFigures:
    batch = own.evaluated(COUNT)
    texts = speech_stage._texts(batch, own.spec.text)
    return speech_stage._against_recordings(own, batch, *speech_stage._synthesised(own, batch, texts))


def test_texts_are_those_that_were_read(data):
    own = opened(data)
    texts = [item.text for item in data.split("test").items[:COUNT]]
    assert speech_stage._texts(own.evaluated(COUNT), own.spec.text) == texts


def test_recordings_played_back_are_perfect(data):
    found = figures(opened(data))
    assert found.mcd_mel13 == 0 and found.length_ratio == 1 and found.duration_error == 0
    assert not any(found.failures_per_100.values()) and found.utterances == COUNT
    assert found.real_time_factor > 0 and sum(found.sound) == pytest.approx(
        sum(int(m.sum()) for m in opened(data).evaluated(COUNT).mask) * 256 / 22050)


def test_what_is_wrong_is_seen(data):
    found = figures(opened(data, slow=3, stops=False))
    assert found.mcd_mel13 == 0  # time is warped
    assert found.length_ratio == 3 and found.duration_error == 2
    failures = {"missing word": 0, "repeated word": 100, "no stop": 100, "length": 100, "any": 100}
    assert found.failures_per_100 == failures


def test_recognition_is_under_its_toplines(data, monkeypatch):
    own = opened(data)
    batch = own.evaluated(COUNT)
    texts = speech_stage._texts(batch, own.spec.text)
    monkeypatch.setattr(speech_stage, "GriffinLim", lambda config: Sums(config))
    synthesised = speech_stage._synthesised(own, batch, texts)[0]
    synthesised[0]["mel"] = synthesised[0]["mel"] + 1.0

    # It understands what it knows, and of all else nothing.
    known = {float(speech_stage._recorded(batch, k)[:, 0].sum()): text for k, text in enumerate(texts)}
    sounds = speech_stage._vocoded(own, batch, synthesised, COUNT)
    found = speech_stage._recognised(own, texts, sounds, lambda wave, rate: known.get(float(wave[0]), ""))
    whole = found.curve[-1]
    assert whole.toplines["recordings' mels vocoded"].value < whole.rate.value
    assert whole.toplines["recordings"].value == 1  # waves, which are not among the sums
    assert found.wer["recordings"] == 1
    assert len(found.heard) == COUNT and found.heard[0] == ""


def test_figures_are_the_same_from_the_cache(data, monkeypatch, tmp_path):
    own, cache = opened(data), Cache(tmp_path)
    monkeypatch.setattr(speech_stage, "_recogniser", lambda request, text: (lambda wave, rate: "", ""))
    monkeypatch.setattr(speech_stage, "GriffinLim", lambda config: Sums(config))
    frame = SimpleNamespace(opened=own, request=own.request, arrays={},
                            once=lambda stage, settings, compute: cache.get("speech") or cache.put("speech", compute()))
    first, again = speech_stage.speech_of(frame), speech_stage.speech_of(frame)
    assert plain(first) == plain(again) and plain(again)["recognition"]["curve"][-1]["rate"]["value"] == 1
    assert speech_stage.speech_notes(first) == speech_stage.speech_notes(again)
    assert "topline, recordings: 100.0 %" in speech_stage.speech_notes(again)[-3]


def test_the_page_has_the_sound_of_a_few_texts(data, monkeypatch, tmp_path):
    """The beginning of the same sound as is recognised, in 16 bits; of the cache too."""
    own, cache = opened(data), Cache(tmp_path)
    monkeypatch.setattr(speech_stage, "_recogniser", lambda request, text: (None, "none"))
    monkeypatch.setattr(speech_stage, "GriffinLim", lambda config: Sums(config, 1 / (80 * 12)))
    monkeypatch.setattr(speech_stage, "_PLAYED", 2)
    monkeypatch.setattr("genmodels.evaluation.samples._LONGEST", 0.01)
    for _ in range(2):
        frame = SimpleNamespace(opened=own, request=own.request, arrays={}, once=lambda stage, settings, compute:
                                cache.get("speech") or cache.put("speech", compute()))
        found = speech_stage.speech_of(frame)
        assert found.played == [item.text for item in data.split("test").items[:2]]
        assert sorted(frame.arrays) == ["sound_0", "sound_1", "vocoded_0", "vocoded_1"]
        batch = own.evaluated(2)
        for k in range(2):
            whole = speech_stage._recorded(batch, k).sum(0) / (80 * 12)
            expected = (whole * 32767).round().to(torch.int16)[: round(0.01 * 22050)]
            assert torch.equal(frame.arrays[f"sound_{k}"], expected)  # the parrot says what was recorded
            assert torch.equal(frame.arrays[f"vocoded_{k}"], expected)


def test_what_is_recognised_by_default_is_not_taken_for_all_of_it(data, monkeypatch, tmp_path):
    """By default only 20 seconds are recognised; as many texts asked for by number are recognised all."""
    monkeypatch.setattr(speech_stage, "_recogniser", lambda request, text: (lambda wave, rate: "", ""))
    monkeypatch.setattr(speech_stage, "GriffinLim", lambda config: Sums(config))
    monkeypatch.setattr(speech_stage, "_HEARD", 0.1)
    cache, heard = Cache(tmp_path), []
    for samples in ("auto", COUNT):
        own = replace(opened(data), request=Request(samples=samples))
        frame = SimpleNamespace(opened=own, request=own.request, arrays={},
                                once=lambda stage, settings, compute: cache.get(key_of(**settings))
                                or cache.put(key_of(**settings), compute()))
        heard.append(len(speech_stage.speech_of(frame).recognition.heard))
    assert heard == [2, COUNT]


def test_recordings_are_found_by_name(data):
    paths = speech_stage._recordings(opened(data), COUNT)
    assert [p.stem for p in paths] == [p.stem for p in paths if p.is_file()] and len(set(paths)) == COUNT
    assert speech_stage._recordings(SimpleNamespace(datamodule=SimpleNamespace(split=lambda name: []),
                                                    request=Request()), 1) is None


def test_a_recogniser_hears_a_few_seconds(data, monkeypatch):
    own = opened(data)
    batch = own.evaluated(COUNT)
    seconds = batch.mask.sum((1, 2)) * 256 / 22050
    monkeypatch.setattr(speech_stage, "_HEARD", float(seconds.sum()) + 0.01)
    assert speech_stage._heard(own, batch) == COUNT
    monkeypatch.setattr(speech_stage, "_HEARD", 0.1)
    assert speech_stage._heard(own, batch) == 2


def test_notes_say_what_is_missing(data):
    lines = speech_stage.speech_notes(replace(figures(opened(data)), recognition=Skipped("no recogniser")))
    assert "mcd_mel13" in lines[0] and "durations off by 0.00" in lines[0]
    assert lines[-1] == "CER was not measured: no recogniser"


class Singer(Parrot):
    """A parrot whose first bands get louder by the temperature; a little by itself."""

    generates = True

    def sample(self, n, cond=None, *, temperature=0.25, **options):
        found = super().sample(n, cond, **options)
        found.x[:, :4] += temperature
        return found

    def takes(self, key):
        return key == "temperature"


def in_bands(wave, config, frames):
    """A pitch of as many semitones as the sums of `Sums` are above those of the recording, where these are even."""
    whole = wave.numpy().astype(float)
    return np.where(np.arange(len(whole)) % 2 == 0, whole, np.nan)


def test_the_pitch_is_that_of_the_vocoded_sound(data, monkeypatch):
    monkeypatch.setattr(speech_stage, "_recogniser", lambda request, text: (None, "none"))
    monkeypatch.setattr(speech_stage, "GriffinLim", lambda config: Sums(config))
    monkeypatch.setattr(speech_stage, "find_spec", lambda name: True)
    monkeypatch.setattr(speech_stage, "log_pitch", in_bands)
    own = Opened(None, Singer(data), {}, data, Request(samples=COUNT), COUNT)
    frame = SimpleNamespace(opened=own, request=own.request, arrays={}, once=lambda stage, settings, compute: compute(),
                            sampling_settings=dict)
    found = speech_stage.speech_of(frame)
    batch = own.evaluated(COUNT)
    mels = [speech_stage._recorded(batch, k) for k in range(COUNT)]
    sung = [mel + 0.25 * (torch.arange(80) < 4)[:, None] for mel in mels]
    tracks = [[in_bands(one.sum(0), None, 0) for one in some] for some in (sung, mels)]
    assert found.pitch == compared_pitch(sung, mels, *tracks)
    assert found.first_audio > 0 and not found.streamed
    assert any(line.startswith("log F0: RMSE 1.00 semitones") for line in speech_stage.speech_notes(found))
    # A temperature of 1 is 1; without one it is the model's own default.
    own.request = replace(own.request, temperature=1.0)
    assert speech_stage.speech_of(frame).mcd_mel13 > found.mcd_mel13 > 0
    own.request = replace(own.request, temperature=None)
    swept = speech_stage.spoken_at(frame, "temperature")
    assert [one.value for one in swept] == [0.0, 0.333, 0.667, 1.0] and swept[0].mcd_mel13 == 0
    assert [one.pitch.rmse for one in swept] == pytest.approx([4 * one.value for one in swept], abs=1e-3)
    assert "temperature 0.333, 3 texts: distortion" in speech_stage.spoken_at_notes(swept)[1]
    assert speech_stage.spoken_at(frame, "steps") is None


def test_a_sweep_over_steps_begins_with_the_fewest_of_the_sampler(data, monkeypatch):
    asked = []

    class Climber(Parrot):
        generates, takes = True, staticmethod(lambda key: key in ("steps", "sampler"))
        default_sampler, fewest_steps = "annealed_langevin", MelEnergy.fewest_steps

        def sample(self, n, cond=None, *, steps, sampler=None, **options):
            langevin_levels(CosineSchedule(), steps if sampler is None else None)  # raises if there are too few
            asked.append(steps)
            return super().sample(n, cond, **options)

    own = Opened(None, Climber(data), {}, data, Request(samples=2), 2)
    frame = SimpleNamespace(opened=own, once=lambda stage, settings, compute: compute(), sampling_settings=dict)
    assert [one.value for one in speech_stage.spoken_at(frame, "steps")] == [10, 20] == sorted({*asked})
    own.request = replace(own.request, sampler="dpmpp_2m")
    assert [one.value for one in speech_stage.spoken_at(frame, "steps")] == [2, 4, 10, 20]


def test_pitch_that_cannot_be_measured_is_said(data, monkeypatch):
    monkeypatch.setattr(speech_stage, "_recogniser", lambda request, text: (None, "none"))
    monkeypatch.setattr(speech_stage, "GriffinLim", lambda config: Sums(config))
    own = opened(data)
    frame = SimpleNamespace(opened=own, request=own.request, arrays={}, once=lambda stage, settings, compute: compute())
    words = "pitch was not measured: it needs librosa: pip install 'genmodels[speech]'"
    assert words in speech_stage.speech_notes(speech_stage.speech_of(frame))


def test_the_first_audio_of_a_stream_comes_before_the_end(data):
    """Glow-TTS in chunks waits for the frames that the first needs; a parrot for all."""
    model = GlowTTS(data.spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1).eval()
    own = Opened(None, model, {}, data, Request(), COUNT)
    batch = own.evaluated(2)
    waited, streamed = speech_stage._first_audio(own, batch, speech_stage._texts(batch, own.spec.text))
    assert streamed and 0 < waited < 60
    assert not speech_stage._first_audio(opened(data), batch, speech_stage._texts(batch, own.spec.text))[1]


def test_a_recogniser_shows_the_first_recordings_and_the_worst(data, monkeypatch):
    """Two transcripts of four are wrong, the worse one last; the page plays what was recorded."""
    recognizer = Recognizer(data.spec, net={"channels": 8, "depth": 1, "heads": 2, "hidden": 8}).eval()
    said = [item.text for item in data.split("test").items]
    heard = [said[0], said[1][2:], said[2], said[3][::-1]]
    by_length = {int(frames): text for frames, text in zip(data.split("test").frames(), heard, strict=True)}
    monkeypatch.setattr(recognizer, "transcribe", lambda batch, how, weights: [
        [by_length[int(n)]] for n in batch.mask.sum((1, 2))])
    monkeypatch.setattr(recognizer, "written", lambda found: found)
    monkeypatch.setattr(speech_stage, "_PLAYED", 1)
    monkeypatch.setattr(speech_stage, "_WORST", 2)
    own = Opened(None, recognizer, {}, data, Request(), 4)
    state = SimpleNamespace(opened=own, request=own.request, arrays={}, once=lambda stage, settings, compute: compute())
    found = speech_stage.transcription_of(state)
    assert (found.said, found.heard, found.shown) == (said, heard, [0, 3, 1])
    places = {clip.text: clip.path for clip in read_clips("embedded", None) if clip.split == "test"}
    recorded = [playable(read_wav(path)[0], 22050) for path in places.values()]
    assert sorted(state.arrays) == ["sound_0", "sound_1", "sound_3"]
    assert all(torch.equal(state.arrays[f"sound_{k}"], recorded[k]) for k in found.shown)
    model = SimpleNamespace(report=SimpleNamespace(transcription=found, data=data.spec), name="recognizer",
                            array=lambda name: state.arrays[name].numpy())
    (listing,) = transcripts([model])
    (_, rows), = listing.groups
    assert [[row[0], row[2], row[3]] for row in rows] == [[str(k), said[k], heard[k]] for k in found.shown]
    assert rows[0][1].description == f"recording: {said[0]}"
    assert transcripts([SimpleNamespace(report=SimpleNamespace(transcription=None))]) == []
