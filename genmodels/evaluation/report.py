"""The report of an evaluation: report.json with its arrays, and descriptions of its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from genmodels.core.files import write_whole


def report_target(checkpoint: Path, out: str | None, several: bool, split: str = "test", limit: int | None = None):
    """Where a report goes: `out`, or report.json in the folder of the checkpoint, named for what is not the default."""
    if out is not None and not several:
        return Path(out)
    words = [w for w, usual in ((checkpoint.stem, "best"), (split, "test")) if w != usual]
    name = "_".join(["report", *words, *([] if limit is None else [f"first{limit}"])]) + ".json"
    folder = checkpoint.parent if out is None else Path(out) / checkpoint.parent.name
    return folder / name


def arrays_target(target: Path) -> Path:
    """Where the arrays of a report go: to the same folder.

    Example:
        >>> str(arrays_target(Path("runs/a/report.json")))
        'runs/a/report.npz'
    """
    return target.with_suffix(".npz")


def write_arrays(arrays: Mapping[str, Tensor], target: Path) -> None:
    """Write the arrays of a report whole: per-example likelihoods, samples, densities."""
    plain = {name: value.numpy() for name, value in arrays.items()}
    write_whole(target, lambda file: np.savez_compressed(file, **plain))


def write_report(report: dict, target: Path) -> None:
    """Write report.json whole; numbers that are not finite become null."""
    text = json.dumps(plain(report), indent=1, allow_nan=False)
    write_whole(target, lambda file: file.write(text + "\n"), mode="w")


def plain(value):
    """The same of dictionaries with text keys, lists, and numbers that JSON knows; others become None.

    Example:
        >>> plain({1: (float("nan"), 2.0)})
        {'1': [None, 2.0]}
    """
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def about_log_z(made: dict) -> str:
    """What is known of the constant of an energy, in words: one statement, whose bracket holds the estimate.

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


def parts_of_error(line: dict) -> dict[str, float]:
    """What the standard error of a line is made of, as far as it is known: the squares of the parts add up.

    Example:
        >>> parts_of_error({"se_data": 0.5, "se_items": 0.4, "se_mc": 0.3})
        {'the items': 0.4, 'the draws': 0.3}
    """
    names = {"se_items": "the items", "se_mc": "the draws", "se_log_z": "log Z"}
    return {name: line[key] for key, name in names.items() if line.get(key) is not None}


def gap_of(line: dict) -> tuple[float | None, float | None]:
    """The KL gap to the true density and its standard error: paired item by item where that density is known."""
    if "kl_paired" in line:
        return line["kl_paired"], line["se_gap"]
    return line.get("kl_gap"), line.get("se_data")
