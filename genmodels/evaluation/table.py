"""The comparison of models: one row for each likelihood, ranks within a kind, and what the bounds imply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from scipy.special import ndtr, stdtrit
from torch import Tensor

from genmodels.core.errors import InputError
from genmodels.core.likelihood import OF_TEXT, in_words, paired, with_error
from genmodels.data.base import items_of
from genmodels.evaluation.report import DataFacts, Fidelity, LikelihoodLine, Reference, Report, Scale, Skipped, plain
from genmodels.evaluation.speech import audit_notes, speech_notes, spoken_at_notes, transcription_note
from genmodels.verification.check import FAILED, NOT_VERIFIED, PASSED

COLUMNS = ["", "model", "parameters", "step", "weights", "value", "unit", "kind", "how", "rank", "Fréchet",
           "kernel distance", "precision", "recall", "evaluations", "samples/s"]
#: Measures of samples, each with its error: key in a report, column of table.csv.
MEASURES = (("frechet", "frechet"), ("kernel", "kernel_distance"), ("precision", "precision"), ("recall", "recall"))
_BATCH = 64  # items in a batch for samples/s, unless there are fewer
_DISTANCES = {"frechet": "Fréchet distance", "kernel": "kernel distance"}
#: How a value of each kind may err, for ranks across kinds.
ERRS = {
    "exact": "has no error but that of the items", "lower_bound": "may be worse than the true value, never better",
    "upper_bound": "may be better than the true value, never worse",
    "ode": "may err either way, by its tolerance and its noise", "ais": "flatters the model where log Z is too small",
}
#: Whether a kind bounds the true value from below, from above.
_SIDES = {"exact": (True, True), "lower_bound": (False, True), "upper_bound": (True, False), "ais": (True, False),
          "ode": (False, False)}
#: Units of values, in words.
UNITS = {"bits_per_dim": "bits/dim", "bits_per_character": "bits/character", "bits_per_byte": "bits/byte",
         "nats": "nats", "nats_per_dim": "nats/dim"}
#: Other scores of the likelihoods of items, by which two sets may be distinguished.
SCORES = {"typicality": "by typicality", "less_complexity": "by likelihood less complexity"}


@dataclass
class Row:
    """A row: the indices of its model and likelihood, whether it is the model's first, its cells, its rank."""

    model: int
    likelihood: int | None
    first: bool
    cells: list[str]
    rank: int | None


@dataclass
class Ranking:
    """Rows that are compared, the best first; ties, which do not differ beyond their errors, share a list."""

    kind: str
    given: str
    unit: str
    order: list[list[int]]


@dataclass
class Failure:
    """A checkpoint that could not be evaluated."""

    path: str
    message: str


@dataclass(kw_only=True)
class Table:
    """The comparison of models evaluated on the same items."""

    format: int = 1
    created: str
    command: str
    genmodels: dict
    data: DataFacts
    references: list[Reference]
    scale: Scale | None
    columns: list[str]
    rows: list[Row]
    ranking: list[Ranking]
    conclusions: list[str]
    models: list[Report]
    failures: list[Failure]
    warnings: list[str]
    notes: list[str] = field(default_factory=list)


def same_items(reports: Sequence[Report]) -> None:
    """Raise an InputError unless all were evaluated on the same items in the same units."""
    for other in reports[1:]:
        for key in ("name", "split", "levels", "units", "mel", "event_shape", "items", "item_hash"):
            first, second = (getattr(r.data, key) for r in (reports[0], other))
            if first != second:
                a, b = reports[0].checkpoint.path, other.checkpoint.path
                shown = f", {first} and {second}" if key != "item_hash" else ""
                raise InputError(f"{a} and {b} cannot be compared in one table: their data {key} differ{shown}")


def labelled(reports: Sequence[Report]) -> None:
    """Set the name of every report: the family, and the parts of its path that differ from others of the family."""
    for report in reports:
        path = report.checkpoint.path.split("/")
        twins = [r for r in reports if r.checkpoint.family == report.checkpoint.family]
        others = [r.checkpoint.path.split("/") for r in twins if r is not report]
        own = [part for k, part in enumerate(path) if any(k >= len(o) or o[k] != part for o in others)]
        report.name = report.checkpoint.family + (f" ({'/'.join(own)})" if own else "")


