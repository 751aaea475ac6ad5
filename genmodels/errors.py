"""The errors that a command turns into one line: bad input (exit 2) and a run that failed or was stopped (1, 130)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """What the user asked for cannot be done: the message says what is wrong and what to do. Exit code 2."""

    exit_code = 2


class RunError(RuntimeError):
    """A sound request that could not be carried out (broken file, full disk, non-finite loss). Exit code 1."""

    exit_code = 1


class Interrupted(RunError):
    """Stopped from outside (Ctrl-C, SIGTERM) after saving what there was. Exit code 130."""

    exit_code = 130


@contextmanager
def refusals() -> Iterator[None]:
    """A value that a model refuses while it is asked for something, as an InputError with the same message.

    Example:
        >>> with refusals():
        ...     raise ValueError("steps must be at least 1, got 0")
        Traceback (most recent call last):
        genmodels.errors.InputError: steps must be at least 1, got 0
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def nearest(name: str, names, cutoff: float = 0.5) -> str | None:
    """The entry of `names` most like `name`, or None when nothing comes close.

    Example:
        >>> nearest("dpmm", ["ddpm", "glow"])
        'ddpm'
    """
    import difflib

    found = difflib.get_close_matches(str(name), [str(n) for n in names], n=1, cutoff=cutoff)
    return found[0] if found else None
