"""Errors that a command prints as one line, with exit codes; checks of arguments, hints, progress bars."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm


_LARGEST = 1e6  # of a sampler's factors, beyond which samples overflow
#: The packages that genmodels requires, by the names under which they are imported.
REQUIRED = ("fsspec", "hydra", "jinja2", "markupsafe", "matplotlib", "numpy", "omegaconf", "PIL", "pydantic",
            "pytorch_lightning", "rich", "safetensors", "scipy", "sklearn", "torch", "torchvision", "tqdm",
            "wandb", "yaml")  # fmt: skip


class InputError(ValueError):
    """A usage error: the message says what is wrong and what to do. Exit code 2."""

    exit_code = 2


class RunError(RuntimeError):
    """A valid request that failed (damaged file, full disk, non-finite loss). Exit code 1."""

    exit_code = 1


class Interrupted(BaseException):
    """Stopped by Ctrl-C or SIGTERM, after saving the current state. Exit code 130.

    Not an Exception, so that the interrupted code does not handle it as a failure, and not a KeyboardInterrupt, which
    Lightning turns into exit code 1.
    """

    exit_code = 130


class NotFinite(RunError):
    """A sample that is not finite; `row` is its position in the batch."""

    def __init__(self, row: int, name: str | None = None, advice: str = "a lower temperature, or ema=true"):
        super().__init__(f"{name or f'row {row}'} is not finite: try {advice}")
        self.row = row


def require_finite_rows(x: Tensor) -> Tensor:
    """Return x (B, *event) if every value is finite; for use before a cast to integers, which would hide NaN.

    Raises:
        NotFinite: naming the first row with a non-finite value.
    """
    finite = x.isfinite()
    if not bool(finite.all()):
        raise NotFinite(int((~finite.flatten(1).all(1)).nonzero()[0, 0]))
    return x


def check_number(name: str, value: float, least: float, most: float = _LARGEST) -> None:
    """Raise InputError for a value that is not a number from `least` to `most`.

    Example:
        >>> check_number("guidance", 1e38, -1e6)
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: guidance must be a finite number from -1e+06 to 1e+06, got 1e+38
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and least <= value <= most):
        raise InputError(f"{name} must be a finite number from {least:g} to {most:g}, got {value!r}")


def positive(name: str, value: float) -> float:
    """The value of an option; OptionError unless it is a finite number above 0.

    Example:
        >>> positive("scale", 2)
        2.0
    """
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # of a tensor or an array
    if isinstance(number, bool) or not (isinstance(number, Real) and 0 < number < math.inf):
        raise OptionError(f"{name} must be a positive finite number, got {value!r}")
    return float(number)


def check_temperature(value: float) -> None:
    """Raise InputError for a temperature that is not a number from 0 to a million, beyond which samples overflow.

    Example:
        >>> check_temperature(float("inf"))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: temperature must be a finite number from 0 to 1e+06, got inf
    """
    check_number("temperature", value, 0)


@contextmanager
def as_input_errors(of: str = "") -> Iterator[None]:
    """Turn a ValueError of a model into an InputError with the same message, after what it is of.

    Example:
        >>> with as_input_errors():
        ...     raise ValueError("steps must be at least 1, got 0")
        Traceback (most recent call last):
        genmodels.core.errors.InputError: steps must be at least 1, got 0
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{of}: {error}" if of else str(error)) from error


#: Keys and choices of earlier versions, for hints (docs/migration.md).
_RENAMED = {"proofs": "checks"}


def nearest(name: str, names, cutoff: float = 0.5) -> str | None:
    """The entry of `names` most similar to `name` (or its new name), or None if nothing is similar.

    Example:
        >>> nearest("dpmm", ["ddpm", "glow"])
        'ddpm'
        >>> nearest("proofs", ["likelihood", "checks"])
        'checks'
    """
    import difflib

    names = [str(n) for n in names]
    if _RENAMED.get(str(name)) in names:
        return _RENAMED[str(name)]
    found = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    return found[0] if found else None


def hint(name: str, names, start: str = ":") -> str:
    """`start` and a question that offers the most similar of `names`; empty if none is similar.

    Example:
        >>> f"unknown model 'dpmm'{hint('dpmm', ['ddpm', 'glow'])}"
        "unknown model 'dpmm': did you mean 'ddpm'?"
    """
    near = nearest(name, names)
    return "" if near is None else f"{start} did you mean {near!r}?"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if there is none.

    Example:
        >>> first_line(RuntimeError(" one\\n two")), first_line(KeyError())
        ('one', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def with_class(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)[:200]}"


def an(name: str) -> str:
    """The name with its article, by its first letter.

    Example:
        >>> an("energy"), an("ddpm")
        ('an energy', 'a ddpm')
    """
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1.

    Example:
        >>> counted(1, "sample"), counted(1200, "item")
        ('1 sample', '1,200 items')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def require_known(owner: str, given: Iterable[str], known: Iterable[str], kind: str = "option") -> None:
    """Raise InputError for the first unknown name, with the most similar known one.

    Example:
        >>> require_known("evaluate", ["limits"], ["limit", "split"])
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: evaluate has no option 'limits': did you mean 'limit'?
    """
    known = list(dict.fromkeys(known))
    for name in given:
        if name not in known:
            raise InputError(f"{owner} has no {kind} {name!r}" + (hint(name, known) or f"; it has {', '.join(known)}"))


def printable(text: str) -> str:
    r"""Text from a file as one line for a terminal: non-printable characters, also line feeds, are escaped.

    Example:
        >>> printable("name: \x1b]0;title\x07 \u202eexe")
        'name: \\x1b]0;title\\x07 \\u202eexe'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def explain(command: str, error: BaseException) -> tuple[str, int] | None:
    """The message and the exit code for an expected failure, None for a programming error.

    Example:
        >>> explain("train", RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))[1]
        1
        >>> explain("train", ZeroDivisionError()) is None
        True
    """
    if isinstance(error, InputError | RunError | Interrupted):
        return " ".join(str(error).split()), error.exit_code
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in REQUIRED:
        missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
        return (f"not installed: {', '.join(missing)}. Run {_installation()}", 1) if missing else None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk ({error.filename or 'while writing'}): free some space and repeat", 1
    if isinstance(error, OSError) and error.filename and error.errno in _PATH_ERRORS:
        return f"{str(error.filename)[:200]}: {os.strerror(error.errno).lower()}", 1
    text = str(error)
    if "DataLoader worker" in text:
        return ("a data loading process was killed or ended (often out of memory): lower data.num_workers or "
                "data.batch_size; continue with resume=last"), 1
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    if isinstance(error, RuntimeError) and any(one in text for one in lost):
        return "another process of the run has ended; continue with the same command and resume=last", 1
    if "torchvision::nms" in text:
        return "torch and torchvision are from different builds: run genmodels doctor for advice", 1
    too_large = ("out of memory", "can't allocate memory", "Storage size calculation overflowed")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(one in text for one in too_large)):
        key = "data.batch_size or the model" if command == "train" else "batch_size"
        return f"out of memory: reduce {key}", 1
    return None


