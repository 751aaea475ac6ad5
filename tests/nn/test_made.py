"""The masked perceptron: output i depends on the inputs before i, on all of them, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.condition import Condition
from genmodels.nn.perceptron import MADE, MaskedLinear, hidden_degrees

NETWORKS = {
    "plain": lambda **options: MADE(4, 2, hidden=12, depth=2, **options),
    "one layer": lambda **options: MADE(4, 1, hidden=9, depth=1, **options),
    "residual": lambda **options: MADE(4, 3, hidden=12, depth=2, residual=True, activation="relu", **options),
    "narrow": lambda **options: MADE(6, 2, hidden=3, depth=2, **options),
    "reversed": lambda **options: MADE(4, 2, hidden=12, order=[3, 2, 1, 0], **options),
    "shuffled": lambda **options: MADE(5, 2, hidden=20, order=[2, 0, 4, 1, 3], residual=True, **options),
    "one dimension": lambda **options: MADE(1, 2, hidden=4, **options),
}
CONDITIONS = {
    None: None,
    "labels": (Condition("labels", 3), torch.tensor([2])),
    "vector": (Condition("vector", 2), torch.tensor([[0.3, -0.4]], dtype=torch.float64)),
}


def ready(name, kind=None, **options):
    options |= {} if kind is None else {"cond": CONDITIONS[kind][0]}
    made = NETWORKS[name](**options).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(1, made.in_channels, generator=generator, dtype=torch.float64)
    return made, x, None if kind is None else CONDITIONS[kind][1]


def dependence(made, x, cond):
    """(P, D, D): by which outputs depend on which inputs, from autograd."""
    jacobian = torch.autograd.functional.jacobian(lambda x: made(x, cond), x)
    return jacobian.reshape(-1, x.shape[1], x.shape[1])


def sees_only_what_comes_before(made, x, cond):
    before = made.order[None, :] < made.order[:, None]
    assert (dependence(made, x, cond)[:, ~before] == 0).all()


def sees_all_that_comes_before(made, x, cond):
    before = made.order[None, :] < made.order[:, None]
    assert (dependence(made, x, cond)[:, before] != 0).all()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", CONDITIONS)
def test_sees_only_what_comes_before(name, kind):
    sees_only_what_comes_before(*ready(name, kind))


@pytest.mark.parametrize("name", ["plain", "one layer", "reversed", "shuffled", "one dimension"])
@pytest.mark.parametrize("kind", CONDITIONS)
def test_sees_all_that_comes_before(name, kind):
    sees_all_that_comes_before(*ready(name, kind))


@pytest.mark.parametrize("conditioning", ["concat", "film"])
@pytest.mark.parametrize("name", ["plain", "residual", "one dimension"])
def test_condition_reaches_every_output(name, conditioning):
    made, x, cond = ready(name, "vector", conditioning=conditioning)
    jacobian = torch.autograd.functional.jacobian(lambda cond: made(x, cond), cond)
    assert (jacobian.reshape(made.out_channels, -1) != 0).all()


def test_planted_bugs():
    """A mask that lets a dimension see itself; one that hides the neighbour."""
    made, x, cond = ready("plain")
    head = made.head.mask.clone()
    inner = hidden_degrees(4, 12, conditional=False)
    made.head.mask.copy_((made.order + 1).repeat(2)[:, None] >= inner)
    with pytest.raises(AssertionError):
        sees_only_what_comes_before(made, x, cond)
    made.head.mask.copy_(head & ((made.order + 1).repeat(2)[:, None] != inner + 1))
    with pytest.raises(AssertionError):
        sees_all_that_comes_before(made, x, cond)


@pytest.mark.parametrize("features, hidden", [(1, 3), (2, 1), (5, 3), (5, 4), (5, 64), (64, 256)])
@pytest.mark.parametrize("conditional", [False, True])
def test_degrees(features, hidden, conditional):
    """Sorted, within range, the highest always there, and evenly shared."""
    degrees = hidden_degrees(features, hidden, conditional)
    lowest = 0 if conditional or features == 1 else 1
    counts = torch.bincount(degrees, minlength=features)[lowest:features]
    assert len(degrees) == hidden and degrees.min() >= lowest and degrees.max() == features - 1
    assert counts.max() - counts.min() <= 1 and counts.sum() == hidden


@pytest.mark.parametrize("name", NETWORKS)
def test_starts_at_the_bias(name):
    made = NETWORKS[name]()
    x = torch.randn(3, made.in_channels, generator=torch.Generator().manual_seed(0))
    assert not made(x).any()
    bias = torch.arange(made.out_channels) + 0.5
    made.set_output_bias(bias)
    assert torch.equal(made(x), bias.expand(3, -1))


def test_masked_weights_stay_out():
    """Weights outside the mask have no gradient and no effect, whatever they are."""
    layer = MaskedLinear(torch.tensor([[True, False], [True, True]]))
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.zero_()
    y = layer(torch.tensor([[1.0, 10.0]]))
    assert y.tolist() == [[2.0, 22.0]]
    y.sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 0.0], [1.0, 10.0]]


def test_a_checkpoint_brings_its_order():
    """Order and masks are saved: a network made for another order becomes the saved one."""
    saved, x, _ = ready("reversed")
    other = NETWORKS["plain"]().double()
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other(x), saved(x)) and other.order.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"order": [0, 1, 1]}, r"permutation of 0 .. 2, got \[0, 1, 1\]"),
        ({"order": [0, 1]}, "permutation"),
        ({"depth": 0}, "depth >= 1"),
        ({"activation": "cube"}, "silu, relu, got 2, 'cube'"),
        ({"cond": Condition("map", 2)}, "vectors have no positions"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MADE(3, 2, hidden=8, **options)


def test_inputs_that_do_not_fit():
    with pytest.raises(ValueError, match="mask"):
        MADE(3, 2, hidden=8)(torch.zeros(2, 3), mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"takes x \(B, 3\), got \(2, 4\)"):
        MADE(3, 2, hidden=8)(torch.zeros(2, 4))
