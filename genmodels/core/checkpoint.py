"""The checkpoint file format: header, schema and checksum, verified before anything is loaded.

A checkpoint is torch's zip archive with two additions: the record `archive/genmodels.json` (the header, readable
without torch) and the SHA-256 of everything before it as the comment, so that any altered or missing byte is found.
An exported model has both among its metadata (core/files.py). This module needs only the standard library, and numpy
to read weights. `MOVED` has the present modules of classes that older checkpoints and configurations name.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import reprlib
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genmodels.core import files
from genmodels.core.errors import RunError
from genmodels.core.files import kind_of

FORMAT = 1
MOST_BYTES = 4 << 20  # of a header
_DEPTH, _VALUES, _CHARACTERS = 32, 500_000, 10_000
_OPTION = 2**24  # largest count among a model's options: a list of so many items is a hundred megabytes
_LARGE = 2**31 - 1  # largest size, number of levels or classes


@dataclass(frozen=True)
class _Form:
    """The type of one value, as a description and as a test."""

    expected: str
    holds: Callable[[Any], bool]

    def or_null(self) -> _Form:
        return _Form(f"{self.expected} or null", lambda value: value is None or self.holds(value))

    def many(self, least: int = 0) -> _Form:
        return _Form(f"a list of {self.expected}", lambda value: type(value) is list and len(value) >= least
                     and all(self.holds(item) for item in value))  # fmt: skip

    def or_many(self) -> _Form:
        several = self.many(1)
        return _Form(f"{self.expected}, or {several.expected}", lambda value: self.holds(value) or several.holds(value))

    def named(self) -> _Form:
        return _Form(f"{self.expected} under each name", lambda value: type(value) is dict
                     and all(self.holds(item) for item in value.values()))  # fmt: skip


def _whole(least: int, most: int) -> _Form:
    return _Form(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _mapping(value: Any) -> bool:
    return type(value) is dict


_WORD = _Form("a printable word", lambda value: type(value) is str and 0 < len(value) <= 200 and value.isprintable())
_TEXT = _Form("text", lambda value: type(value) is str)
_FLAG = _Form("true or false", lambda value: type(value) is bool)
_NUMBER = _Form("a finite number", lambda value: type(value) in (int, float) and math.isfinite(value))
_POSITIVE = _Form("a positive number", lambda value: _NUMBER.holds(value) and value > 0)
_OPTIONS = _Form("a mapping", _mapping)  # the options of a class, which checks them when it is built
_SIZE, _COUNT = _whole(1, _LARGE), _whole(0, 2**63 - 1)

_MEL = {
    "sample_rate?": _SIZE, "n_fft?": _whole(2, 2**20), "hop?": _whole(1, 2**20), "n_mels?": _whole(1, 2**14),
    "f_min?": _NUMBER, "f_max?": _POSITIVE, "padding?": _WORD,
}  # fmt: skip
_STATISTICS = {"per?": _WORD, "mean": _NUMBER.or_many(), "std": _NUMBER.or_many(), "frames?": _SIZE, "multiple?": _SIZE}
_SPEECH_TEXT = {
    "symbols": _TEXT.many(1), "blanks": _FLAG, "language": _WORD, "form?": _WORD, "examples?": _TEXT.many(),
}  # fmt: skip
_DATA = {
    "name": _TEXT, "event_shape": _SIZE.many(1), "levels?": _whole(2, _LARGE).or_null(),
    "num_classes?": _SIZE.or_null(), "class_names?": _TEXT.many(), "entropy?": _NUMBER.or_null(), "mel?": _MEL,
    "statistics?": _STATISTICS, "text?": _SPEECH_TEXT, "speakers?": _TEXT.many(), "columns?": _TEXT.many(),
    "encoding?": _WORD.or_null(), "fingerprint?": _TEXT,
    "source?": {"name": _TEXT, "levels?": _whole(2, _LARGE).or_null()},
}  # fmt: skip
_CONFIG = {
    "model?": _OPTIONS, "data?": _OPTIONS, "trainer?": {"limit_evaluation?": _SIZE.or_null(), "*": None},
    "logger?": _OPTIONS, "checkpoint?": _OPTIONS,
    "seed?": _whole(-(2**63), 2**64 - 1), "trust?": _TEXT.many(), "*": None,
}  # fmt: skip
#: A key that ends in ? may be missing; a mapping under such a key may also be null. With *, further keys are allowed.
_HEADER = {
    "format": _whole(1, FORMAT), "family": _WORD, "genmodels": _WORD, "torch": _WORD, "model": _OPTIONS,
    "config": _CONFIG, "data": _DATA, "parameters": _COUNT, "step": _COUNT, "batches_seen": _COUNT,
    "seed": _whole(-(2**63), 2**64 - 1), "figures": _NUMBER.named(), "finished": _FLAG,
}  # fmt: skip


def parse(text: bytes) -> dict[str, Any]:
    """The header stored in a record.

    Raises:
        ValueError: one line that names the invalid key and the expected value.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has {len(text)} bytes, the limit is {MOST_BYTES}")
    if files.most_values(text) > _VALUES:
        raise ValueError(f"it holds more than {_VALUES:,} values")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"it cannot be read as JSON ({' '.join(str(error).split())[:200]})") from None
    _bound(header)
    if _mapping(header) and type(header.get("format")) is int and header["format"] > FORMAT:
        raise ValueError(f"it is of checkpoint format {header['format']}, this version reads up to {FORMAT}: upgrade "
                         "genmodels")
    _fit(header, _HEADER, "")
    _bound({key: value for key, value in header["model"].items() if key != "optimizer"}, _OPTION)  # which sizes nothing
    data, target = header["data"], header["model"].get("_target_")
    if math.prod(data["event_shape"]) > _LARGE or len(data["event_shape"]) > 8:
        raise ValueError(f"data.event_shape is {reprlib.repr(data['event_shape'])}, too large for any data")
    names, classes = data.get("class_names") or [], data.get("num_classes")
    if names and len(names) != classes:
        raise ValueError(f"data.class_names has {len(names)} names, but data.num_classes is {classes}")
    if not _WORD.holds(target):
        raise ValueError(f"model._target_ is {reprlib.repr(target)}, expected the name of a class")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one mapping")
    return found


