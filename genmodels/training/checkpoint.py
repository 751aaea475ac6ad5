"""Checkpoints of tensors and plain types: written whole, read with `weights_only=True`, refused otherwise."""

from __future__ import annotations

import pickle
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import CheckpointIO

from genmodels.errors import InputError, RunError, printable
from genmodels.files import write_whole
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

    write_whole(path, write)


def read_checkpoint(path: str | Path, *, map_location="cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint after its checksum and its header have been tested; nothing in it is ever executed.

    Raises:
        RunError: for a missing, cut, altered, malformed or foreign file, one that holds more than tensors and plain
            types, or weights that are not finite.
    """
    header = archive.read_header(path)
    try:
        state = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap or None)
    except Exception as error:  # a malformed pickle raises whatever it trips over
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found or isinstance(error, pickle.UnpicklingError):
            what = f" ({found.group(1)})" if found else ""
            raise RunError(f"{path}: refused, it holds more than tensors and plain types{what}") from error
        raise RunError(f"{path}: its tensors cannot be read ({_first_line(error)})") from error
    reason = _mismatch(state, header, Path(path).stat().st_size)
    if reason:
        raise RunError(f"{path}: malformed: {reason}")
    if (name := _nonfinite_weight(state)) is not None:
        name = printable(name)
        raise RunError(f"{path}: weight {name} is not finite, there is nothing to sample, evaluate or resume")
    return state


def _nonfinite_weight(state: dict) -> str | None:
    """The name of the first weight that is not finite."""
    weights = state["state_dict"].items()
    return next((n for n, value in weights if value.is_floating_point() and not torch.isfinite(value).all()), None)


def _mismatch(state: Any, header: dict, size: int) -> str | None:
    """What of a checkpoint does not fit its header or the size of its file; None when all does."""
    if not isinstance(state, dict) or state.get("genmodels") != header:
        return "its header is not the one that was saved with its weights"
    weights = state.get("state_dict")
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        return "state_dict is missing, or holds more than tensors"
    for name, value in weights.items():
        if not isinstance(name, str):
            return f"state_dict holds the key {reprlib.repr(name)}"
        if value.layout != torch.strided or value.device.type == "meta":
            return f"weight {name[:100]!r} is no plain tensor"
        stored = value.untyped_storage().nbytes()
        if not value.numel() * value.element_size() <= stored <= size:
            return f"weight {name[:100]!r} is declared larger than the file that holds it"
    return None


def check_resumable(state: dict) -> None:
    """Raise a ValueError where a checkpoint lacks what a run goes on from, or places it elsewhere than its header does.

    Lightning starts from step 0 without a word where the record of its loops is missing.
    """
    header = state["genmodels"]
    for key, kind in (("loops", dict), ("callbacks", dict), ("optimizer_states", list), ("lr_schedulers", list)):
        if not isinstance(state.get(key), kind) or not state[key]:
            raise ValueError(f"{key} is missing: it can be sampled and evaluated, but no run can go on from it")
    try:
        fit = state["loops"]["fit_loop"]
        stepped, batches = fit["epoch_loop.state_dict"]["_batches_that_stepped"], fit["epoch_loop.batch_progress"]
        places = (stepped, state["global_step"], batches["total"]["completed"], batches["current"]["ready"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"the record of its loops is malformed ({type(error).__name__}: {error})") from None
    if places != (header["step"], header["step"], header["batches_seen"], header["batches_seen"]):
        raise ValueError(f"its loops stand at step {stepped!r}, its header at step {header['step']}")


@contextmanager
def restoring(path: Path | None, begun: Callable[[], bool]) -> Iterator[None]:
    """Tell in one line what Lightning trips over in a checkpoint whose contents do not fit, until training has begun.

    Raises:
        RunError: naming the file and the first line of the error.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if path is None or begun() or isinstance(error, InputError | RunError) or "memory" in str(error):
            raise
        raise RunError(f"{path}: no run can go on from it ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class WholeFiles(CheckpointIO):
    """Lightning's door to the file functions above."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Write a checkpoint whole."""
        write_checkpoint(path, checkpoint)

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict:
        """Read a checkpoint safely; `weights_only` is always True here."""
        state = read_checkpoint(path, map_location=map_location or "cpu")
        try:
            check_resumable(state)
        except ValueError as error:
            raise RunError(f"{path}: {error}") from None
        return state

    def remove_checkpoint(self, path) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)
