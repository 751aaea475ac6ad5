"""Images or vectors from a file of arrays: .npz, .npy or a text table."""

from __future__ import annotations

import csv
import hashlib
import re
import zipfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from genmodels.core.data import DataSpec, require_precision
from genmodels.core.errors import InputError, counted, none_or_at_least, one_of
from genmodels.data.base import SPLITS, DataModule, data_root, mixed, split_fractions, split_rows, spread_rows
from genmodels.data.image_folder import SPLIT_NAMES, in_one_line
from genmodels.data.loading import BatchDataset, MappedArray, MappedData, TensorData

_BLOCK = 2**22
TABLES = (".csv", ".tsv", ".txt", ".data")
_MISSING = ("", "na", "n/a", "null", "none", "?", "-")  # what stands for a number that is not there


def read_arrays(path: Path, key: str) -> dict[str, np.ndarray]:
    """The arrays of the file of an option by name ("arr_0" for one without names), mapped if stored uncompressed."""
    where = f"{key}={path}"
    tables = dict.fromkeys(TABLES, lambda table: _read_table(table, where))
    readers = {".npy": _read_npy, ".npz": _read_npz, **tables}
    if not path.is_file():
        raise InputError(f"{where} {'is not a file' if path.exists() else 'does not exist'}")
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{where} must end in {', '.join(readers)}")
    try:
        return reader(path)
    except InputError:
        raise
    except Exception as error:  # the readers of damaged files raise errors of many classes
        advice = ": save it as UTF-8" * isinstance(error, UnicodeError)
        raise InputError(f"{where} cannot be read: {in_one_line(error)}{advice}") from None


def _read_npy(path: Path) -> dict[str, MappedArray]:
    (array := MappedArray.of_npy(path)).whole()
    return {"arr_0": array}


def _read_npz(path: Path) -> dict[str, np.ndarray | MappedArray]:
    arrays: dict[str, np.ndarray | MappedArray] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.compress_type == zipfile.ZIP_STORED:
                # The local header repeats the name and may carry other extra fields than the directory.
                raw.seek(member.header_offset + 26)
                lengths = np.frombuffer(raw.read(4), "<u2")
                start = member.header_offset + 30 + int(lengths.sum())
                array = MappedArray.of_npy(path, start)
                if not array.dtype.hasobject and array.offset + array.nbytes != start + member.file_size:
                    raise ValueError(f"{name} is not the size that its header declares")
                with archive.open(member) as file:  # compares the checksum, which mapping does not
                    while file.read(_BLOCK):
                        pass
                array.whole()
            else:
                with archive.open(member) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
            arrays[name] = array
    return arrays


def columns_of(path: Path) -> tuple[str, ...]:
    """The column names from the header line of a table; empty if it has none or the file is not a table."""
    if path.suffix.lower() not in TABLES:
        return ()
    with open(path, encoding="utf-8-sig") as file:
        return tuple(_heading(list(islice((line for line in file if line.strip()), 2)), path)[0])


def _heading(lines: list[str], path: Path) -> tuple[list[str], str | None]:
    """The names in the first line of a table (none if it is an item), and the delimiter of its cells."""
    line, below = [*lines, ""][:2]
    marks = "\t,;|" if path.suffix.lower() == ".tsv" else ";,\t|"  # commas may be those of decimals
    unquoted = re.sub(r'(?:^|(?<=[\t,;| ]))"[^"]*"', "", line)  # 5" is no quotation
    found = sorted((mark for mark in marks if mark in unquoted), key=unquoted.count, reverse=True)
    # A name may hold another mark, which then does not separate the line below.
    alike = [mark for mark in marks if mark in found and len(_cells(line, mark)) == len(_cells(below, mark))]
    delimiter = next(iter([*alike, *found]), None)
    words = line.split()
    named = any(not _is_number(word) and word.lower() not in _MISSING for word in words)
    if delimiter is None and len(words) > 1 and len(_cells(below, None)) == 1 and named:
        return [line.removeprefix("#").strip().strip('"')], None  # of a single column, whose name may hold blanks
    cells = _cells(line.removeprefix("#").lstrip(" "), delimiter)  # np.savetxt writes a # before the names
    count = [str(number) for number in range(len(cells))]
    # pandas writes the numbers of columns without names; an empty cell is above those of its lines.
    if line.startswith("#") or (len(cells) > 1 and cells in (count, ["", *count[:-1]])):
        return cells, delimiter
    # A line of mostly numbers is an invalid item, not a header.
    numbers, missing = sum(map(_is_number, cells)), sum(cell.lower() in _MISSING for cell in cells)
    item = missing == len(cells) or (numbers and 2 * (numbers + missing) > len(cells))
    return ([] if item else cells), delimiter


