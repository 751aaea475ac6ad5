"""A model from nothing but its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from genmodels.data.spec import DataSpec
from genmodels.errors import InputError, RunError
from genmodels.models.base import GenerativeModel
from genmodels.models.build import build
from genmodels.training.checkpoint import read_checkpoint


def load_model(
    path: str | Path, *, device: str = "auto", trust: Iterable[str] = ()
) -> tuple[GenerativeModel, dict[str, Any]]:
    """The model of a checkpoint, ready to sample and to judge, and the checkpoint's header.

    Raises:
        RunError: when the file is broken, or does not fit this version's class.
        InputError: when its class belongs to a package that is not trusted, or the device does not exist.
    """
    state = read_checkpoint(path, mmap=True)
    header = state["genmodels"]
    model = build(header["model"], DataSpec.from_dict(header["data"]), trust=trust)
    try:
        model.load_state_dict(state["state_dict"])
    except RuntimeError as error:
        name, first = header["model"]["_target_"], " ".join(str(error).split())[:200]
        raise RunError(f"{path}: its weights do not fit {name} of this version: {first}") from error
    model.seed, model.run_config = header["seed"], header["config"]
    model.batches_seen, model.finished = header["batches_seen"], header["finished"]
    model.figures = dict(header["figures"])
    return model.to(choose_device(device)).eval(), header


def choose_device(name: str) -> torch.device:
    """`auto` is the accelerator if there is one, else the CPU.

    Raises:
        InputError: for a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # meta holds no numbers
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"device={name} is not available here ({first}); use device=auto or device=cpu") from error
    return device


def weights_of(ema: bool | float) -> str | float:
    """The `weights` argument of a model for the command key `ema`: true, false, or one of the decays."""
    if isinstance(ema, bool):
        return "ema" if ema else "raw"
    return float(ema)
