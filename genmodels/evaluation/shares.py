"""Work shared by several processes: each takes its part of the indices, and every index comes back exactly once."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from genmodels.errors import RunError


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
    except Exception as error:  # told to the process that started this one, which raises it
        message = False, error
    try:
        sent = pickle.dumps(message)
    except Exception:
        sent = pickle.dumps((False, RunError(str(message[1]))))
    sender.send_bytes(sent)
