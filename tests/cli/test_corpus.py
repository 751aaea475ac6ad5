"""`genmodels corpus`: what it writes and says, and mistakes in one line."""

from __future__ import annotations

import sys

import pytest

from genmodels.cli.main import main
from genmodels.speech.corpus import VOICES
from tests.speech.test_corpus import PROGRAM, Voice


def test_a_text_becomes_a_corpus(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(VOICES, "rms", Voice((sys.executable, "-c", PROGRAM, "{text}", "{out}"), "fake", "the licence"))
    (tmp_path / "book.txt").write_text("One. Two. Three.\n")
    out = tmp_path / "corpus"
    words = ["corpus", f"out={out}", f"text={tmp_path}/book.txt", "n=2", "workers=1"]
    for _ in range(2):  # the second time everything is there
        assert main(words) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"2 clips in {out}, 0.0 minutes by voice rms") and "the licence" in said


@pytest.mark.parametrize(("words", "said"), [
    ([], "out is missing"), (["out=x", "n=0"], "n must be at least 1"), (["out=x", "workers=-1"], "workers must be"),
    (["out=x", "voice=missing"], "needs the program no-such-program"),
    (["out=x", "text=nowhere.txt"], "text=nowhere.txt cannot be read: No such file"),
    (["out=x", "text=book.txt", "voice=nobody"], "voice must be one of slt, rms"),
])  # fmt: skip
def test_a_mistake_is_one_line(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, program in (("rms", sys.executable), ("missing", "no-such-program")):
        monkeypatch.setitem(VOICES, name, Voice((program,), "a package", "none"))
    (tmp_path / "book.txt").write_text("One.\n")
    assert main(["corpus", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