def condition_of(line: LikelihoodLine) -> str:
    """What the likelihood of a line is conditioned on: the class, the text, or nothing."""
    return line.made.get("given", "").split(",")[0]


def make_table(
    reports: list[Report], arrays: Sequence[Mapping[str, Tensor]], *, rank: str = "kind", command: str = "",
    failures: Sequence[tuple[str, str]] = (),
) -> Table:
    """The comparison of models evaluated on the same items.

    Arguments:
        reports: one for each model, from `Evaluation.run`; their names are set.
        arrays: those of each report, for paired differences.
        rank: `kind` ranks within each kind; `across` ranks all lines, with a note on the kinds that this mixes.
        command: that reproduces this table.
        failures: (path, message) of checkpoints that could not be evaluated.

    Raises:
        InputError: for models that were evaluated on different items.
    """
    same_items(reports)
    labelled(reports)
    lines = [(m, k, line) for m, report in enumerate(reports) for k, line in enumerate(report.likelihood)]
    ranking = _ranking(lines, arrays, rank)
    places = {r: place for group in ranking for place, ties in enumerate(group.order, 1) for r in ties}
    rows = _rows(reports, places)
    references = {(known.name, known.unit): known for report in reports for known in report.references}
    scale = next((report.scale for report in reports if report.scale), None)
    table = Table(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"), command=command,
        genmodels=reports[0].genmodels, data=reports[0].data, references=list(references.values()),
        scale=None if scale is None else replace(scale, network=scale.network["name"]),
        columns=COLUMNS, rows=rows, ranking=ranking, conclusions=conclusions(lines, reports), models=reports,
        failures=[Failure(path, message.removeprefix(f"{path}: ")) for path, message in failures],
        warnings=[f"{report.name}: {note}" for report in reports for note in report.warnings],
    )
    table.notes = _notes(table, rank)
    return table


def _rows(reports: list[Report], places: dict[int, int]) -> list[Row]:
    rows = []
    for m, report in enumerate(reports):
        checkpoint, sampling = report.checkpoint, report.sampling
        for k, line in enumerate(report.likelihood or [None]):
            number, first = len(rows), k == 0
            cells = [str(number + 1)]
            head = [report.name, f"{checkpoint.parameters:,}", str(checkpoint.step), checkpoint.weights]
            cells += head if first else [""] * len(head)
            if line is None:
                cells += [""] * 5
            else:
                shown, kind = in_words(plain(line))
                kind = kind.replace("unnormalised", "none")
                cells += [shown, UNITS[line.unit], kind, line.how, str(places.get(number, ""))]
            quality = [measured(*(getattr(report.fidelity, key + part, None) for part in ("", "_error")))
                       for key, _ in MEASURES]
            speed = ["", ""]
            if sampling:
                evaluations = sampling.evaluations
                speed = ["" if evaluations is None else f"{evaluations:g}", _rate(sampling.samples_per_second)]
            cells += quality + speed if first else [""] * 6
            rows.append(Row(m, None if line is None else k, first, cells, places.get(number)))
    return rows


