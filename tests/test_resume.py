"""A run that is killed and resumed ends as one that was never stopped, bit for bit."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from genmodels.cli.main import main
from genmodels.core.checkpoint import read_header
from genmodels.core.errors import stored_options
from genmodels.models.checkpoint import load_model, read_checkpoint
from tests.commands import ROOT, Started

SMALL = [
    "model=ddpm", "data=digits", "model.net.channels=8", "model.net.multipliers=[1,2]", "model.net.blocks=1",
    "model.num_steps=20", "model.net.dropout=0.1", "logger=csv", "trainer.progress=false",
    "trainer.sample_every_n_steps=0",
    "checkpoint.every_n_steps=7", "trainer.max_steps=48", "trainer.validate_every_n_steps=23",
    "trainer.limit_validation=2", "trainer.accelerator=cpu",
]


FLOW = [
    "model=realnvp", "data=digits", 'model.layout=["checkerboard*2",squeeze,"channel*2"]', "model.hidden=8",
    "model.depth=1", "model.dropout=0.1", "model.memory=inverse", "model.dequantisation=variational", "logger=csv",
    "trainer.progress=false", "trainer.sample_every_n_steps=0", "checkpoint.every_n_steps=5", "trainer.max_steps=24",
    "trainer.validate_every_n_steps=9", "trainer.accelerator=cpu",
]

SPEECH = [
    "data=speech", "~preset", "data.batch_size=2", "logger=csv", "trainer.progress=false",
    "trainer.sample_every_n_steps=0", "checkpoint.every_n_steps=4", "trainer.max_steps=16",
    "trainer.validate_every_n_steps=6", "trainer.limit_validation=1", "trainer.accelerator=cpu",
    "model.encoder.channels=8", "model.encoder.hidden=8", "model.encoder.depth=1", "model.duration_channels=8",
]
SPEAKING = {
    "glow_tts": ["model=glow_tts", *SPEECH, "model.steps=2", "model.hidden=8", "model.depth=1"],
    "mel_ddpm": ["model=mel_ddpm", *SPEECH, "model.net.channels=8", "model.net.multipliers=[1,2]",
                 "model.net.blocks=1", "model.time_sampler=loss_aware"],
    "mel_energy": ["model=mel_energy", *SPEECH, "model.net.channels=8", "model.net.multipliers=[1,2]",
                   "model.net.blocks=1"],
    "mel_flow_matching": ["model=mel_flow_matching", *SPEECH, "model.net.channels=8", "model.net.multipliers=[1,2]",
                          "model.net.blocks=1", "model.time_sampler=logit_normal"],
}  # fmt: skip


def begun(folder: Path, *words: str, base: list[str] = SMALL) -> Started:
    """A run in a process of its own."""
    return Started(str(ROOT / "train.py"), *base, f"run_dir={folder}", *words, cwd=folder.parent)


def train(folder: Path, *words: str, base: list[str] = SMALL) -> str:
    """A run in this process that nobody stops; what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["train", *base, f"run_dir={folder}", *words])
    assert code == 0, err.getvalue()
    return out.getvalue()


def fingerprint(path: Path) -> str:
    """Of weights, averages, optimiser and counters: all that the rest of the run depends on."""
    state = read_checkpoint(path)
    digest = hashlib.sha256()

    def feed(value) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                digest.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            digest.update(repr(value).encode())

    for part in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops"):
        feed(state[part])
    return digest.hexdigest()


def metrics(folder: Path) -> str:
    return (folder / "metrics.csv").read_text()


def kill_after(folder: Path, run: Started, step: int, extra: float = 0.0) -> int:
    """SIGKILL once last.ckpt has reached a step; the step it then has."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.returncode is None:
        try:
            if read_header(folder / "last.ckpt", check=False)["step"] >= step:
                break
        except FileNotFoundError:
            pass  # the first one is still to come; it appears whole
        time.sleep(0.01)
    time.sleep(extra)
    run.kill()
    run.communicate()
    return read_header(folder / "last.ckpt")["step"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One run that nobody stops, for each number of loader workers."""
    runs = {}
    for workers in (0, 2):
        folder = tmp_path_factory.mktemp("straight") / f"run{workers}"
        train(folder, f"data.num_workers={workers}")
        runs[workers] = folder
    return runs


def test_workers_change_nothing(straight):
    assert fingerprint(straight[0] / "last.ckpt") == fingerprint(straight[2] / "last.ckpt")


