"""The report of an evaluation: report.json, and its table for the terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path

from genmodels.training.archive import write_whole


def report_target(checkpoint: Path, out: str | None, several: bool, split: str = "test", limit: int | None = None):
    """Where a report goes: `out`, or report.json beside the checkpoint, its name telling what is not the default."""
    if out is not None and not several:
        return Path(out)
    words = [w for w, usual in ((checkpoint.stem, "best"), (split, "test")) if w != usual]
    name = "_".join(["report", *words, *([] if limit is None else [f"first{limit}"])]) + ".json"
    folder = checkpoint.parent if out is None else Path(out) / checkpoint.parent.name
    return folder / name


def write_report(report: dict, target: Path) -> None:
    """Write report.json whole; numbers that are not finite become null."""
    text = json.dumps(_plain(report), indent=1, allow_nan=False)
    write_whole(target, lambda file: file.write(text + "\n"), mode="w")


def _plain(value):
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A value with its standard error in the last digits.

    Example:
        >>> with_error(2.12342, 0.0123)
        '2.1234(123)'
        >>> with_error(2.5, None), with_error(None, 0.1)
        ('2.5000', 'not finite')
    """
    if value is None:
        return "not finite"
    shown = f"{value:.{digits}f}"
    return shown if error is None else f"{shown}({round(error * 10**digits)})"


def about_log_z(made: dict) -> str:
    """What is known of the constant of an energy, in words.

    Example:
        >>> about_log_z({"estimate": "quadrature", "log_z": 1.25, "log_z_error": 1e-9})
        'log Z 1.2500 by quadrature'
        >>> about_log_z({"estimate": "annealing", "log_z": 1.25, "log_z_stderr": 0.02, "ess": 40.2, "chains": 64,
        ...              "log_z_lower": 1.1, "log_z_upper": 1.5, "note": "unreliable"})
        'log Z 1.25 +- 0.02 between 1.10 and 1.50 nats by annealing, 40 of 64 chains count (unreliable)'
    """
    if "log_z_stderr" not in made:
        return f"log Z {made['log_z']:.4f} by {made['estimate']}"
    upper = "?" if made["log_z_upper"] is None else f"{made['log_z_upper']:.2f}"
    note = f" ({made['note']})" if made["note"] else ""
    bracket = f"between {made['log_z_lower']:.2f} and {upper} nats by {made['estimate']}"
    count = f"{made['ess']:.0f} of {made['chains']} chains count"
    return f"log Z {made['log_z']:.2f} +- {made['log_z_stderr']:.2f} {bracket}, {count}{note}"


def table(reports: list[dict]) -> str:
    """The likelihoods as a table for the terminal, with the references below."""
    lines = [["", "model", "data", "parameters", "step", "value", "unit", "kind", "how", "seconds"]]
    notes: dict[str, None] = {}
    for report in reports:
        checkpoint, data = report["checkpoint"], report["data"]
        for entry in report["likelihood"]:
            bits = data["levels"] is not None
            none = entry["kind"] == "unnormalised"
            value = entry.get("bits_per_dim") if bits else entry.get("nll")
            made = entry["made"]
            how = f"{made.get('draws', 'all')} of {made['terms']} terms" if "terms" in made else ""
            how = f"K = {made['importance_samples']}, {made['dequantisation']}" if "importance_samples" in made else how
            how += f" given the {made['given']}" if "given" in made else ""
            number = f"{len(lines)}"
            lines.append([
                number,
                f"{checkpoint['family']} ({checkpoint['weights']})",
                f"{data['name']}/{data['split']} ({data['items']})",
                f"{checkpoint['parameters']:,}",
                str(checkpoint["step"]),
                "none" if none else f"{entry['mark']} {with_error(value, entry.get('se_data'))}",
                "bits/dim" if bits else "nats",
                entry["kind"],
                how,
                f"{entry.get('seconds', report['seconds']['likelihood']):.0f}",
            ])
            if len(reports) > 1:
                notes[f"{number}: {checkpoint['path']}"] = None
            if none:
                notes[f"{number}: no likelihood: {entry['reason']}"] = None
            elif "log_z" in made:
                notes[f"{number}: {about_log_z(made)}"] = None
            if entry.get("se_mc") is not None:
                notes[f"{number}: of the error, {entry['se_mc']:.4f} comes from the draws alone"] = None
            if entry.get("kl_gap") is not None:
                bound = {"exact": "", "lower_bound": " at most"}.get(entry["kind"], " about")
                exact, gap = f"exact entropy {entry['entropy']:.4f} nats", f"KL gap{bound} {entry['kl_gap']:.4f} nats"
                notes[f"{number}: {exact}: {gap}"] = None
        for reference in report["references"]:
            if reference["unit"] == "bits_per_dim" and reference["value"] is not None:
                notes[f"reference on {data['name']}: {reference['name']} {reference['value']:.4f} bits/dim"] = None
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    rule = "  ".join("-" * w for w in widths)
    bounds = any(" <= " in row for row in rows)
    legend = ["<= means: the true value is at most this"] if bounds else []
    legend.append("in brackets: one standard error over the items, in the last digits shown")
    return "\n".join([rows[0], rule, *rows[1:], *notes, *legend])