def _bound(header: Any, largest: int = 2**64) -> None:
    """Raise a ValueError for values nested too deeply, too long or not finite, and for unprintable keys.

    Afterwards the values can be passed to recursive functions and printed safely.
    """
    left = [(header, 1)]
    while left:
        value, depth = left.pop()
        if depth > _DEPTH:
            raise ValueError(f"it is nested more than {_DEPTH} deep")
        if type(value) is dict:
            odd = next((key for key in value if not _WORD.holds(key)), None)
            if odd is not None:
                raise ValueError(f"the key {reprlib.repr(odd)} is not {_WORD.expected}")
            left += [(item, depth + 1) for item in value.values()]
        elif type(value) is list:
            left += [(item, depth + 1) for item in value]
        elif type(value) is str and len(value) > _CHARACTERS:
            raise ValueError(f"{reprlib.repr(value)} has {len(value)} characters, the limit is {_CHARACTERS}")
        elif type(value) is float and not math.isfinite(value) or type(value) is int and abs(value) > largest:
            raise ValueError(f"{reprlib.repr(value)} is not a valid number")


def _fit(value: Any, form: _Form | dict, where: str) -> None:
    """Raise a ValueError with the dotted name of the first key whose value does not fit."""
    if isinstance(form, _Form):
        if not form.holds(value):
            raise ValueError(f"{where} is {reprlib.repr(value)}, expected {form.expected}")
        return
    if not _mapping(value):
        raise ValueError(f"{where or 'it'} is {reprlib.repr(value)}, expected a mapping")
    known = {key.rstrip("?"): key for key in form if key != "*"}
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in known and "*" not in form:
            raise ValueError(f"{prefix}{key} is unknown to this version; if a later one wrote it, upgrade genmodels")
    for key, spelt in known.items():
        if key not in value:
            if key == spelt:
                raise ValueError(f"{prefix}{key} is missing")
        elif not (value[key] is None and spelt != key and isinstance(form[spelt], dict)):
            _fit(value[key], form[spelt], f"{prefix}{key}")


HEADER = "genmodels.json"
_DIGEST = 64  # hexadecimal characters of SHA-256, the comment of the zip


