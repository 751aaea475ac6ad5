"""The final evaluation as loggers take it: a table of likelihoods, and single values under fixed names."""

from __future__ import annotations

import json
from typing import Any

COLUMNS = ["kind", "label", "value", "unit", "se_data", "se_mc", "items", "weights", "made"]
#: Where single values stand in a report, by the names they are logged under.
_SINGLE = {
    "frechet": ("fidelity", "frechet"), "kernel_distance": ("fidelity", "kernel"),
    "precision": ("fidelity", "precision"), "recall": ("fidelity", "recall"),
    "class_accuracy": ("fidelity", "class_accuracy", "accuracy"),
    "samples_per_second": ("sampling", "samples_per_second"), "evaluations": ("sampling", "evaluations"),
}  # fmt: skip


def rows_of(report: dict) -> list[list[Any]]:
    """A row of COLUMNS for every likelihood of a report, each with its kind, errors and recipe."""
    unit, weights = _unit(report), (report.get("checkpoint") or {}).get("weights")
    return [
        [row["kind"], row.get("label") or row["kind"], row.get(unit), unit, row.get("se_data"), row.get("se_mc"),
         row["n"], weights, json.dumps(row["made"])]
        for row in report.get("likelihood") or []
    ]  # fmt: skip


def values_of(report: dict) -> dict[str, float]:
    """Single values by name; of several likelihoods of one kind the first has its name alone, further ones a label.

    Example:
        >>> rows = [{"kind": "lower_bound", "nll": 1.5, "label": "K = 1"}, {"kind": "lower_bound", "nll": 1.4,
        ...         "label": "K = 8"}]
        >>> values_of({"data": {"levels": None}, "likelihood": rows, "fidelity": {"frechet": 0.1, "recall": None}})
        {'nll/lower_bound': 1.5, 'nll/lower_bound, K = 8': 1.4, 'frechet': 0.1}
    """
    unit, found = _unit(report), {}
    for row in report.get("likelihood") or []:
        name = f"{unit}/{row['kind']}"
        name = f"{name}, {row.get('label')}" if name in found else name
        if row.get(unit) is not None:
            found[name] = row[unit]
    for name, path in _SINGLE.items():
        value: Any = report
        for key in path:
            value = (value or {}).get(key)
        if value is not None:
            found[name] = value
    return found


def as_markdown(report: dict) -> str:
    """The rows as a table of Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows_of(report)]
    cells = [["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in line]
             for line in lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def _unit(report: dict) -> str:
    return "nll" if report["data"]["levels"] is None else "bits_per_dim"
