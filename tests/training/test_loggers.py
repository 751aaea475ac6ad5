"""The CSV table, row for row, also across a resume."""

from __future__ import annotations

import csv

import pytest

from genmodels.training.loggers import CSVLogger, LoggerOptions


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


def test_nothing_is_written_while_there_is_nothing(tmp_path):
    CSVLogger(tmp_path / "metrics.csv").finalize("success")
    assert not (tmp_path / "metrics.csv").exists()


def test_going_online_needs_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="wandb login"):
        LoggerOptions(wandb="online").check()


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
