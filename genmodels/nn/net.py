"""What the conditional networks of this room have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from genmodels.nn.blocks import hide
from genmodels.nn.condition import Condition, Conditioning, Modulation
from genmodels.nn.spatial_attention import AttentionKind, make_attention


class Net(nn.Module):
    """A network of an event and its condition, whose last layer is a constant at the start.

        y = head(act(attention(hidden(x, cond)))),    head: weights zero, bias zero or given

    A subclass makes `head`, and in `forward` calls `enter`, its own layers, `attend` and `leave`. A position outside
    the mask is a zero to every layer that looks at its neighbours, just as what lies beyond the border is; so neither
    its content nor the length of the padding changes anything.

    Arguments:
        in_channels, out_channels: channels before and after.
        hidden: channels that the attention sees.
        widths: channels of the layers that the condition may reach.
        cond: what the network is conditioned on, None for nothing.
        conditioning: `concat` or `film` (see `Conditioning`).
        dims: 1 or 2 spatial dimensions, 0 for vectors.
        attention: entry of `ATTENTION`, applied after the hidden layers; `none` for none.
        heads: heads of the attention.
        kernel_size: kernel of the first layer.
        everywhere: whether a concatenated condition reaches all layers.

    Shapes: `x (B, in_channels, *space)`, `mask` bool, broadcastable to `(B, 1, *space)`; the result is
    `(B, out_channels, *space)`, zero outside the mask.
    Errors: ValueError for x of another shape, and whatever `Conditioning` and the attention refuse.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden: int,
        widths: Sequence[int],
        *,
        cond: Condition | None,
        conditioning: str,
        dims: int,
        attention: AttentionKind = "none",
        heads: int = 4,
        kernel_size: int = 1,
        everywhere: bool = False,
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
        """Let the network start at this value `(out_channels,)`, the same for every example and position."""
        if tuple(bias.shape) != (self.out_channels,):
            raise ValueError(f"the output bias has shape ({self.out_channels},), got {tuple(bias.shape)}")
        with torch.no_grad():
            self.head.bias.copy_(bias)

    def enter(self, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, list[Modulation]]:
        """What goes into the first layer, and the condition's part in each layer."""
        if x.dim() != 2 + self.dims or x.shape[1] != self.in_channels:
            space = ("", ", T", ", H, W")[self.dims]
            raise ValueError(f"{type(self).__name__} takes x (B, {self.in_channels}{space}), got {tuple(x.shape)}")
        x = hide(x, mask)
        if self.dims == 2:
            # With the channels of a position side by side, norms over channels (two to five times) and convolutions to
            # few of them (up to twice) are faster on a CPU; every layer keeps the order. A copy, since `contiguous`
            # leaves maps of one channel, which fit both orders, in the one that layers take for the other.
            x = x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)
        return x, self.conditioning(cond, x, mask)

    def attend(self, h: Tensor, mask: Tensor | None) -> Tensor:
        """The attention after the hidden layers."""
        return h if self.attention is None else self.attention(hide(h, mask), mask)

    def leave(self, h: Tensor, mask: Tensor | None) -> Tensor:
        """The last layer; its result is laid out like the event it is for."""
        return hide(self.head(hide(h, mask)), mask).contiguous()
