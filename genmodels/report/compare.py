"""The report of models: the table that compares them, and a page of HTML that needs no network and no script."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from genmodels.core.errors import InputError, Interrupted, RunError
from genmodels.core.files import cache_folder, write_text, write_whole
from genmodels.core.processes import Ranks
from genmodels.evaluation.checkpoint import Opened, Request
from genmodels.evaluation.evaluate import Evaluation, check_options
from genmodels.evaluation.features import Cache
from genmodels.evaluation.report import Report, Skipped, plain
from genmodels.evaluation.table import UNITS, Table, labelled, make_table, same_items
from genmodels.models.build import construct
from genmodels.report import likelihoods, quality
from genmodels.report.figures import DARK, LIGHT
from genmodels.report.likelihoods import as_csv, as_markdown, as_text, filled, summary_title
from genmodels.report.parts import Gallery, Model, facts, legal, number, typeset, with_error
from genmodels.training.loggers import LoggerOptions, log_evaluation

#: All values are escaped, in text and attributes; an undefined name is an error, None is empty.
TEMPLATES = Environment(
    loader=PackageLoader("genmodels.report"), autoescape=True, undefined=StrictUndefined, finalize=legal,
)
TEMPLATES.filters |= {
    "number": number, "vars": vars, "yaml": lambda config: yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
}


def write_page(table: Table, arrays: list[Mapping[str, np.ndarray]], target: Path | str) -> None:
    """Write report.html whole.

    Arguments:
        table: the comparison, or a table of one model; sections without measurements are left out.
        arrays: the arrays of each model, in the same order: likelihoods of items, samples, densities.
        target: the file.
    """
    write_text(target, render(table, arrays) + "\n")


def render(table: Table, arrays: list[Mapping[str, np.ndarray]]) -> str:
    """The page as text."""
    models = [Model(k, report, own) for k, (report, own) in enumerate(zip(table.models, arrays, strict=True))]
    failures = [f"{failure.path}: {failure.message}" for failure in table.failures]
    failures += [f"{model.name}: {words}" for model in models for words in model.report.failed]
    warnings = [f"{model.name}: the evaluation was interrupted, later stages are missing" for model in models
                if model.report.partial]
    warnings += table.warnings
    sections = _sections(table, models)
    shown = [(name, heading) for name, heading, parts in sections if parts or name in ("summary", "making")]
    who = models[0].name if len(models) == 1 else f"{len(models)} models"
    return TEMPLATES.get_template("page.html").render(
        title=f"Evaluation of {who} on {table.data.name}, {table.data.split} split", introduction=_introduction(table),
        content={name: parts for name, _, parts in sections}, models=models, sections=shown,
        headline=likelihoods.headline(models), failures=failures,
        warnings=list(dict.fromkeys(warnings)), conclusions=table.conclusions, notes=_notes(table),
        command=table.command, version=table.genmodels["version"], light=LIGHT, dark=DARK,
    )


def _introduction(table: Table) -> str:
    data = table.data
    items = (f"{'the first ' if data.limited else ''}{number(data.items)} items of shape {tuple(data.event_shape)}, "
             f"{f'{data.levels} levels' if data.levels else 'continuous'}; hash of the items {data.item_hash[:12]}")
    machine = facts({"genmodels" if key == "version" else key: value for key, value in table.genmodels.items()})
    return f"{items}. {table.created}. {machine}."


def _notes(table: Table) -> list[str]:
    """The notes below the table, without those of the summary."""
    notes = [typeset(note) for note in table.notes if not note.startswith("note: ")]
    for known in table.references:
        if known.value is not None and not any(f"{known.name} " in note for note in table.notes):
            notes.append(f"Reference: {known.name} {with_error(known.value, known.error)} {UNITS[known.unit]}")
    return notes


def _gallery(figures: list) -> list[Gallery]:
    return [Gallery(figures)] if figures else []


def _sections(table: Table, models: list[Model]) -> list[tuple[str, str, list]]:
    """Anchor, title and parts of every section; one without parts is left out.

    The template adds to the summary, the table and the last section.
    """
    items = [*_gallery(likelihoods.histograms(models, table.references)), *likelihoods.extremes(models)]
    return [
        ("summary", "In short", []),
        ("table", "The table", likelihoods.main_table(table, models)),
        ("samples", "Samples from the same seed", _gallery(quality.samples(models))),
        ("sound", "Sound", quality.sound(models)),
        ("transcripts", "Transcripts", quality.transcripts(models)),
        ("likelihood", "Likelihood of single items", items),
        ("noise", "Bits by noise level", _gallery(quality.by_noise_level(models))),
        ("layers", "Flows layer by layer", quality.by_layer(models)),
        ("density", "Densities", _gallery(likelihoods.densities(models))),
        ("outside", "Other data", likelihoods.out_of_distribution(models)),
        ("fidelity", "Samples against data", quality.fidelity(models, table.scale)),
        ("neighbours", "Nearest training items", quality.neighbours(models)),
        ("sweeps", "Steps and temperatures", _gallery(quality.sweeps(models))),
        ("cost", "Cost", quality.cost(models)),
        ("checks", "Checks", quality.checks(models)),
        ("making", "How every number was made", likelihoods.recipes(models)),
    ]


@dataclass
class Comparison:
    """Models evaluated on the same items: their table, where it was written, and what failed.

    Attributes:
        table: the rows of all models; `table.models` are their reports.
        page: report.html.
        lines: the output of a command: the table, its notes, and the files.
        failed: messages about failures.
    """

    table: Table
    page: Path
    lines: list[str]
    failed: list[str]

    def __str__(self) -> str:
        return as_text(self.table)

    def _repr_html_(self) -> str:
        columns, rows = filled(self.table)
        lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        notes = "".join(f"<br>{escape(note)}" for note in [*self.table.notes, *self.failed, f"page: {self.page}"])
        return f"<table><caption>{escape(summary_title(self.table))}</caption><tr>{head}</tr>{lines}</table>{notes}"


def compare(
    paths: list[Path], request: Request, ranks: Ranks, *, several: bool, failures: dict[str, str], command: str = "",
) -> Comparison | None:
    """Evaluate checkpoints and write their table; None in other processes than the first.

    Arguments:
        paths: the checkpoints whose files are intact.
        request: the options of the evaluation.
        ranks: the processes of this command, of which the first writes.
        several: whether more than one checkpoint was named.
        failures: path and message of those that are not; those whose evaluation fails are added.
        command: the command line that repeats the evaluation, for the reports.

    Raises:
        InputError, RunError: when nothing can be evaluated.
    """
    evaluations, first = _opened(paths, request, ranks, failures)
    if ranks.rank:
        ranks.serve()
        return None
    targets = _targets([evaluation.opened for evaluation in evaluations], request.out, several)
    folders = [evaluation.opened.path.resolve().parent for evaluation in evaluations]
    folder = Path(request.out or table_folder(folders)) if several else None
    _check_unnamed(targets, folder)
    done, lines = _run(evaluations, targets, first, failures)
    table = make_table(
        in_one_network([evaluation.report for evaluation, _ in done]), [evaluation.arrays for evaluation, _ in done],
        rank=request.rank, command=command, failures=list(failures.items()),
    )
    lines += [as_text(table), *(f"report: {target}" for _, target in done)]
    page = done[0][1].with_suffix(".html")
    if folder is not None:
        lines += _keep_fuller(folder / "table.json", _held_in(plain(table)))
        write_report(table, folder / "table.json")
        for name, text in (("table.md", as_markdown(table)), ("table.csv", as_csv(table))):
            write_text(folder / name, text)
        lines.append(f"table: {folder / 'table.md'}")
        page = folder / "report.html"
    arrays = [{name: value.numpy() for name, value in evaluation.arrays.items()} for evaluation, _ in done]
    write_page(table, arrays, page)
    for (evaluation, target), held in zip(done, arrays, strict=True):
        own = target.with_suffix(".html")
        if own != page and own.exists():  # of the report that was replaced
            write_page(make_table([replace(evaluation.report)], [evaluation.arrays], command=command), [held], own)
        options = construct(LoggerOptions, **evaluation.report.config.get("logger") or {})
        log_evaluation(evaluation.opened.path, options, plain(evaluation.report), evaluation.opened.model.spec.name)
    faults = [f"{e.report.checkpoint.path}: {note}" for e, _ in done for note in e.report.failed]
    return Comparison(table, page, [*lines, f"page: {page}"], [*failures.values(), *faults])


def table_folder(folders: Sequence[Path]) -> Path:
    """The folder that runs share, `comparison` inside it where it is that of a run, which has a page of its own.

    Example:
        >>> table_folder([Path("runs/a"), Path("runs/b")]), table_folder([Path("runs/a"), Path("runs/a")])
        (PosixPath('runs'), PosixPath('runs/a/comparison'))
    """
    common = Path(os.path.commonpath(folders))
    return common / "comparison" if common in folders else common


def _opened(
    paths: list[Path], request: Request, ranks: Ranks, failures: dict[str, str]
) -> tuple[list[Evaluation], Exception | None]:
    """The evaluations of one table before their stages, and the first error; all messages are added to `failures`."""
    cache = Cache(cache_folder() / "evaluations" if request.cache else None)
    prepared: dict = {}  # data sets
    shared: dict = {}
    evaluations, first = [], None
    for path in dict.fromkeys(paths):
        try:
            evaluations.append(Evaluation(Opened.open(path, request, prepared), cache, shared, ranks))
        except (RunError, InputError) as error:
            first = first or error
            failures[str(path)] = str(error)
    if not evaluations:
        raise first
    try:
        check_options([evaluation.opened for evaluation in evaluations])
    except InputError as error:
        raise first or error from None  # of a model that has the option, and refuses its value
    same_items([evaluation.report for evaluation in evaluations])
    labelled([evaluation.report for evaluation in evaluations])
    return evaluations, first


def _run(
    evaluations: list[Evaluation], targets: list[Path], first: Exception | None, failures: dict[str, str]
) -> tuple[list[tuple[Evaluation, Path]], list[str]]:
    """The evaluations that succeed, with the files of their reports, which are written; and lines for the user."""
    done, lines = [], []
    for evaluation, target in zip(evaluations, targets, strict=True):
        path = str(evaluation.opened.path)
        if len(evaluations) > 1:
            print(f"{evaluation.report.name}: {path}", file=sys.stderr)
        try:
            evaluation.run()
        except Interrupted:
            _write_unfinished(evaluation, target)
            raise
        except (RunError, InputError) as error:
            failures[path] = str(error)
            if _write_unfinished(evaluation, target):
                failures[path] += f" (what was done before is in {target})"
            first = first or (InputError if isinstance(error, InputError) else RunError)(failures[path])
            continue
        lines += _write(evaluation, target)
        done.append((evaluation, target))
    if not done:
        messages = dict.fromkeys(failures.values())
        raise first if len(messages) == 1 else RunError("; ".join(messages))
    return done, lines


def _write_unfinished(evaluation: Evaluation, target: Path) -> bool:
    """Write the stages that were finished before an evaluation failed or was interrupted; whether there are any."""
    if evaluation.report.seconds:
        sys.stderr.writelines(f"{line}\n" for line in _write(evaluation, target))
    return bool(evaluation.report.seconds)


def report_target(
    checkpoint: Path, out: str | None, several: bool, split: str = "test", limit: int | None = None
) -> Path:
    """The file of a report: `out`, or one next to the checkpoint, whose name says in what it differs from report.json.

    Example:
        >>> str(report_target(Path("runs/a/last.ckpt"), None, False, limit=100))
        'runs/a/report_last_first100.json'
    """
    if out is not None and not several:
        return Path(out)
    words = [w for w, usual in ((checkpoint.stem, "best"), (split, "test")) if w != usual]
    name = "_".join(["report", *words, *([] if limit is None else [f"first{limit}"])]) + ".json"
    folder = checkpoint.parent if out is None else Path(out) / checkpoint.parent.name
    return folder / name


def arrays_target(target: Path) -> Path:
    """The file of the arrays of a report, in the same folder.

    Example:
        >>> str(arrays_target(Path("runs/a/report.json")))
        'runs/a/report.npz'
    """
    return target.with_suffix(".npz")


def write_arrays(arrays: Mapping[str, Tensor], target: Path) -> None:
    """Write the arrays of a report whole: per-example likelihoods, samples, densities."""
    plain = {name: value.numpy() for name, value in arrays.items()}
    write_whole(target, lambda file: np.savez_compressed(file, **plain))


def write_report(report: Any, target: Path) -> None:
    """Write a report or a table whole as JSON; numbers that are not finite become null."""
    write_text(target, json.dumps(plain(report), indent=1, allow_nan=False) + "\n")


def in_one_network(reports: list[Report]) -> list[Report]:
    """Reports for one table, without measures of samples in the features of another network than the first one's."""
    networks = [getattr(report.fidelity, "network", {}).get("sha256") for report in reports]
    first = next(filter(None, networks), None)
    apart = Skipped("not in the features of the first model, which has other training items; its own report has them")
    return [replace(report, fidelity=apart, sweeps=[]) if sha256 not in (None, first) else report
            for report, sha256 in zip(reports, networks, strict=True)]


