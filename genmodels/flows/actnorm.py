"""ActNorm: a scale and a shift per channel that start by standardising the first batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from genmodels.flows.bijection import at_each_position
from genmodels.flows.elementwise import bounded, unbounded
from genmodels.flows.initialization import DataInitialized

_LIMIT = 10.0


class ActNorm(DataInitialized):
    """A learned scale and shift of every channel.

        z = (x + b) exp(s),    log |det| = n_pos sum_c s_c,    s = 10 tanh(raw / 10)

    It starts as the identity; `initialize` sets b = -mean and s = -log std, so that the batch leaves with mean 0 and
    variance 1 over examples and valid positions. Channels with a deviation below 1e-3 get s = 0 and are named in one
    warning.

    Arguments:
        channels: number of channels C; of dimensions for vectors.

    Shapes: `x (B, C, *space)`, `mask (B, 1, T)`, `logdet (B,)`.
    Errors: see `DataInitialized`; ValueError for another number of channels.
    Source: Kingma and Dhariwal 2018 (Glow), section 3.1.

    Example:
        >>> layer = ActNorm(1)
        >>> layer.initialize(torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]]))
        >>> z, logdet = layer(torch.tensor([[[4.0, 5.0]]]))
        >>> z.detach(), logdet.detach()
        (tensor([[[0.0000, 0.4472]]]), tensor([-1.6094]))
    """

    def __init__(self, channels: int):
        super().__init__(channels)
        self.bias = nn.Parameter(torch.zeros(channels))
        self.raw_log_scale = nn.Parameter(torch.zeros(channels))

    def log_scale(self) -> Tensor:
        """s, between -10 and 10."""
        return bounded(self.raw_log_scale, _LIMIT)

    def _is_constant(self, mean: Tensor, std: Tensor) -> Tensor:
        return std < 1e-3

    def _take(self, mean: Tensor, std: Tensor) -> None:
        self.bias.copy_(-mean)
        self.raw_log_scale.copy_(unbounded(-torch.log(std), _LIMIT))

    def _forward(self, x, cond, mask):
        bias, log_scale = self.bias.to(x.dtype), self.log_scale().to(x.dtype)
        scale = torch.exp(log_scale)
        return scaled(x, scale, bias * scale), at_each_position(log_scale.sum(), x, mask)

    def _inverse(self, z, cond, mask):
        bias, log_scale = self.bias.to(z.dtype), self.log_scale().to(z.dtype)
        return scaled(z, torch.exp(-log_scale), -bias), at_each_position(-log_scale.sum(), z, mask)


def scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale x + shift` per channel, in one pass over x, and one over the gradient on the way back.

    It is a batch norm with the fixed statistics 0 and 1: its kernel also sums the gradients of both parameters in the
    pass that scales them, and keeps nothing but x.

    Example:
        >>> scaled(torch.ones(1, 2), torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]))
        tensor([[2., 4.]])
    """
    return batch_norm(x, torch.zeros_like(scale), torch.ones_like(scale), scale, shift, training=False, eps=0.0)
