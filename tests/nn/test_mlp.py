"""The perceptron denoiser."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn import MLPDenoiser


def build(event_shape=(3,), num_classes=None, **options):
    torch.manual_seed(0)
    net = MLPDenoiser(event_shape, num_classes, **{"hidden": 16, "depth": 2, **options}).double()
    torch.nn.init.normal_(net.head.weight)
    return net


@pytest.mark.parametrize("event_shape", [(1,), (2,), (64,), (1, 4, 4)])
@pytest.mark.parametrize("frequencies", [0, 3])
def test_zero_at_the_start(event_shape, frequencies):
    net = MLPDenoiser(event_shape, hidden=16, depth=1, frequencies=frequencies)
    x = torch.randn(5, *event_shape)
    y = net(x, torch.zeros(5))
    assert y.shape == x.shape and (y == 0).all()


@pytest.mark.parametrize("event_shape", [(3,), (2, 4, 4)])
def test_twice_the_output_and_more_input(event_shape):
    first, *rest = event_shape
    net = build(event_shape, double_output=True, extra_channels=5)
    x = torch.randn(4, first + 5, *rest, dtype=torch.float64)
    y = net(x, torch.zeros(4).double())
    assert y.shape == (4, 2 * first, *rest)
    x[:, first:] += 1
    assert not torch.allclose(net(x, torch.zeros(4).double()), y)


def unreached(net) -> list[str]:
    x, log_snr = torch.randn(6, 3, dtype=torch.float64), torch.linspace(-5, 5, 6, dtype=torch.float64)
    net.zero_grad()
    net(x, log_snr, torch.arange(6) % 2).square().sum().backward()
    return [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9]


def test_gradient_reaches_every_parameter():
    net = build(num_classes=2)
    assert unreached(net) == []
    # Planted bug: a block that is silent for ever.
    net.outer[0].weight.data.zero_()
    assert unreached(net) == ["inner.0.weight", "inner.0.bias"]


def test_an_example_does_not_depend_on_its_batch():
    net, log_snr = build(), torch.linspace(-5, 5, 6, dtype=torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64)
    alone = torch.cat([net(x[i : i + 1], log_snr[i : i + 1]) for i in range(6)])
    assert torch.allclose(net(x, log_snr), alone, atol=1e-12)


def test_noise_level_and_class_matter_and_none_is_the_null_class():
    net, x, log_snr = build(num_classes=2), torch.randn(4, 3).double(), torch.zeros(4).double()
    y = net(x, log_snr)
    assert (y == net(x, log_snr, torch.full((4,), 2))).all()
    assert (y - net(x, log_snr, torch.ones(4, dtype=torch.int64))).abs().max() > 1e-3
    assert (y - net(x, log_snr + 1)).abs().max() > 1e-3


def test_traces_without_a_graph_break():
    net, x, log_snr = build(num_classes=2), torch.randn(4, 3).double(), torch.zeros(4).double()
    traced = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.allclose(traced(x, log_snr), net(x, log_snr), atol=1e-12)


def denoising_error(frozen_noise_level: bool) -> tuple[float, float]:
    """Mean squared error of E[x_0 | x_t] for two equal points, by a trained network, and the least possible.

    x_0 is (1, 1) or (-1, -1), so E[x_0 | x] = tanh(alpha (x_1 + x_2) / sigma^2) in both coordinates.
    """
    torch.manual_seed(0)
    net = MLPDenoiser((2,), hidden=64, depth=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def draw(count):
        log_snr = 8 * torch.rand(count) - 4
        alpha, sigma = torch.sigmoid(log_snr).sqrt()[:, None], torch.sigmoid(-log_snr).sqrt()[:, None]
        clean = (torch.randint(2, (count, 1)) * 2 - 1).float().expand(-1, 2)
        x = alpha * clean + sigma * torch.randn(count, 2)
        mean = torch.tanh(alpha * x.sum(1, keepdim=True) / sigma.square()).expand(-1, 2)
        return clean, mean, x, torch.zeros(count) if frozen_noise_level else log_snr

    for _ in range(300):
        clean, _, x, log_snr = draw(256)
        optimizer.zero_grad()
        (net(x, log_snr) - clean).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        clean, mean, x, log_snr = draw(4000)
        return float((net(x, log_snr) - mean).square().mean()), float(mean.square().mean())


def test_learns_the_posterior_mean():
    excess, signal = denoising_error(frozen_noise_level=False)
    assert excess < 0.03 * signal
    # Planted bug: a network that is not told the noise level cannot be as good.
    blind, _ = denoising_error(frozen_noise_level=True)
    assert blind > 2 * excess


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: MLPDenoiser((2,), hidden=7), "hidden = 7 must be even"),
        (lambda: MLPDenoiser((2,), depth=0), "depth = 0 must be at least 1"),
        (lambda: MLPDenoiser((2,), frequencies=-1), "frequencies = -1 at least 0"),
        (lambda: build()(torch.zeros(2, 4).double(), torch.zeros(2)), r"shape \(3,\), got \(4,\)"),
        (lambda: build()(torch.zeros(2, 3).double(), torch.zeros(2), mask=torch.ones(2, 1, 3)), "use the U-Net"),
        (lambda: build()(torch.zeros(2, 3).double(), torch.full((2,), math.nan), torch.zeros(2)), "without classes"),
    ],
)
def test_errors_are_one_line(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)
