"""Texts in sentences, with marks for silence of a given length, and for words that are to be spoken slowly."""

from __future__ import annotations

import re

from genmodels.errors import InputError
from genmodels.speech.pace import reopened
from genmodels.speech.text import sentences

_POINT_IN_MARK = re.compile(r"([.,:;?!]+)(\[/slow\])")
_PAUSE = re.compile(r"\[pause=([^\]]*)\]")


def phrases(text: str, pause: float) -> list[tuple[str, float]]:
    """The sentences of a text, each with the seconds of silence before it: `pause`, or what a mark `[pause=0.3]` says.

    A mark within a sentence parts it in two. Marks `[slow]...[/slow]` stay, in each sentence that they reach over.

    Raises:
        InputError: for a mark that is no number of seconds, or with nothing to speak before or behind it, and for words
            spoken slowly without an end.

    Example:
        >>> phrases("One. Two, [pause=0.7] three.", 0.2)
        [('One.', 0.0), ('Two,', 0.2), ('three.', 0.7)]
    """
    # A sentence ends with its point, not with a mark behind that.
    pieces, found = _PAUSE.split(_POINT_IN_MARK.sub(r"\2\1", text)), []
    for piece, mark in zip(pieces[::2], [None, *pieces[1::2]], strict=True):
        seconds = pause if mark is None else _seconds(mark)
        parts = sentences(piece)
        if not parts and len(pieces) > 1:
            raise InputError(f"{text!r}: there is nothing to speak on one side of a [pause=]")
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
        raise InputError(f"[pause={mark}]: a pause is seconds of silence, 0 or more, as in [pause=0.3]")
    return seconds
