"""Marks in texts for slow words, `[slow]one by one[/slow]`, `[slow=2]`, and for pauses, `[pause=0.5]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from genmodels.core.errors import InputError
from genmodels.speech.text import sentences

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
    pieces, factor, at = [], 1.0, 0
    opened = False
    for mark in _MARK.finditer(text):
        closes = bool(mark[1])
        if closes != opened or (closes and mark[2] is not None):
            raise ValueError(f"{text!r}: {mark[0]} is {'not opened' if closes else 'inside another'}; it is written "
                             "[slow]one by one[/slow]")
        pieces.append((text[at : mark.start()], factor))
        opened, at = not closes, mark.end()
        factor = _factor(mark) if opened else 1.0
    if opened:
        raise ValueError(f"{text!r}: [slow] is not closed by [/slow]")
    return [piece for piece in [*pieces, (text[at:], factor)] if piece[0]]


def _factor(mark: re.Match) -> float:
    try:
        factor = SLOW if mark[2] is None else float(mark[2])
    except ValueError:
        factor = -1.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"{mark[0]}: the factor of the duration must be a positive number, as in [slow=2]")
    return factor


def factors_of(text: str, normal_form: Callable[[str], str]) -> list[float]:
    """The duration factor of each character of a text's normal form; a space belongs to the word before it.

    The content of a mark is counted in words of the normal form, because a number becomes several words and phonemes
    depend on their neighbours.

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
    factors, read = [1.0] * len(words), ""
    for piece, factor in pieces:
        first, read = _words_in(read, normal_form), read + piece
        last = _words_in(read, normal_form)
        if factor != 1.0 and (last <= first or not _parted(text, pieces)):
            raise ValueError(f"{text!r}: [slow] must enclose whole words, {piece!r} is not one")
        factors[first:last] = [factor] * (min(last, len(words)) - first)
    return [factor for word, factor in zip(words, factors, strict=True) for _ in range(len(word) + 1)][:-1]


def _words_in(text: str, normal_form: Callable[[str], str]) -> int:
    return len(normal_form(text).split()) if any(c.isalnum() for c in text) else 0


def _parted(text: str, pieces: Sequence[tuple[str, float]]) -> bool:
    """Whether no mark is within a word."""
    return not any(a[-1:].isalnum() and b[:1].isalnum() for (a, _), (b, _) in zip(pieces, pieces[1:], strict=False))


def reopened(sentences: Sequence[str]) -> list[str]:
    """Sentences in order; marks that span several are closed and reopened in each.

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
_PAUSE = re.compile(r"\[pause=([^\]]*)\]")


def phrases(text: str, pause: float) -> list[tuple[str, float]]:
    """The sentences of a text, each with the seconds of silence before it: `pause`, or those of a mark `[pause=0.3]`.

    A pause within a sentence splits it. Marks `[slow]...[/slow]` are kept in each sentence that they span.

    Raises:
        InputError: for a mark that is not a number of seconds, or has no text before or after it, and for `[slow]`
            without an end.

    Example:
        >>> phrases("One. Two, [pause=0.7] three.", 0.2)
        [('One.', 0.0), ('Two,', 0.2), ('three.', 0.7)]
    """
    # A sentence ends with its full stop, not with a mark after it.
    pieces, found = _PAUSE.split(_POINT_IN_MARK.sub(r"\2\1", text)), []
    for piece, mark in zip(pieces[::2], [None, *pieces[1::2]], strict=True):
        seconds = pause if mark is None else _seconds(mark)
        parts = sentences(piece)
        if not parts and len(pieces) > 1:
            raise InputError(f"{text!r}: there is no text on one side of a [pause=]")
        found += [(part, pause if k else seconds) for k, part in enumerate(parts)]
    try:
        texts = reopened([part for part, _ in found])
    except ValueError as error:
        raise InputError(str(error)) from error
    return [(text, seconds if k else 0.0) for k, (text, (_, seconds)) in enumerate(zip(texts, found, strict=True))]


def _seconds(mark: str) -> float:
    try:
        seconds = float(mark)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InputError(f"[pause={mark}]: a pause must be a number of seconds from 0 on, as in [pause=0.3]")
    return seconds
