"""Texts to symbols: normalisation, pronunciation, markup of rate and pauses."""

from __future__ import annotations

import difflib
import functools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from genmodels.core.errors import InputError, as_input_errors, one_of

#: Typographic variants and the characters in the table of symbols.
_TYPOGRAPHY = str.maketrans({
    **dict.fromkeys("\u2018\u2019\u02bc", "'"), **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"), "\u2026": "...", "\u00df": "ss", "\u00e6": "ae",
    "\u00f8": "o", "\u0153": "oe", "\u0142": "l", "\u00f0": "d", "\u00fe": "th", "\u00d7": " times ", "&": " and ",
})  # fmt: skip

_ABBREVIATIONS = {
    "mr": "mister", "mrs": "missis", "dr": "doctor", "st": "saint", "co": "company", "jr": "junior", "sr": "senior",
    "maj": "major", "gen": "general", "capt": "captain", "lt": "lieutenant", "col": "colonel", "sgt": "sergeant",
    "rev": "reverend", "hon": "honorable", "esq": "esquire", "ltd": "limited", "ft": "fort", "vs": "versus", "etc":
    "et cetera"}  # fmt: skip
_ABBREVIATED = re.compile(rf"(?<![a-z])(?!(?<=\d)st)({'|'.join(_ABBREVIATIONS)})\.(?![^\W\d]|\s?\.)")
_FEET = re.compile(r"([\d.,]*\d|\bhalf|\bquarters?)(-|\s*)ft\b\.?(?!\.)")  # not a fort
#: `No.` is also a word at the end of a sentence, so that a number must follow.
_NUMBERED = re.compile(r"\bno\.\s*(?=\d)")
#: Initials, and abbreviations that stand before a name or a number: none is at the end of a sentence.
_TITLES = ("[a-z]", "mr", "mrs", "dr", "st", "maj", "gen", "capt", "lt", "col", "sgt", "rev", "hon", "vs", "a.m", "p.m")
_SENTENCE_END = re.compile(
    r"(?<=[.?!;\u2026])"
    + "".join(rf"(?<!\b{title}\.)" for title in _TITLES)
    + r"(?!(?<=\bno\.)\s+\d)\s+(?=[.?!;]*[^.?!;\s]*\w)", re.IGNORECASE)  # a part of marks alone is no sentence

_FRACTIONS = {"\u00bd": "a half", "\u00bc": "a quarter", "\u00be": "three quarters"}
_FRACTION = re.compile(rf"(\d\s?)?([{''.join(_FRACTIONS)}])")
_RAISED = "[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]"
_SIGNS = {"\u00b2": " squared ", "\u00b3": " cubed ", "\u2116": " number "}
_SIGN = re.compile(f"(?<!{_RAISED})[{''.join(_SIGNS)}](?!{_RAISED})")
_MONEY = {"$": ("dollar", "cent", "cents"), "\u00a3": ("pound", "penny", "pence"), "\u20ac": ("euro", "cent", "cents")}
_WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
_SCALES = {"k": "thousand", "m": "million", "b": "billion", "bn": "billion", "tn": "trillion"}
_AMOUNT = re.compile(rf"([$\u00a3\u20ac])\s?({_WHOLE})(\.\d+)?"
                     r"(?:\s*(hundred|thousand|million|billion|trillion|[bt]n|(?<=\d)[kmb])\b)?")
_ORDINAL = re.compile(rf"\b({_WHOLE})(st|nd|rd|th)\b")
#: Decades, where the apostrophe of `'90s` stands for the century, and `100s of people`.
_DECADE = re.compile(r"(?<![\w.,])(?:(1[1-9]\d0|20\d0)|'?([2-9]0|100|1,?000))s\b")
_CLOCK = re.compile(r"\b([0-2]?\d):([0-5]\d)(?::([0-5]\d)(?![.:]?\d))?(?!\d)(?=(\s?[ap]\.?m\b)?)")
_NUMBER = re.compile(rf"(?:{_WHOLE})(?:\.\d+)?(?=('s\b)?)")


