"""The table as text; likelihoods on the page: the headline, the table in groups, and the values of single items."""

from __future__ import annotations

import csv
import io

import numpy as np

from genmodels.core.errors import counted
from genmodels.data.base import items_of
from genmodels.evaluation.report import Item, LikelihoodLine, Reference
from genmodels.evaluation.table import MEASURES, SCORES, UNITS, Table, condition_of, side
from genmodels.report.figures import Field, Figure, Rule, Series, figure
from genmodels.report.parts import (
    KINDS,
    Gallery,
    Listing,
    Model,
    Pictures,
    Text,
    address,
    facts,
    grouped,
    is_image,
    number,
    tiles,
    typeset,
    with_error,
    with_mark,
)
from genmodels.verification.check import table as aligned

_BINS = 40
_TAIL = 0.002  # share of items beyond either end of a histogram, which are counted in its last bin
_OF_LIKELIHOOD = ("value", "error", "unit", "kind", "low", "high", "given", "items", "how", "rank")  # in table.csv


def as_text(table: Table) -> str:
    """The table for the terminal with its notes; empty columns are left out."""
    rows = aligned([row.cells for row in table.rows], table.columns, rule=True)
    return "\n".join([summary_title(table), rows, *table.notes])


def summary_title(table: Table) -> str:
    """The data of a table in words."""
    return f"{table.data.name}, {table.data.split} split, {counted(table.data.items, 'item')}"


def as_markdown(table: Table) -> str:
    """The same cells in Markdown."""
    columns, rows = filled(table)
    every = (columns, ["---"] * len(columns), *rows)
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in every]
    return "\n".join([summary_title(table), "", *lines, "", *(f"- {note}" for note in table.notes), ""])


def as_csv(table: Table) -> str:
    """One line per row as comma separated values: numbers in full, unknown ones left empty.

    `value` is the mean in its unit, lower is better, `error` its standard error; `low` and `high` are the bounds of the
    true value that its kind implies, with two standard errors. Distances have errors too.
    """
    rows = []
    for index, row in enumerate(table.rows, 1):
        report = table.models[row.model]
        checkpoint, fidelity, sampling = report.checkpoint, report.fidelity, report.sampling
        line = None if row.likelihood is None else report.likelihood[row.likelihood]
        likelihood = {} if line is None else {
            "value": line.value, "error": line.se_data, "unit": line.unit, "kind": line.kind, "low": side(line, 0),
            "high": side(line, 1), "given": condition_of(line), "items": line.n, "how": line.how, "rank": row.rank}
        rows.append({
            "row": index, "model": report.name, "checkpoint": checkpoint.path, "parameters": checkpoint.parameters,
            "step": checkpoint.step, "weights": checkpoint.weights,
            **{key: likelihood.get(key) for key in _OF_LIKELIHOOD},
            **{column + part: getattr(fidelity, key + part, None) for key, column in MEASURES
               for part in ("", "_error")},
            "samples": getattr(fidelity, "n", None), "evaluations": getattr(sampling, "evaluations", None),
            "samples_per_second": getattr(sampling, "samples_per_second", None)})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def filled(table: Table) -> tuple[list[str], list[list[str]]]:
    """The columns with a cell that is not empty: their names and rows."""
    rows = [row.cells for row in table.rows]
    used = [i for i in range(len(table.columns)) if any(cells[i] for cells in rows)]
    return [table.columns[i] for i in used], [[cells[i] for i in used] for cells in rows]


def headline(models: list[Model]) -> list[tuple[str, str, str]]:
    """The name of every model, the best likelihood of the kind of its first, and a description of that kind."""
    entries = []
    for model in models:
        line = next(iter(model.report.likelihood), None)
        if line is None:
            entries.append((model.name, "no likelihood", ""))
            continue
        line = min((one for one in model.report.likelihood if one.kind == line.kind and one.value is not None),
                   key=lambda one: one.value, default=line)
        title, meaning, _ = KINDS[line.kind]
        recipe = ", ".join(dict.fromkeys(filter(None, f"{line.label}, {line.how}".split(", "))))
        words = f"{_lower(title)}: {meaning}. "
        if line.kind != "unnormalised":
            over = " and ".join(name for name, part in line.parts_of_error.items() if part)
            errors = f", standard error over {over}" if over else ""
            words += (f"{recipe}. " if recipe else "") + f"{number(line.n)} items{errors}."
            words += f" {line.unreliable.capitalize()}." if line.unreliable else ""
        entries.append((model.name, with_mark(line), words))
    return entries


