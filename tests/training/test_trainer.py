"""Options of the Trainer: how many steps, and what is refused."""

from __future__ import annotations

import pytest

from genmodels.training.trainer import TrainerOptions


@pytest.mark.parametrize(
    "options, steps",
    [
        ({}, 10_000),
        ({"max_steps": 7}, 7),
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "max_steps": 20}, 20),
        ({"max_epochs": 3, "accumulate": 4}, 8),
    ],
)
def test_steps(options, steps):
    assert TrainerOptions(**options).steps(batches_per_epoch=10) == steps


@pytest.mark.parametrize(
    "options",
    [{"precision": "16-mixed"}, {"max_steps": 0}, {"accumulate": 0}, {"validate_every_n_steps": -1}, {"num_nodes": 0}],
)
def test_refused(options):
    (key,) = options
    with pytest.raises(ValueError, match=f"trainer.{key}"):
        TrainerOptions(**options)