def _cells(line: str, delimiter: str | None) -> list[str]:
    """The cells of a line, without their quotes; they stand between blanks where there is no delimiter."""
    line = line.rstrip("\r\n") if delimiter else " ".join(line.split())
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter or " "))]


def _read_table(path: Path, where: str) -> dict[str, np.ndarray]:
    with open(path, encoding="utf-8-sig") as file:
        lines = {number: line for number, line in enumerate(file, 1) if line.strip()}
    if not lines:
        raise InputError(f"{where} is empty")
    first = next(iter(lines))
    heading, delimiter = _heading(list(islice(lines.values(), 2)), path)
    if heading:
        if heading == [str(number) for number in range(len(heading))]:
            print(f"{path}: line {first} only numbers the columns, as pandas does without names, and is no item; if it "
                  "is one, put a line of names above it")
        elif odd := next((name for name in heading if name[:1].isdigit()), None):
            print(f"{path}: line {first} is read as names of columns, such as {odd!r}; if it is an item, put a line of "
                  "names above it")
        del lines[first]
    if not lines:
        raise InputError(f"{where} holds a heading and no items")
    if "" in heading:
        print(f"{path}: column {heading.index('') + 1} has no name; if it only numbers lines, leave it out (pandas: "
              "index=False)")
    try:
        table = np.loadtxt(list(lines.values()), delimiter=delimiter, ndmin=2, comments=None, quotechar='"')
    except ValueError as error:
        raise InputError(f"{where}{_fault(lines, delimiter, heading) or f' cannot be read: {error}'}") from None
    if heading and len(heading) != table.shape[1]:
        raise InputError(f"{where}, line {first}: {len(heading)} names, where the table has {table.shape[1]} columns")
    # What overflows float32 is not finite for the model either.
    if len(bad := np.argwhere(~(np.abs(table) <= np.finfo(np.float32).max))):
        number, column = list(lines)[bad[0][0]], int(bad[0][1])
        raise InputError(f"{where}{_place(number, column, heading)}: {_cells(lines[number], delimiter)[column]} is not "
                         "a finite number in single precision; complete it or leave out that column or line")
    above_decimals = len(table) > 1 and not (table[0] % 1).any() and (table[1:] % 1).all()
    if not heading and (above_decimals or lines[first].strip() == "0"):
        print(f"{path}: the whole numbers in line {first} are an item; if they are a heading (pandas writes one), "
              "remove it")
    return {"arr_0": table}


def _place(line: int, column: int, heading: list[str]) -> str:
    return f", line {line}, column {column + 1}" + (f" ({heading[column]})" if heading else "")


def _fault(lines: dict[int, str], delimiter: str | None, heading: list[str]) -> str | None:
    """A description of the first cell that is not a number, or of the first line with another number of cells."""
    width = len(heading or _cells(next(iter(lines.values())), delimiter))
    for number, line in lines.items():
        cells = _cells(line, delimiter)
        if len(cells) != width:
            return f", line {number} has {counted(len(cells), 'cell')}, where the table has {width} columns"
        for column, cell in enumerate(cells):
            if not _is_number(cell):
                found = f"{cell!r} is not a number" if cell else "the cell is empty"
                advice = "a table holds only numbers: complete it, or leave out that column or line"
                if _is_number(cell.replace(",", ".")):
                    advice = "write decimals with a point, thousands without a comma"
                return f"{_place(number, column, heading)}: {found}; {advice}"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # which Python's numbers may have, and NumPy's not


_X, _Y = ("x", "images", "data", "arr_0"), ("y", "labels", "arr_1")
_MEMORY = 512 * 2**20  # bytes up to which a mapped array is read into memory
_CHUNK = 2**24  # values checked at a time


