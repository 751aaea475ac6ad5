"""The perceptrons against their equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import relu, silu

from genmodels.nn import MLP, Condition, MLPDenoiser, ResidualMLP
from genmodels.nn.perceptron import MADE, MaskedLinear, hidden_degrees


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
    # Mutant: no activation before the last layer.
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


# ---- the masked perceptron: output i depends on the inputs before i, on all of them, and on nothing else ----


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


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", CONDITIONS)
@pytest.mark.parametrize("conditioning", ["concat", "film"])
def test_dimensions_in_turn_have_the_outputs_of_one_pass(name, kind, conditioning):
    made, _, cond = ready(name, kind, conditioning=conditioning)
    outputs = []

    def choose(turn, output):
        outputs.append(output)
        return output.sum(1).sin() + turn

    x = made.unroll(choose, torch.empty(1, made.in_channels, dtype=torch.float64), cond)
    expected = made(x, cond).view(-1, made.in_channels)[:, made.order.argsort()]
    torch.testing.assert_close(torch.cat(outputs).mT, expected, rtol=1e-12, atol=1e-12)
    chosen = expected.sum(0).sin() + torch.arange(made.in_channels)
    torch.testing.assert_close(x[0, made.order.argsort()], chosen, rtol=1e-11, atol=1e-11)


def test_mutants():
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
        ({"depth": 0}, "depth must be at least 1"),
        ({"activation": "cube"}, "silu, relu, got 'cube'"),
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


# ---- the perceptron denoiser ----


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
    # Mutant: a block that is silent for ever.
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
    # Mutant: a network not conditioned on the noise level cannot be as good.
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
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)


def test_the_weights_of_a_single_dimension_that_reach_nothing_are_not_trained():
    masked = {name for name, weight in MADE(1, 2, hidden=4).named_parameters() if not weight.requires_grad}
    assert masked == {"stem.weight"} and all(p.requires_grad for p in MADE(2, 2, hidden=4).parameters())
