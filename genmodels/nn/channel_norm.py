"""Layer normalisation over the channels of a position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of each position, which no other position or example enters.

        y[:, p] = (x[:, p] - mean_c x[c, p]) / sqrt(var_c x[c, p] + eps) * weight + bias

    Arguments:
        channels: channels of the map.
        eps: added to the variance.

    Shapes: `x (B, C, *space)` to the same.
    Source: Ba, Kiros, Hinton 2016, over the channels alone.

    Example:
        >>> ChannelNorm(2)(torch.tensor([[[1.0, 5.0], [3.0, 5.0]]]))
        tensor([[[-1.0000,  0.0000],
                 [ 1.0000,  0.0000]]], grad_fn=<PermuteBackward0>)
    """

    def __init__(self, channels: int, *, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        # The kernel wants the channels last; for a map in that memory format neither turn copies anything.
        y = layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias, self.eps)
        return y.movedim(-1, 1)
