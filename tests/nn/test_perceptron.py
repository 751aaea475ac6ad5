"""The perceptrons against their equations."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import relu, silu

from genmodels.nn import MLP, Condition, ResidualMLP


def randomised(net):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.5)
    return net.double()


def affine(layer, x):
    return x @ layer.weight.T + layer.bias


@pytest.mark.parametrize("name, act", [("silu", silu), ("relu", relu)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_mlp_is_its_equation(name, act, depth):
    net, x = randomised(MLP(3, 5, hidden=6, depth=depth, activation=name)), torch.randn(4, 3).double()
    h = affine(net.stem, x)
    for layer in net.layers:
        h = affine(layer, act(h))
    assert len(net.layers) == depth - 1
    assert torch.allclose(net(x), affine(net.head, act(h)), atol=1e-12)
    # Planted bug: no activation before the last layer.
    assert not torch.allclose(net(x), affine(net.head, h), atol=1e-2)


def test_mlp_with_film_is_its_equation():
    net = randomised(MLP(3, 5, hidden=6, depth=2, cond=Condition("vector", 2), conditioning="film"))
    x, c = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    scale_1, shift_1, scale_2, shift_2 = affine(net.conditioning.project, c).chunk(4, dim=1)
    h = silu(affine(net.stem, x) * (1 + scale_1) + shift_1)
    h = silu(affine(net.layers[0], h) * (1 + scale_2) + shift_2)
    assert torch.allclose(net(x, c), affine(net.head, h), atol=1e-12)


@pytest.mark.parametrize("name, act", [("silu", silu), ("relu", relu)])
def test_residual_mlp_is_its_equation(name, act):
    net, x = randomised(ResidualMLP(3, 5, hidden=6, depth=2, activation=name)), torch.randn(4, 3).double()
    h = affine(net.stem, x)
    for inner, outer in zip(net.inner, net.outer, strict=True):
        h = h + affine(outer, act(affine(inner, act(h))))
    assert torch.allclose(net(x), affine(net.head, h), atol=1e-12)


def test_width_and_depth_by_default():
    # 32 -> 256 -> 256 -> 64, and two blocks of two layers 128 -> 128
    assert sum(p.numel() for p in MLP(32, 64).parameters()) == 8448 + 65792 + 16448
    assert sum(p.numel() for p in ResidualMLP(3, 7).parameters()) == 512 + 4 * 16512 + 903


def test_realnvp_for_vectors_has_its_published_size():
    """8 couplings of 64 dimensions: each changes 32, with a scale and an offset to learn for each of them."""
    assert 8 * (sum(p.numel() for p in MLP(32, 64, hidden=256, depth=2).parameters()) + 2 * 32) == 726_016
