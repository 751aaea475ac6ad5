"""Writing and reading checkpoints, in one file or in parts, and the model of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import reprlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from genmodels.core.checkpoint import checkpoint_hash, name_former, origin, read_header, seal, verify
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, check_number, first_line, printable, stored_options, with_class
from genmodels.core.files import checksum, digest_of, is_exported, located, write_whole
from genmodels.core.processes import gather, own, rank_world
from genmodels.models.base import GenerativeModel
from genmodels.models.build import build


def write_checkpoint(path: str | Path, state: dict) -> None:
    """Write `state`, whose entry "genmodels" (plain types) also becomes the header readable without torch.

    Raises:
        RunError: when the disk is full (the previous file is kept), or when the weights are not finite.
    """
    header = state["genmodels"]
    _require_finite(path, state)

    def write(file) -> None:
        torch.save(state, file)
        seal(file, header)

    write_whole(path, write)
    for part in _parts_folder(path).glob("step_*.part"):
        if part.name not in _parts(state):
            part.unlink(missing_ok=True)
    if not _parts(state):
        with suppress(OSError):  # there is none, or it holds something else
            _parts_folder(path).rmdir()


def write_parts(path: str | Path, state: dict) -> None:
    """Write `state` with sharded weights, called by all processes: each writes its shards as a part.

    The file has empty tensors in their place, and the names of the parts in a folder next to it, each with its SHA-256.
    Parts hold tensors that `weights_only` reads, whereas the index of torch.distributed.checkpoint is a pickle that may
    execute anything. Parts have new names: until the file is in place, the previous checkpoint stays valid.

    Raises:
        RunError: as `write_checkpoint`.
    """
    shares: dict[str, torch.Tensor] = {}

    def without_shard(where: str, value: Any) -> Any:
        if not hasattr(value, "to_local"):
            return value
        shares[where] = own(value).cpu().clone()  # a copy, because it may lie within a larger storage
        return torch.empty(0, dtype=value.dtype)

    state = _map_leaves(state, without_shard)
    weights = {where.partition("/")[2]: value for where, value in shares.items() if where.startswith("state_dict/")}
    _require_finite(path, {**state, "state_dict": weights})
    name, digest = f"step_{state['global_step']:08d}_{rank_world()[0]}_{secrets.token_hex(4)}.part", ""

    def write(file) -> None:
        nonlocal digest
        torch.save(shares, file)
        file.seek(0)
        digest = checksum(file)

    write_whole(_parts_folder(path) / name, write)
    parts = dict(gather([(name, digest)]))
    if rank_world()[0] == 0:
        write_checkpoint(path, {**state, "parts": parts})


def join_parts(path: str | Path) -> None:
    """Make one plain file of a checkpoint in parts; others are left unchanged.

    Raises:
        RunError: as `read_checkpoint`.
    """
    if _parts_folder(path).is_dir():
        state = read_checkpoint(path)
        state.pop("parts", None)
        write_checkpoint(path, state)


def _parts_folder(path: str | Path) -> Path:
    return Path(path).with_suffix(".parts")


def _parts(state: Any) -> dict[str, str]:
    """Names of the parts of a checkpoint, with their SHA-256; none for one that is a plain file."""
    return state.get("parts", {}) if isinstance(state, dict) else {}


def _map_leaves(value: Any, change: Callable[[str, Any], Any], where: str = "") -> Any:
    """A nested value with each leaf replaced by `change(path, leaf)`; a path is keys and positions, with slashes."""
    prefix = f"{where}/" if where else ""
    if isinstance(value, dict):
        return {key: _map_leaves(item, change, f"{prefix}{key}") for key, item in value.items()}
    if type(value) is list:
        return [_map_leaves(item, change, f"{prefix}{number}") for number, item in enumerate(value)]
    return change(where, value)


def _with_shards(path: str | Path, state: dict, map_location) -> dict:
    """A checkpoint with the tensors of its parts, joined along their first dimension, as FSDP2 has cut them.

    Raises:
        RunError: for a part that is missing or altered.
    """
    shares = []
    for name, digest in state["parts"].items():
        part = _parts_folder(path) / Path(name).name
        try:
            with open(part, "rb") as file:
                found = checksum(file)
        except OSError:
            raise RunError(f"{path}: its part {part} is missing: copy its folder too, or try again if its run goes on, "
                           "which replaces parts") from None
        if found != digest:
            raise RunError(f"{path}: its part {part} was altered: SHA-256 does not match")
        shares.append(torch.load(part, map_location=map_location, weights_only=True, mmap=True))
        for where, value in shares[-1].items():
            if (reason := _misdeclared(where, value, part.stat().st_size)) is not None:
                raise RunError(f"{part}: malformed: {reason}")
    return _map_leaves(state, lambda path, leaf: torch.cat([s[path] for s in shares]) if path in shares[0] else leaf)


def _require_finite(path: str | Path, state: dict) -> None:
    if (name := _nonfinite_weight(state)) is not None:
        step, file_name = state["genmodels"].get("step"), Path(path).name
        raise RunError(f"weight {name} is not finite at step {step}: {file_name} is not overwritten")


def write_exported(path: str | Path, state: dict) -> None:
    """Write header and weights of a checkpoint as .safetensors, without the state of training; see core/files.py.

    Raises:
        RunError: when the disk is full; the previous file is kept.
    """
    from safetensors.torch import save

    # Copies, since the format holds no two names for the same memory.
    weights = {name: value.detach().cpu().clone().contiguous() for name, value in state["state_dict"].items()}
    held = {"format": "pt", "genmodels": json.dumps(state["genmodels"])}
    unsigned = memoryview(save(weights, held))
    length = 8 + int.from_bytes(unsigned[:8], "little")
    index, tensors = json.loads(bytes(unsigned[8:length])), unsigned[length:]
    index["__metadata__"]["sha256"] = digest_of(index, tensors)
    signed = json.dumps(index, separators=(",", ":")).encode()
    signed += b" " * (-len(signed) % 8)  # the format aligns the tensors to 8 bytes

    def write(file) -> None:
        for part in (len(signed).to_bytes(8, "little"), signed, tensors):
            file.write(part)

    write_whole(path, write)


def read_checkpoint(path: str | Path, *, map_location="cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint after checking its checksum and its header; nothing in it is ever executed.

    Raises:
        RunError: for a missing, cut, altered, malformed or foreign file, one that holds more than tensors and plain
            types, or weights that are not finite.
    """
    header = read_header(path)
    try:
        if is_exported(path):
            from safetensors.torch import load_file

            state = {"genmodels": header, "state_dict": load_file(path, device=str(map_location))}
        else:
            state = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap or None)
            state = _with_shards(path, state, map_location) if _parts(state) else state
    except RunError:
        raise
    except Exception as error:  # a malformed pickle raises any exception
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found or isinstance(error, pickle.UnpicklingError):
            what = f" ({found.group(1)})" if found else ""
            raise RunError(f"{path}: refused, it holds more than tensors and plain types{what}") from error
        raise RunError(f"{path}: its tensors cannot be read ({with_class(error)})") from error
    reason = _mismatch(state, header, _size(path, state))
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
    """Why a checkpoint does not fit its header or the size of its file; None if it does."""
    if not isinstance(state, dict) or name_former(state.get("genmodels")) != header:
        return "its header is not the one that was saved with its weights"
    weights = state.get("state_dict")
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        return "state_dict is missing, or holds more than tensors"
    for name, value in weights.items():
        if not isinstance(name, str):
            return f"state_dict holds the key {reprlib.repr(name)}"
        if (reason := _misdeclared(name, value, size)) is not None:
            return reason
    return None


