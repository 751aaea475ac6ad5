"""The CSV table, row for row, also across a resume."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning.loggers import WandbLogger
from scipy.io import wavfile

from genmodels.cli.main import main
from genmodels.core.errors import InputError, RunError
from genmodels.core.files import write_text
from genmodels.speech.audio import MelConfig
from genmodels.speech.vocoder import sounds_of
from genmodels.training import loggers
from genmodels.training.loggers import (
    _TIME,
    CSVLogger,
    LoggerOptions,
    identity_of,
    log_evaluation,
    play,
    rows_of,
    values_of,
)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_of_one_step_share_a_row_and_columns_may_come_late(tmp_path):
    logger = CSVLogger(tmp_path / "metrics.csv")
    logger.log_metrics({"loss": 1.0, "epoch": 0}, step=1)
    logger.log_metrics({"loss": 0.5}, step=2)
    logger.log_metrics({"val": 3.0}, step=2)
    logger.finalize("success")
    assert rows(tmp_path / "metrics.csv") == [
        {"step": "1", "loss": "1.0", "val": ""},
        {"step": "2", "loss": "0.5", "val": "3.0"},
    ]


def test_a_resumed_table_is_the_table_of_one_run(tmp_path):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    straight = CSVLogger(whole)
    for step in range(1, 8):
        straight.log_metrics({"loss": float(step)}, step)
    straight.save()
    killed = CSVLogger(parts)
    for step in range(1, 6):  # the checkpoint was at step 3
        killed.log_metrics({"loss": float(step)}, step)
    killed.save()
    resumed = CSVLogger(parts, resume_step=3)
    for step in range(4, 8):
        resumed.log_metrics({"loss": float(step)}, step)
    resumed.save()
    assert parts.read_text() == whole.read_text()


def test_a_long_table_is_appended_to(tmp_path, monkeypatch):
    """It is written whole only for a new column, a row that gains a value, and a file that others changed."""
    whole, path = [], tmp_path / "metrics.csv"
    monkeypatch.setattr("genmodels.training.loggers.write_text", lambda *given: (whole.append(1), write_text(*given)))
    logger = CSVLogger(path)

    def log(steps, **metrics):
        for step in steps:
            logger.log_metrics(metrics, step)
        logger.save()
        assert rows(path) == [{key: str(row.get(key, "")) for key in logger._columns} for row in logger._rows]
        return len(whole)

    assert log(range(500), loss=0.5) == log(range(500, 1000), loss=0.25) == 1
    assert log(range(1000, 1100), val=2.0) == 2
    assert log([1099], loss=0.1) == 3 == log(range(1100, 1200), loss=0.2)
    path.unlink()
    assert log([1200], loss=0.3) == 4


def test_a_row_that_was_cut_off_is_left_out_when_resuming(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\r\n10,0.5\r\n20,0.2\r\n3")
    logger = CSVLogger(path, resume_step=20)
    logger.log_metrics({"loss": 0.1}, 30)
    logger.save()
    assert [row["step"] for row in rows(path)] == ["10", "20", "30"]


@pytest.mark.parametrize("content", [b"loss\n0.5\n", b"step,loss\nx,0.5\n", b"step,loss\n10,1\n\0,2\n", b"step\n\xff"])
def test_a_file_of_something_else_is_named(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(RunError, match="metrics.csv is no table of a run"):
        CSVLogger(tmp_path / "metrics.csv", resume_step=20)
    assert (tmp_path / "metrics.csv").read_bytes() == content


def test_a_value_is_logged_in_the_unit_of_its_error():
    """Of mels that is nats/dim, not the nats of one mel, of texts bits per character."""
    common = {"label": None, "se_data": 0.1, "se_mc": None, "n": 4, "made": {}}
    report = {"likelihood": [
        {"kind": "exact", "unit": "nats_per_dim", "nll": 9000.0, "nll_per_dim": 1.5, **common},
        {"kind": "lower_bound", "unit": "bits_per_character", "bits_per_dim": 2.5, **common},
    ]}
    assert values_of(report) == {"nll_per_dim/exact": 1.5, "bits_per_character/lower_bound": 2.5}
    assert [row[2:5] for row in rows_of(report)] == [[1.5, "nats_per_dim", 0.1], [2.5, "bits_per_character", 0.1]]


def test_nothing_is_written_while_there_is_nothing(tmp_path):
    CSVLogger(tmp_path / "metrics.csv").finalize("success")
    assert not (tmp_path / "metrics.csv").exists()


def test_going_online_needs_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="wandb login"):
        LoggerOptions(wandb="online").check()
    for wrong, said in (({"tags": ["x" * 65]}, "1 to 64 characters"), ({"project": "a/b"}, "none of / "),
                        ({"project": ""}, "1 to 128 characters")):
        with pytest.raises(ValueError, match=said):
            LoggerOptions(**wrong).check()


@pytest.mark.parametrize("words, said", [
    (["logger=tensorboard"], "pip install tensorboard"), (["logger=wandb"], "wandb login"),
])  # fmt: skip
def test_what_a_logger_lacks_is_found_before_there_is_a_run_folder(tmp_path, monkeypatch, capsys, words, said):
    from genmodels.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    if "tensorboard" in said:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", "model=nsf", "data=toy", *words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_setting_of_wandb_that_it_does_not_know_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "off-line")
    with pytest.raises(InputError, match=r"W&B cannot start \(1 validation error for Settings mode .*\): see its env"):
        loggers.LoggerOptions().wandb_run(tmp_path, "nsf", "toy")


# ---- samples of mels are heard: in the run folder, in W&B's offline run, and in TensorBoard ----


TINY = ["model.encoder={channels: 8, depth: 1, hidden: 8}", "model.steps=1", "model.hidden=8", "model.depth=1",
        "model.duration_channels=8"]  # fmt: skip
STEPS = ["trainer=smoke", "trainer.max_steps=2", "trainer.validate_every_n_steps=2", "trainer.sample_every_n_steps=2",
         "trainer.limit_validation=1", "trainer.progress=false", "logger=tensorboard", "data.batch_size=2", "~preset"]


@pytest.mark.slow
def test_a_run_is_heard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)  # an extra that nobody has to install
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tests.test_run import offline_records

    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(["train", "model=glow_tts", "data=speech", *TINY, *STEPS, "run_dir=run"])
    finally:
        os.chdir(before)
    assert code == 0, errors.getvalue()
    folder = tmp_path / "run"
    kept = sorted((folder / "samples").glob("*.wav"))
    assert [path.name for path in kept] == ["step_000002_0.wav", "step_000002_1.wav"]
    history = {item.key or ".".join(item.nested_key): json.loads(item.value_json)
               for record in offline_records(folder) for item in record.history.item}
    media = next((folder / "wandb").glob("offline-run-*")) / "files"
    sent = [(media / history[f"sounds/samples/{k}.path"]).read_bytes() for k in range(2)]
    assert sorted(sent) == sorted(path.read_bytes() for path in kept)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"audio": 0})
    events.Reload()
    assert events.Tags()["audio"] == ["sounds/samples/0", "sounds/samples/1"]
    for k, path in enumerate(kept):
        (event,) = events.Audio(f"sounds/samples/{k}")
        rate, samples = wavfile.read(path)
        again = wavfile.read(io.BytesIO(event.encoded_audio_string))[1]
        assert event.step == 2 and event.sample_rate == rate == 22050 and len(samples) <= 5 * 22050
        assert np.abs(again.reshape(-1).astype(int) - samples.astype(int)).max() <= 2
    assert "pictures/samples" in events.Tags()["images"]


def test_loggers_that_play_sound_are_given_it(tmp_path, monkeypatch):
    sent = []
    wandb = object.__new__(WandbLogger)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda self, metrics, step: sent.append((metrics, step)))
    waves = [torch.sin(torch.arange(600) / 5), 3 * torch.sin(torch.arange(400) / 9)]
    play(tmp_path, [wandb, CSVLogger(tmp_path / "metrics.csv")], "samples", waves, 8000, 7)
    paths = [str(tmp_path / "samples" / f"step_000007_{k}.wav") for k in range(2)]
    (metrics, step), = sent
    assert step == 7 and list(metrics) == ["sounds/samples/0", "sounds/samples/1"]
    assert all(audio._path == path for audio, path in zip(metrics.values(), paths, strict=True))
    for path, wave in zip(paths, waves, strict=True):
        rate, samples = wavfile.read(path)
        expected = (wave / wave.abs().max().clamp(min=1)).numpy()
        assert rate == 8000 and np.abs(samples / 32767 - expected).max() < 1e-4
    play(tmp_path, [wandb], "samples", [], 8000, 8)
    assert len(sent) == 1


def test_what_is_not_finite_is_not_heard_and_lengths_are_kept():
    x = torch.full((3, 80, 20), -5.0)
    x[0, 0, 0] = torch.nan
    mask = torch.arange(20) < torch.tensor([20, 7, 20])[:, None, None]
    assert [len(wave) for wave in sounds_of(x, mask, MelConfig(), count=3, seconds=0.2)] == [7 * 256, 17 * 256]
    assert sounds_of(x, None, MelConfig(), count=1, seconds=0.2) == []
    assert sounds_of(x + 1000, None, MelConfig(), count=3, seconds=0.2) == []


def test_the_name_of_a_run_does_not_depend_on_when_wandb_starts(tmp_path):
    first, begun = identity_of(tmp_path)
    assert first.startswith(f"{begun}-") and datetime.now() - datetime.strptime(begun, _TIME) < timedelta(minutes=1)
    for late in ("20301231_235959", "20310101_000007"):  # W&B's own times of the start and of a resume
        (tmp_path / "wandb" / f"offline-run-{late}-{first}").mkdir(parents=True)
        assert identity_of(tmp_path) == (first, begun)
    (tmp_path / "earlier" / "wandb" / "offline-run-20260102_030405-ab12cd34").mkdir(parents=True)
    assert identity_of(tmp_path / "earlier") == ("ab12cd34", "2026-01-02_03-04-05")


@pytest.mark.parametrize(("checkpoint", "facts", "of", "key"), [
    ("best", {}, {}, "evaluation/test"),
    ("last", {}, {}, "evaluation/test_last"),
    ("best", {"weights": "raw"}, {"items": 20, "limited": True}, "evaluation/test_raw_first20"),
    ("best", {}, {"name": "other", "split": "val"}, "evaluation/val_other"),
])  # fmt: skip
def test_an_evaluation_joins_the_run_of_its_checkpoint(checkpoint, facts, of, key, tmp_path, monkeypatch):
    logged = {}

    class Run:
        @staticmethod
        def log(values):
            logged.update(values)

        @staticmethod
        def finish():
            logged["finished"] = True

    names = []
    monkeypatch.setattr(LoggerOptions, "wandb_run", lambda self, folder, *words: names.append(words) or Run())
    (tmp_path / "wandb").mkdir()
    report = {"name": "nsf (best.ckpt)", "likelihood": [], "fidelity": {"recall": 0.5},
              "checkpoint": {"family": "nsf", "step": 3, "weights": "ema"} | facts,
              "data": {"name": "toy", "split": "test", "items": 99, "limited": False} | of}  # fmt: skip
    assert log_evaluation(tmp_path / f"{checkpoint}.ckpt", LoggerOptions(wandb="offline"), report, "toy")
    assert names == [("nsf", "toy")] and logged.pop("finished")
    assert set(logged) == {"trainer/global_step", key, f"{key}/recall"}
    assert logged[f"{key}/recall"] == 0.5 and logged["trainer/global_step"] == 3


@pytest.mark.parametrize(("resumed", "purged"), [(0, None), (150, 151)])
def test_tensorboard_drops_what_came_after_the_checkpoint(resumed, purged, tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(loggers, "TensorBoardLogger", lambda *_, **options: given.update(options))
    LoggerOptions(wandb="off", csv=False, tensorboard=True).build(tmp_path, "nsf", "toy", resumed)
    assert given["purge_step"] == purged


def test_a_run_of_the_callers_own_goes_on(tmp_path):
    wandb = loggers.quiet_wandb()
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    try:
        (tmp_path / "run").mkdir()
        built = LoggerOptions(wandb="offline", csv=False).build(tmp_path / "run", "nsf", "toy")
        (ours,) = [logger for logger in built if isinstance(logger, WandbLogger)]
        ours.log_metrics({"a": 1.0}, 0)
        loggers.close(ours)
        own.log({"b": 2.0})
        assert wandb.run is own and ours.experiment.id != own.id
    finally:
        own.finish()
        wandb.teardown()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 0
