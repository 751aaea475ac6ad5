"""Convolutional networks of couplings: Glow's, gated, residual, and WaveNet, each with optional attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, glu, relu

from genmodels.core.errors import at_least
from genmodels.core.random import Dropout
from genmodels.core.tensors import hide
from genmodels.nn.attention_block import AttentionKind
from genmodels.nn.blocks import CONVOLUTION, ChannelNorm, zeroed
from genmodels.nn.condition import Modulation, Net, modulate


class ScaledHead(nn.Module):
    """A 3-wide convolution that starts at zero, with a learned scale of each output.

        y = (W * x + b) exp(3 s),   W = b = s = 0 at the start

    The factor 3 lets the scale move faster than the weights.

    Arguments:
        dims: 1 or 2 spatial dimensions.
        in_channels, out_channels: channels before and after.

    Source: Kingma and Dhariwal 2018, appendix and published code.

    Example:
        >>> ScaledHead(2, 4, 2)(torch.randn(1, 4, 3, 3)).abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(self, dims: int, in_channels: int, out_channels: int):
        super().__init__()
        convolution = zeroed(CONVOLUTION[dims](in_channels, out_channels, 3, padding=1))
        self.weight, self.bias = convolution.weight, convolution.bias
        self.log_scale = nn.Parameter(torch.zeros(out_channels))
        self.convolve = getattr(torch, f"conv{dims}d")

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.exp(3 * self.log_scale)  # on the weights: they are fewer than the outputs
        weight = self.weight * scale.reshape(-1, *(1,) * (self.weight.dim() - 1))
        return self.convolve(x, weight, self.bias * scale, padding=1)


