"""Several processes for one command, as torchrun starts them: the first tells the others what to do."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from genmodels.core.errors import Interrupted, RunError, explain

_PATIENCE = timedelta(days=30)  # a process may wait for the first one as long as that works alone; a loss ends it


_LAUNCHED = "GENMODELS_LAUNCHED"  # set in processes of `launch`, which says itself what became of them


class Ranks:
    """The processes of one command; this one alone where there is one.

    The first follows the command and calls `run` where there is work to share; the others `serve`, and find what they
    work on under the same number in their `members`.

    Example:
        >>> ranks = Ranks()
        >>> ranks.members.append([1, 2, 3])
        >>> ranks.run(lambda member, first: sum(member[first:]), ranks.members[0], 1)
        [5]
    """

    def __init__(self):
        joined = distributed.is_available() and distributed.is_initialized()
        self.rank, self.size = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
        self.members: list[Any] = []

    def share(self, parts: Sequence) -> Sequence:
        """This process's part: every W-th from its rank on; nothing is padded, some may have one more than others."""
        return parts[self.rank :: self.size]

    def run(self, function: Callable, member: Any, *arguments) -> list:
        """`function(member, *arguments)` in every process; the results in the order of ranks.

        Raises:
            Exception: the first that any of them raised.
        """
        if self.size == 1:
            return [function(member, *arguments)]
        number = next(k for k, one in enumerate(self.members) if one is member)
        distributed.broadcast_object_list([(function, number, arguments)])
        return self._answer(function, number, arguments)

    def _answer(self, function: Callable, number: int, arguments: tuple) -> list:
        try:
            result = function(self.members[number], *arguments)
        except Exception as error:
            if explain("", error) is None:
                traceback.print_exc()
            result = error if _can_travel(error) else RunError(str(error))
        results: list | None = [None] * self.size if self.rank == 0 else None
        distributed.gather_object(result, results)
        for found in results or []:
            if isinstance(found, Exception):
                raise found
        return results or []

    def serve(self) -> None:
        """Do what the first process says, until it has nothing more."""
        while True:
            received: list = [None]
            distributed.broadcast_object_list(received)
            if received[0] is None:
                return
            self._answer(*received[0])


def _can_travel(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


@contextmanager
def ranks() -> Iterator[None]:
    """Join the processes that torchrun started for this command by gloo; at the end the others stop to `serve`.

    Of an error that ends all of them the first to fail prints its line, the others end without one. When one is lost,
    torchrun ends the others, and those that wait for it notice that its connection is closed.

    Raises:
        RunError: when another process has ended.
    """
    store, rank, size = next(distributed.rendezvous("env://", timeout=_PATIENCE))
    own = distributed.PrefixStore("genmodels", store)
    distributed.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=_PATIENCE)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", size))))
    try:
        yield
        if rank == 0:
            with suppress(Exception):  # a command that had nothing to share has left the others no word to wait for
                distributed.broadcast_object_list([None])
    except (Exception, KeyboardInterrupt, Interrupted) as error:
        later = False
        with suppress(Exception):  # the store is gone with the process that held it
            later = own.add("failed", 1) > 1
        if rank == 0 and isinstance(error, Exception):
            with suppress(Exception):  # some may be gone
                distributed.broadcast_object_list([None])
        lost = isinstance(error, RuntimeError) and "onnection" in str(error)
        if later or (_LAUNCHED in os.environ and (lost or isinstance(error, Interrupted))):
            raise SystemExit(getattr(error, "exit_code", 1)) from None
        if lost:
            raise RunError("another process has ended; what was finished is kept: run the same command again") from None
        raise
    finally:
        distributed.destroy_process_group()


def launch(function: Callable, processes: int, *arguments) -> None:
    """Call a function in several processes of this machine that torchrun's own launcher starts.

    Raises:
        SystemExit: with the exit code of the first that failed, which has said why.
        Interrupted: on Ctrl-C or SIGTERM, after all of them have ended.
    """
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()), max_restarts=0, monitor_interval=0.2, start_method="spawn",
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP,
                                                                signal.SIGQUIT)}
    os.environ[_LAUNCHED] = "1"
    try:
        elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode < 0:
            raise RunError(f"process {first.local_rank} was killed by {signal.Signals(-first.exitcode).name}; what was "
                           "finished is kept: run the same command again") from None
        raise SystemExit(first.exitcode) from None
    except SignalException:
        raise Interrupted("interrupted; what was finished is kept") from None
    finally:
        del os.environ[_LAUNCHED]
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
