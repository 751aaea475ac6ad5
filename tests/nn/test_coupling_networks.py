"""Glow's network against its equation, and the sizes of the published models."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, conv2d, elu, relu

from genmodels.nn import ChannelNorm, Condition, ConvNet, GatedConvNet, ResidualConvNet, ScaledHead, WaveNet, concat_elu
from tests.nn.test_perceptron import randomised

CONVOLVE = {1: conv1d, 2: conv2d}


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
    # Mutant: the scale without its factor.
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


# ---- the gated network against its equation, and the size of the published model ----


def test_concat_elu():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5).double().requires_grad_()
    before = x.detach().clone()
    # Vector units of some processors round the exponential by another last bit at the end of a block.
    assert torch.allclose(concat_elu(x), torch.cat([elu(x), elu(-x)], dim=1), rtol=1e-14, atol=0)
    assert torch.equal(x, before)
    assert torch.autograd.gradcheck(concat_elu, (x,))


@pytest.mark.parametrize("dims, space", [(1, (7,)), (2, (4, 5))])
def test_gated_is_its_equation(dims, space):
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
    # Mutant: value and gate exchanged.
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


# ---- realNVP's residual network against its equation ----


def normed(norm, x):
    centred = x - x.mean(1, keepdim=True)
    per_channel = (-1, *(1,) * (x.dim() - 2))
    y = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return y * norm.weight.view(per_channel) + norm.bias.view(per_channel)


@pytest.mark.parametrize("dims, space", [(1, (7,)), (2, (4, 5))])
def test_residual_is_its_equation(dims, space):
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
    # Mutant: no skip.
    assert not torch.allclose(net(x), convolve(net.head, relu(normed(net.norm, without_skip))), atol=1e-2)


def test_realnvp_for_digits_has_its_size():
    """Four checkerboard couplings of one channel, four channel couplings of two of four, a and b for each."""
    sizes = [sum(p.numel() for p in ResidualConvNet(n, 2 * n, hidden=32, depth=2).parameters()) for n in (1, 2)]
    assert 4 * (sizes[0] + 2) + 4 * (sizes[1] + 4) == 309_168


# ---- the WaveNet against a loop over positions ----


LENGTH = 9


def random_wavenet(**options):
    torch.manual_seed(0)
    net = WaveNet(3, 4, **{"hidden": 5, "depth": 3, "kernel_size": 3, **options}).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.4)
    return net


def pointwise(layer, h):
    return torch.stack([layer.weight[:, :, 0] @ h[:, t] + layer.bias for t in range(h.shape[1])], dim=1)


def by_loop(net, x, rate, map_of_first=None):
    """One example, tap by tap; `map_of_first` is the condition's map (size, T)."""
    length = x.shape[1]
    h, skipped = pointwise(net.stem, x), 0
    projected = None
    if map_of_first is not None:
        projected = (net.conditioning.project.weight[:, :, 0] @ map_of_first).chunk(len(net.gates), dim=0)
    for i, gate in enumerate(net.gates):
        taps = gate.weight.shape[2]
        a = torch.zeros(2 * net.hidden, length, dtype=torch.float64)
        for t in range(length):
            for tap in range(taps):
                source = t + (tap - taps // 2) * rate**i
                if 0 <= source < length:
                    a[:, t] += gate.weight[:, :, tap] @ h[:, source]
            a[:, t] += gate.bias
        if projected is not None:
            a = a + projected[i]
        u = torch.tanh(a[: net.hidden]) * torch.sigmoid(a[net.hidden :])
        if i < len(net.gates) - 1:
            both = pointwise(net.branches[i], u)
            h, skipped = h + both[: net.hidden], skipped + both[net.hidden :]
        else:
            skipped = skipped + pointwise(net.last, u)
    return pointwise(net.head, skipped)


@pytest.mark.parametrize("rate", [1, 2])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_equals_the_loop(rate, kernel_size):
    net, x = random_wavenet(dilation_rate=rate, kernel_size=kernel_size), torch.randn(2, 3, LENGTH).double()
    with torch.no_grad():
        expected = torch.stack([by_loop(net, example, rate) for example in x])
        assert torch.allclose(net(x), expected, atol=1e-12)
        # Mutant: another dilation.
        if kernel_size > 1:
            wrong = torch.stack([by_loop(net, example, 3 - rate) for example in x])
            assert not torch.allclose(net(x), wrong, atol=1e-2)


def test_a_local_map_enters_every_layer():
    net, x = random_wavenet(cond=Condition("map", 2)), torch.randn(2, 3, LENGTH).double()
    c = torch.randn(2, 2, LENGTH).double()
    with torch.no_grad():
        expected = torch.stack([by_loop(net, *pair[:1], 1, pair[1]) for pair in zip(x, c, strict=True)])
        assert torch.allclose(net(x, c), expected, atol=1e-12)


@pytest.mark.parametrize("rate, reach", [(1, 3), (2, 7), (3, 13)])
def test_reach_grows_with_the_dilation(rate, reach):
    """Three layers of kernel 3 look 1 + rate + rate^2 positions to either side."""
    net, x = random_wavenet(dilation_rate=rate), torch.randn(1, 3, 31).double()
    other = x.clone()
    other[..., 15] += 1
    with torch.no_grad():
        touched = ((net(x) - net(other)).abs().amax((0, 1)) > 0).nonzero().flatten()
    assert (int(touched.min()), int(touched.max())) == (15 - reach, 15 + reach)


def test_the_decoder_of_glow_tts_has_its_size():
    """12 couplings of 80 of 160 channels: a network with 4 layers of 192 channels and kernel 5 each."""
    net = WaveNet(80, 160)
    gates, branches = 4 * (192 * 384 * 5 + 384), 3 * (192 * 384 + 384) + 192 * 192 + 192
    ends = 80 * 192 + 192 + 192 * 160 + 160
    assert sum(p.numel() for p in net.parameters()) == gates + branches + ends
    assert net.dropout.p == 0.05
