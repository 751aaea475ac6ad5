"""The checkpoint file as a file: written whole or not at all, and tested before a byte of it is believed.

A checkpoint is torch's zip archive with two additions: the record `archive/genmodels.json` (the header, readable
without torch) and the SHA-256 of everything before it as the comment, so that any flipped byte and any cut is found.
This module needs the standard library alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

from genmodels.errors import RunError

FORMAT = 1
HEADER = "genmodels.json"
_DIGEST = 64  # hexadecimal characters of SHA-256, the comment of the zip


def write_whole(path: str | Path, write: Callable, *, mode: str = "w+b") -> None:
    """Write a file so that `path` holds either its old content or the new one, whatever happens in between.

    `write(file)` fills a temporary file beside the target, which is fsynced and then moved into place.

    Raises:
        RunError: when the disk is full or the folder cannot be written; the target is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise _explain(error, path) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems cannot sync a folder; the move itself has happened
        pass
    finally:
        os.close(handle)


def _explain(error: Exception, path: Path) -> Exception:
    number = getattr(error, "errno", None)
    # torch's zip writer hides the errno of a short write in its message.
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "file write failed" in str(error)
    if full or "unexpected pos" in str(error):
        kept = f"the previous {path.name} is kept" if path.exists() else "nothing was overwritten"
        return RunError(f"no space left to write {path}: {kept}; free some space, then resume with resume=last")
    if isinstance(error, OSError):
        return RunError(f"cannot write {path}: {os.strerror(number) if number else error}")
    return error


def seal(file, header: dict) -> None:
    """Append the header record and the SHA-256 comment to a torch archive that is open for reading and writing."""
    with zipfile.ZipFile(file, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/{HEADER}", json.dumps(header, indent=1, allow_nan=False))
        archive.comment = b"0" * _DIGEST
    end = file.seek(0, os.SEEK_END)
    digest = _sha256(file, end - _DIGEST)
    file.seek(end - _DIGEST)
    file.write(digest.encode())


def _sha256(file, length: int) -> str:
    file.seek(0)
    digest, left = hashlib.sha256(), length
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def checkpoint_hash(path: str | Path) -> str:
    """The SHA-256 (hex) that names a checkpoint: of its content, as stored in the file."""
    with open(path, "rb") as file:
        file.seek(-_DIGEST, os.SEEK_END)
        return file.read(_DIGEST).decode("ascii", "replace")


def verify(path: str | Path) -> None:
    """Raise a RunError of one line if the file is missing, cut, altered, or not a genmodels checkpoint."""
    path = Path(path)
    if not path.is_file():
        runs = sorted(one.parent for one in path.parent.glob("*/best.ckpt")) if path.parent.is_dir() else []
        if runs:
            raise RunError(f"{path.parent} holds {len(runs)} runs: name one, such as {runs[-1]}")
        raise RunError(f"{path}: no such checkpoint{_last_good(path)}")
    try:
        with open(path, "rb") as file:
            reason = _damage(file)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {os.strerror(error.errno)}") from error
    if reason:
        raise RunError(f"{path}: {reason}{_last_good(path)}")


def _damage(file) -> str | None:
    """What is wrong with an open file, in words; None when it is whole."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    if end == 0:
        return "the file is empty"
    if file.read(4) != b"PK\x03\x04":
        return "not a genmodels checkpoint (it does not begin as a torch archive)"
    try:
        with zipfile.ZipFile(file) as archive:
            names, stored = archive.namelist(), archive.comment
    except Exception:  # a damaged index makes the zip reader raise almost anything
        return "the file is cut short or its index is damaged"
    if not any(name.endswith(f"/{HEADER}") for name in names):
        return f"not a genmodels checkpoint (a torch archive without {HEADER}; was it written by another program?)"
    if len(stored) != _DIGEST:
        return "its checksum is missing: the file was cut or rewritten by another program"
    if _sha256(file, end - _DIGEST).encode() != stored:
        return f"its content was altered{_altered_record(file)}: SHA-256 does not match"
    return None


def _altered_record(file) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except Exception:  # as above
        return " in the zip's own structure"
    return f" in record {bad}" if bad else " outside its records"


def _last_good(path: Path) -> str:
    """A hint naming the newest whole checkpoint of the same folder."""
    if not path.parent.is_dir():
        return "; its folder does not exist"
    others = [p for p in path.parent.glob("*.ckpt") if p.name != path.name and not p.name.startswith(".")]
    for other in sorted(others, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            with open(other, "rb") as file:
                if _damage(file) is None:
                    return f"; the last good one beside it is {other}: use that"
        except OSError:
            continue
    return "; there is no whole checkpoint beside it"


def read_header(path: str | Path, *, check: bool = True) -> dict:
    """The header of a checkpoint: format, family, config, data, step, figures, ... without loading torch.

    Raises:
        RunError: as `verify` (unless `check` is False), or when the format is of a later version.
    """
    if check:
        verify(path)
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith(f"/{HEADER}"))
        header = json.loads(archive.read(name))
    if header.get("format", 0) > FORMAT:
        raise RunError(f"{path}: written in checkpoint format {header['format']}, this version reads up to {FORMAT}: "
                       "upgrade genmodels")
    return header