def main_table(table: Table, models: list[Model]) -> list[Listing]:
    """The rows of the table, in groups of one kind, best first within each if there is a ranking."""
    rows = table.rows
    if not rows:
        return []
    places = {row: k for ranking in table.ranking for k, row in enumerate(sum(ranking.order, []))}
    names = [name or "row" for name in table.columns]
    heading = names.index("model")
    others = [k for k in range(len(names)) if k != heading]

    def kind_of(k: int) -> str:
        line = rows[k].likelihood
        return "unnormalised" if line is None else models[rows[k].model].report.likelihood[line].kind

    groups = []
    by_kind = grouped(range(len(rows)), kind_of)
    for kind in (kind for kind in KINDS if kind in by_kind):
        lines = []
        for k in sorted(by_kind[kind], key=lambda k: places.get(k, len(rows) + k)):
            cells = [typeset(cell) for cell in rows[k].cells]
            lines.append([cells[heading] or models[rows[k].model].name, *(cells[other] for other in others)])
        groups.append((f"{KINDS[kind][0]}: {KINDS[kind][1]}", lines))
    caption = ("Each kind of likelihood is ranked by itself, apart for what it is conditioned on (equal ranks: no "
               "difference beyond two standard errors)")
    if len(table.ranking) == 1 and len(by_kind) > 1:
        caption = "Lines in groups of one kind; what a rank compares is said below"
    return [Listing([names[heading], *(names[other] for other in others)], groups, caption)]


def histograms(models: list[Model], references: list[Reference]) -> list[Text | Figure]:
    """The likelihood of single items, one plot for each kind and unit: their values are not comparable."""
    lines = [(model, line, nats) for model in models for line in model.report.likelihood
             if (nats := model.array(line.values)) is not None
             and (line.kind == "unnormalised" or not line.reason)]  # without a value there are none of items
    hidden = [one for one in lines if not one[1].single.shown]
    figures: list = []
    for model, line, _ in hidden:
        more = next((key for key in ("draws", "importance_samples") if key in line.made), None)
        advice = "" if more is None else f" More {more}= make it smaller."
        figures.append(Text(f"{_name(model, line)}: not drawn, {noise_of(line)}.{advice}"))
    drawn = [one for one in lines if one[1].single.shown]
    for (kind, unit), some in grouped(drawn, lambda one: (one[1].kind, UNITS[one[1].unit])).items():
        costs = [model.costs(line) for model, line, _ in some]
        names = [_name(model, line) for model, line, _ in some]
        noises = [f"{name}: {noise_of(line)}." for name, (_, line, _) in zip(names, some, strict=True)
                  if line.single.noise]
        if kind == "unnormalised":  # every energy has a constant of its own
            figures += [histogram([name], [cost], f"Energies of single items: {name}", "nats, up to a constant",
                                  [model.number]) for (model, _, _), name, cost in zip(some, names, costs, strict=True)]
            continue
        known = [Rule(f"{r.name} {r.value:.2f}", r.value, "x") for r in references
                 if UNITS[r.unit] == unit and r.value is not None]
        title = f"Likelihood of single items: {_lower(KINDS[kind][0])}"
        colours = [model.number for model, _, _ in some]
        for start in range(0, len(some), 6):
            part = slice(start, start + 6)
            figures.append(histogram(names[part], costs[part], title, f"{unit} of an item (left: more likely)",
                                     colours[part], known, " ".join(noises[part])))
    return figures


def noise_of(line: LikelihoodLine) -> str:
    """A sentence on the noise of the value of a single item and the spread of items."""
    found = line.single
    if found.noise is None:
        return "the noise of the value of a single item, drawn once, is not known"
    return (f"the value of a single item has a noise of {found.noise:.4f} {UNITS[line.unit]}, items differ by "
            f"{found.spread:.4f}")


def _lower(title: str) -> str:
    return title[:1].lower() + title[1:]


def _name(model: Model, line: LikelihoodLine) -> str:
    return f"{model.name}, {line.label}" if line.label else model.name


