"""Checks: what a check measures, its result, the set it belongs to, and the report on one object."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, SupportsFloat

from genmodels.core.errors import InputError, at_least, hint, progress_bar, with_class

PASSED, FAILED, NOT_APPLICABLE, NOT_VERIFIED = "passed", "failed", "not applicable", "not verified"
#: Note of a check that was skipped.
NO_TIME = "no time was left: checks=full lifts the limit"


class NotApplicable(Exception):
    """Raised by a check that does not apply to the object; the message is the reason."""


class NotVerified(Exception):
    """Raised by a check that applies but cannot be decided, or whose error is a warning; the message is the reason.

    Arguments:
        reason: the message.
        error: the measured error, if any.
    """

    def __init__(self, reason: str, error: float | None = None):
        super().__init__(reason)
        self.error = error


class CheckFailed(AssertionError):
    """Raised by `Report.raise_if_failed`; the message is the table of failures."""


@dataclass(frozen=True)
class Measured:
    """The measurement of a check.

    Arguments:
        error: the deviation; NaN fails.
        note: where the error was found, or how.
        tolerance: the largest error that passes, where it depends on the object.
    """

    error: float
    note: str = ""
    tolerance: float | None = None


def largest(values: Iterable[SupportsFloat]) -> float:
    """The largest of several errors, NaN if one of them is; Python's `max` may lose it.

    Example:
        >>> largest([1.0, math.nan, 2.0]), largest([1.0, 2.0])
        (nan, 2.0)
    """
    found = [float(value) for value in values]
    return math.nan if any(map(math.isnan, found)) else max(found)


@dataclass(frozen=True)
class CheckSpec:
    """A statement about an object, and the measurement of its error.

    Arguments:
        name: its name in tables.
        tolerance: the largest error that passes; 0 for statements that hold exactly.
        statement: what is checked, in one line.
        measure: `measure(subject) -> Measured`; raises `NotApplicable` or `NotVerified` with a reason.
    """

    name: str
    tolerance: float
    statement: str
    measure: Callable[[Any], Measured]


@dataclass(frozen=True)
class Check:
    """The result of one check on one object.

    Arguments:
        name: name of the check.
        status: `passed`, `failed`, `not applicable` or `not verified`.
        error: the measured error; None without a measurement, inf where the object raised an error.
        tolerance: the largest error that passes.
        note: where the error was found, or why there is none.
        seconds: duration.
    """

    name: str
    status: str
    error: float | None
    tolerance: float
    note: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the error is above the tolerance."""
        return self.status == FAILED

    def row(self) -> list[str]:
        """The cells of a table; what needs attention is in capitals."""
        measured = self.error is not None
        status = self.status.upper() if self.status in (FAILED, NOT_VERIFIED) else self.status
        return [self.name, status, f"{self.error:.1e}" if measured else "", f"{self.tolerance:g}" if measured else "",
                self.note]

    def to_dict(self) -> dict:
        """Plain types only; an error that is not finite becomes None, with a remark in the note.

        Example:
            >>> Check("round trip", FAILED, math.inf, 1e-10, "forward first").to_dict()["note"]
            'forward first, not finite'
        """
        found = asdict(self) | {"seconds": round(self.seconds, 4)}
        if self.error is not None and not math.isfinite(self.error):
            found |= {"error": None, "note": f"{self.note}, not finite" if self.note else "not finite"}
        return found


@dataclass(frozen=True)
class Report:
    """The checks of one object.

    Arguments:
        subject: description of the object.
        checks: their results.

    Example:
        >>> report = Report("Flip (3,)", (Check("round trip", PASSED, 0.0, 1e-10), ))
        >>> report.passed, report.failed
        (True, [])
        >>> print(report)
        Flip (3,): 1 passed
        check       status  error    tolerance
        round trip  passed  0.0e+00  1e-10
    """

    subject: str
    checks: tuple[Check, ...] = field(default=())

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check.name for check in self.checks if check.failed]

    @property
    def unverified(self) -> list[str]:
        """The names of the checks that apply but could not be decided."""
        return [check.name for check in self.checks if check.status == NOT_VERIFIED]

    @property
    def passed(self) -> bool:
        """Whether every check that applies passed."""
        return not self.failed and not self.unverified

    def __getitem__(self, name: str) -> Check:
        named = {check.name: check for check in self.checks}
        if name not in named:
            raise KeyError(f"there is no check {name!r}:{hint(name, named, '')} the checks are {', '.join(named)}")
        return named[name]

    def raise_if_failed(self) -> Report:
        """Return self, or raise `CheckFailed` with the table of the checks that failed or were not verified."""
        if self.passed:
            return self
        rows = [check.row() for check in self.checks if check.status in (FAILED, NOT_VERIFIED)]
        raise CheckFailed(f"{self.headline()}\n{table(rows)}")

    def headline(self) -> str:
        """The subject and the number of checks of each status."""
        counts = {status: sum(check.status == status for check in self.checks)
                  for status in (FAILED, NOT_VERIFIED, PASSED, NOT_APPLICABLE)}
        shown = [f"{count} {status}" for status, count in counts.items() if count or status == PASSED]
        return f"{self.subject}: {', '.join(shown)}"

    def __str__(self) -> str:
        return f"{self.headline()}\n{table([check.row() for check in self.checks])}"

    def to_dict(self) -> dict:
        """Plain types only."""
        return {"subject": self.subject, "passed": self.passed, "checks": [check.to_dict() for check in self.checks]}


