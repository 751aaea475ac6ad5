"""A table of reports as the sections of a page read it: whatever is missing reads as nothing."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from genmodels.core.data import DataSpec
from genmodels.plots.images import images_of

#: Elements that have no content and no end tag.
_VOID = {"meta", "link", "img", "br", "hr", "col"}


class Markup(str):
    """Text that is markup already, made by this module alone: everything else is escaped when it is put in."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Any value as markup: what is markup stays, the rest is escaped; None is nothing, a list is its items in turn.

    Example:
        >>> text("a < b"), text(tag("b", "fat")), text(["x", None, 3])
        ('a &lt; b', '<b>fat</b>', 'x3')
    """
    if value is None:
        return Markup("")
    if isinstance(value, Markup):
        return value
    if isinstance(value, list | tuple):
        return Markup("".join(text(each) for each in value))
    return Markup(escape(_legal(str(value)), quote=True))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element; in names of attributes `_` stands for `-`, and a trailing one is dropped (`class_`).

    An attribute that is None or False is left out, one that is True stands without a value.

    Example:
        >>> tag("p", "1 < 2", class_="note", hidden=False)
        '<p class="note">1 &lt; 2</p>'
        >>> tag("img", src="data:,", alt='a "picture"')
        '<img src="data:," alt="a &quot;picture&quot;">'
    """
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown.append(key if value is True else f'{key}="{escape(_legal(str(value)), quote=True)}"')
    start = " ".join([name, *shown])
    if name in _VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{text(list(content))}</{name}>")


def _legal(words: str) -> str:
    """Characters that no HTML document may hold, shown as what they are: one that is out of place."""
    return "".join("\ufffd" if (ord(c) < 32 and c not in "\t\n") or 0xD800 <= ord(c) < 0xE000 else c for c in words)


Item = TypeVar("Item")

#: What a value of each kind means, in words: a title, what it says of the truth, and the mark before it.
KINDS = {
    "exact": ("Exact", "the model's own likelihood, no estimate", "="),
    "lower_bound": ("Bounds", "the model's true value is at most this, in expectation", "\u2264"),
    "upper_bound": ("Optimistic bounds", "the model's true value is at least this", "\u2265"),
    "ode": ("Probability-flow ODE", "a numerical solution, which may err to either side", "\u2248"),
    "ais": ("Annealed importance sampling", "an estimate through log Z, which flatters the model", "\u2248?"),
    "unnormalised": ("No likelihood", "known up to a constant only: there is no number to compare", "\u2013"),
}
UNITS = {"bits_per_dim": "bits/dim", "nats": "nats", "nats_per_dim": "nats/dim"}


