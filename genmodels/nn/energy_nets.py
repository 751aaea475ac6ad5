"""Networks whose output is one number per example, smooth enough for its second derivatives."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.errors import InputError
from genmodels.nn.blocks import CONVOLUTION, hide
from genmodels.nn.jet import Jet, has_jet, propagate
from genmodels.nn.norm import GroupNorm
from genmodels.nn.smooth import smooth_activation


class Confinement(nn.Module):
    """A learned bowl under an energy: whatever the network does far away, exp(-E) keeps a finite integral.

        E_0(x) = 1/2 |x|^2 / tau^2,   tau > 0 learned

    Arguments:
        spread: tau at the start.

    Shapes: `x (B, *event)` to `(B,)`.

    Example:
        >>> Confinement(2.0)(torch.tensor([[2.0, 4.0]]))
        tensor([2.5000], grad_fn=<MulBackward0>)
    """

    def __init__(self, spread: float = 1.0):
        super().__init__()
        if not 0 < spread < math.inf:
            raise InputError(f"the spread of the confinement must be positive and finite, got {spread}")
        self.log_spread = nn.Parameter(torch.tensor(math.log(spread)))

    @property
    def spread(self) -> Tensor:
        """tau, the standard deviation of exp(-E_0)."""
        return self.log_spread.exp()

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x.square().flatten(1).sum(1) * torch.exp(-2 * self.log_spread)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(E_0, v . grad E_0, v^T (Hess E_0) v), each (B,)."""
        steepness = torch.exp(-2 * self.log_spread)
        parts = 0.5 * x.square(), x * v, v.square()
        return tuple(part.flatten(1).sum(1) * steepness for part in parts)


class EnergyMLP(nn.Module):
    """A perceptron from an event of any shape to its energy.

        h_1 = act(W_1 x + b_1),   h_{i+1} = act(W_{i+1} h_i + b_{i+1}),   E = w . h + b + 1/2 |x|^2/tau^2

    Arguments:
        event_shape: any shape; the event is flattened.
        hidden: widths of the hidden layers.
        activation: `softplus`, `silu` or `tanh`.
        confinement: whether the quadratic term is there; without it exp(-E) may have no finite integral.
        spread: tau at the start.
        input_gain: factor on the first layer at the start; more than 1 sees detail much finer than the spread of the
            data, which training alone is slow to find.

    Shapes: `x (B, *event)` to `(B,)`.
    Errors: InputError for an activation without second derivative; ValueError for another event shape or a condition.

    Example:
        >>> EnergyMLP((2,), hidden=(16, 16))(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        *,
        hidden: tuple[int, ...] | list[int] = (300, 300),
        activation: Literal["softplus", "silu", "tanh"] = "softplus",
        confinement: bool = True,
        spread: float = 1.0,
        input_gain: float = 1.0,
    ):
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise InputError(f"hidden = {list(hidden)} must list the widths of at least one layer")
        if input_gain <= 0:
            raise InputError(f"input_gain must be positive, got {input_gain}")
        self.event_shape = tuple(event_shape)
        widths = [math.prod(event_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in zip(widths[:-1], widths[1:], strict=True):
            layers += [nn.Linear(before, after), smooth_activation(activation)]
        with torch.no_grad():
            for parameter in layers[1].parameters():
                parameter *= input_gain
        self.body = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.confinement = Confinement(spread) if confinement else None

    def forward(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        _check_event(self, x, cond)
        energy = self.body(x).squeeze(1)
        return energy if self.confinement is None else energy + self.confinement(x)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(E, v . grad E, v^T (Hess E) v), each (B,), in about three forward passes."""
        _check_event(self, x, None)
        return _jet(self.body, self.confinement, x, v)


