"""A signal before there is anything to save, and processes whose partners are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
        model.batches_seen = 8
        terminate()  # noted: the step is finished and saved first
        model.batches_seen = 7
        with pytest.raises(Interrupted, match="after step 7"):
            terminate()
        model.batches_seen = 8
        with pytest.raises(Interrupted, match="immediately"):
            terminate()
    finally:
        callback.on_exception(trainer, model, None)


def test_a_signal_during_a_save_is_no_failure_of_the_save(tmp_path):
    def save(path):
        terminate()

    trainer = SimpleNamespace(global_step=0, max_steps=9, is_global_zero=True, loggers=[], save_checkpoint=save,
                              lightning_module=SimpleNamespace())
    with pytest.raises(Interrupted, match="SIGTERM"), stoppable():
        Checkpointing(tmp_path, CheckpointOptions()).on_train_start(trainer, trainer.lightning_module)


class Destroyed:
    """What is raised in its destructor is lost."""

    def __del__(self):
        terminate()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_line_can_keep_a_signal_for_itself():
    def swallow():
        try:
            terminate()
        except Exception:
            pass

    def fail_later():
        Destroyed()
        raise AttributeError("what the import would have defined")

    def go_on():
        Destroyed()
        time.sleep(20)

    assert guarded("train", swallow) == 130
    assert guarded("train", fail_later) == 130
    start = time.monotonic()
    assert guarded("train", go_on) == 130 and time.monotonic() - start < 10


def test_the_end_of_an_interruption_is_left_alone():
    done = []
    with pytest.raises(Interrupted), stoppable(patience=0.05):
        try:
            terminate()
        finally:
            for _ in range(4):
                time.sleep(0.05)
            done.append("report")
    assert done == ["report"] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def heed_sigint() -> None:
    """Tests that a shell started in the background ignore SIGINT, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0.6, 1.2, 1.8])
def test_a_run_that_starts_ends_with_a_line(tmp_path, seconds, number):
    words = ["train", "model=ddpm", "data=digits", "trainer.max_steps=5000", "logger=csv", "model.net.channels=8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "genmodels", *words, f"run_dir={tmp_path}/run"], cwd=tmp_path,
                          env=environment, stderr=subprocess.PIPE, text=True,
                          preexec_fn=heed_sigint) as run:
        try:
            time.sleep(seconds)
            run.send_signal(number)
            _, message = run.communicate(timeout=30)
        finally:
            run.kill()
    assert (run.returncode, message.count("\n")) == (130, 1) and "genmodels train: " in message, message


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
    assert "process 1 of the run was killed by SIGKILL; continue with the same command and resume=last\n" in done.stderr
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
    expected = "genmodels train: process 0 of the run has ended; continue with the same command and resume=last\n"
    assert done.stderr == expected
