"""The cost of samples is that of the network that draws them."""

from __future__ import annotations

import pytest

from genmodels.core.data import DataSpec
from genmodels.evaluation.cost import measure
from genmodels.models.ddpm import DDPM


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_evaluations_are_counted_with_the_weights_that_draw(weights):
    """Guidance evaluates the network twice a step, which the sampler's own record leaves out."""
    model = DDPM(DataSpec("plane", (3,), num_classes=2), num_steps=10, net={"hidden": 4, "depth": 1},
                 class_conditional=True, ema_decay=0.9)

    def draw(n: int, start: int):
        return model.sample(n, start=start, weights=weights, sampler="ddim", steps=3, guidance=2.0)

    assert measure(model, draw, batch_size=4, budget=0.1, weights=weights)["evaluations"] == 6
