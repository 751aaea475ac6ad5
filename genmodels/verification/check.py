"""Laws and verdicts, whatever is judged: a law measures an error, the verdict says whether it is small enough."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from genmodels.core.errors import RunError, nearest

PASSED, FAILED, NOT_APPLICABLE, NOT_PROVEN = "passed", "FAILED", "not applicable", "NOT PROVEN"


class NotApplicable(Exception):
    """Raised by a law that has nothing to say of a subject; the message is the reason."""


class NotProven(Exception):
    """Raised by a law that ought to speak of a subject and cannot; the message is the reason."""


class LawBroken(AssertionError):
    """Raised by `Report.raise_if_failed`; the message is the table of failures."""


@dataclass(frozen=True)
class Measured:
    """What a law found: its error, and where or how."""

    error: float
    note: str = ""


@dataclass(frozen=True)
class Law:
    """A statement that can be measured.

    Arguments:
        name: what it is called in tables.
        tolerance: the largest error that passes; 0 for laws that hold exactly.
        statement: the law in a line.
        measure: `measure(subject) -> Measured`; raises `NotApplicable` or `NotProven` with a reason.
    """

    name: str
    tolerance: float
    statement: str
    measure: Callable[[Any], Measured]


@dataclass(frozen=True)
class Verdict:
    """One law on one subject.

    Arguments:
        law: its name.
        status: `passed`, `FAILED`, `not applicable` or `NOT PROVEN`.
        error: what was measured; None where nothing was, inf where the subject raised an error.
        tolerance: what would have passed.
        note: where the error was found, or why the law does not apply.
        seconds: how long it took.
    """

    law: str
    status: str
    error: float | None
    tolerance: float
    note: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the law is broken."""
        return self.status == FAILED

    def row(self) -> list[str]:
        """The cells of a table."""
        known = self.error is not None
        return [self.law, self.status, f"{self.error:.1e}" if known else "", f"{self.tolerance:g}" if known else "",
                self.note]


@dataclass(frozen=True)
class Report:
    """The verdicts on one subject.

    Arguments:
        subject: what was judged, in words.
        verdicts: one for each law.

    Example:
        >>> report = Report("Flip (3,)", (Verdict("round trip", PASSED, 0.0, 1e-10), ))
        >>> report.passed, report.broken
        (True, [])
        >>> print(report)
        Flip (3,): 1 law holds
        law         verdict  error    tolerance
        round trip  passed   0.0e+00  1e-10
    """

    subject: str
    verdicts: tuple[Verdict, ...] = field(default=())

    @property
    def failures(self) -> list[Verdict]:
        """The verdicts on laws that are broken."""
        return [verdict for verdict in self.verdicts if verdict.failed]

    @property
    def broken(self) -> list[str]:
        """The names of the laws that are broken."""
        return [verdict.law for verdict in self.failures]

    @property
    def unproven(self) -> list[str]:
        """The names of the laws that could not be judged, though they apply."""
        return [verdict.law for verdict in self.verdicts if verdict.status == NOT_PROVEN]

    @property
    def passed(self) -> bool:
        """Whether every law that applies was judged, and holds."""
        return not self.failures and not self.unproven

    @property
    def seconds(self) -> float:
        """How long all the laws took."""
        return sum(verdict.seconds for verdict in self.verdicts)

    def __getitem__(self, law: str) -> Verdict:
        return next(verdict for verdict in self.verdicts if verdict.law == law)

    def raise_if_failed(self) -> Report:
        """Return self, or raise `LawBroken` with the table of the laws that are broken or could not be judged."""
        if self.passed:
            return self
        rows = [verdict.row() for verdict in self.verdicts if verdict.status in (FAILED, NOT_PROVEN)]
        raise LawBroken(f"{self.headline()}\n{table(rows)}")

    def headline(self) -> str:
        """The subject and how many laws hold."""
        held = sum(verdict.status == PASSED for verdict in self.verdicts)
        silent = sum(verdict.status == NOT_APPLICABLE for verdict in self.verdicts)
        parts = [f"{_laws(len(self.failures))} broken"] if self.failures else []
        parts += [f"{len(self.unproven)} NOT PROVEN"] if self.unproven else []
        parts += [f"{_laws(held)} {'holds' if held == 1 else 'hold'}"]
        parts += [f"{silent} not applicable"] if silent else []
        return f"{self.subject}: {', '.join(parts)}"

    def __str__(self) -> str:
        return f"{self.headline()}\n{table([verdict.row() for verdict in self.verdicts])}"

    def to_dict(self) -> dict:
        """Plain types only; an error that is no finite number becomes None."""
        return {"subject": self.subject, "passed": self.passed, "laws": [
            {"law": v.law, "status": v.status.lower(), "tolerance": v.tolerance, "note": v.note,
             "error": v.error if v.error is not None and math.isfinite(v.error) else None,
             "seconds": round(v.seconds, 4)}
            for v in self.verdicts
        ]}


