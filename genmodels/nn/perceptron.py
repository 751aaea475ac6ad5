"""Networks of vectors: perceptrons, residual ones, the masked network MADE, and a denoiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, relu, silu

from genmodels.core.errors import at_least, one_of
from genmodels.core.random import Dropout
from genmodels.nn.blocks import ConditionEmbedding, run, zeroed
from genmodels.nn.condition import Condition, Modulation, Net, modulate

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

    Shapes: `x (B, in_channels)` to `(B, out_channels)`, without a mask.
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
        return _layered(self, x, cond, mask)


class ResidualMLP(Net):
    """A residual perceptron, as in neural spline flows.

        h_0 = W_in x + b_in,   h_{i+1} = h_i + W_i' act(W_i act(h_i) + b_i) + b_i'
        y = W h_depth + b,   W = 0 at the start

    A condition modulates W_in x + b_in and the first layer of every block.

    Arguments:
        hidden: width of the residual stream and of the blocks.
        depth: number of residual blocks, of two layers each.
        dropout: probability of dropping a value inside a block.
        in_channels, out_channels, activation, cond, conditioning: see `MLP`.

    Shapes, errors: as of `MLP`.
    Source: Durkan et al. 2019, "Neural spline flows", appendix B.1.

    Example:
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
        at_least(1, depth=depth)
        widths = [hidden] * (1 + depth)
        super().__init__(in_channels, out_channels, hidden, widths, cond=cond, conditioning=conditioning, dims=0)
        self.activation = _activation(activation)
        self.stem = nn.Linear(in_channels, hidden)
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.head = zeroed(nn.Linear(hidden, out_channels))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return _residual(self, self.inner, self.outer, x, cond, mask)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    one_of("activation", name, ACTIVATION)
    return ACTIVATION[name]


def _enter(net: Net, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, list[Modulation]]:
    """The first layer before its activation, and the modulations of the others."""
    if mask is not None:
        raise ValueError(f"{type(net).__name__} takes vectors of one length: use a convolutional network for masked "
                         "sequences")  # fmt: skip
    x, (first, *rest) = net.enter(x, cond, None)
    return modulate(net.stem(x), first), rest


