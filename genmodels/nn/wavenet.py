"""The coupling network of Glow-TTS: a WaveNet that looks to both sides."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from genmodels.nn.blocks import hide, zeroed
from genmodels.nn.condition import Condition, modulate
from genmodels.nn.dropout import Dropout
from genmodels.nn.net import Net
from genmodels.nn.spatial_attention import AttentionKind


class WaveNet(Net):
    """A WaveNet without causality, for sequences.

        h_1 = conv1_in(x),   (a_i, g_i) = conv_i(h_i) + V_i c,   u_i = dropout(tanh(a_i) sigmoid(g_i))
        h_{i+1} = h_i + R_i u_i,   y = W sum_i (S_i u_i) + b,   W = 0 at the start

    R_i and S_i are 1 wide and make one convolution. Glow-TTS normalises weights by their lengths; these are plain.

    Arguments:
        in_channels, out_channels: channels before and after.
        hidden: channels of the residual and the skip stream.
        depth: number of gated layers.
        kernel_size: kernel of conv_i, odd.
        dilation_rate: layer i (from 0) looks at every dilation_rate^i-th position.
        dropout: probability of dropping a gated value.
        cond: what the network is conditioned on; it enters every layer.
        conditioning: `concat` (the sum above) or `film`.
        attention: entry of `ATTENTION` after the hidden layers, `none` for none.
        heads: heads of the attention, a divisor of `hidden`.

    Shapes: `x (B, in_channels, T)`, `cond` as `cond` says, `mask (B, 1, T)` bool; the result is `(B, out_channels, T)`,
    zero outside the mask.
    Errors: ValueError for x of another shape, an even kernel, or a missing or unexpected condition.
    Source: van den Oord et al. 2016, "WaveNet", section 2; Prenger et al. 2019, "WaveGlow"; Kim et al. 2020,
    "Glow-TTS", appendix A.1.

    Example:
        >>> import torch
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
        cond: Condition | None = None,
        conditioning: Literal["concat", "film"] = "concat",
        attention: AttentionKind = "none",
        heads: int = 4,
    ):
        if kernel_size % 2 == 0 or dilation_rate < 1:
            raise ValueError(f"kernel_size = {kernel_size} must be odd and dilation_rate = {dilation_rate} at least 1")
        super().__init__(
            in_channels, out_channels, hidden, [2 * hidden] * depth, cond=cond,
            conditioning=conditioning, dims=1, attention=attention, heads=heads, everywhere=True,
        )  # fmt: skip
        self.hidden = hidden
        self.stem = nn.Conv1d(in_channels, hidden, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(
                hidden, 2 * hidden, kernel_size, dilation=dilation_rate**i,
                padding=(kernel_size - 1) // 2 * dilation_rate**i,
            )
            for i in range(depth)
        )  # fmt: skip
        # Nothing follows the residual stream of the last layer: it has none.
        self.branches = nn.ModuleList(nn.Conv1d(hidden, 2 * hidden, 1) for _ in range(depth - 1))
        self.last = nn.Conv1d(hidden, hidden, 1)
        self.dropout = Dropout(dropout)
        self.head = zeroed(nn.Conv1d(hidden, out_channels, 1))

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x, modulations = self.enter(x, cond, mask)
        h, skipped = self.stem(x), 0
        for gate, branch, modulation in zip(self.gates, [*self.branches, self.last], modulations, strict=True):
            value, opening = modulate(gate(hide(h, mask)), modulation).chunk(2, dim=1)
            inside = branch(self.dropout(value.tanh() * opening.sigmoid()))
            skipped = skipped + inside[:, -self.hidden :]
            if branch is not self.last:
                h = h + inside[:, : self.hidden]
        return self.leave(self.attend(skipped, mask), mask)
