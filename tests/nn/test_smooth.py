"""Networks with kinks, dropout or batch statistics are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from genmodels.nn.perceptron import MLP
from genmodels.nn.smooth import SMOOTH, require_independent, require_smooth, smooth_activation
from genmodels.nn.unet import UNet


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.LeakyReLU(), nn.PReLU(), nn.ELU(), nn.SELU(), nn.Hardtanh(),
                                   nn.ReLU6(), nn.Hardswish(), nn.MaxPool2d(2), nn.AdaptiveMaxPool1d(1)])  # fmt: skip
def test_kinks_are_refused(layer):
    with pytest.raises(ValueError, match=rf"layer 1\.0 \({type(layer).__name__}\) is not twice differentiable"):
        require_smooth(nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer)))


def test_functions_with_kinks_are_refused():
    with pytest.raises(ValueError, match=r"layer itself \(relu\) is not twice differentiable"):
        require_smooth(MLP(2, 2, activation="relu"))
    require_smooth(MLP(2, 2, activation="silu"))


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
        require_smooth(network)
        require_independent(network)


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
