"""The order of the data, and the loaders that serve it: whole batches, resumable, sharded without duplicates."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from genmodels.core.data import Batch
from genmodels.core.errors import InputError, RunError, at_least
from genmodels.core.random import seed_of


class BatchDataset(Protocol):
    """A split: `len` and `__getitems__`, which makes a whole batch from many positions at once."""

    def __len__(self) -> int: ...

    def __getitems__(self, positions: Sequence[int] | Tensor) -> Batch: ...


class TensorData(Dataset):
    """A split held in memory, from which a batch is taken by tensor indexing.

    Arguments:
        x: (N, *event), all items, of which the split is a part.
        cond: (N,) labels or None.
        rows: (M,) which items form this split, None for all; nothing is copied.

    Example:
        >>> data = TensorData(torch.arange(10)[:, None], rows=torch.tensor([7, 3, 5]))
        >>> data.__getitems__([2, 0]).x.flatten(), data.__getitems__([2, 0]).index
        (tensor([5, 7]), tensor([2, 0]))
    """

    def __init__(self, x: Tensor, cond: Tensor | None = None, rows: Tensor | None = None):
        self.x, self.cond, self.rows = x, cond, rows

    def __len__(self) -> int:
        return len(self.x if self.rows is None else self.rows)

    def __getitems__(self, positions: Sequence[int] | Tensor) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.int64)
        rows = index if self.rows is None else self.rows[index]
        # index_select copies whole rows, ten times as fast as x[rows] on bytes.
        x, cond = (None if value is None else value.index_select(0, rows) for value in (self.x, self.cond))
        return Batch(x, cond, index=index)

    def __getitem__(self, position: int) -> Batch:
        return self.__getitems__([position])


class MappedArray:
    """An array in a file that is read item by item; each worker process opens the file itself.

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


class MappedData(Dataset):
    """A split that reads only the items of a batch from the file.

    Arguments:
        array: (N, ...) the mapped array.
        convert: makes the (B, *event) tensor of a batch from the rows of the array.
        cond: (N,) labels or None.
        rows: (M,) which items form this split.
    """

    def __init__(self, array: MappedArray, convert: Callable, cond: Tensor | None, rows: Tensor):
        self.array, self.convert, self.cond, self.rows = array, convert, cond, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, positions: Sequence[int] | Tensor) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.int64)
        rows = self.rows[index]
        x = self.convert(np.array(self.array[rows.numpy()]))
        return Batch(x, None if self.cond is None else self.cond[rows], index=index)


class Augmented(Dataset):
    """A training split whose items are mirrored left to right with probability 1/2.

    Whether an item is mirrored is a pure function of (order_seed, epoch, position), so that workers, batch size and
    resuming do not change it. The epoch is passed with the positions, because workers outlive epochs.
    """

    def __init__(self, data: BatchDataset, order_seed: int, flip: bool):
        self.data, self.order_seed, self.flip = data, order_seed, flip
        self._drawn: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, request: tuple[int, Tensor]) -> Batch:
        epoch, positions = request
        drawn = getattr(self.data, "drawn", None)  # of `Transported`: the source items change from epoch to epoch
        batch = self.data.__getitems__(positions) if drawn is None else drawn(positions, self.order_seed, epoch)
        if self.flip:
            pixels, turned = batch.x.numpy(), self._turned(epoch)[positions].numpy()
            # numpy writes into the batch's memory; torch's `where` and index_put cost five times as much on bytes.
            pixels[turned] = pixels[turned][..., ::-1]
        return batch

    def _turned(self, epoch: int) -> Tensor:
        """(N,) which items are mirrored in this epoch."""
        if self._drawn is None or self._drawn[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self.order_seed, "flip", epoch))
            self._drawn = epoch, torch.randint(2, (len(self),), generator=generator, dtype=torch.uint8).bool()
        return self._drawn[1]


def one_process() -> tuple[int, int]:
    """Rank and number of processes of a single process."""
    return 0, 1


