"""Checkpoints of models that were not trained."""

from __future__ import annotations

from pathlib import Path

import torch

from genmodels.data.vision import Digits
from genmodels.models.base import GenerativeModel
from genmodels.models.checkpoint import write_checkpoint, write_exported
from genmodels.models.ddpm import DDPM
from tests.parameters import scattered


def write(model: GenerativeModel, path: str | Path) -> str:
    """Write a model as it stands, exported if the file ends in .safetensors; gives the path."""
    state = {"state_dict": model.state_dict()}
    model.on_save_checkpoint(state)
    (write_exported if Path(path).suffix == ".safetensors" else write_checkpoint)(path, state)
    return str(path)


def digits_ddpm(num_steps: int = 20) -> DDPM:
    """A small DDPM of digits with random weights."""
    torch.manual_seed(0)
    net = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
    model = DDPM(Digits().prepare().spec, net=net, num_steps=num_steps, ema_decay=0.0)
    scattered(model.core, 0.1)
    model.run_config = {"data": {"_target_": "genmodels.data.vision.Digits"}}
    return model