class EnergyConv(nn.Module):
    """A convolutional network from an image or a sequence to its energy, for any size.

        h_1 = act(norm(conv(x))),   h_{i+1} = act(norm(conv(h_i) at every second position))
        E = w . mean over positions of h + b + 1/2 |x|^2/tau^2

    Arguments:
        event_shape: (C, H, W) or (C, T); other sizes may be given to `forward`, the channels are fixed.
        channels: channels of the convolutions: the first keeps the positions, every further one halves them.
        activation: `silu`, `softplus` or `tanh`.
        group_norm: whether the maps are normalised by groups of channels; second-order jets then fall back to autograd.
        spectral_norm: whether the largest singular value of every weight is kept at one.
        confinement: whether the quadratic term is there.
        spread: tau at the start.

    Shapes: `x (B, *event)` to `(B,)`; `mask (B, 1, T)` bool for sequences, True = valid: the energy does not depend on
    what lies outside.
    Errors: InputError for an activation without second derivative; ValueError for another kind of event or a condition.

    Example:
        >>> EnergyConv((1, 8, 8), channels=(8, 16))(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3])
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        *,
        channels: tuple[int, ...] | list[int] = (64, 64, 128),
        activation: Literal["silu", "softplus", "tanh"] = "silu",
        group_norm: bool = False,
        spectral_norm: bool = False,
        confinement: bool = True,
        spread: float = 1.0,
    ):
        super().__init__()
        in_channels, *space = event_shape
        if len(space) not in CONVOLUTION:
            raise InputError(f"a convolutional energy takes events (C, T) or (C, H, W), got {tuple(event_shape)}")
        if not channels or min(channels) < 1:
            raise InputError(f"channels = {list(channels)} must list the channels of at least one layer")
        self.event_shape, self.dims = tuple(event_shape), len(space)
        widths = [in_channels, *channels]
        self.strides = [1] + [2] * (len(channels) - 1)
        stages = []
        for before, after, stride in zip(widths[:-1], widths[1:], self.strides, strict=True):
            convolution = CONVOLUTION[self.dims](before, after, 3, stride=stride, padding=1)
            if spectral_norm:
                nn.utils.parametrizations.spectral_norm(convolution)
            norm = [GroupNorm(after)] if group_norm else []
            stages.append(nn.Sequential(convolution, *norm, smooth_activation(activation)))
        pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}[self.dims](1)
        head = nn.Linear(widths[-1], 1)
        if spectral_norm:
            nn.utils.parametrizations.spectral_norm(head)
        self.body = nn.Sequential(*stages, nn.Sequential(pool, nn.Flatten(), head))
        self.confinement = Confinement(spread) if confinement else None

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        _check_channels(self, x, cond)
        x, energy = (x, self.body(x)) if mask is None else self._masked(x, mask)
        energy = energy.squeeze(1)
        return energy if self.confinement is None else energy + self.confinement(x)

    def jet(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(E, v . grad E, v^T (Hess E) v), each (B,), in about three forward passes."""
        _check_channels(self, x, None)
        return _jet(self.body, self.confinement, x, v)

    @property
    def has_jet(self) -> bool:
        """Whether `jet` works: not with group normalisation."""
        return has_jet(self.body)

    def _masked(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.dims != 1 or mask.dtype != torch.bool or mask.shape != (len(x), 1, x.shape[-1]):
            raise ValueError(f"a mask is bool (B, 1, T), for sequences, got {mask.dtype} of shape {tuple(mask.shape)}")
        h = x = hide(x, mask)
        *stages, (_, flatten, head) = self.body
        for stride, stage in zip(self.strides, stages, strict=True):
            mask = mask[..., ::stride]
            for layer in stage:
                h = layer(h, mask=mask) if isinstance(layer, GroupNorm) else layer(h)
                h = hide(h, mask)
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        return x, head(flatten(h.sum(-1, keepdim=True) / count))


def _jet(body: nn.Module, confinement: Confinement | None, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    triple = tuple(part.squeeze(1) for part in propagate(body, Jet.line(x, v)).triple())
    if confinement is None:
        return triple
    return tuple(a + b for a, b in zip(triple, confinement.jet(x, v), strict=True))


def _check_event(network: nn.Module, x: Tensor, cond: Tensor | None) -> None:
    if tuple(x.shape[1:]) != network.event_shape:
        raise ValueError(f"the energy was built for events of shape {network.event_shape}, got {tuple(x.shape[1:])}")
    _refuse(cond)


def _check_channels(network: nn.Module, x: Tensor, cond: Tensor | None) -> None:
    if x.dim() != network.dims + 2 or x.shape[1] != network.event_shape[0]:
        raise ValueError(
            f"the energy was built for {network.event_shape[0]} channels and {network.dims} spatial dimensions, got "
            f"events of shape {tuple(x.shape[1:])}"
        )
    _refuse(cond)


def _refuse(cond: Tensor | None) -> None:
    if cond is not None:
        raise ValueError("this energy was built without a condition: leave cond out")
