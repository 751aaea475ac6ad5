"""The gated network against its equation, and the size of the published model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, conv2d, elu

from genmodels.nn import ChannelNorm, GatedConvNet, concat_elu

CONVOLVE = {1: conv1d, 2: conv2d}


def test_concat_elu():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5).double().requires_grad_()
    before = x.detach().clone()
    # Vector units of some processors round the exponential by another last bit at the end of a block.
    assert torch.allclose(concat_elu(x), torch.cat([elu(x), elu(-x)], dim=1), rtol=1e-14, atol=0)
    assert torch.equal(x, before)
    assert torch.autograd.gradcheck(concat_elu, (x,))


@pytest.mark.parametrize("dims, space", [(1, (7,)), (2, (4, 5))])
def test_is_its_equation(dims, space):
    torch.manual_seed(0)
    net, x = GatedConvNet(3, 5, hidden=6, depth=2, dims=dims).double(), torch.randn(2, 3, *space).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.5)

    def both(h):
        return torch.cat([elu(h), elu(-h)], dim=1)

    def by_equation(swapped):
        h = CONVOLVE[dims](x, net.stem.weight, net.stem.bias, padding=1)
        for block in net.blocks:
            inside = CONVOLVE[dims](both(h), block.conv_1.weight, block.conv_1.bias, padding=1)
            value, gate = CONVOLVE[dims](both(inside), block.conv_2.weight, block.conv_2.bias).chunk(2, dim=1)
            if swapped:
                value, gate = gate, value
            norm = ChannelNorm(6).double()
            norm.load_state_dict(block.norm.state_dict())
            h = norm(h + value * torch.sigmoid(gate))
        return CONVOLVE[dims](both(h), net.head.weight, net.head.bias, padding=1)

    assert torch.allclose(net(x), by_equation(swapped=False), atol=1e-12)
    # Planted bug: value and gate exchanged.
    assert not torch.allclose(net(x), by_equation(swapped=True), atol=1e-2)


def size(in_channels, out_channels, hidden):
    return sum(p.numel() for p in GatedConvNet(in_channels, out_channels, hidden=hidden, depth=3).parameters())


def test_the_multiscale_model_of_mnist_has_its_published_size():
    """Couplings by masks: every network sees and gives parameters for all channels; one log-factor for each channel."""
    dequantisation = 4 * (size(2, 2, 16) + 1)
    checkerboard, channels, deep = 2 * (size(1, 2, 32) + 1), 2 * (size(4, 8, 48) + 4), 4 * (size(8, 16, 64) + 8)
    assert dequantisation + checkerboard + channels + deep == 1_711_818


def test_split_couplings_make_it_smaller():
    """The same model where networks see only what is kept, and give parameters for what is changed."""
    dequantisation = 4 * (size(2, 2, 16) + 1)
    checkerboard, channels, deep = 2 * (size(1, 2, 32) + 1), 2 * (size(2, 4, 48) + 2), 4 * (size(4, 8, 64) + 4)
    assert dequantisation + checkerboard + channels + deep == 1_657_038
