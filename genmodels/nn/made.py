"""A perceptron whose output i sees the inputs before i only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from genmodels.nn.blocks import zeroed
from genmodels.nn.condition import Condition, modulate
from genmodels.nn.dropout import Dropout
from genmodels.nn.net import Net
from genmodels.nn.perceptron import ACTIVATION


class MaskedLinear(nn.Linear):
    """A linear layer of which some weights are zero and stay so.

        y = (W * mask) x + b

    Arguments:
        mask: (outputs, inputs) bool, True where an output may see an input.

    Example:
        >>> layer = MaskedLinear(torch.tensor([[True, False]]))
        >>> bool((layer(torch.tensor([[1.0, 2.0]])) == layer(torch.tensor([[1.0, 9.0]]))).all())
        True
    """

    def __init__(self, mask: Tensor):
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight * self.mask, self.bias)


class MADE(Net):
    """A masked perceptron: several outputs for every dimension, which depend on the dimensions before it alone.

    Inputs and outputs have the degrees 1 .. D in the given order, hidden units degrees between; a hidden unit sees what
    has its own degree or a lower one, an output what has a lower one: d output_i / d x_j = 0 unless j comes before i.
    The condition feeds all hidden units. With one, some have degree 0: they see it alone, and every output sees them.

    Arguments:
        features: number of dimensions D.
        params_per_dim: number of outputs P for each dimension.
        hidden: width of the hidden layers.
        depth: number of hidden layers, or of residual blocks of two layers each.
        residual: whether the layers are those of a residual perceptron (see `ResidualMLP`).
        order: the turn of each dimension, a permutation of 0 .. D - 1; the dimension with turn 0 depends on nothing.
        activation: `silu` or `relu`.
        dropout: probability of dropping a hidden value.
        cond: what the network is conditioned on, labels or a vector.
        conditioning: `concat` or `film`.

    Shapes: `x (B, D)`, `cond` as `cond` says; the result is `(B, P D)`, the first output of every dimension first. A
    mask is refused.
    Errors: ValueError for an order that is no permutation, no hidden layer, and whatever `Net` refuses.
    Source: Germain et al. 2015 (MADE), sections 3 and 4; residual blocks: Durkan et al. 2019, appendix B.1.

    Example:
        >>> made = MADE(3, 2, hidden=16)
        >>> made(torch.randn(5, 3)).shape
        torch.Size([5, 6])
    """

    def __init__(
        self,
        features: int,
        params_per_dim: int,
        *,
        hidden: int = 256,
        depth: int = 2,
        residual: bool = False,
        order: Sequence[int] | None = None,
        activation: Literal["silu", "relu"] = "silu",
        dropout: float = 0.0,
        cond: Condition | None = None,
        conditioning: Literal["concat", "film"] = "concat",
    ):
        order = list(range(features)) if order is None else [int(turn) for turn in order]
        if sorted(order) != list(range(features)):
            raise ValueError(f"MADE: order must be a permutation of 0 .. {features - 1}, got {order}")
        if depth < 1 or activation not in ACTIVATION:
            raise ValueError(
                f"MADE needs depth >= 1 and an activation out of {', '.join(ACTIVATION)}, got {depth}, {activation!r}"
            )
        widths = [hidden] * (1 + depth if residual else depth)
        super().__init__(
            features, params_per_dim * features, hidden, widths,
            cond=cond, conditioning=conditioning, dims=0, everywhere=True,
        )  # fmt: skip
        self.residual, self.activation = residual, ACTIVATION[activation]
        self.register_buffer("order", torch.tensor(order))
        degrees, inner = self.order + 1, hidden_degrees(features, hidden, self.uses_cond)
        self.stem = MaskedLinear(inner[:, None] >= degrees)
        self.layers = nn.ModuleList(
            MaskedLinear(inner[:, None] >= inner) for _ in range(2 * depth if residual else depth - 1)
        )
        self.dropout = Dropout(dropout)
        self.head = zeroed(MaskedLinear(degrees.repeat(params_per_dim)[:, None] > inner))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise ValueError("MADE takes vectors of one length: a mask has no place in it")
        x, (first, *rest) = self.enter(x, cond, None)
        h = modulate(self.stem(x), first)
        if self.residual:
            for inner, outer, modulation in zip(self.layers[::2], self.layers[1::2], rest, strict=True):
                inside = modulate(inner(self.activation(h)), modulation)
                h = h + outer(self.dropout(self.activation(inside)))
            return self.head(h)
        for layer, modulation in zip(self.layers, rest, strict=True):
            h = modulate(layer(self.dropout(self.activation(h))), modulation)
        return self.head(self.dropout(self.activation(h)))


def hidden_degrees(features: int, hidden: int, conditional: bool) -> Tensor:
    """Degrees of the hidden units, as evenly spread as their number allows, up to the highest that is of any use.

    Example:
        >>> hidden_degrees(4, 6, conditional=False).tolist(), hidden_degrees(4, 6, conditional=True).tolist()
        ([1, 1, 2, 2, 3, 3], [0, 1, 1, 2, 3, 3])
    """
    lowest = 0 if conditional or features == 1 else 1
    spread = features - lowest
    return lowest - 1 + torch.tensor([-(-(k + 1) * spread // hidden) for k in range(hidden)])
