"""What is asked of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genmodels.core.errors import InputError, check_temperature


@dataclass(frozen=True, kw_only=True)
class Request:
    """One evaluation, the same for every model of a table; a single item of `ood` and the like becomes a list of one.

    Arguments:
        split: train, val or test.
        out: the report's file (one checkpoint) or folder (several); default report.json next to each checkpoint, and
            the table of several in the folder they share.
        stages: any of likelihood, fidelity, cost, checks; default all.
        draws: terms of a diffusion bound: all of them, or a number of strata with one term each; auto is all if that
            takes at most 100,000 network evaluations, else 5 to 100 strata.
        replicates: repetitions of the stratified estimate, at least 2, for its standard error.
        bound: of a diffusion model: with its T steps (discrete), with infinitely many (continuous), or both; auto is
            the first, and for texts the second, which few terms estimate better.
        importance_samples: dequantisations per item, K, for flows and energy-based models; a list gives one line for
            each K; default 1 and 8; K = 1 is always included.
        ode: also compute the likelihood by the probability-flow ODE, on a line of its own; auto does so for vectors of
            few dimensions, where it is fast.
        ode_options: its solver, tolerance, probes, ...
        normaliser: method for log Z of an energy-based model; default quadrature in one and two dimensions, else
            annealed importance sampling (ais); none skips it.
        chains: chains of annealed importance sampling; default 256, 64 with limit.
        densities: densities between its base and the model; default 1,000, 50 with limit.
        samples: number of samples to compare with as many items; auto is the number of items, at most 1,000.
        sampler: as in sample.py; default that of the family.
        steps: number of sampling steps; default that of the sampler.
        temperature: factor on the standard deviation of the noise of samples of flows, diffusion and speech.
        features: the network whose features are compared; auto is a small classifier trained on the training split,
            random convolutions for images without labels, the coordinates themselves for vectors.
        force: allow a comparison of fewer items than twice the number of features.
        sweeps: compare samples at several numbers of steps, at several temperatures, or both.
        ood: other data whose likelihood to compute: a data set (fashion_mnist, ...), noise or shuffled.
        ood_data: options of that data set, such as ood_data.root.
        audit: rank the utterances of a split, the least likely first, to find wrong transcripts and damaged clips.
        checks: default (at most a minute) or full.
        rank: rank lines within each kind of likelihood, or across kinds, with a note how each kind may err.
        batch_size: items per batch.
        processes: processes that share the items and the samples.
        limit: evaluate only the first items of the split (the report says so), or all; default
            trainer.limit_evaluation of the run.
        seed: seed of the noise.
        ema: averaged weights (true), raw ones (false), or the average with one decay.
        data: options of the data set that differ from training, such as data.root.
        cache: store results, and reuse those computed for the same checkpoint, settings and code.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes a checkpoint may name.

    Raises:
        InputError: for values that make no sense.
    """

    split: Literal["train", "val", "test"] = "test"
    out: str | None = None
    stages: list[Literal["likelihood", "fidelity", "cost", "checks"]] | None = None
    draws: int | Literal["auto", "all"] = "auto"
    replicates: int = 2
    bound: Literal["auto", "discrete", "continuous", "both"] = "auto"
    importance_samples: int | list[int] | None = None
    ode: bool | Literal["auto"] = "auto"
    ode_options: dict | None = None
    normaliser: Literal["auto", "quadrature", "ais", "none"] | None = None
    chains: int | None = None
    densities: int | None = None
    samples: int | Literal["auto"] = "auto"
    sampler: str | None = None
    steps: int | None = None
    temperature: float = 1.0
    features: Literal["auto", "classifier", "random-conv", "coordinates", "inception"] = "auto"
    force: bool = False
    sweeps: list[Literal["steps", "temperature"]] | None = None
    ood: str | list[str] | None = None
    ood_data: dict | None = None
    audit: bool = False
    checks: Literal["default", "full"] = "default"
    rank: Literal["kind", "across"] = "kind"
    batch_size: int = 256
    processes: int = 1
    limit: int | Literal["all"] | None = None
    seed: int = 0
    ema: bool | float = True
    data: dict | None = None
    cache: bool = True
    device: str = "auto"
    trust: list[str] | None = None

    def __post_init__(self):
        for key in ("importance_samples", "ood"):
            if isinstance(getattr(self, key), int | str):
                object.__setattr__(self, key, [getattr(self, key)])
        for key, empty in (("ode_options", {}), ("sweeps", []), ("ood", []), ("ood_data", {}), ("data", {}),
                           ("trust", [])):
            if getattr(self, key) is None:
                object.__setattr__(self, key, empty)
        counts = ("batch_size", "processes", "limit", "replicates", "draws", "samples", "steps", "chains", "densities")
        values = [(key, getattr(self, key)) for key in counts]
        for key, value in values + [("importance_samples", k) for k in self.importance_samples or ()]:
            least = 2 if key in ("replicates", "samples", "chains") else 1  # an error of a mean takes two
            if isinstance(value, int) and value < least:
                raise InputError(f"{key} must be at least {least}, got {value}")
        if self.importance_samples is not None and not self.importance_samples:
            raise InputError("importance_samples=[] names no number: give for example importance_samples=[1,64]")
        check_temperature(self.temperature)
        if self.ood_data and not self.ood:
            raise InputError("ood_data holds options of another data set: say which by ood=<name>")

    @property
    def partition(self) -> dict:
        """What is asked of log Z."""
        given = {"normaliser": self.normaliser, "chains": self.chains, "densities": self.densities}
        return {key: value for key, value in given.items() if value is not None}

    def wants(self, stage: str) -> bool:
        """Whether a stage is done.

        Example:
            >>> Request().wants("checks"), Request().wants("ood"), Request(stages=["cost"]).wants("checks")
            (True, False, False)
        """
        asked = {"audit": self.audit, "ood": bool(self.ood), "sweeps": bool(self.sweeps)}.get(stage, True)
        return asked and (self.stages is None or stage in self.stages or stage in ("audit", "ood", "sweeps"))
