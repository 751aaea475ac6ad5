"""What happens between the steps of a training."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

from genmodels.core.data import DataSpec
from genmodels.models.ddpm import DDPM
from genmodels.training.callbacks import SampleGrid, StepBar

SPECS = {"images": DataSpec("digits", (1, 8, 8), levels=17), "points": DataSpec("plane", (2,))}


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


def test_what_a_model_prints_is_seen_above_the_bar(capsys):
    model = LightningModule()
    model.trainer = Trainer(accelerator="cpu", callbacks=[StepBar()], logger=False, enable_checkpointing=False,
                            enable_model_summary=False)
    model.print("step 8: layer 3", "does not invert")
    assert capsys.readouterr().out == "step 8: layer 3 does not invert\n"
