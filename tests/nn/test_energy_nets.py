"""Energies of vectors, images and sequences: shapes, masks, parameters, errors."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.nn.energy_nets import Confinement, DeepKernelEnergy, EnergyConv, EnergyMLP, UNetEnergy

NETS = {
    "mlp": (lambda: EnergyMLP((2, 3), hidden=(8, 8)), (2, 3)),
    "conv": (lambda: EnergyConv((2, 6, 5), channels=(4, 8)), (2, 6, 5)),
    "conv with norms": (lambda: EnergyConv((2, 6, 5), channels=(8, 8), group_norm=True), (2, 6, 5)),
    "conv of sequences": (lambda: EnergyConv((2, 9), channels=(4, 8)), (2, 9)),
    "unet": (lambda: UNetEnergy((1, 4, 6), channels=4, multipliers=(1, 2)), (1, 4, 6)),
    "unet, product": (lambda: UNetEnergy((1, 4, 6), channels=4, multipliers=(1, 2), form="product"), (1, 4, 6)),
    "deep kernel": (lambda: DeepKernelEnergy((4,), inducing=5, hidden=6), (4,)),
}


def build(name):
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make().double()
    for p in net.parameters():
        p.data += 0.05 * torch.randn(p.shape, dtype=p.dtype)
    if name == "deep kernel":
        net.alpha.normal_()
    return net, torch.randn(5, *shape, dtype=torch.float64)


def unreached(net, x) -> list[str]:
    net.zero_grad()
    net(x).square().sum().backward()
    return [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-12]


@pytest.mark.parametrize("name", NETS)
def test_one_number_per_example_that_does_not_depend_on_the_others(name):
    net, x = build(name)
    energy = net(x)
    assert energy.shape == (5,)
    alone = torch.cat([net(x[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(energy, alone, rtol=0, atol=1e-12)
    assert energy.std() > 1e-6


@pytest.mark.parametrize("name", [name for name in NETS if name != "deep kernel"])
def test_gradient_reaches_every_parameter(name):
    net, x = build(name)
    assert unreached(net, x) == []


def test_check_catches_a_silent_layer():
    net, x = build("mlp")
    net.body[3].weight.data.zero_()
    assert unreached(net, x) == ["body.1.weight", "body.1.bias"]


@pytest.mark.parametrize("name", NETS)
def test_confinement_wins_far_away(name):
    """exp(-E) has a finite integral: E grows as |x|^2 in every direction."""
    net, x = build(name)
    far = x / x.flatten(1).norm(dim=1).reshape(-1, *(1,) * (x.dim() - 1))
    near, farther = net(1e4 * far), net(2e4 * far)
    assert ((farther / near - 4).abs() < 0.1).all()


def test_confinement():
    bowl = Confinement(0.5).double()
    x, v = torch.randn(4, 2, 3).double(), torch.randn(4, 2, 3).double()
    torch.testing.assert_close(bowl(x), 2 * x.square().flatten(1).sum(1))
    value, slope, bend = bowl.jet(x, v)
    torch.testing.assert_close(slope, 4 * (x * v).flatten(1).sum(1))
    torch.testing.assert_close(bend, 4 * v.square().flatten(1).sum(1))
    assert float(bowl.spread.detach()) == pytest.approx(0.5)
    assert EnergyMLP((2,), confinement=False).confinement is None


def ignores_what_is_outside(net):
    x, mask = torch.randn(3, 2, 9).double(), torch.arange(9)[None, None] < torch.tensor([9, 6, 1])[:, None, None]
    other = torch.where(mask, x, torch.randn(3, 2, 9).double())
    torch.testing.assert_close(net(x, mask=mask), net(other, mask=mask), rtol=0, atol=1e-12)
    torch.testing.assert_close(net(x[1:2, :, :6]), net(x, mask=mask)[1:2], rtol=0, atol=1e-12)
    torch.testing.assert_close(net(x[:1]), net(x, mask=mask)[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("group_norm", [False, True])
def test_masks(group_norm, monkeypatch):
    torch.manual_seed(0)
    net = EnergyConv((2, 9), channels=(8, 8, 8), group_norm=group_norm).double()
    ignores_what_is_outside(net)
    # Mutant: maps are not hidden after each layer.
    monkeypatch.setattr("genmodels.nn.energy_nets.hide", lambda x, mask: x)
    with pytest.raises(AssertionError):
        ignores_what_is_outside(net)


def test_any_size():
    net = EnergyConv((1, 8, 8), channels=(4, 4))
    assert net(torch.zeros(2, 1, 13, 7)).shape == (2,)


def test_spectral_norm():
    net = EnergyConv((1, 8, 8), channels=(4, 4), spectral_norm=True)
    for _ in range(30):
        net(torch.zeros(1, 1, 8, 8))
    assert float(torch.linalg.matrix_norm(net.body[-1][-1].weight, 2).detach()) == pytest.approx(1, abs=1e-4)
    # The backward pass would read the weights again, and reading moves them.
    with pytest.raises(InputError, match="spectral_norm = true does not go with checkpointing = true"):
        EnergyConv((1, 8, 8), spectral_norm=True, checkpointing=True)


def test_unet_forms():
    x = torch.randn(2, 1, 4, 6)
    for form, expected in (("residual", 0.5 * x.square().flatten(1).sum(1)), ("product", torch.zeros(2))):
        net = UNetEnergy((1, 4, 6), channels=4, form=form, confinement=False)  # f is zero at the start
        torch.testing.assert_close(net(x), expected)
    net = UNetEnergy((1, 8), num_classes=3, channels=4)
    for p in net.parameters():
        p.data += 0.1 * torch.randn(p.shape)
    a, b = (net(torch.ones(1, 1, 8), torch.tensor([label])) for label in (0, 2))
    assert (a - b).abs() > 1e-6
    mask = torch.arange(8)[None, None] < 5
    torch.testing.assert_close(net(torch.ones(1, 1, 8), mask=mask), net(torch.ones(1, 1, 8) + 3.0 * ~mask, mask=mask))


def test_the_gain_of_the_input_is_that_of_the_first_layer_alone():
    nets = []
    for gain in (1.0, 4.0):
        torch.manual_seed(0)
        nets.append(EnergyMLP((2,), hidden=(8, 8), input_gain=gain))
    first = [id(p) for p in nets[1].body[1].parameters()]
    for plain, wide in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(wide, plain * (4 if id(wide) in first else 1), rtol=0, atol=0)


def test_errors():
    with pytest.raises(ValueError, match="twice differentiable one, softplus, silu, tanh"):
        EnergyMLP((2,), activation="relu")
    with pytest.raises(ValueError, match="widths of at least one layer"):
        EnergyMLP((2,), hidden=())
    with pytest.raises(ValueError, match="channels of at least one layer"):
        EnergyConv((1, 4, 4), channels=())
    with pytest.raises(ValueError, match=r"\(C, T\) or \(C, H, W\)"):
        EnergyConv((4,))
    with pytest.raises(ValueError, match="built for events of shape"):
        EnergyMLP((2,))(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="built for 1 channels"):
        EnergyConv((1, 4, 4))(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="without a condition"):
        EnergyMLP((2,))(torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(ValueError, match="a mask is bool"):
        EnergyConv((1, 4, 4))(torch.zeros(1, 1, 4, 4), mask=torch.ones(1, 1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="the spread of the confinement must be a positive"):
        Confinement(0.0)
    with pytest.raises(ValueError, match="form must be one of residual, product, got 'sum'"):
        UNetEnergy((1, 4, 4), form="sum")
    with pytest.raises(ValueError, match="heads=8 is for an attention block: leave it out"):
        UNetEnergy((1, 4, 4), heads=8)
    with pytest.raises(ValueError, match=r"vectors \(D,\)"):
        DeepKernelEnergy((1, 4, 4))
    for options, words in (({"depth": 0}, "depth must be at least 1"), ({"scales": []}, "at least one scale"),
                           ({"scales": [1.0, 0.0]}, "must be positive"), ({"ridge": -1.0}, "must be positive")):
        with pytest.raises(ValueError, match=words):
            DeepKernelEnergy((4,), **options)

def test_the_deep_kernel_keeps_its_digits_where_features_lie_far_out():
    torch.manual_seed(0)
    net = DeepKernelEnergy((4,), inducing=50, hidden=8)
    net.alpha.normal_()
    x, v = torch.randn(64, 4), torch.randn(64, 4)
    with torch.no_grad():
        net.skip.weight.normal_(std=0.3)
        truth = [part.detach() for part in (net.double()(x.double()), *net.kernel_jet(x.double(), v.double()))]
        net.float()
        bias = [module for module in net.features.modules() if hasattr(module, "bias")][-1].bias
        bias += 3e3  # a shift of all features, to which distances are blind
        found = [net(x), *net.kernel_jet(x, v)]
    for one, true in zip(found, truth, strict=True):
        assert (one - true).abs().max() < 2e-2 * (1 + true.abs().max()), (one - true).abs().max()
