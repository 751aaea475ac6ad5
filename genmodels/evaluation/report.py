"""The report of an evaluation: what its stages found, report.json with its arrays, and descriptions of its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from genmodels.core.files import write_whole


@dataclass
class CheckpointFacts:
    """The checkpoint that was evaluated."""

    path: str
    sha256: str
    step: int
    epoch: int | None
    family: str
    parameters: int
    weights: str
    training_seconds: float | None


@dataclass
class DataFacts:
    """The items that were evaluated."""

    name: str
    split: str
    items: int
    limited: bool
    item_hash: str
    event_shape: list[int]
    levels: int | None
    units: str
    mel: dict | None
    num_classes: int | None
    class_names: list[str]


@dataclass(kw_only=True)
class LikelihoodLine:
    """One likelihood: its mean with its errors, the extreme items, the named parts, and how it was made.

    `values` names the array of its single values. What does not apply is None: the bracket and the error of log Z of
    annealed importance sampling, the cost of a class, the gap to an entropy or a density that is known.
    """

    label: str
    kind: str
    mark: str
    unit: str
    mean_nats: float | None
    se_data: float | None
    se_items: float | None
    se_mc: float | None
    single: dict
    how: str
    n: int
    nonfinite: int
    nonfinite_first: list[int]
    worst: list[dict]
    best: list[dict]
    parts_nats: dict[str, float]
    made: dict
    se_log_z: float | None = None
    optimistic: bool | None = None
    unreliable: str | None = None
    bracket: dict | None = None
    reason: str | None = None
    ess_median: float | None = None
    class_cost: float | None = None
    entropy: float | None = None
    kl_gap: float | None = None
    kl_paired: float | None = None
    se_gap: float | None = None
    values: str | None = None
    seconds: float | None = None

    @property
    def value(self) -> float | None:
        """The number in its unit, lower is better; None where there is none."""
        return getattr(self, {"nats": "nll", "nats_per_dim": "nll_per_dim"}.get(self.unit, self.unit))


@dataclass(kw_only=True)
class BitsLine(LikelihoodLine):
    """A likelihood of integers."""

    bits_per_dim: float | None


@dataclass(kw_only=True)
class NatsLine(LikelihoodLine):
    """A likelihood of real numbers."""

    nll: float | None
    nll_per_dim: float | None


@dataclass(kw_only=True)
class Measures:
    """Distances, precision and recall of n samples and as many held-out items, each with its standard error."""

    n: int
    frechet: float | None
    frechet_error: float | None
    kernel: float
    kernel_error: float
    precision: float
    precision_error: float
    recall: float
    recall_error: float


@dataclass(kw_only=True)
class Fidelity(Measures):
    """Measures of a model's samples in the features of one network, copies among them, and their classes."""

    network: dict
    memorisation: dict
    class_accuracy: dict | None = None
    likelihood_accuracy: dict | None = None


@dataclass
class Skipped:
    """Why samples were not compared."""

    skipped: str


@dataclass(kw_only=True)
class SamplingCost:
    """What a sample costs; latency in seconds, memory in bytes."""

    sampler: str | None
    steps: int | None
    evaluations: float | None
    samples_per_second: float
    batch_size: int
    latency: dict
    peak_memory: int | None
    seconds: float
    context: str
    seed: int


@dataclass(kw_only=True)
class SampleFacts:
    """The samples that were evaluated: names of their arrays, how they were made, and what lay outside the range."""

    x: str
    cond: str | None
    index: str
    made: dict
    outside: dict | None


@dataclass(kw_only=True)
class Sweep:
    """Measures and cost at several values of one option of sampling."""

    key: str
    sampler: str | None
    n: int
    values: list[float]
    frechet: list[float | None] = field(default_factory=list)
    frechet_error: list[float | None] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    kernel_error: list[float] = field(default_factory=list)
    precision: list[float] = field(default_factory=list)
    precision_error: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    recall_error: list[float] = field(default_factory=list)
    evaluations: list[float | None] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class OtherData:
    """Another data set under the same line: whether likelihood separates the two."""

    name: str
    overrides: dict
    n: int
    kind: str
    label: str
    values: str
    inside: str
    value: str
    auroc: float | None
    said: str
    se: float | None = None
    mean_in: float | None = None
    mean_out: float | None = None
    reason: str | None = None


