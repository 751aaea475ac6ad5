"""A model from nothing but its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from genmodels.data.spec import DataSpec
from genmodels.errors import InputError, RunError
from genmodels.models.base import GenerativeModel
from genmodels.models.build import build
from genmodels.training.checkpoint import read_checkpoint

_SLACK = 2**28  # bytes of tensors that a model computes for itself, beside what its checkpoint holds
_OVERHEAD = 2**14  # bytes that a parameter or a module takes by itself, about


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
    try:
        with _no_larger_than(2 * Path(path).stat().st_size + _SLACK):
            model = build(header["model"], DataSpec.from_dict(header["data"]), trust=trust)
    except (InputError, RunError) as error:
        raise type(error)(f"{path}: {error}") from error
    except Exception as error:  # its options were written by anybody: constructors raise whatever they trip over
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RunError(f"{path}: no {header['model']['_target_']} can be built from its options ({reason})") from error
    if not isinstance(model, GenerativeModel):
        raise RunError(f"{path}: {header['model']['_target_']} is not a model")
    try:
        model.load_state_dict(state["state_dict"])
    except RuntimeError as error:
        name, first = header["model"]["_target_"], " ".join(str(error).split())[:200]
        raise RunError(f"{path}: its weights do not fit {name} of this version: {first}") from error
    model.seed, model.run_config = header["seed"], header["config"]
    model.batches_seen, model.finished = header["batches_seen"], header["finished"]
    model.figures = dict(header["figures"])
    return model.to(choose_device(device)).eval(), header


def data_options(header: dict, path: str | Path) -> dict:
    """The configuration of the data that a checkpoint was trained on.

    Raises:
        RunError: when it does not say.
    """
    options = header["config"].get("data")
    if not options:
        raise RunError(f"{path}: it does not say which data it was trained on; give data._target_ and its options")
    return options


@contextmanager
def _no_larger_than(most: int) -> Iterator[None]:
    """Stop the construction of a model that takes more memory than what is to be loaded into it, before it is filled.

    A header of a few bytes may ask for terabytes; a tensor is registered before its memory is touched.
    """
    taken = 0

    def count(module, name, value) -> None:
        nonlocal taken
        taken += _OVERHEAD + (value.nbytes if isinstance(value, torch.Tensor) else 0)
        if taken > most:
            raise RunError(f"its options describe a model of more than {most / 1e9:.1f} GB, which its weights are not")

    hooks = (register_module_parameter_registration_hook, register_module_buffer_registration_hook,
             register_module_module_registration_hook)
    handles = [register(count) for register in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
