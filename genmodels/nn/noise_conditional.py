"""One network for the scores of all noise levels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NoiseConditionalNet(nn.Module):
    """The score of data with noise N(0, sigma^2), for every sigma, by a network f that is told the noise level.

        s(x, sigma) = f(x / sqrt(1 + sigma^2), log sigma) / sigma

    Dividing by sigma gives f the same scale at all levels, since |score| is about sqrt(D)/sigma; the input is brought
    to unit scale for data of unit scale.

    Arguments:
        network: `(x, log_snr (B,), cond) -> like x`, as `MLPDenoiser` and `UNet`; it is told log_snr = -2 log sigma.

    Shapes: `x (B, *event)`, `sigma (B,)` positive, `cond` as the network takes it; the result is like `x`.
    Source: Song and Ermon 2019, section 4.2 (division by sigma), and 2020, technique 3.

    Example:
        >>> from genmodels.nn.mlp import MLPDenoiser
        >>> net = NoiseConditionalNet(MLPDenoiser((2,), hidden=16, depth=1))
        >>> net(torch.randn(3, 2), torch.tensor([0.1, 1.0, 10.0])).shape
        torch.Size([3, 2])
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        if sigma.shape != x.shape[:1]:
            raise ValueError(f"one sigma for each of {len(x)} examples is needed, got shape {tuple(sigma.shape)}")
        sigma = sigma.to(x.dtype)
        scale = sigma.reshape(-1, *(1,) * (x.dim() - 1))
        return self.network(x * torch.rsqrt(1 + scale.square()), -2 * sigma.log(), cond) / scale