def _write(evaluation: Evaluation, target: Path) -> list[str]:
    """Write a report with its arrays and pictures; returns lines for the user."""
    lines = _keep_fuller(target, _held_in(plain(evaluation.report)))
    evaluation.report.arrays = arrays_target(target).name
    write_arrays(evaluation.arrays, arrays_target(target))
    write_report(evaluation.report, target)
    for name, picture in evaluation.pictures.items():
        place = target.with_name(f"{target.stem}_{name}.png")
        write_whole(place, lambda file, picture=picture: picture.save(file, format="PNG"))
        lines.append(f"{name}: {place}")
    return lines


class _Held(NamedTuple):
    """What a report or a table holds: its JSON, its items, and its stages, their results by name, and models."""

    content: dict
    items: str
    parts: set[str]

    def beyond(self, new: _Held) -> str:
        """What the new one lacks of it, in words; empty for nothing."""
        lacking = self.parts - new.parts
        further = sorted(part for part in lacking if ": " not in part or part.partition(": ")[0] not in lacking)
        return "results of other items" if self.items != new.items else f"{', '.join(further)} too" if further else ""


def _keep_fuller(target: Path, new: _Held | None) -> list[str]:
    """Rename an earlier report or table, with its files, that has other items, or stages or models the new one lacks.

    One that was renamed earlier is replaced only if it has the same items and nothing further.
    """
    held = _held_in(_read(target))
    if held is None or new is None or not (further := held.beyond(new)):
        return []
    before, number = "_before", 2
    while (kept := _held_in(_read(target.with_stem(target.stem + before)))) is not None and kept.beyond(held):
        before, number = f"_before{number}", number + 1
    pages = [target.with_name("report.html"), *map(target.with_suffix, (".md", ".csv"))]
    files = pages if _is_table(held.content) else [arrays_target(target), target.with_suffix(".html")]
    for file in filter(Path.exists, [target, *files]):
        file.replace(file.with_stem(file.stem + before))
    aside = target.with_stem(target.stem + before)
    if not _is_table(held.content):
        write_report(held.content | {"arrays": arrays_target(aside).name}, aside)
    return [f"{target} held {further}: kept as {aside.name}"]


