"""The report of an evaluation as one page of HTML that needs no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml

from genmodels.files import write_whole
from genmodels.report import likelihoods, planes, profiles, quality, surprise
from genmodels.report.markup import Markup, tag
from genmodels.report.style import sheet_of_style
from genmodels.report.view import UNITS, Model, facts, listing, number, typeset, with_error

#: A browser that keeps to this loads nothing from anywhere and runs no script, whatever a name in a table says.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_page(table: dict, arrays: list[Mapping[str, np.ndarray]], target: Path | str) -> None:
    """Write report.html whole.

    Arguments:
        table: the table as plain types, with one report under `models` for each model; what is missing leaves its
            section out.
        arrays: the arrays of each model, in the same order: likelihoods of items, samples, densities.
        target: the file.
    """
    page = render(table, arrays)
    write_whole(target, lambda file: file.write(page + "\n"), mode="w")


def render(table: dict, arrays: list[Mapping[str, np.ndarray]]) -> str:
    """The page as text.

    Example:
        >>> page = render({"models": [{"name": "<mine>"}]}, [])
        >>> page.startswith("<!doctype html>"), "&lt;mine&gt;" in page, "<mine>" in page
        (True, True, False)
    """
    reports = table.get("models") or []
    own = [*arrays, *({} for _ in reports[len(arrays):])]
    models = [Model(k, report, own[k]) for k, report in enumerate(reports)]
    parts = [(name, title, content) for name, title, make in SECTIONS if (content := _filled(make(table, models)))]
    title = _title(table, models)
    links = tag("nav", tag("ul", *(tag("li", tag("a", heading, href=f"#{name}")) for name, heading, _ in parts)),
                aria_label="Sections")
    sections = [tag("section", tag("h2", heading, id=f"{name}-title"), *content, id=name,
                    aria_labelledby=f"{name}-title") for name, heading, content in parts]
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"), tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"), tag("title", title), tag("style", Markup(sheet_of_style())),
    )
    body = tag("body", tag("header", tag("h1", title), *_introduction(table), links),
               tag("main", *sections), tag("footer", *_footer(table)))
    return "<!doctype html>" + tag("html", head, body, lang="en")


def _filled(content) -> list:
    parts = content if isinstance(content, list) else [content]
    return [part for part in parts if part]


def _title(table: dict, models: list[Model]) -> str:
    data = table.get("data") or (models[0].data if models else {})
    who = models[0].name if len(models) == 1 else f"{len(models)} models"
    where = f" on {data['name']}, {data.get('split', 'test')} split" if data.get("name") else ""
    return f"Evaluation of {who}{where}"


def _introduction(table: dict) -> list:
    data, made = table.get("data") or {}, table.get("genmodels") or {}
    items = None
    if data.get("items") is not None:
        some = "the first " if data.get("limited") else ""
        items = f"{some}{number(data['items'])} items of shape {tuple(data.get('event_shape') or ())}"
        items += f", {data['levels']} levels" if data.get("levels") else ", continuous"
        items += f"; hash of the items {str(data['item_hash'])[:12]}" if data.get("item_hash") else ""
    machine = facts({"genmodels" if key == "version" else key: made.get(key)
                     for key in ("version", "torch", "python", "device", "threads")})
    lines = [items, table.get("created"), machine]
    return [tag("p", ". ".join(str(line) for line in lines if line) + ".", class_="soft")] if any(lines) else []


def _summary(table: dict, models: list[Model]) -> list:
    proved = [tag("li", sentence) for sentence in table.get("proved") or []]
    troubles = [f"{f.get('path')}: {f.get('message')}" for f in table.get("failures") or []]
    troubles += [f"{model.name}: {said}" for model in models for said in model.get("failed") or []]
    warnings = [*(table.get("warnings") or []),
                *(f"{model.name}: {said}" for model in models for said in model.get("warnings") or [])]
    partial = [f"{model.name}: the evaluation was interrupted, later stages are missing" for model in models
               if model.get("partial")]
    return [
        likelihoods.headline(models) if models else None,
        *(tag("p", tag("strong", "Failed: "), said, class_="bad") for said in troubles),
        *(tag("p", tag("strong", "Note: "), said, class_="odd") for said in dict.fromkeys([*partial, *warnings])),
        tag("h3", "What is proved") if proved else None, tag("ul", *proved) if proved else None,
    ]


def _table(table: dict, models: list[Model]) -> list:
    body = likelihoods.main_table(table, models)
    if body is None:
        return []
    told = [str(note) for note in table.get("notes") or []]
    notes = [tag("li", typeset(note)) for note in told if not note.startswith("note: ")]  # those stand in the summary
    for known in table.get("references") or []:
        if known.get("value") is not None and not any(f"{known.get('name')} " in note for note in told):
            unit = UNITS.get(known.get("unit"), known.get("unit"))
            value = with_error(known["value"], known.get("error"))
            notes.append(tag("li", f"Reference: {known.get('name')} {value} {unit}"))
    return [body, tag("ul", *notes, class_="note") if notes else None]


def _likelihoods(table: dict, models: list[Model]) -> list:
    figures = likelihoods.histograms(models, table.get("references") or [])
    return [tag("div", *figures, class_="gallery") if figures else None, *likelihoods.extremes(models)]


def _proofs(table: dict, models: list[Model]) -> list:
    words = {True: tag("span", "\u2713 passed", class_="good"), False: tag("span", "\u2717 failed", class_="bad"),
             None: tag("span", "\u2013 not judged", class_="odd")}
    groups = []
    for model in models:
        rows = [[one.get("name"), words[one.get("passed")], number(one.get("value")), number(one.get("threshold")),
                 one.get("where")] for one in model.get("proofs") or []]
        if rows:
            groups.append((model.name, rows))
    columns = ["check", "verdict", "value", "limit", "where"]
    return [listing(columns, groups, "What was checked on the models")] if groups else []


def _making(table: dict, models: list[Model]) -> list:
    parts = [likelihoods.recipes(models)]
    for model in models:
        checkpoint = model.get("checkpoint") or {}
        known = [part for key, value in checkpoint.items() if value is not None
                 for part in (tag("dt", key.replace("_", " ")), tag("dd", number(value)))]
        parts.append(tag("section", tag("h3", model.name), tag("dl", *known) if known else None, _config(model)))
    if table.get("command"):
        parts += [tag("h3", "The command that made this page"), tag("pre", table["command"])]
    return parts


def _config(model: Model) -> Markup | None:
    config = model.get("config")
    if not config:
        return None
    written = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return tag("details", tag("summary", f"the whole configuration of {model.name}"), tag("pre", written))


def _footer(table: dict) -> list:
    version = (table.get("genmodels") or {}).get("version")
    return [tag("p", f"Written by genmodels{f' {version}' if version else ''}. This file is complete: it loads nothing "
                     "and runs no script.", class_="soft")]


def _gallery(figures: list) -> Markup | None:
    return tag("div", *figures, class_="gallery") if figures else None


#: The sections in their order: anchor, title, and what fills them; one that has nothing to show is left out.
SECTIONS: list[tuple[str, str, Callable]] = [
    ("summary", "In short", _summary),
    ("table", "The table", _table),
    ("samples", "Samples from the same seed", lambda table, models: _gallery(quality.samples(models))),
    ("likelihood", "Likelihood of single items", _likelihoods),
    ("noise", "Bits by noise level", lambda table, models: _gallery(
        profiles.by_noise_level(models) + profiles.by_temperature(models))),
    ("layers", "Flows layer by layer", lambda table, models: profiles.by_layer(models)),
    ("density", "Densities", lambda table, models: _gallery(planes.densities(models))),
    ("outside", "Other data", lambda table, models: surprise.out_of_distribution(models)),
    ("fidelity", "Samples against data", lambda table, models: quality.fidelity(models, table.get("scale"))),
    ("neighbours", "Nearest training items", lambda table, models: quality.neighbours(models)),
    ("sweeps", "Steps and temperatures", lambda table, models: _gallery(quality.sweeps(models))),
    ("cost", "Cost", lambda table, models: quality.cost(models)),
    ("proofs", "Proofs", _proofs),
    ("making", "How every number was made", _making),
]