class ConvNet(Net):
    """The coupling network of Glow: no norm and no dropout, so it is the same function in training and evaluation.

        y = conv3_0(relu(conv1(relu(conv3(x))))) exp(3 s),   conv3_0 = s = 0 at the start

    Arguments:
        in_channels, out_channels: channels before and after.
        hidden: channels of the hidden layers.
        depth: number of hidden layers, the first 3 wide and the others 1; 0 leaves only the last layer, the learned
            prior of Glow.
        dims: 1 or 2 spatial dimensions.
        cond: what the network is conditioned on.
        conditioning: `concat` or `film`.
        attention: entry of `ATTENTION` after the hidden layers, `none` for none.
        heads: heads of the attention, a divisor of `hidden`.

    Shapes: `x (B, in_channels, *space)`, `mask` bool, broadcastable to `(B, 1, *space)`; the result is
    `(B, out_channels, *space)`, zero outside the mask.
    Errors: ValueError for x of another shape, or a missing or unexpected condition.
    Source: Kingma and Dhariwal 2018, section 3.3 and appendix.

    Example:
        >>> sum(p.numel() for p in ConvNet(6, 12, hidden=512).parameters())
        346136
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int = 512,
        depth: int = 2,
        dims: int = 2,
        attention: AttentionKind = "none",
        **shared,
    ):
        if depth == 0 and attention != "none":
            raise ValueError("attention stands after hidden layers: depth = 0 has none")
        super().__init__(
            in_channels, out_channels, hidden, [hidden] * depth or [out_channels], dims, 3, attention=attention,
            **shared,
        )  # fmt: skip
        if depth:
            self.kinked = "relu"  # what its hidden layers call, for `require_smooth`
        self.layers = nn.ModuleList(
            CONVOLUTION[dims](hidden, hidden, 1) if number else CONVOLUTION[dims](in_channels, hidden, 3, padding=1)
            for number in range(depth)
        )
        self.head = ScaledHead(dims, hidden if depth else in_channels, out_channels)
        if depth == 0 and shared.get("cond") is not None:
            zeroed(self.conditioning.project)

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h, modulations = self.enter(x, cond, mask)
        if not self.layers:
            return hide(modulate(self.head(h), modulations[0]), mask).contiguous()
        for layer, modulation in zip(self.layers, modulations, strict=True):
            # In place: neither the convolution nor the modulation needs its result again.
            h = modulate(layer(h), modulation).relu_()
        return self.leave(self.attend(h, mask), mask)


def concat_elu(x: Tensor) -> Tensor:
    """[elu(x), elu(-x)]: an activation with a strong slope on both sides, for twice the channels.

    Source: Salimans et al. 2017, "PixelCNN++", published code.

    Example:
        >>> concat_elu(torch.tensor([[1.0, 2.0]]))
        tensor([[ 1.0000,  2.0000, -0.6321, -0.8647]])
    """
    # In place on the joined tensor, so that one buffer serves both passes.
    return elu(torch.cat([x, -x], dim=1), inplace=True)


class GatedResidual(nn.Module):
    """A residual block with a gated branch.

        y = norm(x + value sigmoid(gate)),   (value, gate) = conv1(concat_elu(conv3(concat_elu(x))))

    A condition modulates the result of conv3.

    Arguments:
        dims: 1 or 2 spatial dimensions.
        channels: channels before, inside and after.

    Shapes: `x (B, C, *space)` to the same; `mask` bool, broadcastable to `(B, 1, *space)`.

    Example:
        >>> GatedResidual(2, 8)(torch.randn(1, 8, 5, 5)).shape
        torch.Size([1, 8, 5, 5])
    """

    kinked = "elu"  # which it calls, for `require_smooth`

    def __init__(self, dims: int, channels: int):
        super().__init__()
        self.conv_1 = CONVOLUTION[dims](2 * channels, channels, 3, padding=1)
        self.conv_2 = CONVOLUTION[dims](2 * channels, 2 * channels, 1)
        self.norm = ChannelNorm(channels)

    def forward(self, x: Tensor, modulation: Modulation = None, mask: Tensor | None = None) -> Tensor:
        h = modulate(self.conv_1(concat_elu(hide(x, mask))), modulation)
        return self.norm(x + glu(self.conv_2(concat_elu(h)), dim=1))


class _ResidualNet(Net):
    """A convolution `stem`, residual `blocks`, an activation, and a convolution `head` that starts at zero."""

    activate: Callable[[Tensor], Tensor]

    def __init__(self, in_channels: int, out_channels: int, hidden: int, depth: int, dims: int, **shared):
        super().__init__(in_channels, out_channels, hidden, [hidden] * (1 + depth), dims, 3, **shared)
        self.stem = CONVOLUTION[dims](in_channels, hidden, 3, padding=1)

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x, (first, *rest) = self.enter(x, cond, mask)
        h = modulate(self.stem(x), first)
        for block, modulation in zip(self.blocks, rest, strict=True):
            h = block(h, modulation, mask)
        return self.leave(self.activate(self.attend(h, mask)), mask)


class GatedConvNet(_ResidualNet):
    """A gated residual network: strong for its size on small images.

        y = conv_0(concat_elu(block_depth(... block_1(conv(x)))))     both convolutions 3 wide, conv_0 = 0 at the start

    Arguments:
        hidden: channels of the blocks.
        depth: number of gated blocks.
        in_channels, out_channels, dims, cond, conditioning, attention, heads: see `ConvNet`.

    Shapes, errors: as of `ConvNet`.
    Source: Ho et al. 2019, "Flow++", section 3.3 (gated blocks), without its attention unless asked for.

    Example:
        >>> sum(p.numel() for p in GatedConvNet(1, 2, hidden=32, depth=3).parameters())
        69538
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int = 64,
        depth: int = 3,
        dims: int = 2,
        **shared,
    ):
        super().__init__(in_channels, out_channels, hidden, depth, dims, **shared)
        self.blocks = nn.ModuleList(GatedResidual(dims, hidden) for _ in range(depth))
        self.head = zeroed(CONVOLUTION[dims](2 * hidden, out_channels, 3, padding=1))

    kinked = "elu"
    activate = staticmethod(concat_elu)


class NormedResidual(nn.Module):
    """A residual block with the norm before each convolution.

        y = x + conv_2(dropout(relu(norm_2(conv_1(relu(norm_1(x)))))))

    A condition modulates the result of conv_1.

    Arguments:
        dims: 1 or 2 spatial dimensions.
        channels: channels before, inside and after.
        dropout: probability of dropping a value.

    Shapes: `x (B, C, *space)` to the same; `mask` bool, broadcastable to `(B, 1, *space)`.
    Source: He et al. 2016, "Identity mappings in deep residual networks", figure 1b.

    Example:
        >>> NormedResidual(2, 8)(torch.randn(1, 8, 5, 5)).shape
        torch.Size([1, 8, 5, 5])
    """

    kinked = "relu"  # which it calls, for `require_smooth`

    def __init__(self, dims: int, channels: int, dropout: float = 0.0):
        super().__init__()
        self.norm_1, self.norm_2 = ChannelNorm(channels), ChannelNorm(channels)
        self.conv_1 = CONVOLUTION[dims](channels, channels, 3, padding=1)
        self.conv_2 = CONVOLUTION[dims](channels, channels, 3, padding=1)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, modulation: Modulation = None, mask: Tensor | None = None) -> Tensor:
        h = self.conv_1(hide(relu(self.norm_1(x)), mask))
        h = relu(self.norm_2(modulate(h, modulation)))
        return x + self.conv_2(hide(self.dropout(h), mask))


