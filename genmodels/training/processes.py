"""The end of a run's processes: a signal before there is anything to save, and a process whose partner is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from genmodels.core.errors import Interrupted

_POLL = 0.2  # seconds between two looks at the other processes
_GRACE = 3.0  # seconds in which this process may end with words of its own


@contextmanager
def stoppable(patience: float = 3.0) -> Iterator[None]:
    """Ctrl-C and SIGTERM end what runs here by an exception, so that folders and loggers are left in order.

    The line that is interrupted may swallow any exception: the destructor of an object, or an import that goes on
    without what it could not import, and fails later. So the exception is raised again while nothing handles it, and
    a failure after a signal is an interruption.

    Arguments:
        patience: seconds until the exception is raised again.

    Raises:
        Interrupted: when a signal comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes signals in its main thread alone
        return
    said, alarm = [], getattr(signal, "SIGALRM", None)

    def rearm(seconds: float) -> None:
        if alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def stop(number, frame):
        rearm(patience)
        if number != alarm:
            said.append("interrupted" if number == signal.SIGINT else "stopped by a signal (SIGTERM)")
        elif _is_handled(sys.exc_info()[1]):
            return
        raise Interrupted(said[0])

    taken = [each for each in (signal.SIGTERM, signal.SIGINT, alarm)
             if each is not None and signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, stop) for each in taken}
    try:
        yield
    except Exception as error:
        if said:
            raise Interrupted(said[0]) from error
        raise
    finally:
        rearm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_handled(error: BaseException | None) -> bool:
    """Whether a line that runs belongs to the end of an interruption."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


@contextmanager
def watched(children: Callable[[], list]) -> Iterator[None]:
    """End this process soon after another one of the run has been killed, with a line that says which.

    The first process looks at those it has started, each other one at the first. What waits for a process that is gone
    waits for up to half an hour otherwise.

    Arguments:
        children: gives the processes (`Popen`) that this one has started so far.
    """
    over, parent = threading.Event(), os.getppid() if int(os.environ.get("LOCAL_RANK", 0)) else None

    def look() -> None:
        while not over.wait(_POLL):
            lost = gone(children(), parent)
            if lost is not None:
                if not over.wait(_GRACE):
                    print(f"genmodels train: {lost}; the same command with resume=last goes on", file=sys.stderr,
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
    """Which other process has ended although this one goes on, None while all is well.

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