def _layered(net: MLP | MADE, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> Tensor:
    h, modulations = _enter(net, x, cond, mask)
    for layer, modulation in zip(net.layers, modulations, strict=True):
        h = modulate(layer(net.dropout(net.activation(h))), modulation)
    return net.head(net.dropout(net.activation(h)))


def _residual(
    net: ResidualMLP | MADE, inner: Iterable[nn.Module], outer: Iterable[nn.Module], x: Tensor, cond: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    h, modulations = _enter(net, x, cond, mask)
    for enter, leave, modulation in zip(inner, outer, modulations, strict=True):
        inside = modulate(enter(net.activation(h)), modulation)
        h = h + leave(net.dropout(net.activation(inside)))
    return net.head(h)


class MaskedLinear(nn.Linear):
    """A linear layer with some weights fixed at zero.

        y = (W * mask) x + b

    Arguments:
        mask: (outputs, inputs) bool, False for weights that are zero.

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
    """A masked autoregressive perceptron: the outputs of every dimension depend only on the dimensions before it.

    Inputs and outputs have the degrees 1 .. D in the given order, hidden units degrees between. A hidden unit is
    connected to units of its degree or lower, an output to units of lower degree: d output_i / d x_j = 0 unless j comes
    before i. All hidden units depend on a condition; some then have degree 0, so that every output depends on it.

    Arguments:
        features: number of dimensions D.
        params_per_dim: number of outputs P for each dimension.
        hidden: width of the hidden layers.
        depth: number of hidden layers, or of residual blocks of two layers each.
        residual: whether the layers form residual blocks (see `ResidualMLP`).
        order: place of each dimension in the order, a permutation of 0 .. D - 1; the first depends on nothing.
        activation, dropout, cond, conditioning: see `MLP`.

    Shapes: `x (B, D)` to `(B, P D)`, the first output of every dimension first, without a mask.
    Errors: as of `MLP`; ValueError for an order that is not a permutation, or no hidden layer.
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
        at_least(1, depth=depth)
        widths = [hidden] * (1 + depth if residual else depth)
        super().__init__(
            features, params_per_dim * features, hidden, widths,
            cond=cond, conditioning=conditioning, dims=0, everywhere=True,
        )  # fmt: skip
        self.residual, self.activation = residual, _activation(activation)
        self.register_buffer("order", torch.tensor(order))
        degrees, inner = self.order + 1, hidden_degrees(features, hidden, self.uses_cond)
        self.ends = torch.searchsorted(inner, torch.arange(features), right=True).tolist()  # units up to each degree
        self.stem = MaskedLinear(inner[:, None] >= degrees)
        self.stem.weight.requires_grad_(features > 1)  # with a single dimension all of it is masked
        self.layers = nn.ModuleList(
            MaskedLinear(inner[:, None] >= inner) for _ in range(2 * depth if residual else depth - 1)
        )
        self.dropout = Dropout(dropout)
        self.head = zeroed(MaskedLinear(degrees.repeat(params_per_dim)[:, None] > inner))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if self.residual:
            return _residual(self, self.layers[::2], self.layers[1::2], x, cond, mask)
        return _layered(self, x, cond, mask)

    def unroll(self, choose: Callable[[int, Tensor], Tensor], like: Tensor, cond: Tensor | None = None) -> Tensor:
        """The x whose dimensions are chosen one after another, each given its outputs, which depend on those before it.

            x_i = choose(turn_i, made_i(x_before i, cond))

        A hidden unit is computed in the turn of its degree and kept, so that all turns together take the arithmetic of
        one pass.

        Arguments:
            choose: from the turn, 0 .. D - 1, and the outputs (B, P) of the dimension whose turn it is to its values
                (B,).
            like: (B, D), of the batch size, dtype and device of the result; its values do not matter.

        Example:
            >>> made = MADE(3, 2, hidden=16)
            >>> made.unroll(lambda turn, outputs: outputs[:, 0] + turn, torch.empty(1, 3)).tolist()
            [[0.0, 1.0, 2.0]]
        """
        _, (first, *others) = self.enter(like, cond, None)
        sequence = self.order.argsort()
        weights = [layer.weight * layer.mask for layer in self.layers]
        stem = (self.stem.weight * self.stem.mask)[:, sequence]
        head = (self.head.weight * self.head.mask).unflatten(0, (-1, self.in_channels))[:, sequence]
        bias = self.head.bias.unflatten(0, (-1, self.in_channels))[:, sequence]
        x, inputs, start = like[:, :0], [like.new_zeros(len(like), 0) for _ in range(len(weights) + 1)], 0

        def units(number: int, entering: Tensor, modulation: Modulation = None) -> Tensor:
            """The units of this turn after layer `number`, for which `entering` are new inputs."""
            inputs[number] = torch.cat([inputs[number], entering], 1)
            h = linear(inputs[number], weights[number][start:end, :end], self.layers[number].bias[start:end])
            return modulate(h, _part(modulation, start, end))

        for turn, end in enumerate(self.ends):
            if end > start:
                h = modulate(linear(x, stem[start:end, :turn], self.stem.bias[start:end]), _part(first, start, end))
                if self.residual:
                    for block, modulation in enumerate(others):
                        inside = units(2 * block, self.activation(h), modulation)
                        h = h + units(2 * block + 1, self.dropout(self.activation(inside)))
                else:
                    for number, modulation in enumerate(others):
                        h = units(number, self.dropout(self.activation(h)), modulation)
                    h = self.dropout(self.activation(h))
                inputs[-1], start = torch.cat([inputs[-1], h], 1), end
            outputs = linear(inputs[-1], head[:, turn, :end], bias[:, turn])
            x = torch.cat([x, choose(turn, outputs)[:, None]], 1)
        return x[:, self.order]


def _part(modulation: Modulation, start: int, end: int) -> Modulation:
    """The modulation of some units."""
    return modulation and tuple(each if each is None else each[:, start:end] for each in modulation)


def hidden_degrees(features: int, hidden: int, conditional: bool) -> Tensor:
    """Degrees of the hidden units, evenly spread up to D - 1.

    Example:
        >>> hidden_degrees(4, 6, conditional=False).tolist(), hidden_degrees(4, 6, conditional=True).tolist()
        ([1, 1, 2, 2, 3, 3], [0, 1, 1, 2, 3, 3])
    """
    lowest = 0 if conditional or features == 1 else 1
    spread = features - lowest
    return lowest - 1 + torch.tensor([-(-(k + 1) * spread // hidden) for k in range(hidden)])


class MLPDenoiser(nn.Module):
    """Residual perceptron from a noisy event and its log-SNR to an event of the same shape.

        h_0 = W_in [x, cos(pi 2^j x), sin(pi 2^j x)]
        h_{i+1} = h_i + W_i' silu(W_i (norm(h_i) (1 + scale_i) + shift_i))

    Scale and shift are linear in the embedding of noise level and class. The output is zero at the start.

    Arguments:
        event_shape: any shape; the event is flattened.
        num_classes: number of classes, None for an unconditional network; `cond=None` stands for the null class.
        double_output: twice the entries of the event's first axis in the output, as learned variances need.
        extra_channels: further entries of the first axis of the input, as self-conditioning needs.
        two_times: in place of the log-SNR the network takes the two times of a flow map, (B, 2).
        hidden: width of the residual stream, even.
        depth: number of residual blocks.
        frequencies: octaves of Fourier features of each coordinate, for sharp edges in few dimensions; 0 for none.
        dropout: probability of dropping a value inside the blocks.
        checkpointing: recompute the inside of each block in the backward pass instead of storing it.

    Shapes: `x (B, *event)`, `log_snr (B,)`, `cond (B,)` int64 or None; the result is like `x`.
    Errors: ValueError for events of another shape, an odd width, or a mask.
    Source: residual blocks with scale and shift as in Nichol and Dhariwal 2021; Fourier features of Tancik et al. 2020.

    Example:
        >>> mlp = MLPDenoiser((2,), hidden=16, depth=2)
        >>> mlp(torch.randn(5, 2), torch.zeros(5)).abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        num_classes: int | None = None,
        double_output: bool = False,
        extra_channels: int = 0,
        two_times: bool = False,
        *,
        hidden: int = 256,
        depth: int = 4,
        frequencies: int = 3,
        dropout: float = 0.0,
        checkpointing: bool = False,
    ):
        super().__init__()
        if hidden < 2 or hidden % 2:
            raise ValueError(f"hidden = {hidden} must be even and positive: the noise-level features come in pairs")
        if depth < 1 or frequencies < 0:
            raise ValueError(f"depth = {depth} must be at least 1 and frequencies = {frequencies} at least 0")
        first, *rest = event_shape
        self.event_shape, self.frequencies = (first + extra_channels, *rest), frequencies
        self.checkpointing = checkpointing
        self.out_shape = (first * (2 if double_output else 1), *rest)
        dims = math.prod(self.event_shape)
        self.embedding = ConditionEmbedding(min(hidden, 64), hidden, hidden, num_classes, two_times)
        self.modulation = nn.Linear(hidden, 2 * hidden * depth)
        self.stem = nn.Linear(dims * (1 + 2 * frequencies), hidden)
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.dropout = Dropout(dropout)
        self.head = zeroed(nn.Linear(hidden, math.prod(self.out_shape)))

    def forward(self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if tuple(x.shape[1:]) != self.event_shape:
            raise ValueError(f"the MLP was built for events of shape {self.event_shape}, got {tuple(x.shape[1:])}")
        if mask is not None:
            raise ValueError("the MLP takes events of one fixed size: use the U-Net for masked sequences")
        modulation = self.modulation(silu(self.embedding(log_snr, cond))).chunk(2 * len(self.inner), dim=1)
        h = self.stem(self._features(x.flatten(1)))
        for i in range(len(self.inner)):
            h = run(self._block, i, h, modulation[2 * i], modulation[2 * i + 1], again=self.checkpointing)
        h = self.head(silu(layer_norm(h, h.shape[-1:])))
        return h.reshape(len(x), *self.out_shape).to(x.dtype)

    def _block(self, i: int, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        normed = layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
        return h + self.outer[i](self.dropout(silu(self.inner[i](normed))))

    def _features(self, x: Tensor) -> Tensor:
        octaves = [math.pi * 2.0**j * x for j in range(self.frequencies)]
        return torch.cat([x, *(angle.cos() for angle in octaves), *(angle.sin() for angle in octaves)], dim=1)
