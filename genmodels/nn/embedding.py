"""How a network is told the noise level and the class: one vector for both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from genmodels.nn.precision import wide

#: Log-SNR beyond these ends is as good as clean or as pure noise; it also makes +-inf legal.
LOG_SNR_RANGE = (-20.0, 20.0)


def log_snr_features(log_snr: Tensor, width: int) -> Tensor:
    """Sinusoids of the log-SNR, clipped to [-20, 20] and mapped affinely to p in [0, 1000].

        features = [cos(p w_i), sin(p w_i)],   w_i = 10000^(-i/m),   i = 0 .. m-1,   m = width/2

    Shapes: `log_snr (B,)` to `(B, width)`, float32 or wider whatever the autocast; `width` is even.
    Source: Vaswani et al. 2017, section 3.5, with the step number of DDPM (Ho et al. 2020) replaced by the log-SNR.

    Example:
        >>> log_snr_features(torch.tensor([-float("inf"), 0.0, 30.0]), 4)[:, 0]
        tensor([ 1.0000, -0.8838,  0.5624])
    """
    half = width // 2
    low, high = LOG_SNR_RANGE
    log_snr = wide(log_snr)
    position = (log_snr.clamp(low, high) - low) * (1000 / (high - low))
    index = torch.arange(half, dtype=log_snr.dtype, device=log_snr.device)
    angle = position[:, None] * torch.exp(-math.log(10000) / half * index)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def fourier_features(x: Tensor, log_snr: Tensor, octaves: Sequence[int]) -> Tensor:
    """Sines and cosines of the noisy data, for what a network tells apart below the scale at which it sees them.

        sin(w x / alpha) d,  cos(w x / alpha) d,   w = 2^n pi,   d = exp(-w^2 / (2 SNR)),   n in octaves

    These are the means of sin(w x_0) and cos(w x_0) given x = alpha x_0 + sigma eps under a flat prior: a frequency
    fades where the noise hides it. The log-SNR is clipped to [-20, 20].

    Shapes: `x (B, C, *space)`, `log_snr (B,)` to `(B, 2 C len(octaves), *space)`, float32 or wider whatever the
    autocast.
    Source: Kingma et al., "Variational diffusion models", 2021, appendix C, there without d and of x.

    Example:
        >>> fourier_features(torch.full((1, 1, 1), 0.25), torch.tensor([30.0]), [0]).flatten()
        tensor([0.7071, 0.7071])
    """
    x, log_snr = wide(x), wide(log_snr).clamp(*LOG_SNR_RANGE).reshape(-1, *[1] * (x.dim() - 1))
    clean = x / torch.sigmoid(log_snr).sqrt()
    angles = torch.cat([2.0**n * math.pi * clean for n in octaves], dim=1)
    fading = torch.cat([torch.exp(-(4.0**n) * math.pi**2 / 2 * torch.exp(-log_snr)).expand_as(x) for n in octaves], 1)
    return torch.cat([angles.sin() * fading, angles.cos() * fading], dim=1)


class ConditionEmbedding(nn.Module):
    """One vector per example from its noise level and its class.

        e = W_2 silu(W_1 features(log_snr)) + class_table[cond]

    Arguments:
        features: width of the sinusoidal features, even.
        hidden: width between the two linear layers.
        width: width of the result.
        num_classes: number of classes, None for an unconditional network. The table has one more row, the null
            class `num_classes`: it stands for "no condition", is used when `cond` is None, and may be given as a label.

    Shapes: `log_snr (B,)`, `cond (B,)` int64 or None; the result is `(B, width)`.
    Errors: ValueError when labels reach a network without classes, or are not integers of shape (B,).

    Example:
        >>> embedding = ConditionEmbedding(8, 32, 16, num_classes=3)
        >>> embedding(torch.zeros(2), torch.tensor([0, 3])).shape
        torch.Size([2, 16])
    """

    def __init__(self, features: int, hidden: int, width: int, num_classes: int | None = None):
        super().__init__()
        if features < 2 or features % 2:
            raise ValueError(f"the noise-level features need an even width of at least 2, got {features}")
        self.features, self.num_classes = features, num_classes
        self.inner = nn.Linear(features, hidden)
        self.outer = nn.Linear(hidden, width)
        self.classes = None if num_classes is None else nn.Embedding(num_classes + 1, width)

    def forward(self, log_snr: Tensor, cond: Tensor | None = None) -> Tensor:
        features = log_snr_features(log_snr, self.features).to(self.inner.weight.dtype)
        embedding = self.outer(nn.functional.silu(self.inner(features)))
        if self.classes is None:
            if cond is not None:
                raise ValueError("this network was built without classes: pass cond=None or set num_classes")
            return embedding
        if cond is None:
            return embedding + self.classes.weight[self.num_classes]
        if cond.dim() != 1 or cond.is_floating_point():
            raise ValueError(f"cond must be integer labels (B,), got {cond.dtype} of shape {tuple(cond.shape)}")
        return embedding + self.classes(cond)
