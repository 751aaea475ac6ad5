"""Glow's network against its equation, and the sizes of the published models."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, conv2d, relu

from genmodels.nn import ConvNet, ScaledHead

CONVOLVE = {1: conv1d, 2: conv2d}


def randomised(net):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.5)
    return net.double()


def scaled(head, x, dims, factor=3):
    y = CONVOLVE[dims](x, head.weight, head.bias, padding=1)
    return y * torch.exp(factor * head.log_scale).view(-1, *(1,) * dims)


@pytest.mark.parametrize("dims, space", [(1, (7,)), (2, (4, 5)), (2, (1, 1))])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_is_its_equation(dims, space, depth):
    net, x = randomised(ConvNet(3, 5, hidden=6, depth=depth, dims=dims)), torch.randn(2, 3, *space).double()
    h = x
    for number, layer in enumerate(net.layers):
        assert layer.kernel_size == ((1,) if number else (3,)) * dims
        h = relu(CONVOLVE[dims](h, layer.weight, layer.bias, padding=0 if number else 1))
    assert len(net.layers) == depth
    assert torch.allclose(net(x), scaled(net.head, h, dims), atol=1e-12)
    # Planted bug: the scale without its factor.
    assert not torch.allclose(net(x), scaled(net.head, h, dims, factor=1), atol=1e-2)


def test_the_scale_moves_three_times_as_fast():
    head = ScaledHead(2, 2, 1).double()
    head.bias.data.fill_(1.0)
    y = head(torch.zeros(1, 2, 1, 1).double())
    y.backward()
    assert float(head.log_scale.grad) == 3.0


def glow_size(channels, levels, steps, hidden, per_channel=0):
    """Parameters of Glow: per step activation norm (2 C), a C x C matrix, a network, and those of the coupling."""
    total = 0
    for level in range(levels):
        channels = 4 * channels
        net = sum(p.numel() for p in ConvNet(channels // 2, channels, hidden=hidden).parameters())
        total += steps * (2 * channels + channels**2 + net + per_channel * (channels // 2))
        if level < levels - 1:
            total += sum(p.numel() for p in ConvNet(channels // 2, channels, depth=0).parameters())
            channels //= 2
    return total


@pytest.mark.parametrize(
    "setting, low, high",
    [
        ((3, 3, 32, 512), 43.95e6, 44.05e6),
        ((3, 3, 16, 256, 2), 7.85e6, 7.95e6),
        ((1, 2, 16, 128, 2), 0.865e6, 0.875e6),
        ((1, 2, 8, 64, 2), 0.145e6, 0.155e6),
    ],
)
def test_glow_has_its_published_size(setting, low, high):
    assert low < glow_size(*setting) < high