class ResumableBatchSampler(Sampler):
    """Batches of an epoch as a pure function of (order_seed, epoch, global batch size).

    The epoch's permutation is cut into global batches; of global batch b process `rank` of `world` gets the positions
    rank, rank + world, ... Every process has the same number of batches and no item is served twice. The last
    incomplete global batch is dropped, unless it is the only one (and there is one process).

    Arguments:
        size: number of items.
        batch_size: items per batch, over all processes together.
        order_seed: seed of the permutations.
        processes: returns (rank, world); called when an epoch begins, since loaders are made before processes join.

    Iterating gives (epoch, positions (B / world,) int64) pairs.

    Example:
        >>> sampler = ResumableBatchSampler(10, 4)
        >>> whole = [positions.tolist() for _, positions in sampler]
        >>> sampler.set_position(0, 1)
        >>> [positions.tolist() for _, positions in sampler] == whole[1:], len(sampler)
        (True, 2)
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        order_seed: int = 0,
        processes: Callable[[], tuple[int, int]] = one_process,
    ):
        at_least(1, size=size, batch_size=batch_size)
        self.size, self.batch_size, self.order_seed, self.processes = size, batch_size, order_seed, processes
        self.epoch = 0
        self._position: tuple[int, int] | None = None

    @property
    def sampler(self) -> ResumableBatchSampler:
        """Itself, because Lightning looks for `set_epoch` here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration (an explicitly set position takes precedence)."""
        self.epoch = int(epoch)

    def set_position(self, epoch: int, batches_done: int) -> None:
        """Let the next iteration, and only that one, start after `batches_done` batches of `epoch`."""
        if epoch < 0 or batches_done < 0:
            raise ValueError(f"epoch and batches_done must not be negative, got {epoch} and {batches_done}")
        # A position at the end of an epoch is the start of the next one.
        self._position = (epoch + batches_done // len(self), batches_done % len(self))

    def order(self, epoch: int) -> Tensor:
        """(size,) the permutation of an epoch."""
        generator = torch.Generator().manual_seed(seed_of(self.order_seed, "order", epoch))
        return torch.randperm(self.size, generator=generator)

    def __len__(self) -> int:
        return max(1, self.size // self.batch_size)

    def begin(self) -> tuple[int, int]:
        """The epoch of the iteration that begins, and the number of its first batch."""
        epoch, first = (self.epoch, 0) if self._position is None else self._position
        self.epoch, self._position = epoch, None
        return epoch, first

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        # A generator, because torch's loader makes iterators that it never uses.
        epoch, first = self.begin()
        rank, world = self.processes()
        if self.batch_size % world:
            raise InputError(f"data.batch_size={self.batch_size} must be a multiple of the {world} processes")
        if world > 1 and self.size < self.batch_size:
            raise InputError(f"data.batch_size={self.batch_size} is more than the {self.size} training items: lower it")
        order = self.order(epoch)
        for b in range(first, len(self)):
            yield epoch, order[b * self.batch_size : (b + 1) * self.batch_size][rank::world]


class SequentialBatches(Sampler):
    """Batches of given positions in order, shared among processes; the last one may be shorter.

    Process `rank` of `world` gets positions rank, rank + world, ...: nothing is padded or repeated.
    """

    def __init__(self, positions: Tensor, batch_size: int, processes: Callable[[], tuple[int, int]] = one_process):
        self.positions, self.batch_size, self.processes = positions, batch_size, processes

    def _batches(self) -> tuple[Tensor, ...]:
        rank, world = self.processes()
        mine = self.positions[rank::world]
        return mine.split(max(1, self.batch_size // world)) if len(mine) else ()

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches())


class Loader(DataLoader):
    """torch's DataLoader over whole batches, which starts at the first request for a batch.

    Lightning makes the iterator before it sets the epoch, and workers would start prefetching immediately. Waiting for
    the first `next` gives the same batches with any number of workers. `waited` counts the seconds of waiting for them.
    """

    waited = 0.0

    def __init__(self, data: BatchDataset, batches: Sampler, num_workers: int = 0, pin_memory: bool = False):
        super().__init__(
            data,
            batch_sampler=batches,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            collate_fn=_whole,
            worker_init_fn=_one_thread,
            generator=torch.Generator().manual_seed(0),  # else starting an iterator draws from the global generator
        )

    def __iter__(self) -> Iterator[Batch]:
        batches = super().__iter__()
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches, None)
            except (InputError, RunError) as error:
                # From a worker process the message is a traceback, whose last line is the error.
                name, _, message = str(error).rstrip().rpartition("\n")[2].partition("Error: ")
                raise type(error)(message if name.startswith("genmodels.") else str(error)) from None
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration of a training loader."""
        self.batch_sampler.set_epoch(epoch)


def training_loader(
    data: BatchDataset, sampler: ResumableBatchSampler, flip: bool = False, num_workers: int = 0,
    pin_memory: bool = False, batches: Sampler | None = None,
) -> Loader:
    """The loader of a training split: shuffled, resumable, with random mirroring if `flip`.

    `batches` replaces the batches of one epoch (an endless stream of them, for instance).
    """
    return Loader(Augmented(data, sampler.order_seed, flip), batches or sampler, num_workers, pin_memory)


def _whole(batch: Batch) -> Batch:
    return batch


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)
    # Signals to the process group, such as Ctrl-C, are for the main process, which ends its workers after saving.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgrp"):
        os.setpgrp()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM signals every process by itself
