"""A residual perceptron denoiser, for vectors and small events."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from genmodels.nn.blocks import zeroed
from genmodels.nn.dropout import Dropout
from genmodels.nn.embedding import ConditionEmbedding


class MLPDenoiser(nn.Module):
    """Residual perceptron from a noisy event and its log-SNR to an event of the same shape.

        h_0 = W_in [x, cos(pi 2^j x), sin(pi 2^j x)]
        h_{i+1} = h_i + W_i' silu(W_i (norm(h_i) (1 + scale_i) + shift_i))

    Scale and shift are linear in the embedding of noise level and class. The output is zero at the start.

    Arguments:
        event_shape: any shape; the event is flattened.
        num_classes: number of classes, None for an unconditional network; `cond=None` stands for the null class.
        double_output: twice the entries of the event's first axis in the output, as learned variances need.
        extra_channels: entries of the first axis that come in and do not go out, as self-conditioning needs.
        hidden: width of the residual stream, even.
        depth: number of residual blocks.
        frequencies: octaves of Fourier features of each coordinate, which sharpen edges in few dimensions; 0 is none.
        dropout: probability of dropping a value inside the blocks.

    Shapes: `x (B, *event)`, `log_snr (B,)`, `cond (B,)` int64 or None; the result is like `x`. A mask is refused.
    Errors: ValueError for events of another shape, an odd width, or a mask.
    Source: residual blocks with scale and shift as in Nichol and Dhariwal 2021; Fourier features of Tancik et al. 2020.

    Example:
        >>> mlp = MLPDenoiser((2,), hidden=16, depth=2)
        >>> mlp(torch.randn(5, 2), torch.zeros(5)).abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        num_classes: int | None = None,
        double_output: bool = False,
        extra_channels: int = 0,
        *,
        hidden: int = 256,
        depth: int = 4,
        frequencies: int = 3,
        dropout: float = 0.0,
    ):
        super().__init__()
        if hidden < 2 or hidden % 2:
            raise ValueError(f"hidden = {hidden} must be even and positive: the noise-level features come in pairs")
        if depth < 1 or frequencies < 0:
            raise ValueError(f"depth = {depth} must be at least 1 and frequencies = {frequencies} at least 0")
        first, *rest = event_shape
        self.event_shape, self.frequencies = (first + extra_channels, *rest), frequencies
        self.out_shape = (first * (2 if double_output else 1), *rest)
        dims = math.prod(self.event_shape)
        self.embedding = ConditionEmbedding(min(hidden, 64), hidden, hidden, num_classes)
        self.modulation = nn.Linear(hidden, 2 * hidden * depth)
        self.stem = nn.Linear(dims * (1 + 2 * frequencies), hidden)
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.dropout = Dropout(dropout)
        self.head = zeroed(nn.Linear(hidden, math.prod(self.out_shape)))

    def forward(self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if tuple(x.shape[1:]) != self.event_shape:
            raise ValueError(f"the MLP was built for events of shape {self.event_shape}, got {tuple(x.shape[1:])}")
        if mask is not None:
            raise ValueError("the MLP takes events of one fixed size: use the U-Net for masked sequences")
        modulation = self.modulation(silu(self.embedding(log_snr, cond))).chunk(2 * len(self.inner), dim=1)
        h = self.stem(self._features(x.flatten(1)))
        for i, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            scale, shift = modulation[2 * i], modulation[2 * i + 1]
            normed = layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
            h = h + outer(self.dropout(silu(inner(normed))))
        h = self.head(silu(layer_norm(h, h.shape[-1:])))
        return h.reshape(len(x), *self.out_shape).to(x.dtype)

    def _features(self, x: Tensor) -> Tensor:
        octaves = [math.pi * 2.0**j * x for j in range(self.frequencies)]
        return torch.cat([x, *(angle.cos() for angle in octaves), *(angle.sin() for angle in octaves)], dim=1)
