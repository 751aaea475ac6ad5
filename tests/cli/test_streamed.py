"""Texts in pieces are texts at once: mels, durations and sound, whatever the pieces."""

from __future__ import annotations

import pytest
import torch

from genmodels.cli.say import Manner, speak, speak_streamed
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.models import text_model as texts
from genmodels.models.glow_tts import GlowTTS, stream_text
from genmodels.models.tacotron import Tacotron
from genmodels.speech.audio import MelConfig
from genmodels.speech.text import CHARACTERS
from genmodels.speech.vocoder import GriffinLim, sound_of

TEXT = {"symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["a cab"]}
SMALL = {"channels": 8, "depth": 1, "hidden": 8}
TEXTS = ["One cab. Two red cabs, [pause=0.3] and three!", "No."]


def spec(speakers: tuple[str, ...] = ()) -> DataSpec:
    return DataSpec("speech", (80, 64), mel=dict(vars(MelConfig())), statistics={"mean": -5.0, "std": 2.0}, text=TEXT,
                    speakers=speakers)


def model(speakers: tuple[str, ...] = ()) -> GlowTTS:
    torch.manual_seed(0)
    found = GlowTTS(spec(speakers), encoder=SMALL, steps=3, hidden=8, depth=2, duration_channels=8, speaker_channels=4)
    with torch.no_grad():
        for parameter in found.core.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for average in found.ema.averages:
        average.load_state_dict(found.core.state_dict())
    return found.eval()


@pytest.fixture(scope="module")
def one_voice() -> GlowTTS:
    return model()


def same(pieces, whole) -> None:
    for own, other in zip(pieces, whole, strict=True):
        assert [part[:3] for part in own.parts] == [part[:3] for part in other.parts] and own.gaps == other.gaps
        torch.testing.assert_close(own.mel, other.mel, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_mels_in_pieces_are_mels_at_once(one_voice, chunk):
    manner = Manner(pause=0.1, seed=3)
    whole = speak(one_voice, TEXTS, manner, takes=2, start=1)
    pieces, lines = speak_streamed(one_voice, TEXTS, manner, None, chunk=chunk, takes=2, start=1)
    same(pieces, whole)
    assert len(lines) == 4 and "first packet" in lines[0] and all(one.wave is None for one in pieces)


def test_sound_in_pieces_is_sound_at_once(one_voice):
    vocoder, manner = GriffinLim(iterations=2), Manner(seed=5)
    whole, pieces = speak(one_voice, TEXTS, manner), speak_streamed(one_voice, TEXTS, manner, vocoder, chunk=9)[0]
    same(pieces, whole)
    for one in pieces:
        # Of the same mel: rounding in a mel would grow where phases are hardly determined.
        torch.testing.assert_close(one.wave, sound_of(one.mel, vocoder, 5), atol=1e-3, rtol=1e-3)


def test_seconds_speed_durations_and_speakers():
    voices = model(("anna", "ben"))
    for manner in (Manner(speed=0.5, speaker="ben"), Manner(seconds=1.0, temperature=0.0)):
        whole = speak(voices, ["One cab. Two red cabs!"], manner)
        pieces, _ = speak_streamed(voices, ["One cab. Two red cabs!"], manner, GriffinLim(iterations=1), chunk=16)
        same(pieces, whole)
    assert len(pieces[0].wave) == 22050
    said = speak(voices, TEXTS, Manner())
    given = [[d + 1 for d in part[2]] for one in said for part in one.parts]
    pieces, _ = speak_streamed(voices, TEXTS, Manner(durations=given), None)
    assert [part[2] for one in pieces for part in one.parts] == given
    same(pieces, speak(voices, TEXTS, Manner(durations=given)))


def test_noise_of_another_take_is_seen(one_voice, monkeypatch):
    whole = speak(one_voice, TEXTS, Manner())
    rows = texts.noise_rows
    monkeypatch.setattr(texts, "noise_rows", lambda said, takes: rows(said, [take + 1 for take in takes]))
    pieces, _ = speak_streamed(one_voice, TEXTS, Manner(), None)
    with pytest.raises(AssertionError):
        same(pieces, whole)


def test_the_first_piece_waits_for_the_first_sentence_alone(one_voice, monkeypatch):
    asked = []

    def watched(model, text, *arguments, **options):
        asked.append(text)
        return stream_text(model, text, *arguments, **options)

    monkeypatch.setattr("genmodels.cli.say.stream_text", watched)
    ticks = iter(range(1000))
    heard_at = []

    def clock():
        heard_at.append(len(asked))
        return float(next(ticks))

    speak_streamed(one_voice, TEXTS[:1], Manner(), None, clock=clock)
    assert asked == ["One cab.", "Two red cabs,", "and three!"]
    assert heard_at[2] == 1  # begun, collecting begun, first piece


def test_what_cannot_be_streamed_is_said(one_voice):
    baseline = Tacotron(spec(), encoder=SMALL, hidden=8, prenet=8)
    with pytest.raises(InputError, match="stream: a tacotron"):
        speak_streamed(baseline, TEXTS, Manner(), None)
    for options, reason in (({"seconds": 0.1}, "seconds=.* is enough"), ({"seconds": -1.0}, "must be positive"),
                            ({"speed": 0.0}, "speed must be positive"), ({"durations": [1]}, "tokens and needs"),
                            ({"chunk": 0}, "at least 1")):  # fmt: skip
        with pytest.raises(InputError, match=reason):
            stream_text(one_voice, "a cab", **options)
