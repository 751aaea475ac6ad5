"""Several processes of one command: who this one is, what all of them have, and commands that torchrun has started.

In sampling and evaluation the first tells the others what to do; in training all of them do the same.
"""

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
from torch import Tensor, distributed, nn

from genmodels.core.errors import InputError, Interrupted, RunError, explain

_PATIENCE = timedelta(days=30)  # a process may wait for the first one as long as that works alone; a loss ends it
_LAUNCHED = "GENMODELS_LAUNCHED"  # set in processes of `launch`, which says itself what became of them


def joined() -> bool:
    """Whether this process has met the others of its run."""
    return distributed.is_available() and distributed.is_initialized()


def rank_world() -> tuple[int, int]:
    """This process's number and the number of processes; (0, 1) where there is one.

    Row b of process r of W is row b W + r of the batch that all of them have together.

    Example:
        >>> rank_world()
        (0, 1)
    """
    return (distributed.get_rank(), distributed.get_world_size()) if joined() else (0, 1)


def gather(parts: list[Any]) -> list[Any]:
    """The lists of all processes, joined in the order of their ranks; the list itself where there is one process.

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
        self.rank, self.size = rank_world()
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


# ---- weights that are spread over the processes -----------------------------------------------------------------


def shard(core: nn.Module, averages: list[nn.Module], networks: list[nn.Module], mesh) -> None:
    """Let each process keep its share of the networks' weights, in a core and in its averages alike (FSDP2).

    Each member of a list of modules (a block of a U-Net, a layer of a transformer) is gathered by itself when it runs,
    what is left of a network with the network. Further calls do nothing.

    Arguments:
        core: the module that holds all weights.
        averages: copies of it, whose weights are spread too.
        networks: modules of `core` which hold all of its weights and are called whole.
        mesh: the processes, a DeviceMesh of torch.

    Raises:
        InputError: for weights outside of the networks.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # which the import of this module does not wait for

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
    """Gather the weights of a module that `shard` has spread, or spread them again; called by all processes.

    While they are whole, processes may run it unlike often.
    """
    for part in module.modules():
        if hasattr(part, "set_reshard_after_forward"):
            part.set_reshard_after_forward(not wanted, recurse=False)
            part.set_reshard_after_backward(not wanted, recurse=False)  # a divergence is a backward pass too
            part.set_requires_gradient_sync(not wanted, recurse=False)
            part.unshard() if wanted else part.reshard()


def own(weight: Tensor) -> Tensor:
    """This process's share of a weight, without derivative; all of it where weights are not spread."""
    weight = weight.detach()
    return weight.to_local() if hasattr(weight, "to_local") else weight


def whole(value: Tensor) -> Tensor:
    """A value that is spread over the processes, gathered; called by all processes."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