@pytest.mark.parametrize("workers, kills", [pytest.param(0, 1, marks=pytest.mark.slow), (2, 2)])
def test_killed_at_random_moments(straight, tmp_path, workers, kills):
    rng = random.Random(workers)
    folder, option = tmp_path / "run", f"data.num_workers={workers}"
    stops, words = [], [option]
    for target in sorted(rng.sample(range(7, 38), kills)):
        with begun(folder, *words) as run:
            stops.append(kill_after(folder, run, target, extra=rng.uniform(0, 0.15)))
        words = [option, "resume=last"]
    train(folder, *words)
    assert stops[-1] < 48, stops
    assert fingerprint(folder / "last.ckpt") == fingerprint(straight[workers] / "last.ckpt"), stops
    assert fingerprint(folder / "best.ckpt") == fingerprint(straight[workers] / "best.ckpt"), stops
    assert metrics(folder) == metrics(straight[workers]), stops


def test_the_fingerprint_sees_another_order_of_the_data(tmp_path):
    """The mutant: the same steps on other batches must not pass for the same run."""
    for seed in (0, 1):
        train(tmp_path / str(seed), "trainer.max_steps=2", f"seed={seed}")
    assert fingerprint(tmp_path / "0" / "last.ckpt") != fingerprint(tmp_path / "1" / "last.ckpt")


def test_killed_at_the_end_of_an_epoch_then_stopped_by_a_signal(straight, tmp_path):
    """19 batches of 64 make an epoch of digits."""
    folder, rare = tmp_path / "run", "checkpoint.every_n_steps=19"
    with begun(folder, rare) as run:
        assert kill_after(folder, run, 19) in (19, 38)
    with begun(folder, "resume=last") as run:
        deadline = time.monotonic() + 120
        while read_header(folder / "last.ckpt", check=False)["step"] < 28 and time.monotonic() < deadline:
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)
        _, message = run.communicate()
    assert run.returncode == 130 and "interrupted" in message and message.count("\n") == 1, message
    assert read_header(folder / "last.ckpt")["step"] < 48
    assert main(["train", f"resume={folder}"]) == 0  # its settings are known
    assert fingerprint(folder / "last.ckpt") == fingerprint(straight[0] / "last.ckpt")
    assert metrics(folder) == metrics(straight[0])


def test_a_signal_to_all_processes_of_a_run_stops_it_after_saving(tmp_path):
    """As `timeout` and schedulers send it: the loaders' processes must not end before the step is saved."""
    words = [str(ROOT / "train.py"), *SMALL, "run_dir=run", "data.num_workers=2", "trainer.max_steps=100000"]
    program = f"import os, runpy, sys; os.setpgrp(); sys.argv = {words}; runpy.run_path(sys.argv[0], {{}}, '__main__')"
    last, deadline = tmp_path / "run" / "last.ckpt", time.monotonic() + 120
    with Started("-c", program, cwd=tmp_path) as run:
        while not last.is_file() or read_header(last, check=False)["step"] < 7:
            assert time.monotonic() < deadline and run.returncode is None
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGTERM)
        _, message = run.communicate()
    step = read_header(last)["step"]
    assert run.returncode == 130 and f"interrupted at step {step}" in message, message


def test_a_run_in_double_precision_resumes_in_it(tmp_path):
    base = ["model=nsf", "data=toy", "model.hidden=8", "~preset", "data.batch_size=16", "trainer.precision=64-true",
            "logger=csv", "trainer.progress=false", "trainer.sample_every_n_steps=0", "trainer.accelerator=cpu",
            "trainer.limit_validation=1"]  # fmt: skip
    for folder, *words in (("whole", "trainer.max_steps=8"), ("run", "trainer.max_steps=4"),
                           ("run", "trainer.max_steps=8", "resume=last")):
        train(tmp_path / folder, *words, base=base)
    whole, again = (read_checkpoint(tmp_path / folder / "last.ckpt")["state_dict"] for folder in ("whole", "run"))
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name
        assert value.dtype in (torch.float64, torch.int64, torch.bool), name


@pytest.mark.slow
def test_two_accumulated_batches_resume_too(tmp_path):
    words = ["trainer.accumulate=2", "trainer.max_steps=20", "checkpoint.every_n_steps=3"]
    train(tmp_path / "whole", *words)
    folder = tmp_path / "run"
    with begun(folder, *words) as run:
        kill_after(folder, run, 6)
    train(folder, *words, "resume=last")
    assert fingerprint(folder / "last.ckpt") == fingerprint(tmp_path / "whole" / "last.ckpt")


