"""The parts of the U-Net against plain loops."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn import ResidualBlock, Upsample
from genmodels.nn.blocks import narrow_convolution, resized_twice_convolution


def upsampled_by_loop(x, size, weight, bias):
    """Each position copies the nearest one below it, then a 3x3 convolution, tap by tap; two dimensions."""
    large = torch.zeros(*x.shape[:2], size[0] + 2, size[1] + 2, dtype=x.dtype)
    for i in range(size[0]):
        for j in range(size[1]):
            large[:, :, i + 1, j + 1] = x[:, :, i // 2, j // 2]
    y = torch.zeros(len(x), len(weight), *size, dtype=x.dtype)
    for i in range(size[0]):
        for j in range(size[1]):
            y[:, :, i, j] = torch.einsum("bcij,ocij->bo", large[:, :, i : i + 3, j : j + 3], weight) + bias
    return y


def example(height, width):
    torch.manual_seed(height * 100 + width)
    upsample = Upsample(2, 3, 2).double()
    return upsample, torch.randn(2, 3, height, width, dtype=torch.float64)


SIZES = [(2, 2), (1, 2), (2, 4), (8, 8), (7, 7), (5, 6), (6, 5), (1, 1), (33, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_upsample_equals_the_loop(size):
    upsample, x = example(-(-size[0] // 2), -(-size[1] // 2))
    expected = upsampled_by_loop(x, size, upsample.conv.weight, upsample.conv.bias)
    assert torch.allclose(upsample(x, size), expected, atol=1e-12)
    channels_last = upsample(x.contiguous(memory_format=torch.channels_last), size)
    assert torch.allclose(channels_last, expected, atol=1e-12)


def test_law_catches_swapped_parities():
    upsample, x = example(3, 4)
    weight, bias = upsample.conv.weight, upsample.conv.bias
    expected = upsampled_by_loop(x, (6, 8), weight, bias)
    assert torch.allclose(resized_twice_convolution(x, weight, bias), expected, atol=1e-12)
    for wrong in (weight.transpose(2, 3), weight.flip(2)):
        assert not torch.allclose(resized_twice_convolution(x, wrong, bias), expected, atol=1e-2)


@pytest.mark.parametrize("space", [(1, 1), (2, 3), (7, 4)])
@pytest.mark.parametrize("out_channels", [1, 3])
def test_narrow_convolution_is_a_convolution(space, out_channels):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, *space).double(), torch.randn(out_channels, 5, 3, 3).double()
    bias = torch.randn(out_channels).double()
    expected = torch.nn.functional.conv2d(x, weight, bias, padding=1)
    assert torch.allclose(narrow_convolution(x, weight, bias), expected, atol=1e-12)
    if min(space) > 1:
        # Planted bug: the taps not turned round.
        assert not torch.allclose(narrow_convolution(x, weight.flip(2, 3), bias), expected, atol=1e-2)


def test_gradients_of_the_narrow_convolution():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 2, 2, 3).double(), torch.randn(1, 2, 3, 3).double()
    inputs = (x.requires_grad_(), weight.requires_grad_(), torch.zeros(1).double().requires_grad_())
    assert torch.autograd.gradcheck(narrow_convolution, inputs)
    assert torch.autograd.gradgradcheck(narrow_convolution, inputs)


def test_gradients_of_the_short_form():
    upsample, x = example(1, 2)
    inputs = (x.requires_grad_(), upsample.conv.weight, upsample.conv.bias)
    assert torch.autograd.gradcheck(resized_twice_convolution, inputs)


@pytest.mark.parametrize("dims, space", [(1, (7,)), (2, (4, 5))])
@pytest.mark.parametrize("out_channels", [8, 12])
def test_residual_block_is_its_skip_at_the_start(dims, space, out_channels):
    torch.manual_seed(0)
    block = ResidualBlock(dims, 8, out_channels)
    x = torch.randn(2, 8, *space)
    assert (block(x, torch.randn(2, 2 * out_channels)) == block.skip(x)).all()
