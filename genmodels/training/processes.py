"""The processes of a run: how they are started, agree before the process group exists, and end together.

torchrun and srun start every process; without them Lightning starts the others of each machine when training begins,
which repeat this process's command line. docs/scale.md has the commands.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from genmodels.core.errors import InputError, Interrupted, RunError, first_line

_POLL = 0.2  # seconds between checks of the other processes
_IMPORTING = 0.05  # seconds between checks whether torch is still being imported
_GRACE = 3.0  # seconds for this process to end with a message of its own
_CHOICE = "GENMODELS_CHOICE"  # environment variable with the first process's choice, <pid>:<choice>, for its children
_PATIENCE = timedelta(minutes=10)  # for a process that starts later than others
_counter = itertools.count()
_in_python, _trainings, _several = 0, 0, False  # trainings in Python: under way, begun, by several processes
_stores: list = []  # kept open, because other processes may still read from them


@contextmanager
def stoppable(patience: float = 3.0) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into an exception, so that folders and loggers are cleaned up.

    The interrupted code may swallow any exception, as a destructor does, or an import that continues without a module.
    Therefore the exception is raised again until it is handled, and a failure after a signal counts as interruption.

    Arguments:
        patience: seconds until the exception is raised again.

    Raises:
        Interrupted: on a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in its main thread only
        return
    messages, alarm = [], getattr(signal, "SIGALRM", None)

    def rearm(seconds: float) -> None:
        if alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def stop(number, frame):
        rearm(patience)
        if number != alarm:
            messages.append("interrupted" if number == signal.SIGINT else "stopped by a signal (SIGTERM)")
        elif _is_handled(sys.exc_info()[1]):
            return
        if alarm is not None and _is_importing("torch"):  # an exception in its C++ code would abort the process
            return rearm(_IMPORTING)
        raise Interrupted(messages[0])

    taken = [each for each in (signal.SIGTERM, signal.SIGINT, alarm)
             if each is not None and signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, stop) for each in taken}
    try:
        yield
    except Exception as error:
        if messages:
            raise Interrupted(messages[0]) from error
        raise
    finally:
        rearm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(package: str) -> bool:
    """Whether a package is being imported."""
    return getattr(getattr(sys.modules.get(package), "__spec__", None), "_initializing", False)


def _is_handled(error: BaseException | None) -> bool:
    """Whether an error is an interruption, or was raised while one was handled."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


@contextmanager
def watched(children: Callable[[], list]) -> Iterator[None]:
    """End this process soon after another one of the run was killed, with a line that names it.

    The first process watches the processes it has started, the others watch the first. Otherwise they would wait for
    the killed one for up to half an hour.

    Arguments:
        children: returns the processes (`Popen`) that this one has started so far.
    """
    over, parent = threading.Event(), os.getppid() if int(os.environ.get("LOCAL_RANK", 0)) else None

    def look() -> None:
        while not over.wait(_POLL):
            lost = gone(children(), parent)
            if lost is not None:
                if not over.wait(_GRACE):
                    print(f"genmodels train: {lost}; continue with the same command and resume=last", file=sys.stderr,
                          flush=True)
                    for child in children():
                        child.kill()
                    os._exit(1)
                return

    thread = threading.Thread(target=look, daemon=True, name="other processes")
    thread.start()
    try:
        yield
    finally:
        over.set()


def gone(children: list, parent: int | None) -> str | None:
    """A description of another process of the run that has ended, None if there is none.

    Example:
        >>> gone([], None) is None, gone([], 0)
        (True, 'process 0 of the run has ended')
    """
    if parent is not None and os.getppid() != parent:
        return "process 0 of the run has ended"
    for rank, child in enumerate(children, 1):
        code = child.poll()
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"process {rank} of the run {how}"
    return None


class Launch(NamedTuple):
    """The program that has started all processes: `devices` on each of `nodes` machines."""

    program: str
    devices: int
    nodes: int


def launch() -> Launch | None:
    """torchrun or srun, if one of them has started this process; None where Lightning starts the others.

    Raises:
        InputError: where machines have different numbers of processes.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        found = Launch("torchrun", here, world // here)
    elif _by_srun():
        world, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", 1))
        found = Launch("srun", int(os.environ.get("SLURM_NTASKS_PER_NODE", max(1, world // nodes))), nodes)
    else:
        return None
    if found.devices * found.nodes != world:
        raise InputError(f"{found.program} has started {world} processes, not the same number on every machine: start "
                         "as many on each")
    return found


def _by_srun() -> bool:
    """Whether srun has started this process; as in Lightning, a job named `bash` or `interactive` is a shell."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def is_first() -> bool:
    """Whether this is the process that prints and writes: the first on the first machine."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names = ("RANK",)
    else:
        names = ("SLURM_PROCID",) if _by_srun() else ("NODE_RANK", "LOCAL_RANK")
    return all(int(os.environ.get(name, 0)) == 0 for name in names)


def fitted(options, given: dict):
    """TrainerOptions with the numbers of devices and machines for which torchrun or srun has started processes.

    Arguments:
        options: TrainerOptions.
        given: the settings of the trainer that the user gave, without defaults.

    Raises:
        InputError: if the user gave other numbers.
    """
    found = launch()
    if found is None:
        return options
    for key, started in (("devices", found.devices), ("num_nodes", found.nodes)):
        if given.get(key, "auto") not in ("auto", -1, started):
            what = "processes on each machine" if key == "devices" else "machines"
            raise InputError(f"trainer.{key}={given[key]}, but {found.program} has started {started} {what}: leave "
                             f"trainer.{key} out, or start as many")
    return replace(options, devices=found.devices, num_nodes=found.nodes)


def environments() -> list:
    """Lightning's plugin for SLURM where srun is used, with the requeueing left to `requeue`.

    Raises:
        InputError: for a job whose tasks Lightning cannot place.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or not _by_srun():
        return []
    from pytorch_lightning.plugins.environments import SLURMEnvironment

    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:
        raise InputError(f"srun: {error}") from error


