"""Python in processes of their own that begin with everything imported, which takes longer than short runs do."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

_methods = multiprocessing.get_all_start_methods()
_context = multiprocessing.get_context("forkserver" if "forkserver" in _methods else "spawn")
if "forkserver" in _methods:
    _context.set_forkserver_preload(["genmodels.training.trainer", "genmodels.training.dashboards",
                                     "genmodels.models.ddpm", "genmodels.cli.compose", "sklearn.datasets"])


class Started:
    """`python <words>` without a GPU, with what is used of `subprocess.Popen`.

    Arguments:
        words: `-c` and a program, or the path of a script and its words.
        cwd: the folder in which it runs.
        environment: replaces that of this process.
    """

    def __init__(self, *words: str, cwd: Path, environment: dict[str, str] | None = None):
        self._texts = tempfile.TemporaryDirectory()
        environment = (os.environ if environment is None else environment) | {"CUDA_VISIBLE_DEVICES": ""}
        self._process = _context.Process(target=_run, args=(words, str(cwd), environment, self._texts.name))
        self._process.start()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error) -> None:
        self.kill()
        self._process.join()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it without notice, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """What it wrote to standard output and to standard error, once it has ended."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"still running after {timeout} s")
        return tuple(Path(self._texts.name, name).read_text() for name in ("out", "err"))


def _run(words: tuple[str, ...], cwd: str, environment: dict[str, str], texts: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(texts, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    multiprocessing.set_start_method(None, force=True)  # its own processes start as by default
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    """The same as by `subprocess.run`."""
    with Started(*words, cwd=cwd) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def script(name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run one of the scripts at the top of the repository as a user would."""
    return run(str(ROOT / f"{name}.py"), *words, cwd=cwd)
