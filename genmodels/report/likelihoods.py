"""Likelihoods on the page: the headline, the table in groups of one kind, and how single items fare."""

from __future__ import annotations

import numpy as np

from genmodels.evaluation.report import gap_of, parts_of_error
from genmodels.report.figures import Field, Figure, Rule, Series, figure
from genmodels.report.parts import (
    KINDS,
    UNITS,
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
    unit_of,
    with_error,
    with_mark,
)

_BINS = 40
_TAIL = 0.002  # share of items beyond either end of a histogram that may fall into its last bin


def headline(models: list[Model]) -> list[tuple[str, str, str]]:
    """The name of every model, its first likelihood, and the kind of that in words."""
    entries = []
    for model in models:
        line = next(iter(model.likelihoods), None)
        if line is None:
            entries.append((model.name, "no likelihood", ""))
            continue
        title, meaning, _ = KINDS[line["kind"]]
        label, how = str(line.get("label") or ""), str(line.get("how") or "")
        recipe = how if how.startswith(label) else ", ".join(filter(None, [label, how]))
        said = f"{_lower(title)}: {meaning}. "
        if line["kind"] != "unnormalised":
            said += (f"{recipe}. " if recipe else "") + f"{number(line.get('n'))} items, error over them."
            said += f" {line['unreliable'].capitalize()}." if line.get("unreliable") else ""
        entries.append((model.name, with_mark(line), said))
    return entries


def main_table(table: dict, models: list[Model]) -> list[Listing]:
    """The rows of the table, in groups of one kind, best first within each where a ranking is known."""
    columns, rows = table.get("columns") or [], table.get("rows") or []
    if not columns or not rows or not models:
        return []
    places = {row: (k, place) for ranking in table.get("ranking") or []
              for k, (place, row) in enumerate(_in_order(ranking.get("order") or []))}
    names = [name or "row" for name in columns]
    heading = names.index("model") if "model" in names else 0
    others = [k for k in range(len(names)) if k != heading]
    own_rank = "rank" not in names

    def kind_of(k: int) -> str:
        model, line = models[rows[k]["model"]], rows[k].get("likelihood")
        return "unnormalised" if line is None else model.likelihoods[line]["kind"]

    groups = []
    by_kind = grouped(range(len(rows)), kind_of)
    for kind in (kind for kind in KINDS if kind in by_kind):
        order = sorted(by_kind[kind], key=lambda k: places.get(k, (len(rows) + k, 0))[0])
        lines = []
        for k in order:
            cells = [typeset(str(cell)) for cell in rows[k]["cells"]]
            place = str(places[k][1]) if k in places and len(by_kind[kind]) > 1 else ""
            lines.append([cells[heading] or models[rows[k]["model"]].name, *([place] if own_rank else []),
                          *(cells[other] for other in others)])
        groups.append((f"{KINDS[kind][0]}: {KINDS[kind][1]}", lines))
    said = ("Each kind of likelihood is ranked by itself, apart for what it is conditioned on (equal ranks: no "
            "difference beyond two standard errors)")
    if len(table.get("ranking") or []) == 1 and len(by_kind) > 1 and not own_rank:
        said = "Lines in groups of one kind; what a rank compares is said below"
    ranked = ["rank in its kind"] if own_rank else []
    return [Listing([names[heading], *ranked, *(names[other] for other in others)], groups, said)]


def _in_order(order: list[list[int]]) -> list[tuple[int, int]]:
    """(rank, row) of every row, ties sharing the better rank."""
    ranks, seen = [], 0
    for ties in order:
        ranks += [(seen + 1, row) for row in ties]
        seen += len(ties)
    return ranks


