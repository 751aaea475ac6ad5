"""Who has started the processes of a run, what they settle before they meet, and how they end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from genmodels.cli.main import guarded
from genmodels.core.errors import InputError, Interrupted
from genmodels.training.callbacks import Checkpointing, CheckpointOptions
from genmodels.training.processes import (
    Launch,
    SharedSignal,
    agreed,
    fitted,
    gone,
    is_first,
    job,
    launch,
    requeue,
    stoppable,
)
from genmodels.training.trainer import TrainerOptions
from tests.two_processes import fork, forked, together

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
    model, alone = SimpleNamespace(batches_seen=7), SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(global_step=7, is_global_zero=True, strategy=alone)
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

    trainer = SimpleNamespace(global_step=0, max_steps=9, should_stop=False, is_global_zero=True, loggers=[],
                              strategy=SimpleNamespace(broadcast=lambda value: value),
                              save_checkpoint=save, lightning_module=SimpleNamespace())
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


def test_a_signal_waits_for_the_import_of_torch(monkeypatch):
    """An exception within its C++ code would end the process without a line."""
    monkeypatch.setattr(torch.__spec__, "_initializing", True, raising=False)
    with pytest.raises(Interrupted, match="SIGTERM"), stoppable():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        imported = True  # an exception before here leaves it unset
        monkeypatch.undo()
        time.sleep(1)
    assert imported


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


# ---- who has started them, and what they settle ----


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_NTASKS": "32", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "4", "SLURM_PROCID": "9",
        "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train"}  # fmt: skip
LIGHTNING = {"LOCAL_RANK": "1", "NODE_RANK": "0"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """An environment in which nobody has started anything."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "GENMODELS_CHOICE")) or name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"
        ):
            monkeypatch.delenv(name)


def given(monkeypatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("environment, found, first", [
    ({}, None, True),
    (TORCHRUN, Launch("torchrun", 2, 2), False),
    (TORCHRUN | {"RANK": "0"}, Launch("torchrun", 2, 2), True),
    (SRUN, Launch("srun", 8, 4), False),
    (SRUN | {"SLURM_PROCID": "0"}, Launch("srun", 8, 4), True),
    (SRUN | {"SLURM_JOB_NAME": "bash"}, None, True),
    (SRUN | TORCHRUN | {"RANK": "0"}, Launch("torchrun", 2, 2), True),
    (LIGHTNING, None, False),
    ({"NODE_RANK": "1"}, None, False),
])  # fmt: skip
def test_who_has_started_the_processes(monkeypatch, environment, found, first):
    given(monkeypatch, environment)
    assert launch() == found and is_first() is first


def test_the_trainer_takes_the_numbers_of_the_launcher(monkeypatch):
    assert fitted(TrainerOptions(devices=3), {"devices": 3}).devices == 3
    given(monkeypatch, SRUN)
    for words in ({}, {"devices": 8, "num_nodes": 4}, {"devices": "auto"}):
        options = fitted(TrainerOptions(**words), words)
        assert (options.devices, options.num_nodes) == (8, 4)
    for words, said in (({"devices": 2}, "srun has started 8 processes"), ({"num_nodes": 2}, "has started 4 machines")):
        with pytest.raises(InputError, match=said):
            fitted(TrainerOptions(**words), words)
    given(monkeypatch, {"SLURM_NTASKS": "31"})
    with pytest.raises(InputError, match="same number"):
        launch()


def test_the_job(monkeypatch):
    assert job() is None
    given(monkeypatch, {"TORCHELASTIC_RUN_ID": "none"})
    assert job() is None
    given(monkeypatch, {"TORCHELASTIC_RUN_ID": "mine"})
    assert job() == "mine"
    given(monkeypatch, {"SLURM_JOB_ID": "77"})
    assert job() == "77"
    given(monkeypatch, {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"})
    assert job() == "70_3"


def test_requeueing_says_what_came_of_it(monkeypatch, tmp_path):
    given(monkeypatch, {"SLURM_JOB_ID": "77", "PATH": str(tmp_path)})
    assert "scontrol requeue 77 failed" in requeue()
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ > {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert requeue() == "job 77 is queued again" and (tmp_path / "asked").read_text() == "requeue 77\n"
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    assert requeue() == "scontrol requeue 77 failed (no such job)"


def test_one_process_decides_for_itself_and_for_those_that_lightning_starts(monkeypatch):
    assert agreed(lambda: "a") == "a" and agreed(lambda: "b") == "b"
    given(monkeypatch, LIGHTNING | {"GENMODELS_CHOICE": f"{os.getppid()}:a"})
    assert agreed(lambda: "b") == "a"
    given(monkeypatch, {"GENMODELS_CHOICE": "1:a"} if os.getppid() != 1 else {"GENMODELS_CHOICE": "2:a"})
    assert agreed(lambda: "b") == "b"  # of a run that has nothing to do with this one
    with pytest.raises(InputError, match="MASTER_ADDR"):
        agreed(lambda: "c", num_nodes=2)


def _agree(rank: int, port: str, out: Path) -> None:
    os.environ |= SRUN | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1",
                          "SLURM_PROCID": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    said = [agreed(lambda: f"{rank} {time.monotonic()}") for _ in range(2)]
    # The process group of training meets at the same address.
    torch.distributed.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    stops = SharedSignal()
    seen = [stops(signal.SIGTERM if rank == 1 and step == 2 else None) for step in range(5)]
    torch.save([said, seen], out)
    together(out.with_name("agreed"), rank)

    def refuse() -> str:
        raise InputError("no")

    try:
        agreed(refuse)
    except InputError:
        assert rank == 0
        together(out.with_name("refused"), rank)
        os._exit(3)
    except SystemExit as end:
        assert rank == 1
        together(out.with_name("refused"), rank)
        os._exit(end.code)


@fork
def test_the_first_process_decides_and_all_stop_at_the_same_step(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    forked(_agree, *((rank, port, tmp_path / f"{rank}.pt") for rank in (1, 0)), codes=(2, 3))
    (first, seen), others = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert others == [first, seen] and seen == [None, None, None, 15, None]
    assert len(set(first)) == 2 and all(choice.startswith("0 ") for choice in first)
