"""The report of an evaluation as one page of HTML that needs no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from genmodels.core.files import write_whole
from genmodels.report import likelihoods, quality
from genmodels.report.figures import DARK, LIGHT
from genmodels.report.parts import (
    UNITS,
    Gallery,
    Listing,
    Model,
    Styled,
    facts,
    legal,
    number,
    typeset,
    with_error,
)

#: Escapes whatever is put in, as text and as attribute; what is undefined stops the page, None is nothing.
TEMPLATES = Environment(
    loader=PackageLoader("genmodels.report"), autoescape=True, undefined=StrictUndefined, finalize=legal,
)
TEMPLATES.filters |= {
    "number": number, "yaml": lambda config: yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
}


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
    failures = [f"{f.get('path')}: {f.get('message')}" for f in table.get("failures") or []]
    failures += [f"{model.name}: {words}" for model in models for words in model.get("failed") or []]
    warnings = [f"{model.name}: the evaluation was interrupted, later stages are missing" for model in models
                if model.get("partial")]
    warnings += table.get("warnings") or []
    warnings += [f"{model.name}: {words}" for model in models for words in model.get("warnings") or []]
    content = {name: make(table, models) for name, _, make in SECTIONS}
    more = {"summary": models or failures or warnings, "making": models or table.get("command")}
    shown = [(name, heading) for name, heading, _ in SECTIONS if content[name] or more.get(name)]
    return TEMPLATES.get_template("page.html").render(
        title=_title(table, models), introduction=_introduction(table), content=content, models=models,
        sections=shown, headline=likelihoods.headline(models), failures=failures,
        warnings=list(dict.fromkeys(warnings)), conclusions=table.get("conclusions") or [],
        notes=_notes(table), command=table.get("command"), version=(table.get("genmodels") or {}).get("version"),
        light=LIGHT, dark=DARK,
    )


def _title(table: dict, models: list[Model]) -> str:
    data = table.get("data") or (models[0].data if models else {})
    who = models[0].name if len(models) == 1 else f"{len(models)} models"
    where = f" on {data['name']}, {data.get('split', 'test')} split" if data.get("name") else ""
    return f"Evaluation of {who}{where}"


def _introduction(table: dict) -> str:
    data, made = table.get("data") or {}, table.get("genmodels") or {}
    items = None
    if data.get("items") is not None:
        some = "the first " if data.get("limited") else ""
        items = f"{some}{number(data['items'])} items of shape {tuple(data.get('event_shape') or ())}"
        items += f", {data['levels']} levels" if data.get("levels") else ", continuous"
        items += f"; hash of the items {str(data['item_hash'])[:12]}" if data.get("item_hash") else ""
    machine = facts({"genmodels" if key == "version" else key: made.get(key)
                     for key in ("version", "torch", "python", "device", "threads")})
    lines = [str(line) for line in (items, table.get("created"), machine) if line]
    return ". ".join(lines) + "." if lines else ""


def _notes(table: dict) -> list[str]:
    """The notes below the table, without those that stand in the summary."""
    given = [str(note) for note in table.get("notes") or []]
    notes = [typeset(note) for note in given if not note.startswith("note: ")]
    for known in table.get("references") or []:
        if known.get("value") is not None and not any(f"{known.get('name')} " in note for note in given):
            unit = UNITS.get(known.get("unit"), known.get("unit"))
            notes.append(f"Reference: {known.get('name')} {with_error(known['value'], known.get('error'))} {unit}")
    return notes


def _likelihoods(table: dict, models: list[Model]) -> list:
    figures = likelihoods.histograms(models, table.get("references") or [])
    return [*_gallery(figures), *likelihoods.extremes(models)]


def _checks(table: dict, models: list[Model]) -> list[Listing]:
    words = {"passed": Styled("\u2713 passed", "good"), "failed": Styled("\u2717 failed", "bad"),
             "not verified": Styled("\u2013 not verified", "odd")}
    groups = []
    for model in models:
        rows = [[one.get("name"), words[one.get("status")], number(one.get("error")), number(one.get("tolerance")),
                 one.get("note")] for one in model.get("checks") or []]
        if rows:
            groups.append((model.name, rows))
    columns = ["check", "result", "error", "tolerance", "note"]
    return [Listing(columns, groups, "What was checked on the models")] if groups else []


def _gallery(figures: list) -> list[Gallery]:
    return [Gallery(figures)] if figures else []


#: The sections in their order: anchor, title, and its parts; one that has none is left out. The template adds to the
#: summary, the table and the last section.
SECTIONS: list[tuple[str, str, Callable]] = [
    ("summary", "In short", lambda table, models: []),
    ("table", "The table", likelihoods.main_table),
    ("samples", "Samples from the same seed", lambda table, models: _gallery(quality.samples(models))),
    ("likelihood", "Likelihood of single items", _likelihoods),
    ("noise", "Bits by noise level", lambda table, models: _gallery(
        quality.by_noise_level(models) + quality.by_temperature(models))),
    ("layers", "Flows layer by layer", lambda table, models: quality.by_layer(models)),
    ("density", "Densities", lambda table, models: _gallery(likelihoods.densities(models))),
    ("outside", "Other data", lambda table, models: likelihoods.out_of_distribution(models)),
    ("fidelity", "Samples against data", lambda table, models: quality.fidelity(models, table.get("scale"))),
    ("neighbours", "Nearest training items", lambda table, models: quality.neighbours(models)),
    ("sweeps", "Steps and temperatures", lambda table, models: _gallery(quality.sweeps(models))),
    ("cost", "Cost", lambda table, models: quality.cost(models)),
    ("checks", "Checks", _checks),
    ("making", "How every number was made", lambda table, models: likelihoods.recipes(models)),
]