def _rate(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def measured(value: float | None, error: float | None) -> str:
    """A value with its error in two digits, empty for None.

    Example:
        >>> measured(17.7981, 2.449), measured(0.00251, 0.00083), measured(70.3, 12.4), measured(1.0, 0.0)
        ('17.8(24)', '0.00251(83)', '70(12)', '1.000(0)')
    """
    digits = max(0, min(12, 1 - math.floor(math.log10(error)))) if error and math.isfinite(error) else 3
    return "" if value is None else with_error(value, error, digits)


def _ranking(lines: list, arrays: Sequence[Mapping[str, Tensor]], rank: str) -> list[Ranking]:
    """The best row of each model in order; ties differ by less than two paired standard errors, or a bracket of log Z.

    Rows are ranked within each kind and condition, because log p(x | y) is another quantity than log p(x).
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for number, (_, _, line) in enumerate(lines):
        if line.kind != "unnormalised" and line.value is not None:
            group = "across" if rank == "across" else line.kind
            groups.setdefault((group, condition_of(line)), []).append(number)
    ranking = []
    for (kind, given), members in groups.items():
        if len({lines[number][0] for number in members}) < 2:
            continue  # a single model is not ranked
        best: dict[int, int] = {}  # the best line of each model
        for number in sorted(members, key=lambda number: lines[number][2].value):
            best.setdefault(lines[number][0], number)
        members = list(best.values())
        order: list[list[int]] = []
        for number in members:
            if order and _tied(lines[order[-1][0]], lines[number], arrays):
                order[-1].append(number)
            else:
                order.append([number])
        ranking.append(Ranking(kind, given, lines[members[0]][2].unit, order))
    return ranking


def _tied(first: tuple, second: tuple, arrays: Sequence[Mapping[str, Tensor]]) -> bool:
    scale, one, other = _scale(first[2]), first[2], second[2]
    difference, error = paired(*(arrays[m][line.values] for m, _, line in (first, second)),
                               arrays[first[0]].get(f"dims_of_{one.values}"), of_text=one.unit in OF_TEXT)
    if one.bracket or other.bracket:  # of annealing, whose estimates may be further off than their errors say
        high = one.bracket.upper if one.bracket else one.value
        high = math.inf if high is None else high
        return (other.bracket.lower if other.bracket else other.value) - high <= two_errors(one.n) * error / scale
    shared = [(line.se_log_z or 0.0) for line in (one, other)]
    return abs(difference) / scale <= two_errors(one.n) * math.hypot(error / scale, *shared)


def _scale(line: LikelihoodLine) -> float:
    """Nats in one unit of a line's value."""
    return 1.0 if line.unit == "nats" or not line.value else -line.mean_nats / line.value


def conclusions(lines: list, reports: list[Report]) -> list[str]:
    """`a is better than b` for all pairs of models for which bounds imply it, with two standard errors on each side.

    If several lines of a pair imply it, the two with the largest difference are named.
    """
    found: dict[tuple[int, int], tuple[float, str]] = {}
    for m, _, a in lines:
        for other, _, b in lines:
            if m == other or a.unit != b.unit:
                continue
            upper, lower = side(a, 1), side(b, 0)
            if condition_of(a) != condition_of(b):  # p(x) >= p(x | y)/C bounds the value of the items alone
                if condition_of(b) or a.class_cost is None:
                    continue
                upper = None if upper is None else upper + a.class_cost
            if upper is not None and lower is not None and upper < lower:
                said = (f"{reports[m].name} is better than {reports[other].name}: at most {upper:.4f} against at "
                        f"least {lower:.4f} {UNITS[a.unit]} ({a.kind}, {b.kind})")
                found[m, other] = max(found.get((m, other), (0.0, "")), (lower - upper, said))
    return [said for _, said in found.values()]


def side(line: LikelihoodLine, which: int) -> float | None:
    """A bound on the true value from below (0) or above (1), with two standard errors; None if there is none."""
    value, error = line.value, line.se_data
    if value is not None and not which and line.bracket:
        value = line.bracket.lower  # includes the error of log Z: an estimate from few chains may err upwards
    if value is None or error is None or not _SIDES.get(line.kind, (False, False))[which]:
        return None
    if not which and "dequantisation" in line.made:  # integers may be likelier than their dequantised values say
        return None
    return value + two_errors(line.n) * error if which else value - two_errors(line.n) * error


def two_errors(n: int) -> float:
    """How many standard errors of n items are as improbable as two of a known normal error, by Student's distribution.

    Example:
        >>> f"{two_errors(10_000):.3f}, {two_errors(10):.3f}"
        '2.000, 2.320'
    """
    return float(stdtrit(n - 1, ndtr(2.0))) if n > 1 else math.inf


def _notes(table: Table, rank: str) -> list[str]:
    notes: list[str] = []
    rankings: list[str] = []  # of utterances, where a line may occur twice
    models = table.models
    for number, row in enumerate(table.rows, 1):
        report = models[row.model]
        if row.first and len(models) > 1:
            notes.append(f"{number}: {report.checkpoint.path}")
        if row.likelihood is not None:
            notes += [f"{number}: {note}" for note in _on_line(report.likelihood[row.likelihood])]
        if row.first:
            notes += [f"{number}: {note}" for note in _on_model(report)]
            rankings += [f"{number}: {note}" for note in audit_notes(report.audit)] if report.audit is not None else []
    for reference in table.references:
        if reference.unit != "nats" and reference.value is not None:
            value = f"{with_error(reference.value, reference.error)} {UNITS[reference.unit]}"
            notes.append(f"reference on {table.data.name}: {reference.name} {value}")
    notes += on_scale(table.scale)
    lines = [line for model in models for line in model.likelihood]
    kinds = {line.kind for line in lines}
    known = kinds - {"unnormalised"}
    if rank == "across" and table.ranking and len(known) > 1:
        notes += [f"ranks mix kinds: {kind} {ERRS[kind]}" for kind in sorted(known)]
    if len({condition_of(line) for line in lines if line.kind != "unnormalised"}) > 1:
        notes.append("values given the class are of another quantity, and ranked apart")
    if any(sum(group.kind in ("across", line.kind) for line in model.likelihood) > 1
           for group in table.ranking for model in models):
        notes.append("of several lines that are ranked together the best has the model's rank")
    if len(known) > 1 and rank != "across":
        notes.append("values of unlike kinds are not ranked: rank=across does it, and says how each may err")
    notes += [*table.conclusions, *(f"note: {warning}" for warning in table.warnings),
              *(f"failed: {failure.path}: {failure.message}" for failure in table.failures)]
    if "lower_bound" in kinds:
        notes.append("<= means: the true value is at most this")
    if "upper_bound" in kinds:
        notes.append(">= means: the true value is at least this")
    alone = {line.n for line in lines} == {1}
    notes.append("of one item: no errors" if alone else "in brackets: one standard error, in the last digits shown")
    return rankings + list(dict.fromkeys(notes))


def _on_line(line: LikelihoodLine) -> list[str]:
    if line.kind == "unnormalised":
        return [f"no likelihood: {line.reason}"]
    notes = []
    if "log_z" in line.made:
        notes.append(about_log_z(line.made))
    sides = line.bracket
    if sides is not None and sides.upper is not None:
        notes.append(f"by log Z alone {sides.lower:.4f} to {sides.upper:.4f}, at 95 %; its estimate is low in the "
                     "mean, which flatters the model")
    parts = line.parts_of_error
    if len(parts) > 1:
        notes.append(f"the error {line.se_data:.4f} combines, in squares, "
                     + ", ".join(f"{part:.4f} from {name}" if part else f"an unmeasurably small part from {name}"
                                 for name, part in parts.items()))
    if line.class_cost is not None and line.value is not None:
        at_most = "at most " if line.kind in ("exact", "lower_bound") else "at most about "
        notes.append(f"given the class; of items alone, classes drawn evenly, {at_most}"
                     f"{with_error(line.value + line.class_cost, line.se_data)} {UNITS[line.unit]}")
    if line.kl_gap is not None:
        bound = {"exact": "", "lower_bound": " at most"}.get(line.kind, " about")
        gap, error = line.gap
        error = "" if error is None else f" +- {error:.4f}"
        paired = " (paired with the true density on these items)" if line.kl_paired is not None else ""
        notes.append(f"exact entropy {line.entropy:.4f} nats: KL gap{bound} {gap:.4f}{error} nats{paired}")
    return notes


def about_log_z(made: dict) -> str:
    """The estimate of log Z in words: its value, error and bracket, and how it was computed.

    Example:
        >>> about_log_z({"estimate": "quadrature", "log_z": 1.25, "log_z_error": 1e-9})
        'log Z 1.2500 by quadrature'
        >>> made = {"estimate": "annealing", "log_z": 1.25, "log_z_stderr": 0.02, "ess": 40.2, "chains": 64,
        ...         "log_z_least": 1.1, "log_z_most": 1.5, "consistent": True, "note": "reverse, approximate"}
        >>> about_log_z(made)
        'log Z 1.25 +- 0.02, in 1.10 to 1.50 nats by annealing, 40 of 64 chains count (reverse, approximate)'
        >>> about_log_z(made | {"consistent": False, "note": "unreliable"})
        'log Z in 1.10 to 1.50 nats by annealing, 40 of 64 chains count (unreliable)'
    """
    if "log_z_stderr" not in made:
        return f"log Z {made['log_z']:.4f} by {made['estimate']}"
    most = "?" if made["log_z_most"] is None else f"{made['log_z_most']:.2f}"
    point = f" {made['log_z']:.2f} +- {made['log_z_stderr']:.2f}," if made["consistent"] else ""
    note = f" ({made['note']})" if made["note"] else ""
    bracket = f"in {made['log_z_least']:.2f} to {most} nats by {made['estimate']}"
    count = f"{made['ess']:.0f} of {made['chains']} chains count"
    return f"log Z{point} {bracket}, {count}{note}"


def _on_model(report: Report) -> list[str]:
    notes = []
    none = all(line.kind == "unnormalised" for line in report.likelihood)
    fidelity, sampling, checks = report.fidelity, report.sampling, report.checks
    if isinstance(fidelity, Skipped):
        notes.append(f"samples were not compared: {fidelity.skipped}")
    if report.speech is not None:
        notes += speech_notes(report.speech)
    notes += spoken_at_notes(report.spoken_at or [])
    if report.transcription is not None:
        notes.append(transcription_note(report.transcription))
    if isinstance(fidelity, Fidelity):
        notes.append(f"{fidelity.n} samples against as many held-out items; {fidelity.memorisation['said']}")
    guidance = report.samples.made.get("guidance") if report.samples else None
    if guidance is not None:
        notes.append(f"samples drawn with guidance {guidance:g}" + ("" if none else "; the likelihood is without it"))
    outside = report.samples and report.samples.outside
    if outside:
        leaves = "" if none else "; the likelihood leaves that mass out"
        share = f"{outside['share']:.3%} +- {outside['error']:.3%}"
        notes.append(f"{share} of the values of {outside['n']} samples lay outside the range of the levels and were "
                     f"moved to its ends{leaves}")
    classes = getattr(fidelity, "class_accuracy", None)
    if classes is not None:
        real = ""
        if classes["real"] is not None:
            real = f", of real items {classes['real']:.1%} {_range(classes['real_interval'])}"
        notes.append(f"samples classified as the requested class: {classes['accuracy']:.1%} "
                     f"{_range(classes['interval'])}{real}")
    classes = getattr(fidelity, "likelihood_accuracy", None)
    if classes is not None:
        notes.append(f"class of {items_of(report.data.split)} by p(y|x): {classes['accuracy']:.1%} of "
                     f"{classes['n']} right {_range(classes['interval'])}")
    if sampling:
        latency = sampling.latency
        peak = sampling.peak_memory
        memory = "" if peak is None else f", peak memory of the process {peak / 2**20:.0f} MiB"
        memory += "" if sampling.batch_size == _BATCH else f", samples/s in batches of {sampling.batch_size}"
        notes.append(f"one sample after {latency['p50']:.3f} s (95 %: {latency['p95']:.3f} s){memory}; "
                     f"{sampling.context}")
    if checks:
        named = {status: [check.name for check in checks if check.status == status]
                 for status in (FAILED, NOT_VERIFIED)}
        passed = sum(check.status == PASSED for check in checks)
        notes.append(", ".join([f"{passed} of {len(checks)} checks passed",
                                *(f"{status}: {', '.join(names)}" for status, names in named.items() if names)])
                     + (" (checks=full gives them more time)" if named[NOT_VERIFIED] else ""))
    notes += [entry.said for entry in report.ood]
    for sweep in report.sweeps:
        key = "kernel" if None in sweep.frechet else "frechet"
        measures = (getattr(sweep, key), getattr(sweep, f"{key}_error"))
        values = ", ".join(f"{at:g}: {measured(value, error)} ({_rate(each)}/s)" for at, value, error, each in zip(
            sweep.values, *measures, sweep.samples_per_second, strict=True))
        by = f"{sweep.key} ({sweep.sampler})" if sweep.sampler else sweep.key
        notes.append(f"{_DISTANCES[key]} by {by}, n = {sweep.n}: {values}")
    return notes


def _range(interval: Sequence[float]) -> str:
    low, high = interval
    return f"({low:.1%} to {high:.1%})"


def on_scale(scale: Scale | None) -> list[str]:
    """The distances of items that are not samples, at the same n, as a scale."""
    notes = []
    rows = {} if scale is None else scale.rows
    for key, name in _DISTANCES.items():
        values = [f"{measured(value, getattr(found, f'{key}_error'))} of {what}" for what, found in rows.items()
                  if (value := getattr(found, key)) is not None]
        if values:
            notes.append(f"{name} in features of {scale.network}, n = {scale.n} in each: {', '.join(values)}")
    return notes
