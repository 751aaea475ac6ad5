"""Work in two processes that gloo joins through a file: one thread each, and a time after which they are stopped."""

from __future__ import annotations

import faulthandler
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from genmodels.core.processes import Ranks

_FORKS = "fork" in torch.multiprocessing.get_all_start_methods()


def fork(test):
    """Mark a test that forks: it runs before all others, and is skipped where there is no fork."""
    return pytest.mark.forks(pytest.mark.skipif(not _FORKS, reason="no fork on this system")(test))


def by_forks(patch: pytest.MonkeyPatch) -> None:
    """Let `launch` fork this process, which has everything imported, and still hand on only what can be pickled."""
    from torch.distributed.launcher import api

    start, config = api.elastic_launch, api.LaunchConfig

    def starting(how, function):
        return lambda *given: start(how, function)(*pickle.loads(pickle.dumps((function, given)))[1])

    patch.setattr(api, "elastic_launch", starting)
    patch.setattr(api, "LaunchConfig", lambda **options: config(**options | {"start_method": "fork"}))


def forked(work, *calls: tuple, codes: tuple = (0, 0)) -> None:
    """Run `work(*call)` for each call in its own process, with one thread: OpenMP's threads do not survive a fork."""

    def one(call: tuple) -> None:
        faulthandler.dump_traceback_later(100, exit=True)
        torch.set_num_threads(1)
        work(*call)

    processes = [torch.multiprocessing.get_context("fork").Process(target=one, args=(call,)) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == list(codes)


@contextmanager
def joined(meet: Path | str, rank: int) -> Iterator[None]:
    """One of two processes that gloo joins; none leaves before both are done, as closing can lose the last message."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    yield
    together(meet, rank)
    torch.distributed.destroy_process_group()


def together(meet: Path | str, rank: int) -> None:
    """Wait until the other process is here too, without the connection of the two."""
    here, there = (Path(f"{meet}-{number}-is-done") for number in (rank, 1 - rank))
    here.touch()
    while not there.exists():
        time.sleep(0.01)


def in_two(folder: Path, work, *arguments) -> list:
    """What `work(ranks, *arguments)` gives in each of two processes."""
    folder.mkdir()

    def one(rank: int) -> None:
        with joined(folder / "meet", rank):
            torch.save(work(Ranks(), *arguments), folder / f"{rank}.pt")
            if rank == 0:
                torch.distributed.broadcast_object_list([None])  # the other one stops to serve

    forked(one, (0,), (1,))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
