"""Perceptrons of vectors: plain, and residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import relu, silu

from genmodels.nn.blocks import zeroed
from genmodels.nn.condition import Condition, modulate
from genmodels.nn.dropout import Dropout
from genmodels.nn.net import Net

ACTIVATION = {"silu": silu, "relu": relu}


class MLP(Net):
    """A perceptron.

        h_1 = W_1 x + b_1,   h_{i+1} = W_{i+1} act(h_i) + b_{i+1},   y = W act(h_depth) + b,   W = 0 at the start

    Arguments:
        in_channels, out_channels: length of the vectors before and after.
        hidden: width of the hidden layers.
        depth: number of hidden layers.
        activation: `silu` or `relu`.
        dropout: probability of dropping a hidden value.
        cond: what the network is conditioned on, labels or a vector.
        conditioning: `concat` or `film`.

    Shapes: `x (B, in_channels)`, `cond` as `cond` says; the result is `(B, out_channels)`. A mask is refused.
    Errors: ValueError for vectors of another length, a mask, a missing or unexpected condition, or a map as condition.

    Example:
        >>> sum(p.numel() for p in MLP(32, 64, hidden=256, depth=2).parameters())
        90688
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int = 256,
        depth: int = 2,
        activation: Literal["silu", "relu"] = "silu",
        dropout: float = 0.0,
        cond: Condition | None = None,
        conditioning: Literal["concat", "film"] = "concat",
    ):
        widths = [hidden] * depth
        super().__init__(in_channels, out_channels, hidden, widths, cond=cond, conditioning=conditioning, dims=0)
        self.activation = _activation(activation)
        self.stem = nn.Linear(in_channels, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth - 1))
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.head = zeroed(nn.Linear(hidden, out_channels))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        _refuse(mask)
        x, (first, *rest) = self.enter(x, cond, None)
        h = self.activation(modulate(self.stem(x), first))
        for layer, modulation in zip(self.layers, rest, strict=True):
            h = self.activation(modulate(layer(self.dropout(h)), modulation))
        return self.head(self.dropout(h))


class ResidualMLP(Net):
    """A residual perceptron, as in neural spline flows.

        h_0 = W_in x + b_in,   h_{i+1} = h_i + W_i' act(W_i act(h_i) + b_i) + b_i'
        y = W h_depth + b,   W = 0 at the start

    Modulation by a condition falls on W_in x + b_in and on the inside of every block.

    Arguments:
        in_channels, out_channels: length of the vectors before and after.
        hidden: width of the residual stream and of the blocks.
        depth: number of residual blocks, of two layers each.
        activation: `silu` or `relu`.
        dropout: probability of dropping a value inside a block.
        cond: what the network is conditioned on, labels or a vector.
        conditioning: `concat` or `film`.

    Shapes: `x (B, in_channels)`, `cond` as `cond` says; the result is `(B, out_channels)`. A mask is refused.
    Errors: ValueError for vectors of another length, a mask, a missing or unexpected condition, or a map as condition.
    Source: Durkan et al. 2019, "Neural spline flows", appendix B.1.

    Example:
        >>> import torch
        >>> ResidualMLP(3, 5)(torch.randn(4, 3)).shape
        torch.Size([4, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int = 128,
        depth: int = 2,
        activation: Literal["silu", "relu"] = "relu",
        dropout: float = 0.0,
        cond: Condition | None = None,
        conditioning: Literal["concat", "film"] = "concat",
    ):
        if depth < 1:
            raise ValueError(f"ResidualMLP needs at least one block, got depth = {depth}")
        widths = [hidden] * (1 + depth)
        super().__init__(in_channels, out_channels, hidden, widths, cond=cond, conditioning=conditioning, dims=0)
        self.activation = _activation(activation)
        self.stem = nn.Linear(in_channels, hidden)
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.head = zeroed(nn.Linear(hidden, out_channels))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        _refuse(mask)
        x, (first, *rest) = self.enter(x, cond, None)
        h = modulate(self.stem(x), first)
        for inner, outer, modulation in zip(self.inner, self.outer, rest, strict=True):
            inside = modulate(inner(self.activation(h)), modulation)
            h = h + outer(self.dropout(self.activation(inside)))
        return self.head(h)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATION:
        raise ValueError(f"activation is one of {', '.join(ACTIVATION)}, got {name!r}")
    return ACTIVATION[name]


def _refuse(mask: Tensor | None) -> None:
    if mask is not None:
        raise ValueError("a perceptron takes vectors of one length: use a convolutional network for masked sequences")
