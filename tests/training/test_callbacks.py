"""What happens between the steps of a training."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn

from genmodels.core.data import DataSpec
from genmodels.models.ddpm import DDPM
from genmodels.training.callbacks import Checkpointing, SampleGrid, StepBar, Steps, StopWithoutImprovement

SPECS = {"images": DataSpec("digits", (1, 8, 8), levels=17), "points": DataSpec("plane", (2,))}


def test_early_stopping_of_a_resumed_run_knows_its_best_metric():
    kept, stop = Checkpointing.__new__(Checkpointing), StopWithoutImprovement(1)
    kept.best = 2.0
    trainer = SimpleNamespace(callbacks=[stop, kept], should_stop=False)
    stop.on_train_start(trainer, None)
    assert float(stop.best_score) == 2.0 and not trainer.should_stop
    kept.best = 1.0
    stop.on_train_start(trainer, None)
    assert float(stop.best_score) == 2.0  # its own state wins


@pytest.mark.parametrize("name", SPECS)
def test_samples_that_are_not_finite_are_reported_instead_of_shown(name, tmp_path, capsys):
    options = {"images": {"channels": 8, "multipliers": [1], "blocks": 1}, "points": {"hidden": 8, "depth": 1}}[name]
    model = DDPM(SPECS[name], net=options, num_steps=20, ema_decay=0.0)
    trainer = model._trainer = SimpleNamespace(is_global_zero=True, loggers=[], progress_bar_callback=None)
    grid = SampleGrid(tmp_path, 1, n=4)
    grid.draw(trainer, model, 1)
    assert len(list(tmp_path.rglob("*.png"))) == 1
    with torch.no_grad():
        next(model.core.parameters()).fill_(math.nan)
    grid.draw(trainer, model, 2)
    assert "step 2: sample 0 is not finite, no samples are shown" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("*.png"))) == 1 and model.training


def test_samples_are_drawn_without_dropout(tmp_path):
    model = DDPM(SPECS["points"], net={"hidden": 8, "depth": 1, "dropout": 0.5}, num_steps=20, ema_decay=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    model._trainer = trainer = SimpleNamespace(is_global_zero=True, loggers=[], progress_bar_callback=None)
    for step in (1, 2):
        SampleGrid(tmp_path, 1, n=4).draw(trainer, model.train(), step)
    first, second = sorted(tmp_path.rglob("*.png"))
    assert first.read_bytes() == second.read_bytes() and model.training


def test_what_a_model_prints_is_seen_above_the_bar(capsys):
    model = LightningModule()
    model.trainer = Trainer(accelerator="cpu", callbacks=[StepBar()], logger=False, enable_checkpointing=False,
                            enable_model_summary=False)
    model.print("step 8: layer 3", "does not invert")
    assert capsys.readouterr().out == "step 8: layer 3 does not invert\n"


def stopped_after(metrics: list[float], validations: int, resumed_at: int | None = None) -> int | None:
    """The number of validations after which early stopping ends a training, None if it does not."""
    callback = StopWithoutImprovement(validations)
    trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING), sanity_checking=False, fast_dev_run=False,
                              strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
                              should_stop=False, current_epoch=0)
    for number, value in enumerate(metrics):
        if number == resumed_at:
            state, callback = callback.state_dict(), StopWithoutImprovement(validations)
            callback.load_state_dict(state)
        trainer.callback_metrics = {"val/nll": torch.tensor(value), "val/other": torch.tensor(-float(number))}
        callback.on_validation_end(trainer, SimpleNamespace(figures={"val/nll": value, "val/other": -number}))
        if trainer.should_stop:
            return number + 1
    return None


def test_training_stops_when_the_metric_no_longer_improves():
    metrics = [3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 2.1, 1.0]
    assert stopped_after(metrics, 2) == 6 and stopped_after(metrics, 1) == 3 and stopped_after(metrics, 4) is None
    assert stopped_after(metrics, 2, resumed_at=5) == 6 == stopped_after(metrics, 3) - 1  # its count is resumed too


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_bar_shows_the_loss_of_an_item(monkeypatch, accumulate):
    shown, bar = [], StepBar()
    trainer = SimpleNamespace(max_steps=3, global_step=0, accumulate_grad_batches=accumulate)
    bar.on_train_start(trainer, None)
    monkeypatch.setattr(bar._bar, "set_postfix", lambda **values: shown.append(values))
    trainer.global_step = 1
    bar.on_train_batch_end(trainer, SimpleNamespace(figures={}), {"loss": torch.tensor(2.0) / accumulate}, None, 0)
    assert [float(values["loss"]) for values in shown] == [2.0]


def test_on_a_terminal_validations_are_lines_above_a_bar_with_the_time_that_is_left(capfd):
    bar = Steps(100, 10)
    bar.update(15)
    bar.set_postfix(loss="0.1")
    bar.line("step     25  val/nll 1.5")
    assert bar.n == 25
    bar.close()
    error = capfd.readouterr().err
    assert "step     25  val/nll 1.5" in error and "25/100" in error and "left" in error
