"""Second-order directional derivatives of a network, carried along with its values.

Along the line x + t v every layer turns the triple (a, a', a'') of value, first and second derivative in t at t = 0
into the next one:

    linear maps      (W a + b, W a', W a'')
    activations      (f(a), f'(a) a', f''(a) a'^2 + f'(a) a'')

so about three forward passes give v^T grad E and v^T (Hess E) v, and training needs one ordinary backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv1d, conv2d, linear, softplus

from genmodels.core.errors import InputError


class Jet(NamedTuple):
    """Value and derivatives along a line, concatenated so that linear maps act on one batch.

    Shapes: `stack (2B, ...)` holds (a, a') and a'' = 0; `stack (3B, ...)` holds (a, a', a''). `batch` is B.
    """

    stack: Tensor
    batch: int

    @classmethod
    def line(cls, x: Tensor, v: Tensor) -> Jet:
        """The jet of x + t v."""
        return cls(torch.cat([x, v]), len(x))

    def parts(self) -> tuple[Tensor, ...]:
        """(a, a') or (a, a', a'')."""
        return self.stack.split(self.batch)

    def triple(self) -> tuple[Tensor, Tensor, Tensor]:
        """(a, a', a''), each (B, ...)."""
        parts = self.parts()
        return parts if len(parts) == 3 else (*parts, torch.zeros_like(parts[0]))


def propagate(layer: nn.Module, jet: Jet) -> Jet:
    """The jet after a layer, or after a `Sequential` of them.

    Errors: NotImplementedError for a layer without a rule (see `has_jet`).

    Example:
        >>> x, v = torch.tensor([[0.5]]), torch.tensor([[2.0]])
        >>> [round(float(part), 4) for part in propagate(nn.Tanh(), Jet.line(x, v)).triple()]
        [0.4621, 1.5729, -2.9074]
    """
    if _is_chain(layer):
        for part in layer:
            jet = propagate(part, jet)
        return jet
    rule = _rule(layer)
    if rule is None:
        raise NotImplementedError(f"no second-order directional derivative is known for {type(layer).__name__}")
    return Jet(rule(layer, jet.stack, jet.batch), jet.batch)


def has_jet(layer: nn.Module) -> bool:
    """Whether `propagate` has rules for the layer and all layers inside it.

    Example:
        >>> has_jet(nn.Sequential(nn.Linear(2, 3), nn.SiLU())), has_jet(nn.Sequential(nn.GroupNorm(1, 2)))
        (True, False)
    """
    if _is_chain(layer):
        return all(has_jet(part) for part in layer)
    return _rule(layer) is not None


class _AddBias(torch.autograd.Function):
    """Adds a bias (n, 1, ...) to the values but not to the derivatives, in place, without a copy of the stack."""

    @staticmethod
    def forward(ctx, stack, bias, batch):
        ctx.mark_dirty(stack)
        ctx.batch, ctx.shape = batch, bias.shape
        stack[:batch] += bias
        return stack

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[: ctx.batch].sum_to_size(ctx.shape), None


def _linear(layer: nn.Linear, stack: Tensor, batch: int) -> Tensor:
    y = linear(stack, layer.weight)
    return y if layer.bias is None else _AddBias.apply(y, layer.bias, batch)


def _convolution(layer: nn.Conv1d | nn.Conv2d, stack: Tensor, batch: int) -> Tensor:
    convolve = conv1d if isinstance(layer, nn.Conv1d) else conv2d
    y = convolve(
        stack, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    if layer.bias is None:
        return y
    return _AddBias.apply(y, layer.bias.view(-1, *(1,) * (y.dim() - 2)), batch)


def _without_bias(layer: nn.Module, stack: Tensor, batch: int) -> Tensor:
    return layer(stack)


class _ActivationJet(torch.autograd.Function):
    """(f, f' a', f'' a'^2 + f' a'') of a stack, with an analytical derivative: few passes, only the input is stored.

    Source: the chain rule of Faa di Bruno at second order.
    """

    @staticmethod
    def forward(ctx, stack, batch, derivatives):
        ctx.save_for_backward(stack)
        ctx.batch, ctx.derivatives = batch, derivatives
        a, first, *second = stack.split(batch)
        value, d1, d2, _ = derivatives(a, value=True, third=False)
        out = stack.new_empty(3 * batch, *stack.shape[1:])
        out[:batch] = value
        torch.mul(d1, first, out=out[batch : 2 * batch])
        curvature = torch.mul(d2.mul_(first), first, out=out[2 * batch :])
        if second:
            curvature.addcmul_(d1, second[0])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (stack,) = ctx.saved_tensors
        batch = ctx.batch
        a, first, *second = stack.split(batch)
        g0, g1, g2 = grad.split(batch)
        _, d1, d2, d3 = ctx.derivatives(a, value=False, third=True)
        out = torch.empty_like(stack)
        # d/da = g0 f' + g1 f'' a' + g2 (f''' a'^2 + f'' a''),  d/da' = g1 f' + 2 g2 f'' a',  d/da'' = g2 f'
        g2_first = g2 * first
        of_third = d3.mul_(first).mul_(g2_first)  # g2 f''' a'^2
        of_second = g1 * first  # the factor of f''
        if second:
            of_second.addcmul_(g2, second[0])
            torch.mul(g2, d1, out=out[2 * batch :])
        torch.addcmul(of_third, d2, of_second, out=out[:batch]).addcmul_(d1, g0)
        torch.mul(g1, d1, out=out[batch : 2 * batch]).addcmul_(d2, g2_first, value=2)
        return out, None, None


def _softplus(a: Tensor, *, value: bool, third: bool):
    """f = log(1 + e^a), f' = s, f'' = s (1 - s), f''' = f'' (1 - 2 s), with s the logistic function."""
    s = torch.sigmoid(a)
    d2 = torch.addcmul(s, s, s, value=-1)
    d3 = torch.addcmul(d2, d2, s, value=-2) if third else None
    return softplus(a) if value else None, s, d2, d3


def _silu(a: Tensor, *, value: bool, third: bool):
    """f = a s, f' = s + f (1 - s), f'' = p (2 + a (1 - 2 s)), f''' = p (3 (1 - 2 s) + a (1 - 6 p)), p = s (1 - s)."""
    s = torch.sigmoid(a)
    f = a * s
    d1 = torch.addcmul(s + f, f, s, value=-1)
    p = torch.addcmul(s, s, s, value=-1)
    d3 = torch.addcmul(a.add(3), a, p, value=-6).sub_(s, alpha=6).mul_(p) if third else None
    return f if value else None, d1, torch.addcmul(a, a, s, value=-2).add_(2).mul_(p), d3


def _tanh(a: Tensor, *, value: bool, third: bool):
    """f = t, f' = 1 - t^2, f'' = -2 t f', f''' = f' (6 t^2 - 2)."""
    t = torch.tanh(a)
    d1 = 1 - t * t
    d2 = (t * d1).mul_(-2)
    d3 = (6 * t * t - 2).mul_(d1) if third else None
    return t if value else None, d1, d2, d3


_RULES: dict[type[nn.Module], Callable[[nn.Module, Tensor, int], Tensor]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.AvgPool1d: _without_bias,
    nn.AvgPool2d: _without_bias,
    nn.AdaptiveAvgPool1d: _without_bias,
    nn.AdaptiveAvgPool2d: _without_bias,
    nn.Flatten: _without_bias,
    nn.Identity: _without_bias,
    nn.Softplus: lambda layer, stack, batch: _ActivationJet.apply(stack, batch, _softplus),
    nn.SiLU: lambda layer, stack, batch: _ActivationJet.apply(stack, batch, _silu),
    nn.Tanh: lambda layer, stack, batch: _ActivationJet.apply(stack, batch, _tanh),
}


def _rule(layer: nn.Module) -> Callable[[nn.Module, Tensor, int], Tensor] | None:
    if isinstance(layer, nn.Softplus) and (layer.beta != 1 or layer.threshold < 20):
        return None
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and layer.padding_mode != "zeros":
        return None
    # A parametrised layer (spectral norm) is of a subclass with the same name before "Parametrized".
    return next((rule for kind, rule in _RULES.items() if isinstance(layer, kind) and _is_plain(layer, kind)), None)


def _is_chain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Sequential) and _is_plain(layer, nn.Sequential)


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the layer computes what `kind` computes, at most with a parametrised weight."""
    return type(layer).forward is kind.forward and not layer._forward_hooks and not layer._forward_pre_hooks


#: Activations for energies: twice differentiable everywhere.
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
    """Refuses layers that mix the examples of a batch, and dropout.

    Otherwise the gradient of the summed energy would not be the gradient of each example's energy, or would be random.

    Errors: InputError naming the layer.

    Example:
        >>> require_independent(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: layer 1 (BatchNorm1d) mixes the examples of a batch: use GroupNorm or none
    """
    for name, layer in network.named_modules():
        where = f"layer {name or 'itself'} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise InputError(f"{where} mixes the examples of a batch: use GroupNorm or none")
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise InputError(f"{where} makes the score random: set its probability to 0")


def require_smooth(network: nn.Module) -> None:
    """Refuses layers without a second derivative, by name.

    With ReLU or max-pooling the Hessian of an energy is zero almost everywhere, so that a score-matching loss reduces
    to |score|^2.

    Errors: InputError naming the layer.

    Example:
        >>> require_smooth(nn.Sequential(nn.Linear(2, 8), nn.ReLU()))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: layer 1 (ReLU) is not twice differentiable: use softplus, silu, tanh
    """
    for name, layer in network.named_modules():
        functions = [f.__name__ for value in vars(layer).values() for f in _KINKED_FUNCTIONS if value is f]
        functions += [layer.kinked] if hasattr(layer, "kinked") else []  # networks that call functions say so
        if isinstance(layer, _KINKED) or functions:
            what = functions[0] if functions else type(layer).__name__
            raise InputError(f"layer {name or 'itself'} ({what}) is not twice differentiable: use {', '.join(SMOOTH)}")
