"""The folder, log file, configuration and final summary of a training run."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

from genmodels.core.checkpoint import read_header, verify
from genmodels.core.errors import InputError, RunError, terminal
from genmodels.core.files import EXPORTED, new_folder, open_lock, typed, write_text
from genmodels.core.likelihood import with_error
from genmodels.data.base import SPLITS, DataModule
from genmodels.models.base import GenerativeModel
from genmodels.nn.attention import Attention
from genmodels.nn.attention.backend import choose
from genmodels.training.processes import is_first, job

_LOCK = ".lock"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # which Lightning sets for deterministic kernels


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run; `float` gives its validation metric, which a search over settings minimises.

    Arguments:
        figures: the metrics of the last validation as printed, likelihoods with kind and standard error.
        metric: the metric of the last validation by which best.ckpt is chosen: the negative log-likelihood, where the
            family has one.
        step: number of the last step.
        run: the run folder.

    Example:
        >>> float(Outcome({"val/nll": "= 1.25(3)"}, 1.25, 100, "runs/nsf-toy/2026-01-31_12-00-00"))
        1.25
    """

    figures: dict[str, str]
    metric: float
    step: int
    run: str

    def __float__(self) -> float:
        return self.metric

    def row(self) -> dict[str, str]:
        """The result as a row of a table, by column."""
        return {**self.figures, "step": str(self.step), "run": self.run}


class Place(NamedTuple):
    """The folder of a run, and the checkpoint from which it is resumed; None for a new run."""

    folder: Path
    checkpoint: Path | None = None


def place_of(root: Path, name: str, run_dir: str | None, resume: str | None) -> Place:
    """The place of a run: the folder of the checkpoint that is resumed, or a new one.

    Arguments:
        root: the folder of all runs.
        name: name of model and data; runs are in root/name.
        run_dir: the folder of the run; None for one named after the time (with `resume="auto"`, after the job).
        resume: None; `last`; `auto`, which resumes if this job has a checkpoint already; a folder, or a file.

    Raises:
        InputError: if there is nothing to resume, or `run_dir` holds a run already.
    """
    if resume == "auto":
        if run_dir is None and job() is None:
            raise InputError("resume=auto finds a run by its folder, or by the job of SLURM or torchrun (--rdzv-id): "
                             "give run_dir=...")
        folder = Path(run_dir) if run_dir is not None else root / name / f"job_{job()}"
        if (folder / "last.ckpt").is_file():
            return Place(folder, folder / "last.ckpt")
        return Place(choose_folder(root, name, str(folder)))
    if resume is None:
        return Place(choose_folder(root, name, run_dir))
    path = find_resume(root, name, run_dir, resume)
    return Place(path.parent, path)


#: Folders that this process has made for its runs.
_MADE: set[Path] = set()


def choose_folder(root: Path, name: str, run_dir: str | None) -> Path:
    """Make the folder of a new run: `run_dir`, or runs/<name>/<time>, with a number appended if that exists.

    Raises:
        InputError: when `run_dir` already holds a run, or weights.
    """
    if run_dir is not None:
        folder = Path(run_dir)
        check_unused(folder)
        absent = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    else:
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        absent = [place for place in (root, root / name) if not place.exists()]
        folder = new_folder(root / name / stamp)
        absent.append(folder)
    try:
        _MADE.update(place.absolute() for place in absent)
        folder.mkdir(parents=True, exist_ok=True)
        if (times := folder / "training.json").exists():  # of a run whose weights were removed
            times.unlink()
    except OSError as error:
        raise RunError(f"cannot make the run folder {folder}: {os.strerror(error.errno)}") from error
    return folder


