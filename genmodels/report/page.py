"""The report of an evaluation as one page of HTML that needs no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from genmodels.core.files import write_whole
from genmodels.evaluation.table import UNITS, Table
from genmodels.report import likelihoods, quality
from genmodels.report.figures import DARK, LIGHT
from genmodels.report.parts import (
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
    "number": number, "vars": vars, "yaml": lambda config: yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
}


def write_page(table: Table, arrays: list[Mapping[str, np.ndarray]], target: Path | str) -> None:
    """Write report.html whole.

    Arguments:
        table: the comparison, or one model as a table of its own; what was not measured leaves its section out.
        arrays: the arrays of each model, in the same order: likelihoods of items, samples, densities.
        target: the file.
    """
    page = render(table, arrays)
    write_whole(target, lambda file: file.write(page + "\n"), mode="w")


def render(table: Table, arrays: list[Mapping[str, np.ndarray]]) -> str:
    """The page as text."""
    models = [Model(k, report, own) for k, (report, own) in enumerate(zip(table.models, arrays, strict=True))]
    failures = [f"{failure.path}: {failure.message}" for failure in table.failures]
    failures += [f"{model.name}: {words}" for model in models for words in model.report.failed]
    warnings = [f"{model.name}: the evaluation was interrupted, later stages are missing" for model in models
                if model.report.partial]
    warnings += table.warnings
    warnings += [f"{model.name}: {words}" for model in models for words in model.report.warnings]
    content = {name: make(table, models) for name, _, make in SECTIONS}
    shown = [(name, heading) for name, heading, _ in SECTIONS if content[name] or name in ("summary", "making")]
    return TEMPLATES.get_template("page.html").render(
        title=_title(table, models), introduction=_introduction(table), content=content, models=models,
        sections=shown, headline=likelihoods.headline(models), failures=failures,
        warnings=list(dict.fromkeys(warnings)), conclusions=table.conclusions, notes=_notes(table),
        command=table.command, version=table.genmodels["version"],
        light=LIGHT, dark=DARK,
    )


def _title(table: Table, models: list[Model]) -> str:
    who = models[0].name if len(models) == 1 else f"{len(models)} models"
    return f"Evaluation of {who} on {table.data.name}, {table.data.split} split"


def _introduction(table: Table) -> str:
    data = table.data
    items = (f"{'the first ' if data.limited else ''}{number(data.items)} items of shape {tuple(data.event_shape)}, "
             f"{f'{data.levels} levels' if data.levels else 'continuous'}; hash of the items {data.item_hash[:12]}")
    machine = facts({"genmodels" if key == "version" else key: value for key, value in table.genmodels.items()})
    return f"{items}. {table.created}. {machine}."


def _notes(table: Table) -> list[str]:
    """The notes below the table, without those that stand in the summary."""
    notes = [typeset(note) for note in table.notes if not note.startswith("note: ")]
    for known in table.references:
        if known.value is not None and not any(f"{known.name} " in note for note in table.notes):
            notes.append(f"Reference: {known.name} {with_error(known.value, known.error)} {UNITS[known.unit]}")
    return notes


def _likelihoods(table: Table, models: list[Model]) -> list:
    return [*_gallery(likelihoods.histograms(models, table.references)), *likelihoods.extremes(models)]


def _checks(table: Table, models: list[Model]) -> list[Listing]:
    words = {"passed": Styled("\u2713 passed", "good"), "failed": Styled("\u2717 failed", "bad"),
             "not verified": Styled("\u2013 not verified", "odd")}
    groups = []
    for model in models:
        rows = [[one.name, words[one.status], number(one.error), number(one.tolerance), one.note]
                for one in model.report.checks]
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
        quality.by_noise_level(models))),
    ("layers", "Flows layer by layer", lambda table, models: quality.by_layer(models)),
    ("density", "Densities", lambda table, models: _gallery(likelihoods.densities(models))),
    ("outside", "Other data", lambda table, models: likelihoods.out_of_distribution(models)),
    ("fidelity", "Samples against data", lambda table, models: quality.fidelity(models, table.scale)),
    ("neighbours", "Nearest training items", lambda table, models: quality.neighbours(models)),
    ("sweeps", "Steps and temperatures", lambda table, models: _gallery(quality.sweeps(models))),
    ("cost", "Cost", lambda table, models: quality.cost(models)),
    ("checks", "Checks", _checks),
    ("making", "How every number was made", lambda table, models: likelihoods.recipes(models)),
]