class ResidualConvNet(_ResidualNet):
    """The coupling network of RealNVP: residual blocks, with norms over channels in place of batch normalisation.

        y = conv_0(relu(norm(block_depth(... block_1(conv(x))))))     all convolutions 3 wide, conv_0 = 0 at the start

    Arguments:
        hidden: channels of the blocks.
        depth: number of residual blocks.
        dropout: probability of dropping a value inside a block.
        in_channels, out_channels, dims, cond, conditioning, attention, heads: see `ConvNet`.

    Shapes, errors: as of `ConvNet`.
    Source: Dinh et al. 2017, section 4.1.

    Example:
        >>> sum(p.numel() for p in ResidualConvNet(1, 2, hidden=32, depth=2).parameters())
        38210
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int = 64,
        depth: int = 8,
        dims: int = 2,
        dropout: float = 0.0,
        **shared,
    ):
        super().__init__(in_channels, out_channels, hidden, depth, dims, **shared)
        self.blocks = nn.ModuleList(NormedResidual(dims, hidden, dropout) for _ in range(depth))
        self.norm = ChannelNorm(hidden)
        self.head = zeroed(CONVOLUTION[dims](hidden, out_channels, 3, padding=1))

    kinked = "relu"

    def activate(self, h: Tensor) -> Tensor:
        return relu(self.norm(h))


class WaveNet(Net):
    """A WaveNet without causality, for sequences.

        h_1 = conv1_in(x),   (a_i, g_i) = conv_i(h_i) + V_i c,   u_i = dropout(tanh(a_i) sigmoid(g_i))
        h_{i+1} = h_i + R_i u_i,   y = W sum_i (S_i u_i) + b,   W = 0 at the start

    R_i and S_i are 1 wide and make one convolution. Glow-TTS uses weight normalisation here; this network does not.

    Arguments:
        hidden: channels of the residual and the skip stream.
        depth: number of gated layers.
        kernel_size: kernel of conv_i, odd.
        dilation_rate: layer i (from 0) has dilation dilation_rate^i.
        dropout: probability of dropping a gated value.
        cond: what the network is conditioned on; it enters every layer.
        conditioning: `concat` (the sum above) or `film`.
        in_channels, out_channels, attention, heads: see `ConvNet`.

    Shapes: `x (B, in_channels, T)`, `mask (B, 1, T)` bool; the result is `(B, out_channels, T)`, zero outside the mask.
    Errors: as of `ConvNet`; ValueError for an even kernel.
    Source: van den Oord et al. 2016, "WaveNet", section 2; Prenger et al. 2019, "WaveGlow"; Kim et al. 2020,
    "Glow-TTS", appendix A.1.

    Example:
        >>> WaveNet(8, 16, hidden=12)(torch.randn(2, 8, 20)).shape
        torch.Size([2, 16, 20])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int = 192,
        depth: int = 4,
        kernel_size: int = 5,
        dilation_rate: int = 1,
        dropout: float = 0.05,
        **shared,
    ):
        at_least(1, kernel_size=kernel_size, dilation_rate=dilation_rate)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size = {kernel_size} must be odd")
        super().__init__(in_channels, out_channels, hidden, [2 * hidden] * depth, 1, everywhere=True, **shared)
        self.hidden = hidden
        self.stem = nn.Conv1d(in_channels, hidden, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(hidden, 2 * hidden, kernel_size, dilation=dilation, padding=kernel_size // 2 * dilation)
            for dilation in (dilation_rate**i for i in range(depth))
        )
        # Nothing follows the residual stream of the last layer: it has none.
        self.branches = nn.ModuleList(nn.Conv1d(hidden, 2 * hidden, 1) for _ in range(depth - 1))
        self.last = nn.Conv1d(hidden, hidden, 1)
        self.dropout = Dropout(dropout)
        self.head = zeroed(nn.Conv1d(hidden, out_channels, 1))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x, modulations = self.enter(x, cond, mask)
        h, skips = self.stem(x), 0
        for convolution, branch, modulation in zip(self.gates, [*self.branches, self.last], modulations, strict=True):
            value, gate = modulate(convolution(hide(h, mask)), modulation).chunk(2, dim=1)
            u = branch(self.dropout(value.tanh() * gate.sigmoid()))
            skips = skips + u[:, -self.hidden :]
            if branch is not self.last:
                h = h + u[:, : self.hidden]
        return self.leave(self.attend(skips, mask), mask)