def check_unused(folder: Path) -> None:
    """Raise InputError where a folder holds a run, weights, or a file that a run would overwrite."""
    if (folder / "last.ckpt").exists():
        raise InputError(f"run_dir={folder} already holds a run: add resume=last, or choose another folder")
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    known = re.findall(r"^(\w+):", text, re.MULTILINE)
    # A run writes log.txt first, to which the next one appends, and then its settings.
    run = (folder / "log.txt").exists() and {"model", "data", "trainer", "logger", "checkpoint", "seed"} <= {*known}
    for name in ("config.yaml", "metrics.csv", "training.json"):
        if (folder / name).exists() and not run:
            raise InputError(f"run_dir={folder} holds a {name} that is of no run: choose another folder")
    if weights := sorted([*folder.glob("*.ckpt"), *folder.glob(EXPORTED)]):
        raise InputError(f"run_dir={folder} already holds {weights[0].name}: choose another folder")


def add_training_time(folder: Path, seconds: float, cpu_seconds: float) -> None:
    """Add to the training times in training.json; not stored in checkpoints, which must not depend on them."""
    spent = {"seconds": seconds, "cpu_seconds": cpu_seconds}
    if training_time(folder) and not training_time(folder, "cpu_seconds"):
        del spent["cpu_seconds"]  # stays unknown: an earlier part of the run was not measured
    times = {which: training_time(folder, which) + more for which, more in spent.items()}
    try:
        write_text(folder / "training.json", json.dumps(times))
    except RunError as error:
        logging.getLogger("genmodels").warning("%s", error)


def training_time(folder: Path, which: Literal["seconds", "cpu_seconds"] = "seconds") -> float:
    """Seconds of training in this folder, or CPU seconds of the process, over all resumes; 0 if unknown."""
    try:
        return float(json.loads((folder / "training.json").read_text())[which])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0


