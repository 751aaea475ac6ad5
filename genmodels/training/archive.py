"""The checkpoint file as a file, tested before a byte of it is believed.

A checkpoint is torch's zip archive with two additions: the record `archive/genmodels.json` (the header, readable
without torch) and the SHA-256 of everything before it as the comment, so that any flipped byte and any cut is found.
This module needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

from genmodels.errors import RunError
from genmodels.files import kind_of
from genmodels.training import header as schema

HEADER = "genmodels.json"
_DIGEST = 64  # hexadecimal characters of SHA-256, the comment of the zip


def seal(file, header: dict) -> None:
    """Append the header record and the SHA-256 comment to a torch archive that is open for reading and writing.

    Raises:
        RunError: for a header that could not be read again.
    """
    text = json.dumps(header, indent=1)
    try:
        schema.parse(text.encode())
    except ValueError as error:
        raise RunError(f"this is no header that a checkpoint may have: {error}") from None
    with zipfile.ZipFile(file, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/{HEADER}", text)
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
        if path.exists() and not path.is_dir():
            raise RunError(f"{path}: not a checkpoint but {kind_of(path)}")
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
            records, stored = archive.infolist(), archive.comment
    except Exception:  # a damaged index makes the zip reader raise almost anything
        return "the file is cut short or its index is damaged"
    if not any(map(_is_header, records)):
        return f"not a genmodels checkpoint (a torch archive without {HEADER}; was it written by another program?)"
    if len(stored) != _DIGEST:
        return "its checksum is missing: the file was cut or rewritten by another program"
    if _sha256(file, end - _DIGEST).encode() != stored:
        return f"its content was altered{_altered_record(file)}: SHA-256 does not match"
    return _misbuilt(records, end)


def _is_header(record: zipfile.ZipInfo) -> bool:
    return record.filename.endswith(f"/{HEADER}")


def _misbuilt(records: list[zipfile.ZipInfo], length: int) -> str | None:
    """Why records whose checksum agrees are still not read: together they must not unpack to more than the file."""
    packed = next((r for r in records if r.compress_type != zipfile.ZIP_STORED or r.file_size != r.compress_size), None)
    if packed is not None:
        return f"not a genmodels checkpoint (record {packed.filename[:100]!r} is packed, and may unpack to any size)"
    if len({record.filename for record in records}) < len(records) or sum(map(_is_header, records)) > 1:
        return "not a genmodels checkpoint (two of its records have one name)"
    if sum(record.file_size for record in records) > length:
        return "not a genmodels checkpoint (its records overlap)"
    return None


def _altered_record(file) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except Exception:  # as above
        return " in the zip's own structure"
    return f" in record {bad[:100]!r}" if bad else " outside its records"


def _last_good(path: Path) -> str:
    """A hint naming the newest whole checkpoint of the same folder."""
    if not path.parent.is_dir():
        return "; its folder does not exist"
    others = [p for p in path.parent.glob("*.ckpt") if p.name != path.name and p.name[0] != "." and p.is_file()]
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
        RunError: as `verify` (unless `check` is False), when the header does not fit its schema, or when its format is
            of a later version.
    """
    if check:
        verify(path)
    with zipfile.ZipFile(path) as archive, archive.open(next(filter(_is_header, archive.infolist()))) as record:
        text = record.read(schema.MOST_BYTES + 1)
    try:
        return schema.parse(text)
    except ValueError as error:
        raise RunError(f"{path}: its header is malformed: {error}") from None
