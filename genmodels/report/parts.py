"""Parts of the sections of the page: models, tables, pictures; formats of numbers."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from genmodels.core.data import DataSpec
from genmodels.core.likelihood import MARKS
from genmodels.evaluation.report import DataFacts, LikelihoodLine, Report
from genmodels.evaluation.table import UNITS
from genmodels.plots.images import images_of


def legal(value: object) -> str:
    """Text or markup of a document: characters that are not allowed become U+FFFD, None is empty.

    Example:
        >>> legal("a\\x00b") == "a\\ufffdb", legal(None), legal(3)
        (True, '', '3')
    """
    if isinstance(value, Markup):
        return value
    words = "" if value is None else str(value)
    return "".join("\ufffd" if (ord(c) < 32 and c not in "\t\n") or 0xD800 <= ord(c) < 0xE000 else c for c in words)


class Styled(NamedTuple):
    """Words in a style of the page: `good`, `bad`, `odd` or `note`."""

    words: str
    style: str


class Sound(NamedTuple):
    """Sound to be played: its address, and what is heard."""

    address: str
    description: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str
    style: str = "note"
    kind = "text"


@dataclass(frozen=True)
class Listing:
    """A table whose rows lie in titled groups.

    Arguments:
        columns: names; the first one heads its rows.
        groups: title (None for none) and rows of each; a cell is words, `Styled` or `Sound`.
        caption: what the table is.
        style: `cards` makes each row a card with its own labels on a narrow screen; `numbers`, `confusion`.
        summary: the text to press where it unfolds.
    """

    columns: list[str]
    groups: list[tuple[str | None, list[list]]]
    caption: str
    style: str = "cards"
    summary: str | None = None
    kind = "listing"

    def filled(self) -> Listing:
        """The same without empty columns."""
        rows = [row for _, rows in self.groups for row in rows]
        kept = [k for k in range(len(self.columns)) if k == 0 or any(row[k] not in ("", None) for row in rows)]
        groups = [(title, [[row[k] for k in kept] for row in rows]) for title, rows in self.groups]
        return Listing([self.columns[k] for k in kept], groups, self.caption, self.style, self.summary)


@dataclass(frozen=True)
class Pictures:
    """A picture, or several small ones (address, description, words below), under one caption."""

    title: str
    entries: list[tuple[str | None, str, str]]
    note: str = ""
    kind = "pictures"


@dataclass(frozen=True)
class Sheet:
    """One large picture with its caption."""

    title: str
    address: str
    description: str
    note: str
    kind = "sheet"


@dataclass(frozen=True)
class Gallery:
    """Figures in rows as wide as the page, under a heading if there is one."""

    parts: list
    title: str | None = None
    kind = "gallery"


T = TypeVar("T")

#: For each kind of likelihood a title, its relation to the true value, and the mark before it.
KINDS = {
    "exact": ("Exact", "the model's own likelihood, no estimate", "="),
    "lower_bound": ("Bounds", "the model's true value is at most this, in expectation", "\u2264"),
    "upper_bound": ("Optimistic bounds", "the model's true value is at least this", "\u2265"),
    "ode": ("Probability-flow ODE", "a numerical solution, which may err to either side", "\u2248"),
    "ais": ("Annealed importance sampling", "an estimate through log Z, which flatters the model", "\u2248?"),
    "unnormalised": ("No likelihood", "known up to a constant only: there is no number to compare", "\u2013"),
}


@dataclass(frozen=True)
class Model:
    """One evaluated model: its place in the table, its report, and its arrays."""

    number: int
    report: Report
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its label in the table."""
        return self.report.name

    def array(self, key: str | None) -> np.ndarray | None:
        """An array by name, None where there is none or it is empty."""
        values = self.arrays.get(key)
        return None if values is None or not values.size else values

    def costs(self, line: LikelihoodLine) -> np.ndarray:
        """Costs of items in the line's unit, of energies in nats."""
        nats, dims = self.array(line.values), self.array(f"dims_of_{line.values}")
        if dims is None or line.unit == "nats":
            return self.per_item(nats)[0]
        return -np.asarray(nats, dtype=np.float64) / (dims * (math.log(2) if line.unit.startswith("bits") else 1))

    def per_item(self, nats: np.ndarray) -> tuple[np.ndarray, str]:
        """Costs of items and their unit: bits/dim of integers (of text per character), nats of continuous data."""
        if self.report.data.levels:
            dims = math.prod(self.report.data.event_shape)
            unit = {None: "bits/dim", "utf-8": "bits/byte"}.get(self.report.data.encoding, "bits/character")
            return -np.asarray(nats, dtype=np.float64) / (dims * math.log(2)), unit
        return -np.asarray(nats, dtype=np.float64), "nats"


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    """Items by key, keys in the order of their first item.

    Example:
        >>> grouped([1, 2, 3, 4], lambda n: n % 2)
        {1: [1, 3], 0: [2, 4]}
    """
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def number(value: Any, digits: int = 4) -> str:
    """A number for a cell; empty for None, texts are unchanged.

    Example:
        >>> number(1.23456), number(None), number(1234567), number(True), number(1.5e-9), number(1.0, 0)
        ('1.2346', '', '1,234,567', 'yes', '1.50e-09', '1')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "not finite"
    small = value != 0 and abs(value) < 10.0 ** -max(digits - 1, 0)
    return f"{value:.2e}" if small or abs(value) >= 1e7 else f"{value:,.{digits}f}"


def facts(found: Mapping[str, Any]) -> str:
    """Named values in one line, without those that are None.

    Example:
        >>> facts({"num_steps": 50, "eta": None, "seed": 0})
        'num steps 50, seed 0'
    """
    shown = {key: f"{v:.6g}" if isinstance(v, float) else number(v) for key, v in found.items() if v is not None}
    return ", ".join(f"{key.replace('_', ' ')} {v}" for key, v in shown.items())


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A value with its standard error in at least two significant digits, empty for None.

    Example:
        >>> with_error(0.5, 0.0123), with_error(0.5, None), with_error(None, 0.1), with_error(-4e-5, 3e-5)
        ('0.5000 \u00b1 0.0123', '0.5000', '', '-0.000040 \u00b1 0.000030')
    """
    if value is None or error is None or not math.isfinite(value) or not math.isfinite(error):
        return number(value, digits) + ("" if value is None or error is None else f" \u00b1 {number(error, digits)}")
    if error > 0:
        digits = max(digits, 1 - math.floor(math.log10(error)))
    return f"{value:,.{digits}f} \u00b1 {error:.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent.

    Example:
        >>> percent(0.9312), percent(None)
        ('93.1 %', '')
    """
    return "" if value is None else f"{100 * value:.1f} %"


def with_mark(line: LikelihoodLine) -> str:
    """The value of a line with mark, standard error and unit, or the reason why there is none."""
    sides = line.bracket
    if line.value is None and sides is not None and sides.upper is not None:
        return f"{sides.lower:.4f} to {sides.upper:.4f} {UNITS[line.unit]}"
    if line.kind == "unnormalised" or line.value is None:
        return f"no number: {line.reason or 'unknown up to a constant'}"
    return f"{KINDS[line.kind][2]} {with_error(line.value, line.se_data)} {UNITS[line.unit]}"


def typeset(words: str) -> str:
    """A text of the terminal whose mark, if it begins with one, is that of the page, with a no-break space after it.

    Example:
        >>> typeset(">= 2.1") == "\u2265\u00a02.1", typeset("~? 2.1") == "\u2248?\u00a02.1", typeset("a = b")
        (True, True, 'a = b')
    """
    mark, space, rest = words.partition(" ")
    kind = next((kind for kind, plain in MARKS.items() if space and plain == mark), None)
    return words if kind is None else f"{KINDS[kind][2]}\u00a0{rest}"


def address(picture: Image.Image) -> str:
    """A picture as a `data:` address, PNG inside.

    Example:
        >>> address(Image.new("L", (1, 1)))[:22]
        'data:image/png;base64,'
    """
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def sound_address(samples: np.ndarray, rate: int) -> str:
    """Sound (N,) of int16 as a `data:` address, WAV inside: 2.7 bytes of text for a sample.

    Example:
        >>> sound_address(np.zeros(2, dtype=np.int16), 8000)[:28]
        'data:audio/wav;base64,UklGRi'
    """
    from scipy.io import wavfile

    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def is_image(data: DataFacts) -> bool:
    """Whether items of a data set are pictures."""
    return len(data.event_shape) == 3 and data.event_shape[0] in (1, 3)


def tiles(x: np.ndarray, data: DataFacts) -> list[Image.Image]:
    """Items (n, C, H, W) in the data's own units as pictures, enlarged by whole pixels."""
    spec = DataSpec(data.name, tuple(data.event_shape), levels=data.levels)
    return images_of(torch.as_tensor(np.ascontiguousarray(x)), spec, 32)


def sheet(pictures: list[Image.Image], columns: int) -> Image.Image:
    """Pictures of one size in rows, with transparent gaps.

    Example:
        >>> sheet([Image.new("L", (8, 8), 255)] * 3, columns=2).size
        (18, 18)
    """
    (width, height), gap = pictures[0].size, 2
    rows = math.ceil(len(pictures) / columns)
    mode = "RGBA" if pictures[0].mode == "RGB" else "LA"
    whole = Image.new(mode, (columns * (width + gap) - gap, rows * (height + gap) - gap))
    for k, picture in enumerate(pictures):
        whole.paste(picture, (k % columns * (width + gap), k // columns * (height + gap)))
    return whole
