"""Models outside of their run folder: .safetensors with the header of a checkpoint, and where `ckpt=` finds them.

An exported model holds what its checkpoint holds, without the state of training, in a format that other programs read.
The header (`genmodels`) and the SHA-256 of index and tensors (`sha256`) stand among its metadata. This module needs
only the standard library, and huggingface_hub to fetch `hf://user/name`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from genmodels.core.errors import InputError

_MOST_BYTES = 16 << 20  # of an index

HUB = "hf://"
EXPORTED = "model.safetensors"  # the name of an exported model in a folder


def located(ckpt: str | Path) -> Path:
    """The file that `ckpt=` means: a checkpoint, the best.ckpt or model.safetensors of a folder, or hf://user/name.

    A file of the hub is fetched once, with huggingface_hub's cache and its settings (HF_ENDPOINT, HF_HUB_OFFLINE, ...).

    Raises:
        InputError: for a name of the hub that has no such file, or without the package huggingface_hub.

    Example:
        >>> str(located("runs/a/last.ckpt"))
        'runs/a/last.ckpt'
    """
    if str(ckpt).startswith(HUB):
        return _fetched(str(ckpt))
    path = Path(ckpt).expanduser()
    if not path.is_dir():
        return path
    return next((path / name for name in ("best.ckpt", EXPORTED) if (path / name).is_file()), path / "best.ckpt")


def place_of(ckpt: str | Path) -> Path:
    """The path by which the results of a checkpoint are named: its own, or one in the working directory for the hub's.

    Example:
        >>> str(place_of("hf://user/digits@main")), str(place_of("runs/a/last.ckpt"))
        ('digits/model.safetensors', 'runs/a/last.ckpt')
    """
    if not str(ckpt).startswith(HUB):
        return located(ckpt)
    return Path(str(ckpt).partition("@")[0].rpartition("/")[2]) / EXPORTED


def _fetched(name: str) -> Path:
    repository, _, revision = name.removeprefix(HUB).partition("@")
    if len(repository.split("/")) != 2 or not all(repository.split("/")):
        raise InputError(f"{name}: write {HUB}user/name, or {HUB}user/name@revision")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise InputError(f"{name} needs the package huggingface_hub: pip install 'genmodels[hub]'") from None
    try:
        return Path(hf_hub_download(repository, EXPORTED, revision=revision or None))
    except Exception as error:  # no connection, no such repository, file or revision: each has classes of its own
        raise InputError(f"{name}: {' '.join(str(error).split())[:300]}") from error


def index_of(path: str | Path) -> dict[str, Any] | None:
    """The index of a .safetensors file as JSON has it, `__metadata__` included; None for another or a damaged file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MOST_BYTES else b""
    index = None
    with suppress(ValueError, RecursionError):
        index = json.loads(text)
    held = index.get("__metadata__", {}) if isinstance(index, dict) else None
    whole = isinstance(held, dict) and all(type(value) is str for value in held.values())
    return index if whole else None


def digest_of(index: dict[str, Any], tensors: bytes | memoryview) -> str:
    """The SHA-256 of an index, without the digest in it, and of the tensors that follow it."""
    held = {key: value for key, value in index["__metadata__"].items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps({**index, "__metadata__": held}, sort_keys=True).encode())
    digest.update(tensors)
    return digest.hexdigest()


def is_exported(path: str | Path) -> bool:
    """Whether a file is an exported model, by its name."""
    return Path(path).suffix == ".safetensors"


def metadata(path: str | Path) -> dict[str, str]:
    """The metadata of an intact file: `genmodels`, the header as JSON, and `sha256`."""
    return index_of(path)["__metadata__"]


def damage(path: str | Path) -> str | None:
    """A description of what is wrong with a file, None if it is intact."""
    index = index_of(path)
    if index is None:
        return "the file is truncated or its index is damaged"
    held = index.get("__metadata__", {})
    if "genmodels" not in held:
        return "a .safetensors without a genmodels header: was it written by another program?"
    with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content, memoryview(content) as whole:
        with whole[8 + int.from_bytes(whole[:8], "little") :] as tensors:
            found = digest_of(index, tensors)
    return None if held.get("sha256") == found else "its content was altered or cut: SHA-256 does not match"


def weights(path: str | Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, type and bytes of each tensor that does not hold integers."""
    index = index_of(path)
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for name, one in index.items():
            if name != "__metadata__" and one["dtype"] in ("F16", "BF16", "F32", "F64"):
                first, end = one["data_offsets"]
                file.seek(start + first)
                yield name, one["dtype"], file.read(end - first)
