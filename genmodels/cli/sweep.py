"""A sweep: every point checked before the first starts, then run by Hydra's own sweeper and launcher."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from genmodels.cli.compose import Composer
from genmodels.cli.schema import Schema
from genmodels.core.errors import explain


@dataclass(frozen=True)
class Failure:
    """The result of a failed point, so that the following points still run."""

    message: str


@dataclass(frozen=True)
class Point:
    """The task that Hydra calls for each point; a plain value, so that any launcher can pickle it."""

    command: str
    swept: tuple[str, ...] = ()

    def __call__(self, config: DictConfig):
        words = list(HydraConfig.get().overrides.task)
        plain = OmegaConf.to_container(config, resolve=True)
        print(f"\n--- {self.command} {self.title(words)}", flush=True)
        try:
            run = f"genmodels.cli.{self.command}.run"
            checked = Schema(run, lambda path: "in this point of the sweep", plain.get("trust") or ()).check(plain)
            with _alone(self.command, words):
                return import_module(f"genmodels.cli.{self.command}").run(**checked)
        except Exception as error:
            known = explain(self.command, error)
            if known is None:
                traceback.print_exc()
            else:
                print(f"genmodels {self.command}: {known[0]}", file=sys.stderr, flush=True)
            return Failure(known[0] if known else f"{type(error).__name__}: {error}")

    def title(self, words: list[str]) -> str:
        """The settings that distinguish this point from the others, as on the command line."""
        plain = [word.lstrip("+") for word in words]
        return " ".join(word for word in plain if word.split("=")[0] in self.swept) or " ".join(plain)


@contextmanager
def _alone(command: str, words: list[str]) -> Iterator[None]:
    """The process as it would be had the point been started by itself.

    Lightning starts further processes by repeating this one's command line; in a sweep it must repeat the point, not
    the sweep, and must not take Hydra's record of the sweep for that of a single job. What it leaves in the environment
    (LOCAL_RANK, MASTER_PORT, ...) would make the next point believe that it is one of those processes, and the process
    group that it leaves open would have the next point talk to processes that are gone.
    """
    argv, record, environment = sys.argv, HydraConfig.instance().cfg, dict(os.environ)
    sys.argv = [argv[0], *([command] if argv[1:2] == [command] else []), *words]
    HydraConfig.instance().cfg = None
    try:
        yield
    finally:
        sys.argv, HydraConfig.instance().cfg = argv, record
        os.environ.clear()
        os.environ.update(environment)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


def table_of(points: list[tuple[str, object]]) -> list[str]:
    """The figures that the points of a sweep returned, one line each; nothing where none returned any.

    Example:
        >>> for line in table_of([("seed=0", {"val/nll": "= 1.25(3)"}), ("seed=1", Failure("out of memory"))]):
        ...     print(line)
        <BLANKLINE>
        point   val/nll
        ------  ---------
        seed=0  = 1.25(3)
        seed=1  failed
    """
    names = list(dict.fromkeys(name for _, found in points if isinstance(found, dict) for name in found))
    if not names:
        return []
    rows = [["point", *names]]
    for title, found in points:
        cells = [str(found.get(name, "")) for name in names] if isinstance(found, dict) else [""] * len(names)
        rows.append([title, *(["failed", *cells[1:]] if isinstance(found, Failure) else cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return ["", *("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)]


def sweep(composer: Composer, overrides: list[str]) -> int:
    """Run every point, whatever becomes of the others, and tell their figures in a table; 1 if any failed.

    Raises:
        InputError: when a point is wrong, before any has started.
    """
    points = composer.points(overrides)
    parsed = composer.parse(overrides)
    task = Point(composer.command, tuple(o.key_or_group for o in parsed if o.is_sweep_override()))
    words = [override.input_line for override in parsed]
    batches = composer.hydra.multirun(composer.command, task, [*words, "hydra.mode=MULTIRUN"])
    # Hydra's basic sweeper returns its jobs; others keep them and decide themselves what a failure means.
    jobs = [job for batch in batches for job in batch] if isinstance(batches, list) else []
    failed = [job for job in jobs if isinstance(job.return_value, Failure)]
    for job in failed:
        what = task.title(job.overrides)
        print(f"genmodels {composer.command}: failed: {what} ({job.return_value.message})", file=sys.stderr)
    for line in table_of([(task.title(job.overrides), job.return_value) for job in jobs]):
        print(line)
    if points:
        print(f"\n{len(points) - len(failed)} of {len(points)} points done", flush=True)
    return 1 if failed else 0
