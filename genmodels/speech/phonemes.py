"""Texts as they are spoken: symbols of the International Phonetic Alphabet, ready or by espeak."""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from typing import Literal

from genmodels.speech.text import BLANK, CHARACTERS, PAD, normalise

TextForm = Literal["characters", "ipa", "phonemes"]
FORMS: tuple[TextForm, ...] = ("characters", "ipa", "phonemes")

_LETTERS = (
    "abcdefhijklmnopqrstuvwxyz\u0261"  # as on a keyboard, but for the single-storey g
    "\u00e6\u0250\u0251\u0252\u0253\u0299\u03b2\u0254\u0255\u00e7\u0257\u0256\u00f0\u0259\u0258\u025a\u025b\u025c\u025d"
    "\u025e\u025f\u0284\u0260\u0262\u029b\u0266\u0267\u0127\u0265\u029c\u0268\u026a\u029d\u026d\u026c\u026b\u026e\u029f"
    "\u0271\u026f\u0270\u014b\u0273\u0272\u0274\u00f8\u0275\u0278\u03b8\u0153\u0276\u0298\u0279\u027a\u027e\u027b\u0280"
    "\u0281\u027d\u0282\u0283\u0288\u02a7\u0289\u028a\u028b\u2c71\u028c\u0263\u0264\u028d\u03c7\u028e\u028f\u0291\u0290"
    "\u0292\u0294\u02a1\u0295\u02a2\u01c0\u01c1\u01c2\u01c3\u1d7b\u1d4a"
)
# stress, length, breaks; then what follows or crowns a letter: labial, palatal, nasal, syllabic, tied, ...
_MARKS = ("\u02c8\u02cc\u02d0\u02d1\u02bc\u02b0\u02b2\u02b7\u02e0\u02e4\u02de\u0303\u0329\u032f\u0361\u035c\u0306\u031a"
          "\u0325\u032a\u0308\u031d\u031e\u0320\u031f\u0330")
IPA: tuple[str, ...] = (PAD, BLANK, *_LETTERS, *_MARKS, " ", *",.;:?!-")

#: One character for what is written in several ways; quotes and brackets are not spoken.
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
    """A text in the normal form that tokens are made of.

    Arguments:
        text: as written; in the form `phonemes` what stands between slashes is ready: `a /k\u02c8\u00e6b/`.
        form: `characters` (see `normalise`), `ipa` (the text is in the alphabet already) or `phonemes` (espeak reads
            it).
        language: in which numbers are read, and that of espeak.

    Raises:
        ValueError: for another form, a text without a letter, or one that cannot be read.

    Example:
        >>> in_form("h\u0259l\u02c8o\u028a,  \u201cw\u02c8\u025c\u02d0ld\u201d", "ipa")
        'h\u0259l\u02c8o\u028a, w\u02c8\u025c\u02d0ld'
    """
    if form not in FORMS:
        raise ValueError(f"the form of texts is one of {', '.join(FORMS)}, got {form!r}")
    if form == "characters":
        return normalise(text, language)
    if form == "phonemes":
        parts = _READY.split(text)
        # Every second part stood between slashes; espeak strips white space, which parts the two.
        parts[::2] = [
            f" {phonemise(part, language)} " if any(c.isalnum() for c in part) else part for part in parts[::2]
        ]
        text = "".join(parts)
    found = unicodedata.normalize("NFD", text).replace("c\u0327", "\u00e7").translate(_WRITTEN)
    found = re.sub(r" (?=[,.;:?!])", "", re.sub(r"\s+", " ", found)).strip()
    if not any(c.isalpha() for c in found):
        raise ValueError(f"the text {text!r} has no letters to speak")
    return found


def ready(normal: str, form: TextForm) -> str:
    """A normal form as a text that is read as just that: in the form `phonemes` between slashes.

    Example:
        >>> ready("a cab", "characters"), ready("k\u02c8\u00e6b", "phonemes")
        ('a cab', '/k\u02c8\u00e6b/')
    """
    return f"/{normal}/" if form == "phonemes" else normal


def phonemise(text: str, language: str = "en") -> str:
    """Text as espeak would speak it, with stress and punctuation.

    Raises:
        ValueError: where phonemizer or espeak are not installed, or do not know the language.
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

    quiet = logging.Logger("phonemizer", logging.ERROR)
    return EspeakBackend(language, preserve_punctuation=True, with_stress=True, language_switch="remove-flags",
                         logger=quiet)
