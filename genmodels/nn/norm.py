"""Group normalisation with the scale and shift of a condition, over valid positions only."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def group_count(channels: int, most: int = 32, least_width: int = 4) -> int:
    """The largest divisor of `channels` that is at most 32 and leaves at least 4 channels to each group, else 1.

    Example:
        >>> [group_count(n) for n in (3, 20, 32, 64, 96, 128, 1024)]
        [1, 5, 8, 16, 24, 32, 32]
    """
    fitting = (n for n in range(1, min(channels, most) + 1) if channels % n == 0 and channels // n >= least_width)
    return max(fitting, default=1)


class GroupNorm(nn.Module):
    """Group normalisation whose scale and shift are its own, or come from a condition.

        y = (x - mean_g) / sqrt(var_g + eps) * a + b,   (a, b) learned, or (1 + scale, shift) given per example

    Mean and variance run over the channels of a group and its valid positions; with a mask, positions outside are zero.

    Arguments:
        channels: channels of the map; `group_count` makes the groups.
        affine: whether (a, b) are learned; False when scale and shift are given.
        eps: added to the variance.

    Shapes: `x (B, C, *space)` to the same; `scale`, `shift` `(B, C)`; `mask` bool, broadcastable to `(B, 1, *space)`.
    Source: Wu and He 2018; scale and shift as in Nichol and Dhariwal 2021, section 3.

    Example:
        >>> y = GroupNorm(8)(torch.randn(2, 8, 5, 5))
        >>> bool(y.view(2, 2, -1).mean(-1).abs().max() < 1e-6)
        True
    """

    def __init__(self, channels: int, *, affine: bool = True, eps: float = 1e-5):
        super().__init__()
        self.groups, self.eps = group_count(channels), eps
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None

    def forward(
        self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        a, b = (self.weight, self.bias) if scale is None else (1 + scale, shift)
        if mask is not None:
            return self._masked(x, a, b, mask)
        if scale is None:
            return nn.functional.group_norm(x, self.groups, a, b, self.eps)
        batch, channels, *space = x.shape
        if x.is_contiguous():
            # Each (example, channel) becomes a channel of one big example: the kernel then applies scale and shift in
            # the pass that normalises, instead of two more passes over the map in each direction.
            wide = x.reshape(1, batch * channels, *space)
            y = nn.functional.group_norm(wide, batch * self.groups, a.reshape(-1), b.reshape(-1), self.eps)
            return y.view(x.shape)
        y = nn.functional.group_norm(x, self.groups, eps=self.eps)
        per_channel = (batch, channels) + (1,) * len(space)
        return torch.addcmul(b.reshape(per_channel), y, a.reshape(per_channel))

    def _masked(self, x: Tensor, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        batch, channels, *space = x.shape
        valid = mask.expand(batch, 1, *space).to(x.dtype).flatten(2)[:, :, None]  # (B, 1, 1, L)
        grouped = x.reshape(batch, self.groups, channels // self.groups, -1)
        count = (valid.sum(-1, keepdim=True) * (channels // self.groups)).clamp(min=1)
        mean = (grouped * valid).sum((2, 3), keepdim=True) / count
        centred = (grouped - mean) * valid
        variance = centred.square().sum((2, 3), keepdim=True) / count
        y = (centred * torch.rsqrt(variance + self.eps)).reshape(x.shape)
        per_channel = (-1, channels) + (1,) * len(space)
        return torch.addcmul(b.reshape(per_channel), y, a.reshape(per_channel)) * mask
