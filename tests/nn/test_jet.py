"""Second-order directional derivatives of every layer, and their own gradients, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import genmodels.nn.jet as jet_module
from genmodels.nn.coupling_networks import ConvNet, GatedConvNet, ResidualConvNet, WaveNet
from genmodels.nn.jet import SMOOTH, Jet, has_jet, propagate, require_independent, require_smooth, smooth_activation
from genmodels.nn.perceptron import MLP
from genmodels.nn.transformer import TransformerLayer
from genmodels.nn.unet import UNet


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LAYERS = {
    "linear": (nn.Linear(3, 4), (3,)),
    "linear over a map": (nn.Linear(3, 3), (3, 3)),  # as many rows as outputs
    "linear without bias": (nn.Linear(3, 4, bias=False), (3,)),
    "conv": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 4)),
    "conv, dilated": (nn.Conv2d(2, 2, 2, dilation=2, groups=2), (2, 5, 4)),
    "conv of sequences": (nn.Conv1d(2, 3, 3, padding=1), (2, 5)),
    "softplus": (nn.Softplus(), (3,)),
    "silu": (nn.SiLU(), (2, 3)),
    "tanh": (nn.Tanh(), (3,)),
    "pool": (nn.AvgPool2d(2), (2, 4, 4)),
    "pool to one": (nn.AdaptiveAvgPool2d(1), (2, 5, 4)),
    "flatten": (nn.Flatten(), (2, 3)),
    "stack": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.SiLU())), (3,)),
}


def along(layer, x, v):
    """(a, a', a'') of t -> layer(x + t v) at t = 0, by nested forward-mode differentiation."""

    def first(t):
        return torch.func.jvp(lambda s: layer(x + s * v), (t,), (torch.ones_like(t),))[1]

    zero = torch.zeros((), dtype=x.dtype)
    value, one = torch.func.jvp(lambda s: layer(x + s * v), (zero,), (torch.ones_like(zero),))
    return value, one, torch.func.jvp(first, (zero,), (torch.ones_like(zero),))[1]


def matches(name):
    layer, shape = LAYERS[name]
    layer = layer.double()
    x, v = (3 * torch.randn(6, *shape, generator=seeded(i), dtype=torch.float64) for i in (1, 2))
    found = propagate(layer, Jet.line(x, v)).triple()
    for a, b in zip(found, along(layer, x, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_values(name):
    matches(name)
    assert has_jet(LAYERS[name][0])


def test_check_catches_a_missing_bend(monkeypatch):
    def flat(a, *, value, third):
        f, d1, d2, d3 = jet_module._softplus(a, value=value, third=third)
        return f, d1, torch.zeros_like(d2), d3

    def rule(layer, stack, batch):
        return jet_module._ActivationJet.apply(stack, batch, flat)

    monkeypatch.setitem(jet_module._RULES, nn.Softplus, rule)
    with pytest.raises(AssertionError):
        matches("softplus")


def test_check_catches_a_bias_on_derivatives(monkeypatch):
    monkeypatch.setitem(jet_module._RULES, nn.Linear, lambda layer, stack, batch: layer(stack))
    with pytest.raises(AssertionError):
        matches("linear")


@pytest.mark.parametrize("name", ["softplus", "silu", "tanh"])
@pytest.mark.parametrize("parts", [2, 3])
def test_own_gradients(name, parts):
    layer, _ = LAYERS[name]
    stack = torch.randn(2 * parts, 4, generator=seeded(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: propagate(layer, Jet(s, 2)).stack, stack)


@pytest.mark.parametrize("name", ["linear", "conv", "stack"])
def test_gradients_of_the_weights(name):
    layer, shape = LAYERS[name]
    layer = layer.double()
    x, v = (torch.randn(4, *shape, generator=seeded(i), dtype=torch.float64) for i in (1, 2))
    weights = torch.randn(3, generator=seeded(5), dtype=torch.float64)

    def value(triple):
        return sum(w * part.square().sum() for w, part in zip(weights, triple, strict=True))

    parameters = list(layer.parameters())
    expected = torch.autograd.grad(value(along(layer, x, v)), parameters)
    found = torch.autograd.grad(value(propagate(layer, Jet.line(x, v)).triple()), parameters)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_parametrised_weights_and_what_is_not_known():
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).double().eval()
    LAYERS_HERE = {"normed": (normed, (3,))}
    LAYERS.update(LAYERS_HERE)
    try:
        matches("normed")
    finally:
        LAYERS.pop("normed")
    assert has_jet(normed)
    for layer in (nn.GELU(), nn.Softplus(beta=2.0), nn.Conv2d(1, 1, 3, padding_mode="circular"), nn.GroupNorm(1, 2)):
        assert not has_jet(nn.Sequential(nn.Flatten(), layer))
        with pytest.raises(NotImplementedError, match=type(layer).__name__):
            propagate(layer, Jet(torch.zeros(2, 2), 1))

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x).square()

    class Chain(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda layer, given, found: 2 * found)
    for layer in (Other(2, 2), Chain(nn.Linear(2, 2)), hooked, nn.Softplus(threshold=1.0)):
        assert not has_jet(layer)


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.LeakyReLU(), nn.PReLU(), nn.ELU(), nn.SELU(), nn.Hardtanh(),
                                   nn.ReLU6(), nn.Hardswish(), nn.MaxPool2d(2), nn.AdaptiveMaxPool1d(1)])  # fmt: skip
