"""Every check of bijections on every instance of the table, gradients of single items, compilation."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil

import pytest
import torch

import genmodels.flows
from genmodels.flows.bijection import (
    Around,
    Bijection,
    Channelwise,
)
from genmodels.flows.dequantize import OfLevel
from genmodels.flows.elementwise import ElementTransform
from genmodels.flows.scaling import DataInitialized, Scale
from genmodels.verification.bijections import CHECKS, check_bijection
from tests.flows.gradients import alone, gradients, worst
from tests.flows.table import INSTANCES
from tests.parameters import scattered

#: Every class of the table is compiled once, in the cheapest instance, those with conditions with one too, and the
#: first layer with a mask; the slow tests compile the others, which are other sizes and combinations of the same code.
COMPILED = {
    "jet-two-levels", "inverse-logit", "maf-labels", "full-image", "flip", "flatten", "squeeze-sequence",
    "channels-labels", "affine-plain", "shift", "grouped-sequence", "scale", "standardise-open-sequence",
    "householder-image", "channels-spline", "affine-tied", "affine-sigmoid", "wavenet", "factor-out-labels",
    "affine-residual", "meta-block-labels", "additive", "compose", "mixture", "actnorm-sequence", "lu-sequence",
    "freeze", "whitening-image",
}


@functools.cache
def checked(name: str, compiled: bool):
    """What is found by compiling, or by all other checks."""
    options = {"only": ["compiled"], "compiler": "eager"} if compiled else {"without": ["compiled"]}
    instance = INSTANCES[name]
    torch.manual_seed(0)
    return check_bijection(
        instance.make(), instance.shape, cond=instance.conditions(), starts_as_identity=instance.identity,
        fresh=instance.make, **options, **instance.options,
    )


@pytest.mark.parametrize("name", INSTANCES)
def test_every_check(name):
    checked(name, compiled=False).raise_if_failed()


@pytest.mark.parametrize("name", [name for name, instance in INSTANCES.items() if len(instance.shape) == 2])
def test_sequences_without_positions(name):
    """Empty in, empty out, and the log-determinant of an empty product; `inverse` leads back to the shape."""
    instance = INSTANCES[name]
    shape = (instance.shape[0], 0)
    layer = instance.make()
    try:
        layer.out_shape(shape)
    except ValueError:
        pytest.skip("takes one length")
    cond = instance.conditions()
    if instance.cond is not None and instance.cond.kind == "map":
        cond = cond[..., :0]
    z, logdet = layer(torch.zeros(3, *shape), cond)
    x, back = layer.inverse(z, cond)
    assert z.numel() == 0 and x.shape == (3, *shape) and logdet.tolist() == back.tolist() == [0, 0, 0]


def error_of_single_gradients(flow, shape, cond=None):
    """How far the gradients of three items are from those of each by itself."""
    given = None if cond is None else torch.cat([cond] * 20)
    start = torch.randn(60, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    flow.initialize(0.5 + 0.1 * start, given)
    with torch.no_grad():
        scattered(flow.eval(), 0.1, seed=3)
    x = 0.2 + 0.6 * torch.rand(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return worst(alone(flow, x, cond), gradients(flow, x, cond), smallest=1e-6)


@pytest.mark.parametrize("name", INSTANCES)
def test_gradients_of_an_item_are_those_it_has_in_a_batch(name):
    instance = INSTANCES[name]
    torch.manual_seed(0)
    assert error_of_single_gradients(instance.make().double(), instance.shape, instance.conditions()) < 1e-9


def test_gradients_that_depend_on_the_batch_are_found():
    class OfTheBatch(Scale):
        def _forward(self, x, cond, mask):
            z, logdet = super()._forward(x, cond, mask)
            return z + (len(x) - 1) * 1e-3 * (z - z.detach()), logdet

    assert error_of_single_gradients(OfTheBatch(2.0), (3,)) > 1e-4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COMPILED else [pytest.mark.slow]) for name in INSTANCES]
)
def test_compiles_without_a_graph_break(name):
    checked(name, compiled=True).raise_if_failed()


def classes(names) -> set[type]:
    """The classes of flows in these instances."""
    torch.manual_seed(0)
    kinds = {type(module) for name in names for module in INSTANCES[name].make().modules()}
    return {kind for kind in kinds if kind.__module__.startswith("genmodels.flows.")}


def test_every_class_is_compiled():
    assert classes(COMPILED) == classes(INSTANCES)


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
    elsewhere = {OfLevel}  # test_dequantize.py: its conditions are levels
    assert (everything(Bijection) | everything(ElementTransform)) - abstract - elsewhere <= listed


def test_every_check_applies_somewhere():
    """Checks that pass only because they never apply would show nothing."""
    names = ["actnorm-sequence", "affine-plane", "affine-labels", "maf-ordered", "compose"]
    found = [checked("actnorm-sequence", compiled=True), *(checked(name, compiled=False) for name in names)]
    seen = {v.name for report in found for v in report.checks if v.status == "passed"}
    assert seen == set(CHECKS.specs)
