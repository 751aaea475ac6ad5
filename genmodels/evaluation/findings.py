"""What the laws found of a whole model: reports on it, on its parts and on their layers, and their tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

from genmodels.evaluation.laws import FAILED, NOT_PROVEN, Law, Report, table


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
