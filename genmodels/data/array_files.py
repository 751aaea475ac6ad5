"""Array files: .npy, .npz and text tables as named arrays, mapped instead of read where that is possible."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from genmodels.data.spec import Batch
from genmodels.errors import InputError

_BLOCK = 2**22
TABLES = (".csv", ".tsv", ".txt", ".data")


class MappedArray:
    """An array inside a file that is read item by item; worker processes open the file anew.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        ...     np.save(file.name, np.arange(6).reshape(3, 2))
        ...     np.asarray(MappedArray.of_npy(Path(file.name))[[2, 0]]).tolist()
        [[4, 5], [0, 1]]
    """

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, fortran: bool):
        self.path, self.dtype, self.shape, self.offset, self.fortran = path, dtype, shape, offset, fortran
        self._open: np.memmap | None = None

    @classmethod
    def of_npy(cls, path: Path, start: int = 0) -> MappedArray:
        """The array whose .npy header begins at byte `start` of the file."""
        with open(path, "rb") as file:
            file.seek(start)
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in readers:
                raise ValueError(f"version {version} of the .npy format is not supported")
            shape, fortran, dtype = readers[version](file)
            offset = file.tell()
        return cls(path, dtype, shape, offset, fortran)

    @property
    def nbytes(self) -> int:
        """Size of the values."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """The array, mapped."""
        if self._open is None:
            if self.dtype.hasobject:
                raise ValueError("holds Python objects, which could run code when read: save plain numbers")
            if self.nbytes == 0:
                return np.empty(self.shape, self.dtype)
            order = "F" if self.fortran else "C"
            self._open = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)
        return self._open

    def __getitem__(self, rows) -> np.ndarray:
        return self.whole()[rows]

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": None}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name ("arr_0" for one without names), mapped if stored uncompressed."""
    readers = {".npy": _read_npy, ".npz": _read_npz, **dict.fromkeys(TABLES, _read_table)}
    if not path.is_file():
        raise InputError(f"data.file={path} {'is not a file' if path.exists() else 'does not exist'}")
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"data.file={path} must end in {', '.join(readers)}")
    try:
        return reader(path)
    except InputError:
        raise
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile) as error:
        raise InputError(f"data.file={path} cannot be read: {' '.join(str(error).split())}") from None


def _read_npy(path: Path) -> dict[str, MappedArray]:
    array = MappedArray.of_npy(path)
    array.whole()
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
                if array.offset + array.nbytes != start + member.file_size:
                    raise ValueError(f"{name} has not the size that its header declares")
                with archive.open(member) as file:  # what is mapped is not compared with its checksum again
                    while file.read(_BLOCK):
                        pass
                array.whole()
            else:
                with archive.open(member) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
            arrays[name] = array
    return arrays


def columns_of(path: Path) -> tuple[str, ...]:
    """The names that the heading of a table gives its columns; none where the file has no heading, or is no table."""
    if path.suffix.lower() not in TABLES:
        return ()
    with open(path, encoding="utf-8-sig") as file:
        return tuple(_heading(next(line for line in file if line.strip()))[0])


def _heading(line: str) -> tuple[list[str], str | None]:
    """The names in the first line of a table, none if it is an item; and what stands between its cells."""
    delimiter = next((mark for mark in (",", ";", "\t") if mark in line), None)
    cells = [cell.strip().strip('"') for cell in line.split(delimiter)]
    # With a word or a gap among numbers it is a faulty item.
    return ([] if 2 * sum(map(_is_number, cells)) > len(cells) else cells), delimiter


def _read_table(path: Path) -> dict[str, np.ndarray]:
    with open(path, encoding="utf-8-sig") as file:
        lines = {number: line for number, line in enumerate(file, 1) if line.strip()}
    if not lines:
        raise InputError(f"data.file={path} is empty")
    first = next(iter(lines))
    heading, delimiter = _heading(lines[first])
    if heading:
        del lines[first]
    if not lines:
        raise InputError(f"data.file={path} holds a heading and no items")
    cells = {number: line.split(delimiter) for number, line in lines.items()}
    try:
        table = np.loadtxt(list(lines.values()), delimiter=delimiter, ndmin=2, comments=None)
    except ValueError as error:
        raise InputError(f"data.file={path}{_fault(cells, heading) or f' cannot be read: {error}'}") from None
    if heading and len(heading) != table.shape[1]:
        raise InputError(f"data.file={path}, line {first}: {len(heading)} names, where the table has {table.shape[1]} "
                         "columns")
    with np.errstate(over="ignore"):  # what overflows float32 is not finite for the model either
        bad = np.argwhere(~np.isfinite(table.astype(np.float32)))
    if len(bad):
        (number, row), column = list(cells.items())[bad[0][0]], int(bad[0][1])
        raise InputError(f"data.file={path}{_place(number, column, heading)}: {row[column].strip()} is not a finite number "
                         "of single precision; complete it or leave that column or line out")
    return {"arr_0": table}


def _place(line: int, column: int, heading: list[str]) -> str:
    return f", line {line}, column {column + 1}" + (f" ({heading[column]})" if heading else "")


def _fault(lines: dict[int, list[str]], heading: list[str]) -> str | None:
    """What is wrong with the first cell that is no number, or the first line of another length."""
    width = len(heading or next(iter(lines.values())))
    for number, cells in lines.items():
        if len(cells) != width:
            return f", line {number}: {len(cells)} cells, where the table has {width} columns"
        for column, cell in enumerate(map(str.strip, cells)):
            if not _is_number(cell):
                found = f"{cell!r} is no number" if cell else "the cell is empty"
                return f"{_place(number, column, heading)}: {found}; a table holds numbers alone, complete it or " \
                       "leave that column or line out"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class MappedData(Dataset):
    """A split of which only the items of a batch are read from the file.

    Arguments:
        array: (N, ...) the mapped array.
        convert: makes the (B, *event) tensor of a batch from the rows of the array.
        cond: (N,) labels or None.
        rows: (M,) which items form this split.
    """

    def __init__(self, array: MappedArray, convert, cond: Tensor | None, rows: Tensor):
        self.array, self.convert, self.cond, self.rows = array, convert, cond, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, positions: Sequence[int] | Tensor) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.int64)
        rows = self.rows[index]
        x = self.convert(np.array(self.array[rows.numpy()]))
        return Batch(x, None if self.cond is None else self.cond[rows], index=index)