def test_a_finished_run_that_goes_on_has_the_rows_of_a_longer_one(tmp_path):
    words = ["model.optimizer.decay=none", "trainer.validate_every_n_steps=4"]
    for folder, further in (("whole", ["trainer.max_steps=16"]), ("run", ["trainer.max_steps=8"]),
                            ("run", ["trainer.max_steps=16", "resume=last"])):
        printed = train(tmp_path / folder, *words, *further)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert "the run now has 16 steps instead of 8" in printed
    assert "max_steps: 16" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    "words, said",
    [
        (["resume=last", "seed=3"], "seed is 0"),
        (["resume=last", "model.net.channels=16"], "model.net.channels is 8"),
        (["resume=last", "data.batch_size=16"], "data.batch_size"),
        (["resume=last", "trainer.accumulate=2"], "trainer.accumulate is 1"),
        (["resume=last", "trainer.precision=bf16-mixed"], "trainer.precision is '32-true'"),
        ([], "already holds a run"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(straight, capsys, words, said):
    assert main(["train", *SMALL, f"run_dir={straight[0]}", *words]) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1, message


def stopped_once(tmp_path: Path, base: list[str], at: int, steps: int) -> None:
    """A run that is killed after so many steps and resumed ends as one that nobody stops."""
    train(tmp_path / "whole", base=base)
    folder = tmp_path / "run"
    with begun(folder, base=base) as run:
        assert kill_after(folder, run, at) < steps
    train(folder, "resume=last", base=base)
    assert fingerprint(folder / "last.ckpt") == fingerprint(tmp_path / "whole" / "last.ckpt")
    assert metrics(folder) == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_a_flow_in_constant_memory_with_dropout_resumes_too(tmp_path):
    stopped_once(tmp_path, FLOW, at=5, steps=24)


def test_a_run_on_shards_resumes_too(tmp_path):
    """And it is the run on the data from which they were written."""
    short = [word for word in SMALL if not word.startswith(("data=", "trainer.max_steps="))]
    base = [*short, "preset=ddpm_digits", "trainer.max_steps=16", "data=shards", f"data.root={tmp_path / 'shards'}"]
    assert main(["shards", "data=digits", f"out={tmp_path / 'shards'}", "items=300"]) == 0
    stopped_once(tmp_path, base, at=7, steps=16)
    train(tmp_path / "digits", base=[*short, "data=digits", "trainer.max_steps=16"])
    assert metrics(tmp_path / "digits") == metrics(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("model", [
    ["flow_matching", "model.coupling=ot", "model.time_sampler=logit_normal"], ["masked_diffusion", "model.net=unet"]])
def test_flow_matching_with_optimal_transport_and_masked_diffusion_resume_too(model, tmp_path):
    small = [f"model={model[0]}", *model[1:], "trainer.max_steps=16",
             *(word for word in SMALL if not word.startswith(("model=", "trainer.max_steps", "trainer.validate")))]
    stopped_once(tmp_path, small, at=7, steps=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPEAKING)
def test_models_of_texts_resume_too(name, tmp_path):
    stopped_once(tmp_path, SPEAKING[name], at=4, steps=16)


def test_resume_without_a_run(tmp_path, capsys):
    assert main(["train", *SMALL, f"run_dir={tmp_path / 'none'}", "resume=last"]) == 2
    message = capsys.readouterr().err
    assert "no last.ckpt" in message and message.count("\n") == 1


def test_an_exported_model_is_not_resumed(tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    assert main(["train", *SMALL, f"resume={tmp_path / 'model.safetensors'}"]) == 2
    message = capsys.readouterr().err
    assert "holds its weights alone" in message and "init=" in message and message.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_options_without_effect_are_refused_but_for_those_of_a_checkpoint(tmp_path, capsys):
    words = [*SMALL, "model.optimizer.half_life=7", f"run_dir={tmp_path / 'run'}", "trainer.max_steps=1"]
    assert main(["train", *words]) == 2
    assert "half_life=7 is for decay=exponential" in capsys.readouterr().err
    with stored_options():  # as a version before the refusal
        assert main(["train", *words]) == 0
    assert main(["train", f"resume={tmp_path / 'run'}", "trainer.max_steps=2"]) == 0
    assert load_model(tmp_path / "run" / "last.ckpt")[1]["step"] == 2


def test_a_cut_checkpoint_is_not_resumed(straight, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("last.ckpt", "best.ckpt"):
        (folder / name).write_bytes((straight[0] / name).read_bytes())
    whole = (folder / "last.ckpt").read_bytes()
    (folder / "last.ckpt").write_bytes(whole[: len(whole) // 2])
    assert main(["train", *SMALL, f"run_dir={folder}", "resume=last"]) == 1
    message = capsys.readouterr().err
    assert "best.ckpt" in message and message.count("\n") == 1, message


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["model.optimizer.lr=1e18", "model.optimizer.clip=0", "checkpoint.every_n_steps=1"]
    assert main(["train", *SMALL, f"run_dir={folder}", *words]) == 1
    message = capsys.readouterr().err
    assert re.search(r"step \d+: the (loss|gradient) is not finite", message) and message.count("\n") == 1, message
    assert re.search(r"for item \d+ of digits at t = .*log-SNR", message) or "in the gradient of" in message, message
    assert message.partition(": ")[2].strip() in (folder / "log.txt").read_text()
    kept = read_checkpoint(folder / "last.ckpt")
    assert all(torch.isfinite(v).all() for v in kept["state_dict"].values() if v.is_floating_point())
    json.dumps(kept["genmodels"])
