"""Ending the processes of a run: on Ctrl-C or SIGTERM, and when another process of the run has ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from genmodels.core.errors import Interrupted

_POLL = 0.2  # seconds between two looks at the other processes
_GRACE = 3.0  # seconds for this process to end with its own message


@contextmanager
def stoppable(patience: float = 3.0) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into an exception, so that folders and loggers are cleaned up.

    The interrupted line may swallow any exception: the destructor of an object, or an import that continues without a
    module and fails later. Therefore the exception is raised again while nothing handles it, and a failure after a
    signal is reported as an interruption.

    Arguments:
        patience: seconds until the exception is raised again.

    Raises:
        Interrupted: on a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in its main thread only
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
    """Whether the current line handles an interruption."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


@contextmanager
def watched(children: Callable[[], list]) -> Iterator[None]:
    """End this process soon after another one of the run was killed, with a line that names it.

    The first process watches those it has started, the others watch the first. Otherwise they would wait for a missing
    process for up to half an hour.

    Arguments:
        children: gives the processes (`Popen`) that this one has started so far.
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
