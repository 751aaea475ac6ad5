"""ActNorm: a scale and a shift per channel that start by standardising the first batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from genmodels.flows.bijection import at_each_position
from genmodels.flows.elementwise import bounded, unbounded
from genmodels.flows.initialization import DataInitialized

_LIMIT = 10.0
_STEEP = 9.0  # log-scales up to here are left to the bounded parameter: its slope is 0.2 there, and vanishes beyond


class ActNorm(DataInitialized):
    """A learned scale and shift of every channel.

        z = (x + b) exp(s),    log |det| = n_pos sum_c s_c,    s = o + 10 tanh(raw / 10)

    It starts as the identity; `initialize` sets b = -mean and s = -log std, so that the batch leaves with mean 0 and
    variance 1 over examples and valid positions. Channels with a standard deviation below 1e-3 get s = 0 and are named
    in one warning. The offset o is a buffer: of the log-scales of channels wider than e^9 it takes what exceeds 9, and
    is 0 for others.

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
        self.register_buffer("offset", torch.zeros(channels))

    def log_scale(self) -> Tensor:
        """s, less than 10 from the offset."""
        return self.offset + bounded(self.raw_log_scale, _LIMIT)

    def _is_constant(self, mean: Tensor, std: Tensor) -> Tensor:
        return std < 1e-3

    def _take(self, mean: Tensor, std: Tensor) -> None:
        self.bias.copy_(-mean)
        log_scale = -torch.log(std)
        learned = log_scale.clamp(-_STEEP, _STEEP)
        self.offset.copy_(log_scale - learned)
        self.raw_log_scale.copy_(unbounded(learned, _LIMIT))

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        state_dict.setdefault(f"{prefix}offset", torch.zeros_like(self.offset))  # files from before there was one
        super()._load_from_state_dict(state_dict, prefix, *arguments)

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
