"""Texts spoken: sentences, pauses, exact times, files that say how they were made."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

from genmodels.cli.say import Manner, read_durations, speak, targets, write_spoken
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.models.glow_tts import GlowTTS
from genmodels.speech.audio import MelConfig
from genmodels.speech.text import CHARACTERS

CONFIG = MelConfig()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = {"symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["a cab"]}
    spec = DataSpec("speech", (80, 64), mel=dict(vars(CONFIG)), statistics={"mean": -5.0, "std": 2.0}, text=text)
    return GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1,
                   duration_channels=8).eval()


def test_sentences_are_spoken_one_by_one_with_pauses(model):
    told = speak(model, ["One cab. Two cabs!", "One cab."], Manner(pause=0.5))
    assert [len(one.parts) for one in told] == [2, 1]
    gap = round(0.5 * 22050 / 256)
    lengths = [part[3].shape[1] for part in told[0].parts]
    assert told[0].mel.shape[1] == sum(lengths) + gap
    assert (told[0].mel[:, lengths[0] : lengths[0] + gap] < -11.5).all()
    # A sentence is the same in any text; another take is not.
    assert torch.allclose(told[0].parts[0][3], told[1].parts[0][3], atol=1e-4)
    takes = speak(model, ["One cab."], Manner(), takes=2)
    assert torch.allclose(takes[0].mel, told[1].mel, atol=1e-4) and not torch.allclose(takes[1].mel, takes[0].mel)


def test_a_marked_pause_is_as_long_as_it_says(model):
    told = speak(model, ["One cab, [pause=0.75] two. Three.", "two."], Manner(pause=0.1))
    marked, plain = (round(seconds * 22050 / 256) for seconds in (0.75, 0.1))
    assert told[0].gaps == [0, marked, plain] and [part[0] for part in told[0].parts] == ["one cab,", "two.", "three."]
    first = told[0].parts[0][3].shape[1]
    assert (told[0].mel[:, first : first + marked] < -11.5).all()
    assert torch.allclose(told[0].parts[1][3], told[1].mel, atol=1e-4)  # marks change nothing of what is spoken
    for text, reason in (("One [pause=soon] two", "seconds of silence"), ("One [pause=-1] two", "0 or more"),
                         ("[pause=1] one", "nothing to speak"), ("One. [pause=1] ", "nothing to speak")):
        with pytest.raises(InputError, match=reason):
            speak(model, [text], Manner())
    with pytest.raises(InputError, match="leave the"):
        speak(model, ["One [pause=1] two"], Manner(seconds=2.0))


def test_seconds_are_exact_to_the_sample_and_files_carry_their_making(model, tmp_path):
    manner = Manner(seconds=3.2, seed=4)
    told = speak(model, ["One cab. Two."], manner)[0]
    assert len(told.parts) == 1 and told.mel.shape[1] == 276
    place = tmp_path / "a.wav"
    lines = write_spoken(told, model.spec, place, manner, {"step": 7})
    rate, samples = wavfile.read(place)
    assert (rate, len(samples), samples.dtype) == (22050, 70560, np.int16) and "3.20 s" in lines[0]
    assert Image.open(place.with_suffix(".png")).text["genmodels.seed"] == "4"
    made = json.loads(place.with_suffix(".json").read_text())
    assert made["step"] == 7 and sum(made["sentences"][0]["durations"]) == 276
    # Its durations speak again, as they are or edited.
    again = speak(model, ["One cab. Two."], Manner(seconds=3.2, seed=4, durations=read_durations(
        place.with_suffix(".json"))))[0]
    assert torch.allclose(again.mel, told.mel, atol=1e-5)
    write_spoken(told, model.spec, tmp_path / "a.npz", manner, {})
    assert np.load(tmp_path / "a.npz")["mel"].shape == (80, 276)


def test_what_cannot_be_done_is_said_in_one_line(model, tmp_path):
    with pytest.raises(InputError, match="hold 1 sentences, the text has 2"):
        speak(model, ["One. Two."], Manner(durations=[[1, 2]]))
    with pytest.raises(InputError, match="leave out speed"):
        Manner(durations=[[1, 2]], speed=2.0)
    with pytest.raises(InputError, match=r"\[slow\] is not closed"):
        speak(model, ["One. [slow]Two."], Manner())
    with pytest.raises(InputError, match="there is no text"):
        speak(model, [], Manner())
    with pytest.raises(InputError, match="pause"):
        Manner(pause=-1)
    (tmp_path / "d.json").write_text("{}")
    for name in ("d.json", "none.json"):
        with pytest.raises(InputError, match=name):
            read_durations(tmp_path / name)
    for wrong in ("[", "5", "[]", "[[]]", "[[1, 0.5]]", '{"sentences": [1]}', '{"sentences": []}'):
        (tmp_path / "d.json").write_text(wrong)
        with pytest.raises(InputError, match="d.json holds no durations"):
            read_durations(tmp_path / "d.json")
    for right in ("[1, 2]", "[[1, 2]]", '{"sentences": [{"durations": [1, 2]}]}'):
        (tmp_path / "d.json").write_text(right)
        assert read_durations(tmp_path / "d.json") == [[1, 2]]
    told = speak(model, ["One.", "Two."], Manner())
    with pytest.raises(InputError, match="give a folder"):
        targets(tmp_path / "a.wav", tmp_path, "best", told, 0)
    with pytest.raises(InputError, match="end it in .wav"):
        targets(tmp_path / "a.mp3", tmp_path, "best", told, 0)
    names = [p.name for p in targets(None, tmp_path, "best", told, 3)]
    assert names == ["best_seed3_0_one.wav", "best_seed3_1_two.wav"]