@dataclass(frozen=True)
class Model:
    """One judged model: its place in the table, its report, and its arrays."""

    number: int
    report: dict
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its label in the table."""
        return str(self.report.get("name") or self.get("checkpoint", "family") or f"model {self.number + 1}")

    @property
    def data(self) -> dict:
        """What its data are."""
        return self.get("data") or {}

    @property
    def likelihoods(self) -> list[dict]:
        """Its lines of likelihood."""
        return self.get("likelihood") or []

    def get(self, *path: str) -> Any:
        """What stands under a path of keys, None where there is nothing.

        Example:
            >>> Model(0, {"a": {"b": 1}}).get("a", "b"), Model(0, {"a": None}).get("a", "b")
            (1, None)
        """
        found: Any = self.report
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def array(self, key: object) -> np.ndarray | None:
        """An array by name, None where there is none or it is empty."""
        if not isinstance(key, str) or key not in self.arrays:
            return None
        values = np.asarray(self.arrays[key])
        return values if values.size else None

    def per_item(self, nats: np.ndarray) -> tuple[np.ndarray, str]:
        """Costs of items and their unit: bits/dim of integers, nats of continuous data."""
        dims = math.prod(self.data.get("event_shape") or [1])
        if self.data.get("levels"):
            return -np.asarray(nats, dtype=np.float64) / (dims * math.log(2)), "bits/dim"
        return -np.asarray(nats, dtype=np.float64), "nats"


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Hashable, list[Item]]:
    """Items by key, keys in the order of their first item.

    Example:
        >>> grouped([1, 2, 3, 4], lambda n: n % 2)
        {1: [1, 3], 0: [2, 4]}
    """
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def number(value: Any, digits: int = 4) -> str:
    """A number for a cell; nothing for None, words stay words.

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
    """Named values in one line; those that are None are left out.

    Example:
        >>> facts({"num_steps": 50, "eta": None, "seed": 0})
        'num steps 50, seed 0'
    """
    shown = {key: f"{v:.6g}" if isinstance(v, float) else number(v) for key, v in found.items() if v is not None}
    return ", ".join(f"{key.replace('_', ' ')} {v}" for key, v in shown.items())


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A value with its standard error, nothing for None.

    Example:
        >>> with_error(0.5, 0.0123), with_error(0.5, None), with_error(None, 0.1)
        ('0.5000 \u00b1 0.0123', '0.5000', '')
    """
    return "" if value is None else number(value, digits) + ("" if error is None else f" \u00b1 {error:.{digits}f}")


def percent(value: float | None) -> str:
    """A share in percent.

    Example:
        >>> percent(0.9312), percent(None)
        ('93.1 %', '')
    """
    return "" if value is None else f"{100 * value:.1f} %"


def value_of(line: dict) -> float | None:
    """The value of a line of likelihood in its own unit."""
    if line.get("unit") == "nats_per_dim":
        return line.get("nll_per_dim")
    return line.get("bits_per_dim") if "bits_per_dim" in line else line.get("nll")


def unit_of(line: dict) -> str:
    """The unit of a line of likelihood, in words."""
    return UNITS.get(line.get("unit") or ("bits_per_dim" if "bits_per_dim" in line else "nats"), "nats")


def with_mark(line: dict) -> str:
    """The value of a line with mark, standard error and unit, or why there is none.

    Example:
        >>> with_mark({"kind": "lower_bound", "bits_per_dim": 2.12345, "se_data": 0.0123})
        '\u2264 2.1235 \u00b1 0.0123 bits/dim'
    """
    value, error, sides = value_of(line), line.get("se_data"), line.get("bracket") or {}
    if value is None and sides.get("upper") is not None:
        return f"{sides['lower']:.4f} to {sides['upper']:.4f} {unit_of(line)}"
    if line.get("kind") == "unnormalised" or value is None:
        return f"no number: {line.get('reason') or 'unknown up to a constant'}"
    spread = "" if error is None else f" \u00b1 {error:.4f}"
    return f"{KINDS[line['kind']][2]} {value:.4f}{spread} {unit_of(line)}"


def typeset(words: str) -> str:
    """Words of the terminal with the marks of the page, which stay on the line of what they mark.

    Example:
        >>> typeset("<= 2.1") == "\u2264\u00a02.1", typeset("~? 2.1") == "\u2248?\u00a02.1", typeset("a = b")
        (True, True, 'a = b')
    """
    for plain, mark in (("<= ", "\u2264\u00a0"), ("~? ", "\u2248?\u00a0"), ("~ ", "\u2248\u00a0"), ("= ", "=\u00a0")):
        if words.startswith(plain):
            return mark + words[len(plain):]
    return words


def _manner(cell: object) -> str | None:
    """The class of a cell: empty ones vanish on a phone, long ones may break anywhere."""
    if cell in ("", None):
        return "nothing"
    return "long" if len(str(cell)) > 24 else None


def listing(columns: list[str], groups: list[tuple[object, list[list[object]]]], caption: str, **attributes) -> Markup:
    """A table whose rows lie in titled groups; on a narrow screen each row becomes a card with its own labels.

    Arguments:
        columns: names; the first one heads its rows. Columns without anything in any row are left out.
        groups: title (None for none) and rows of each.
        caption: what the table is.
    """
    every = [row for _, rows in groups for row in rows]
    kept = [k for k in range(len(columns)) if k == 0 or any(row[k] not in ("", None) for row in every)]
    head = tag("tr", *(tag("th", columns[k], scope="col", role="columnheader") for k in kept), role="row")
    bodies = []
    for title, rows in groups:
        lines = []
        if title is not None:
            heading = tag("th", title, scope="rowgroup", colspan=len(kept), role="rowheader")
            lines.append(tag("tr", heading, role="row", class_="title"))
        for row in rows:
            cells = [tag("th", row[0], scope="row", role="rowheader")]
            cells += [tag("td", row[k], role="cell", data_label=columns[k], class_=_manner(row[k])) for k in kept[1:]]
            lines.append(tag("tr", *cells, role="row"))
        bodies.append(tag("tbody", *lines, role="rowgroup"))
    table = tag("table", tag("caption", caption), tag("thead", head, role="rowgroup"), *bodies, role="table",
                class_="cards", **attributes)
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def address(picture: Image.Image) -> str:
    """A picture as a `data:` address, PNG inside.

    Example:
        >>> address(Image.new("L", (1, 1)))[:22]
        'data:image/png;base64,'
    """
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def is_image(data: dict) -> bool:
    """Whether items of a data set (its description in a report) can be seen."""
    shape = data.get("event_shape") or []
    return len(shape) == 3 and shape[0] in (1, 3)


def tiles(x: np.ndarray, data: dict, smallest: int = 32) -> list[Image.Image]:
    """Items (n, C, H, W) in the data's own units as pictures, enlarged by whole pixels."""
    spec = DataSpec(str(data.get("name")), tuple(data["event_shape"]), levels=data.get("levels"))
    return images_of(torch.as_tensor(np.ascontiguousarray(x)), spec, smallest)


def sheet(pictures: list[Image.Image], columns: int, gap: int = 2) -> Image.Image:
    """Pictures of one size in rows, with nothing between them: the page shows through.

    Example:
        >>> sheet([Image.new("L", (8, 8), 255)] * 3, columns=2).size
        (18, 18)
    """
    width, height = pictures[0].size
    rows = math.ceil(len(pictures) / columns)
    mode = "RGBA" if pictures[0].mode == "RGB" else "LA"
    whole = Image.new(mode, (columns * (width + gap) - gap, rows * (height + gap) - gap))
    for k, picture in enumerate(pictures):
        whole.paste(picture, (k % columns * (width + gap), k // columns * (height + gap)))
    return whole


def density_map(log_density: np.ndarray, top: float) -> Image.Image:
    """Densities (H, W), row 0 at the bottom, as colours from 0 (dark) to `top` (light); what is not finite is red."""
    from matplotlib import colormaps

    with np.errstate(over="ignore"):
        values = np.exp(np.asarray(log_density, dtype=np.float64))
    colours = (colormaps["viridis"](np.clip(np.nan_to_num(values / top), 0, 1))[..., :3] * 255).round().astype(np.uint8)
    colours[np.isnan(values)] = (220, 30, 30)
    return Image.fromarray(colours[::-1])
