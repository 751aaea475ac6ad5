"""Transformer encoder with any attention of the package, for sequences of symbols or frames."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

from genmodels.core.errors import at_least
from genmodels.core.tensors import hide
from genmodels.nn.attention import Cache
from genmodels.nn.attention_block import AttentionKind, Site, make_mechanism
from genmodels.nn.blocks import ChannelNorm, run
from genmodels.nn.dropout import Dropout


class TransformerLayer(nn.Module):
    """Attention, then two convolutions; each normed before and added to what came in.

        h = x + dropout(attention(norm_1(x))),    y = h + dropout(conv_2(dropout(relu(conv_1(norm_2(h))))))

    With `shaw_zero`, that of the paper, distances up to `window` have vectors of their own and further ones add
    nothing; every position is attended to.

    Arguments:
        channels: channels of the sequence.
        heads: heads of the attention; divides the channels.
        hidden: channels between the convolutions.
        kernel_size: kernel of the convolutions, odd.
        window: largest distance with relative vectors, for the kinds of Shaw; None for their default, 4 or 16.
        dropout: probability of dropping a value, or a weight of attention where the kind has dropout.
        attention: entry of `ATTENTION` for sequences; `none` leaves the convolutions alone.

    Shapes: `x (B, C, T)` to the same, `mask (B, 1, T)` bool, True = valid: the result is zero outside it.
    Errors: ValueError for an even kernel, heads that do not divide the channels, an unknown attention, a window for an
    attention that has none.
    Source: Kim et al. 2020, "Glow-TTS", appendix A.1; norms before as in Xiong et al. 2020.

    Example:
        >>> import torch
        >>> TransformerLayer(8, 2)(torch.randn(3, 8, 5)).shape
        torch.Size([3, 8, 5])
    """

    def __init__(
        self,
        channels: int,
        heads: int = 2,
        *,
        hidden: int = 768,
        kernel_size: int = 3,
        window: int | None = None,
        dropout: float = 0.1,
        attention: AttentionKind = "shaw_zero",
    ):
        super().__init__()
        at_least(1, channels=channels, heads=heads, hidden=hidden, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size = {kernel_size} must be odd, so that the length stays")
        if window is not None and not attention.startswith("shaw"):
            raise ValueError(f"window = {window} is for attention = shaw, shaw_shared and shaw_zero, not {attention}")
        mechanism = make_mechanism(attention, channels, heads, Site(1, None, dropout, window))
        self.norm_1 = None if mechanism is None else ChannelNorm(channels)
        self.norm_2 = ChannelNorm(channels)
        self.attention = mechanism
        self.conv_1 = nn.Conv1d(channels, hidden, kernel_size, padding=kernel_size // 2)
        self.conv_2 = nn.Conv1d(hidden, channels, kernel_size, padding=kernel_size // 2)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = hide(x, mask)
        if self.attention is not None:
            y, _ = self.attention(self.norm_1(h).transpose(1, 2), mask=mask)
            h = h + self.dropout(y.transpose(1, 2))
        return self._convolved(h, mask)

    def extend(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """The same for new positions of a sequence whose past is in the cache, None for none, and the cache after them.

        For a kernel of one position, and an attention that has a cache.
        """
        rows = self.norm_1(x).transpose(1, 2)
        y, cache = self.attention(rows, cache=self.attention.empty_cache(rows) if cache is None else cache)
        return self._convolved(x + y.transpose(1, 2), None), cache

    def _convolved(self, h: Tensor, mask: Tensor | None) -> Tensor:
        inside = self.dropout(relu(self.conv_1(hide(self.norm_2(h), mask))))
        return hide(h + self.dropout(self.conv_2(hide(inside, mask))), mask)


class Transformer(nn.Module):
    """A stack of `TransformerLayer` with a norm at its end.

        y = norm(layer_n(... layer_1(x)))

    Arguments:
        channels: channels of the sequence.
        depth: number of layers.
        heads, hidden, kernel_size, window, dropout, attention: see `TransformerLayer`.
        checkpointing: recompute the inside of each layer in the backward pass instead of storing it.

    Shapes: `x (B, C, T)` to the same, `mask (B, 1, T)` bool, True = valid: neither what stands outside it nor how much
    padding there is changes anything, and the result is zero there.
    Errors: ValueError for x of other channels, and whatever a layer refuses.
    Source: Kim et al. 2020, "Glow-TTS", appendix A.1: 192 channels, 6 layers, 2 heads, window 4.

    Example:
        >>> import torch
        >>> x, mask = torch.randn(2, 8, 5), torch.tensor([[[1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0]]]).bool()
        >>> Transformer(8, depth=2, hidden=16)(x, mask)[1, :, 2:].abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(
        self,
        channels: int = 192,
        *,
        depth: int = 6,
        heads: int = 2,
        hidden: int = 768,
        kernel_size: int = 3,
        window: int | None = None,
        dropout: float = 0.1,
        attention: AttentionKind = "shaw_zero",
        checkpointing: bool = False,
    ):
        super().__init__()
        self.channels, self.checkpointing = channels, checkpointing
        self.layers = nn.ModuleList(
            TransformerLayer(channels, heads, hidden=hidden, kernel_size=kernel_size, window=window, dropout=dropout,
                             attention=attention)
            for _ in range(depth)
        )  # fmt: skip
        self.norm = ChannelNorm(channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dim() != 3 or x.shape[1] != self.channels:
            raise ValueError(f"the transformer takes x (B, {self.channels}, T), got {tuple(x.shape)}")
        x = hide(x, mask)
        for layer in self.layers:
            x = run(layer, x, mask, again=self.checkpointing)
        return hide(self.norm(x), mask)
