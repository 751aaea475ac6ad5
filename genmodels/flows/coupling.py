"""Coupling and masked autoregressive layers, and the splits of an event for couplings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.errors import an
from genmodels.core.tensors import event_sum, hide
from genmodels.flows.bijection import Bijection, Shape
from genmodels.flows.elementwise import ElementTransform
from genmodels.nn.perceptron import MADE


class ChannelSplit:
    """Splits the channels of an image or a sequence, or the dimensions of a vector, into two parts.

    Arguments:
        channels: number of channels C, at least 2.
        swap: keep the last floor(C/2) channels instead of the first ceil(C/2).

    Attributes:
        kept, changed: numbers of channels that are kept and changed.

    Errors: ValueError for fewer than two channels.

    Example:
        >>> split = ChannelSplit(5, swap=True)
        >>> split.kept, split.changed, split.take(torch.arange(5)[None])
        (2, 3, (tensor([[3, 4]]), tensor([[0, 1, 2]]), None))
    """

    def __init__(self, channels: int, *, swap: bool = False):
        if channels < 2:
            raise ValueError(f"ChannelSplit: a coupling needs at least 2 channels or dimensions, got {channels}")
        self.channels, self.swap = channels, swap
        self.first = (channels + 1) // 2
        self.kept = channels - self.first if swap else self.first
        self.changed = channels - self.kept

    def expected(self, shape: Shape) -> str | None:
        """None if an event of this shape can be split, else the expected shape."""
        return None if 1 <= len(shape) <= 3 and shape[0] == self.channels else f"({self.channels}, ...)"

    def take(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        """The input of the network and the part that is changed, both views."""
        first, second = x.split_with_sizes((self.first, self.channels - self.first), dim=1)
        return (second, first, None) if self.swap else (first, second, None)

    def put(self, seen: Tensor, changed: Tensor, log_derivative: Tensor, squares: None) -> tuple[Tensor, Tensor]:
        """The event joined from both parts, and the log-derivative of what changed."""
        return torch.cat((changed, seen) if self.swap else (seen, changed), dim=1), log_derivative


class Checkerboard:
    """Splits the pixels of an image like the squares of a chessboard, all channels alike.

        m[i, j] = (i + j + parity) mod 2;    m = 1 is kept

    The input of the network is m x.

    Arguments:
        channels: number of channels C.
        parity: 1 keeps the upper left pixel, 0 changes it.

    Attributes:
        kept, changed: both C.

    Errors: ValueError for no channels, or a parity other than 0 and 1.
    Source: Dinh et al. 2017 (RealNVP), section 3.4.

    Example:
        >>> Checkerboard(1, parity=1).squares(torch.zeros(1, 1, 2, 3)).long()
        tensor([[1, 0, 1],
                [0, 1, 0]])
    """

    def __init__(self, channels: int, *, parity: int = 0):
        if channels < 1 or parity not in (0, 1):
            raise ValueError(f"Checkerboard needs channels >= 1 and parity 0 or 1, got {channels} and {parity}")
        self.channels, self.parity = channels, parity
        self.kept = self.changed = channels

    def expected(self, shape: Shape) -> str | None:
        """None if an event of this shape can be split, else the expected shape."""
        fits = len(shape) == 3 and shape[0] == self.channels and shape[1:] != (1, 1)
        return None if fits else f"({self.channels}, H, W) with two pixels or more"

    def squares(self, x: Tensor) -> Tensor:
        """m, (H, W) bool: which pixels of x are kept."""
        rows = torch.arange(self.parity, x.shape[-2] + self.parity, device=x.device)
        return ((rows[:, None] + torch.arange(x.shape[-1], device=x.device)) % 2).bool()

    def take(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The input of the network, x (of which `put` takes the changed pixels), and m."""
        squares = self.squares(x)
        return hide(x, squares), x, squares

    def put(self, seen: Tensor, changed: Tensor, log_derivative: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """The event joined from both parts, and the log-derivative of what changed."""
        # `where` keeps every bit; with products -0 would become 0.
        return torch.where(squares, seen, changed), log_derivative.masked_fill(squares, 0)


class TokenSplit:
    """Splits the positions of a map into two maps of half the size: every other row, column or square.

    Arguments:
        channels: number of channels C.
        kind: `rows`, `columns` or `checkerboard`.
        parity: 0 keeps the half with the upper left position, 1 the other.

    Attributes:
        kept, changed: both C.

    Errors: ValueError for no channels, an unknown kind, or a parity other than 0 and 1.
    Source: Kolesnikov et al. 2024 (Jet), section 3.2.

    Example:
        >>> seen, changed, _ = TokenSplit(1, "checkerboard").take(torch.arange(8).view(1, 1, 2, 4))
        >>> seen.flatten(1), changed.flatten(1)
        (tensor([[0, 2, 5, 7]]), tensor([[1, 3, 4, 6]]))
    """

    def __init__(self, channels: int, kind: Literal["rows", "columns", "checkerboard"], *, parity: int = 0):
        if channels < 1 or kind not in ("rows", "columns", "checkerboard") or parity not in (0, 1):
            raise ValueError("TokenSplit needs channels >= 1, rows, columns or checkerboard, and parity 0 or 1, got "
                             f"{channels}, {kind!r} and {parity}")
        self.channels, self.kind, self.parity = channels, kind, parity
        self.kept = self.changed = channels
        self.axis = 2 if kind == "rows" else 3

    def expected(self, shape: Shape) -> str | None:
        """None if an event of this shape can be split, else the expected shape."""
        side = "H" if self.axis == 2 else "W"
        fits = len(shape) == 3 and shape[0] == self.channels and shape[self.axis - 1] % 2 == 0
        return None if fits else f"({self.channels}, H, W) with an even {side}"

    def take(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        """The input of the network and the part that is changed."""
        halves = self._turned(x.unflatten(self.axis, (-1, 2))).unbind(self.axis + 1)
        return halves[self.parity], halves[1 - self.parity], None

    def put(self, seen: Tensor, changed: Tensor, log_derivative: Tensor, squares: None) -> tuple[Tensor, Tensor]:
        """The event joined from both parts, and the log-derivative of what changed."""
        halves = (changed, seen) if self.parity else (seen, changed)
        return self._turned(torch.stack(halves, self.axis + 1)).flatten(self.axis, self.axis + 1), log_derivative

    def _turned(self, pairs: Tensor) -> Tensor:
        """For a checkerboard, the pairs of every other row exchanged; its own inverse."""
        if self.kind != "checkerboard":
            return pairs
        odd = (torch.arange(pairs.shape[2], device=pairs.device) % 2).bool()[:, None, None]
        return torch.where(odd, pairs.flip(-1), pairs)


class Coupling(Bijection):
    """Keeps one part of an event; transforms the other elementwise, with parameters that depend on the first.

        z1 = x1,    z2 = f(x2; net(x1, cond)),    log |det| = sum_changed log |df/dx2|

    Arguments:
        split: which part is kept, a `ChannelSplit`, a `Checkerboard` or a `TokenSplit`.
        transform: the elementwise map f.
        net: network from `split.kept` to `transform.params_per_dim * split.changed` channels, the first parameter of
            all channels first. Its output bias is set to `transform.start`, with most f the identity.

    Shapes: events `(C, ...)` for channels, `(C, H, W)` for a checkerboard; `mask (B, 1, T)`; `cond` as the network's.
    Errors: ValueError when network, transform and split do not fit one another, or an event does not fit the split.
    Source: Dinh et al. 2017 (RealNVP), section 3.2.

    Example:
        >>> from genmodels.flows.elementwise import Affine
        >>> from genmodels.nn.perceptron import MLP
        >>> split = ChannelSplit(3)
        >>> layer = Coupling(split, Affine(split.changed), MLP(split.kept, 2 * split.changed, hidden=8, depth=1))
        >>> z, logdet = layer(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> z.detach(), logdet.detach()
        (tensor([[1., 2., 3.]]), tensor([0.]))
    """

    strict_cond = True

    def __init__(self, split: ChannelSplit | Checkerboard | TokenSplit, transform: ElementTransform, net: nn.Module):
        super().__init__()
        if isinstance(transform, type):
            raise TypeError(f"Coupling takes a transform, got the class {transform.__name__}: call it")
        check_network(self, net, split.kept, transform.params_per_dim, split.changed, transform.channels)
        self.split, self.transform, self.net = split, transform, net
        self.uses_cond = net.uses_cond
        self.exact_inverse, self.inverse_cost = transform.exact_inverse, transform.inverse_cost
        self.constant_logdet = transform.constant_logdet
        net.set_output_bias(transform.start(split.changed).flatten())

    def out_shape(self, shape: Shape) -> Shape:
        expected = self.split.expected(shape)
        if expected is not None:
            raise self._misfit(expected, shape)
        return shape

    def _forward(self, x, cond, mask):
        return self._couple(self.transform, x, cond, mask)

    def _inverse(self, z, cond, mask):
        return self._couple(self.transform.inverse, z, cond, mask)

    def recompute(self, z, cond, mask):
        """See `genmodels.flows.composition.Recomputes`; the kept part is in z, so the network runs only once."""
        seen, z2, squares = self.split.take(z)
        params = self._params(seen, z, cond, mask)
        with torch.no_grad():
            x, _ = self.split.put(seen, self.transform.inverse(z2, params)[0], torch.zeros_like(z2), squares)
        x = hide(x, mask).requires_grad_()
        return x, *self._change(self.transform, self.split.take(x), params, mask)

    def _couple(self, change, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is not None and (mask.dim() != 3 or mask.shape[1] != 1):
            raise ValueError(f"Coupling takes masks of shape (B, 1, T), got {tuple(mask.shape)}")
        parts = self.split.take(x)
        return self._change(change, parts, self._params(parts[0], x, cond, mask), mask)

    def _params(self, seen: Tensor, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> Tensor:
        count = self.transform.params_per_dim
        params = outputs(self.net, seen, cond, mask, count * self.split.changed)
        return params.view(len(x), count, self.split.changed, *params.shape[2:])

    def _change(self, change, parts: tuple, params: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        seen, x2, squares = parts
        z2, log_derivative = change(x2, params)
        z, log_derivative = self.split.put(seen, z2, log_derivative, squares)
        return z, event_sum(log_derivative, mask)


def outputs(net: nn.Module, x: Tensor, cond: Tensor | None, mask: Tensor | None, channels: int) -> Tensor:
    """`net(x, cond, mask)` (B, channels, *space) in the precision of x, though the network may run in half precision.

    Events without a position have empty outputs: convolutions refuse them.

    Raises:
        ValueError: for an output of another shape, which would be broadcast.
    """
    shape = (len(x), channels, *x.shape[2:])
    if 0 in x.shape[2:]:
        return x.new_zeros(shape)
    y = net(x, cond, mask)
    if y.shape != shape:
        raise ValueError(f"{type(net).__name__} returned {tuple(y.shape)} for {tuple(x.shape)}, expected {shape}")
    return y.to(x.dtype)


#: Attributes that a network needs in addition to `net(x, cond, mask)`.
_OFFERS = ("in_channels", "out_channels", "uses_cond", "set_output_bias")


def check_network(
    layer: Bijection, net: nn.Module, in_channels: int, params_per_dim: int, changed: int, channels: int | None
) -> None:
    """Raise ValueError for a network, or a transform built for `channels`, that does not fit the changed channels.

    Raises:
        TypeError: for a network without the attributes of `genmodels.nn.condition.Net`.
    """
    name = type(layer).__name__
    missing = [offer for offer in _OFFERS if not hasattr(net, offer)]
    if missing:
        kind = f"the class {net.__name__}" if isinstance(net, type) else an(type(net).__name__)
        raise TypeError(f"{name} needs a network that offers {', '.join(_OFFERS)} (see genmodels.nn.condition.Net); "
                        f"{kind} has no {', '.join(missing)}")
    if channels not in (None, changed):
        raise ValueError(f"{name} changes {changed} channels, but its transform was built for {channels}")
    if net.in_channels != in_channels:
        raise ValueError(f"{name} needs a network with {in_channels} channels in, got {net.in_channels}")
    expected = params_per_dim * changed
    if net.out_channels != expected:
        raise ValueError(
            f"{name} needs a network with {expected} channels out ({params_per_dim} parameters for each of {changed}), "
            f"got {net.out_channels}"
        )


def couple(
    split: ChannelSplit | Checkerboard | TokenSplit, transform: ElementTransform, net: Callable[[int, int], nn.Module]
) -> Coupling:
    """A coupling with the network `net(in_channels, out_channels)` of the sizes that split and transform need."""
    return Coupling(split, transform, net(split.kept, transform.params_per_dim * split.changed))


class MaskedAutoregressive(Bijection):
    """Transforms each dimension with parameters that depend on the dimensions before it.

        z_i = f(x_i; made(x_<i, cond)),    log |det| = sum_i log |df/dx_i|

    The forward pass takes one evaluation of the network. The inverse takes D passes, one after another, that together
    have the arithmetic of one evaluation. Its `Inverse` is the inverse autoregressive flow (IAF), fast to sample.

    Arguments:
        features: number of dimensions D.
        transform: the elementwise map f; `MeanScale` makes the masked autoregressive flow (MAF) of the paper.
        made: masked network from D to `transform.params_per_dim * D` outputs, with the order of the dimensions and
            `unroll`. Its output bias is set to `transform.start`.

    Shapes: events `(D,)`, `cond` as the network's.
    Errors: ValueError when network and transform do not fit, or for an event of another shape.
    Source: Papamakarios et al. 2017 (MAF), section 3; Kingma et al. 2016 (IAF), section 3.

    Example:
        >>> from genmodels.flows.elementwise import MeanScale
        >>> layer = MaskedAutoregressive(3, MeanScale(), MADE(3, 2, hidden=8))
        >>> layer.inverse(torch.tensor([[1.0, 2.0, 3.0]]))[0].detach()
        tensor([[1., 2., 3.]])
    """

    strict_cond = True

    def __init__(self, features: int, transform: ElementTransform, made: MADE):
        super().__init__()
        check_network(self, made, features, transform.params_per_dim, features, transform.channels)
        self.features, self.transform, self.net = features, transform, made
        self.uses_cond = made.uses_cond
        self.exact_inverse, self.constant_logdet = transform.exact_inverse, transform.constant_logdet
        self.inverse_cost = "D passes" if transform.exact_inverse else "iterative"
        made.set_output_bias(transform.start(features).flatten())

    def out_shape(self, shape: Shape) -> Shape:
        if shape != (self.features,):
            raise self._misfit((self.features,), shape)
        return shape

    def _params(self, x: Tensor, cond: Tensor | None) -> Tensor:
        params = self.net(x, cond).to(x.dtype)
        return params.view(len(x), self.transform.params_per_dim, self.features)

    def _forward(self, x, cond, mask):
        z, log_derivative = self.transform(x, self._params(x, cond))
        return z, event_sum(log_derivative, mask)

    def _inverse(self, z, cond, mask):
        log_derivatives, dimensions = [], self.net.order.argsort()

        def choose(turn: int, outputs: Tensor) -> Tensor:
            own = dimensions[turn : turn + 1]
            given = {} if self.transform.channels is None else {"own": own}
            value, log_derivative = self.transform.inverse(z[:, own], outputs.to(z.dtype)[:, :, None], **given)
            log_derivatives.append(log_derivative)
            return hide(value, None if mask is None else mask[:, own])[:, 0]

        x = self.net.unroll(choose, z, cond)
        log_derivative = torch.cat(log_derivatives, 1)[:, self.net.order]
        return x, event_sum(log_derivative, mask)
