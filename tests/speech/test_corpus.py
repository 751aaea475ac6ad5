"""A corpus by a voice: which texts, clips kept and made again, the same with any number of workers, bad programs."""

from __future__ import annotations

import re
import shutil
import sys
from itertools import islice

import pytest
import torch

from genmodels.core.errors import InputError, RunError
from genmodels.data.clips import read_clips
from genmodels.speech import corpus as module
from genmodels.speech.audio import read_wav, write_wav
from genmodels.speech.corpus import (
    RATE,
    VOICES,
    Voice,
    check_voice,
    corpus,
    default_sentences,
    made_sentences,
    sentences_of,
)  # fmt: skip

#: A program whose sound is as long as its text, 8 kHz; it fails for texts with `fail`, and is silent for `hush`.
PROGRAM = """
import sys, wave
text, out = sys.argv[1], sys.argv[2]
assert text == sys.stdin.read() and "fail" not in text, "it cannot"
with wave.open(out, "wb") as file:
    file.setparams((1, 2, 8000, 0, "NONE", ""))
    file.writeframes(bytes(2) * 800 if "hush" in text else b"".join(bytes((0, ord(c) % 64)) * 400 for c in text))
"""
TEXTS = ["Two birds.", "She said|so,  twice!", "Two birds.", "Mr. Brown's."]


@pytest.fixture(autouse=True)
def voice(monkeypatch):
    monkeypatch.setitem(VOICES, "fake", Voice((sys.executable, "-c", PROGRAM, "{text}", "{out}"), "fake", "none"))


def test_the_rows_are_read_as_speech_data_and_the_clips_are_those_of_the_texts(tmp_path):
    seconds = corpus(tmp_path, TEXTS, "fake", workers=3)
    clips = read_clips("ljspeech", tmp_path)
    assert [clip.text for clip in clips] == ["two birds.", "she said, so, twice!", "mister brown's."]
    assert seconds == [len(clip.text) * 400 / 8000 for clip in clips]  # a mutant that mixes up clips fails here
    for clip in clips:
        wave, rate = read_wav(clip.path)
        assert rate == RATE == 16000 and len(wave) == 800 * len(clip.text) and wave.abs().max() > 0.1


def test_clips_are_kept_and_damaged_ones_made_again(tmp_path):
    corpus(tmp_path, TEXTS[:2], "fake")
    first, second = (clip.path for clip in read_clips("ljspeech", tmp_path))
    write_wav(first, torch.full((RATE,), 0.5), RATE)
    second.write_bytes(second.read_bytes()[:-100])
    assert corpus(tmp_path, TEXTS, "fake")[:2] == [1.0, len("she said, so, twice!") / 20]
    other = tmp_path / "other"
    corpus(other, TEXTS, "fake", workers=2)
    assert (other / "metadata.csv").read_bytes() == (tmp_path / "metadata.csv").read_bytes()
    assert (other / "wavs" / second.name).read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("texts", "name", "kind", "said"), [
    (["a"], "nobody", InputError, "voice must be one of"), (["---"], "fake", InputError, "has no letters"),
    (["One.", "\u4f60\u597d"], "fake", InputError, "no English letter in '\u4f60\u597d'"),
    (["a"], "missing", InputError, "needs the program no-such-program: apt-get install nothing, or give a voice"),
    (["fail"], "fake", RunError, "cannot read 'fail' with voice fake: exit code 1"),
    (["hush"], "fake", RunError, "its sound is silence"),
])  # fmt: skip
def test_what_cannot_be_read(texts, name, kind, said, tmp_path, monkeypatch):
    monkeypatch.setitem(VOICES, "missing", Voice(("no-such-program",), "nothing", "none"))
    with pytest.raises(kind, match=said):
        corpus(tmp_path, texts, name)
    assert not (tmp_path / "metadata.csv").exists()


