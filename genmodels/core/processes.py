"""Several processes of one command: rank, gather and sum, commands that torchrun has started, sharded weights.

In sampling and evaluation the first process controls the others; in training all of them do the same.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from genmodels.core.errors import InputError, Interrupted, RunError, explain

_TIMEOUT = timedelta(days=30)  # the others may wait as long as the first works alone; the end of a process ends it
_GRACE = timedelta(seconds=10)
_POLL = 0.2  # seconds after which the launcher checks its processes again
_LAUNCHED = "GENMODELS_LAUNCHED"  # set in processes of `launch`, which reports their end itself


def joined() -> bool:
    """Whether this process has joined the process group of its run."""
    return distributed.is_available() and distributed.is_initialized()


def rank_world() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) for a single process.

    Row b of process r of W is row b W + r of the global batch.

    Example:
        >>> rank_world()
        (0, 1)
    """
    return (distributed.get_rank(), distributed.get_world_size()) if joined() else (0, 1)


def gather(parts: list[Any]) -> list[Any]:
    """The lists of all processes, joined in the order of their ranks; the list itself for a single process.

    Example:
        >>> gather([1, 2])
        [1, 2]
    """
    if not joined():
        return parts
    lists: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(lists, parts)
    return [part for some in lists for part in some]


def summed(values: Tensor) -> Tensor:
    """The sum over all processes, in place; without a derivative."""
    if joined():
        distributed.all_reduce(values)
    return values


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        return summed(values.clone()) / distributed.get_world_size()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return summed(gradient.clone()) / distributed.get_world_size()


def averaged(values: Tensor) -> Tensor:
    """The mean over all processes, with its derivative: every process must also take the backward pass.

        y = (1 / W) sum_r x_r,    dL/dx_r = (1 / W) sum_s dL_s/dy

    Example:
        >>> averaged(torch.tensor([3.0]))
        tensor([3.])
    """
    return _Mean.apply(values) if joined() else values


# ---- commands that torchrun has started -----------------------------------------------------------------------------


class Ranks:
    """The processes of one command, or a single one.

    The first follows the command and calls `run` where there is work to share; the others `serve`, and find the object
    of the work under the same number in their `members`.

    Example:
        >>> ranks = Ranks()
        >>> ranks.members.append([1, 2, 3])
        >>> ranks.run(lambda member, first: sum(member[first:]), ranks.members[0], 1)
        [5]
    """

    def __init__(self):
        self.rank, self.size = rank_world()
        self.members: list[Any] = []

    def share(self, parts: Sequence) -> Sequence:
        """This process's part: every W-th from its rank on, without padding."""
        return parts[self.rank :: self.size]

    def run(self, function: Callable, member: Any, *arguments) -> list:
        """`function(member, *arguments)` in every process; the results in the order of ranks.

        Raises:
            Exception: the first of them by rank.
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
            result = error if _can_be_pickled(error) else RunError(str(error))
        results: list | None = [None] * self.size if self.rank == 0 else None
        distributed.gather_object(result, results)
        for found in results or []:
            if isinstance(found, Exception):
                raise found
        return results or []

    def serve(self) -> None:
        """Take part in the work of the first process until it is done."""
        while True:
            received: list = [None]
            distributed.broadcast_object_list(received)
            if received[0] is None:
                return
            self._answer(*received[0])


def _can_be_pickled(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


@contextmanager
def ranks() -> Iterator[None]:
    """Join the processes that torchrun started for this command by gloo; at the end `serve` returns in the others.

    If an error ends all of them, only the first to fail prints it. If a process is lost, torchrun ends the others, and
    those that wait for it notice that its connection is closed.

    Raises:
        RunError: when another process has ended.
    """
    store, rank, size = next(distributed.rendezvous("env://", timeout=_TIMEOUT))
    own = distributed.PrefixStore("genmodels", store)
    distributed.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=_TIMEOUT)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", size))))
    try:
        yield
        if rank == 0:
            with suppress(Exception):  # the others do not wait if the command had nothing to share
                distributed.broadcast_object_list([None])
                # A connection that is closed can lose what was sent last.
                own.wait([f"left {other}" for other in range(1, size)], _GRACE)
    except (Exception, KeyboardInterrupt, Interrupted) as error:
        reported = False
        with suppress(Exception):  # the store ends with the process that holds it
            reported = own.add("failed", 1) > 1
        if rank == 0 and isinstance(error, Exception):
            with suppress(Exception):  # some may have ended
                distributed.broadcast_object_list([None])
        lost = isinstance(error, RuntimeError) and "onnection" in str(error)
        if lost and _LAUNCHED in os.environ:
            time.sleep(5 * _POLL)  # so that the launcher finds the one that was lost, and not this one
        if reported or (_LAUNCHED in os.environ and (lost or isinstance(error, Interrupted))):
            raise SystemExit(getattr(error, "exit_code", 1)) from None
        if lost:
            raise RunError("another process has ended; what was finished is kept: run the same command again") from None
        raise
    finally:
        with suppress(Exception):
            own.set(f"left {rank}", "")
        distributed.destroy_process_group()


def launch(function: Callable, processes: int, *arguments) -> None:
    """Call a function in several processes of this machine that torchrun's own launcher starts.

    Raises:
        SystemExit: with the exit code of the first that failed, which has printed the reason.
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
        run_id=str(os.getpid()), max_restarts=0, monitor_interval=_POLL, start_method="spawn",
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


