"""Normal forms and symbols: known readings, round trips, and unknown characters by name."""

from __future__ import annotations

import builtins

import pytest

from genmodels.speech.text import BLANK, CHARACTERS, PAD, Symbols, UnknownSymbol, normalise, sentences

READINGS = {
    "130 men": "one hundred thirty men",
    "about 1455,": "about fourteen fifty-five,",
    "in 1906.": "in nineteen oh-six.",
    "the 21st day": "the twenty-first day",
    "3.5 miles": "three point five miles",
    "$3.50 and $1": "three dollars fifty cents and one dollar",
    "\u00a32,500": "two thousand five hundred pounds",
    "5% of 1,906": "five percent of one thousand nine hundred six",
    "a4b": "a four b",
    "1,2,3": "one, two, three",
    "No. 7, no.": "number seven, no.",
}


@pytest.mark.parametrize("text", READINGS)
def test_numbers(text):
    pytest.importorskip("num2words", reason="num2words is not installed")
    assert normalise(text) == READINGS[text]


@pytest.mark.parametrize("text, expected", [
    ("Dr.  Who\u2019s na\u00efve \u2014 Fa\u00e7ade", "doctor who's naive - facade"),
    ("\ufb01ne & Stra\u00dfe", "fine and strasse"),
    ("\u00c6ther \u201cquoted\u201d\u2026", 'aether "quoted"...'),
    ("end . Next ,", "end. next,"),
    ("the cost. of", "the cost. of"),
])
def test_letters(text, expected):
    assert normalise(text) == expected
    assert normalise(expected) == expected  # a normal form is its own


def test_text_without_letters():
    for text in ("", "  ", "...", "?!"):
        with pytest.raises(ValueError, match="no letters"):
            normalise(text)


def test_numbers_without_the_library(monkeypatch):
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: (_ for _ in ()).throw(ImportError(name))
                        if name == "num2words" else real(name, *rest))
    with pytest.raises(ValueError, match=r"numbers: pip install 'genmodels\[speech\]'"):
        normalise("5 men")
    assert normalise("five men") == "five men"


@pytest.mark.parametrize("blanks", [True, False])
def test_tokens_and_back(blanks):
    symbols = Symbols(blanks=blanks)
    text = "".join(CHARACTERS[2:])
    tokens = symbols.encode(text)
    assert symbols.decode(tokens) == text and max(tokens) == len(symbols) - 1
    assert len(tokens) == (2 * len(text) + 1 if blanks else len(text))
    if blanks:
        assert set(tokens[::2]) == {1} and 1 not in tokens[1::2]


def test_the_numbers_of_symbols_stay():
    assert CHARACTERS[:4] == (PAD, BLANK, "a", "b") and CHARACTERS[28] == " " and len(CHARACTERS) == 37


def test_unknown_characters_are_named():
    with pytest.raises(UnknownSymbol, match=r"character '\"' at position 4 of .*nearest is"):
        Symbols().encode('say "it"')
    dropping = Symbols(blanks=False, on_unknown="drop")
    assert dropping.decode(dropping.encode('say "it"')) == "say it"
    assert Symbols().unknown('"a" #') == {'"': 2, "#": 1}
    with pytest.raises(UnknownSymbol, match="empty"):
        dropping.encode('"')


def test_long_texts_lose_nothing():
    text = "One sentence here. Another, with a comma, that is rather long and goes on and on! " * 3 + "x" * 90
    parts = sentences(text, longest=40)
    assert max(map(len, parts)) <= 40
    assert "".join("".join(parts).split()) == "".join(text.split())
