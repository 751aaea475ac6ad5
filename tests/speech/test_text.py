"""Texts as phonemes: normal forms, one table, espeak where it is installed, and one clear line where it is not."""

from __future__ import annotations

import builtins
import importlib.util
import shutil
import unicodedata

import pytest

from genmodels.speech import text as phonemes
from genmodels.speech.text import (
    BLANK,
    CHARACTERS,
    FORMS,
    IPA,
    PAD,
    Symbols,
    UnknownSymbol,
    in_form,
    normalise,
    phonemise,
    ready,
    sentences,
    table_of,
)

espeak = pytest.mark.skipif(
    importlib.util.find_spec("phonemizer") is None or shutil.which("espeak-ng") is None,
    reason="phonemizer or espeak-ng is not installed",
)

READY = {  # as people write it: the normal form
    "h\u0259l\u02c8o\u028a  w\u02c8\u025c\u02d0ld": "h\u0259l\u02c8o\u028a w\u02c8\u025c\u02d0ld",
    "/b\u00e6g/": "b\u00e6\u0261",  # the g of a keyboard, and slashes around a transcription
    "b\u00f5 v\u025b\u0303": "bo\u0303 v\u025b\u0303",  # nasal vowels, precomposed or not, are letter and mark
    "\u0261\u0259\u02c8\u0281a\u02d0\u0292 , \u201ca\u201d": "\u0261\u0259\u02c8\u0281a\u02d0\u0292, a",
    "fa\u00e7": "fa\u00e7", "fac\u0327": "fa\u00e7",  # one symbol, however it is written
}


@pytest.mark.parametrize("text", READY)
def test_normal_form_of_ready_phonemes(text):
    found = in_form(text, "ipa")
    assert found == READY[text]
    assert in_form(found, "ipa") == found
    symbols = Symbols(IPA, blanks=False)
    assert symbols.decode(symbols.encode(found)) == found


def test_decomposing_everything_is_caught():
    """A mutant: without its exception the cedilla comes apart, into a mark that no table has."""
    apart = unicodedata.normalize("NFD", "fa\u00e7")
    assert apart != in_form("fa\u00e7", "ipa")
    assert Symbols(IPA).unknown(apart)


def test_tables():
    assert table_of("characters") == CHARACTERS and table_of("ipa") == table_of("phonemes") == IPA
    assert len(set(IPA)) == len(IPA) and all(len(symbol) == 1 for symbol in IPA[2:])
    apart = [symbol for symbol in IPA[2:] if unicodedata.normalize("NFD", symbol) != symbol]
    assert apart == ["\u00e7"]


@pytest.mark.parametrize("text", ["", " .?! ", "\u201c\u201d"])
def test_nothing_to_speak(text):
    with pytest.raises(ValueError, match="no letters"):
        in_form(text, "ipa")


def test_another_form():
    with pytest.raises(ValueError, match="characters, ipa, phonemes, got 'arpabet'"):
        in_form("a", "arpabet")


@pytest.mark.parametrize("form", FORMS)
def test_a_normal_form_is_read_as_just_that(form, monkeypatch):
    monkeypatch.setattr(phonemes, "phonemise", lambda text, language: pytest.fail(f"read again: {text!r}"))
    normal = "a cab, to go" if form == "characters" else "\u0250 k\u02c8\u00e6b, t\u0259 \u0261\u02c8o\u028a"
    assert in_form(ready(normal, form), form) == normal


def test_without_phonemizer(monkeypatch, refuses):
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: (_ for _ in ()).throw(ImportError(name))
                        if name.startswith("phonemizer") else real(name, *rest))
    phonemes._espeak.cache_clear()
    refuses(ValueError, r"pip install 'genmodels\[phonemes\]', or write phonemes", phonemise, "a cab")


@espeak
def test_espeak_reads():
    assert in_form("Hello, world!", "phonemes") == "h\u0259l\u02c8o\u028a, w\u02c8\u025c\u02d0ld!"
    mixed = in_form("say /t\u0259m\u02c8e\u026ato\u028a/ now.", "phonemes")
    assert mixed.split()[1] == "t\u0259m\u02c8e\u026ato\u028a" and mixed.endswith("n\u02c8a\u028a.")


@espeak
@pytest.mark.parametrize("language, text", [
    ("en", "The quick brown fox judged 21 measures; why? \u201cThings\u201d: sure - yes."),
    ("en", "Church, bathing, vision, singing, butter, hour and fire."),
    ("de", "Z\u00fcrich: f\u00fcnf schl\u00e4frige Pfarrer, durch B\u00e4che."),
    ("fr", "Un bon vin blanc, le fran\u00e7ais."),
    ("es", "El ni\u00f1o corri\u00f3 a la calle."),
])
def test_the_table_has_every_symbol_of_espeak(language, text):
    found = in_form(text, "phonemes", language)
    assert not Symbols(IPA).unknown(found)


@espeak
def test_a_language_that_espeak_does_not_know(refuses):
    refuses(ValueError, "espeak", phonemise, "hello", "tlh-x")


