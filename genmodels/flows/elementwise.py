"""Maps of one number to one number, with parameters from a network: shift, scale and shift; and bounds of scales."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn


def bounded(h: Tensor, limit: float) -> Tensor:
    """A smooth bound on both sides, with slope one at zero: limit tanh(h / limit).

    Example:
        >>> bounded(torch.tensor([-1e9, 0.0, 1.0]), 5.0)
        tensor([-5.0000,  0.0000,  0.9869])
    """
    return torch.tanh(h / limit) * limit


def unbounded(h: Tensor, limit: float) -> Tensor:
    """The inverse of `bounded`; values beyond 0.999 limit are taken as 0.999 limit, where the slope is still 0.002.

    Example:
        >>> unbounded(bounded(torch.tensor([-3.0, 0.0, 1.0]), 10.0), 10.0)
        tensor([-3.,  0.,  1.])
    """
    return torch.atanh((h / limit).clamp(-0.999, 0.999)) * limit


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Values (..., C) in a shape that broadcasts with `like (B, C, *space)`."""
    return values if like.dim() == 2 else values.reshape(*values.shape, *[1] * (like.dim() - 2))


class ElementTransform(nn.Module):
    """An increasing map of every number by itself, its parameters given by a network.

        z = f(x; params),    log_derivative = log df/dx

    Attributes:
        params_per_dim: P, how many parameters each number takes.
        channels: how many channels the transform is built for; None when it has nothing of its own to learn.
        exact_inverse: whether the inverse is a formula (and not an iteration).
        inverse_cost: `same` or `iterative`.
        constant_logdet: whether the log-derivative does not depend on x and params.

    Shapes: `x (B, C, *space)`, `params (B, P, C, *space)` of the dtype of x (float32 or wider); both results are like
    x, the log-derivative is that of the direction just evaluated and is not summed.
    """

    params_per_dim: int
    channels: int | None = None
    exact_inverse: bool = True
    inverse_cost: str = "same"
    constant_logdet: bool = False

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) and log df/dx of each number."""
        raise NotImplementedError

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The x with f(x) = z, and log dx/dz of each number."""
        raise NotImplementedError

    def start(self, channels: int) -> Tensor:
        """The parameters (P, C) with which training starts."""
        return torch.zeros(self.params_per_dim, channels)


class Additive(ElementTransform):
    """A shift: volume is kept.

        z = x + t

    Source: Dinh et al. 2014 (NICE), section 3.2.

    Example:
        >>> Additive()(torch.ones(1, 1), torch.full((1, 1, 1), 2.0))
        (tensor([[3.]]), tensor([[0.]]))
    """

    params_per_dim = 1
    constant_logdet = True

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        return x + params.squeeze(1), torch.zeros_like(x)

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        return z - params.squeeze(1), torch.zeros_like(z)


class TanhScale(nn.Module):
    """The log-scale of RealNVP with learned range and centre, |h| < 10.

        h = a tanh(s) + b,    a = 5 tanh(a_raw / 5), b = 5 tanh(b_raw / 5),    at first a_raw = 1, b_raw = 0

    Arguments:
        channels: number of channels C; a and b are one number for each.

    Source: Dinh et al. 2017 (RealNVP), section 3.7.

    Example:
        >>> TanhScale(1)(torch.tensor([[0.0], [9.0]])).detach()
        tensor([[0.0000],
                [0.9869]])
    """

    def __init__(self, channels: int):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, channels))  # a_raw, b_raw

    def forward(self, s: Tensor) -> Tensor:
        a, b = per_channel(bounded(self.raw, 5.0), s).unbind()
        # a tanh(s) + b, by tanh(s) = 2 sigmoid(2 s) - 1: on a CPU torch's sigmoid takes a quarter of its tanh's time.
        return torch.addcmul(b - a, a, torch.sigmoid(s + s), value=2)


class TiedScale(nn.Module):
    """A log-scale whose learned range does not change its slope at zero, |h| < 10.

        h = e^f tanh(s e^-f),    f = c tanh(f_raw / c), c = log 10,    at first f_raw = 0

    Arguments:
        channels: number of channels C; f is one number for each.

    Example:
        >>> TiedScale(1)(torch.tensor([[0.0], [1.0]])).detach()
        tensor([[0.0000],
                [0.7616]])
    """

    def __init__(self, channels: int):
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(channels))

    def forward(self, s: Tensor) -> Tensor:
        limit = per_channel(bounded(self.raw, math.log(10)).exp(), s)
        return limit * torch.tanh(s / limit)


class SigmoidScale(nn.Module):
    """The scale of Glow with a floor, so that sampling cannot explode: at first 0.8809.

        e^h = 0.001 + 0.999 sigmoid(s + 2)

    Arguments:
        channels: number of channels; nothing is learned here.

    Source: Kingma and Dhariwal 2018 (Glow), the authors' code; the floor is ours.

    Example:
        >>> SigmoidScale(1)(torch.tensor([[0.0]]))
        tensor([[-0.1268]])
    """

    def __init__(self, channels: int):
        super().__init__()

    def forward(self, s: Tensor) -> Tensor:
        return torch.log(0.001 + 0.999 * torch.sigmoid(s + 2))


SCALES = {"tanh": TanhScale, "sigmoid": SigmoidScale, "tied": TiedScale}


class Affine(ElementTransform):
    """A scale and a shift.

        z = e^h x + t,    log dz/dx = h(s)

    Arguments:
        channels: number of channels that it changes.
        scale: how h follows from the network's s: `tanh` (RealNVP), `sigmoid` (Glow) or `tied`.

    Shapes: `params (B, 2, C, *space)`, s before t.
    Errors: ValueError for an unknown scale.
    Source: Dinh et al. 2017 (RealNVP), equations 4 and 5.

    Example:
        >>> Affine(1)(torch.ones(1, 1), torch.tensor([[[0.0], [2.0]]]))[0].detach()
        tensor([[3.]])
    """

    params_per_dim = 2

    def __init__(self, channels: int, *, scale: Literal["tanh", "sigmoid", "tied"] = "tanh"):
        super().__init__()
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
        self.channels, self.scale = channels, scale
        self.log_scale = SCALES[scale](channels)

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        s, t = params.unbind(1)
        h = self.log_scale(s)
        return torch.addcmul(t, torch.exp(h), x), h

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        s, t = params.unbind(1)
        h = -self.log_scale(s)
        return (z - t) * torch.exp(h), h


class MeanScale(ElementTransform):
    """A number standardised by a predicted mean and a predicted scale.

        z = (x - m) e^-alpha,    alpha = 5 tanh(alpha_raw / 5),    log dz/dx = -alpha

    Shapes: `params (B, 2, C, *space)`, m before alpha_raw.
    Source: Papamakarios et al. 2017 (MAF), equation 4.

    Example:
        >>> MeanScale()(torch.ones(1, 1), torch.tensor([[[3.0], [0.0]]]))[0]
        tensor([[-2.]])
    """

    params_per_dim = 2

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        m, alpha = params.unbind(1)
        h = -bounded(alpha, 5.0)
        return (x - m) * torch.exp(h), h

    def inverse(self, z: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        m, alpha = params.unbind(1)
        h = bounded(alpha, 5.0)
        return torch.addcmul(m, torch.exp(h), z), h
