"""RealNVP's residual network against its equation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, conv2d, relu

from genmodels.nn import ResidualConvNet

CONVOLVE = {1: conv1d, 2: conv2d}


def normed(norm, x):
    centred = x - x.mean(1, keepdim=True)
    per_channel = (-1, *(1,) * (x.dim() - 2))
    y = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return y * norm.weight.view(per_channel) + norm.bias.view(per_channel)


@pytest.mark.parametrize("dims, space", [(1, (7,)), (2, (4, 5))])
def test_is_its_equation(dims, space):
    torch.manual_seed(0)
    net, x = ResidualConvNet(3, 5, hidden=6, depth=2, dims=dims).double(), torch.randn(2, 3, *space).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.5)

    def convolve(layer, h):
        return CONVOLVE[dims](h, layer.weight, layer.bias, padding=1)

    h = convolve(net.stem, x)
    without_skip = h
    for block in net.blocks:
        branch = convolve(
            block.conv_2, relu(normed(block.norm_2, convolve(block.conv_1, relu(normed(block.norm_1, h)))))
        )
        h, without_skip = h + branch, branch
    assert torch.allclose(net(x), convolve(net.head, relu(normed(net.norm, h))), atol=1e-12)
    # Planted bug: no skip.
    assert not torch.allclose(net(x), convolve(net.head, relu(normed(net.norm, without_skip))), atol=1e-2)


def test_realnvp_for_digits_has_its_size():
    """Four checkerboard couplings of one channel, four channel couplings of two of four, a and b for each."""
    sizes = [sum(p.numel() for p in ResidualConvNet(n, 2 * n, hidden=32, depth=2).parameters()) for n in (1, 2)]
    assert 4 * (sizes[0] + 2) + 4 * (sizes[1] + 4) == 309_168