def table(
    rows: Sequence[Sequence[str]], header: Sequence[str] = ("check", "status", "error", "tolerance", ""), *,
    rule: bool = False,
) -> str:  # fmt: skip
    """Rows as aligned text, with a `rule` below the header; columns that hold nothing are left out.

    Example:
        >>> print(table([["a", "", "1"], ["bb", "", "2"]], ["x", "y", "z"]))
        x   z
        a   1
        bb  2
    """
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in used] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    lines[1:1] = [["-" * width for width in widths]] if rule else []
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


class CheckSet:
    """An ordered set of checks, to which functions are added by a decorator.

    Arguments:
        parts: sets whose checks come first.

    Example:
        >>> checks = CheckSet()
        >>> @checks.add("positive", 0.0, "the number is not negative")
        ... def positive(number):
        ...     return Measured(max(0.0, -number))
        >>> [check.status for check in checks.run(-3.0)]
        ['failed']
    """

    def __init__(self, *parts: CheckSet):
        self.specs: dict[str, CheckSpec] = {name: spec for part in parts for name, spec in part.specs.items()}

    def add(self, name: str, tolerance: float, statement: str) -> Callable:
        """Decorator: add the function as the measurement of that check."""

        def join(measure: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
            self.specs[name] = CheckSpec(name, tolerance, statement, measure)
            return measure

        return join

    def choose(self, only: Iterable[str] | None = None, without: Iterable[str] = ()) -> list[CheckSpec]:
        """The checks of these names, by default all, in order; ValueError for an unknown name or for none."""
        only, without = list(self.specs if only is None else only), list(without)
        self.require(only + without)
        chosen = [spec for spec in self.specs.values() if spec.name in only and spec.name not in without]
        if not chosen:
            raise ValueError(f"no check is left to run: the checks are {', '.join(self.specs)}")
        return chosen

    def require(self, names: Iterable[str]) -> None:
        """Raise ValueError for a name that is no check."""
        for name in names:
            if name not in self.specs:
                raise ValueError(f"there is no check {name!r}:{hint(name, self.specs, '')} "
                                 f"the checks are {', '.join(self.specs)}")

    def run(
        self, subject: Any, specs: Iterable[CheckSpec] | None = None, tolerances: Mapping[str, float] | None = None,
        watch: Callable[[CheckSpec], None] | None = None,
    ) -> Iterator[Check]:
        """The result of each check, one after the other; `watch` is called before each.

        The subject's tensors are restored after every check, so that an object that modifies its inputs in one check
        does not affect the next.
        """
        given = dict(tolerances or {})
        self.require(given)
        tensors = [value for value in getattr(subject, "__dict__", {}).values() if hasattr(value, "copy_")]
        kept = [value.clone() for value in tensors]
        for spec in self.specs.values() if specs is None else specs:
            if watch is not None:
                watch(spec)
            yield run_check(spec, subject, given.get(spec.name, spec.tolerance))
            for value, before in zip(tensors, kept, strict=True):
                value.data.copy_(before)


def run_check(spec: CheckSpec, subject: Any, tolerance: float | None = None) -> Check:
    """One check on one object, which fails if it raises an error.

    Raises:
        MemoryError, RuntimeError: where memory ran out, which is no failure of the object.
    """
    start = time.perf_counter()
    tolerance = spec.tolerance if tolerance is None else tolerance
    try:
        found = spec.measure(subject)
        tolerance = tolerance if found.tolerance is None else found.tolerance
        status = PASSED if found.error <= tolerance else FAILED  # NaN fails
        error, note = found.error, found.note
    except NotApplicable as reason:
        status, error, note = NOT_APPLICABLE, None, str(reason)
    except NotVerified as reason:
        status, error, note = NOT_VERIFIED, reason.error, str(reason)
    except MemoryError:
        raise
    except Exception as raised:
        if "out of memory" in str(raised):
            raise
        status, error = FAILED, math.inf
        note = f"raised {with_class(raised)}"
    return Check(spec.name, status, error, tolerance, note, time.perf_counter() - start)


@dataclass
class Findings:
    """The reports on one model.

    Arguments:
        wholes: reports on the flow and on each of its bijections as a whole.
        layers: reports on single layers, by group of layers that are alike: the names of the group, and a report on
            each layer of it that was checked.
    """

    wholes: list[Report] = field(default_factory=list)
    layers: list[tuple[list[str], list[Report]]] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """Every report."""
        return [*self.wholes, *(report for _, reports in self.layers for report in reports)]

    @property
    def failed(self) -> list[str]:
        """`check (subject)` for every check that failed."""
        return [f"{name} ({report.subject})" for report in self.reports for name in report.failed]

    @property
    def unverified(self) -> list[str]:
        """`check (subject)` for every check that applies but could not be decided."""
        return [f"{name} ({report.subject})" for report in self.reports for name in report.unverified]

    @property
    def passed(self) -> bool:
        """Whether every check that applies passed."""
        return all(report.passed for report in self.reports)

    def text(self, verbose: bool = False) -> str:
        """The tables: wholes check by check, layers group by group, what failed in full."""
        parts = [str(report) if verbose else applied(report) for report in self.wholes]
        if verbose:
            parts += [str(report) for _, reports in self.layers for report in reports]
        elif self.layers:
            rows = [_group_row(names, reports) for names, reports in self.layers]
            parts.append(table(rows, ("layer", "event", "Jacobian", "alike", "result", "closest to its tolerance")))
            parts += [applied(report, only_failures=True) for _, reports in self.layers for report in reports
                      if not report.passed]
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict:
        """Plain types only."""
        layers = [{"alike": names, "reports": [r.to_dict() for r in reports]} for names, reports in self.layers]
        return {"passed": self.passed, "wholes": [r.to_dict() for r in self.wholes], "layers": layers}


def applied(report: Report, only_failures: bool = False) -> str:
    """The table of a report without the checks that do not apply (but with Jacobians that were left out)."""
    shown = [check.row() for check in report.checks
             if check.status in (FAILED, NOT_VERIFIED)
             or (not only_failures and (check.error is not None or check.name == "log-det forward"))]
    return f"{report.headline()}\n{table(shown)}"


def summary(reports: Sequence[Report]) -> tuple[str, str]:
    """The result of several reports in a few words, and which check came closest to its tolerance.

    Example:
        >>> summary([Report("Flip (3,)", (Check("a", PASSED, 1e-12, 1e-10), Check("b", FAILED, 2.0, 1.0)))])
        ('FAILED: b', 'b 2e+00 of 1')
    """
    checks = [check for report in reports for check in report.checks]
    named = {status: sorted({check.name for check in checks if check.status == status})
             for status in (FAILED, NOT_VERIFIED)}
    measured = [check for check in checks if check.error is not None]
    near = max((c for c in measured if c.tolerance > 0), key=lambda c: c.error / c.tolerance, default=None)
    result = ", ".join(f"{status.upper()}: {', '.join(names)}" for status, names in named.items() if names)
    closest = "" if near is None else f"{near.name} {near.error:.0e} of {near.tolerance:g}"
    return result or f"{len({check.name for check in measured})} passed", closest


def _group_row(names: list[str], reports: list[Report]) -> list[str]:
    kind, _, event = reports[0].subject.partition(" ")[2].partition(" ")
    logdet = next((check for check in reports[0].checks if check.name == "log-det forward"), None)
    cropped = re.match(r"at (\(.*?\))", logdet.note) if logdet else None
    jacobian = "none" if logdet is None or logdet.error is None else cropped[1] if cropped else "whole"
    return [f"{names[0]} {kind}", event, jacobian, str(len(names)), *summary(reports)]


@contextmanager
def counting(total: int, shown: bool, unit: str = "check") -> Iterator[Callable[[CheckSpec | str], None]]:
    """A progress bar over checks, to be called before each of them; shown after half a second."""
    with progress_bar(total=total, desc="verifying", unit=unit, disable=not shown, delay=0.5) as bar:

        def watch(check: CheckSpec | str) -> None:
            bar.set_postfix_str(check if isinstance(check, str) else check.name, refresh=False)
            bar.update()

        yield watch


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model or a layer is checked.

    Arguments:
        randomise: whether the parameters are moved at random (then the model is initialised on `initial`).
        max_dims: largest event of which the Jacobian of every row is computed, whatever it costs.
        patience: seconds that one Jacobian of a larger event may take.
        compiler: backend of torch.compile, None for none.
        seed: seed of all random numbers.
        progress: whether a bar is shown.
    """

    randomise: bool
    max_dims: int = 256
    patience: float = 60.0
    compiler: str | None = "aot_eager"
    seed: int = 0
    progress: bool = True

    def __post_init__(self):
        at_least(1, max_dims=self.max_dims)
        if not self.patience > 0:
            raise InputError(f"patience must be positive, got {self.patience}")