def histogram(
    names: list[str], values: list[np.ndarray], title: str, x_label: str, colours: list[int] | None = None,
    rules: list[Rule] | None = None, noise: str = "",
) -> Text | Figure:
    """Histograms on common bins, in percent of each one's items, with the sentence `noise` below."""
    finite = [v[np.isfinite(v)] for v in values]
    together = np.concatenate(finite)
    if not len(together):
        return Text(f"{title}: no value is finite.")
    low = min(np.quantile(v, _TAIL) for v in finite if len(v))
    high = max(np.quantile(v, 1 - _TAIL) for v in finite if len(v))
    room = 0.02 * (high - low) or 0.5
    bins = int(np.clip(np.sqrt(min(len(v) for v in finite if len(v))), 10, _BINS))
    edges = np.linspace(low - room, high + room, bins + 1)
    series, colours = [], colours or list(range(len(values)))
    for k, (name, v) in enumerate(zip(names, finite, strict=True)):
        counts, _ = np.histogram(np.clip(v, edges[0], edges[-1]), edges)
        heights = (100 * counts / max(1, len(v))).tolist()
        series.append(Series(f"{name} ({len(v):,} items)", edges.tolist(), heights, "steps",
                             colour=colours[k], dash=colours[:k].count(colours[k])))
    beyond = int(((together < edges[0]) | (together > edges[-1])).sum())
    lost = sum(len(v) for v in values) - len(together)
    notes = [noise, f"Beyond the ends, counted in the last bins: {beyond}." if beyond else "",
             f"Not finite, left out: {lost}." if lost else ""]
    inside = [rule for rule in rules or [] if edges[0] <= rule.at <= edges[-1]]
    return figure(series, title, x_label, "percent of items", rules=inside, note=" ".join(filter(None, notes)))


def extremes(models: list[Model]) -> list[Gallery]:
    """The least and the most likely items of every model."""
    return [Gallery([_items(model, "least", found.least), _items(model, "most", found.most)], model.name)
            for model in models if (found := model.report.items)]


def _items(model: Model, which: str, entries: list[Item]) -> Pictures:
    x = model.array(f"{which}_x")
    pictures = tiles(x, model.report.data) if x is not None and is_image(model.report.data) else []
    costs, unit = model.per_item(np.array([entry.nats for entry in entries]))
    errors = -model.per_item(np.array([entry.error for entry in entries]))[0]
    line = model.report.likelihood[model.report.items.line]
    if line.kind == "unnormalised":
        unit = "nats up to a constant"
    shown, own = [], items_of(model.report.data.split)
    for k, entry in enumerate(entries):
        words = f"item {entry.index}: {with_error(float(costs[k]), float(errors[k]) or None, 3)}"
        if not pictures and x is not None and k < len(x) and x[k].size <= 4:
            words += " at (" + ", ".join(f"{v:.2f}" for v in np.ravel(x[k])) + ")"
        shown.append((address(pictures[k]) if k < len(pictures) else None,
                      f"{which} likely item number {k + 1}, {own[:-1]} {entry.index}", words))
    return Pictures(f"{which} likely ({unit}{f', {line.label}' if line.label else ''})", shown)


def _parts(line: LikelihoodLine) -> str:
    parts = line.parts_of_error
    return ", ".join(f"{number(part)} {name}" for name, part in parts.items()) if len(parts) > 1 else ""


def recipes(models: list[Model]) -> list[Listing]:
    """Every likelihood with its kind, its errors and how it was computed."""
    columns = ["model", "kind", "value", "parts of the error", "KL gap", "bracket", "items", "not finite", "parts",
               "weights", "how it was made", "seconds"]
    rows = []
    for model in models:
        for line in model.report.likelihood:
            recipe = facts({key: value for key, value in line.made.items() if key != "weights"})
            rows.append([
                f"{model.name}: {line.label}" if line.label else model.name, line.kind.replace("_", " "),
                with_mark(line), _parts(line), with_error(*line.gap),
                f"{number(line.bracket.lower)} to {number(line.bracket.upper)}" if line.bracket else "",
                number(line.n), number(line.nonfinite or None),
                ", ".join(f"{name} {value:.1f}" for name, value in line.parts_nats.items()),
                line.made.get("weights") or model.report.checkpoint.weights, recipe, number(line.seconds, 1),
            ])
    caption = "Every likelihood with its kind, its errors and how it was made (parts in nats of an item)"
    return [Listing(columns, [(None, rows)], caption)] if rows else []