class Arrays(DataModule):
    """Images or vectors from one file.

    Names of the arrays in an .npz: x, images, data or arr_0, with labels y, labels or arr_1; or one per split, x_train
    or train_x (images_train, train_images, ...), with val (valid, validation) and test; X_train is x_train. A missing
    val or test is held out of train.

    Integers of shape (N, H, W), (N, H, W, C) or (N, C, H, W) are images. The channel axis is the one of length 1 or 3;
    if this is ambiguous, set `layout`. (N, D) numbers are vectors. Floating-point values are continuous data (images
    then need `layout`); integers have `levels`, 256 for uint8. Labels 0..K-1 are classes without names; other integers
    or strings become classes in sorted order, with names.

    Arguments:
        file: path of an .npz or .npy file, or of a table (.csv, .tsv, .txt, .data) of one item per line, with a header
            or without; a first line 0,1,2,... of several columns is the header that pandas writes, other numbers are an
            item.
        labels: path of an .npy file with the labels, for an .npy file of items.
        layout: order of the axes of images.
        levels: number of integer levels; null infers 256 for uint8 and 2 for booleans.
        val_fraction, test_fraction: share of the items held out where the file has no such split.
        flip: mirror training images at random.
        batch_size, num_workers, seed: see `DataModule`.

    Arrays above 512 MB that are stored uncompressed (np.save, np.savez) stay in the file and are read batch by batch; a
    compressed .npz is always read whole.

    Errors: `InputError` with one line for what cannot be read or understood, and for values that are not finite or
    outside 0..levels - 1, naming the item.
    """

    name = "arrays"

    def __init__(
        self,
        *,
        file: str,
        labels: str | None = None,
        layout: Literal["auto", "nchw", "nhwc"] = "auto",
        levels: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        flip: bool = False,
        **shared,
    ):
        super().__init__(**shared)
        one_of("data.layout", layout, ("auto", "nchw", "nhwc"))
        none_or_at_least(2, **{"data.levels": levels})
        self.file, self.labels = Path(data_root(file)), None if labels is None else Path(data_root(labels))
        self.layout, self.levels, self.flip = layout, levels, flip
        self.fractions = split_fractions(val_fraction, test_fraction)

    def load(self):
        """Read or map the file, determine the type of its items, check every value."""
        arrays = read_arrays(self.file, "data.file")
        parts = _find_parts(arrays, self.file)
        if self.labels is not None:
            if set(parts) != {"all"}:
                raise InputError(f"data.labels is for a file without splits, but {self.file} has {', '.join(parts)}")
            held = read_arrays(self.labels, "data.labels")
            name = next((name for name in (*_Y, *held) if name in held), None)
            if name is None:
                raise InputError(f"data.labels={self.labels} is empty")
            parts["all"] = (parts["all"][0], held[name])
        forms = {(tuple(x.shape[1:]), x.dtype.kind.replace("u", "i").replace("b", "i")) for x, _ in parts.values()}
        if len(forms) > 1:
            raise InputError(f"{self.file}: the splits hold items of different shapes or types {sorted(forms)}")
        first = next(iter(parts.values()))[0]
        kind = kind_of_items(first, self.layout, self.levels, self.file)
        if self.flip and len(kind.event(first.shape)) != 3:
            raise InputError(f"data.flip=true is for images, but {self.file} holds vectors")
        labels, names, classes = _read_labels(parts, self.labels or self.file)
        sources, content = {}, hashlib.sha256()
        for name, (x, _) in parts.items():
            _check_values(x, kind.levels, f"{self.file}" + ("" if name == "all" else f" ({name})"), content)
            sources[name] = (x, labels[name])
        spec = DataSpec(self.file.stem, kind.event(first.shape), kind.levels, classes, names,
                        columns=columns_of(self.file), fingerprint=_fingerprint(sources, content.hexdigest()))
        if first.dtype.kind == "f" and first.dtype.itemsize > 4 and len(spec.event_shape) == 1:
            require_precision(spec, torch.from_numpy(_some(first, 10_000).astype(np.float64)))
        if kind.levels is None and len(spec.event_shape) == 3:
            low, high = (float(end(_some(first, 1000))) for end in (np.min, np.max))
            if low < 0 or high > 1:
                print(f"{self.file}: values from {low:.3g} to {high:.3g}, of which pictures show 0 to 1 alone")
        return spec, self._splits(sources, kind)

    def _splits(self, sources: dict, kind: ItemKind) -> dict[str, BatchDataset]:
        base = "all" if "all" in sources else "train"
        x, y = sources[base]
        missing = [0.0 if name in sources else f for name, f in zip(SPLITS, self.fractions, strict=True)]
        rows = dict(zip(SPLITS, split_rows(y, len(x), tuple(missing), self.seed), strict=True))
        rows |= {name: mixed(rows[name], self.seed) for name in SPLITS[1:]}  # tables may be sorted by class
        own = {name: source for name, source in sources.items() if name in SPLITS[1:]}
        held = {id(x): kind.held(x) for x, _ in sources.values()}
        splits = {}
        for name in SPLITS:
            x, y = own.get(name, sources[base])
            chosen = torch.arange(len(x)) if name in own else rows[name]
            data = held[id(x)]
            splits[name] = MappedData(x, kind.convert, y, chosen) if data is None else TensorData(data, y, chosen)
        return splits


