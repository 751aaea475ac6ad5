"""The coupling network of Glow."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.nn.blocks import CONVOLUTION, hide, zeroed
from genmodels.nn.condition import Condition, modulate
from genmodels.nn.net import Net
from genmodels.nn.spatial_attention import AttentionKind


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
    """The coupling network of Glow: no norm and no dropout, so that it is exact and the same in both modes.

        y = conv3_0(relu(conv1(relu(conv3(x))))) exp(3 s),   conv3_0 = s = 0 at the start

    Arguments:
        in_channels, out_channels: channels before and after.
        hidden: channels of the hidden layers.
        depth: number of hidden layers, the first 3 wide and the others 1; 0 leaves the last layer alone, which is the
            learned prior of Glow.
        dims: 1 or 2 spatial dimensions.
        cond: what the network is conditioned on.
        conditioning: `concat` or `film`.
        attention: entry of `ATTENTION` after the hidden layers, `none` for none.
        heads: heads of the attention, a divisor of `hidden`.

    Shapes: `x (B, in_channels, *space)`, `cond` as `cond` says, `mask` bool, broadcastable to `(B, 1, *space)`; the
    result is `(B, out_channels, *space)`, zero outside the mask.
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
        cond: Condition | None = None,
        conditioning: Literal["concat", "film"] = "concat",
        attention: AttentionKind = "none",
        heads: int = 4,
    ):
        if depth == 0 and attention != "none":
            raise ValueError("attention stands after hidden layers: depth = 0 has none")
        super().__init__(
            in_channels, out_channels, hidden, [hidden] * depth or [out_channels], cond=cond,
            conditioning=conditioning, dims=dims, attention=attention, heads=heads, kernel_size=3,
        )  # fmt: skip
        convolution = CONVOLUTION[dims]
        self.layers = nn.ModuleList(
            convolution(hidden, hidden, 1) if number else convolution(in_channels, hidden, 3, padding=1)
            for number in range(depth)
        )
        self.head = ScaledHead(dims, hidden if depth else in_channels, out_channels)
        if depth == 0 and cond is not None:
            zeroed(self.conditioning.project)

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h, modulations = self.enter(x, cond, mask)
        if not self.layers:
            return hide(modulate(self.head(h), modulations[0]), mask).contiguous()
        for layer, modulation in zip(self.layers, modulations, strict=True):
            # In place: neither the convolution nor the modulation needs its result again.
            h = modulate(layer(h), modulation).relu_()
        return self.leave(self.attend(h, mask), mask)
