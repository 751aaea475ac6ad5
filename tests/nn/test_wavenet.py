"""The WaveNet against a loop over positions."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn import Condition, WaveNet

LENGTH = 9


def randomised(**options):
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
    net, x = randomised(dilation_rate=rate, kernel_size=kernel_size), torch.randn(2, 3, LENGTH).double()
    with torch.no_grad():
        expected = torch.stack([by_loop(net, example, rate) for example in x])
        assert torch.allclose(net(x), expected, atol=1e-12)
        # Planted bug: another dilation.
        if kernel_size > 1:
            wrong = torch.stack([by_loop(net, example, 3 - rate) for example in x])
            assert not torch.allclose(net(x), wrong, atol=1e-2)


def test_a_local_map_enters_every_layer():
    net, x = randomised(cond=Condition("map", 2)), torch.randn(2, 3, LENGTH).double()
    c = torch.randn(2, 2, LENGTH).double()
    with torch.no_grad():
        expected = torch.stack([by_loop(net, *pair[:1], 1, pair[1]) for pair in zip(x, c, strict=True)])
        assert torch.allclose(net(x, c), expected, atol=1e-12)


@pytest.mark.parametrize("rate, reach", [(1, 3), (2, 7), (3, 13)])
def test_reach_grows_with_the_dilation(rate, reach):
    """Three layers of kernel 3 look 1 + rate + rate^2 positions to either side."""
    net, x = randomised(dilation_rate=rate), torch.randn(1, 3, 31).double()
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
