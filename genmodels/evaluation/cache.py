"""What was computed once: results by the hash of everything they depend on."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genmodels.core.errors import RunError
from genmodels.core.files import write_whole

#: Raised when the layout of stored results changes.
FORMAT = 1


@functools.cache
def code_hash() -> str:
    """A hash of the sources of this package: other code is not trusted to have computed the same."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(**parts) -> str:
    """The name of a result: a hash of plain values.

    Example:
        >>> key_of(stage="cost", seed=0) == key_of(seed=0, stage="cost") != key_of(stage="cost", seed=1)
        True
    """
    text = json.dumps({**parts, "format": FORMAT}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """Results in a folder, one file each, written whole; a file that cannot be read is as good as none.

    Arguments:
        folder: where; None keeps nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = Cache(Path(folder))
        ...     first = cache.get("a"), cache.put("a", {"x": torch.ones(2)})["x"].tolist()
        ...     first, cache.get("a")["x"].tolist(), Cache(None).get("a")
        ((None, [1.0, 1.0]), [1.0, 1.0], None)
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    def get(self, key: str):
        """The result of that name, or None."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.pt"
        if not path.is_file():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # cut by a full disk, or written by something else: computed anew and overwritten
            return None

    def put(self, key: str, value):
        """Keep a result of tensors and plain types; returns it."""
        if self.folder is not None:
            write_whole(self.folder / f"{key}.pt", lambda file: torch.save(value, file))
        return value


def strided(count: int, processes: int) -> list[Tensor]:
    """The indices of each process: rank, rank + processes, ...; nothing is padded.

    Example:
        >>> [share.tolist() for share in strided(5, 2)]
        [[0, 2, 4], [1, 3]]
    """
    return [torch.arange(rank, count, processes) for rank in range(processes)]


def blocks(count: int, processes: int) -> list[tuple[int, int]]:
    """(first, number) of consecutive indices for each process; those with none are left out.

    Example:
        >>> blocks(5, 2), blocks(1, 2)
        ([(0, 3), (3, 2)], [(0, 1)])
    """
    size = -(-count // processes)
    return [(start, min(size, count - start)) for start in range(0, count, size)]


def in_processes(function: Callable, arguments: Sequence[tuple]) -> list[Any]:
    """`function(*one)` for each of `arguments`, each in a process of its own; the results in their order.

    Raises:
        Exception: what a process raised; the others are stopped.
        RunError: when one ends without a word.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // len(arguments))
    waiting, workers = {}, []
    for number, one in enumerate(arguments):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(sender, threads, function, one), daemon=True)
        worker.start()
        sender.close()
        workers.append(worker)
        waiting[receiver] = number
    results: list[Any] = [None] * len(arguments)
    try:
        while waiting:
            for receiver in wait(list(waiting)):
                number = waiting.pop(receiver)
                try:
                    done, value = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    raise RunError(f"process {number} of {len(arguments)} ended without a result: was its memory "
                                   "enough? Try a smaller batch_size, or processes=1") from None
                if not done:
                    raise value
                results[number] = value
    finally:
        for worker in workers:
            if worker.is_alive() and waiting:
                worker.terminate()
            worker.join()
    return results


def _work(sender, threads: int, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(threads)
    try:
        message = True, function(*arguments)
    except Exception as error:  # sent to the process that started this one, which raises it
        message = False, error
    try:
        sent = pickle.dumps(message)
    except Exception:
        sent = pickle.dumps((False, RunError(str(message[1]))))
    sender.send_bytes(sent)