def _laws(number: int) -> str:
    return f"{number} law{'' if number == 1 else 's'}"


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ("law", "verdict", "error", "tolerance", "")) -> str:
    """Rows as aligned text; columns that hold nothing are left out.

    Example:
        >>> print(table([["a", "", "1"], ["bb", "", "2"]], ["x", "y", "z"]))
        x   z
        a   1
        bb  2
    """
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in used] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


class Laws:
    """A set of laws in the order in which they are told; functions join it as decorated.

    Example:
        >>> laws = Laws()
        >>> @laws.add("positive", 0.0, "the number is not negative")
        ... def positive(number):
        ...     return Measured(max(0.0, -number))
        >>> [verdict.status for verdict in laws.judge(-3.0)]
        ['FAILED']
    """

    def __init__(self):
        self.laws: dict[str, Law] = {}

    def add(self, name: str, tolerance: float, statement: str) -> Callable:
        """Decorator: the function measures the law of that name."""

        def join(measure: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
            self.laws[name] = Law(name, tolerance, statement, measure)
            return measure

        return join

    def choose(self, only: Iterable[str] | None = None, without: Iterable[str] = ()) -> list[Law]:
        """The laws of these names, all of them by default, in the set's order.

        Raises:
            ValueError: for a law that does not exist.
        """
        for name in (*(only or ()), *without):
            if name not in self.laws:
                near = nearest(name, self.laws)
                raise ValueError(f"there is no law {name!r}:{f' did you mean {near!r}?' if near else ''} "
                                 f"the laws are {', '.join(self.laws)}")
        chosen = set(self.laws if only is None else only) - set(without)
        return [law for law in self.laws.values() if law.name in chosen]

    def judge(
        self, subject: Any, laws: Iterable[Law] | None = None, tolerances: Mapping[str, float] | None = None,
        watch: Callable[[Law], None] | None = None,
    ) -> Iterator[Verdict]:
        """The verdict of each law, one after the other; `watch` is called before each.

        Every law meets the subject's tensors as they were: inputs that one law has let the subject spoil would hide
        from the next what it does to them.
        """
        given = dict(tolerances or {})
        self.choose(given)
        tensors = [value for value in getattr(subject, "__dict__", {}).values() if hasattr(value, "copy_")]
        kept = [value.clone() for value in tensors]
        for law in self.laws.values() if laws is None else laws:
            if watch is not None:
                watch(law)
            yield judge(law, subject, given.get(law.name, law.tolerance))
            for value, before in zip(tensors, kept, strict=True):
                value.data.copy_(before)


def judge(law: Law, subject: Any, tolerance: float) -> Verdict:
    """One law on one subject; a subject that raises an error breaks the law."""
    start = time.perf_counter()
    try:
        found = law.measure(subject)
        # Not `error > tolerance`: NaN must fail.
        status = PASSED if found.error <= tolerance else FAILED
        error, note = found.error, found.note
    except NotApplicable as reason:
        status, error, note = NOT_APPLICABLE, None, str(reason)
    except NotProven as reason:
        status, error, note = NOT_PROVEN, None, str(reason)
    except (MemoryError, RunError):
        raise
    except Exception as raised:
        if "out of memory" in str(raised):
            raise  # says something of the machine, nothing of the subject
        status, error = FAILED, math.inf
        lines = [line.strip() for line in str(raised).splitlines() if line.strip()] or [""]
        note = f"raised {type(raised).__name__}: {lines[0][:160]}"
    return Verdict(law.name, status, error, tolerance, note, time.perf_counter() - start)


@dataclass
class Findings:
    """All that was found of one model.

    Arguments:
        wholes: reports on the flow and on each of its bijections as a whole.
        layers: reports on single layers, by group of layers that are alike: the names of the group, and a report each
            for those of them that were judged.
    """

    wholes: list[Report] = field(default_factory=list)
    layers: list[tuple[list[str], list[Report]]] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """Every report."""
        return [*self.wholes, *(report for _, reports in self.layers for report in reports)]

    @property
    def failures(self) -> list[str]:
        """`law (subject)` for every law that is broken."""
        return [f"{law} ({report.subject})" for report in self.reports for law in report.broken]

    @property
    def unproven(self) -> list[str]:
        """`law (subject)` for every law that could not be judged, though it applies."""
        return [f"{law} ({report.subject})" for report in self.reports for law in report.unproven]

    @property
    def passed(self) -> bool:
        """Whether every law that applies was judged, and holds."""
        return not self.failures and not self.unproven

    def text(self, verbose: bool = False) -> str:
        """The verdict tables: wholes law by law, layers group by group, what failed in full."""
        parts = [str(report) if verbose else applied(report) for report in self.wholes]
        if verbose:
            parts += [str(report) for _, reports in self.layers for report in reports]
        elif self.layers:
            rows = [_group_row(names, reports) for names, reports in self.layers]
            parts.append(table(rows, ("layer", "event", "Jacobian", "alike", "verdict", "closest to its tolerance")))
            parts += [applied(report, only_failures=True) for _, reports in self.layers for report in reports
                      if not report.passed]
        return "\n\n".join(parts)

    def to_dict(self) -> dict:
        """Plain types only."""
        layers = [{"alike": names, "reports": [r.to_dict() for r in reports]} for names, reports in self.layers]
        return {"passed": self.passed, "wholes": [r.to_dict() for r in self.wholes], "layers": layers}


def applied(report: Report, only_failures: bool = False) -> str:
    """The table of a report without the laws that do not apply (but with Jacobians that were left out)."""
    shown = [v.row() for v in report.verdicts
             if v.failed or v.status == NOT_PROVEN
             or (not only_failures and (v.error is not None or v.law == "log-det forward"))]
    return f"{report.headline()}\n{table(shown)}"


def _group_row(names: list[str], reports: list[Report]) -> list[str]:
    verdicts = [verdict for report in reports for verdict in report.verdicts if verdict.error is not None]
    broken = sorted({law for report in reports for law in report.broken})
    near = max((v for v in verdicts if v.tolerance > 0), key=lambda v: v.error / v.tolerance, default=None)
    kind, _, event = reports[0].subject.partition(" ")[2].partition(" ")
    unproven = sorted({law for report in reports for law in report.unproven})
    told = [f"{status}: {', '.join(laws)}" for status, laws in ((FAILED, broken), (NOT_PROVEN, unproven)) if laws]
    verdict = ", ".join(told) or f"{len({v.law for v in verdicts})} laws hold"
    truth = next((v for v in reports[0].verdicts if v.law == "log-det forward"), None)
    cropped = re.match(r"at (\(.*?\))", truth.note) if truth else None
    jacobian = "none" if truth is None or truth.error is None else cropped[1] if cropped else "whole"
    closest = "" if near is None else f"{near.law} {near.error:.0e} of {near.tolerance:g}"
    return [f"{names[0]} {kind}", event, jacobian, str(len(names)), verdict, closest]


@contextmanager
def counting(total: int, shown: bool, unit: str = "law") -> Iterator[Callable[[Law | str], None]]:
    """A progress bar over laws, to be told of each before it is judged; nothing is shown of what ends at once."""
    interval = 0.1 if sys.stderr.isatty() else 10
    with tqdm(total=total, desc="verifying", unit=unit, disable=not shown, delay=0.5, mininterval=interval) as bar:

        def watch(law: Law | str) -> None:
            bar.set_postfix_str(law if isinstance(law, str) else law.name, refresh=False)
            bar.update()

        yield watch


@dataclass(frozen=True)
class Options:
    """How to go about a proof.

    Arguments:
        randomise: whether the parameters are moved at random (then the model is initialised on `initial`).
        max_dims: largest event of which a Jacobian is made of every row, whatever it costs.
        patience: seconds that one Jacobian of a larger event may take.
        compiler: backend of torch.compile, None for none.
        seed: seed of everything drawn.
        progress: whether a bar is shown.
    """

    randomise: bool
    max_dims: int = 256
    patience: float = 60.0
    compiler: str | None = "aot_eager"
    seed: int = 0
    progress: bool = True
