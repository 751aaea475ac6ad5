"""A signal before there is anything to save, and processes whose partners are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from genmodels.cli.main import guarded
from genmodels.core.errors import Interrupted
from genmodels.training.callbacks import Checkpointing, CheckpointOptions
from genmodels.training.processes import gone, stoppable

ROOT = Path(__file__).parents[2]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_one_line_and_the_handler_of_before_comes_back(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"), stoppable():
        terminate()
    assert guarded("train", terminate) == 130
    assert capsys.readouterr().err == "genmodels train: stopped by a signal (SIGTERM)\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_during_the_first_step_is_obeyed_at_once_and_later_ones_after_the_step(tmp_path):
    model, trainer = SimpleNamespace(batches_seen=7), SimpleNamespace(global_step=7, is_global_zero=True)
    callback = Checkpointing(tmp_path, CheckpointOptions())
    callback.on_train_start(trainer, model)
    try:
        with pytest.raises(Interrupted, match="before the step after 7"):
            terminate()
        model.batches_seen = 8
        terminate()  # noted: the step is finished and saved first
        with pytest.raises(Interrupted, match="at once"):
            terminate()
    finally:
        callback.on_exception(trainer, model, None)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, timeout=100,
                          capture_output=True, text=True)


def test_a_process_that_ended_is_named():
    child = subprocess.Popen(["sleep", "60"])
    assert gone([child], None) is None
    child.kill()
    child.wait()
    assert gone([child], None) == "process 1 of the run was killed by SIGKILL"
    assert gone([SimpleNamespace(poll=lambda: None), SimpleNamespace(poll=lambda: 2)], None) == (
        "process 2 of the run ended with exit code 2")
    assert gone([SimpleNamespace(poll=lambda: 0)], os.getppid()) is None


def test_the_first_process_ends_soon_after_another_was_killed():
    done = python("""
import subprocess, time
from genmodels.training.processes import watched
child = subprocess.Popen(["sleep", "60"])
with watched(lambda: [child]):
    child.kill()
    time.sleep(60)
print("went on")
""")
    assert done.returncode == 1 and done.stdout == ""
    assert "process 1 of the run was killed by SIGKILL; the same command with resume=last goes on\n" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_others_end_soon_after_the_first_was_killed():
    inner = """
import time
from genmodels.training.processes import watched
with watched(list):
    print("up", flush=True)
    time.sleep(60)
"""
    done = python(f"""
import os, subprocess, sys
alone = dict(os.environ, LOCAL_RANK="1")
inner = subprocess.Popen([sys.executable, "-c", {inner!r}], env=alone, stdout=subprocess.PIPE)
inner.stdout.readline()
os.kill(os.getpid(), 9)
""")
    assert done.stderr == "genmodels train: process 0 of the run has ended; the same command with resume=last goes on\n"
