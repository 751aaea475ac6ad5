"""Sweeps: nothing starts before all is checked, every point runs alone, a failing one does not stop the others."""

from __future__ import annotations

import logging
import os
import sys
import types

import pytest

from genmodels.cli import main as cli
from genmodels.core.errors import RunError


@pytest.fixture
def points(monkeypatch, tmp_path):
    """Runs `genmodels train` sweeps with a run that notes what it sees; seed 1 fails, seed 2 is a bug."""
    seen = []
    module = types.ModuleType("genmodels.cli.train")

    def run(**config):
        from hydra.core.hydra_config import HydraConfig

        seen.append((config, list(sys.argv), HydraConfig.initialized(), os.environ.get("LOCAL_RANK"), os.getcwd()))
        os.environ["LOCAL_RANK"] = "0"
        if config["seed"] == 1:
            raise RunError("the loss is not finite")
        if config["seed"] == 2:
            raise ZeroDivisionError("a bug")
        return {"val/nll": f"= {config['seed']}.25(3)", "run": f"runs/{config['seed']}"}

    module.run = run
    monkeypatch.setitem(sys.modules, "genmodels.cli.train", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=0,1"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return seen


def test_every_point_runs_and_the_exit_code_tells(points, capsys):
    assert cli.main(["train", "-m", "seed=0,1,2,3", "model.net.channels=8", "trainer.max_steps=1e2"]) == 1
    assert [config["seed"] for config, *_ in points] == [0, 1, 2, 3]
    assert {config["trainer"]["max_steps"] for config, *_ in points} == {100}
    printed = capsys.readouterr()
    assert "failed: seed=1 (the loss is not finite)" in printed.err and "ZeroDivisionError: a bug" in printed.err
    assert "2 of 4 points done" in printed.out
    table = [line.split() for line in printed.out.splitlines()[-8:-2]]
    assert table[0] == ["point", "val/nll", "run"] and table[2] == ["seed=0", "=", "0.25(3)", "runs/0"]
    assert table[3:] == [["seed=1", "failed"], ["seed=2", "failed"], ["seed=3", "=", "3.25(3)", "runs/3"]]


def test_combinations_of_choices_and_keys(points):
    assert cli.main(["train", "-m", "seed=0,3", "data=digits,toy"]) == 0
    assert [(c["seed"], c["data"]["_target_"].rpartition(".")[2]) for c, *_ in points] == [
        (0, "Digits"), (0, "Toy"), (3, "Digits"), (3, "Toy")]  # fmt: skip
    assert "channels" in points[0][0]["model"]["net"] and "hidden" in points[1][0]["model"]["net"]


def test_a_point_is_as_if_it_were_started_by_itself(points, tmp_path):
    assert cli.main(["train", "-m", "seed=0,3"]) == 0
    for (_, argv, in_hydra, rank, folder), seed in zip(points, (0, 3), strict=True):
        assert argv == ["train.py", f"++seed={seed}"]
        assert not in_hydra and rank is None and folder == str(tmp_path)
    assert sys.argv == ["train.py", "-m", "seed=0,1"] and "LOCAL_RANK" not in os.environ


def test_a_point_leaves_no_process_group_behind(points, monkeypatch, tmp_path):
    from torch import distributed

    def joins(*, seed, **_):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/{seed}", rank=0, world_size=1)

    monkeypatch.setattr(sys.modules["genmodels.cli.train"], "run", joins)
    assert cli.main(["train", "-m", "seed=0,3"]) == 0
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    "wrong", ["seed=0,1,x", "model=ddpm,dppm", "model.net.chanels=8,16", "seed=0 trainer.max_steps=abc"]
)
def test_nothing_starts_when_a_point_is_wrong(points, capsys, wrong):
    assert cli.main(["train", "-m", *wrong.split()]) == 2
    assert points == [] and capsys.readouterr().err.count("\n") == 1


def test_the_log_of_a_point_is_kept(points):
    """Hydra's own `disabled` logging would silence every logger that exists, and log.txt with it."""
    logger = logging.getLogger("genmodels")
    assert cli.main(["train", "-m", "seed=0,3"]) == 0
    assert not logger.disabled


def test_interruption_ends_the_sweep(points, monkeypatch, capsys):
    def interrupted(**config):
        points.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["genmodels.cli.train"], "run", interrupted)
    assert cli.main(["train", "-m", "seed=0,1,2"]) == 130
    assert len(points) == 1
