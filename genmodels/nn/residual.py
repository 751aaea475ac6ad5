"""The residual convolutional coupling network of RealNVP."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import relu

from genmodels.nn.blocks import CONVOLUTION, hide, zeroed
from genmodels.nn.channel_norm import ChannelNorm
from genmodels.nn.condition import Condition, Modulation, modulate
from genmodels.nn.dropout import Dropout
from genmodels.nn.net import Net
from genmodels.nn.spatial_attention import AttentionKind


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
        >>> import torch
        >>> NormedResidual(2, 8)(torch.randn(1, 8, 5, 5)).shape
        torch.Size([1, 8, 5, 5])
    """

    def __init__(self, dims: int, channels: int, dropout: float = 0.0):
        super().__init__()
        convolution = CONVOLUTION[dims]
        self.norm_1, self.norm_2 = ChannelNorm(channels), ChannelNorm(channels)
        self.conv_1 = convolution(channels, channels, 3, padding=1)
        self.conv_2 = convolution(channels, channels, 3, padding=1)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, modulation: Modulation = None, mask: Tensor | None = None) -> Tensor:
        h = self.conv_1(hide(relu(self.norm_1(x)), mask))
        h = relu(self.norm_2(modulate(h, modulation)))
        return x + self.conv_2(hide(self.dropout(h), mask))


class ResidualConvNet(Net):
    """The coupling network of RealNVP: residual blocks, with norms over channels in place of batch normalisation.

        y = conv_0(relu(norm(block_depth(... block_1(conv(x))))))     all convolutions 3 wide, conv_0 = 0 at the start

    Arguments:
        in_channels, out_channels: channels before and after.
        hidden: channels of the blocks.
        depth: number of residual blocks.
        dims: 1 or 2 spatial dimensions.
        dropout: probability of dropping a value inside a block.
        cond: what the network is conditioned on.
        conditioning: `concat` or `film`.
        attention: entry of `ATTENTION` after the hidden layers, `none` for none.
        heads: heads of the attention, a divisor of `hidden`.

    Shapes: `x (B, in_channels, *space)`, `cond` as `cond` says, `mask` bool, broadcastable to `(B, 1, *space)`; the
    result is `(B, out_channels, *space)`, zero outside the mask.
    Errors: ValueError for x of another shape, or a missing or unexpected condition.
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
        cond: Condition | None = None,
        conditioning: Literal["concat", "film"] = "concat",
        attention: AttentionKind = "none",
        heads: int = 4,
    ):
        super().__init__(
            in_channels, out_channels, hidden, [hidden] * (1 + depth), cond=cond,
            conditioning=conditioning, dims=dims, attention=attention, heads=heads, kernel_size=3,
        )  # fmt: skip
        convolution = CONVOLUTION[dims]
        self.stem = convolution(in_channels, hidden, 3, padding=1)
        self.blocks = nn.ModuleList(NormedResidual(dims, hidden, dropout) for _ in range(depth))
        self.norm = ChannelNorm(hidden)
        self.head = zeroed(convolution(hidden, out_channels, 3, padding=1))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x, (first, *rest) = self.enter(x, cond, mask)
        h = modulate(self.stem(x), first)
        for block, modulation in zip(self.blocks, rest, strict=True):
            h = block(h, modulation, mask)
        return self.leave(relu(self.norm(self.attend(h, mask))), mask)