def normalise(text: str, language: str = "en") -> str:
    """Text in lower case with words for numbers, signs and abbreviations, without accents, with single spaces.

    Numbers, written as in English (1,000.5), are read by num2words in the language; in English 1100 to 2099, written
    without comma, as years, and `1990s` and `'90s` as decades.

    Raises:
        ValueError: for text without a letter, or with numbers if num2words is missing or does not know the language.

    Example:
        >>> normalise("Caf\\u00e9\\u2019s   Mr. Smith")
        "cafe's mister smith"
    """
    if language.startswith("en"):
        text = _FRACTION.sub(lambda match: f"{match[1] + ' and' if match[1] else ''} {_FRACTIONS[match[2]]} ", text)
        text = re.sub(r"\bFt\.(?=\s[A-Z])", "Fort", _SIGN.sub(lambda match: _SIGNS[match[0]], text))
    # Raised digits, those in circles and fractions stand apart from a number before them: 10^2 is not 102.
    found = re.sub(r"[\u2120\u2122]|(?<=\d)(?=\w)", lambda at: " " * (not at[0] and unicodedata.category(
        text[at.start()]) == "No"), text)  # trade marks are left out
    found = unicodedata.normalize("NFKC", found).translate(_TYPOGRAPHY).lower().translate(_TYPOGRAPHY)
    found = "".join(c for c in unicodedata.normalize("NFKD", found) if not unicodedata.combining(c))
    found = re.sub(r"(?<![\w.,])\.(?=\d)", "0.", _NUMBERED.sub("number ", found))
    found = _FEET.sub(lambda at: f"{at[1]}{at[2] or ' '}f{'oo' if at[2] == '-' or at[1] == '1' else 'ee'}t", found)
    found = _ABBREVIATED.sub(lambda match: _ABBREVIATIONS[match[1]], found)
    found = re.sub(r"(?<![\w.,)%-])-(?=[\d$\u00a3\u20ac])", "minus ", found)
    found = _read_numbers(found, language) if any(c.isdigit() for c in found) else found
    found = re.sub(r"\s+", " ", found.replace("%", " percent "))
    found = re.sub(r" (?=[,.;:?!)]|-\w)|(?<=\() ", "", found).strip()
    if not any(c.isalpha() for c in found):
        raise ValueError(f"the text {text!r} has no letters to read")
    return found


def _read_numbers(text: str, language: str) -> str:
    try:
        from num2words import num2words
    except ImportError as error:
        raise ValueError(f"the text {text!r} has numbers: pip install 'genmodels[speech]', or write words") from error

    def words(number: str, to: str = "cardinal") -> str:
        value, english = number.replace(",", ""), language.startswith("en")
        whole, _, decimals = value.partition(".")
        if english and decimals:  # digit by digit, for zeros at the end
            return " ".join([words(whole), "point", *map(words, decimals)])
        if to == "cardinal" and not decimals and re.match("0.", value):  # such as 007
            return " ".join(map(words, value))
        try:
            spelt = num2words(float(value) if decimals else int(value), lang=language, to=to)
        except (NotImplementedError, OverflowError) as error:
            raise ValueError(f"num2words does not read {number[:20]} in the language {language!r}") from error
        return re.sub(r"\band ", "", spelt).replace(",", "") if english else spelt

    def amount(match: re.Match) -> str:
        (whole, cent, cents), decimals, scale = _MONEY[match[1]], match[3] or "", match[4] or ""
        if scale or len(decimals) not in (0, 3):  # $1.5 million, $0.125
            return f"{words(match[2] + decimals)} {_SCALES.get(scale, scale)} {whole}s"
        spelt = f"{words(match[2])} {whole}{'' if match[2] == '1' else 's'}"
        small = int(decimals[1:] or 0)
        return f"{spelt} {words(str(small))} {cent if small == 1 else cents}" if small else spelt

    def number(match: re.Match) -> str:
        year = language.startswith("en") and re.fullmatch(r"1[1-9]\d\d|20\d\d", match[0])
        return f" {words(match[0], 'year' if year else 'cardinal')}{'' if match[1] else ' '}"  # apart from letters

    def decade(match: re.Match) -> str:
        spelt = words(match[1], "year") if match[1] else words(match[2]).removeprefix("one ")
        return f"{spelt[:-1]}ies" if spelt.endswith("y") else f"{spelt}s"

    def clock(match: re.Match) -> str:
        minutes = "oh " * (match[2] < "10") + match[2].lstrip("0") if int(match[2]) else "" if match[4] else "o'clock"
        seconds = f" and {int(match[3])} second{'s' * (int(match[3]) != 1)}" if match[3] else ""
        return f"{int(match[1])} {minutes}{seconds}{' ' * match.string[match.end() : match.end() + 1].isalnum()}"

    text = _AMOUNT.sub(lambda match: " " + amount(match) + " " * (text[match.end() :][:2] != "'s"), text)
    if language.startswith("en"):
        text = _CLOCK.sub(clock, _DECADE.sub(decade, text))
    return _NUMBER.sub(number, _ORDINAL.sub(lambda match: words(match[1], "ordinal"), text))


