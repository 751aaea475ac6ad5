"""Atomically written files, locks, cache, configuration and its values; exported models, and what `ckpt=` names.

An exported model (.safetensors) holds the content of its checkpoint without the state of training, in a format that
other programs read. Its metadata contain the header (`genmodels`) and the SHA-256 of index and tensors (`sha256`). This
module needs only the standard library, and huggingface_hub to fetch `hf://user/name`.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from genmodels.core.errors import InputError, RunError


def read_text(path: str | Path, key: str) -> str:
    """The content of a text file in UTF-8.

    Arguments:
        path: the file.
        key: the option that names it, for errors.

    Raises:
        InputError: for a file that cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 (byte {error.start})"
        raise InputError(f"{key}={path} cannot be read: {reason}") from None


#: Matches the temporary files of `write_whole`.
TEMPORARY = ".*." + "[0-9a-f]" * 16 + ".tmp"


def write_whole(path: str | Path, write: Callable, *, mode: str = "w+b") -> None:
    """Write a file atomically: `path` holds either its old content or the new one, whatever happens in between.

    `write(file)` fills a temporary file in the same folder, which is fsynced and then moved into place.

    Raises:
        RunError: if the disk is full, or the target cannot be written, such as a device; it is unchanged.
    """
    path = Path(path)
    # The name is unpredictable and opened exclusively, so that no link of another user is followed.
    temporary = path.parent / f".{os.fsdecode(os.fsencode(path.name)[:200])}.{secrets.token_hex(8)}.tmp"
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"cannot write {path}: it is {kind_of(path)}, not a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # its folder is missing: the error that led here reports the failure
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):
            raise _explain(error, path) from error
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically, as `write_whole` does."""
    write_whole(path, lambda file: file.write(text), mode="w")


def append_text(path: str | Path, text: str) -> None:
    """Add text to the end of a file, and wait until it is on the disk.

    Raises:
        RunError: if that fails; a part of the text may have been added.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _explain(error, Path(path)) from error


def checksum(file, length: int | None = None) -> str:
    """SHA-256 of the rest of a file, or of its next `length` bytes.

    Example:
        >>> import io
        >>> checksum(io.BytesIO(b"abc"))[:8], checksum(io.BytesIO(b"abcd"), 3)[:8]
        ('ba7816bf', 'ba7816bf')
    """
    digest = hashlib.sha256()
    while block := file.read(1 << 20 if length is None else min(max(length, 0), 1 << 20)):
        digest.update(block)
        length = None if length is None else length - len(block)
    return digest.hexdigest()


def kind_of(path: str | Path) -> str:
    """The kind of a path, for messages where a file was expected; reading a pipe or a device may never end.

    Example:
        >>> kind_of("/dev/null"), kind_of(".")
        ('a device', 'a folder')
    """
    path = Path(path)
    kinds = (("a folder", path.is_dir), ("a pipe", path.is_fifo), ("a socket", path.is_socket),
             ("a device", path.is_char_device), ("a device", path.is_block_device), ("a file", path.is_file))
    return next((name for name, holds in kinds if holds()), "nothing")


