"""Plots as inline SVG: colours come from the page's style, so that they read well in light, in dark and in print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from genmodels.report.view import Markup, tag


@dataclass(frozen=True)
class Scale:
    """A map of numbers to positions on paper, linear or logarithmic.

        position = start + (end - start) (f(x) - f(low)) / (f(high) - f(low)),    f(x) = x or log10 x

    Arguments:
        low, high: the numbers at the two ends, low < high; positive on a logarithmic scale.
        start, end: their positions.
        log: whether the scale is logarithmic.

    Example:
        >>> Scale(0, 10, 100, 200)(2.5), Scale(1, 100, 0, 10, log=True)(10)
        (125.0, 5.0)
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, x: float) -> float:
        """The position of a number."""
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, x))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers between the ends, at most `most` of them where the scale is linear or spans decades."""
        return _decades(self.low, self.high, most) if self.log else _tick_steps(self.low, self.high, most)


def _tick_steps(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) if abs(step) > 1e-9 else k * step for k in range(first, last + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / most))
    decades = [10.0**k for k in range(first, last + 1, stride)]
    if len(decades) >= 3:
        return decades
    finer = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
    return [x for x in finer if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)] or [low, high]


def span(values: list[float], *, log: bool = False, margin: float = 0.05, zero: bool = False) -> tuple[float, float]:
    """Ends of a scale that holds all values with a margin; a single value gets room on both sides.

    Arguments:
        values: what is drawn; what is not finite (or not positive, on a logarithmic scale) is left out.
        log: for a logarithmic scale.
        margin: room at both ends, as a share of the whole.
        zero: let a linear scale hold 0 where all values are on one side of it.

    Example:
        >>> span([1.0, 3.0], margin=0.5), span([2.0, 2.0]), span([1.0, 100.0], log=True, margin=0)
        ((0.0, 4.0), (1.5, 2.5), (1.0, 100.0))
    """
    values = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not values:
        return (0.1, 1.0) if log else (0.0, 1.0)
    if log:
        low, high = math.log10(min(values)), math.log10(max(values))
    else:
        low, high = min(values), max(values)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
    room = margin * (high - low)
    if room == 0 and high - low == 0:
        room = 0.5 if log else 0.25 * abs(high) or 0.5
    at_zero = zero and not log
    low, high = (low if at_zero and low == 0 else low - room), (high if at_zero and high == 0 else high + room)
    return (10**low, 10**high) if log else (low, high)


def short(value: float) -> str:
    """A number as it stands beside a tick: few characters, nothing rounded away that the tick says.

    Example:
        >>> [short(v) for v in (0.0, 0.25, 1500.0, 20000.0, 1e-7, -3.0, 2.5e6)]
        ['0', '0.25', '1,500', '20,000', '1e-7', '-3', '2.5e6']
    """
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".")


WIDTH, HEIGHT = 360, 220
_TOP, _RIGHT, _BOTTOM = 20, 10, 34
_LETTER = 6.2  # width of a digit of the ticks
COLOURS = 8  # of the style; more series begin again, with other dashes


@dataclass(frozen=True)
class Series:
    """One curve or histogram of a plot.

    Arguments:
        name: what the legend calls it.
        x, y: its points; of a histogram `x` are the edges, one more than the heights `y`. A y of None is a gap.
        form: `line` with a mark at every point, `steps` (a histogram), or `dots`.
        error: standard errors of y, drawn as bars over two of them to each side.
        colour: number of its colour; by default its place in the plot.
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
    """A straight line across a plot, at a height (`axis` y) or at a place (`axis` x)."""

    name: str
    at: float
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Field:
    """A picture inside the axes, as an address of its data, and the box (x0, x1, y0, y1) that it fills."""

    address: str
    extent: tuple[float, float, float, float]


