"""Only classes that genmodels defines are built from a configuration."""

from __future__ import annotations

import sys
import types

import pytest

from genmodels.core.errors import InputError
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
