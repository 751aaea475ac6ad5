"""Tar files in WebDataset's format: storage, and an index of their items, so that each item is one read.

A shard is an uncompressed tar in which the files of an item follow one another and share a name up to its first dot:
`000017.png`, `000017.cls`. An item is read at the offset in the index.

The index is our own, because no library gives a global order over plain tars that a killed run resumes exactly: `wids`
left WebDataset with version 1.0, copies every shard, and rereads the headers of a shard whenever it is opened again;
litdata and mosaicml-streaming read only their own formats. Addresses are those of fsspec, which torch depends on.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genmodels.core.errors import InputError, RunError, progress_bar
from genmodels.core.files import cache_folder, write_whole
from genmodels.data.image_folder import SUFFIXES, in_one_line

INDEX_NAME = ".genmodels-shards.npz"
_OPEN_FILES = 64
_SERVERS = 16  # shards of a server that are read at once for the index
_BLOCK = 512  # bytes of a tar's headers, to which everything in it is aligned
_LABEL_BYTES = 32
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")


class Storage:
    """Files below a folder of this machine or an address of fsspec: s3://, gs://, https://, memory://.

    Files of this machine are read at an offset and not mapped, so that only items are in memory; from a server all
    ranges of a batch are fetched at once.

    Arguments:
        address: a folder, one .tar file, or a pattern with `*` in the last part.
        options: of the file system, as fsspec takes them ({"anon": True} for public buckets of S3).

    Errors: InputError for an address that no installed package can read.
    """

    def __init__(self, address: str, options: dict | None = None):
        self.address, self.options = address.rstrip("/") or "/", dict(options or {})
        self._files: OrderedDict[str, io.FileIO] = OrderedDict()
        (self._system, path), self._process = self._connect(), os.getpid()
        head, _, tail = path.rpartition("/")
        if "*" in head:
            raise InputError(f"data.root={address} has a * before its last part, where alone it may stand")
        self.folder, self.pattern = (head, tail) if "*" in tail or tail.endswith(".tar") else (path, None)

    def _connect(self) -> tuple:
        import fsspec

        try:
            return fsspec.core.url_to_fs(self.address, **self.options)
        except Exception as error:  # each protocol has its own kinds
            raise InputError(f"data.root={self.address}: {in_one_line(error)}") from None

    @property
    def system(self):
        """fsspec's file system, made anew in every process."""
        if self._process != os.getpid():
            self._system, self._process = self._connect()[0], os.getpid()
        return self._system

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine."""
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self.system, LocalFileSystem)

    def path(self, name: str) -> str:
        """The path of a file in its file system."""
        return f"{self.folder}/{name}"

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": OrderedDict(), "_system": None, "_process": None}

    def shards(self) -> dict[str, tuple[int, str]]:
        """Size in bytes and time of change of every shard by name, in order of names.

        Raises:
            InputError: where there are none.
        """
        try:
            if self.pattern:
                # The pattern is the last part alone: a folder may be named run[1].
                found = self.system.glob(f"{glob.escape(self.folder)}/{self.pattern}", detail=True)
            else:
                found = self.system.find(self.folder, detail=True)
        except FileNotFoundError:
            found = {}
        except Exception as error:
            said = in_one_line(error)
            raise InputError(f"data.root={self.address} cannot be read: {said}") from None
        shards, packed = {}, None
        for path, info in sorted(found.items()):
            name = path.removeprefix(self.folder).lstrip("/")
            if name.endswith(".tar") and not any(part.startswith(".") for part in name.split("/")):
                size = self.system.size(path) if info.get("size") is None else info["size"]
                times = (info[key] for key in ("mtime", "LastModified", "updated", "ETag", "created") if key in info)
                shards[name] = int(size), str(next(times, ""))
            elif name.endswith(_COMPRESSED):
                packed = name
        if not shards:
            more = f" ({packed} is compressed: unpack it with gunzip or the like, single items are read)" if packed \
                else ""
            raise InputError(f"there are no shards (*.tar) below data.root={self.address}{more}")
        return shards

    def whole(self, name: str) -> bytes | None:
        """The content of a small file, None if there is none."""
        try:
            return self.system.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise RunError(f"{self.path(name)} cannot be read: {in_one_line(error)}") from None

    def open(self, name: str):
        """A file for reading from its beginning."""
        return open(self.path(name), "rb") if self.is_local else self.system.open(self.path(name), "rb")

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """The bytes of every (name, start, size).

        Raises:
            RunError: naming the shard that can no longer be read.
        """
        if self.is_local:
            found = [self._local(*one) for one in wanted]
        else:
            paths, starts, sizes = zip(*((self.path(name), start, size) for name, start, size in wanted), strict=True)
            ends = [start + size for start, size in zip(starts, sizes, strict=True)]
            try:
                found = self.system.cat_ranges(list(paths), list(starts), ends, on_error="return")
            except Exception as error:  # of a cache, which does not return it as others do
                said = in_one_line(error)
                raise RunError(f"{self.address} can no longer be read: {said}") from None
        for (name, _, size), block in zip(wanted, found, strict=True):
            if isinstance(block, Exception):
                raise RunError(f"{self.path(name)} can no longer be read: {in_one_line(block)}")
            if len(block) != size:
                raise RunError(f"{self.path(name)} can no longer be read: it is shorter than it was")
        return found

    def _local(self, name: str, start: int, size: int) -> bytes | OSError:
        try:
            if name not in self._files:
                self._files[name] = open(self.path(name), "rb", buffering=0)
                if len(self._files) > _OPEN_FILES:
                    self._files.popitem(last=False)[1].close()
            return os.pread(self._files[name].fileno(), size, start)  # no position that processes would share
        except OSError as error:
            return error


#: One item of the index: its shard, the kind of its file, where that is, and its class (-1 for none).
ITEM = np.dtype([("shard", "<i4"), ("kind", "<i2"), ("start", "<i8"), ("size", "<i8"), ("label", "<i4")])


@dataclass(frozen=True)
class Index:
    """Where every item of a set of shards is.

    Attributes:
        shards: their names.
        kinds: the extensions of files that hold items.
        items: (N,) of type `ITEM`, in the order of shards, then of their files.
        bad: shards that cannot be used, with the reason; their items are left out.
        stamp: changes when a shard does.
    """

    shards: tuple[str, ...]
    kinds: tuple[str, ...]
    items: np.ndarray
    bad: dict[str, str]
    stamp: str = ""


def members(file) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every file in a tar.

    Raises:
        ValueError: a phrase for a tar that is cut off or damaged, or holds links or sparse files.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            member = tar.firstmember and tar.next()  # of an empty tar Python 3.10 would seek before its start
            while member is not None:
                tar.members = []  # it would keep all of them
                if member.islnk() or member.issym():
                    raise ValueError(f"{member.name} is a link: pack it with tar --dereference --hard-dereference")
                if member.issparse():
                    raise ValueError(f"{member.name} is a sparse file: pack it without --sparse")
                if member.isreg():
                    yield member.name, member.offset_data, member.size
                member = tar.next()
            end = tar.offset
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"it is truncated or no uncompressed tar ({in_one_line(error)})") from None
    file.seek(end)
    mark = file.read(_BLOCK)
    if len(mark) < _BLOCK:
        raise ValueError(f"it is truncated: it ends at byte {end + len(mark)} without the mark of its end")
    if any(mark):
        raise ValueError(f"it is damaged at byte {end}")


def grouped(files: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The key of each item and its files, (offset, size) by extension; files without extension belong to none.

    Example:
        >>> list(grouped([("a/1.png", 0, 5), ("a/1.cls", 9, 1), ("a/2.seg.png", 20, 7), ("a/.hidden", 30, 1)]))
        [('a/1', {'png': (0, 5), 'cls': (9, 1)}), ('a/2', {'seg.png': (20, 7)})]
    """
    current, parts = None, {}
    for name, start, size in files:
        found = _KEY.fullmatch(name)
        if found is None or found[1].rpartition("/")[2].startswith("__"):
            continue
        key, extension = found[1], found[2].lower()
        if key != current:
            if parts:
                yield current, parts
            current, parts = key, {}
        if extension in parts:
            raise ValueError(f"item {key} has two files .{extension}")
        parts[extension] = start, size
    if parts:
        yield current, parts


