"""Figures of the page: SVG by matplotlib, with colours from the page's style sheet, light or dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogFormatter, StrMethodFormatter

from genmodels.plots.images import aspect_of
from genmodels.report.parts import Listing, legal

#: Colours of the page by their names in its style sheet; c0 ... c7 are those of curves, which also differ in dashes.
LIGHT = {
    "paper": "#ffffff", "panel": "#f5f5f2", "ink": "#1c1b19", "soft": "#5a5752", "line": "#d9d6d0",
    "link": "#0b5394", "good": "#17663a", "bad": "#b3261e", "odd": "#7a4f00",
    "c0": "#0b5fa5", "c1": "#c2410c", "c2": "#0a7a5a", "c3": "#9b1fae",
    "c4": "#7d6200", "c5": "#0e7490", "c6": "#be123c", "c7": "#57534e",
}
DARK = {
    "paper": "#161618", "panel": "#222225", "ink": "#ecebe8", "soft": "#aeaba5", "line": "#3d3d42",
    "link": "#8ec5ff", "good": "#6fd59a", "bad": "#ff9a92", "odd": "#f2c14e",
    "c0": "#6cb2f7", "c1": "#ff9561", "c2": "#4fd1a5", "c3": "#e08bf0",
    "c4": "#e2c044", "c5": "#5fd0e6", "c6": "#ff8aa5", "c7": "#c4c0b8",
}
_NAMES = {value: name for name, value in LIGHT.items()}
_COLOURS, _DASHES = 8, ((), (6, 2.5), (2, 2), (8, 2, 2, 2))
_RULES = ((2, 3), (9, 3), (9, 3, 2, 3))
_WIDTH, _HEIGHT, _MARKED = 360, 220, 60  # size in CSS pixels; curves with more points have no markers
_STYLE = {
    "svg.fonttype": "none", "path.simplify": False, "text.parse_math": False, "lines.scale_dashes": False,
    "font.size": 11, "figure.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": LIGHT["soft"],
    "axes.labelcolor": LIGHT["ink"], "axes.titlecolor": LIGHT["ink"], "axes.titlesize": 11,
    "axes.titlelocation": "left", "axes.labelpad": 6,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": LIGHT["soft"], "ytick.color": LIGHT["soft"],
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": LIGHT["line"], "axes.axisbelow": True,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One curve or histogram of a figure.

    Arguments:
        name: its name in the legend.
        x, y: its points; of a histogram `x` are the edges, one more than the heights `y`. A y of None is a gap.
        form: `line` with a marker at every point, `steps` (a histogram), or `dots`.
        error: standard errors of y, drawn as error bars of two standard errors to each side.
        colour: number of its colour; by default its place in the figure.
        dash: number of its dashes among curves of that colour.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    form: Literal["line", "steps", "dots"] = "line"
    error: Sequence[float | None] | None = None
    colour: int | None = None
    dash: int = 0


@dataclass(frozen=True)
class Rule:
    """A straight line across a figure, at a height (`axis` y) or at a place (`axis` x)."""

    name: str
    at: float
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Field:
    """The part (x0, x1, y0, y1) of the plane that a figure shows, and values (H, W) from 0 to `top` drawn in it."""

    extent: tuple[float, float, float, float]
    values: np.ndarray | None = None
    top: float = 1.0


@dataclass(frozen=True)
class Figure:
    """A figure of the page: caption, drawing, legend, notes and its numbers.

    The legend holds (name, colour, dashes); it is part of the page, where long names wrap.
    """

    title: str
    svg: Markup
    legend: list[tuple[str, str, str]]
    notes: list[str]
    numbers: Listing | None
    kind = "figure"


def figure(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = False,
    rules: Sequence[Rule] = (), field: Field | None = None, note: str = "",
) -> Figure:
    """A figure with its legend, and the numbers themselves in a table.

    Arguments:
        series: the curves, in the order of the legend.
        title: the caption, also part of the alternative text.
        x_label, y_label: labels of the axes, with units.
        log_x, log_y: logarithmic axes; values that are not positive are left out, with a note.
        rules: straight lines for comparison.
        field: the part of the plane that contains the points; both axes have one scale where their ranges are alike.
        note: a text below the figure.

    Example:
        >>> found = figure([Series("a <b>", [1, 2], [3.0, 4.0])], "growth", "x <y>", "y")
        >>> found.legend, "x &lt;y&gt;" in found.svg, "var(--c0)" in found.svg, "#0b5fa5" in found.svg
        ([('a <b>', 'c0', '')], True, True, False)
    """
    heights = [[math.nan if y is None else y for y in one.y] for one in series]
    # Of steps, x are the edges, one more than heights.
    dropped = sum(not math.isfinite(y) or (log_y and y <= 0) or (log_x and x <= 0)
                  for one, ys in zip(series, heights, strict=True)
                  for x, y, given in zip(one.x, ys, one.y, strict=False) if given is not None)
    legend, height = [], _HEIGHT
    if field is not None:
        x0, x1, y0, y1 = field.extent
        equal = aspect_of(x1 - x0, y1 - y0) == "equal"
        height = 30 + 0.9 * _WIDTH * ((y1 - y0) / (x1 - x0) if equal else 1)
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        drawing = Drawing((_WIDTH / 72, height / 72), layout="constrained")
        axes = drawing.add_subplot()
        for place, (one, ys) in enumerate(zip(series, heights, strict=True)):
            number = place if one.colour is None else one.colour
            dashes = _DASHES[(number // _COLOURS + number + one.dash) % len(_DASHES)]
            _draw(axes, one, ys, LIGHT[f"c{number % _COLOURS}"], dashes)
            legend.append((one.name, f"c{number % _COLOURS}", " ".join(map(str, dashes))))
        for place, rule in enumerate(rules):
            dashes = _RULES[place % len(_RULES)]
            draw = axes.axhline if rule.axis == "y" else axes.axvline
            draw(rule.at, color=LIGHT["soft"], linewidth=1.3, linestyle=(0, dashes))
            legend.append((rule.name, "soft", " ".join(map(str, dashes))))
        _scales(axes, series, log_x, log_y, field)
        axes.set_xlabel(legal(x_label))
        axes.set_title(legal(y_label))
        file = io.StringIO()
        FigureCanvasSVG(drawing).print_svg(file)  # `savefig` writes the same, but draws everything twice
    if not rules and all(one.name in title for one in series):
        legend = []
    label = f"{title}: {y_label} over {x_label}" + (f", for {', '.join(one.name for one in series)}" if series else "")
    left_out = f"{dropped} values that are not positive or not finite are left out." if dropped else ""
    numbers = None if field is not None or not any(len(one.y) for one in series) else Listing(
        ["curve", x_label, y_label], [(None, [row for one in series for row in _numbers(one)])],
        f"Numbers of: {title}", "numbers", "the numbers")
    return Figure(title, _inline(file.getvalue(), label), legend, [n for n in (note, left_out) if n], numbers)


def _draw(axes: Axes, one: Series, heights: list[float], colour: str, dashes: tuple) -> None:
    style = {"color": colour, "linewidth": 1.7, "linestyle": (0, dashes) if dashes else "-"}
    if one.form == "steps":
        axes.stairs(heights, one.x, fill=True, color=colour, alpha=0.16, linewidth=0)
        axes.stairs(heights, one.x, **style)
    elif one.form == "dots":  # strokes of length 0 with round ends, which are a single element
        nothing = np.full(len(one.x), math.nan)
        axes.plot(np.stack([one.x, one.x, nothing], 1).ravel(), np.stack([heights, heights, nothing], 1).ravel(),
                  color=colour, linewidth=2, solid_capstyle="round")
    else:
        axes.plot(one.x, heights, marker="o" if len(one.x) <= _MARKED else None, markersize=4.5, **style)
        if one.error is not None:
            spread = [math.nan if e is None else 2 * e for e in one.error]
            axes.errorbar(one.x, heights, yerr=spread, fmt="none", ecolor=colour, elinewidth=1)


def _scales(axes: Axes, series: Sequence[Series], log_x: bool, log_y: bool, field: Field | None) -> None:
    if field is not None:
        if field.values is not None:
            colours = matplotlib.colormaps["viridis"].with_extremes(bad=(0.86, 0.12, 0.12))
            axes.imshow(field.values, colours, vmin=0, vmax=field.top, origin="lower", extent=field.extent,
                        interpolation="none")
        axes.grid(False)
        x0, x1, y0, y1 = field.extent
        axes.set(aspect=aspect_of(x1 - x0, y1 - y0), xlim=(x0, x1), ylim=(y0, y1))
    elif any(one.form == "steps" for one in series):
        axes.margins(x=0)
    for axis, name, log in ((axes.xaxis, "x", log_x), (axes.yaxis, "y", log_y)):
        axes.set(**{f"{name}scale": "log"} if log else {})
        axis.set_major_formatter(LogFormatter() if log else StrMethodFormatter("{x:,.5g}"))
        if log:
            axis.set_minor_formatter(LogFormatter())
    places = sorted({x for one in series for x in one.x})
    if log_x and len(places) <= 8:  # a sweep: the values that were tried
        axes.set_xticks(places, [f"{x:,g}" for x in places])
        axes.set_xticks([], minor=True)


def _inline(svg: str, label: str) -> Markup:
    """An SVG of matplotlib for use inside a page: colours by name, without identifiers that nothing refers to."""
    body = svg[svg.index("</defs>") + len("</defs>"):svg.rindex("</svg>")]
    body = re.sub(r' id="[\w.]+_\d+"', "", re.sub(r"\s*\n\s*", " ", body))
    # Fonts are the style sheet's.
    body = re.sub(r'(?<=style=")(font[\w-]*: [^;"]*; )+| transform="rotate\(-0 [^"]*"', "", body)
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    body = re.sub("|".join(_NAMES), lambda colour: f"var(--{_NAMES[colour[0]]})", body)
    box = re.search(r'viewBox="([^"]*)"', svg)[1]
    return Markup('<svg viewBox="{}" role="img" aria-label="{}">{}</svg>').format(box, legal(label), Markup(body))


def _numbers(one: Series) -> list[list[str]]:
    """The values of a curve as rows of a table."""
    rows = []
    for k, y in enumerate(one.y):
        where = f"{one.x[k]:.5g} to {one.x[k + 1]:.5g}" if one.form == "steps" else f"{one.x[k]:.6g}"
        error = "" if one.error is None or one.error[k] is None else f" \u00b1 {one.error[k]:.2g}"
        rows.append([one.name, where, "none" if y is None else f"{y:.6g}{error}"])
    return rows