def histograms(models: list[Model], references: list[dict]) -> list[Text | Figure]:
    """The likelihood of single items, one plot for each kind and unit: other kinds never share an axis."""
    lines = []
    for model in models:
        for line in model.likelihoods:
            nats = model.array(line.get("values"))
            if nats is not None:
                lines.append((model, line, nats))
    hidden = [one for one in lines if not _single(one[1]).get("shown", True)]
    figures: list = [Text(f"{_name(model, line)}: not drawn, {noise_of(line)}. More draws= or importance_samples= make "
                          "it smaller.") for model, line, _ in hidden]
    drawn = [one for one in lines if _single(one[1]).get("shown", True)]
    for (kind, unit), some in grouped(drawn, lambda one: (one[1]["kind"], unit_of(one[1]))).items():
        costs = [model.per_item(nats)[0] for model, _, nats in some]
        names = [_name(model, line) for model, line, _ in some]
        noises = [f"{name}: {noise_of(line)}." for name, (_, line, _) in zip(names, some, strict=True)
                  if _single(line).get("noise")]
        if kind == "unnormalised":  # every energy has a zero of its own
            figures += [histogram([name], [cost], f"Energies of single items: {name}", "nats, up to a constant",
                                  [model.number]) for (model, _, _), name, cost in zip(some, names, costs, strict=True)]
            continue
        known = [Rule(f"{r['name']} {r['value']:.2f}", r["value"], "x") for r in references
                 if UNITS.get(r.get("unit")) == unit and r.get("value") is not None]
        title = f"Likelihood of single items: {_lower(KINDS[kind][0])}"
        colours = [model.number for model, _, _ in some]
        for start in range(0, len(some), 6):
            part = slice(start, start + 6)
            figures.append(histogram(names[part], costs[part], title, f"{unit} of an item (left: more likely)",
                                     colours[part], known, " ".join(noises[part])))
    return figures


def _single(line: dict) -> dict:
    return line.get("single") or {}


def noise_of(line: dict) -> str:
    """The noise of the value of a single item and the spread of items, in words.

    Example:
        >>> noise_of({"unit": "bits_per_dim", "single": {"noise": 0.7, "spread": 0.25}})
        'the value of a single item has a noise of 0.7000 bits/dim, items differ by 0.2500'
    """
    found = _single(line)
    if found.get("noise") is None:
        return "the noise of the value of a single item, drawn once, is not known"
    return (f"the value of a single item has a noise of {found['noise']:.4f} {unit_of(line)}, items differ by "
            f"{found['spread']:.4f}")


def _lower(title: str) -> str:
    return title[:1].lower() + title[1:]


def _name(model: Model, line: dict) -> str:
    return f"{model.name}, {line['label']}" if line.get("label") else model.name


def histogram(
    names: list[str], values: list[np.ndarray], title: str, x_label: str, colours: list[int] | None = None,
    rules: list[Rule] | None = None, noise: str = "",
) -> Text | Figure:
    """Histograms on common bins, in percent of each one's items; `noise` is said below."""
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
    found = [(model, [_items(model, which, entries) for which in ("least", "most")
                      if (entries := model.get("items", which))]) for model in models]
    return [Gallery(figures, model.name) for model, figures in found if figures]


def _items(model: Model, which: str, entries: list[dict]) -> Pictures:
    x = model.array(f"{which}_x")
    pictures = tiles(x, model.data) if x is not None and is_image(model.data) else []
    nats = [np.nan if entry.get("nats") is None else entry["nats"] for entry in entries]
    costs, unit = model.per_item(np.array(nats))
    errors = -model.per_item(np.array([entry.get("error") or 0.0 for entry in entries]))[0]
    lines, number_of = model.likelihoods, model.get("items", "line") or 0
    line = lines[number_of] if number_of < len(lines) else {}
    if line.get("kind") == "unnormalised":
        unit = "nats up to a constant"
    said = f"{unit}, {line['label']}" if line.get("label") else unit
    shown = []
    for k, entry in enumerate(entries):
        words = f"item {entry['index']}: {with_error(float(costs[k]), float(errors[k]) or None, 3)}"
        if not pictures and x is not None and k < len(x) and x[k].size <= 4:
            words += " at (" + ", ".join(f"{v:.2f}" for v in np.ravel(x[k])) + ")"
        shown.append((address(pictures[k]) if k < len(pictures) else None,
                      f"{which} likely item number {k + 1}, test item {entry['index']}", words))
    return Pictures(f"{which} likely ({said})", shown)


def _parts(line: dict) -> str:
    parts = parts_of_error(line)
    return ", ".join(f"{number(part)} {name}" for name, part in parts.items()) if len(parts) > 1 else ""


def recipes(models: list[Model]) -> list[Listing]:
    """Every likelihood with its kind, errors and how it was made."""
    columns = ["model", "kind", "value", "parts of the error", "KL gap", "bracket", "items", "not finite", "parts",
               "weights", "how it was made", "seconds"]
    rows = []
    for model in models:
        for line in model.likelihoods:
            made = line.get("made") or {}
            recipe = facts({key: value for key, value in made.items() if key != "weights"})
            bracket = line.get("bracket") or {}
            rows.append([
                f"{model.name}: {line['label']}" if line.get("label") else model.name, line["kind"].replace("_", " "),
                with_mark(line), _parts(line), with_error(*gap_of(line)),
                f"{number(bracket.get('lower'))} to {number(bracket.get('upper'))}" if bracket else "",
                number(line.get("n")), number(line.get("nonfinite") or None),
                ", ".join(f"{name} {value:.1f}" for name, value in (line.get("parts_nats") or {}).items()),
                made.get("weights") or model.get("checkpoint", "weights"), recipe, number(line.get("seconds"), 1),
            ])
    caption = "Every likelihood with its kind, its errors and how it was made (parts in nats of an item)"
    return [Listing(columns, [(None, rows)], caption)] if rows else []


