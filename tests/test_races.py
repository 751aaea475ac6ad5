"""The races of `benchmarks/race.py`: what they give to the contestants."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator

SIZE = 4


@pytest.fixture
def race(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    threads = torch.get_num_threads()
    yield __import__("race")
    torch.set_num_threads(threads)  # of which a turn takes one
    for name in ("race", "contestants", "uci_energy"):
        sys.modules.pop(name, None)


def noise_of_a_turn(race, monkeypatch, tmp_path):
    """For every step of a turn what its rows share, and what is their own."""
    seen, items = [], Batch(torch.zeros(9, 1), None, index=torch.arange(9))

    def contestant(spec):
        model = nn.Linear(1, 1)

        def loss(batch, key):
            seen.append((float(key.shared_uniform()), *key.uniform((SIZE,)).tolist()))
            return model(batch.x).square().mean()

        return race.Contestant(model, torch.optim.SGD(model.parameters(), 0.1), loss, bits=None)

    monkeypatch.setitem(race.RACES, "race", (SIZE, {"ours": contestant}))
    monkeypatch.setattr(race, "prepared", lambda *_: (DataSpec("table", (1,)), items, items))
    monkeypatch.setattr(race, "evaluated", lambda *_: {})
    (tmp_path / "race-steps.json").write_text('{"ours": 2.0}')  # seconds of a step
    given = argparse.Namespace(seconds=72.0, data="x", items=2, terms=1, samples=2, seed=0, out=tmp_path)
    race.turn(given, "race", "ours", tmp_path / "ours.json")
    return seen


def test_every_step_has_noise_of_its_own(race, monkeypatch, tmp_path):
    drawn = [value for step in noise_of_a_turn(race, monkeypatch, tmp_path) for value in step]
    assert len(drawn) == 9 * (SIZE + 1) and len(set(drawn)) == len(drawn)


def test_noise_without_a_step_is_found(race, monkeypatch, tmp_path):
    monkeypatch.setattr(race, "KeyedGenerator", lambda seed, index, stream, step=0: KeyedGenerator(seed, index, stream))
    shared = [step[0] for step in noise_of_a_turn(race, monkeypatch, tmp_path)]
    assert len(shared) == 9 and len(set(shared)) == 1


def test_a_budget_is_steps_of_the_median_time_of_each(race, monkeypatch, tmp_path):
    items, clock = Batch(torch.zeros(9, 1), None, index=torch.arange(9)), [0.0]

    def contestant(cost):
        model = nn.Linear(1, 1)

        def loss(batch, key):
            clock[0] += cost * (50 if key.step == 3 else 1)  # something else kept the machine busy
            return model(batch.x).square().mean()

        return race.Contestant(model, torch.optim.SGD(model.parameters(), 0.1), loss, bits=None)

    absent = lambda spec: __import__("a_package_that_is_not_there")  # noqa: E731
    both = {"slow": lambda spec: contestant(4.0), "fast": lambda spec: contestant(1.0), "absent": absent}
    monkeypatch.setitem(race.RACES, "race", (SIZE, both))
    monkeypatch.setattr(race, "prepared", lambda *_: (DataSpec("table", (1,)), items, items))
    monkeypatch.setattr(race, "evaluated", lambda *_: {})
    monkeypatch.setattr(race.time, "process_time", lambda: clock[0])
    given = argparse.Namespace(seconds=80.0, data="x", items=2, terms=1, samples=2, seed=0, out=tmp_path)
    assert race.step_seconds(given, "race") == {"slow": 4.0, "fast": 1.0}
    for name, steps in (("slow", [5, 10, 20]), ("fast", [20, 40, 80])):
        file = tmp_path / f"{name}.json"
        for _ in steps:
            race.turn(given, "race", name, file)
        marks = race.json.loads(file.read_text())["marks"]
        assert [mark["steps"] for mark in marks] == steps and [mark["seconds"] for mark in marks] == [20, 40, 80]