# ---- sharded weights ---------------------------------------------------------------------------------------------


def shard(core: nn.Module, averages: list[nn.Module], networks: list[nn.Module], mesh) -> None:
    """Shard the networks' weights, in a core and in its averages, over the processes (FSDP2).

    Each member of a list of modules (a block of a U-Net, a layer of a transformer) is gathered separately when it runs,
    the rest of a network with the network. Further calls do nothing.

    Arguments:
        core: the module that holds all weights.
        averages: copies of it, which are sharded too.
        networks: modules of `core` that together hold all of its weights, and are called as a whole.
        mesh: the processes, a DeviceMesh of torch.

    Raises:
        InputError: for weights outside of the networks.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # slow to import

    if any(isinstance(module, FSDPModule) for module in core.modules()):
        return
    names = [name for name, module in core.named_modules() if any(module is network for network in networks)]
    inside = {id(p) for network in networks for p in network.parameters()}
    left = [name for name, p in core.named_parameters() if id(p) not in inside]
    if left:
        raise InputError(f"trainer.strategy=fsdp: weight {left[0]} is outside of the networks {', '.join(names)}: use "
                         "trainer.strategy=ddp")
    for copy in (core, *averages):
        for name in names:
            network = copy.get_submodule(name)
            for holder in network.modules():
                if isinstance(holder, nn.ModuleList):
                    for block in holder:
                        if not isinstance(block, nn.ModuleList):
                            fully_shard(block, mesh=mesh)
            fully_shard(network, mesh=mesh)


def set_whole(module: nn.Module, wanted: bool) -> None:
    """Gather the weights of a module that `shard` has sharded, or shard them again; called by all processes.

    While they are gathered, processes may run the module independently.
    """
    for part in module.modules():
        if hasattr(part, "set_reshard_after_forward"):
            part.set_reshard_after_forward(not wanted, recurse=False)
            part.set_reshard_after_backward(not wanted, recurse=False)  # a divergence is a backward pass too
            part.set_requires_gradient_sync(not wanted, recurse=False)
            part.unshard() if wanted else part.reshard()


def own(weight: Tensor) -> Tensor:
    """This process's share of a weight, without derivative; the whole weight if it is not sharded."""
    weight = weight.detach()
    return weight.to_local() if hasattr(weight, "to_local") else weight


def whole(value: Tensor) -> Tensor:
    """A sharded value, gathered; called by all processes."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
