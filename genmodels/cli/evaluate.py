"""`genmodels evaluate`: likelihoods with their kinds and errors, samples, checks and cost, of one model or of many."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from genmodels.core.checkpoint import verify
from genmodels.core.errors import InputError, RunError
from genmodels.core.files import HUB, check_writable, located, place_of
from genmodels.core.processes import Ranks, launch
from genmodels.evaluation.checkpoint import Request

if TYPE_CHECKING:
    from genmodels.report.compare import Comparison


def run(*, ckpt: str | list[str], **options: Request) -> None:
    """Evaluate and compare trained models on a split of their data.

    Arguments:
        ckpt: a checkpoint, a run folder, a .safetensors or hf://user/name, or a list of them for a comparison in one
            table.
        options: what is evaluated.
    """
    paths, request = asked([ckpt] if isinstance(ckpt, str) else ckpt, Request(**options))
    if request.processes == 1 or "WORLD_SIZE" in os.environ:
        _print_evaluation(paths, request)
    else:
        launch(_one_of_several, request.processes, paths, request)


def asked(ckpt: Sequence[str | Path], request: Request) -> tuple[list[Path], Request]:
    """The files of checkpoints, and the request with a place for its reports.

    Raises:
        InputError: for no checkpoint, or a place that cannot be written.
    """
    if not ckpt:
        raise InputError("ckpt=[] names no checkpoint")
    out, several = request.out, len(ckpt) > 1
    paths = [located(each) for each in ckpt]
    common = Path(os.path.commonpath([path.resolve().parent for path in paths]))
    # Neither into the cache of the hub nor into the root of a disk.
    if out is None and (any(str(each).startswith(HUB) for each in ckpt) or several and common == Path(common.anchor)):
        out = "comparison" if several else place_of(ckpt[0]).with_name("report.json")
    request = replace(request, out=None if out is None else os.path.expanduser(out))
    if request.out is not None:
        check_writable("out", Path(request.out), several=several)
        return paths, request
    for place in [*(path.with_name("report.json") for path in paths), *([common / "table.json"] if several else [])]:
        check_writable("out", place)
    return paths, request


def _print_evaluation(paths: list[Path], request: Request) -> None:
    words = [word for word in sys.argv[1:] if word != "evaluate"]
    found = evaluate(paths, request, "python evaluate.py " + " ".join(shlex.quote(word) for word in words))
    if found is not None:
        print(*found.lines, sep="\n")
        if found.failed:
            raise RunError("; ".join(dict.fromkeys(found.failed)))


def evaluate(paths: list[Path], request: Request, command: str = "") -> Comparison | None:
    """Evaluate checkpoints in this process, or in those that torchrun started; None in all of these but the first.

    Reports name the command.

    Raises:
        InputError, RunError: when nothing can be evaluated.
    """
    group = Ranks()
    failures: dict[str, str] = {}
    for path in paths:
        try:
            verify(path)
        except RunError as error:
            failures[str(path)] = str(error)
    if len(failures) == len(set(map(str, paths))):
        raise RunError("; ".join(failures.values()))
    if group.rank == 0:
        for message in failures.values():  # now, because the others may take long
            print(f"{message}; going on with the others", file=sys.stderr, flush=True)

    from genmodels.report.compare import compare  # takes a second: after the files were checked

    whole = [path for path in paths if str(path) not in failures]
    return compare(whole, request, group, several=len(paths) > 1, failures=failures, command=command)


def _one_of_several(paths: list[Path], request: Request) -> None:
    """The work of each process that `processes=` starts."""
    from genmodels.cli.main import guarded

    code = guarded("evaluate", lambda: _print_evaluation(paths, request))
    if code:
        sys.exit(code)
