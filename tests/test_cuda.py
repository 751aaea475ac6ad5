"""What is computed on a GPU is what is computed on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import Batch
from genmodels.models.base import GenerativeModel
from genmodels.models.energy import EnergyModel
from genmodels.models.text_to_mel import Tacotron
from tests.parameters import scattered
from tests.test_scale import MODELS, items

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FEW = {"steps": 10, "text": "a cab", "durations": [[2] * 5]}


def model_of(name: str, device: str) -> tuple[GenerativeModel, Batch]:
    """A small model in float64 without dropout, whose weights have moved, and eight items."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    model.seed, batch = 5, items(model.spec, torch.float64)
    model.initialize(batch)
    scattered(model.core, 0.05, seed=1)
    for average in () if model.ema is None else model.ema.averages:
        average.load_state_dict(model.core.state_dict())
    return model.eval().to(device), batch.to(device)


def answers(name: str, device: str) -> dict[str, torch.Tensor]:
    """Loss, gradients, log-likelihood and samples, on the CPU."""
    model, batch = model_of(name, device)
    loss = model.loss(batch, model.training_generator(len(batch)))
    loss.value.backward()
    found = {"loss": loss.per_example.detach()}
    found |= {f"gradient of {key}": p.grad for key, p in model.core.named_parameters() if p.grad is not None}
    chains = {"chains": 4, "densities": 3} if isinstance(model, EnergyModel) else {}
    likelihood = model.log_likelihood(batch, **chains)
    if likelihood.nats is not None and likelihood.nats.isfinite().all():  # some families have none
        found["log-likelihood"] = likelihood.nats
    if model.generates:
        taken = {key for key in FEW if model.takes(key)} - ({"durations"} if isinstance(model, Tacotron) else set())
        found["samples"] = model.sample(3, **{key: FEW[key] for key in taken}).x
    assert {value.device.type for value in found.values()} == {device}
    return {key: value.cpu().double() for key, value in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_gives_the_numbers_of_the_cpu(name):
    found, expected = answers(name, "cuda"), answers(name, "cpu")
    assert found.keys() == expected.keys() and len(found) > 2
    scale = max(float(value.abs().max()) for key, value in expected.items() if key.startswith("gradient"))
    for key, value in expected.items():
        unit = scale if key.startswith("gradient") else float(value.abs().max())
        apart = (found[key] - value).abs()
        if key == "samples" and MODELS[name]().spec.levels is not None:
            # Rounding to a level turns a last bit into a whole level, here and there.
            assert apart.max() <= 1 and (apart > 0).double().mean() < 0.02
        else:
            # Keyed noise is float32, in which two devices differ by a last bit.
            assert float(apart.max()) <= 1e-6 * max(unit, 1.0), (key, unit)
