"""Writing any data set as tar shards in WebDataset's format, resumable after a kill."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from genmodels import __version__
from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, RunError, as_input_errors, progress_bar
from genmodels.core.files import checksum, open_lock, write_whole
from genmodels.data.base import SPLITS, DataModule
from genmodels.data.image_folder import listed
from genmodels.data.shards import RECORD, fields_of, read_record, recorded
from genmodels.data.tars import Storage, index_of, write_tar

#: In the record, and raised when the items of a split are numbered anew: shards of two orders do not go together.
_ORDER = 2


def encoded(batch: Batch, spec: DataSpec) -> dict[str, bytes]:
    """The files of the only item of a batch: a PNG for an image, else an array, or a mel with its text; and its class.

    Example:
        >>> batch = Batch(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([3]))
        >>> files = encoded(batch, DataSpec("dots", (1, 2, 2), 256, 10))
        >>> list(files), files["cls"]
        (['png', 'cls'], b'3')
    """
    x, file = batch.x[0], io.BytesIO()
    if x.dtype == torch.uint8 and spec.is_image and len(x) in (1, 3):
        Image.fromarray((x[0] if len(x) == 1 else x.permute(1, 2, 0)).numpy()).save(file, "PNG")
        return _with_class({"png": file.getvalue()}, batch)
    x = (x if batch.mask is None else x[:, batch.mask[0, 0]]).numpy()
    if isinstance(batch.cond, TextCondition):
        said = batch.cond
        speaker = {} if said.speaker is None else {"speaker": said.speaker[0].numpy()}
        np.savez(file, mel=x, tokens=said.tokens[0][said.mask[0, 0]].numpy().astype(np.int32), **speaker)
        return {"npz": file.getvalue(), "frames": str(x.shape[1]).encode()}
    np.save(file, x)
    return _with_class({"npy": file.getvalue()}, batch)


def _with_class(files: dict[str, bytes], batch: Batch) -> dict[str, bytes]:
    return files if batch.cond is None else files | {"cls": str(int(batch.cond[0])).encode()}


def write_shards(module: DataModule, out: Path, items: int, source: dict, progress: bool = False) -> dict:
    """Write all splits of a data set as shards of `items` items; shards that are there already are kept.

    Every shard is written to a temporary file and then moved into place, so that the same call resumes after a kill.

    Arguments:
        module: the data; its settings of sizes and splits become those of the shards.
        out: the folder.
        items: items per shard.
        source: configuration of the data, recorded; another one in the same folder is refused.
        progress: show a progress bar.

    Returns the record that was written.
    """
    if module.spec.source is not None:
        raise InputError(f"{module.spec.name} pairs its items anew with those of {module.spec.source['name']} in every "
                         "epoch, which shards cannot hold: write shards of one of the two sets")
    spec, sizes = module.spec, {split: len(module.split(split)) for split in SPLITS}
    record = {"genmodels": __version__, "spec": spec.to_dict(), "source": source, "items": sizes, "per_shard": items,
              "order": _ORDER}
    record = json.loads(json.dumps(record))
    place = out / RECORD
    with _locked(out):
        there = {path.name for path in out.glob("*.tar")}
        before = read_record(Storage(str(out)), complete=False)
        if before is None and (there or place.is_file()):
            raise InputError(f"out={out} holds shards without a record of genmodels: choose another folder")
        if before is None or (before.get("shards") is None and not there):  # nothing of a killed one is kept
            before = record
        _check_same(out, before, record)
        if before.get("order") != _ORDER and len(there) < sum(-(-size // items) for size in sizes.values()):
            raise InputError(f"out={out} holds a part of the shards of an earlier version, in another order: choose "
                             "another folder, or remove it")
        record["order"] = before.get("order")
        record["spec"] = before["spec"]  # shards of an earlier version stay with the shorter fingerprint of their items
        if before.get("shards") is None:
            write_whole(place, lambda file: json.dump(record | {"shards": None}, file), mode="w")
        with progress_bar(desc="shards", unit="item", total=sum(sizes.values()), disable=not progress) as bar:
            for split in SPLITS:
                _write_split(module, split, out, items, bar)
        index = index_of(Storage(str(out)), None, *fields_of(spec))
        if index.bad:
            raise RunError(f"{len(index.bad)} shards in {out} are damaged: {listed(index.bad)}; remove them and repeat "
                           "the command")
        if len(index.items) != sum(sizes.values()):
            raise RunError(f"{out} holds {len(index.items):,} items instead of {sum(sizes.values()):,}: remove it and "
                           "repeat the command")
        record["shards"] = {}
        for name in index.shards:
            with open(out / name, "rb") as file:
                record["shards"][name] = {"bytes": (out / name).stat().st_size, "sha256": checksum(file)}
        kept = before.get("shards") or {}
        if changed := [name for name in sorted(there & kept.keys()) if kept[name] != record["shards"][name]]:
            raise RunError(f"{', '.join(changed)} in {out} differ from what was written: remove these files and repeat "
                           "the command")
        write_whole(place, lambda file: json.dump(record, file, indent=1), mode="w")
        index_of(Storage(str(out)), record["shards"], *fields_of(spec))
    return record


def _check_same(out: Path, before: dict, record: dict) -> None:
    """Raise InputError if a folder's record is of other data, or of other items of the same data."""
    then, now = recorded(before), recorded(record)
    if now.name.startswith(f"{then.name}."):  # earlier versions left out what follows the last dot of a folder
        then = replace(then, name=now.name)
    same = {key: before.get(key) == record[key] for key in record if key not in ("genmodels", "order")}
    same["spec"] = then == now
    if different := [key for key, equal in same.items() if not equal]:
        raise InputError(f"out={out} holds shards of other data ({', '.join(different)} differ): choose another "
                         "folder, or remove it")
    if not now.fingerprint.startswith(then.fingerprint):
        raise InputError(f"{now.name} has changed since the shards in out={out} were written ({now.fingerprint}; then "
                         f"{then.fingerprint}): choose another folder, or remove it")


