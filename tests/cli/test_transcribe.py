"""`genmodels transcribe`: files by name, n-best lists, and mistakes in one line; `evaluate` of the same checkpoint."""

from __future__ import annotations

import json

import pytest

import genmodels as gm
from genmodels.cli.main import main
from genmodels.core.errors import InputError
from genmodels.evaluation.checkpoint import Request
from genmodels.evaluation.speech import _recogniser
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.recognizer import Recognizer
from genmodels.speech.audio import read_wav
from tests.cli.test_say import checkpoint
from tests.speech.test_audio import CLIPS

NET = {"channels": 8, "depth": 1, "heads": 2, "hidden": 8, "convolution": 3}
FILES = [str(CLIPS / "LJ001-0002.wav"), str(CLIPS / "LJ001-0013.wav")]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("run"), lambda spec, encoder, **options: Recognizer(spec, **options),
                      net=NET)


def test_files_are_transcribed_in_their_order(ckpt, capsys):
    assert main(["transcribe", *FILES, f"ckpt={ckpt}"]) == 0
    greedy = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in greedy] == FILES
    assert main(["transcribe", f"ckpt={ckpt}", FILES[1], "beam=4", "nbest=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = [float(line.removeprefix(f"{FILES[1]}: ").split()[0]) for line in lines]
    found = gm.load(ckpt).transcribe(FILES[1], beam=4, nbest=3)
    assert lines == [f"{one.file}: {one.score:.2f} {one.text}" for one in found]
    assert len(lines) == 3 and scores == sorted(scores, reverse=True) and scores[0] < 0


def test_a_language_model_and_times_and_streams(tmp_path, capsys):
    net = {**NET, "attention": "xl_chunks"}
    ckpt = checkpoint(tmp_path, lambda spec, encoder, **options: Recognizer(spec, **options), net=net)
    (tmp_path / "book.txt").write_text("So it is.\n\nIn being comparatively modern.\n")
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0], "beam=2", f"lm={tmp_path}/book.txt", "lm_weight=0.5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0], "times=true"]) == 0
    first, *words = capsys.readouterr().out.splitlines()
    assert [word.split()[2] for word in words] == first.removeprefix(f"{FILES[0]}: ").split()
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0], "stream=true"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first


@pytest.mark.parametrize("words, said", [
    ([FILES[0], "lm=book.txt"], "give beam=8 too"), ([FILES[0], "lm=nowhere.txt", "beam=2"], "cannot be read"),
    ([FILES[0], "stream=true"], "stream is for"), ([], "name the recordings"),
    (["nowhere.wav"], "nowhere.wav: there is no such file"),
    ([FILES[0], "nbest=2"], "nbest must lie in 1..beam"), ([FILES[0], "beams=3"], "did you mean 'beam'"),
])  # fmt: skip
def test_a_mistake_is_one_line(words, said, ckpt, capsys):
    assert main(["transcribe", *words, f"ckpt={ckpt}"]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1


def test_each_kind_of_model_names_the_other_command(ckpt, tmp_path, capsys):
    assert main(["sample", f"ckpt={ckpt}"]) == 2
    assert "has no samples: genmodels transcribe" in capsys.readouterr().err
    assert main(["push", f"ckpt={ckpt}", "licence=mit", f"out={tmp_path}/card"]) == 0
    card = (tmp_path / "card" / "README.md").read_text()
    assert "genmodels transcribe ckpt=<this folder> speech.wav" in card and "sample" not in card
    other = checkpoint(tmp_path, GlowTTS)
    assert main(["transcribe", f"ckpt={other}", FILES[0]]) == 2
    assert "holds a glow_tts: transcribe is for model=recognizer" in capsys.readouterr().err


def test_a_trained_recogniser_hears_sound_as_transcribe_does(ckpt, tmp_path, capsys):
    recogniser, _ = _recogniser(Request(recognizer=ckpt, device="cpu"), {})
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0]]) == 0
    assert f"{FILES[0]}: {recogniser(*read_wav(FILES[0]))}\n" == capsys.readouterr().out
    assert recogniser.name.startswith("recognizer ")
    with pytest.raises(InputError, match="holds a glow_tts"):
        _recogniser(Request(recognizer=checkpoint(tmp_path, GlowTTS), device="cpu"), {})


def test_an_evaluation_has_bits_and_errors_of_characters(ckpt, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["evaluate", f"ckpt={ckpt}", f"out={out}", "cache=false", "device=cpu", "audit=true", "beam=2"]) == 0
    printed = capsys.readouterr().out
    assert "bits/character" in printed and "given the mel" in printed
    assert "CER of 4 recordings, beam 2 search" in printed and "nats/character" in printed
    report = json.loads(out.read_text())
    (line,) = report["likelihood"]
    assert line["unit"] == "bits_per_character" and line["kind"] == "exact" and line["bits_per_dim"] > 0
    assert len(report["transcription"]["heard"]) == 4 and report["transcription"]["curve"][-1]["utterances"] == 4
    nats = [row["nats_per_dim"] for row in report["audit"]]
    assert len(nats) == 4 and nats == sorted(nats, reverse=True)
    assert not report["failed"] and {check["status"] for check in report["checks"]} == {"passed"}
