"""What all tests and doctests share: threads, a cache, seeds, and a way to run commands as a user does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent


def limit_threads() -> None:
    """One thread per process, or `GENMODELS_TEST_THREADS`, also in the processes that tests start.

    Whatever the environment says of threads is replaced: several processes with all cores each wait for one another.
    """
    given = os.environ.get("GENMODELS_TEST_THREADS", "1")
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise pytest.UsageError(f"GENMODELS_TEST_THREADS must be a number of threads from 1 on, got {given!r}")
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), given)
    if "torch" in sys.modules:  # imported by a plugin: it has read the environment already
        sys.modules["torch"].set_num_threads(int(given))


limit_threads()
os.environ.setdefault("MPLBACKEND", "Agg")  # no windows
# numba, where it is installed: a process that has used OpenMP for its loops cannot be forked, as some tests do.
os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
os.environ["WANDB__SAVE_REQUIREMENTS"] = "false"  # W&B would read all installed packages at every run
# Each of the many processes that tests start would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
gc.disable()  # until all tests are collected: what is made until then stays


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`pytest -n 2` gives each process one half in order, and what is left of it later to whoever has finished.

    The usual small portions would make the fixtures of a module in every process.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """What forks comes first: a process in which torch has started threads of autograd forks children without one."""
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)


def pytest_collection_finish():
    """The collector of garbage looks at what tests make, no more at the modules and tests themselves."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """At the end everything is looked at again, or libraries that count what they have made complain."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def a_cache_of_their_own(tmp_path_factory):
    """Tests neither read nor fill the user's cache."""
    given = os.environ.get("GENMODELS_CACHE")
    os.environ["GENMODELS_CACHE"] = given or str(tmp_path_factory.mktemp("cache"))
    yield
    if given is None:
        del os.environ["GENMODELS_CACHE"]


@pytest.fixture(autouse=True)
def the_same_numbers_every_time():
    """Networks that a test builds start from the same weights in every run, whatever ran before.

    So does the number of threads: a process forked while torch has several waits for them forever.
    """
    if "torch" in sys.modules:
        from genmodels.core.random import reseed

        torch = sys.modules["torch"]
        reseed(0, torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def short_pilot(monkeypatch):
    """A fifth of the moves tunes the chains of annealed importance sampling; all of them would take most of a test."""
    monkeypatch.setattr("genmodels.energy.annealed_importance._PILOT", (10, 20))


@pytest.fixture(scope="session")
def refuses():
    """Check that a call raises an error of one line, in which `words` is found; gives the line."""

    def check(kind: type[Exception], words: str | None, call, *args, **options) -> str:
        with pytest.raises(kind, match=words) as error:
            call(*args, **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    return check


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data, or a skip."""
    folder = Path(os.environ.get("GENMODELS_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "MNIST" / "raw").is_dir():
        pytest.skip(f"no MNIST in {folder} (set GENMODELS_SHARED_DATA to a folder that holds MNIST/raw)")
    return folder


@pytest.fixture
def genmodels(tmp_path):
    """Run `genmodels <words>` in a process of its own, in an empty folder; gives subprocess' result."""

    def run(*words: str, cwd: Path = tmp_path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        return subprocess.run([sys.executable, "-m", "genmodels", *map(str, words)], cwd=cwd, env=env, timeout=timeout,
                              capture_output=True, text=True)

    return run