def _some(array, most: int) -> np.ndarray:
    """At most so many rows, spread over the array, and fewer of large items."""
    most = min(most, len(array), max(1, _CHUNK // int(np.prod(array.shape[1:]))))
    return np.array(array[spread_rows(len(array), most).numpy()])


def _fingerprint(sources: dict, whole: str) -> str:
    """The number of items, a hash of labels and up to a thousand items, and that of all items, `whole`.

    The first hash alone is what checkpoints of earlier versions hold, which the whole begins with.
    """
    some = hashlib.sha256()
    for x, y in sources.values():
        some.update(_some(x, 1000).tobytes() + (b"" if y is None else y.numpy().tobytes()))
    sizes = " + ".join(str(len(x)) for x, _ in sources.values())
    return f"{sizes} items, {some.hexdigest()[:12]}, all of them {whole[:12]}"


@dataclass(frozen=True)
class ItemKind:
    """How rows of the array become a batch: axes to move, number of levels."""

    axes: str
    levels: int | None

    def event(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Event shape of an array of this shape."""
        if self.axes == "nhw":
            return (1, *shape[1:])
        return (shape[3], shape[1], shape[2]) if self.axes == "nhwc" else tuple(shape[1:])

    def convert(self, rows: np.ndarray) -> Tensor:
        """(B, *event) tensor: uint8 up to 256 levels, int32 above, float32 for continuous values."""
        dtype = np.float32 if self.levels is None else np.uint8 if self.levels <= 256 else np.int32
        x = torch.from_numpy(np.ascontiguousarray(rows, dtype=dtype))
        if self.axes == "nhw":
            return x[:, None]
        return x.permute(0, 3, 1, 2).contiguous() if self.axes == "nhwc" else x

    def held(self, array) -> Tensor | None:
        """The whole array as a tensor, or None if it is mapped and large."""
        if isinstance(array, MappedArray):
            return self.convert(np.array(array.whole())) if array.nbytes <= _MEMORY else None
        return self.convert(array)


def _find_parts(arrays: dict, file: Path) -> dict[str, tuple]:
    """(items, labels or None) of each split in the file, or of "all"."""

    others = {"_".join(SPLIT_NAMES.get(word, word) for word in name.lower().split("_")): name for name in arrays}
    known, unread = others | {name: name for name in arrays}, set(arrays)

    def pick(names, split):
        spelt = names if split == "all" else [s for n in names for s in (f"{n}_{split}", f"{split}_{n}")]
        name = next((known[n] for n in spelt if n in known), None)
        unread.discard(name)
        return arrays.get(name)

    parts = {split: (pick(_X, split), pick(_Y, split)) for split in ("all", *SPLITS)}
    if parts["train"][0] is None and "train" in known and parts["all"][0] is None:
        parts = {split: (pick((split,), "all"), parts[split][1]) for split in SPLITS}
    found = {split: part for split, part in parts.items() if part[0] is not None}
    if not found or ("all" not in found and "train" not in found):
        raise InputError(f"{file} holds {', '.join(sorted(arrays)) or 'nothing'}: name the items x (or images), or "
                         "x_train, x_val, x_test")
    unread |= {known[name] for name in _Y if name in known and "all" not in found}
    if unread:
        print(f"{file}: {', '.join(sorted(unread))} not read; labels are called y or labels, with x_train y_train")
    if "all" in found and len(found) > 1:
        raise InputError(f"{file} holds both undivided items and splits ({', '.join(found)}): keep one of the two")
    return found


def kind_of_items(array, layout: str, levels: int | None, file: Path | str) -> ItemKind:
    """What the rows of an array are, by its type, its shape and the settings; `file` is its name in messages."""
    shape, dtype = tuple(array.shape), array.dtype
    if dtype.kind not in "fiub":
        raise InputError(f"{file}: items of type {dtype} cannot be modelled, save integers or floating point numbers")
    if len(shape) < 2 or min(shape[1:]) < 1:
        raise InputError(f"{file}: items of shape {shape}; expected (N, D), (N, H, W), (N, H, W, C) or (N, C, H, W)")
    if dtype.kind == "f" and levels is not None:
        raise InputError(f"{file}: data.levels={levels} is for integers, but the values are {dtype}")
    if levels is not None and levels > 2**31:
        raise InputError(f"{file}: data.levels={levels}: integers of more than 31 bits are not held exactly")
    if dtype.kind in "iu" and dtype != np.uint8 and levels is None:
        raise InputError(f"{file}: the values are {dtype}: set data.levels to their number of levels, or save uint8")
    if dtype.kind != "f":
        levels = levels or (2 if dtype.kind == "b" else 256)
    if len(shape) == 2:
        return ItemKind("nd", levels)
    if dtype.kind == "f" and layout == "auto":
        raise InputError(f"{file}: {dtype} images: save them as uint8 0..255, or take them as continuous data by "
                         "data.layout=nchw or data.layout=nhwc")
    if len(shape) == 3:
        return ItemKind("nhw", levels)
    if len(shape) != 4:
        raise InputError(f"{file}: items of shape {shape[1:]} have more than three axes")
    if layout == "auto":
        front, back = shape[1] in (1, 3), shape[3] in (1, 3)
        if front == back:
            why = "both the second and the last axis" if front else "neither the second nor the last axis"
            raise InputError(f"{file}: shape {shape}: {why} could be channels; set data.layout to nchw or nhwc")
        layout = "nchw" if front else "nhwc"
    return ItemKind(layout, levels)


def _check_values(array, levels: int | None, where: str, content) -> None:
    """Raise an InputError naming the first item with a value that is not finite or not a level; hash all values."""
    if len(array) == 0:
        raise InputError(f"{where} holds no items")
    step = max(1, _CHUNK // int(np.prod(array.shape[1:])))
    for start in range(0, len(array), step):
        rows = np.asarray(array[start : start + step])
        content.update(np.ascontiguousarray(rows))
        with np.errstate(over="ignore"):  # what overflows float32 is not finite for the model either
            bad = ~np.isfinite(rows.astype(np.float32)) if levels is None else (rows < 0) | (rows >= levels)
        if bad.any():
            at = tuple(np.argwhere(bad)[0])
            fault = "is not finite" if levels is None else f"is outside 0..{levels - 1} (data.levels)"
            raise InputError(f"{where}: item {start + at[0]} holds {rows[at]}, which {fault}")


def _read_labels(found: dict, file: Path) -> tuple[dict[str, Tensor | None], tuple[str, ...], int | None]:
    """Labels 0..K-1 of each part, class names (none for plain numbers 0..K-1) and K."""
    given = {name: np.array(y[...]) for name, (_, y) in found.items() if y is not None}
    if not given:
        return dict.fromkeys(found), (), None
    if len(given) < len(found):
        raise InputError(f"{file}: only {', '.join(given)} has labels, of {', '.join(found)}")
    for name, y in given.items():
        if y.ndim == 2 and y.shape[1] == 1:
            y = given[name] = y[:, 0]
        if y.shape != (len(found[name][0]),):
            raise InputError(f"{file}: labels of shape {y.shape} for {len(found[name][0])} items")
        if y.dtype.kind not in "iubUS":
            raise InputError(f"{file}: labels of type {y.dtype}; expected integers or texts, in an .npy file or with "
                             "the items in an .npz")
        if y.dtype.kind == "S":
            y = np.char.decode(y, "utf-8", "backslashreplace")
        given[name] = y.astype(np.int64) if y.dtype.kind in "iub" else y  # numpy joins int64 and uint64 as floats
        if y.dtype.kind == "u" and (given[name] < 0).any():
            raise InputError(f"{file}: label {y.max()} is above 2^63 - 1: number the classes from 0 on, or save texts")
    values = np.unique(np.concatenate(list(given.values())))
    plain = values.dtype.kind == "i" and (values == np.arange(len(values))).all()
    names = () if plain else tuple(map(str, values.tolist()))
    return {name: torch.from_numpy(np.searchsorted(values, y)) for name, y in given.items()}, names, len(values)
