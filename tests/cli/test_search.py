"""Sweeps by Optuna: they minimise the metric, within the intervals, and go on where they stopped."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from genmodels.cli import main as cli
from genmodels.cli.search import _distribution
from genmodels.core.errors import RunError
from genmodels.training.run import Outcome

optuna = pytest.importorskip("optuna", reason="needs the extra scale")
SEARCH = ["train", "-m", "hydra/sweeper=optuna", "model.optimizer.lr=tag(log,interval(1e-5,1e-1))"]


@pytest.fixture
def rates(monkeypatch, tmp_path):
    """Learning rates that were tried; the metric is least at 1e-3."""
    seen = []
    module = types.ModuleType("genmodels.cli.train")

    def run(**config):
        rate = config["model"]["optimizer"]["lr"]
        seen.append(rate)
        metric = (math.log10(rate) + 3) ** 2
        return Outcome({"val/nll": f"= {metric:.4f}"}, metric, 100, config["run_dir"])

    module.run = run
    monkeypatch.setitem(sys.modules, "genmodels.cli.train", module)
    monkeypatch.chdir(tmp_path)
    return seen


def study(folder: Path | None = None):
    folder = folder or next(Path("runs/sweeps").iterdir())
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "optuna.journal")))
    return optuna.load_study(study_name="sweep", storage=storage)


def test_the_metric_is_minimised(rates, capsys):
    assert cli.main([*SEARCH, "hydra.sweeper.n_trials=5"]) == 0
    assert len(rates) == 5 and all(1e-5 <= rate <= 1e-1 for rate in rates)
    errors = [(math.log10(rate) + 3) ** 2 for rate in rates]
    assert [trial.value for trial in study().trials] == errors and study().best_value == min(errors)
    printed = capsys.readouterr().out
    best = rates[errors.index(min(errors))]
    assert "5 of 5 points done" in printed and f"best:     model.optimizer.lr={best}\n" in printed


def test_an_interrupted_search_goes_on(rates, monkeypatch, capsys):
    """The point that was interrupted and the one that failed come again, then the missing ones; none twice."""
    run = sys.modules["genmodels.cli.train"].run

    def fails(**config):
        if len(rates) in (1, 3):
            rates.append(config["model"]["optimizer"]["lr"])
            raise RunError("the loss is not finite") if len(rates) == 2 else KeyboardInterrupt
        return run(**config)

    monkeypatch.setattr(sys.modules["genmodels.cli.train"], "run", fails)
    assert cli.main([*SEARCH, "hydra.sweeper.n_trials=6"]) == 130
    assert len(rates) == 4
    monkeypatch.setattr(sys.modules["genmodels.cli.train"], "run", run)
    first = list(rates)
    rates.clear()
    assert cli.main([*SEARCH, "hydra.sweeper.n_trials=6", "resume=last"]) == 0
    assert rates[:2] == [first[1], first[3]] and len(rates) == 4 and len({*first, *rates}) == 6
    assert "6 of 6 points done (2 of them before)" in capsys.readouterr().out
    assert cli.main([*SEARCH, "hydra.sweeper.n_trials=8", "resume=last"]) == 0
    assert len(rates) == 6 and len({*first, *rates}) == 8


@pytest.mark.parametrize("values", ["1e-5,1e-1", "interval(1e-5,1e-1)", "tag(log,interval(1e-4,1e-1))"])
def test_a_search_goes_on_with_its_own_values(values, rates, capsys):
    """Of a resumed search, Optuna can change the ends of an interval, but neither its scale nor choices."""
    assert cli.main([*SEARCH, "hydra.sweeper.n_trials=1"]) == 0
    words = [*SEARCH[:-1], f"model.optimizer.lr={values}", "hydra.sweeper.n_trials=2", "resume=last"]
    if values.startswith("tag"):
        assert cli.main(words) == 0 and len(rates) == 2
    else:
        assert cli.main(words) == 2 and len(rates) == 1 and len(study().trials) == 1
        assert "model.optimizer.lr: the search in runs/sweeps/" in capsys.readouterr().err


def test_points_at_a_time_and_equal_points(rates):
    """Two choices allow two points; further trials take their figures."""
    words = ["train", "-m", "hydra/sweeper=optuna", "model.optimizer.lr=1e-4,1e-3", "hydra.sweeper.n_jobs=4",
             "hydra.sweeper.n_trials=8"]
    assert cli.main(words) == 0
    assert sorted(rates) == [1e-4, 1e-3] and len(study().trials) == 8
    assert study().best_value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("wrong, message", [
    ("model.net.chanels=interval(8,16)", "did you mean"),
    ("model.net.channels=interval(8,16)", "channels must be an integer"),
    ("seed=0", "nothing to search"),
    ("seed=0,1 hydra.sweeper.n_trials=0", "n_trials must be a positive integer"),
])
def test_nothing_starts_when_a_setting_is_wrong(rates, capsys, wrong, message):
    assert cli.main(["train", "-m", "hydra/sweeper=optuna", *wrong.split()]) == 2
    printed = capsys.readouterr().err
    assert rates == [] and message in printed and printed.count("\n") == 1
    assert not list(Path("runs").glob("sweeps/*"))


@pytest.mark.parametrize("word, expected", [
    ("a=tag(log,interval(1e-4,1e-2))", optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True)),
    ("a=interval(0,1.5)", optuna.distributions.FloatDistribution(0, 1.5)),
    ("a=int(interval(1,4))", optuna.distributions.IntDistribution(1, 4)),
    ("a=tag(log,int(interval(1,64)))", optuna.distributions.IntDistribution(1, 64, log=True)),
    ("a=range(8,33,8)", optuna.distributions.IntDistribution(8, 32, step=8)),
    ("a=range(0,1,0.3)", optuna.distributions.FloatDistribution(0, 0.9, step=0.3)),
    ("a=range(1,0,-0.3)", optuna.distributions.FloatDistribution(0.1, 1, step=0.3)),
    ("a=x,y", optuna.distributions.CategoricalDistribution(("x", "y"))),
    ("a=[1,2],[3]", optuna.distributions.CategoricalDistribution(("[1,2]", "[3]"))),
])
def test_values_of_a_setting(word, expected):
    assert _distribution(OverridesParser.create().parse_override(word)) == expected


@pytest.mark.parametrize("interval", ["tag(log,interval(0,1e-2))", "interval(1e-2,1e-4)"])
def test_an_impossible_interval_is_one_line(interval, rates, capsys):
    assert cli.main([*SEARCH[:-1], f"model.optimizer.lr={interval}"]) == 2
    assert capsys.readouterr().err.startswith(f"genmodels train: model.optimizer.lr={interval}: ") and not rates


def test_a_search_over_nothing_is_one_line(rates, capsys):
    assert cli.main([*SEARCH[:-1], "model.optimizer.lr=range(3,1)"]) == 2
    assert "model.optimizer.lr=range(3,1) has no values" in capsys.readouterr().err and not rates


def test_without_optuna_it_is_said(rates, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(SEARCH) == 2
    assert "needs Optuna: pip install 'genmodels[scale]'" in capsys.readouterr().err
