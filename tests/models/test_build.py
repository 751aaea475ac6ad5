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
def test_nothing_else_is_reached(name, refuses):
    refuses(InputError, None, locate, name)


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


#: Millions of parameters as published: U-Nets of DDPM and EDM, DiT-B, MD4; of TarFlow and Jet what the layers come to
#: that their papers publish for ImageNet 64.
CIFAR10 = {"flow_matching": 35.7, "consistency": 55.7, "mean_flow": 55, "shortcut": 130, "masked_diffusion": 28,
           "tarflow": 455, "jet": 1012}  # fmt: skip
#: The option that repeats the parts of a flow, and how many are the period of their kinds.
REPEATED = {"tarflow": ("blocks", 1), "jet": ("couplings", 4)}


def millions(options: dict, spec: DataSpec, repeated: str | None, period: int) -> float:
    """Millions of parameters; of flows, which cannot be built without memory, from those of one period and of two."""

    def count(**further) -> float:
        model = build(options | {"ema_decay": 0.0} | further, spec)
        return sum(p.numel() for p in model.core.parameters()) / 1e6

    if repeated is None:
        with torch.device("meta"):
            return count()
    one, two = (count(**{repeated: n * period}) for n in (1, 2))
    return one + (options[repeated] / period - 1) * (two - one)


@pytest.mark.parametrize("family", CIFAR10)
def test_presets_of_cifar10_have_the_published_size_and_train(family):
    spec = DataSpec("cifar10", (3, 32, 32), levels=256, num_classes=10)
    repeated, period = REPEATED.get(family, (None, 1))
    with composer("train") as hydra:
        options = hydra.compose([f"model={family}", "data=cifar10"])["model"]
    assert abs(millions(options, spec, repeated, period) / CIFAR10[family] - 1) < 0.03
    tokens = {"width": 16, "depth": 1, "heads": 2}
    if repeated:
        small = {**tokens, repeated: 4}
    else:
        small = {"net": options["net"] | (tokens if "width" in options["net"] else {"channels": 8})}
    model = build(options | small | {"ema_decay": 0.0}, spec)
    batch = Batch(torch.randint(0, 256, (2, 3, 32, 32)).to(torch.uint8), torch.tensor([0, 1]), index=torch.arange(2))
    model.initialize(batch)
    loss = model.loss(batch, KeyedGenerator(0, torch.arange(2), "train")).value
    loss.backward()
    assert bool(torch.isfinite(loss))
