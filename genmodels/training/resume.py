"""What may differ when a run goes on: nothing that makes it another run, and what makes its numbers others is told."""

from __future__ import annotations

from pathlib import Path

import torch

from genmodels.errors import InputError
from genmodels.models.build import construct
from genmodels.training.trainer import TrainerOptions

#: Where the data lie, how fast they come, when something is looked at: nothing of what is learnt. The length may
#: change too; the command tells it in steps.
FREE = {
    "trainer.max_steps", "trainer.max_epochs",
    "data.num_workers", "data.root", "data.download", "trainer.validate_every_n_steps", "trainer.limit_evaluation",
    "trainer.sample_every_n_steps", "trainer.log_every_n_steps", "trainer.progress",
}  # fmt: skip
_ROUNDING = "from here on its numbers are the same up to rounding, not bit for bit"
#: What may change, and what that does. Whatever stands in neither table belongs to the run, and may not.
TOLD = {
    "trainer.limit_validation": "the best figure so far is of other items than those to come",
    "trainer.accelerator": _ROUNDING,
    "trainer.devices": f"{_ROUNDING}, and dropout draws anew",
    "trainer.num_nodes": f"{_ROUNDING}, and dropout draws anew",
    "trainer.strategy": _ROUNDING,
    "trainer.compile": _ROUNDING,
    "trainer.deterministic": _ROUNDING,
}


def check_same(header: dict, config: dict, path: Path) -> list[str]:
    """What to tell of a run that goes on under other settings; a setting that makes it another run is refused.

    Arguments:
        header: of the checkpoint.
        config: the configuration given now.
        path: the checkpoint.

    Raises:
        InputError: naming the first such key and both values.
    """
    told = []
    for part in ("model", "data", "seed", "trainer"):
        then, now = _flat(header["config"], part), _flat(config, part)
        for key in dict.fromkeys([*then, *now]):
            if key in FREE or then.get(key) == now.get(key):
                continue
            was, given = (f"is {d[key]!r}" if key in d else "is not set" for d in (then, now))
            if key not in TOLD:
                raise InputError(
                    f"resume: {key} {was} in {path} but {given} here; a resumed run keeps its model, data, seed, "
                    "precision and accumulation"
                )
            told.append(f"resume: {key} {was} in the checkpoint and {given} here: {TOLD[key]}")
    if header.get("torch", torch.__version__) != torch.__version__:
        told.append(f"resume: the checkpoint is of torch {header['torch']}, this is {torch.__version__}: {_ROUNDING}")
    return told


def _flat(config: dict, part: str) -> dict:
    """The settings of a part by dotted key; those of the trainer with their defaults."""
    node = config.get(part)
    return _leaves(vars(construct(TrainerOptions, **(node or {}))) if part == "trainer" else node, part)


def _leaves(node, prefix: str) -> dict:
    if not isinstance(node, dict):
        return {prefix: node}
    return {k: v for key, value in node.items() for k, v in _leaves(value, f"{prefix}.{key}").items()}
