"""Data sets larger than memory: tar shards in WebDataset's format, read item by item."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError, counted, none_or_at_least, one_of, progress_bar
from genmodels.core.files import cache_folder, checksum, write_whole
from genmodels.data.arrays import ItemKind, kind_of_items
from genmodels.data.base import SPLITS, DataModule, data_root, rows_of_splits, split_fractions
from genmodels.data.image_folder import SPLIT_NAMES, in_one_line, in_threads, listed, try_decode
from genmodels.data.loading import ResumableBatchSampler
from genmodels.data.tars import Index, Storage, index_of, name_of
from genmodels.data.utterances import BucketedBatchSampler, multiple_of, padded_mels, text_condition

RECORD = "dataset.json"
_ENOUGH = 2**26  # bytes of items for initialisation and statistics
_CHUNK = 256  # items that are checked at a time


@dataclass(frozen=True)
class ItemForm:
    """How the bytes of an item become a tensor.

    Attributes:
        spec: of the data set.
        arrays: kind of its arrays; None for images, which are resized to `spec`.
    """

    spec: DataSpec
    arrays: ItemKind | None

    def item(self, extension: str, content: bytes) -> Tensor | tuple[Tensor, list[int], int | None]:
        """One item as in a batch, mels without padding; with texts (mel, tokens, speaker).

        Raises:
            ValueError: a phrase for content that is damaged or of another shape.
        """
        if extension == "npz":
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                speaker = int(file["speaker"]) if "speaker" in file else None
                return self.arrays.convert(file["mel"]), file["tokens"].tolist(), speaker
        if not is_array(extension):
            if self.arrays is None:
                x = try_decode(io.BytesIO(content), self.spec.event_shape[-1], self.spec.event_shape[0])
                if isinstance(x, str):
                    raise ValueError(x)
                return x
            with Image.open(io.BytesIO(content)) as image:
                array = np.atleast_3d(np.array(image)).transpose(2, 0, 1)
        else:
            array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        if self.arrays is None:
            raise ValueError("is an array among images")
        if self.spec.levels is not None and array.dtype.kind not in "iub":
            raise ValueError(f"holds values of type {array.dtype}, where the others are integers")
        x = self.arrays.convert(array[None])[0]
        if self.spec.mel is None and x.shape != self.spec.event_shape:
            raise ValueError(f"has shape {tuple(x.shape)}, where the others have {self.spec.event_shape}")
        for value in (array.min(), array.max()) if self.spec.levels is not None else ():
            if not 0 <= int(value) < self.spec.levels:
                raise ValueError(f"holds {value}, but there are {self.spec.levels} levels from 0")
        if self.spec.levels is None and not bool(x.isfinite().all()):
            raise ValueError("holds a value that is not finite")
        return x


def is_array(extension: str) -> bool:
    """Whether a file is an array and not an image.

    Example:
        >>> is_array("npy"), is_array("mel.npy"), is_array("seg.png")
        (True, True, False)
    """
    return extension.rpartition(".")[2] == "npy"


class ShardData(Dataset):
    """A split of shards; a batch reads only its own items.

    Arguments:
        storage: where the shards are.
        index: where each item is.
        rows: (M,) which items of the index form this split.
        form: how their bytes become tensors.
    """

    def __init__(self, storage: Storage, index: Index, rows: Tensor, form: ItemForm):
        self.storage, self.index, self.rows, self.form = storage, index, rows, form
        size = form.spec.dims * (1 if form.spec.levels is not None and form.spec.levels <= 256 else 4)
        self.most_at_once = 64 if form.spec.text is not None else max(64, min(20_000, _ENOUGH // size))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cond(self) -> Tensor | None:
        """The classes of all items of the index."""
        return None if self.form.spec.num_classes is None else torch.from_numpy(self.index.items["label"].copy())

    def __getitems__(self, positions: Sequence[int] | Tensor) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.int64)
        items = []
        for position, found in zip(index.tolist(), self._read(index), strict=True):
            if isinstance(found, str):
                raise RunError(f"{self.where(position)} {found}; genmodels doctor lists all such items")
            items.append(found)
        cond = None
        if self.form.spec.num_classes is not None:
            cond = torch.from_numpy(self.index.items["label"][self.rows[index].numpy()].astype(np.int64))
        if self.form.spec.mel is None:
            return Batch(torch.stack(items), cond, index=index)
        width = self.form.spec.event_shape[-1]
        if self.form.spec.text is not None:
            items, texts, speakers = zip(*items, strict=True)
            cond, width = text_condition(texts, speakers), None
        x, mask = padded_mels(items, torch.tensor([item.shape[1] for item in items]), width)
        return Batch(x, cond, mask, index)

    def frames(self) -> Tensor:
        """(M,) lengths of mels with texts, which the index holds in place of classes."""
        return torch.from_numpy(self.index.items["label"][self.rows.numpy()].astype(np.int64))

    def _read(self, positions: Tensor, threads: bool = False) -> list:
        """The items, or why they cannot be used, decoded in parallel with `threads`."""
        items = self.index.items[self.rows[positions].numpy()]
        places = zip(items["shard"].tolist(), items["start"].tolist(), items["size"].tolist(), strict=True)
        blocks = self.storage.ranges([(self.index.shards[shard], start, size) for shard, start, size in places])
        found = zip(items["kind"].tolist(), blocks, strict=True)
        return in_threads(self._decoded, list(found)) if threads else [self._decoded(one) for one in found]

    def _decoded(self, found: tuple[int, bytes]) -> Tensor | tuple | str:
        kind, content = found
        try:
            return self.form.item(self.index.kinds[kind], content)
        except Exception as error:  # decoders raise all kinds of exceptions for damaged files
            return in_one_line(error)

    def where(self, position: int) -> str:
        """The name of an item in messages."""
        item = self.index.items[int(self.rows[position])]
        shard = self.index.shards[item["shard"]]
        return f"{self.storage.path(shard)}: {name_of(self.storage, shard, int(item['start']))}:"

    def faults(self, name: str) -> dict[int, str]:
        """The reason for each item that cannot be used, by position; `name` labels the progress bar."""
        found = {}
        with progress_bar(desc=name, unit="item", total=len(self)) as bar:
            for rows in torch.arange(len(self)).split(_CHUNK):
                read = zip(rows.tolist(), self._read(rows, threads=True), strict=True)
                found |= {row: what for row, what in read if isinstance(what, str)}
                bar.update(len(rows))
        return found


class Shards(DataModule):
    """Tar shards in WebDataset's format, on this machine or at an address of fsspec, that need not fit in memory.

    Items are read when a batch needs them; memory holds an index of 26 bytes an item. An item is an image (png,
    jpg, ...) or an array (npy), with its class in a file `cls`. Shards whose names contain train, val (valid,
    validation) or test are these splits; a missing val or test is held out of train. Shards that `genmodels shards`
    wrote bring their own splits, classes, sizes and checksums.

    Arguments:
        root: the folder of the shards, one .tar file, or a pattern with `*`; also s3://, gs://, https://, memory://.
        storage: options of fsspec for the address, as {anon: true} for a public bucket of S3.
        field: extension of the file that is the item, if there are several; null for the only image or array.
        label: extension of the file with its class, a number from 0 on.
        size: height and width of images, which are resized and cropped as in `ImageFolder`; null for what is recorded.
        channels: 3 for colour, 1 for grey; null for what is recorded, else 3.
        layout: order of the axes of arrays that are images.
        levels: number of integer levels of arrays; null infers 256 for uint8 and 2 for booleans.
        val_fraction, test_fraction: share of the items held out where there is no such split.
        skip_bad: leave out shards and items that cannot be used (with a warning) instead of stopping; shards of other
            programs are decoded once to find them.
        flip: mirror training images at random.
        max_frames: largest number of frames per training batch of mels; null for no limit.
        batch_size, num_workers, seed: see `DataModule`.

    Errors: `InputError` for missing, truncated and damaged shards, for items without image, array or class, all before
    training; `RunError` naming shard and item for one that cannot be decoded.
    """

    name = "shards"

    def __init__(
        self,
        *,
        root: str,
        storage: dict | None = None,
        field: str | None = None,
        label: str = "cls",
        size: int | None = None,
        channels: Literal[1, 3] | None = None,
        layout: Literal["auto", "nchw", "nhwc"] = "auto",
        levels: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        skip_bad: bool = False,
        flip: bool = False,
        max_frames: int | None = None,
        **shared,
    ):
        super().__init__(**shared)
        none_or_at_least(1, **{"data.size": size, "data.max_frames": max_frames})
        none_or_at_least(2, **{"data.levels": levels})
        one_of("data.channels", channels, (1, 3, None))
        one_of("data.layout", layout, ("auto", "nchw", "nhwc"))
        self.root, self.storage_options = data_root(root), storage
        self.field, self.label = None if field is None else field.lower(), label.lower()
        self.size, self.channels, self.layout, self.levels = size, channels, layout, levels
        self.fractions = split_fractions(val_fraction, test_fraction)
        self.skip_bad, self.flip, self.max_frames = skip_bad, flip, max_frames

    def load(self):
        """Read or make the index, and check that every shard is there and complete."""
        storage = Storage(self.root, self.storage_options)
        record = read_record(storage)
        field, label = (self.field, self.label) if record is None else fields_of(recorded(record))
        index = index_of(storage, record and record["shards"], field, label)
        if index.bad and not self.skip_bad:
            raise InputError(f"{len(index.bad)} of the shards in {self.root} cannot be used: {listed(index.bad)}; "
                             "copy or write them again, or set data.skip_bad=true to leave them out")
        if index.bad:
            warnings.warn(f"left out {len(index.bad)} shards of {self.root}: {listed(index.bad)}", stacklevel=2)
        if len(index.items) == 0:
            raise InputError(f"none of the shards in {self.root} can be used")
        form = self._guessed(storage, index) if record is None else self._recorded(record)
        size = form.spec.event_shape if form.spec.is_image else [None]
        for key, value in {"levels": form.spec.levels, "channels": size[0], "size": size[-1]}.items():
            if getattr(self, key) not in (None, value):
                raise InputError(f"data.{key}={getattr(self, key)}, but the items of {self.root} have "
                                 f"{value if value is not None else 'none'}: leave it out")
        if self.skip_bad and record is None:
            index = without_damaged(storage, index, form)
        if self.flip and not form.spec.is_image:
            raise InputError(f"data.flip=true is for images, but {self.root} holds {form.spec.event_shape}")
        labels = None if form.spec.num_classes is None else torch.from_numpy(index.items["label"].copy())
        if labels is not None and not 0 <= int(labels.min()) <= int(labels.max()) < form.spec.num_classes:
            raise InputError(f"{self.root} holds classes {int(labels.min())} to {int(labels.max())}, of "
                             f"{form.spec.num_classes}: write the shards again")
        given = splits_of(index.shards if record is None else list(record["shards"]))
        if record is not None and given is not None:  # a shard that is lost leaves the split of the others as it is
            number = dict(zip(record["shards"], given.tolist(), strict=True))
            given = torch.tensor([number[name] for name in index.shards])
            if lost := {*number.values()} - {*given.tolist()}:
                raise InputError(f"all shards of {SPLITS[min(lost)]} in {self.root} are missing or damaged: copy or "
                                 "write them again")
        given = None if given is None else given[torch.from_numpy(index.items["shard"].astype(np.int64))]
        rows = rows_of_splits(given, labels, len(index.items), self.fractions, self.seed)
        if index.bad and record is not None:
            names = hashlib.sha256(" ".join(sorted(index.bad)).encode()).hexdigest()[:12]
            fingerprint = f"without {counted(len(index.bad), 'shard')} {names}, {form.spec.fingerprint}"
            form = replace(form, spec=replace(form.spec, fingerprint=fingerprint))
        self._checksums = {name: one["sha256"] for name, one in record["shards"].items()} if record else {}
        return form.spec, {split: ShardData(storage, index, chosen, form) for split, chosen in rows.items()}

    def _recorded(self, record: dict) -> ItemForm:
        """The form recorded by `genmodels shards`."""
        spec = recorded(record)
        return ItemForm(spec, ItemKind("as written", spec.levels))

    def _guessed(self, storage: Storage, index: Index) -> ItemForm:
        """The form of shards of other programs, inferred from the first item, or with `skip_bad` the first readable."""
        labels, classes = index.items["label"], None
        if (labels >= 0).any():
            without = int((labels < 0).sum())
            if without:
                raise InputError(f"{self.root}: {without:,} of {len(labels):,} items have no class (.{self.label}): "
                                 "add them, or set data.label to an extension that does not occur")
            classes = int(labels.max()) + 1
            if classes > len(labels):
                raise InputError(f"{self.root}: the largest class is {classes - 1:,} in {len(labels):,} items: number "
                                 "the classes from 0 on")
        name = Path(storage.folder).name or self.name
        for first in index.items[: 100 if self.skip_bad else 1]:
            where = f"{self.root}: {name_of(storage, index.shards[first['shard']], int(first['start']))}"
            content = storage.ranges([(index.shards[first["shard"]], int(first["start"]), int(first["size"]))])[0]
            if not is_array(index.kinds[first["kind"]]):
                if self.size is None:
                    raise InputError(f"data.size is missing: {where} is {_extent(content)}; give the height and width "
                                     "to which images are resized, for example data.size=32")
                return ItemForm(DataSpec(name, (self.channels or 3, self.size, self.size), 256, classes), None)
            try:
                array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
            except ValueError as error:
                wrong = in_one_line(error)
                continue
            kind = kind_of_items(array[None], self.layout, self.levels, where)
            return ItemForm(DataSpec(name, kind.event((1, *array.shape)), kind.levels, classes), kind)
        raise InputError(f"{where} cannot be read: {wrong}")

    def training_batches(self, data: ShardData) -> ResumableBatchSampler:
        """Mels come in the batches of `Speech`, with texts those of about the same length."""
        if self.spec.mel is None:
            return super().training_batches(data)
        width = None if self.spec.text is not None else self.spec.event_shape[-1]
        frames = data.frames() if width is None else torch.full((len(data),), width)
        return BucketedBatchSampler(frames, self.batch_size, self.max_frames, self.order_seed, self._processes, width)

    def problems(self) -> list[str]:
        """One line for each shard with a wrong checksum; without checksums, for each item that cannot be used."""
        try:
            self.prepare()
        except (InputError, RunError, OSError) as error:
            return [str(error)]
        data, found = self.split("train"), []
        if self._checksums:
            for name in progress_bar(data.index.shards, desc="checksums", unit="shard"):
                with data.storage.open(name) as file:
                    if checksum(file) != self._checksums[name]:
                        found.append(f"{data.storage.path(name)}: it is not what was written (checksum)")
            return found
        for split in SPLITS:
            data = self.split(split)
            found += [f"{data.where(position)} {what}" for position, what in data.faults(split).items()]
        return found

    def warnings(self) -> list[str]:
        """Those of all data; none where an item that they read cannot be decoded, which is one of the problems."""
        try:
            return super().warnings()
        except RunError:
            return []


def without_damaged(storage: Storage, index: Index, form: ItemForm) -> Index:
    """The index without the items that cannot be decoded, whose rows are kept in the user's cache folder."""
    digest = hashlib.sha256(f"{storage.address} {index.stamp} {form.spec.to_dict()}".encode()).hexdigest()
    place = cache_folder() / f"shards-damaged-{digest[:16]}.json"
    try:
        damaged = [int(row) for row in json.loads(place.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        damaged = list(ShardData(storage, index, torch.arange(len(index.items)), form).faults("check"))
        with contextlib.suppress(RunError):  # else every item is decoded again next time
            write_whole(place, lambda file: json.dump(damaged, file), mode="w")
    if not damaged:
        return index
    if 2 * len(damaged) > len(index.items):
        raise InputError(f"{len(damaged):,} of {len(index.items):,} items of {storage.address} cannot be decoded as "
                         f"{form.spec.event_shape}, the form of the first that can be read: too many to leave out")
    warnings.warn(f"left out {len(damaged):,} of {len(index.items):,} items of {storage.address}, which cannot be "
                  "decoded; genmodels doctor lists them without data.skip_bad", stacklevel=3)
    return replace(index, items=np.delete(index.items, damaged))


def recorded(record: dict) -> DataSpec:
    """The description of shards that `genmodels shards` wrote."""
    spec, multiple = DataSpec.from_dict(record["spec"]), multiple_of(record.get("source") or {})
    if spec.mel is None or spec.statistics is None or multiple is None:
        return spec
    return replace(spec, statistics={"multiple": multiple, **spec.statistics})  # earlier versions did not state it


def fields_of(spec: DataSpec) -> tuple[str | None, str]:
    """The extensions of items and of their classes in our shards, or of mels with texts and of their lengths."""
    return (None, "cls") if spec.text is None else ("npz", "frames")


def _extent(content: bytes) -> str:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return f"{image.height} x {image.width}"
    except Exception as error:  # as for `try_decode`
        return f"damaged ({in_one_line(error)})"


def splits_of(shards: Sequence[str]) -> Tensor | None:
    """The number of each shard's split in `SPLITS`, by a word in its name; None unless all have one, one of them train.

    Example:
        >>> splits_of(["imagenet-train-000000.tar", "imagenet-val-000000.tar"]), splits_of(["a-0.tar", "train-0.tar"])
        (tensor([0, 1]), None)
    """
    words = [[word for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_NAMES] for name in shards]
    found = [SPLITS.index(SPLIT_NAMES[each[-1]]) for each in words if each]
    if len(found) < len(shards) and {0} < {*found}:
        raise InputError(f"{shards[words.index([])]} has no word for its split in its name, as other shards have, "
                         "which would be mixed: rename it, or move it elsewhere")
    return torch.tensor(found) if len(found) == len(shards) and 0 in found else None


def read_record(storage: Storage, complete: bool = True) -> dict | None:
    """The record that `genmodels shards` wrote about its shards, None for shards of other programs.

    Raises:
        InputError: for a damaged record, and with `complete` for shards that are not.
    """
    content = None if storage.pattern else storage.whole(RECORD)
    if content is None:
        return None
    try:
        record = json.loads(content)
        if "genmodels" not in record:
            return None
        recorded(record)
        shards = record["shards"]
        for one in (shards or {}).values():
            one["bytes"], one["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{storage.path(RECORD)} is damaged ({error}): copy it again") from None
    if shards is None and complete:
        raise InputError(f"the shards in {storage.address} are not complete: repeat the command genmodels shards")
    return record