def scan(file, field: str | None = None, label: str = "cls") -> list[tuple[str, int, int, int]]:
    """(extension, offset, size, class) of every item of a shard; the class is -1 without a file of extension `label`.

    Raises:
        ValueError: a phrase for a shard that cannot be used.
    """
    found = []
    for key, parts in grouped(members(file)):
        kind = _kind(key, parts, field)
        number = -1
        if label in parts:
            start, size = parts[label]
            file.seek(start)
            text = file.read(min(size, _LABEL_BYTES)).decode("ascii", "replace").strip()
            if not text.isdigit() or size > _LABEL_BYTES or int(text) >= 2**31:
                raise ValueError(f"the class of item {key} is {text!r}, not a number from 0 on")
            number = int(text)
        found.append((kind, *parts[kind], number))
    if not found:
        raise ValueError("it holds no items")
    return found


def _kind(key: str, parts: dict, field: str | None) -> str:
    if field is not None:
        found = [field] if field in parts else []
    else:
        found = [name for name in parts if f".{name}" in SUFFIXES] or [name for name in parts if name == "npy"]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(parts)
    if found:
        raise ValueError(f"item {key} has several candidates ({listed}): choose one by data.field={found[0]}")
    raise ValueError(f"item {key} has no {'image or array (npy)' if field is None else field}, only {listed}")


def name_of(storage: Storage, shard: str, start: int) -> str:
    """The name in a shard of the file at an offset, for messages."""
    try:
        with storage.open(shard) as file:
            return next((name for name, place, _ in members(file) if place == start), f"byte {start}")
    except (OSError, ValueError):
        return f"byte {start}"