@contextmanager
def training_of_a_script() -> Iterator[None]:
    """A training that is begun in Python; see `require_only_training`."""
    global _in_python
    _in_python += 1
    try:
        yield
    finally:
        _in_python -= 1


def require_only_training(several: bool) -> None:
    """Before a training in Python begins: raise InputError if several processes would not make it together.

    Lightning starts several processes by running the whole script again, which then ends in its first training.

    Arguments:
        several: whether this training has several processes.
    """
    global _trainings, _several
    if not _in_python or launch() is not None:
        return
    if _trainings and (several or _several):
        raise InputError("training by several processes runs the whole script in each of them, and this one trains "
                         "more than once: give each training a script of its own, or start the script by torchrun "
                         "--nproc-per-node=2")
    _trainings, _several = _trainings + 1, several


def agreed(choose: Callable[[], str], num_nodes: int = 1) -> str:
    """The result of `choose` in the first process of the run, on every process; all must call it equally often.

    Arguments:
        choose: called by the first process alone; an error in it ends the others too.
        num_nodes: number of machines.

    Raises:
        InputError: where the address of the first machine is needed but not set.
        SystemExit: in the other processes, when the first has failed.
    """
    started = launch()
    pid, _, choice = os.environ.get(_CHOICE, "").partition(":")
    if started is None and int(os.environ.get("LOCAL_RANK", 0)) and pid == str(os.getppid()):
        return choice
    apart = num_nodes > 1 if started is None else started.devices * started.nodes > 1
    choice = _by_store(choose) if apart else choose()
    os.environ[_CHOICE] = f"{os.getpid()}:{choice}"
    return choice


def _by_store(choose: Callable[[], str]) -> str:
    """`agreed` by a store at the address where the processes will meet."""
    from torch import distributed

    if _by_srun():
        for plugin in environments():
            os.environ |= {"MASTER_ADDR": plugin.main_address, "MASTER_PORT": str(plugin.main_port)}
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise InputError("several machines need MASTER_ADDR and MASTER_PORT (of the first), and NODE_RANK on each: set "
                         "them, or start with torchrun or srun")
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
    first = is_first()
    try:
        # Lightning's process group shares the port with this store: that is what multi_tenant is for.
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=first and not hosted,
            timeout=_PATIENCE, wait_for_workers=False, multi_tenant=not hosted,
        )  # fmt: skip
        _stores.append(store)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"genmodels/{attempt}/{next(_counter)}"
        if not first:
            deadline = time.monotonic() + _PATIENCE.total_seconds()
            while not store.check([key]) and time.monotonic() < deadline:
                time.sleep(_POLL / 4)  # not within the store, where signals are not handled
            choice = store.get(key).decode()
            if not choice:
                raise SystemExit(2)
            return choice
    except distributed.DistError as error:
        raise RunError(f"the first process of the run is not reached at {os.environ['MASTER_ADDR']}:"
                       f"{os.environ['MASTER_PORT']} ({first_line(error)})") from error
    try:
        choice = choose()
    except BaseException:
        store.set(key, "")
        raise
    store.set(key, choice)
    return choice


class SharedSignal:
    """Shares a signal that has reached any process of a run: all know it at the same step, one step later.

    Called before every batch by every process. It returns the result of the previous call, which was reduced in the
    background, on the CPU: no step waits for it.
    """

    def __init__(self):
        from torch import distributed

        self._group = distributed.new_group(backend="gloo")
        self._votes: tuple | None = None

    def __call__(self, number: int | None) -> int | None:
        """The largest number that a process gave at the previous call; None if none did.

        Arguments:
            number: number of the signal that this process has received, None for none.
        """
        import torch
        from torch import distributed

        before, vote = self._votes, torch.tensor(number or 0)
        if before is not None:
            before[0].wait()
        work = distributed.all_reduce(vote, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._votes = work, vote
        return None if before is None else int(before[1]) or None


def job() -> str | None:
    """The identity of a job across restarts: SLURM's number, or torchrun's --rdzv-id; None without.

    Example:
        >>> job() is None or len(job()) > 0
        True
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    name = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def requeue() -> str:
    """Ask SLURM to queue this job again; returns one line with the result."""
    command = ["scontrol", "requeue", str(job())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)} failed ({error})"
    logging.getLogger("genmodels").info("%s: exit code %d", " ".join(command), done.returncode)
    reason = " ".join(done.stderr.split())
    return f"job {job()} is queued again" if done.returncode == 0 else f"{' '.join(command)} failed ({reason})"
