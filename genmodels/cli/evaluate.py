"""`genmodels evaluate`: likelihoods with their kinds and errors, samples, checks and cost, of one model or of many."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from genmodels.evaluation.checkpoint import Request


def run(*, ckpt: str | list[str], **options: Request) -> None:
    """Evaluate and compare trained models on a split of their data.

    Arguments:
        ckpt: a checkpoint, a run folder, or a list of them for a comparison in one table.
        options: what is evaluated.
    """
    import os
    from pathlib import Path

    from genmodels.core.errors import InputError
    from genmodels.core.files import check_writable
    from genmodels.evaluation.checkpoint import Request

    paths = [Path(p) for p in ([ckpt] if isinstance(ckpt, str) else ckpt)]
    if not paths:
        raise InputError("ckpt=[] names no checkpoint")
    request = Request(**options)
    if request.out is not None:
        check_writable("out", Path(request.out))
    paths = [p / "best.ckpt" if p.is_dir() else p for p in paths]
    if request.processes == 1 or "WORLD_SIZE" in os.environ:
        evaluate(paths, request)
        return

    from genmodels.core.processes import launch

    launch(_one_of_several, request.processes, paths, request)


def evaluate(paths: list[Path], request: Request) -> None:
    """Evaluate checkpoints in this process, or in those that torchrun started.

    Raises:
        InputError, RunError: what stops all of it, or failed.
    """
    import sys

    from genmodels.core.checkpoint import verify
    from genmodels.core.errors import RunError
    from genmodels.core.processes import Ranks

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
        for message in failures.values():  # at once, for the others may take long
            print(f"{message}; going on with the others", file=sys.stderr, flush=True)

    from genmodels.report.compare import compare

    whole = [path for path in paths if str(path) not in failures]
    failed = compare(whole, request, group, several=len(paths) > 1, failures=failures)
    if failed:
        raise RunError("; ".join(failed))


def _one_of_several(paths: list[Path], request: Request) -> None:
    """What each of the processes does that `processes=` starts."""
    import sys

    from genmodels.cli.main import guarded

    code = guarded("evaluate", lambda: evaluate(paths, request))
    if code:
        sys.exit(code)