def _misdeclared(name: str, value: torch.Tensor, size: int) -> str | None:
    """Why a tensor cannot be one of a file of `size` bytes; None when it can."""
    if value.layout != torch.strided or value.device.type == "meta":
        return f"weight {name[:100]!r} is no plain tensor"
    stored = value.untyped_storage().nbytes()
    if not value.numel() * value.element_size() <= stored <= size:
        return f"weight {name[:100]!r} is declared larger than the file that holds it"
    return None


def _size(path: str | Path, state: Any) -> int:
    """Bytes of a checkpoint with its parts."""
    files = [Path(path), *(_parts_folder(path) / Path(name).name for name in _parts(state))]
    return sum(file.stat().st_size for file in files)


def read_resumable(path: str | Path, *, map_location="cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint from which a run can resume.

    Raises:
        RunError: as `read_checkpoint`, and for a checkpoint without the state of training, from
            which Lightning would silently start at step 0, or at another position than its header.
    """
    state = read_checkpoint(path, map_location=map_location, mmap=mmap)
    header = state["genmodels"]
    kinds = {"loops": dict, "callbacks": dict, "optimizer_states": list, "lr_schedulers": list, "epoch": int,
             "global_step": int, "pytorch-lightning_version": str}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind) or (kind is not int and not state[key]):
            raise RunError(f"{path}: {key} is missing: it can be sampled and evaluated, but no run "
                           "can go on from it")
    try:
        fit = state["loops"]["fit_loop"]
        stepped, batches = fit["epoch_loop.state_dict"]["_batches_that_stepped"], fit["epoch_loop.batch_progress"]
        places = (stepped, state["global_step"], batches["total"]["completed"], batches["current"]["ready"])
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"{path}: the record of its loops is malformed ({reason})") from None
    if places != (header["step"], header["step"], header["batches_seen"], header["batches_seen"]):
        raise RunError(f"{path}: its loops stand at step {stepped!r}, "
                       f"its header at step {header['step']}")
    return state


@contextmanager
def restoring(path: Path | None, begun: Callable[[], bool]) -> Iterator[None]:
    """Report Lightning's errors about the contents of a checkpoint in one line, until training has begun.

    Raises:
        RunError: naming the file and the first line of the error.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if path is None or begun() or isinstance(error, InputError | RunError) or "memory" in str(error):
            raise
        raise RunError(f"{path}: no run can go on from it ({with_class(error)})") from error


_SLACK = 2**28  # bytes allowed for tensors of a model that are not in its checkpoint
_OVERHEAD = 2**14  # approximate bytes of a parameter or module without its values


def load_model(
    path: str | Path, *, device: str = "auto", trust: Iterable[str] = ()
) -> tuple[GenerativeModel, dict[str, Any]]:
    """The model of a checkpoint, ready to sample and to evaluate, and the checkpoint's header.

    Raises:
        RunError: when the file is broken, or does not fit this version's class.
        InputError: when its class belongs to a package that is not trusted, or the device does not exist.
    """
    state = read_checkpoint(path, mmap=True)
    header = state["genmodels"]
    try:
        limit = _no_larger_than(2 * _size(path, state) + _SLACK)
        with limit, stored_options(), torch.random.fork_rng(devices=[]):  # constructors draw weights
            model = build(header["model"], DataSpec.from_dict(header["data"]), trust=trust)
    except (InputError, RunError) as error:
        hint = " (docs/migration.md: options of former versions)" if "has no option" in str(error) else ""
        raise type(error)(f"{path}: {error}{hint}") from error
    except Exception as error:  # constructors raise any exception for malformed options
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


class Source:
    """The file that a model was loaded from, and whether the model in memory is still that of the file.

    Arguments:
        model: the model, just loaded.
        header: the header of its checkpoint.
        path: what it was loaded from: a file, a run folder or hf://user/name.
    """

    def __init__(self, model: GenerativeModel, header: dict[str, Any], path: str | Path):
        self.header, self.path, self.record = header, path, origin(located(path), header)
        self.weights = _weights_hash(model)

    def is_of(self, model: GenerativeModel) -> bool:
        """Whether a model has the weights, averages and buffers that were loaded, in the same precision."""
        return _weights_hash(model) == self.weights

    def file_of(self, model: GenerativeModel) -> str:
        """The file, which is evaluated, checked or published in place of the model.

        Raises:
            InputError: if one of the two has changed since.
            RunError: if the file is gone or damaged.
        """
        if not self.is_of(model):
            raise InputError(f"the weights or their precision have changed since they were loaded from {self.path}: "
                             "export the model to a .safetensors, and load that")
        verify(path := located(self.path))
        if checkpoint_hash(path) != self.record["checkpoint"]:
            raise InputError(f"{self.path} has been replaced since the model was loaded from it: load it again, or "
                             "export the model to a .safetensors, and load that")
        return str(self.path)

    def record_of(self, model: GenerativeModel) -> dict[str, Any]:
        """The record of the checkpoint for samples of a model."""
        changed = {} if self.is_of(model) else {"checkpoint": f"{self.record['checkpoint']}, changed in memory"}
        return self.record | changed

    def header_of(self, model: GenerativeModel) -> dict[str, Any]:
        """The header of a model: with other weights it has none of the figures, and its own steps are added."""
        if self.is_of(model):
            return self.header
        now = model.header()
        before = 0 if getattr(model._trainer, "ckpt_path", None) else self.header["step"]  # else they are counted in
        return now | {"step": before + now["step"], "figures": {}, "finished": False}


def _weights_hash(model: GenerativeModel) -> str:
    """The SHA-256 (hex) of all parameters, averages and buffers, and of their types."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        plain = value.detach().cpu().resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else None
        digest.update(repr(value if plain is None else plain.dtype).encode())
        digest.update(b"" if plain is None else plain.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def data_options(header: dict, path: str | Path) -> dict:
    """The configuration of the data that a checkpoint was trained on.

    Raises:
        RunError: if it has none.
    """
    options = header["config"].get("data")
    if not options:
        raise RunError(f"{path}: it does not say which data it was trained on; give data._target_ and its options")
    return options


@contextmanager
def _no_larger_than(most: int) -> Iterator[None]:
    """Stop the construction of a model that needs far more memory than its checkpoint, before the memory is filled.

    A header of a few bytes may describe terabytes; a tensor is registered before its memory is written.
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
        own = f":{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else ""  # one device for each process
        return torch.device(f"cuda{own}" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # meta holds no numbers
    except (RuntimeError, AssertionError) as error:
        first = first_line(error).split(". ")[0]  # torch goes on with a table of its kernels
        raise InputError(f"device={name} is not available here ({first}); use device=auto or device=cpu") from error
    return device


def weights_of(ema: bool | float) -> str | float:
    """The `weights` argument of a model for the command key `ema`: true, false, or one of the decays."""
    if isinstance(ema, bool):
        return "ema" if ema else "raw"
    check_number("ema", ema, 0, 1)
    return float(ema)