def _write_split(module: DataModule, split: str, out: Path, items: int, bar: tqdm) -> None:
    every = torch.arange(len(module.split(split))).split(items)
    paths = [out / f"{split}-{number:06d}.tar" for number in range(len(every))]
    bar.update(sum(len(rows) for rows, path in zip(every, paths, strict=True) if path.exists()))
    wanted = [(rows, path) for rows, path in zip(every, paths, strict=True) if not path.exists()]
    if not wanted:
        return
    found = _items(module, split, torch.cat([rows for rows, _ in wanted]), bar)
    for rows, path in wanted:
        write_whole(path, lambda file, rows=rows: write_tar(file, islice(found, len(rows))))


def _items(module: DataModule, split: str, rows: Tensor, bar: tqdm) -> Iterator[tuple[str, dict[str, bytes]]]:
    for batch in module.loader(split, 64, rows):
        with as_input_errors():
            module.spec.check(batch)
        for row in range(len(batch)):
            item = batch.rows(slice(row, row + 1))
            yield f"{int(item.index[0]):09d}", encoded(item, module.spec)
            bar.update()


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Let only one process write into a folder, and remove unfinished files of a killed one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open_lock(out / ".lock")
    except OSError as error:
        raise InputError(f"out={out} cannot be written: {os.strerror(error.errno)}") from None
    with lock:
        try:
            import fcntl

            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no such locks: there nothing keeps a second process out
            pass
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # others: a file system without locks
                raise InputError(f"another process is writing shards into {out}: wait for it") from None
        for left in out.glob(".*.tar.*.tmp"):
            left.unlink(missing_ok=True)
        yield
        (out / ".lock").unlink(missing_ok=True)
