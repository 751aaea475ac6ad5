"""What an evaluation is asked for: checked before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from genmodels.errors import InputError, check_temperature

#: What there is to judge, in the order in which it is done.
STAGES = ("likelihood", "audit", "ood", "fidelity", "cost", "proofs", "sweeps")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One evaluation, the same for every model of a table.

    Arguments:
        split, limit: which items are judged; limit is a number, `all`, or None for what the run was configured with.
        batch_size, processes, device: how they are gone through.
        seed, ema: seed of all noise, and which weights.
        stages: names of `STAGES`, None for all but those nobody asked for.
        importance_samples, draws, replicates, bound, partition, ode, ode_options: options of the likelihoods.
        samples, sampler, steps, temperature: the samples that are judged; `auto` is as many as there are items, at
            most 1,000.
        features, force: the feature network, and whether few items are compared all the same.
        sweeps: `steps`, `temperature`: further samples at several values of these.
        ood, ood_data: names of other data sets, and options of theirs.
        audit: rank utterances by likelihood.
        proofs: `default` is bounded to about a minute, `full` is not.
        data, trust: options of the data set, and further packages.

    Raises:
        InputError: for values that make no sense.
    """

    split: str = "test"
    limit: int | str | None = None
    batch_size: int = 256
    processes: int = 1
    device: str = "auto"
    seed: int = 0
    ema: bool | float = True
    stages: Sequence[str] | None = None
    importance_samples: Sequence[int] | None = None
    draws: int | str = "auto"
    replicates: int = 2
    bound: str = "auto"
    partition: dict = field(default_factory=dict)
    ode: bool | str = "auto"
    ode_options: dict = field(default_factory=dict)
    samples: int | str = "auto"
    sampler: str | None = None
    steps: int | None = None
    temperature: float = 1.0
    features: str = "auto"
    force: bool = False
    sweeps: Sequence[str] = ()
    ood: Sequence[str] = ()
    ood_data: dict = field(default_factory=dict)
    audit: bool = False
    proofs: str = "default"
    data: dict = field(default_factory=dict)
    trust: Sequence[str] = ()

    def __post_init__(self):
        at_least = [("batch_size", self.batch_size, 1), ("processes", self.processes, 1), ("limit", self.limit, 1),
                    ("replicates", self.replicates, 2), ("draws", self.draws, 1), ("samples", self.samples, 2),
                    ("steps", self.steps, 1)]
        at_least += [("importance_samples", k, 1) for k in self.importance_samples or ()]
        at_least += [(key, self.partition.get(key), 1) for key in ("chains", "densities")]
        for key, value, least in at_least:
            if isinstance(value, int) and value < least:
                raise InputError(f"{key} must be at least {least}, got {value}")
        if self.importance_samples is not None and not self.importance_samples:
            raise InputError("importance_samples=[] names no number: give for example importance_samples=[1,64]")
        check_temperature(self.temperature)
        if self.ood_data and not self.ood:
            raise InputError("ood_data holds options of another data set: say which by ood=<name>")
        for stage in self.stages or ():
            if stage == "ood" and not self.ood:
                raise InputError("stages names ood, but no other data set: ood=<name>")

    def wants(self, stage: str) -> bool:
        """Whether a stage is done.

        Example:
            >>> Request().wants("proofs"), Request().wants("ood"), Request(stages=["cost"]).wants("proofs")
            (True, False, False)
        """
        asked = {"audit": self.audit, "ood": bool(self.ood), "sweeps": bool(self.sweeps)}.get(stage, True)
        return asked and (self.stages is None or stage in self.stages or stage in ("audit", "ood", "sweeps"))