def index_of(storage: Storage, recorded: dict[str, dict] | None = None, field: str | None = None,
             label: str = "cls") -> Index:  # fmt: skip
    """The index of all shards: kept in their folder or the user's cache folder, or made by reading all headers once.

    Arguments:
        storage: where the shards are.
        recorded: the shards that their writer recorded, by name: `bytes` and `sha256`; None if it recorded nothing.
        field: extension of the file that is the item; None for the one image, else the one array.
        label: extension of the file that holds its class.
    """
    found, bad = storage.shards(), {}
    if recorded is not None:
        bad |= {name: "it is missing" for name in recorded if name not in found}
        for name, size in ((name, size) for name, (size, _) in found.items() if name in recorded):
            if size != recorded[name]["bytes"]:
                bad[name] = f"it has {size:,} of {recorded[name]['bytes']:,} bytes"
        # A recorded shard has a checksum, and copying it changes its time.
        found = {name: (found[name][0], recorded[name]["sha256"]) for name in recorded if name not in bad}
    else:
        bad |= {name: "it is missing" for name in missing_numbers(found)}
    stamp = json.dumps([[name, *found[name]] for name in found] + [field, label])
    saved = _saved(storage, stamp)
    if saved is None:
        saved = _scan_all(storage, list(found), field, label)
        _save(storage, saved, stamp)
    return Index(saved.shards, saved.kinds, saved.items, bad | saved.bad, stamp)


def missing_numbers(names: Iterable[str]) -> list[str]:
    """Names that a numbered series lacks between its first and its last.

    Example:
        >>> missing_numbers(["train-000.tar", "train-001.tar", "train-003.tar", "val-007.tar"])
        ['train-002.tar']
    """
    series: dict[tuple[str, int], list[int]] = {}
    for name in names:
        if numbered := re.fullmatch(r"(.*?)(\d+)\.tar", name):
            series.setdefault((numbered[1], len(numbered[2])), []).append(int(numbered[2]))
    # With more gaps than files the numbers mean something else, dates for instance.
    return [f"{head}{number:0{width}d}.tar" for (head, width), numbers in series.items()
            if max(numbers) - min(numbers) < 2 * len(numbers)
            for number in sorted(set(range(min(numbers), max(numbers))) - set(numbers))]


def _scan_all(storage: Storage, names: list[str], field: str | None, label: str) -> Index:
    def one(name: str) -> list | str:
        try:
            with storage.open(name) as file:
                return scan(file, field, label)
        except ValueError as error:
            return str(error)
        except OSError as error:
            return f"it cannot be read: {in_one_line(error)}"

    kinds: dict[str, int] = {}
    parts, bad = [np.empty(0, ITEM)], {}
    with ThreadPoolExecutor(1 if storage.is_local else _SERVERS) as pool:
        results = progress_bar(pool.map(one, names), desc="index", unit="shard", total=len(names),
                               disable=len(names) == 1)
        for number, (name, found) in enumerate(zip(names, results, strict=True)):
            if isinstance(found, str):
                bad[name] = found
                continue
            rows = [(number, kinds.setdefault(kind, len(kinds)), *place) for kind, *place in found]
            parts.append(np.array(rows, ITEM))
    return Index(tuple(names), tuple(kinds), np.concatenate(parts), bad)


def _places(storage: Storage) -> list[Path]:
    digest = hashlib.sha256(f"{storage.folder}\n{storage.pattern}\n{storage.address}".encode()).hexdigest()
    own = [Path(storage.path(INDEX_NAME))] if storage.is_local else []
    return [*own, cache_folder() / f"shards-{digest[:16]}.npz"]


def _saved(storage: Storage, stamp: str) -> Index | None:
    """A saved index with this stamp, if there is one."""
    remote = None if storage.is_local else storage.whole(INDEX_NAME)
    for place in [*_places(storage), *([] if remote is None else [io.BytesIO(remote)])]:
        try:
            with np.load(place, allow_pickle=False) as file:
                head = json.loads(bytes(file["head"]))
                items = file["items"]
            if head["stamp"] == stamp and items.dtype == ITEM:
                return Index(tuple(head["shards"]), tuple(head["kinds"]), items, head["bad"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            continue  # none, damaged, or written by another program: the shards are read again
    return None


def _save(storage: Storage, index: Index, stamp: str) -> None:
    head = json.dumps({"stamp": stamp, "shards": index.shards, "kinds": index.kinds, "bad": index.bad}).encode()
    for place in _places(storage):
        try:
            return write_whole(place, lambda file: np.savez(file, head=np.frombuffer(head, np.uint8),
                                                            items=index.items))
        except RunError:  # try the next place; without any, the headers are read again next time
            continue


def write_tar(file, items: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    """Write items, (key, content by extension), as a tar whose bytes depend on these alone.

    Example:
        >>> file = io.BytesIO()
        >>> write_tar(file, [("000000", {"npy": b"...", "cls": b"3"})])
        >>> _ = file.seek(0)
        >>> scan(file)
        [('npy', 512, 3, 3)]
    """
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, parts in items:
            for extension, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
                tar.members = []