@dataclass(kw_only=True)
class Report:
    """What was found of one checkpoint, as it stands after the stages done so far; empty where nothing was measured."""

    format: int = 2
    created: str
    genmodels: dict
    name: str
    checkpoint: CheckpointFacts
    config: dict
    data: DataFacts
    likelihood: list[LikelihoodLine] = field(default_factory=list)
    references: list[dict] = field(default_factory=list)
    items: dict = field(default_factory=dict)
    profile: dict = field(default_factory=dict)
    drift: dict = field(default_factory=dict)
    checks: list[dict] = field(default_factory=list)
    fidelity: Fidelity | Skipped | dict = field(default_factory=dict)
    sampling: SamplingCost | dict = field(default_factory=dict)
    sweeps: list[Sweep] = field(default_factory=list)
    samples: SampleFacts | dict = field(default_factory=dict)
    neighbours: dict = field(default_factory=dict)
    density: dict = field(default_factory=dict)
    ood: list[OtherData] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    scale: dict | None = None
    speech: dict | None = None
    audit: list[dict] | None = None
    partial: bool | None = None
    arrays: str | None = None


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


def write_report(report: Any, target: Path) -> None:
    """Write a report or a table whole as JSON; numbers that are not finite become null."""
    text = json.dumps(plain(report), indent=1, allow_nan=False)
    write_whole(target, lambda file: file.write(text + "\n"), mode="w")


def plain(value):
    """The same of dictionaries with text keys, lists, and numbers that JSON knows; others become None.

    Of a dataclass, fields that are None by default are left out where they are None.

    Example:
        >>> plain({1: (float("nan"), 2.0)})
        {'1': [None, 2.0]}
    """
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)
                 if f.default is not None or getattr(value, f.name) is not None}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def faults(line: LikelihoodLine) -> list[str]:
    """What of a line makes the whole evaluation fail."""
    lines = []
    if line.nonfinite and line.kind != "unnormalised":
        listed = ", ".join(map(str, line.nonfinite_first))
        lines.append(f"{line.nonfinite} of {line.n} likelihoods are not finite (first items: {listed})")
    gap, error = line.kl_paired, line.se_gap
    if line.kind in ("exact", "lower_bound") and gap is not None and gap < -3 * error:
        lines.append(f"{line.label}: better than the truth by {-gap:.4f} +- {error:.4f} nats: a fault of the "
                     "evaluation")
    return lines


def notes_on(line: LikelihoodLine) -> list[str]:
    """Notes on a line."""
    few, k = line.ess_median, line.made.get("importance_samples", 1)
    if few is not None and few < 2 and k >= 8:
        return [f"{line.label}: of {k} importance samples {few:.1f} count in the median: the bound is loose"]
    return []


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


def parts_of_error(line: Mapping) -> dict[str, float]:
    """What the standard error of a line is made of, as far as it is known: the squares of the parts add up.

    Example:
        >>> parts_of_error({"se_data": 0.5, "se_items": 0.4, "se_mc": 0.3})
        {'the items': 0.4, 'the draws': 0.3}
    """
    names = {"se_items": "the items", "se_mc": "the draws", "se_log_z": "log Z"}
    return {name: line[key] for key, name in names.items() if line.get(key) is not None}


def gap_of(line: Mapping) -> tuple[float | None, float | None]:
    """The KL gap to the true density and its standard error: paired item by item where that density is known."""
    if line.get("kl_paired") is not None:
        return line["kl_paired"], line["se_gap"]
    return line.get("kl_gap"), line.get("se_data")