PAD, BLANK = "<pad>", "<blank>"
CHARACTERS: tuple[str, ...] = (PAD, BLANK, *"abcdefghijklmnopqrstuvwxyz", " ", *"',.;:?!-")


class UnknownSymbol(ValueError):
    """A character that is not in the table of symbols; the message has its position and the nearest symbol."""


@dataclass(frozen=True)
class Symbols:
    """The symbols of a model, in the order of their numbers; stored with the model, never renumbered.

    Arguments:
        table: padding, blank, then one character each.
        blanks: put a blank before, between and after the characters: 2 N + 1 tokens.
        on_unknown: `error`, or `drop` characters that are not in the table.

    Example:
        >>> symbols = Symbols(blanks=False)
        >>> symbols.encode("a cab"), symbols.decode([2, 28, 4, 2, 3])
        ([2, 28, 4, 2, 3], 'a cab')
    """

    table: tuple[str, ...] = CHARACTERS
    blanks: bool = True
    on_unknown: Literal["error", "drop"] = "error"

    def __post_init__(self):
        if self.table[:2] != (PAD, BLANK) or len(set(self.table)) != len(self.table):
            raise ValueError(f"a table of symbols must begin with {PAD}, {BLANK} and have no duplicates")
        one_of("on_unknown", self.on_unknown, ("error", "drop"))

    def __len__(self) -> int:
        return len(self.table)

    def unknown(self, text: str) -> dict[str, int]:
        """The characters of a text that are not in the table, each with its count."""
        return {c: text.count(c) for c in dict.fromkeys(text) if c not in self.table}

    def encode(self, text: str) -> list[int]:
        """The numbers of the characters of a text in normal form.

        Raises:
            UnknownSymbol: for the first character that is not in the table, unless those are dropped.
        """
        number = {symbol: k for k, symbol in enumerate(self.table)}
        if self.on_unknown == "drop":
            text = "".join(c for c in text if c in number)
        for position, c in enumerate(text):
            if c not in number:
                names = {unicodedata.name(symbol).lower(): symbol for symbol in self.table[2:] if len(symbol) == 1}
                near = difflib.get_close_matches(unicodedata.name(c, c).lower(), names, n=1, cutoff=0.3)
                hint = f", nearest is {names[near[0]]!r}" if near else ""
                raise UnknownSymbol(f"character {c!r} at position {position} of {text!r} is not in the table of "
                                    f"symbols{hint}; on_unknown=drop leaves such characters out")
        if not text:
            raise UnknownSymbol("the text is empty")
        numbers = [number[c] for c in text]
        return [1, *(k for each in numbers for k in (each, 1))] if self.blanks else numbers

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without padding and blanks."""
        return "".join(self.table[k] for k in tokens if k > 1)


def sentences(text: str, longest: int = 200) -> list[str]:
    """A long text split at the ends of sentences, then at commas, then at spaces.

    Example:
        >>> sentences("One. Two, three. Mr. Four!", longest=12)
        ['One.', 'Two, three.', 'Mr. Four!']
    """
    parts = []
    for sentence in _SENTENCE_END.split(re.sub(r"^[.?!;\s]+(?=\s)", "", text.strip()).strip()):
        while len(sentence) > longest:
            space = max(sentence.rfind(mark, 0, longest) for mark in (", ", ": ", " - "))
            cut = space + 1 if space > 0 else max(sentence.rfind(" ", 0, longest), 0) or longest
            parts, sentence = [*parts, sentence[:cut].strip()], sentence[cut:].strip()
        parts.append(sentence)
    return [part for part in parts if part]


TextForm = Literal["characters", "ipa", "phonemes"]
FORMS: tuple[TextForm, ...] = ("characters", "ipa", "phonemes")

_LETTERS = (
    "abcdefhijklmnopqrstuvwxyz\u0261"  # as on a keyboard, except the single-storey g
    "\u00e6\u0250\u0251\u0252\u0253\u0299\u03b2\u0254\u0255\u00e7\u0257\u0256\u00f0\u0259\u0258\u025a\u025b\u025c\u025d"
    "\u025e\u025f\u0284\u0260\u0262\u029b\u0266\u0267\u0127\u0265\u029c\u0268\u026a\u029d\u026d\u026c\u026b\u026e\u029f"
    "\u0271\u026f\u0270\u014b\u0273\u0272\u0274\u00f8\u0275\u0278\u03b8\u0153\u0276\u0298\u0279\u027a\u027e\u027b\u0280"
    "\u0281\u027d\u0282\u0283\u0288\u02a7\u0289\u028a\u028b\u2c71\u028c\u0263\u0264\u028d\u03c7\u028e\u028f\u0291\u0290"
    "\u0292\u0294\u02a1\u0295\u02a2\u01c0\u01c1\u01c2\u01c3\u1d7b\u1d4a"
)
# stress, length, breaks; then modifiers and diacritics: labial, palatal, nasal, syllabic, tied, ...
_MARKS = ("\u02c8\u02cc\u02d0\u02d1\u02bc\u02b0\u02b2\u02b7\u02e0\u02e4\u02de\u0303\u0329\u032f\u0361\u035c\u0306\u031a"
          "\u0325\u032a\u0308\u031d\u031e\u0320\u031f\u0330")
IPA: tuple[str, ...] = (PAD, BLANK, *_LETTERS, *_MARKS, " ", *",.;:?!-")

#: Variants of one character; quotes and brackets are dropped.
_WRITTEN = str.maketrans({"g": "\u0261", "\u2010": "-", "\u2011": "-", "\u2013": "-", "\u2014": "-",
                          "\u2026": "...", **dict.fromkeys('"\u201c\u201d\u201e\u00ab\u00bb()[]{}/', "")})
_READY = re.compile(r"/([^/]+)/")
_ESPEAK = {"en": "en-us", "fr": "fr-fr", "pt": "pt-br"}


def table_of(form: TextForm) -> tuple[str, ...]:
    """The table of symbols of a form: letters for `characters`, else those of the alphabet.

    Example:
        >>> len(table_of("characters")), len(table_of("ipa"))
        (37, 149)
    """
    return CHARACTERS if form == "characters" else IPA


def in_form(text: str, form: TextForm, language: str = "en") -> str:
    """A text in the normal form from which tokens are made.

    Arguments:
        text: as written; with the form `phonemes`, text between slashes is phonemes already: `a /k\u02c8\u00e6b/`.
        form: `characters` (see `normalise`), `ipa` (the text is phonemes already) or `phonemes` (by espeak).
        language: in which numbers are read, and that of espeak.

    Raises:
        ValueError: for another form, a text without a letter, or one that cannot be read.

    Example:
        >>> in_form("h\u0259l\u02c8o\u028a,  \u201cw\u02c8\u025c\u02d0ld\u201d", "ipa")
        'h\u0259l\u02c8o\u028a, w\u02c8\u025c\u02d0ld'
    """
    one_of("the form of texts", form, FORMS)
    if form == "characters":
        return normalise(text, language)
    if form == "phonemes":
        # Every second part was between slashes; espeak strips the white space around the others.
        text = "".join(part if k % 2 or not any(c.isalnum() for c in part) else f" {phonemise(part, language)} "
                       for k, part in enumerate(_READY.split(text)))
    found = unicodedata.normalize("NFD", text).replace("c\u0327", "\u00e7").translate(_WRITTEN)
    found = re.sub(r" (?=[,.;:?!])", "", re.sub(r"\s+", " ", found)).strip()
    if not any(c.isalpha() for c in found):
        raise ValueError(f"the text {text!r} has no letters to read")
    return found


def ready(normal: str, form: TextForm) -> str:
    """A normal form as a text that is read unchanged: with the form `phonemes` between slashes.

    Example:
        >>> ready("a cab", "characters"), ready("k\u02c8\u00e6b", "phonemes")
        ('a cab', '/k\u02c8\u00e6b/')
    """
    return f"/{normal}/" if form == "phonemes" else normal


def phonemise(text: str, language: str = "en") -> str:
    """The phonemes of a text by espeak, with stress and punctuation.

    Raises:
        ValueError: if phonemizer or espeak are not installed, or do not support the language.
    """
    try:
        return _espeak(_ESPEAK.get(language, language)).phonemize([text], strip=True)[0]
    except ImportError as error:
        raise ValueError("symbols=phonemes needs phonemizer and the program espeak-ng: pip install "
                         "'genmodels[phonemes]', or write phonemes yourself and set symbols=ipa") from error
    except RuntimeError as error:
        raise ValueError(f"symbols=phonemes: {str(error).strip().splitlines()[0]}; espeak-ng is installed by the "
                         "system, and its languages are listed by espeak-ng --voices") from error


@functools.cache
def _espeak(language: str):
    from phonemizer.backend import EspeakBackend

    return EspeakBackend(language, preserve_punctuation=True, with_stress=True, language_switch="remove-flags",
                         logger=logging.Logger("phonemizer", logging.ERROR))


SLOW = 1.5  # factor of the duration, if the mark has none
_MARK = re.compile(r"\[(/?)slow(?:=([^\]]*))?\]")


def without_marks(text: str) -> str:
    """The text without marks.

    Example:
        >>> without_marks("Now [slow=2]one by one[/slow].")
        'Now one by one.'
    """
    return _MARK.sub("", text)


def paced(text: str) -> list[tuple[str, float]]:
    """The pieces of a text, each with the factor of its duration.

    Raises:
        ValueError: for a mark that is not closed, not opened, nested, or whose factor is not a positive number.

    Example:
        >>> paced("Now [slow=2]one by one[/slow].")
        [('Now ', 1.0), ('one by one', 2.0), ('.', 1.0)]
    """
    pieces, factor, at, opened = [], 1.0, 0, False
    for mark in _MARK.finditer(text):
        closes = bool(mark[1])
        if closes != opened or (closes and mark[2] is not None):
            raise ValueError(f"{text!r}: {mark[0]} is {'not opened' if closes else 'inside another'}; it is written "
                             "[slow]one by one[/slow]")
        pieces.append((text[at : mark.start()], factor))
        opened, at, factor = not closes, mark.end(), 1.0 if closes else _factor(mark)
    if opened:
        raise ValueError(f"{text!r}: [slow] is not closed by [/slow]")
    return [piece for piece in [*pieces, (text[at:], factor)] if piece[0]]


def _factor(mark: re.Match) -> float:
    if not 0.01 <= (factor := SLOW if mark[2] is None else _number(mark[2])) <= 100:
        raise ValueError(f"{mark[0]}: the factor of the duration must be a positive number from 0.01 to 100")
    return factor


def _number(text: str) -> float:
    """The number of a mark, NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def factors_of(text: str, normal_form: Callable[[str], str]) -> list[float]:
    """The duration factor of each character of a text's normal form; a space belongs to the word before it.

    The content of a mark is counted in words, because numbers become several and phonemes depend on their neighbours.

    Arguments:
        text: with marks.
        normal_form: of texts without marks.

    Raises:
        ValueError: for invalid marks, or marks that do not enclose whole words.

    Example:
        >>> factors_of("a [slow=2]b c[/slow] d", str.lower)
        [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0]
    """
    pieces = paced(text)
    words = normal_form(without_marks(text)).split(" ")
    factors, read, first = [1.0] * len(words), "", 0
    within_words = any(a[-1:].isalnum() and b[:1].isalnum() for (a, _), (b, _) in pairwise(pieces))
    for piece, factor in pieces:
        read += piece
        spelt = normal_form(read).split() if any(c.isalnum() for c in read) else []
        last = len(spelt)
        moved = any(a != b and a in words[last:] for a, b in zip(spelt, words, strict=False))  # "$5 " of "$5 million"
        if moved or (factor != 1.0 and (last <= first or within_words)):
            raise ValueError(f"{text!r}: [slow] must enclose whole words, {piece!r} is not one")
        factors[first:last] = [factor] * (min(last, len(words)) - first)
        first = last
    return [factor for word, factor in zip(words, factors, strict=True) for _ in range(len(word) + 1)][:-1]