def _installation() -> str:
    """The command that installs the requirements: of this checkout, or of a copy of the package outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "setup.cfg").is_file():
        return "pip install genmodels"
    return f"pip install -e {'.' if root == Path.cwd() else shlex.quote(str(root))}"


class OptionError(InputError):
    """A bad value of an option; the error of a class under construction names the class too."""


def at_least(least: int, **sizes: int) -> None:
    """Raise OptionError for the first size that is below `least`, or not a whole number.

    Example:
        >>> at_least(1, channels=8, depth=0)
        Traceback (most recent call last):
        ...
        genmodels.core.errors.OptionError: depth must be at least 1, got 0
    """
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise OptionError(f"{name} must be a whole number, got {size!r}")
        if size < least:
            raise OptionError(f"{name} must be at least {least}, got {size}")


def none_or_at_least(least: int, **sizes: int | None) -> None:
    """As `at_least`, for sizes that may be None."""
    at_least(least, **{name: size for name, size in sizes.items() if size is not None})


def one_of(name: str, value: object, choices: Collection) -> None:
    """Raise OptionError, listing the choices, if the value of an option is not one of them.

    Example:
        >>> one_of("transform", "cubic", ("spline", "affine"))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.OptionError: transform must be one of spline, affine, got 'cubic'
    """
    if value not in tuple(choices):
        near = hint(str(value), choices)
        raise OptionError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}{near}")


_STORED: ContextVar[bool] = ContextVar("options of a checkpoint", default=False)


@contextmanager
def stored_options() -> Iterator[None]:
    """While the options of a checkpoint are built, let `only_for` accept those that earlier versions accepted."""
    token = _STORED.set(True)
    try:
        yield
    finally:
        _STORED.reset(token)


def only_for(what: str, **options: tuple[object, object]) -> None:
    """Raise ValueError for the first option of a model, given as (value, default), that differs from its default.

    Example:
        >>> only_for("images", depth=(2, 2), heads=(8, 4))
        Traceback (most recent call last):
        ...
        ValueError: heads=8 is for images: leave it out, or where a preset sets it add '~model.heads'
    """
    for name, (value, default) in options.items():
        if value != default and not _STORED.get():
            raise ValueError(f"{name}={value} is for {what}: leave it out, or where a preset sets it add "
                             f"'~model.{name}'")


def terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


class _Lines:
    """A stream that writes each state of a progress bar on a line of its own, the last one only once."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO):
        self.stream, self._count = stream, ""

    def write(self, text: str) -> None:
        """Write a line, without control characters of the cursor."""
        text = text.strip()
        count = text.partition(" [")[0]  # without times, which may differ
        if text and count != self._count:
            self.stream.write(text + "\n")
            self._count = count

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()


def progress_bar(iterable: Iterable | None = None, **options) -> tqdm:
    """A bar of tqdm, with its options, on a terminal; in a file or a pipe a plain line every half minute.

    Example:
        >>> sum(progress_bar([1, 2], desc="sums", unit="number"))
        3
    """
    from tqdm import tqdm

    if not terminal(sys.stderr):
        options = {"miniters": 1} | options  # or tqdm's monitor repeats a line a step earlier
        options |= {"file": _Lines(sys.stderr), "ncols": 0, "delay": 30, "mininterval": 30, "maxinterval": 30}
    return tqdm(iterable, **options)
