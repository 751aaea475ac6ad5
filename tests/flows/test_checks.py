"""Every check of bijections on every instance of the table."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

import genmodels.flows
from genmodels.flows.actnorm import DataInitialized
from genmodels.flows.bijection import Around, Bijection, Channelwise
from genmodels.flows.elementwise import ElementTransform
from genmodels.verification.bijections import CHECKS, check_bijection
from tests.flows.table import INSTANCES

#: Many layers take long to trace, and each of them is traced by itself.
DEEP = {"realnvp-image", "realnvp-vector", "glow-image", "glow-labels", "glow-sequence", "multiscale-sequence",
        "spline-flow", "maf-flow", "maf-spline"}


def checked(name: str, **options):
    instance = INSTANCES[name]
    torch.manual_seed(0)
    return check_bijection(
        instance.make(), instance.shape, cond=instance.conditions(), starts_as_identity=instance.identity,
        fresh=instance.make, **options, **instance.options,
    )


@pytest.mark.parametrize("name", INSTANCES)
def test_every_check(name):
    checked(name, without=["compiled"]).raise_if_failed()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in DEEP else []) for name in INSTANCES]
)
def test_compiles_without_a_graph_break(name):
    checked(name, only=["compiled"], compiler="eager").raise_if_failed()


def everything(kind: type) -> set[type]:
    """All classes of a kind in genmodels.flows that are meant to be used."""
    found = set()
    for _, name, _ in pkgutil.iter_modules(genmodels.flows.__path__, "genmodels.flows."):
        module = importlib.import_module(name)
        found |= {c for _, c in inspect.getmembers(module, inspect.isclass)
                  if issubclass(c, kind) and c.__module__ == name and not c.__name__.startswith("_")}
    return found


def test_no_bijection_and_no_transform_is_missing_from_the_table():
    torch.manual_seed(0)
    listed = {type(module) for instance in INSTANCES.values() for module in instance.make().modules()}
    abstract = {Around, Bijection, Channelwise, DataInitialized, ElementTransform}
    assert (everything(Bijection) | everything(ElementTransform)) - abstract <= listed


def test_every_check_applies_somewhere():
    """Checks that pass only because they never apply would show nothing."""
    names = ["actnorm-sequence", "affine-plane", "affine-labels", "maf-ordered", "compose"]
    seen = {v.name for name in names for v in checked(name, compiler="eager").checks if v.status == "passed"}
    assert seen == set(CHECKS.specs)