def plot(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = False,
    rules: Sequence[Rule] = (), field: Field | None = None, note: object = None,
) -> Markup:
    """A figure: caption, plot, legend, and the numbers themselves in a table that unfolds.

    Arguments:
        series: what is drawn, in the order of the legend.
        title: the caption, which is also the plot's name for those who cannot see it.
        x_label, y_label: what the axes say, with units.
        log_x, log_y: logarithmic axes; what is not positive is left out there, and the caption says so.
        rules: straight lines for comparison.
        field: a picture under the points; both axes then have one scale.
        note: what else is to be said below.

    Example:
        >>> figure = plot([Series("a <b>", [1, 2], [3.0, 4.0])], "growth", "x", "y")
        >>> "a &lt;b&gt;" in figure, figure.startswith("<figure"), "role=\\"img\\"" in figure
        (True, True, True)
    """
    dropped = sum(y is not None and not _drawable(y, log_y) for one in series for y in one.y)
    frame = _frame(series, rules, field, log_x, log_y)
    drawn = [_axes(frame, x_label, y_label)]
    if field is not None:
        drawn.append(_picture(frame, field))
    drawn += [_rule(frame, rule, k) for k, rule in enumerate(rules)]
    for place, one in enumerate(series):
        colour = place if one.colour is None else one.colour
        drawn.append(tag("g", _DRAW[one.form](frame, one, log_y), class_=_style(colour, one.dash)))
    names = ", ".join(one.name for one in series)
    label = f"{title}: {y_label} over {x_label}" + (f", for {names}" if names else "")
    height = frame.y.start + _BOTTOM
    svg = tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {_number(height)}", role="img", aria_label=label)
    left_out = f"{dropped} values that are not positive or not finite are left out." if dropped else None
    return tag(
        "figure", tag("figcaption", title), svg, _legend(series, rules, title),
        tag("p", note, class_="note") if note else None, tag("p", left_out, class_="note") if left_out else None,
        None if field is not None else _numbers(series, title, x_label, y_label), class_="plot",
    )


@dataclass(frozen=True)
class _Frame:
    x: Scale
    y: Scale


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _frame(series, rules, field, log_x: bool, log_y: bool) -> _Frame:
    heights = [y for one in series for y in one.y if _drawable(y, log_y)]
    for one in series:
        if one.error is not None and not log_y:
            known = [(y, e) for y, e in zip(one.y, one.error, strict=True) if y is not None and e is not None]
            heights += [y + side * e for y, e in known for side in (-2, 2)]
    heights += [rule.at for rule in rules if rule.axis == "y"]
    places = [x for one in series for x in one.x] + [rule.at for rule in rules if rule.axis == "x"]
    steps = any(one.form == "steps" for one in series)
    x = span(places, log=log_x, margin=0.0 if steps else 0.04) if field is None else field.extent[:2]
    y = span(heights, log=log_y, margin=0.06, zero=steps) if field is None else field.extent[2:]
    bottom = HEIGHT - _BOTTOM
    ticks = Scale(*y, 0, 1, log_y).ticks(5)
    left = 8 + _LETTER * max((len(short(t)) for t in ticks), default=1)
    if field is not None:
        bottom = _TOP + (WIDTH - _RIGHT - left) * (y[1] - y[0]) / (x[1] - x[0])
    return _Frame(Scale(*x, left, WIDTH - _RIGHT, log_x), Scale(*y, bottom, _TOP, log_y))


def _axes(frame: _Frame, x_label: str, y_label: str) -> Markup:
    x, y, parts = frame.x, frame.y, []
    for tick in y.ticks(5):
        at = _number(y(tick))
        parts.append(tag("line", x1=_number(x.start), x2=_number(x.end), y1=at, y2=at, class_="mesh"))
        parts.append(tag("text", short(tick), x=_number(x.start - 4), y=_number(y(tick) + 4), class_="left"))
    shown = -math.inf
    for tick in x.ticks(6):
        at, half = x(tick), _LETTER * len(short(tick)) / 2
        parts.append(tag("line", x1=_number(at), x2=_number(at), y1=_number(y.start), y2=_number(y.start + 4)))
        if at - half > shown + 4 and at + half <= WIDTH:  # labels do not run into each other, nor off the paper
            parts.append(tag("text", short(tick), x=_number(at), y=_number(y.start + 16), class_="middle"))
            shown = at + half
    parts.append(tag("line", x1=_number(x.start), x2=_number(x.end), y1=_number(y.start), y2=_number(y.start)))
    middle = _number((x.start + x.end) / 2)
    parts.append(tag("text", x_label, x=middle, y=_number(y.start + 30), class_="middle label"))
    parts.append(tag("text", y_label, x=2, y=11, class_="label"))
    return tag("g", *parts, class_="axes")


def _picture(frame: _Frame, field: Field) -> Markup:
    x0, x1, y0, y1 = field.extent
    left, top = frame.x(x0), frame.y(y1)
    return tag("image", href=field.address, x=_number(left), y=_number(top), width=_number(frame.x(x1) - left),
               height=_number(frame.y(y0) - top), preserveAspectRatio="none")