def test_kinks_are_refused(layer):
    with pytest.raises(ValueError, match=rf"layer 1\.0 \({type(layer).__name__}\) is not twice differentiable"):
        require_smooth(nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer)))


def test_functions_with_kinks_are_refused():
    with pytest.raises(ValueError, match=r"layer itself \(relu\) is not twice differentiable"):
        require_smooth(MLP(2, 2, activation="relu"))
    require_smooth(MLP(2, 2, activation="silu"))


@pytest.mark.parametrize("network, where", [
    (ConvNet(1, 2, hidden=4), r"layer itself \(relu\)"), (ResidualConvNet(1, 2, hidden=4, depth=0), r"\(relu\)"),
    (GatedConvNet(1, 2, hidden=4, depth=0), r"\(elu\)"), (TransformerLayer(4, 2), r"\(relu\)"),
    (WaveNet(1, 2, hidden=4, depth=1, attention="local_dense", heads=2), r"layer attention\S* \(relu\)")],
    ids=["glow", "realnvp", "gated", "transformer", "attention"])
def test_networks_say_which_functions_they_call(network, where):
    with pytest.raises(ValueError, match=where + " is not twice differentiable"):
        require_smooth(network)
    require_smooth(ConvNet(1, 2, hidden=4, depth=0))


def test_what_mixes_or_drops_is_refused():
    for layer in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)):
        with pytest.raises(ValueError, match=f"layer 0 .{type(layer).__name__}. mixes the examples"):
            require_independent(nn.Sequential(layer))
    with pytest.raises(ValueError, match="makes the score random"):
        require_independent(UNet((1, 4, 4), channels=4, multipliers=(1,), dropout=0.1))


def test_smooth_networks_pass():
    for network in (
        UNet((1, 4, 4), channels=4, multipliers=(1,)),
        nn.Sequential(nn.GELU(), nn.Dropout(0.0), nn.Tanh()),
    ):
        assert require_smooth(network) is None and require_independent(network) is None


def test_smooth_activations_bend():
    """Their second derivative is there, and it is what a kinked one lacks."""
    x = torch.linspace(-2, 2, 7, dtype=torch.float64, requires_grad=True)

    def bend(layer):
        (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, allow_unused=True, materialize_grads=True)
        return bend.abs().max()

    assert all(bend(smooth_activation(name)) > 0.1 for name in SMOOTH) and bend(nn.ReLU()) == 0
    with pytest.raises(ValueError, match="activation = 'relu'"):
        smooth_activation("relu")
