"""The cost of samples is that of the network that draws them."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.evaluation.cost import measure
from genmodels.models.ddpm import DDPM
from genmodels.models.normalizing_flows import MAF, RealNVP, TarFlow


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_evaluations_are_counted_with_the_weights_that_draw(weights):
    """Guidance evaluates the network twice a step, which the sampler's own record leaves out."""
    model = DDPM(DataSpec("plane", (3,), num_classes=2), num_steps=10, net={"hidden": 4, "depth": 1},
                 class_conditional=True, ema_decay=0.9)

    def draw(n: int, start: int):
        return model.sample(n, start=start, weights=weights, sampler="ddim", steps=3, guidance=2.0)

    assert measure(model, draw, batch_size=4, budget=0.1, weights=weights)["evaluations"] == 6


@pytest.mark.parametrize("kind, options, evaluations", [
    (RealNVP, {"couplings": 2, "hidden": 4, "depth": 1}, 1),
    (MAF, {"layers": 2, "hidden": 4, "depth": 1}, 5),
    (TarFlow, {"patch": 4, "blocks": 2, "width": 8, "depth": 1, "heads": 2}, 3),
])  # fmt: skip
def test_evaluations_of_a_flow_are_those_of_each_of_its_layers(kind, options, evaluations):
    """One for couplings, D for autoregressive layers, one less than its tokens for a meta-block."""
    spec = DataSpec("digits", (1, 8, 8), levels=17) if kind is TarFlow else DataSpec("vectors", (5,))
    model = kind(spec, **options, ema_decay=0.0)
    x = torch.randn(16, *spec.event_shape)
    model.initialize(Batch(x if spec.levels is None else x.clamp(0, 16).to(torch.uint8)))

    def draw(n: int, start: int):
        return model.sample(n, start=start, weights="raw")

    assert measure(model, draw, batch_size=4, budget=0.1, weights="raw")["evaluations"] == evaluations
