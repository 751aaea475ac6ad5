"""A run of the tests has the threads it is given, and no others: here, in its workers, in what they start."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

#: A plugin that imports torch before any conftest is read, and notes at the end what there is for it and for children.
PROBE = """
import os
import torch

def pytest_sessionfinish():
    with open(os.environ["PROBE"], "a") as file:
        file.write(f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}\\n")
"""


def run_doctest(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """pytest on one doctest of the package, with three threads asked for by the environment."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GENMODELS_TEST_"))}
    env |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PROBE": str(folder / "threads")}
    env |= {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "genmodels/core/errors.py"]
    return subprocess.run(command, cwd=ROOT, env=env | environment, capture_output=True, text=True)


def test_this_run_has_its_threads():
    assert torch.get_num_threads() == int(os.environ.get("GENMODELS_TEST_THREADS", "1"))


def test_every_process_has_the_threads_that_are_set(tmp_path):
    """Though the environment says three, a plugin imports torch early, and no file of tests/ is among the arguments."""
    (tmp_path / "probe.py").write_text(PROBE)
    done = run_doctest(tmp_path, "-p", "probe", "-n", "1", GENMODELS_TEST_THREADS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "threads").read_text().splitlines() == ["2 2"] * 2


def test_one_thread_unless_set(monkeypatch):
    """Though the environment says three, and torch is imported already, with as many."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("GENMODELS_TEST_THREADS", raising=False)
    torch.set_num_threads(3)
    runpy.run_path(str(ROOT / "conftest.py"))["gc"].enable()  # which it stops until tests are collected
    assert torch.get_num_threads() == 1 and [os.environ[name] for name in names] == ["1"] * 3


def test_a_number_of_threads_is_a_number(tmp_path, monkeypatch):
    done = run_doctest(tmp_path, GENMODELS_TEST_THREADS="0")
    assert done.returncode == 4 and "got '0'" in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setenv("GENMODELS_TEST_THREADS", "two")
    with pytest.raises(pytest.UsageError, match="got 'two'"):
        runpy.run_path(str(ROOT / "conftest.py"))