def test_only_voices_that_can_read_are_offered(monkeypatch):
    for fakes in (["fake", "second"], []):
        monkeypatch.setattr("shutil.which", lambda program, fakes=fakes: "found" if program in fakes else None)
        for name in ("fake", "second"):
            monkeypatch.setitem(VOICES, name, Voice((name,), "a package", "none"))
        with pytest.raises(InputError) as refused:
            check_voice("espeak")
        offer = ", or give a voice whose program is installed: fake, second" if fakes else ""
        assert str(refused.value) == f"voice=espeak needs the program espeak-ng: apt-get install espeak-ng{offer}"


def test_rows_of_another_voice_are_not_lost(tmp_path, monkeypatch):
    corpus(tmp_path, TEXTS, "fake")
    before = (tmp_path / "metadata.csv").read_bytes()
    monkeypatch.setitem(VOICES, "other", VOICES["fake"])
    for texts, voice in ((TEXTS, "other"), (TEXTS[:1], "fake"), (["Another text."], "fake")):
        with pytest.raises(InputError, match="not of this voice and these texts, such as fake-[0-9a-f]+: give"):
            corpus(tmp_path, texts, voice)
    assert (tmp_path / "metadata.csv").read_bytes() == before
    (tmp_path / "metadata.csv").write_bytes(before + b"\n")  # an empty line lists no clip
    corpus(tmp_path, TEXTS, "fake")
    (tmp_path / "metadata.csv").write_bytes(b"caf\xe9|a text\n")
    with pytest.raises(InputError, match="such as caf"):
        corpus(tmp_path, TEXTS, "fake")


def test_a_program_that_hangs_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(VOICES, "slow", Voice((sys.executable, "-c", "import time; time.sleep(60)"), "fake", "none"))
    monkeypatch.setattr(module, "_TIMEOUT", 0.5)
    with pytest.raises(RunError, match="cannot read 'a' with voice slow: .* timed out after 0.5 seconds"):
        corpus(tmp_path, ["a"], "slow")


def test_sentences_of_a_file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("One line\nof a book. And\nmore.\n\n***\n\nThe end.\n")
    assert sentences_of(file) == ["One line of a book.", "And more.", "The end."]
    file.write_text("A list\nof three\nlines.\n")
    assert sentences_of(file) == ["A list", "of three", "lines."]
    file.write_text("One.\n\u4f60\u597d\nTwo.\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="left out 1 of 3 sentences without a Latin letter, such as '\u4f60\u597d'"):
        assert sentences_of(file) == ["One.", "Two."]
    for content, said in ((b"\n***\n", "has no sentences"), ("\u4f60\u597d".encode(), "no sentences in the Latin"),
                          (b"\xff\xfe", "is not UTF-8")):
        file.write_bytes(content)
        with pytest.raises(InputError, match=said):
            sentences_of(file)


def test_the_default_text_is_different_sentences_and_a_longer_one_begins_with_it(monkeypatch):
    monkeypatch.setattr(module, "documentation", lambda: ("Return the path.", "Read a line.", "Return the path."))
    found = default_sentences(200)
    assert len(set(found)) == 200 and found[:30] == default_sentences(30)
    assert {"Return the path.", "Read a line."} <= set(found[:4])
    assert all(re.search("[a-z0-9][.?!]$", one) for one in found)


def test_made_sentences_have_all_phonemes():
    sphinx = pytest.importorskip("pocketsphinx", reason="its dictionary of pronunciations is needed")
    lines = (sphinx.get_model_path("en-us/cmudict-en-us.dict"),)
    with open(*lines) as file:
        spoken = {word: phonemes for word, *phonemes in map(str.split, file)}
    heard = {p for one in islice(made_sentences(), 200) for word in re.findall("[a-z']+", one.lower())
             for p in spoken.get(word, ())}
    assert len(heard) == 39


@pytest.mark.skipif(shutil.which("flite") is None, reason="flite is not installed")
def test_a_voice_of_flite(tmp_path):
    (seconds,) = corpus(tmp_path, ["Turn right at the corner."], "slt")
    wave, rate = read_wav(read_clips("ljspeech", tmp_path)[0].path)
    assert 1 < seconds < 3 and rate == RATE and wave.square().mean().sqrt() > 0.01