def _rule(frame: _Frame, rule: Rule, place: int) -> Markup:
    if rule.axis == "y":
        at = _number(frame.y(rule.at))
        ends = {"x1": _number(frame.x.start), "x2": _number(frame.x.end), "y1": at, "y2": at}
    else:
        at = _number(frame.x(rule.at))
        ends = {"x1": at, "x2": at, "y1": _number(frame.y.start), "y2": _number(frame.y.end)}
    return tag("line", **ends, class_=f"rule r{place % 3}")


def _line(frame: _Frame, one: Series, log: bool) -> list[Markup]:
    parts, path, pen = [], [], "M"
    for k, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        if not _drawable(y, log):
            pen = "M"
            continue
        at, height = frame.x(x), frame.y(y)
        path.append(f"{pen}{_number(at)} {_number(height)}")
        pen = "L"
        error = None if one.error is None else one.error[k]
        if error:
            low, high = frame.y(max(y - 2 * error, frame.y.low)), frame.y(y + 2 * error)
            parts.append(tag("path", d=f"M{_number(at)} {_number(low)}V{_number(high)}", class_="error"))
        if len(one.x) <= 60:
            parts.append(tag("circle", cx=_number(at), cy=_number(height), r=2.4))
    return [tag("path", d="".join(path), class_="curve"), *parts]


def _steps(frame: _Frame, one: Series, log: bool) -> list[Markup]:
    floor = frame.y.start if log else frame.y(max(frame.y.low, min(0.0, frame.y.high)))
    path = f"M{_number(frame.x(one.x[0]))} {_number(floor)}"
    for right, y in zip(one.x[1:], one.y, strict=True):
        path += f"V{_number(frame.y(y) if _drawable(y, log) else floor)}H{_number(frame.x(right))}"
    path += f"V{_number(floor)}"
    return [tag("path", d=path + "Z", class_="area"), tag("path", d=path, class_="curve")]


def _dots(frame: _Frame, one: Series, log: bool) -> list[Markup]:
    inside = [(x, y) for x, y in zip(one.x, one.y, strict=True)
              if frame.x.low <= x <= frame.x.high and frame.y.low <= y <= frame.y.high]
    path = "".join(f"M{_number(frame.x(x))} {_number(frame.y(y))}h0" for x, y in inside)  # one element for them all
    return [tag("path", d=path, class_="dots")]


_DRAW = {"line": _line, "steps": _steps, "dots": _dots}


def _style(colour: int, dash: int) -> str:
    return f"series c{colour % COLOURS} d{(colour // COLOURS + colour + dash) % 4}"


def _legend(series: Sequence[Series], rules: Sequence[Rule], title: str) -> Markup | None:
    if not rules and all(one.name in title for one in series):
        return None
    entries = []
    for place, one in enumerate(series):
        colour = place if one.colour is None else one.colour
        key = tag("svg", tag("g", tag("path", d="M0 5H24", class_="curve"), class_=_style(colour, one.dash)),
                  viewBox="0 0 24 10", aria_hidden="true", class_="key")
        entries.append(tag("li", key, one.name))
    for place, rule in enumerate(rules):
        key = tag("svg", tag("path", d="M0 5H24", class_=f"rule r{place % 3}"), viewBox="0 0 24 10",
                  aria_hidden="true", class_="key")
        entries.append(tag("li", key, rule.name))
    return tag("ul", *entries, class_="legend")


def _numbers(series: Sequence[Series], title: str, x_label: str, y_label: str) -> Markup | None:
    """The plotted values: what nobody has to read off a curve."""
    if not any(len(one.y) for one in series):
        return None
    rows = []
    for one in series:
        for k, y in enumerate(one.y):
            where = f"{one.x[k]:.5g} to {one.x[k + 1]:.5g}" if one.form == "steps" else f"{one.x[k]:.6g}"
            error = None if one.error is None or one.error[k] is None else f" \u00b1 {one.error[k]:.2g}"
            value = "none" if y is None else [f"{y:.6g}", error]
            rows.append(tag("tr", tag("th", one.name, scope="row"), tag("td", where), tag("td", value)))
    head = tag("tr", *(tag("th", name, scope="col") for name in ("curve", x_label, y_label)))
    table = tag("table", tag("caption", f"Numbers of: {title}"), tag("thead", head), tag("tbody", *rows),
                class_="numbers")
    return tag("details", tag("summary", "the numbers"), tag("div", table, class_="scroll", tabindex=0, role="region",
                                                             aria_label=f"numbers of {title}"))


def _number(value: float) -> str:
    """A coordinate with one digit after the point: files stay small."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