def out_of_distribution(models: list[Model]) -> list[Listing | Gallery]:
    """Histograms with the area under the ROC curve; 0.5 is chance, below it the other data are the likelier ones."""
    rows, galleries = [], []
    for model in models:
        for k, found in enumerate(model.get("ood") or []):
            name, kind = str(found.get("name")), str(found.get("kind") or "unnormalised")
            unit = {"bits_per_dim": "bits/dim"}.get(found.get("value"), str(found.get("value") or "nats"))
            rows.append([f"{model.name} on {name}", kind.replace("_", " "), found.get("label"),
                         number(found.get("auroc")), number(found.get("mean_in")), number(found.get("mean_out")), unit,
                         number(found.get("n")), found.get("said")])
            inside, outside = model.array(found.get("inside")), model.array(found.get("values"))
            if inside is None or outside is None:
                continue
            bits = unit == "bits/dim"
            values = [model.per_item(v)[0] if bits else -np.asarray(v, dtype=np.float64) for v in (inside, outside)]
            title = f"{model.name}: {model.data.get('name')} against {name}"
            if found.get("auroc") is not None:
                title += f", AUROC {found['auroc']:.3f}"
            legend = [f"{model.data.get('name')} (test)", name]
            line = next(iter(model.likelihoods), {})  # the line that other data are evaluated by
            noise = "" if line.get("single", {}).get("noise", 0.0) == 0 else f"Of the test items {noise_of(line)}."
            noise = " ".join(filter(None, [noise, f"{KINDS[kind][1]}."]))
            shown = histogram(legend, values, title, f"{unit} of an item (left: more likely)", noise=noise)
            galleries.append(Gallery([shown, *_likely(model, k, name)]))
    if not rows:
        return []
    columns = ["model", "kind", "likelihood", "AUROC", "mean of test items", "mean of other data", "unit", "items",
               "result"]
    caption = "How well the likelihood separates test items from other data: AUROC 1 perfectly, 0.5 by chance"
    return [Listing(columns, [(None, rows)], caption), *galleries]


def _likely(model: Model, k: int, name: str) -> list[Pictures]:
    x = model.array(f"ood_{k}_x")
    if x is None or not is_image(model.data) or list(x.shape[1:]) != list(model.data["event_shape"]):
        return []
    shown = [(address(tile), f"likely item {i + 1} of {name}", "") for i, tile in enumerate(tiles(x, model.data))]
    return [Pictures(f"the most likely items of {name}", shown)]


_POINTS = 1500
_RESULTS = {"passed": "one", "failed": "not one, the check failed", "not verified": "not settled"}


def densities(models: list[Model]) -> list[Figure]:
    """The test points, the true density where it is known, and the density of every model."""
    shown = [model for model in models if model.array("density") is not None and model.get("density", "extent")]
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
        dots = Series("test items", points[:, 0].tolist(), points[:, 1].tolist(), "dots")
        plane = Field(tuple(first.get("density", "extent")))
        figures.append(figure([dots], f"The data: {len(points):,} test items", "", "", field=plane))
    if truth:
        figures.append(_map(truth[1], truth[0], top, "The true density", scale))
    for model in shown:
        check = next((c for c in model.get("checks") or [] if c["name"] == "density integrates to one"), None)
        said = "" if check is None or check["error"] is None else (
            f"Its integral is {check['note']}: {_RESULTS[check['status']]}. ")
        line = next(iter(model.likelihoods), None)
        value = f"{with_mark(line)}. " if line else ""
        figures.append(_map(model.array("density"), model, top, f"The density of {model.name}", value + said + scale))
    return figures


def _top(log_density: np.ndarray) -> float:
    finite = log_density[np.isfinite(log_density)]
    return float(np.exp(finite.max())) if finite.size else 1.0


def _map(log_density: np.ndarray, model: Model, top: float, title: str, note: str) -> Figure:
    with np.errstate(over="ignore"):
        density = np.exp(np.asarray(log_density, dtype=np.float64))
    field = Field(tuple(model.get("density", "extent")), density, top)
    return figure([], title, "", "", field=field, note=note)
