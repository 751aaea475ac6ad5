"""The header of a checkpoint: one schema, which every header must fit when it is written and whenever it is read.

A file is not trusted: its header is JSON of bounded size and depth, in which every key has its type and its range. This
module needs the standard library alone.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FORMAT = 1
MOST_BYTES = 4 << 20
_DEPTH, _VALUES, _CHARACTERS = 32, 500_000, 10_000
_OPTION = 2**24  # a count among a model's options: a list of so many is a hundred megabytes
_LARGE = 2**31 - 1  # sizes, levels, classes: beyond any data, within 32 bits


@dataclass(frozen=True)
class _Form:
    """What one value must be, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]

    def or_null(self) -> _Form:
        return _Form(f"{self.expected} or null", lambda value: value is None or self.holds(value))

    def many(self, least: int = 0) -> _Form:
        return _Form(f"a list of {self.expected}", lambda value: type(value) is list and len(value) >= least
                     and all(self.holds(item) for item in value))  # fmt: skip

    def or_many(self) -> _Form:
        several = self.many(1)
        return _Form(f"{self.expected}, or {several.expected}", lambda value: self.holds(value) or several.holds(value))

    def named(self) -> _Form:
        return _Form(f"{self.expected} under each name", lambda value: type(value) is dict
                     and all(self.holds(item) for item in value.values()))  # fmt: skip


def _whole(least: int, most: int) -> _Form:
    return _Form(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _mapping(value: Any) -> bool:
    return type(value) is dict


_WORD = _Form("a printable word", lambda value: type(value) is str and 0 < len(value) <= 200 and value.isprintable())
_TEXT = _Form("text", lambda value: type(value) is str)
_FLAG = _Form("true or false", lambda value: type(value) is bool)
_NUMBER = _Form("a finite number", lambda value: type(value) in (int, float) and math.isfinite(value))
_POSITIVE = _Form("a positive number", lambda value: _NUMBER.holds(value) and value > 0)
_OPTIONS = _Form("a mapping", _mapping)
_SIZE, _COUNT = _whole(1, _LARGE), _whole(0, 2**63 - 1)

_MEL = {
    "sample_rate?": _SIZE, "n_fft?": _whole(2, 2**20), "hop?": _whole(1, 2**20), "n_mels?": _whole(1, 2**14),
    "f_min?": _NUMBER, "f_max?": _POSITIVE, "padding?": _WORD,
}  # fmt: skip
_STATISTICS = {"per?": _WORD, "mean": _NUMBER.or_many(), "std": _NUMBER.or_many(), "frames?": _SIZE}
_WRITTEN = {
    "symbols": _TEXT.many(1), "blanks": _FLAG, "language": _WORD, "form?": _WORD, "examples?": _TEXT.many(),
}  # fmt: skip
_DATA = {
    "name": _TEXT, "event_shape": _SIZE.many(1), "levels?": _whole(2, _LARGE).or_null(),
    "num_classes?": _SIZE.or_null(), "class_names?": _TEXT.many(), "entropy?": _NUMBER.or_null(), "mel?": _MEL,
    "statistics?": _STATISTICS, "text?": _WRITTEN, "speakers?": _TEXT.many(), "columns?": _TEXT.many(),
}  # fmt: skip
_CONFIG = {
    "model?": _OPTIONS, "data?": _OPTIONS, "trainer?": {"limit_evaluation?": _SIZE.or_null(), "*": None},
    "logger?": _OPTIONS, "checkpoint?": _OPTIONS,
    "seed?": _whole(-(2**63), 2**64 - 1), "trust?": _TEXT.many(), "*": None,
}  # fmt: skip
#: A key that ends in ? may be missing; a mapping below such a key may also be null. Others exist where there is a *.
_HEADER = {
    "format": _whole(1, FORMAT), "family": _WORD, "genmodels": _WORD, "torch": _WORD, "model": _OPTIONS,
    "config": _CONFIG, "data": _DATA, "parameters": _COUNT, "step": _COUNT, "batches_seen": _COUNT,
    "seed": _whole(-(2**63), 2**64 - 1), "figures": _NUMBER.named(), "finished": _FLAG,
}  # fmt: skip


def parse(text: bytes) -> dict[str, Any]:
    """The header that a record holds.

    Raises:
        ValueError: one line that says which key is wrong, and what it should be.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"it takes {len(text)} bytes, {MOST_BYTES} at most are read")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"it cannot be read as JSON ({' '.join(str(error).split())[:200]})") from None
    _bound(header)
    if _mapping(header) and type(header.get("format")) is int and header["format"] > FORMAT:
        raise ValueError(f"it is of checkpoint format {header['format']}, this version reads up to {FORMAT}: upgrade "
                         "genmodels")
    _fit(header, _HEADER, "")
    _bound(header["model"], _OPTION)
    data, target = header["data"], header["model"].get("_target_")
    if math.prod(data["event_shape"]) > _LARGE or len(data["event_shape"]) > 8:
        raise ValueError(f"data.event_shape is {reprlib.repr(data['event_shape'])}, which no data have")
    names, classes = data.get("class_names") or [], data.get("num_classes")
    if names and len(names) != classes:
        raise ValueError(f"data.class_names are {len(names)} names, where data.num_classes is {classes}")
    if not _WORD.holds(target):
        raise ValueError(f"model._target_ is {reprlib.repr(target)}, expected the name of a class")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one mapping")
    return found


def _bound(header: Any, largest: int = 2**64) -> None:
    """Raise a ValueError for what is nested too deep, too much, too long, not finite, or under a key of odd characters.

    Python's own functions recurse into values, and their results are printed: both are safe after this.
    """
    left, seen = [(header, 1)], 0
    while left:
        value, depth = left.pop()
        seen += 1
        if depth > _DEPTH or seen > _VALUES:
            what = f"is nested more than {_DEPTH} deep" if depth > _DEPTH else f"holds more than {_VALUES} values"
            raise ValueError(f"it {what}")
        if type(value) is dict:
            odd = next((key for key in value if not _WORD.holds(key)), None)
            if odd is not None:
                raise ValueError(f"the key {reprlib.repr(odd)} is not {_WORD.expected}")
            left += [(item, depth + 1) for item in value.values()]
        elif type(value) is list:
            left += [(item, depth + 1) for item in value]
        elif type(value) is str and len(value) > _CHARACTERS:
            raise ValueError(f"{reprlib.repr(value)} has {len(value)} characters, {_CHARACTERS} at most are read")
        elif type(value) is float and not math.isfinite(value) or type(value) is int and abs(value) > largest:
            raise ValueError(f"{reprlib.repr(value)} is no number that may stand there")


def _fit(value: Any, form: _Form | dict, where: str) -> None:
    """Raise a ValueError naming the first key, dotted, whose value is not of its form."""
    if isinstance(form, _Form):
        if not form.holds(value):
            raise ValueError(f"{where} is {reprlib.repr(value)}, expected {form.expected}")
        return
    if not _mapping(value):
        raise ValueError(f"{where or 'it'} is {reprlib.repr(value)}, expected a mapping")
    known = {key.rstrip("?"): key for key in form if key != "*"}
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in known and "*" not in form:
            raise ValueError(f"{prefix}{key} is unknown to this version: if a later one wrote it, upgrade genmodels")
    for key, spelt in known.items():
        if key not in value:
            if key == spelt:
                raise ValueError(f"{prefix}{key} is missing")
        elif not (value[key] is None and spelt != key and isinstance(form[spelt], dict)):
            _fit(value[key], form[spelt], f"{prefix}{key}")