def claim(folder: Path):
    """Lock a run folder until the process ends; returns the open lock file, or None where locks are not supported.

    Raises:
        InputError: if another run holds the lock.
        RunError: if the folder cannot be written.
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        lock = open_lock(folder / _LOCK)
    except OSError as error:
        raise RunError(f"cannot write in the run folder {folder}: {os.strerror(error.errno)}") from error
    try:
        # A POSIX lock belongs to this process alone: loader workers that outlive a killed run do not hold it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system without locks
            return None
        raise InputError(f"another run is training in {folder}: wait for it, or choose another run_dir") from None
    return lock


def discard_unused(folder: Path, before: Collection[str] = ()) -> None:
    """Remove the files of a run that never started, except those in `before`, and the folders that were made for it.

    What cannot be removed stays, for example a mount point.
    """
    if (folder / "last.ckpt").exists():
        return
    with contextlib.suppress(OSError):
        for name in {"log.txt", "config.yaml"} - {*before} | {_LOCK}:
            (folder / name).unlink(missing_ok=True)
        for empty in (folder, *folder.parents):
            if empty.absolute() not in _MADE or any(empty.iterdir()):
                return
            empty.rmdir()
            _MADE.discard(empty.absolute())


def find_resume(root: Path, name: str, run_dir: str | None, resume: str) -> Path:
    """The checkpoint for `resume`: `last` (of run_dir, or of the newest such run), a folder, or a file.

    Raises:
        InputError: if there is nothing to resume, or it lies outside of run_dir.
        RunError: for a checkpoint that does not exist, or is no file.
    """
    if resume == "last":
        where = [Path(run_dir)] if run_dir else (root / name).glob("*")
        found = [folder / "last.ckpt" for folder in where if (folder / "last.ckpt").is_file()]
        if not found:
            raise InputError(f"resume=last: no last.ckpt in {run_dir or root / name}; leave resume out to start a run")
        path = max(found, key=lambda p: p.stat().st_mtime)
    else:
        path = Path(resume)
        path = path / "last.ckpt" if path.is_dir() else path
        if not path.is_file():
            verify(path)  # raises the error that says so
        if run_dir is not None and Path(run_dir).resolve() != path.parent.resolve():
            raise InputError(f"run_dir={run_dir} is not the folder of resume={resume}: a run is resumed where it "
                             "began, leave run_dir out")
    return path


#: Messages of Lightning that do not concern users of genmodels.
_IRRELEVANT = re.compile("in eval mode at the start of training|does not have many workers|`weights_only` was not set|"
                         "no logger configured|isinstance.treespec, LeafSpec|GPU available but not used")


def _is_relevant(record: logging.LogRecord) -> bool:
    """Whether a record belongs in log.txt: all of genmodels, and relevant warnings of others."""
    own = record.name.split(".")[0] == "genmodels"
    return own or (record.levelno >= logging.WARNING and not _IRRELEVANT.search(record.getMessage()))


class Log:
    """log.txt of the run folder: metrics, and warnings, which are not shown on the terminal."""

    def __init__(self, path: Path):
        logging.captureWarnings(True)
        handler = logging.FileHandler(path)
        handler.handleError = lambda record: None  # a full disk is reported when a checkpoint is written
        handler.addFilter(_is_relevant)
        if not is_first():
            handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        self.level = root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        for name in ("pytorch_lightning", "lightning_fabric", "pytorch_lightning.utilities.rank_zero"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
        self.handler = handler

    def close(self) -> None:
        """Detach from logging."""
        logging.getLogger().removeHandler(self.handler)
        logging.getLogger().setLevel(self.level)
        logging.captureWarnings(False)
        with contextlib.suppress(OSError):  # the full disk has been reported already
            self.handler.close()


def say(*lines: str) -> None:
    """Print lines and write them to log.txt, on the first process only; on a terminal their first word is bold."""
    _say(lines, lines)


def conclude(model: GenerativeModel, folder: Path, seconds: float, cpu_seconds: float, speed: str | None) -> None:
    """Print time, speed and metrics of a finished run, on a terminal as a table, and the next commands."""
    result, *commands = summary(model, folder)
    lines = [f"trained in {seconds:.0f} s, {cpu_seconds:.0f} s of CPU time", *([speed] if speed else []), result,
             *commands]
    _say(lines, commands, table=[("step", str(model.trainer.global_step)), *best_of(folder),
                                 *figures_of(model).items(), ("trained in", str(timedelta(seconds=round(seconds)))),
                                 ("CPU time", str(timedelta(seconds=round(cpu_seconds)))),
                                 *([("speed", speed.partition(":")[2].strip())] if speed else [])])


def _say(lines: Sequence[str], shown: Sequence[str], table: Sequence[tuple[str, str]] = ()) -> None:
    """Log the lines; print them, or on a terminal the table and the lines `shown` in colour (none with NO_COLOR)."""
    if not is_first():
        return
    if terminal(sys.stdout):
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        if table:
            drawn = Table("metric", "value", box=box.ROUNDED, header_style="bold")
            for name, value in table:
                drawn.add_row(name, Text(value))
            console.print(drawn)
        for line in shown:
            key, colon, rest = line.partition(": ")
            style = "yellow" if key == "note" else "cyan" if key in ("sample", "evaluate") else "bold"
            console.print(Text.assemble((key + colon, style), rest))
    else:
        print(*lines, sep="\n", flush=True)
    for line in lines:
        logging.getLogger("genmodels").info("%s", line)


def described(model: GenerativeModel, datamodule: DataModule) -> dict:
    """Metadata of a run: numbers of parameters, in total and by part, and a description of the data."""
    parts = dict(model.core.named_children())
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in {"all": model.core, **parts}.items()}
    sizes = {name: len(datamodule.split(name)) for name in SPLITS}
    return {"family": model.family, "parameters": counts, "data_card": {**model.spec.to_dict(), "items": sizes}}


def attention_paths(model: nn.Module, device_type: str) -> list[str]:
    """How the attention of a model is implemented on a kind of device, and why; equal modules share a line.

    Example:
        >>> from genmodels.nn.attention import Rotary
        >>> attention_paths(nn.Sequential(*(Attention(8, 2, Rotary(8, 2)) for _ in range(3))), "cpu")
        ['0 and 2 more: sdpa, fused; positions turn q and k beforehand']
    """
    found: dict[str, list[str]] = {}
    for name, a in model.named_modules():
        if isinstance(a, Attention):
            found.setdefault(", ".join(choose(a.backend, a.derivatives, a.position, device_type)), []).append(name)
    return [names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") + f": {how}"
            for how, names in found.items()]


def summary(model: GenerativeModel, folder: Path) -> list[str]:
    """The last lines of a run: the final metrics, and the commands to sample and evaluate."""
    script = Path(sys.argv[0])
    sample, evaluate = "genmodels sample", "genmodels evaluate"
    if script.name == "train.py" and script.with_name("sample.py").is_file():
        sample, evaluate = (f"python {shlex.quote(str(script.with_name(s)))}" for s in ("sample.py", "evaluate.py"))
    best = folder / "best.ckpt"
    ckpt = best if best.exists() else folder / "last.ckpt"
    figures = ", ".join(f"{name} {value}" for name, value in figures_of(model).items()) or "no metrics"
    result = f"result:   step {model.trainer.global_step}, {figures}"
    result += "".join(f"; best.ckpt is of step {step}" for _, step in best_of(folder))
    text = model.spec.text
    of_sounds = text is not None and text.get("form", "characters") != "characters"
    wanted = "n=60" if text is None else typed("text", text["examples"][0] if of_sounds else "Hello there.")
    named = typed("ckpt", ckpt, model.run_config.get("trust"))
    command = f"{sample} {named} {wanted}" if model.generates else f"genmodels transcribe {named} a.wav"
    return [result, f"sample:   {command}", f"evaluate: {evaluate} {named}"]


def best_of(folder: Path) -> list[tuple[str, str]]:
    """The step of best.ckpt as a row of a table, nothing without that file."""
    best = folder / "best.ckpt"
    return [("best.ckpt", str(read_header(best, check=False)["step"]))] if best.exists() else []


def figures_of(model: GenerativeModel) -> dict[str, str]:
    """The metrics of the last validation; likelihoods with their kind and standard error."""
    shown, found = {name: f"{value:.4f}" for name, value in model.figures.items()}, model.validated
    for name, value in model.figures.items():
        unit = name.removeprefix("val/").removeprefix("noisy_")
        unit = {"nll": "nats", "nll_per_dim": "nats_per_dim"}.get(unit, unit)
        if found is not None and unit.startswith(("nats", "bits_per")):
            error = found.standard_error(unit)
            shown[name] = f"{found.mark} {with_error(value, None if error is None else error.total)}"
    return shown


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step instead of returning it to the system; no effect elsewhere.

    A step on the CPU frees and allocates hundreds of megabytes of activations; returning them costs a page fault for
    each 4 kB, measured at 7 to 17 % of a U-Net's step.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # names of malloc.h
    for key, value in ((mmap_threshold, 1 << 25), (trim_threshold, (1 << 31) - 1), (top_pad, 1 << 26)):
        mallopt(key, value)


@contextlib.contextmanager
def settings_of_torch() -> Iterator[None]:
    """Restore at the end what a run changes in torch: precision, deterministic kernels and what belongs to these."""
    precision, benchmark = _matmul_precision(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only, workspace = torch.is_deterministic_algorithms_warn_only_enabled(), os.environ.get(_WORKSPACE)
    try:
        yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        os.environ.pop(_WORKSPACE, None)
        os.environ.update({} if workspace is None else {_WORKSPACE: workspace})


def _matmul_precision() -> str | None:
    """The precision of float32 products; None where the settings of single backends, which exclude it, are in use."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def compile_network(model: GenerativeModel) -> None:
    """Compile the model's `compiled_parts` in place; names in the state dict do not change."""
    if model.tolerates_tf32 and _matmul_precision() is not None:
        torch.set_float32_matmul_precision("high")
    for part in model.compiled_parts():
        part.compile()
