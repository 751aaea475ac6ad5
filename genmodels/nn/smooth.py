"""Activations with a second derivative, and the check that a network has no others."""

from __future__ import annotations

import torch
from torch import nn

from genmodels.errors import InputError

#: What an energy may be made of: twice differentiable everywhere.
SMOOTH: dict[str, type[nn.Module]] = {"softplus": nn.Softplus, "silu": nn.SiLU, "tanh": nn.Tanh}

#: Not twice differentiable. The first group has second derivative zero almost everywhere, the second a jump in it.
_KINKED = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Threshold, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish,
    nn.Hardshrink, nn.Softshrink, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
    nn.ELU, nn.CELU, nn.SELU, nn.Softsign,
)  # fmt: skip
_KINKED_FUNCTIONS = {
    getattr(home, name)
    for home in (torch, nn.functional)
    for name in ("relu", "relu6", "leaky_relu", "hardtanh", "hardswish", "elu", "celu", "selu", "rrelu", "softsign")
    if hasattr(home, name)
}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def smooth_activation(name: str) -> nn.Module:
    """The activation of that name.

    Errors: InputError for one that is not twice differentiable, or unknown.

    Example:
        >>> smooth_activation("softplus")
        Softplus(beta=1.0, threshold=20.0)
    """
    if name not in SMOOTH:
        raise InputError(f"activation = {name!r}: an energy needs a twice differentiable one, {', '.join(SMOOTH)}")
    return SMOOTH[name]()


def require_independent(network: nn.Module) -> None:
    """Refuses what makes the output of an example depend on other examples, or on chance.

    A gradient of the summed energy is a gradient of each example's energy only where the examples do not mix; a score
    is a function of x only where nothing is dropped.

    Errors: InputError naming the layer.

    Example:
        >>> require_independent(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        Traceback (most recent call last):
        ...
        genmodels.errors.InputError: layer 1 (BatchNorm1d) mixes the examples of a batch: use GroupNorm or none
    """
    for name, layer in network.named_modules():
        where = f"layer {name or 'itself'} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise InputError(f"{where} mixes the examples of a batch: use GroupNorm or none")
        if isinstance(layer, _DROPOUT) and layer.p > 0:
            raise InputError(f"{where} makes the score random: set its probability to 0")


def require_smooth(network: nn.Module) -> None:
    """Refuses layers without a second derivative, by name.

    With ReLU or max-pooling the Hessian of an energy is zero almost everywhere: the trace in a score-matching loss
    vanishes without a word, and what is minimised is |score|^2 alone.

    Errors: InputError naming the layer.

    Example:
        >>> require_smooth(nn.Sequential(nn.Linear(2, 8), nn.ReLU()))
        Traceback (most recent call last):
        ...
        genmodels.errors.InputError: layer 1 (ReLU) is not twice differentiable: use softplus, silu, tanh
    """
    for name, layer in network.named_modules():
        functions = [value for value in vars(layer).values() if callable(value) and _is_kinked_function(value)]
        if isinstance(layer, _KINKED) or functions:
            what = functions[0].__name__ if functions else type(layer).__name__
            raise InputError(f"layer {name or 'itself'} ({what}) is not twice differentiable: use {', '.join(SMOOTH)}")


def _is_kinked_function(value) -> bool:
    try:
        return value in _KINKED_FUNCTIONS
    except TypeError:  # what has no hash is no function of torch
        return False