def out_of_distribution(models: list[Model]) -> list[Listing | Gallery]:
    """Histograms with the area under the ROC curve; 0.5 is chance, below it the other data are more likely."""
    rows, galleries = [], []
    for model in models:
        for k, found in enumerate(model.report.ood):
            name, own = found.name, model.report.data.name
            unit = UNITS.get(found.value, found.value)
            rows.append([f"{model.name} on {name}", found.kind.replace("_", " "), found.label, number(found.auroc),
                         *(with_error(*found.scores[key]) if key in found.scores else "" for key in SCORES),
                         number(found.mean_in), number(found.mean_out), unit, number(found.n), found.said])
            inside, outside = model.array(found.inside), model.array(found.values)
            if inside is None or outside is None:
                continue
            bits = unit.startswith("bits")
            values = [model.per_item(v)[0] if bits else -np.asarray(v, dtype=np.float64) for v in (inside, outside)]
            title = f"{model.name}: {own} against {name}"
            if found.auroc is not None:
                title += f", AUROC {found.auroc:.3f}"
            line = next(iter(model.report.likelihood), None)  # the line that other data are evaluated by
            split = model.report.data.split
            noise = "" if line is None or line.single.noise == 0 else f"Of the {items_of(split)} {noise_of(line)}. "
            noise += f"{KINDS[found.kind][1]}."
            shown = histogram([f"{own} ({split})", name], values, title, f"{unit} of an item (left: more likely)",
                              noise=noise)
            galleries.append(Gallery([shown, *_likely(model, k, name)]))
    if not rows:
        return []
    columns = ["model", "kind", "likelihood", "AUROC", *(f"AUROC {name}" for name in SCORES.values()),
               "mean of own items", "mean of other data", "unit", "items", "result"]
    caption = "How well the likelihood separates own items from other data: AUROC 1 perfectly, 0.5 by chance"
    return [Listing(columns, [(None, rows)], caption), *galleries]


def _likely(model: Model, k: int, name: str) -> list[Pictures]:
    x = model.array(f"ood_{k}_x")
    data = model.report.data
    if x is None or not is_image(data) or list(x.shape[1:]) != data.event_shape:
        return []
    shown = [(address(tile), f"likely item {i + 1} of {name}", "") for i, tile in enumerate(tiles(x, data))]
    return [Pictures(f"the most likely items of {name}", shown)]


_POINTS = 1500
_RESULTS = {"passed": "one", "failed": "not one, the check failed", "not verified": "not settled"}


def densities(models: list[Model]) -> list[Figure]:
    """The test points, the true density if it is known, and the density of every model."""
    shown = [model for model in models if model.report.density and model.array("density") is not None]
    if not shown:
        return []
    first = shown[0]
    truth = next(((model, a) for model in shown if (a := model.array("density_true")) is not None), None)
    top = _top(truth[1]) if truth else max(_top(model.array("density")) for model in shown)
    scale = f"Colours from 0 (dark) to {top:.3g} and above (light), per unit of area; the same in all maps."
    figures = []
    points = first.array("density_data")
    if points is not None:
        points = points[:_POINTS]
        items = items_of(first.report.data.split)
        dots = Series(items, points[:, 0].tolist(), points[:, 1].tolist(), "dots")
        plane = Field(tuple(first.report.density.extent))
        figures.append(figure([dots], f"The data: {len(points):,} {items}", "", "", field=plane))
    if truth:
        figures.append(_map(truth[1], truth[0], top, "The true density", scale))
    for model in shown:
        check = next((c for c in model.report.checks if c.name == "density integrates to one"), None)
        integral = "" if check is None or check.error is None else (
            f"Its integral is {check.note}: {_RESULTS[check.status]}. ")
        line = next(iter(model.report.likelihood), None)
        value = f"{with_mark(line)}. " if line else ""
        figures.append(_map(model.array("density"), model, top, f"The density of {model.name}",
                            value + integral + scale))
    return figures


def _top(log_density: np.ndarray) -> float:
    finite = log_density[np.isfinite(log_density)]
    return float(np.exp(finite.max())) if finite.size else 1.0


def _map(log_density: np.ndarray, model: Model, top: float, title: str, note: str) -> Figure:
    with np.errstate(over="ignore"):
        density = np.exp(np.asarray(log_density, dtype=np.float64))
    field = Field(tuple(model.report.density.extent), density, top)
    return figure([], title, "", "", field=field, note=note)