def open_lock(path: str | Path):
    """Open a file for locking, creating it if necessary; it is never truncated, and links are not followed.

    Raises:
        OSError: if it cannot be opened.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "r+")


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # an unreadable folder, or some network file systems: the move itself has happened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _explain(error: Exception, path: Path) -> Exception:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # torch's zip writer hides the errno of a short write in its message.
    if full or any(sign in str(error) for sign in ("file write failed", "unexpected pos")):
        kept = f"the previous {path.name} is kept" if path.exists() else "nothing was overwritten"
        again = "then resume with resume=last" if path.suffix == ".ckpt" and path.exists() else "then try again"
        return RunError(f"no space left to write {path}: {kept}; free some space, {again}")
    if isinstance(error, OSError):
        return RunError(f"cannot write {path}: {_reason(error, path)}")
    return error


def _reason(error: OSError, path: Path) -> str:
    dead = _dead_link(path) if isinstance(error, FileExistsError) else None
    return dead or (os.strerror(error.errno) if error.errno else str(error))


def _dead_link(path: Path) -> str | None:
    """A phrase on a folder of the path that links to a missing one, for instance on a disk that is not mounted."""
    dead = (folder for folder in path.parents if folder.is_symlink() and not folder.exists())
    return next((f"{link} is a link to {os.readlink(link)}, which does not exist" for link in dead), None)


def new_folder(path: Path) -> Path:
    """Make a folder that did not exist: `path`, or with a number appended where that exists.

    Raises:
        RunError: if it cannot be made.
    """
    for count in itertools.count(1):
        folder = path if count == 1 else path.with_name(f"{path.name}_{count}")
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not (isinstance(error, FileExistsError) and os.path.lexists(folder)):
                raise RunError(f"cannot make the folder {folder}: {_reason(error, folder)}") from error


def cache_folder() -> Path:
    """`$GENMODELS_CACHE`, or `genmodels` in the user's cache folder."""
    if given := os.environ.get("GENMODELS_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "genmodels"


_PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"


def groups() -> dict[str, list[str]]:
    """The configuration groups and their choices, from the folders in `configs`.

    Example:
        >>> "ddpm" in groups()["model"]
        True
    """
    folders = sorted(f for f in CONFIG_DIR.iterdir() if f.is_dir() and not f.name.startswith((".", "_")))
    found = {f.name: sorted(p.stem for p in f.glob("*.yaml")) for f in folders}
    return {name: choices for name, choices in found.items() if choices}  # those of Hydra are one folder deeper


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by dotted key; empty mappings leave nothing.

    Example:
        >>> flat({"model": {"net": {"channels": 32}}, "seed": 0, "logger": {}})
        {'model.net.channels': 32, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def found_at(config: Any, path: str) -> tuple | None:
    """The value at a dotted path, as a tuple of one; None if there is none.

    Example:
        >>> found_at({"model": {"net": None}}, "model.net"), found_at({"model": {}}, "model.net")
        ((None,), None)
    """
    for name in path.split(".") if path else []:
        if not isinstance(config, dict) or name not in config:
            return None
        config = config[name]
    return (config,)


_PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_][\w./*-]*", re.ASCII)
_KEYWORDS = ("null", "true", "false", "nan", "inf")  # words that Hydra does not read as text


def quoted(text: str) -> str:
    """A text in quotation marks of Hydra's syntax, in which backslashes count before a quotation mark alone.

    Example:
        >>> print(quoted("it's C:\\\\"))
        'it\\'s C:\\\\'
    """
    escaped = re.sub(r"(\\*)'", r"\1\1\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def literal(text: str) -> str:
    """A text in quotation marks of Hydra's syntax, nothing of which is interpolated.

    Example:
        >>> print(literal("a ${x}"))
        'a \\${x}'
    """
    return quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def in_hydra(value) -> str:
    """A value in Hydra's syntax.

    Example:
        >>> in_hydra([1, None, True, "adam", "/x/ok.csv", "a b", "null", "büro"])
        "[1,null,true,adam,/x/ok.csv,'a b','null','büro']"
    """
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_hydra, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    value = value.item() if getattr(value, "shape", None) == () else value  # a number of numpy or torch
    if not isinstance(value, str | Path):
        return repr(value)
    value = str(value)
    return value if _PLAIN.fullmatch(value) and value.lower() not in _KEYWORDS else quoted(value)


def typed(key: str, value, trust: Sequence[str] | None = None) -> str:
    """A setting as one types it in a shell, with that of `trust` where further packages are trusted.

    Example:
        >>> print(typed("ckpt", "runs/a/best.ckpt"), typed("data.root", "my (old) data"))
        ckpt=runs/a/best.ckpt "data.root='my (old) data'"
    """
    word = f"{key}={literal(value) if '${' in str(value) and isinstance(value, str) else in_hydra(value)}"
    word = f'"{word}"' if "'" in word and not set(word) & set('"$`!\\') else shlex.quote(word)
    return word + (f" {typed('trust', list(trust))}" if trust else "")


def check_writable(key: str, target: Path, *, several: bool = False) -> None:
    """Check before any work is done whether a file, or `several` in a folder, can be written; nothing is left behind.

    Raises:
        InputError: if the target of a file is a folder or a device, or one of its folders is a file.
        RunError: if the folder cannot be written, or the disk is full.
    """
    try:
        kind = kind_of(target)  # an OSError for a name that is too long
        if kind not in ("a file", "nothing") and (kind != "a folder" or (target.suffix and not several)):
            raise InputError(f"{key}={target} is {kind}: name a file{' in it' if kind == 'a folder' else ''}")
        folder = target if kind == "a folder" else target.parent
        if dead := _dead_link(target):
            raise RunError(f"{key}={target} cannot be written: {dead}")
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise InputError(f"{key}={target}: {folder} is a file, not a folder")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunError(f"{key}={target} cannot be written: {os.strerror(error.errno)}") from error


_MOST_BYTES, _MOST_VALUES = 16 << 20, 1 << 20  # of an index
HUB = "hf://"
EXPORTED = "model.safetensors"  # the name of an exported model in a folder


def located(ckpt: str | Path) -> Path:
    """The file that `ckpt=` names: a checkpoint, the best.ckpt or model.safetensors of a folder, or hf://user/name.

    A file of the hub is fetched once, with huggingface_hub's cache and its settings (HF_ENDPOINT, HF_HUB_OFFLINE, ...).

    Raises:
        InputError: for a name of the hub that has no such file, or without the package huggingface_hub.

    Example:
        >>> str(located("runs/a/last.ckpt"))
        'runs/a/last.ckpt'
    """
    if str(ckpt).startswith(HUB):
        return _fetched(str(ckpt))
    try:
        path = Path(ckpt).expanduser()
        if not path.is_dir():
            return path
    except (OSError, TypeError, RuntimeError) as error:  # a name that is too long, None, or an unknown user's ~
        raise InputError(f"{str(ckpt)[:100]} is no checkpoint: {getattr(error, 'strerror', error)}") from None
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
    except Exception as error:  # no connection, repository, file or revision: the classes have no common base
        raise InputError(f"{name}: {' '.join(str(error).split())[:300]}") from error


def most_values(text: bytes) -> int:
    """An upper bound on the number of values in a JSON text, without parsing it, which takes seconds for millions.

    Example:
        >>> most_values(b'[[], {"a": 1}]')
        5
    """
    return 1 + sum(map(text.count, (b"[", b"{", b",")))


def index_of(path: str | Path) -> dict[str, Any] | None:
    """The index of a .safetensors file as JSON has it, `__metadata__` included; None for another or a damaged file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MOST_BYTES else b""
    index = None
    with suppress(ValueError, RecursionError):
        index = json.loads(text) if most_values(text) <= _MOST_VALUES else None
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


def short_hash(text: str) -> str:
    """Eight hexadecimal digits of a text's hash, for a file's name.

    Example:
        >>> short_hash("hello")
        '2cf24dba'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def file_word(word: str) -> str:
    """A word for a file's name; a long one is cut, and ends in a hash.

    Example:
        >>> file_word("steps-5 of"), file_word("a" * 100)
        ('steps-5-of', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-28165978')
    """
    plain = "".join(c if c.isalnum() or c in "-." else "-" for c in word)
    return plain if len(plain) <= 60 else f"{plain[:50]}-{short_hash(word)}"