READINGS = {
    "130 men": "one hundred thirty men",
    "about 1455,": "about fourteen fifty-five,",
    "in 1906.": "in nineteen oh-six.",
    "at 10:30, 9:05, 7:10 or 12:00": "at ten thirty, nine oh five, seven ten or twelve o'clock",
    "12:30pm, 10:00 PM to 9:05am": "twelve thirty pm, ten pm to nine oh five am",
    "10:00 p.m. and 5:00's": "ten p.m. and five o'clock's",
    "1--2": "one -- two",
    "50%-60%, 5%\u201310% off": "fifty percent - sixty percent, five percent - ten percent off",
    "12:30:45 pm, 12:00:01, 1:02:03": "twelve thirty and forty-five seconds pm, twelve o'clock and one second, "
                                      "one oh two and three seconds",
    "May 1st. You were 2nd, etc \u2026": "may first. you were second, etc...",
    "12:30:45.678 at 1:02:03:04": "twelve thirty: forty-five point six seven eight at one oh two: three oh four",
    "$5's worth": "five dollars's worth",
    "Windows 7\u2122": "windows seven",
    "1984's end": "nineteen eighty-four's end",
    "the 1990s, '90s and 80s": "the nineteen nineties, nineties and eighties",
    "1900s, 2010s, mid-1840s": "nineteen hundreds, twenty tens, mid-eighteen forties",
    "0.80s and 747s": "zero point eight zero s and seven hundred forty-seven s",
    "the 21st day": "the twenty-first day",
    "3.5 miles": "three point five miles",
    "Python 3.10, 12.00": "python three point one zero, twelve point zero zero",
    "agent 007 at 07:05": "agent zero zero seven at seven oh five",
    "10\u00b2 and 2\u2075, 10\u00b2\u00b3": "ten squared and two five, ten twenty-three",
    "1\u00bd or \u00be cups": "one and a half or three quarters cups",
    "$2.05, \u00a31.01": "two dollars five cents, one pound one penny",
    "$3.50 and $1": "three dollars fifty cents and one dollar",
    "$1.5 million or $5 billion": "one point five million dollars or five billion dollars",
    "$0.125 a share": "zero point one two five dollars a share",
    "\u00a32,500": "two thousand five hundred pounds",
    "5% of 1,906": "five percent of one thousand nine hundred six",
    "a4b": "a four b",
    "1,2,3": "one, two, three",
    "No. 7, no.": "number seven, no.",
    "3 vs.5, to Dr.12": "three versus five, to doctor twelve",
    ".5 or -.25 of it, end.5": "zero point five or minus zero point two five of it, end. five",
    "$.50, US$5 ($2.00 more)": "zero dollars fifty cents, us five dollars (two dollars more)",
    "a $5m (5) $9-a-day plan": "a five million dollars (five) nine dollars-a-day plan",
    "$1M, \u00a35k, $1.5bn or \u20ac2 tn.": "one million dollars, five thousand pounds, one point five billion dollars "
                                  "or two trillion euros.",
    "$5 m, $5mm": "five dollars m, five dollars mm",
    "He is 6 ft. tall, 5\u00bd ft, a 10-ft. pole": "he is six feet tall, five and a half feet, a ten-foot pole",
    "In 1850 Ft. Sumter was built": "in eighteen fifty fort sumter was built",
    "1 ft., 11ft, 1,001 ft. to Ft. Worth": "one foot, eleven feet, one thousand one feet to fort worth",
    "\u2116 5, (\u21167), m\u00b2": "number five, (number seven), m squared",
    "100s of people, 1000s and 1,000s, 2,100s": "hundreds of people, thousands and thousands, "
                                                 "two thousand one hundred s",
}


@pytest.mark.parametrize("text, parts", [
    ("Hello. ... World.", ["Hello. ...", "World."]), ("Hello! ??", ["Hello! ??"]),
    ("... Hello. You", ["Hello.", "You"]), ("Wait. ...and go", ["Wait.", "...and go"]), ("... ", ["..."]),
    ("Half. .5 of it", ["Half.", ".5 of it"]),
])  # fmt: skip
def test_marks_alone_are_no_sentence(text, parts):
    assert sentences(text) == parts


@pytest.mark.parametrize("text, parts", [
    ("Wait\u2026 World", ["Wait\u2026", "World"]), ("The (U.S.) Army came.", ["The (U.S.) Army came."]),
    ('"..." Then he left.', ['"..." Then he left.']), ('"Is it?" he asked.', ['"Is it?" he asked.']),
])  # fmt: skip
def test_ellipses_end_sentences_and_closing_marks_do_not(text, parts):
    assert sentences(text) == parts


@pytest.mark.parametrize("text", READINGS)
def test_numbers(text):
    pytest.importorskip("num2words", reason="num2words is not installed")
    assert normalise(text) == READINGS[text]


def test_a_number_that_is_too_long():
    pytest.importorskip("num2words", reason="num2words is not installed")
    with pytest.raises(ValueError, match="does not read 10000000000000000000 in"):
        normalise(f"1{'0' * 310} men")


@pytest.mark.parametrize("text, expected", [
    ("Dr.  Who\u2019s na\u00efve \u2014 Fa\u00e7ade", "doctor who's naive - facade"),
    ("\ufb01ne & Stra\u00dfe", "fine and strasse"),
    ("\u00c6ther \u201cquoted\u201d\u2026", 'aether "quoted"...'),
    ("end . Next ,", "end. next,"),
    ("the cost. of", "the cost. of"),
    ('"etc." etc.; (Jr.) co.uk', '"et cetera" et cetera; (junior) co.uk'),
    ("Windows\u2122", "windows"),
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


@pytest.mark.parametrize("text, parts", [
    ("J. R. Smith came. He left.", ["J. R. Smith came.", "He left."]),
    ("The U.S. Army came. It won.", ["The U.S. Army came.", "It won."]),
    ("It is 5. Then 6.", ["It is 5.", "Then 6."]),
])  # fmt: skip
def test_initials_end_no_sentence(text, parts):
    assert sentences(text) == parts


def test_titles_and_numbers_end_no_sentence():
    text = "Dr. Who met Mr. Smith at No. 7. He said no. So MRS. Jones vs. 12 men; etc. It ended."
    assert sentences(text) == ["Dr. Who met Mr. Smith at No. 7.", "He said no.", "So MRS. Jones vs. 12 men;", "etc.",
                               "It ended."]
