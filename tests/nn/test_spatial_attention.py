"""Attention over positions against a double loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.nn import ATTENTION, SpatialAttention
from genmodels.nn.energy_nets import UNetEnergy


def example(space=(3, 4), channels=8, heads=2):
    torch.manual_seed(0)
    attention = SpatialAttention(channels, heads).double()
    nn.init.normal_(attention.project_out.weight)
    return attention, torch.randn(2, channels, *space, dtype=torch.float64)


def by_loop(attention, x, mask=None):
    rows = attention.norm(x, mask=mask).flatten(2).transpose(1, 2)
    q, k, v = attention.project_in(rows).chunk(3, dim=-1)
    width = x.shape[1] // attention.heads
    y = torch.zeros_like(q)
    for b in range(len(x)):
        valid = range(q.shape[1]) if mask is None else mask[b].expand(1, *x.shape[2:]).flatten().nonzero().flatten()
        for h in range(attention.heads):
            part = slice(h * width, (h + 1) * width)
            for i in range(q.shape[1]):
                scores = torch.stack([q[b, i, part] @ k[b, j, part] for j in valid]) / math.sqrt(width)
                weights = torch.softmax(scores, 0)
                y[b, i, part] = sum(w * v[b, j, part] for w, j in zip(weights, valid, strict=True))
    return x + attention.project_out(y).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("space", [(5,), (3, 4)])
def test_equals_the_loop(space):
    attention, x = example(space)
    assert torch.allclose(attention(x), by_loop(attention, x), atol=1e-12)
    # Planted bug: heads mixed up.
    attention.heads = 4
    wrong = attention(x)
    attention.heads = 2
    assert not torch.allclose(wrong, by_loop(attention, x), atol=1e-3)


@pytest.mark.parametrize("space", [(5,), (3, 5)])
def test_masked_positions_are_not_attended_to(space):
    attention, x = example(space)
    mask = (torch.arange(5) < torch.tensor([3, 5])[:, None]).reshape(2, *(1,) * len(space), 5)
    expected = by_loop(attention, x, mask)
    assert torch.allclose(attention(x, mask), expected, atol=1e-12)
    assert not torch.allclose(attention(x), expected, atol=1e-3)


def test_without_positions_the_order_does_not_matter():
    attention, x = example((12,))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(attention(x[..., order]), attention(x)[..., order], atol=1e-12)


@pytest.mark.parametrize("heads", [0, 3, 16])
def test_heads_must_divide_the_channels(heads):
    with pytest.raises(ValueError, match=f"heads = {heads} does not divide 8 channels: use one of 1, 2, 4, 8"):
        SpatialAttention(8, heads)


@pytest.mark.parametrize("attention", [kind for kind in ATTENTION if kind not in ("none", "hard")])
def test_an_energy_with_attention_has_second_derivatives(attention):
    torch.manual_seed(0)
    net = UNetEnergy((1, 4, 4), channels=8, multipliers=(1,), attention=attention, heads=2).double()
    for parameter in net.parameters():  # what begins at zero would hide a missing term
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: net(x), x, fast_mode=True)
