"""What refines a whole mel after it has been spoken frame by frame."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.nn.blocks import hide, zeroed
from genmodels.nn.channel_norm import ChannelNorm
from genmodels.nn.dropout import Dropout


class PostNet(nn.Module):
    """A mel with a correction that sees frames on both sides: five convolutions, the last of which starts at zero.

        y = m + W_5 h_4,    h_k = dropout(tanh(norm(W_k h_{k-1}))),    h_0 = m

    A refined frame depends on frames that come after it, so that there is no density of it given those before:
    likelihoods are those of m. Normalised are the channels of each frame (the source normalises over the batch), so
    that neither padding nor other items matter.

    Arguments:
        n_mels: channels of the mel.
        channels: of the four layers between.
        kernel_size: odd, of every convolution.
        dropout: of every layer but the last.

    Shapes: `(B, n_mels, T)` with `mask (B, 1, T)`; frames outside it are zero.
    Source: Shen et al. 2018 (Tacotron 2), section 2.2.

    Example:
        >>> mean = torch.randn(1, 4, 7)
        >>> torch.equal(PostNet(4, 8)(mean), mean)
        True
    """

    def __init__(self, n_mels: int, channels: int = 512, *, kernel_size: int = 5, dropout: float = 0.5):
        super().__init__()
        widths = [n_mels, *[channels] * 4]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, channels, kernel_size, padding=kernel_size // 2) for width in widths[:-1]
        )
        self.norms = nn.ModuleList(ChannelNorm(channels) for _ in self.convolutions)
        self.dropout = Dropout(dropout)
        self.last = zeroed(nn.Conv1d(channels, n_mels, kernel_size, padding=kernel_size // 2))

    def forward(self, mean: Tensor, mask: Tensor | None = None) -> Tensor:
        h = hide(mean, mask)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            h = hide(self.dropout(torch.tanh(norm(convolution(h)))), mask)
        return hide(mean + self.last(h), mask)
