"""Three routes, one result: values, gradients of the parameters, and the brute-force Hessian."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import genmodels.energy.function as products
from genmodels.energy import (
    Energy,
    ScoreNetwork,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
    directional,
    trace,
)
from genmodels.nn.energy_nets import DeepKernelEnergy, EnergyConv, EnergyMLP, UNetEnergy

ROUTES = ["double_backward", "forward_over_reverse", "jet"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def deep_kernel():
    net = DeepKernelEnergy((3,), inducing=7, hidden=6)
    net.alpha.normal_(generator=seeded(5))
    return net


def unet():
    net = UNetEnergy((1, 4, 4), channels=4, multipliers=(1, 2), blocks=1, attention="plain", heads=2)
    for p in net.parameters():  # nothing silent: zeros at the start would hide a missing term
        p.data += 0.1 * torch.randn(p.shape, generator=seeded(3))
    return net


NETS = {
    "mlp softplus": (lambda: EnergyMLP((2,), hidden=(8, 8)), (2,)),
    "mlp silu": (lambda: EnergyMLP((2, 3), hidden=(8, 8), activation="silu"), (2, 3)),
    "mlp tanh": (lambda: EnergyMLP((2,), hidden=(8,), activation="tanh", confinement=False), (2,)),
    "conv": (lambda: EnergyConv((2, 3, 4), channels=(4, 6)), (2, 3, 4)),
    "conv of sequences": (lambda: EnergyConv((2, 7), channels=(4, 6), activation="softplus"), (2, 7)),
    "conv with norms": (lambda: EnergyConv((2, 3, 4), channels=(8, 8), group_norm=True), (2, 3, 4)),
    "conv, spectral": (lambda: EnergyConv((2, 3, 4), channels=(4, 6), spectral_norm=True).eval(), (2, 3, 4)),
    "unet": (unet, (1, 4, 4)),
    "deep kernel": (deep_kernel, (3,)),
}


def made(name):
    torch.manual_seed(0)
    make, shape = NETS[name]
    x = torch.randn(4, *shape, generator=seeded(1), dtype=torch.float64)
    v = torch.randn(2, 4, *shape, generator=seeded(2), dtype=torch.float64)
    return Energy(make().double()), x, v


@cache
def hessians_of(name):
    """(B, D, D), by the gradient of every coordinate of the gradient."""
    energy, x, _ = made(name)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(energy.energy(x).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(g.sum(), x, retain_graph=True)[0].flatten(1) for g in gradient.flatten(1).T]
    return torch.stack(rows, 1)


def values_agree(name, route):
    energy, x, v = made(name)
    found = directional(energy, x, v, route=route)
    flat = v.flatten(2)
    expected = -torch.einsum("mbi,bij,mbj->mb", flat, hessians_of(name), flat)
    torch.testing.assert_close(found.curvature, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.slope, (v * energy.score(x)).flatten(2).sum(2), rtol=1e-10, atol=1e-10)


def routes_of(name):
    energy, *_ = made(name)
    return ROUTES if energy.has_jet else ROUTES[:2]


CASES = [(name, route) for name in NETS for route in routes_of(name)]


def test_who_has_a_jet():
    assert {name for name in NETS if made(name)[0].has_jet} == set(NETS) - {"conv with norms", "unet"}


@pytest.mark.parametrize("name, route", CASES)
def test_values(name, route):
    values_agree(name, route)


def gradients(name, route, loss=SlicedScoreMatching):
    energy, x, _ = made(name)
    value = loss(route=route, projections=2)(energy, x, seeded(7)).mean()
    parameters = [p for p in energy.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return {n: g for (n, _), g in zip(energy.named_parameters(), found, strict=True)}


def same_gradients(a, b):
    assert any(g.abs().max() > 1e-3 for g in a.values())
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


# Training through forward-mode attention is beyond torch: its softmax is changed in place there.
TRAINED = [case for case in CASES if case[1] != "double_backward" and case != ("unet", "forward_over_reverse")]


@pytest.mark.parametrize("name, route", TRAINED)
def test_gradients(name, route):
    same_gradients(gradients(name, "double_backward"), gradients(name, route))


@pytest.mark.parametrize("name", ["mlp softplus", "conv"])
def test_gradients_of_the_reduced_form(name):
    a, b = (gradients(name, route, SlicedScoreMatchingVR) for route in ROUTES[:2])
    same_gradients(a, b)


def test_gradients_of_the_unet_against_differences():
    energy, x, _ = made("unet")
    parameters = list(energy.parameters())
    moves = [torch.randn(p.shape, generator=seeded(i), dtype=p.dtype) for i, p in enumerate(parameters)]
    values = []
    for step in (1e-4, -1e-4):
        for p, move in zip(parameters, moves, strict=True):
            p.data += step * move
        values.append(float(SlicedScoreMatchingVR(projections=2)(energy, x, seeded(7)).mean().detach()))
        for p, move in zip(parameters, moves, strict=True):
            p.data -= step * move
    found = gradients("unet", "double_backward", SlicedScoreMatchingVR)
    slope = sum(float((g * move).sum()) for g, move in zip(found.values(), moves, strict=True))
    assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-4)


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_against_differences(route):
    energy, x, _ = made("mlp silu")
    weight = energy.network.body[1].weight

    def value(w):
        def network(y):
            return torch.func.functional_call(energy.network, {"body.1.weight": w}, y)

        network.jet = lambda y, v: _jet_with(energy.network, w, y, v)
        return SlicedScoreMatching(route=route)(Energy(network), x, seeded(7)).mean()

    assert torch.autograd.gradcheck(value, weight.detach().clone().requires_grad_(), rtol=1e-5, atol=1e-7)


def _jet_with(network, w, y, v):
    class Call(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, y, v):
            return self.network.jet(y, v)

    return torch.func.functional_call(Call(), {"network.body.1.weight": w}, (y, v))


def test_check_catches_a_detached_product(monkeypatch):
    """Without create_graph the value is right and the gradient lacks its terms."""
    right = products._double_backward

    def wrong(*args):
        found = right(*args)
        return found._replace(curvature=found.curvature.detach())

    expected = gradients("mlp softplus", "jet")
    monkeypatch.setattr(products, "_double_backward", wrong)
    values_agree("mlp softplus", "double_backward")
    with pytest.raises(AssertionError):
        same_gradients(expected, gradients("mlp softplus", "double_backward"))


def test_check_catches_a_jet_without_its_bend(monkeypatch):
    monkeypatch.setattr(EnergyMLP, "jet", lambda self, x, v: (lambda t: (t[0], t[1], 0 * t[2]))(_old_jet(self, x, v)))
    with pytest.raises(AssertionError):
        values_agree("mlp softplus", "jet")


_old_jet = EnergyMLP.jet


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_trace(chunk):
    for name in ("mlp softplus", "conv of sequences", "unet"):
        energy, x, _ = made(name)
        total, score = trace(energy, x, chunk=chunk)
        torch.testing.assert_close(total, -hessians_of(name).diagonal(dim1=1, dim2=2).sum(1), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(score, energy.score(x), rtol=1e-12, atol=1e-12)


def test_a_jacobian_that_is_not_symmetric():
    matrix = torch.randn(3, 3, generator=seeded(), dtype=torch.float64)
    field = ScoreNetwork(lambda x: x @ matrix.T + x.square().sum(1, keepdim=True))
    x = torch.randn(5, 3, generator=seeded(1), dtype=torch.float64)
    v = torch.randn(2, 5, 3, generator=seeded(2), dtype=torch.float64)
    jacobian = matrix + 2 * x[:, None, :]
    expected = torch.einsum("mbi,bij,mbj->mb", v, jacobian, v)
    for route in ROUTES[:2]:
        torch.testing.assert_close(directional(field, x, v, route=route).curvature, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(trace(field, x)[0], jacobian.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-10, atol=1e-10)


def test_auto_takes_the_jet(caplog):
    energy, x, v = made("mlp softplus")
    assert products.cheapest_route(energy, with_score=False) == "jet"
    assert products.cheapest_route(energy, with_score=True) == "double_backward"
    other, x_other, v_other = made("unet")
    products._log_fallback.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            directional(other, x_other, v_other)
            directional(energy, x, v)
    assert [r.message.split()[0] for r in caplog.records] == ["UNetEnergy"]  # once, and not where the jet is taken
    with pytest.raises(ValueError, match="is not one of auto"):
        directional(energy, x, v, route="triple")