def _held_in(content: Any) -> _Held | None:
    """What a report or a table holds; None for anything else."""
    try:
        reports = content["models"] if _is_table(content) else [content]
        parts = {part for report in reports for part in _parts_of(report)}
        parts |= {report["checkpoint"]["path"] for report in reports} if _is_table(content) else set()
        return _Held(content, content["data"]["item_hash"], parts) if parts else None
    except (KeyError, TypeError):
        return None


def _parts_of(report: dict) -> Iterator[str]:
    for stage in report["seconds"]:
        if not (stage == "fidelity" and "skipped" in (report.get("fidelity") or {})):
            yield stage
    for kind, name in (("likelihood", "label"), ("ood", "name"), ("sweeps", "key")):
        yield from (f"{kind}: {result[name]}" for result in report.get(kind, ()))


def _is_table(content: Any) -> bool:
    return isinstance(content, dict) and {"rows", "models"} <= {*content}


def _read(file: Path) -> Any:
    """The content of a file of JSON; None without one."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _targets(opened: list[Opened], out: str | None, several: bool) -> list[Path]:
    """The file of each report; reports that would share a file are numbered."""
    if several and out is not None and Path(out).suffix in (".json", ".html", ".csv"):
        raise InputError(f"out={out}: the reports of several checkpoints are a folder: leave out {Path(out).suffix}")
    targets: list[Path] = []
    for one in opened:
        evaluated = one.items if one.limited else None
        target = first = report_target(one.path, out, several, one.request.split, evaluated)
        number = 2
        while target in targets:
            target, number = first.with_name(f"{first.stem}_{number}.json"), number + 1
        targets.append(target)
    for target in targets:
        if target.suffix != ".json":
            raise InputError(f"out={target}: the report of one checkpoint is a file, end it in .json")
    return targets


def _check_unnamed(reports: list[Path], folder: Path | None) -> None:
    """Raise an InputError if files of these reports, or of the table in the folder, would replace the user's own."""
    taken = [place for target in reports if _held_in(_read(target)) is None
             for place in (target, arrays_target(target), target.with_suffix(".html")) if place.exists()]
    if folder is None:  # report.html may be that of a table
        taken = [place for place in taken
                 if place.name != "report.html" or not _is_table(_read(place.with_name("table.json")))]
    if taken:
        raise InputError(f"{taken[0]} is of no evaluation and would be replaced: give another out=")
    if folder is None:
        return
    names = [] if _is_table(_read(folder / "table.json")) else ["table.json", "table.md", "report.html"]
    taken = [folder / name for name in names if (folder / name).exists()]
    with contextlib.suppress(OSError), open(folder / "table.csv", encoding="utf-8", errors="replace") as file:
        taken += [] if file.readline().startswith("row,model,checkpoint,") else [folder / "table.csv"]
    if taken:
        raise InputError(f"{taken[0]} is of no evaluation and would be replaced: give out=<folder>")
