"""Marks in texts that are to be spoken: silence of a given length."""

from __future__ import annotations

import re

from genmodels.errors import InputError
from genmodels.speech.text import sentences

_PAUSE = re.compile(r"\[pause=([^\]]*)\]")


def phrases(text: str, pause: float) -> list[tuple[str, float]]:
    """The sentences of a text, each with the seconds of silence before it: `pause`, or what a mark `[pause=0.3]` says.

    A mark within a sentence parts it in two.

    Raises:
        InputError: for a mark that is no number of seconds, or with nothing to speak before or behind it.

    Example:
        >>> phrases("One. Two, [pause=0.7] three.", 0.2)
        [('One.', 0.0), ('Two,', 0.2), ('three.', 0.7)]
    """
    pieces, found = _PAUSE.split(text), []
    for piece, mark in zip(pieces[::2], [None, *pieces[1::2]], strict=True):
        seconds = pause if mark is None else _seconds(mark)
        parts = sentences(piece)
        if not parts and len(pieces) > 1:
            raise InputError(f"{text!r}: there is nothing to speak on one side of a [pause=]")
        found += [(part, pause if k else seconds) for k, part in enumerate(parts)]
    return [(part, seconds if k else 0.0) for k, (part, seconds) in enumerate(found)]


def _seconds(mark: str) -> float:
    try:
        seconds = float(mark)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InputError(f"[pause={mark}]: a pause is seconds of silence, 0 or more, as in [pause=0.3]")
    return seconds
