"""Conditioning of networks on labels, vectors or maps: concatenation and FiLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.errors import one_of
from genmodels.core.tensors import hide
from genmodels.nn.attention_block import AttentionKind, make_attention
from genmodels.nn.blocks import CONVOLUTION, blocks_to_channels

#: Scale and shift of one layer, broadcastable to it; None for no scale, or no modulation.
Modulation = tuple[Tensor | None, Tensor] | None


@dataclass(frozen=True)
class Condition:
    """The kind of a condition: a label, a vector or a map for every example.

    Arguments:
        kind: `labels` (B,) int64, `vector` (B, size), or `map` (B, size, *space) with a value for every position.
        size: number of classes, length of the vectors, or channels of the maps.
        stride: positions of a map for each position of the network, along every side (the product of all squeezes).

    Errors: ValueError for another kind, or numbers below 1.

    Example:
        >>> Condition("map", 3).squeezed(2)
        Condition(kind='map', size=3, stride=2)
    """

    kind: str
    size: int
    stride: int = 1

    def __post_init__(self):
        if self.kind not in _SHAPES:
            raise ValueError(f"a condition is one of {', '.join(_SHAPES)}, got {self.kind!r}")
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"a condition needs size and stride of at least 1, got {self.size} and {self.stride}")

    def __str__(self) -> str:
        return _SHAPES[self.kind].format(size=self.size)

    def squeezed(self, factor: int = 2) -> Condition:
        """The same condition for networks after a squeeze, which changes the stride of maps.

        Example:
            >>> Condition("labels", 10).squeezed(2)
            Condition(kind='labels', size=10, stride=1)
        """
        return replace(self, stride=self.stride * factor) if self.kind == "map" else self

    def require(self, cond: Tensor | None, x: Tensor) -> None:
        """Raise ValueError unless `cond` is of this kind and fits `x`."""
        if cond is None:
            raise ValueError(f"this network needs cond: {self}")
        space = tuple(self.stride * n for n in x.shape[2:]) if self.kind == "map" else ()
        if self.kind == "labels":
            fits = cond.dtype in (torch.int64, torch.int32) and cond.shape == x.shape[:1]
        else:
            fits = cond.is_floating_point() and tuple(cond.shape) == (len(x), self.size, *space)
        if not fits:
            raise ValueError(f"cond must be {self}, with the examples and positions of x {tuple(x.shape)}"
                             f"{f' times {self.stride}' if self.stride > 1 else ''}; got {cond.dtype} "
                             f"{tuple(cond.shape)}")


def require_condition(cond: Condition | None) -> None:
    """Raise TypeError for anything but a `Condition` or None.

    Example:
        >>> require_condition(10)
        Traceback (most recent call last):
        ...
        TypeError: cond says what the condition is: Condition("labels", 10) or None, not 10
    """
    if cond is not None and not isinstance(cond, Condition):
        raise TypeError(f'cond says what the condition is: Condition("labels", 10) or None, not {cond!r}')


_SHAPES = {
    "labels": "labels (B,) int64 of {size} classes",
    "vector": "vectors (B, {size})",
    "map": "maps (B, {size}, *space)",
}


class Conditioning(nn.Module):
    """Scales and shifts for the layers of a network, all linear in its condition.

        concat:  h = W x + [b + V c]             the product of [x, c] with [W, V], at the first layer (or at all)
        film:    h = (1 + scale(c)) (W x + b) + shift(c)                                  at every layer

    V is an embedding of labels, a linear layer of vectors, a convolution of maps.

    Arguments:
        condition: kind of the condition; None for a network without one.
        widths: channels of the layers.
        conditioning: `concat` or `film`.
        dims: spatial dimensions of the network, 0 for vectors.
        kernel_size: kernel of the convolution of a map under `concat`, as in the first layer.
        everywhere: whether `concat` acts on all layers and not only the first.

    Shapes: `cond` as the condition says, `x (B, C, *space)`, `mask` bool, broadcastable to `(B, 1, *space)`; the result
    has one pair `(scale, shift)` for each layer, of shape (B, width, *space or *1), or None.
    Errors: ValueError when `cond` is missing, not expected, or of another kind or shape.
    Source: FiLM: Perez et al. 2018, equation 2.

    Example:
        >>> conditioning = Conditioning(Condition("labels", 10), [4, 4], conditioning="film", dims=2)
        >>> pairs = conditioning(torch.tensor([3, 7]), torch.zeros(2, 1, 8, 8))
        >>> len(pairs), pairs[0][0].shape
        (2, torch.Size([2, 4, 1, 1]))
    """

    def __init__(
        self,
        condition: Condition | None,
        widths: Sequence[int],
        *,
        conditioning: str = "concat",
        dims: int = 2,
        kernel_size: int = 1,
        everywhere: bool = False,
    ):
        super().__init__()
        require_condition(condition)
        one_of("conditioning", conditioning, ("concat", "film"))
        self.condition, self.dims, self.film, self.layers = condition, dims, conditioning == "film", len(widths)
        reached = list(widths) if everywhere or self.film else list(widths[:1])
        self.sizes = [size for width in reached for size in ([width, width] if self.film else [width])]
        if condition is not None:
            kernel_size = 1 if self.film else kernel_size
            self.project = _projection(condition, sum(self.sizes), dims, kernel_size, bias=self.film)

    def forward(self, cond: Tensor | None, x: Tensor, mask: Tensor | None = None) -> list[Modulation]:
        condition = self.condition
        if condition is None:
            if cond is not None:
                raise ValueError("this network was built without a condition: leave cond out")
            return [None] * self.layers
        condition.require(cond, x)
        if condition.kind != "labels":
            cond = cond.to(x.dtype)
        if condition.kind == "map":
            cond = hide(cond if condition.stride == 1 else blocks_to_channels(cond, condition.stride), mask)
        features = self.project(cond)
        if condition.kind != "map":
            features = features.reshape(*features.shape, *(1,) * self.dims)
        parts = features.split(self.sizes, dim=1)
        pairs = list(zip(parts[::2], parts[1::2], strict=True)) if self.film else [(None, shift) for shift in parts]
        return pairs + [None] * (self.layers - len(pairs))


def modulate(h: Tensor, modulation: Modulation) -> Tensor:
    """h (1 + scale) + shift, or h where there is no modulation.

    Example:
        >>> modulate(torch.tensor([3.0]), (torch.tensor([1.0]), torch.tensor([0.5])))
        tensor([6.5000])
    """
    if modulation is None:
        return h
    scale, shift = modulation
    return h + shift if scale is None else torch.addcmul(h + shift, h, scale)


def _projection(condition: Condition, width: int, dims: int, kernel_size: int, *, bias: bool) -> nn.Module:
    """The linear map of a condition to `width` features."""
    if condition.kind == "map" and dims == 0:
        raise ValueError("a network of vectors takes labels or a vector as its condition: vectors have no positions")
    size = condition.size * condition.stride**dims
    if condition.kind == "map":
        return CONVOLUTION[dims](size, width, kernel_size, padding=kernel_size // 2, bias=bias)
    if condition.kind == "vector":
        return nn.Linear(size, width, bias=bias)
    project = nn.Embedding(size, width)
    nn.init.normal_(project.weight, std=0.3)  # about the initial contribution of the other inputs
    return project


class Net(nn.Module):
    """A network of an event and its condition, whose output is constant at the start.

        y = head(act(attention(hidden(x, cond)))),    head: weights zero, bias zero or given

    A subclass creates `head`, and in `forward` calls `enter`, its layers, `attend` and `leave`. Positions outside the
    mask are zero for every convolution, as beyond the border, so neither their content nor their number matters.

    Arguments:
        in_channels, out_channels: channels before and after.
        hidden: channels at the attention.
        widths: channels of the layers that a condition may modulate.
        dims: 1 or 2 spatial dimensions, 0 for vectors.
        kernel_size: kernel of the first layer.
        everywhere: whether a concatenated condition acts on all layers.
        cond: what the network is conditioned on, if anything.
        conditioning: `concat` or `film` (see `Conditioning`).
        attention: entry of `ATTENTION`, applied after the hidden layers; `none` for none.
        heads: heads of the attention.

    Shapes: `x (B, in_channels, *space)`, `mask` bool, broadcastable to `(B, 1, *space)`; the result is
    `(B, out_channels, *space)`, zero outside the mask.
    Errors: ValueError for x of another shape; see also `Conditioning` and the attention.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden: int,
        widths: Sequence[int],
        dims: int,
        kernel_size: int = 1,
        everywhere: bool = False,
        *,
        cond: Condition | None = None,
        conditioning: Literal["concat", "film"] = "concat",
        attention: AttentionKind = "none",
        heads: int = 4,
    ):
        super().__init__()
        if dims not in (0, 1, 2):
            raise ValueError(f"{type(self).__name__} has 1 or 2 spatial dimensions, got dims = {dims}")
        if min(in_channels, out_channels, hidden, len(widths)) < 1:
            raise ValueError(
                f"{type(self).__name__} needs one channel and one layer at least, got in_channels = {in_channels}, "
                f"out_channels = {out_channels}, hidden = {hidden} and {len(widths)} layers"
            )
        self.in_channels, self.out_channels, self.dims = in_channels, out_channels, dims
        self.uses_cond = cond is not None
        self.conditioning = Conditioning(
            cond, widths, conditioning=conditioning, dims=dims, kernel_size=kernel_size, everywhere=everywhere
        )
        self.attention = make_attention(attention, hidden, heads, dims=dims)

    def set_output_bias(self, bias: Tensor) -> None:
        """Set the initial output `(out_channels,)`, the same for every example and position."""
        if tuple(bias.shape) != (self.out_channels,):
            raise ValueError(f"the output bias has shape ({self.out_channels},), got {tuple(bias.shape)}")
        with torch.no_grad():
            self.head.bias.copy_(bias)

    def enter(self, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, list[Modulation]]:
        """The input of the first layer, and the modulation of each layer."""
        if x.dim() != 2 + self.dims or x.shape[1] != self.in_channels:
            space = ("", ", T", ", H, W")[self.dims]
            raise ValueError(f"{type(self).__name__} takes x (B, {self.in_channels}{space}), got {tuple(x.shape)}")
        x = hide(x, mask)
        if self.dims == 2:
            # In channels-last memory format, norms over channels (two to five times) and convolutions to few channels
            # (up to twice) are faster on a CPU; every layer keeps the format. A copy, since `contiguous` leaves maps of
            # one channel, which fit both formats, in the other one.
            x = x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)
        return x, self.conditioning(cond, x, mask)

    def attend(self, h: Tensor, mask: Tensor | None) -> Tensor:
        """Applies the attention after the hidden layers."""
        return h if self.attention is None else self.attention(hide(h, mask), mask)

    def leave(self, h: Tensor, mask: Tensor | None) -> Tensor:
        """The last layer, its result in contiguous memory format."""
        return hide(self.head(hide(h, mask)), mask).contiguous()
