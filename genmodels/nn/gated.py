"""The gated convolutional coupling network of small image flows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, glu

from genmodels.nn.blocks import CONVOLUTION, hide, zeroed
from genmodels.nn.channel_norm import ChannelNorm
from genmodels.nn.condition import Condition, Modulation, modulate
from genmodels.nn.net import Net
from genmodels.nn.spatial_attention import AttentionKind


def concat_elu(x: Tensor) -> Tensor:
    """[elu(x), elu(-x)]: an activation with a strong slope on both sides, for twice the channels.

    Source: Salimans et al. 2017, "PixelCNN++", published code.

    Example:
        >>> concat_elu(torch.tensor([[1.0, 2.0]]))
        tensor([[ 1.0000,  2.0000, -0.6321, -0.8647]])
    """
    # In place on the joined tensor: one buffer is written, and the same one kept for the backward pass.
    return elu(torch.cat([x, -x], dim=1), inplace=True)


class GatedResidual(nn.Module):
    """A residual block whose branch is gated.

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

    def __init__(self, dims: int, channels: int):
        super().__init__()
        self.conv_1 = CONVOLUTION[dims](2 * channels, channels, 3, padding=1)
        self.conv_2 = CONVOLUTION[dims](2 * channels, 2 * channels, 1)
        self.norm = ChannelNorm(channels)

    def forward(self, x: Tensor, modulation: Modulation = None, mask: Tensor | None = None) -> Tensor:
        h = modulate(self.conv_1(concat_elu(hide(x, mask))), modulation)
        return self.norm(x + glu(self.conv_2(concat_elu(h)), dim=1))


class GatedConvNet(Net):
    """A gated residual network: strong for its size on small images.

        y = conv_0(concat_elu(block_depth(... block_1(conv(x)))))     both convolutions 3 wide, conv_0 = 0 at the start

    Arguments:
        in_channels, out_channels: channels before and after.
        hidden: channels of the blocks.
        depth: number of gated blocks.
        dims: 1 or 2 spatial dimensions.
        cond: what the network is conditioned on.
        conditioning: `concat` or `film`.
        attention: entry of `ATTENTION` after the hidden layers, `none` for none.
        heads: heads of the attention, a divisor of `hidden`.

    Shapes: `x (B, in_channels, *space)`, `cond` as `cond` says, `mask` bool, broadcastable to `(B, 1, *space)`; the
    result is `(B, out_channels, *space)`, zero outside the mask.
    Errors: ValueError for x of another shape, or a missing or unexpected condition.
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
        self.blocks = nn.ModuleList(GatedResidual(dims, hidden) for _ in range(depth))
        self.head = zeroed(convolution(2 * hidden, out_channels, 3, padding=1))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x, (first, *rest) = self.enter(x, cond, mask)
        h = modulate(self.stem(x), first)
        for block, modulation in zip(self.blocks, rest, strict=True):
            h = block(h, modulation, mask)
        return self.leave(concat_elu(self.attend(h, mask)), mask)
