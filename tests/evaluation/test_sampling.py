"""Samples of every family: temperatures that make no sense, and values that are not finite, are refused in one line."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.data.spec import Batch, DataSpec
from genmodels.errors import InputError, NotFinite, RunError
from genmodels.evaluation.sampling import draw
from genmodels.models.ddpm import DDPM
from genmodels.models.energy import EnergyModel
from genmodels.models.glow import Glow
from genmodels.models.realnvp import RealNVP
from genmodels.models.score import ScoreModel

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
COUNTS = DataSpec("counts", (3,), levels=300)
PLANE = DataSpec("plane", (2,))
SMALL = {"channels": 8, "multipliers": [1], "blocks": 1}
MODELS = {
    "ddpm": (lambda: DDPM(DIGITS, net=SMALL, num_steps=10), {"steps": 3, "path": 2}),
    "ddpm of points": (lambda: DDPM(PLANE, net={"hidden": 8, "depth": 1}, num_steps=10), {"steps": 3}),
    "glow": (lambda: Glow(DIGITS, steps=1, hidden=8), {}),
    "realnvp of counts": (lambda: RealNVP(COUNTS, hidden=8), {}),
    "realnvp of points": (lambda: RealNVP(PLANE, hidden=8), {}),
    "energy of counts": (lambda: EnergyModel(COUNTS, net={"hidden": [8]}), {"sampler": "ula", "steps": 4}),
    "score": (lambda: ScoreModel(DIGITS, net=SMALL), {"steps": 3, "path": 2}),
}


def made(name):
    model, options = MODELS[name]
    model, generator = model(), torch.Generator().manual_seed(0)
    shape = (32, *model.spec.event_shape)
    levels = model.spec.levels
    x = torch.randn(shape, generator=generator) if levels is None else torch.randint(levels, shape, generator=generator)
    model.initialize(Batch(x, torch.arange(32) % 10, index=torch.arange(32)))
    return model.eval(), options


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 1e30, -1.0, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_temperature_is_a_finite_number(name, temperature):
    model, options = made(name)
    with pytest.raises(InputError, match="temperature must be a finite number"):
        draw(model, 2, progress=False, temperature=temperature, **options)


@pytest.mark.parametrize("name", MODELS)
def test_samples_that_are_not_finite_are_never_cast_to_integers(name):
    model, options = made(name)
    draw(made(name)[0], 5, batch_size=2, progress=False, weights="raw", **options)
    weight = max(model.core.parameters(), key=torch.Tensor.numel)
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(RunError, match="^sample 3 is not finite|^chain 0 left all bounds"):
        draw(model, 5, start=3, batch_size=2, progress=False, weights="raw", **options)


def test_the_sample_that_is_not_finite_is_named():
    """Of several batches it is the number within all of them, not the row of its own."""
    model, _ = made("ddpm")
    decode = model.decode

    def spoilt(x):
        x = x.clone()
        x[spoilt.row, 0, 1, 1] = math.inf
        spoilt.row = 1
        return decode(x)

    spoilt.row = slice(0, 0)
    model.decode = spoilt
    with pytest.raises(NotFinite, match="^sample 14 is not finite") as caught:
        draw(model, 6, start=10, batch_size=3, progress=False, steps=2)
    assert caught.value.row == 1
