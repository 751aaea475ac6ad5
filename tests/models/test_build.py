"""Only classes that genmodels defines are built from a configuration."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from genmodels.cli.compose import composer
from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.models.build import build, locate

OPTIMIZER = "genmodels.models.optimizer.Optimizer"


def test_builds_what_is_described():
    assert build({"_target_": OPTIMIZER, "lr": 0.25}).lr == 0.25


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "genmodels.training.run.os.system",
        "genmodels.training.run.os",
        "genmodels.models.build.locate",
        "genmodels.models.optimizer.torch.optim.Adam",
        "genmodels.models.diffusion.Tensor",
        "genmodels.nowhere.Thing",
        "genmodels",
        "",
    ],
)
def test_nothing_else_is_reached(name):
    with pytest.raises(InputError) as caught:
        locate(name)
    assert "\n" not in str(caught.value)


def test_a_naive_lookup_would_reach_the_shell():
    import importlib

    found = importlib.import_module("genmodels.training.run")
    for part in ("os", "system"):
        found = getattr(found, part)
    assert callable(found)


def test_other_packages_must_be_trusted(monkeypatch):
    module = types.ModuleType("their_package")
    module.Layer = type("Layer", (), {"__module__": "their_package"})
    monkeypatch.setitem(sys.modules, "their_package", module)
    with pytest.raises(InputError, match=r"trust=\[their_package\]"):
        locate("their_package.Layer")
    assert locate("their_package.Layer", trust=["their_package"]) is module.Layer


def test_options():
    with pytest.raises(InputError, match="did you mean 'warmup_steps'"):
        build({"_target_": OPTIMIZER, "warmup_step": 3})
    with pytest.raises(InputError, match="Optimizer: .*lr must be finite and not negative"):
        build({"_target_": OPTIMIZER, "lr": -1})
    with pytest.raises(InputError, match="_target_"):
        build({"lr": 1})


#: Millions of parameters as published: the U-Nets of DDPM and of EDM, DiT-B, and the size of MD4.
CIFAR10 = {"flow_matching": 35.7, "consistency": 55.7, "mean_flow": 55, "shortcut": 130,
           "masked_diffusion": 28}  # fmt: skip


@pytest.mark.parametrize("family", CIFAR10)
def test_presets_of_cifar10_have_the_published_size_and_train(family):
    spec = DataSpec("cifar10", (3, 32, 32), levels=256, num_classes=10)
    with composer("train") as hydra:
        options = hydra.compose([f"model={family}", "data=cifar10"])["model"]
    with torch.device("meta"):
        whole = build(options | {"ema_decay": 0.0}, spec)
    assert abs(sum(p.numel() for p in whole.core.parameters()) / 1e6 / CIFAR10[family] - 1) < 0.03
    small = {"width": 16, "depth": 1, "heads": 2} if "width" in options["net"] else {"channels": 8}
    model = build(options | {"net": options["net"] | small, "ema_decay": 0.0}, spec)
    batch = Batch(torch.randint(0, 256, (2, 3, 32, 32)).to(torch.uint8), torch.tensor([0, 1]), index=torch.arange(2))
    loss = model.loss(batch, KeyedGenerator(0, torch.arange(2), "train")).value
    loss.backward()
    assert bool(torch.isfinite(loss))