def reopened(sentences: Sequence[str]) -> list[str]:
    """Sentences in order, with marks that span several closed and reopened in each.

    Raises:
        ValueError: for a mark that is not closed in any of them.

    Example:
        >>> reopened(["One [slow]two.", "Three[/slow] four."])
        ['One [slow]two.[/slow]', '[slow]Three[/slow] four.']
    """
    found, opened = [], ""
    for sentence in sentences:
        whole = opened + sentence
        for mark in _MARK.finditer(whole):
            opened = "" if mark[1] else mark[0]
        found.append(f"{whole}[/slow]" if opened else whole)
    if opened:
        raise ValueError(f"{sentences[-1]!r}: {opened} is not closed by [/slow]")
    return [re.sub(r"\[slow(?:=[^\]]*)?\]\[/slow\]", "", sentence) for sentence in found]


_POINT_IN_MARK = re.compile(r"([.,:;?!]+)(\[/slow\])")
LONGEST_PAUSE = 60.0  # seconds of silence between two sentences
_PAUSE = re.compile(r"\[pause=([^\]]*)\]")


def phrases(text: str, pause: float) -> list[tuple[str, float]]:
    """The sentences of a text, each with the seconds of silence before it: `pause`, or those of a mark `[pause=0.3]`.

    A pause within a sentence splits it. Marks `[slow]...[/slow]` are kept in each sentence that they span.

    Raises:
        InputError: for a mark that is not a number of seconds or has no text on a side, and `[slow]` without an end.

    Example:
        >>> phrases("One. Two, [pause=0.7] three.", 0.2)
        [('One.', 0.0), ('Two,', 0.2), ('three.', 0.7)]
    """
    # So that a sentence ends with its full stop, not with a mark after it.
    pieces, found = _PAUSE.split(_POINT_IN_MARK.sub(r"\2\1", text)), []
    for piece, mark in zip(pieces[::2], [None, *pieces[1::2]], strict=True):
        seconds = pause if mark is None else _number(mark)
        if mark is not None and not 0 <= seconds <= LONGEST_PAUSE:
            raise InputError(f"[pause={mark}]: a pause is a number of seconds from 0 to {LONGEST_PAUSE:g}, as in "
                             "[pause=0.3]")
        parts = sentences(piece)
        if not parts and len(pieces) > 1:
            raise InputError(f"{text!r}: there is no text on one side of a [pause=]")
        found += [(part, pause if k else seconds) for k, part in enumerate(parts)]
    with as_input_errors():
        texts = reopened([part for part, _ in found])
    return [(text, seconds if k else 0.0) for k, (text, (_, seconds)) in enumerate(zip(texts, found, strict=True))]