def seal(file, header: dict) -> None:
    """Append the header record and the SHA-256 comment to a torch archive that is open for reading and writing.

    Raises:
        RunError: if the header does not fit the schema.
    """
    text = json.dumps(header, indent=1)
    try:
        parse(text.encode())
    except ValueError as error:
        raise RunError(f"invalid checkpoint header: {error}") from None
    with zipfile.ZipFile(file, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/{HEADER}", text)
        archive.comment = b"0" * _DIGEST
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    digest = files.checksum(file, end - _DIGEST)
    file.seek(end - _DIGEST)
    file.write(digest.encode())


def checkpoint_hash(path: str | Path) -> str:
    """The SHA-256 (hex) of a checkpoint's content, as stored in the file."""
    if files.is_exported(path):
        return files.metadata(path)["sha256"]
    with open(path, "rb") as file:
        file.seek(-_DIGEST, os.SEEK_END)
        return file.read(_DIGEST).decode("ascii", "replace")


def origin(path: str | Path, header: dict) -> dict[str, Any]:
    """The record of a checkpoint that every file of its samples contains."""
    return {"checkpoint": checkpoint_hash(path), "step": header["step"], "family": header["family"]}


def verify(path: str | Path) -> None:
    """Raise a RunError of one line if the file is missing, truncated, altered, or not a genmodels checkpoint."""
    path = Path(path)
    if not path.is_file():
        if path.exists() and not path.is_dir():
            raise RunError(f"{path}: {kind_of(path)}, not a checkpoint")
        wanted = path / "last.ckpt" if path.is_dir() else path
        runs = sorted(one.parent for one in wanted.parent.glob("*/best.ckpt")) if wanted.parent.is_dir() else []
        if runs:
            missing = "" if path.is_dir() else f"{path}: no such checkpoint; "
            raise RunError(f"{missing}{wanted.parent} contains {len(runs)} runs: choose one, such as {runs[-1]}")
        if not path.is_dir() and path.suffix != ".ckpt":  # nothing is said of the folder that it would be in
            raise RunError(f"{path}: no such checkpoint or run folder")
        what = "no such checkpoint" if wanted == path else "it holds neither best.ckpt nor last.ckpt"
        raise RunError(f"{path}: {what}{_last_good(wanted)}")
    try:
        if files.is_exported(path):
            reason = files.damage(path)
        else:
            with open(path, "rb") as file:
                reason = _damage(file)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {os.strerror(error.errno)}") from error
    if reason:
        raise RunError(f"{path}: {reason}{_last_good(path)}")


def _damage(file) -> str | None:
    """A description of the damage of an open file; None if it is intact."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    if end == 0:
        return "the file is empty"
    if file.read(4) != b"PK\x03\x04":
        return "not a genmodels checkpoint (not a torch archive)"
    try:
        with zipfile.ZipFile(file) as archive:
            records, stored = archive.infolist(), archive.comment
    except Exception:  # on a damaged index the zip reader raises errors of many classes
        return "the file is truncated or its index is damaged"
    if not any(map(_is_header, records)):
        return f"not a genmodels checkpoint (a torch archive without {HEADER}; was it written by another program?)"
    if len(stored) != _DIGEST:
        return "its checksum is missing: the file was truncated or rewritten by another program"
    file.seek(0)
    if files.checksum(file, end - _DIGEST).encode() != stored:
        return f"its content was altered{_altered_record(file)}: SHA-256 does not match"
    return _structural_fault(records, end)


def _is_header(record: zipfile.ZipInfo) -> bool:
    return record.filename.endswith(f"/{HEADER}")


def _structural_fault(records: list[zipfile.ZipInfo], length: int) -> str | None:
    """The reason to refuse records although the checksum agrees: they must not unpack to more than the file's size."""
    packed = next((r for r in records if r.compress_type != zipfile.ZIP_STORED or r.file_size != r.compress_size), None)
    if packed is not None:
        return f"not a genmodels checkpoint (record {packed.filename[:100]!r} is compressed)"
    if len({record.filename for record in records}) < len(records) or sum(map(_is_header, records)) > 1:
        return "not a genmodels checkpoint (two of its records have the same name)"
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
    """A hint naming the newest intact checkpoint of the same folder."""
    if not path.parent.is_dir():
        return "; its folder does not exist"
    others = [p for p in path.parent.glob("*.ckpt") if p.name != path.name and p.name[0] != "." and p.is_file()]
    for other in sorted(others, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            with open(other, "rb") as file:
                if _damage(file) is None:
                    return f"; the newest intact checkpoint in this folder is {other}"
        except OSError:  # unreadable, so not intact
            continue
    return "; the folder has no intact checkpoint"


class _Inert(pickle._Unpickler):  # the one in C allocates whatever memory a file asks for
    """Reads the description of a checkpoint's tensors: every name in its pickle is a stand-in, nothing is executed."""

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _StandIn(name)


class _StandIn(str):
    """The name of a class or function in a pickle; a call returns its arguments."""

    def __call__(self, *arguments: Any) -> Any:
        return arguments


#: Type and bits of the exponent of each kind of storage: a number with all of them set is infinite or NaN.
_EXPONENTS = {"HalfStorage": ("<u2", 0x7C00), "BFloat16Storage": ("<u2", 0x7F80), "FloatStorage": ("<u4", 0x7F800000),
              "DoubleStorage": ("<u8", 0x7FF0000000000000)}  # fmt: skip
_EXPONENTS |= {short: _EXPONENTS[f"{name}Storage"] for short, name in
               (("F16", "Half"), ("BF16", "BFloat16"), ("F32", "Float"), ("F64", "Double"))}  # in .safetensors


def nonfinite_weight(path: str | Path) -> str | None:
    """The name of the first weight of an intact checkpoint that is not finite, found without torch.

    Raises:
        RunError: where its tensors cannot be read.
    """
    import numpy as np

    try:
        for name, kind, raw in (files.weights if files.is_exported(path) else _archive_weights)(path):
            dtype, exponent = _EXPONENTS[kind]
            if bool(((np.frombuffer(raw, dtype) & exponent) == exponent).any()):
                return str(name)
    except Exception as error:  # a malformed pickle raises errors of many classes
        raise RunError(f"{path}: its tensors cannot be read ({type(error).__name__})") from error
    return None


def missing_part(path: str | Path) -> str | None:
    """The name of the first part that an intact checkpoint in parts (of FSDP) lacks, found without torch."""
    if files.is_exported(path):
        return None
    with zipfile.ZipFile(path) as archive:
        parts = _inert_state(archive).get("parts") or {}
    folder = Path(path).with_suffix(".parts")
    return next((name for name in map(str, parts) if not (folder / Path(name).name).is_file()), None)


def _inert_state(archive: zipfile.ZipFile) -> dict:
    return _Inert(io.BytesIO(archive.read(f"{archive.namelist()[0].split('/')[0]}/data.pkl"))).load()


def _archive_weights(path: str | Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, kind and bytes of the floating-point weights of a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
        weights = _inert_state(archive)["state_dict"]
        for name, ((_, kind, key, _, _), offset, size, stride, *_) in weights.items():
            if kind in _EXPONENTS and math.prod(size):
                width = 8 if kind[0] == "D" else 4 if kind[0] == "F" else 2
                end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                yield name, kind, archive.read(f"{root}/data/{key}")[width * offset : width * end]


def read_header(path: str | Path, *, check: bool = True) -> dict:
    """The header of a checkpoint: format, family, config, data, step, figures, ... without loading torch.

    Raises:
        RunError: as `verify` (unless `check` is False), and if the header does not fit its schema or is of a later
            format.
    """
    if check:
        verify(path)
    if files.is_exported(path):
        text = files.metadata(path)["genmodels"].encode()
    else:
        with zipfile.ZipFile(path) as archive, archive.open(next(filter(_is_header, archive.infolist()))) as record:
            text = record.read(MOST_BYTES + 1)
    try:
        return name_former(parse(text))
    except ValueError as error:
        raise RunError(f"{path}: malformed header: {error}") from None


#: Former module to current module, for classes that a configuration can name.
MOVED = {
    "genmodels.data.digits": "genmodels.data.vision",
    "genmodels.models.glow": "genmodels.models.normalizing_flows",
    "genmodels.models.jet": "genmodels.models.normalizing_flows",
    "genmodels.models.maf": "genmodels.models.normalizing_flows",
    "genmodels.models.mel_ddpm": "genmodels.models.text_to_mel",
    "genmodels.models.mel_energy": "genmodels.models.text_to_mel",
    "genmodels.models.mel_flow_matching": "genmodels.models.text_to_mel",
    "genmodels.models.nsf": "genmodels.models.normalizing_flows",
    "genmodels.models.realnvp": "genmodels.models.normalizing_flows",
    "genmodels.models.tacotron": "genmodels.models.text_to_mel",
    "genmodels.models.tarflow": "genmodels.models.normalizing_flows",
    "genmodels.nn.deep_kernel": "genmodels.nn.energy_nets",
    "genmodels.nn.mlp": "genmodels.nn.perceptron",
    "genmodels.nn.recognizer": "genmodels.nn.transformer",
    "genmodels.nn.unet_energy": "genmodels.nn.energy_nets",
}


def name_former(stored: Any, value: str = "input") -> Any:
    """A header or configuration with the option that earlier versions had not, at what they did; changed in place.

    Example:
        >>> name_former({"model": {"net": {"fourier": [2, 3]}}})
        {'model': {'net': {'fourier': [2, 3], 'fourier_of': 'input'}}}
        >>> name_former({"model": {"net": {"_target_": "mine.UNet", "fourier": [2]}}})  # no option of this one
        {'model': {'net': {'_target_': 'mine.UNet', 'fourier': [2]}}}
    """
    if isinstance(stored, dict):
        name_former(stored.get("config"), value)
        net = stored["model"].get("net") if isinstance(stored.get("model"), dict) else None
        ours = (None, "genmodels.nn.unet.UNet", "genmodels.nn.UNet")
        if isinstance(net, dict) and net.get("fourier") and net.get("_target_") in ours:
            net.setdefault("fourier_of", value)
    return stored


def present_name(name: str) -> str:
    """The current dotted name of a class.

    Example:
        >>> present_name("genmodels.models.nsf.NSF"), present_name("genmodels.models.ddpm.DDPM")
        ('genmodels.models.normalizing_flows.NSF', 'genmodels.models.ddpm.DDPM')
    """
    module, _, attribute = name.rpartition(".")
    return f"{MOVED[module]}.{attribute}" if module in MOVED else name
