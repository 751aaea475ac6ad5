"""Checkpoints of tensors and plain types: written whole, read with `weights_only=True`, refused otherwise."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import CheckpointIO

from genmodels.errors import RunError
from genmodels.training import archive


def write_checkpoint(path: str | Path, state: dict) -> None:
    """Write `state`, whose entry "genmodels" (plain types) also becomes the header readable without torch.

    Raises:
        RunError: when the disk is full (the previous file is kept), or when the weights are not finite.
    """
    header = state["genmodels"]
    if (name := _nonfinite_weight(state)) is not None:
        step, file_name = header.get("step"), Path(path).name
        raise RunError(f"weight {name} is not finite at step {step}: {file_name} is not overwritten")

    def write(file) -> None:
        torch.save(state, file)
        archive.seal(file, header)

    archive.write_whole(path, write)


def read_checkpoint(path: str | Path, *, map_location="cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint after its checksum has been tested; nothing in it is ever executed.

    Raises:
        RunError: for a missing, cut, altered or foreign file, one that holds more than tensors and plain types, or
            weights that are not finite.
    """
    archive.verify(path)
    try:
        state = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap or None)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({found.group(1)})" if found else ""
        raise RunError(f"{path}: refused, it holds more than tensors and plain types{what}") from error
    if (name := _nonfinite_weight(state)) is not None:
        raise RunError(f"{path}: weight {name} is not finite, there is nothing to sample, evaluate or resume")
    return state


def _nonfinite_weight(state: dict) -> str | None:
    """The name of the first weight that is not finite."""
    weights = (state.get("state_dict") or {}).items()
    return next((n for n, value in weights if value.is_floating_point() and not torch.isfinite(value).all()), None)


class WholeFiles(CheckpointIO):
    """Lightning's door to the file functions above."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Write a checkpoint whole."""
        write_checkpoint(path, checkpoint)

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict:
        """Read a checkpoint safely; `weights_only` is always True here."""
        return read_checkpoint(path, map_location=map_location or "cpu")

    def remove_checkpoint(self, path) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)
