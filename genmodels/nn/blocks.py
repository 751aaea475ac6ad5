"""The parts of a U-Net, for one and two spatial dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, fold, interpolate, layer_norm, pixel_unshuffle, silu
from torch.utils.checkpoint import checkpoint

from genmodels.core.random import Dropout
from genmodels.core.tensors import hide, wide


def group_count(channels: int) -> int:
    """The largest divisor of `channels` that is at most 32 and leaves at least 4 channels to each group, else 1.

    Example:
        >>> [group_count(n) for n in (3, 20, 32, 64, 96, 128, 1024)]
        [1, 5, 8, 16, 24, 32, 32]
    """
    fitting = (n for n in range(1, min(channels, 32) + 1) if channels % n == 0 and channels // n >= 4)
    return max(fitting, default=1)


class GroupNorm(nn.Module):
    """Group normalisation with a learned scale and shift, or with the scale and shift of a condition.

        y = (x - mean_g) / sqrt(var_g + eps) * a + b,   (a, b) learned, or (1 + scale, shift) given per example

    Mean and variance are over the channels of a group and the valid positions, in float32 or wider; positions outside
    the mask are zero. A single channel at a single position has no variance: its value is lost.

    Arguments:
        channels: channels of the map; `group_count` makes the groups.
        affine: whether (a, b) are learned; False when scale and shift are given.

    Shapes: `x (B, C, *space)` to the same; `scale`, `shift` `(B, C)`; `mask` bool, broadcastable to `(B, 1, *space)`.
    Source: Wu and He 2018; scale and shift as in Nichol and Dhariwal 2021, section 3.

    Example:
        >>> y = GroupNorm(8)(torch.randn(2, 8, 5, 5))
        >>> bool(y.view(2, 2, -1).mean(-1).abs().max() < 1e-6)
        True
    """

    eps = 1e-5

    def __init__(self, channels: int, *, affine: bool = True):
        super().__init__()
        self.groups = group_count(channels)
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None

    def forward(
        self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if not x.numel():
            return x  # torch's kernels divide by the number of examples
        a, b = (self.weight, self.bias) if scale is None else (1 + scale, shift)
        if mask is not None:
            return self._masked(x, a, b, mask)
        if scale is None:
            return nn.functional.group_norm(x, self.groups, a, b, self.eps)
        batch, channels, *space = x.shape
        if x.is_contiguous() and not torch.compiler.is_exporting():
            # With each (example, channel) as a channel of one example the kernel normalises, scales and shifts in one
            # pass. Not for export: the number of groups would fix the number of examples.
            joined = x.reshape(1, batch * channels, *space)
            y = nn.functional.group_norm(joined, batch * self.groups, a.reshape(-1), b.reshape(-1), self.eps)
            return y.view(x.shape)
        y = nn.functional.group_norm(x, self.groups, eps=self.eps)
        per_channel = (batch, channels) + (1,) * len(space)
        return torch.addcmul(b.reshape(per_channel), y, a.reshape(per_channel))

    def _masked(self, x: Tensor, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        batch, channels, *space = x.shape
        grouped = wide(hide(x, mask)).reshape(batch, self.groups, channels // self.groups, -1)
        valid = mask.expand(batch, 1, *space).to(grouped.dtype).flatten(2)[:, :, None]  # (B, 1, 1, L)
        count = (valid.sum(-1, keepdim=True) * (channels // self.groups)).clamp(min=1)
        mean = (grouped * valid).sum((2, 3), keepdim=True) / count
        centred = (grouped - mean) * valid
        variance = centred.square().sum((2, 3), keepdim=True) / count
        y = (centred * torch.rsqrt(variance + self.eps)).reshape(x.shape).to(x.dtype)
        per_channel = (-1, channels) + (1,) * len(space)
        return torch.addcmul(b.reshape(per_channel), y, a.reshape(per_channel)) * mask


CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d}


def check_channels(network: str, x: Tensor, channels: int, dims: int) -> None:
    """Raise ValueError unless x is `(B, channels, *space)` with `dims` spatial dimensions."""
    if x.dim() != dims + 2 or x.shape[1] != channels:
        raise ValueError(f"{network} was built for {channels} channels and {dims} spatial dimensions, got events of "
                         f"shape {tuple(x.shape[1:])}")  # fmt: skip


def check_frames(mask: Tensor) -> None:
    """Raise ValueError unless a mask is bool of shape (B, 1, T)."""
    if mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[1] != 1:
        raise ValueError(f"mask must be bool of shape (B, 1, T), got {mask.dtype} of shape {tuple(mask.shape)}")


def blocks_to_channels(x: Tensor, side: int) -> Tensor:
    """Each block of `side` positions along every axis as the channels of one: channel c side^dims + place in the block.

    Shapes: `x (B, C, *space)` to `(B, C side^dims, *space / side)`, one or two spatial dimensions.

    Example:
        >>> blocks_to_channels(torch.arange(4.0).view(1, 1, 4), 2)[0]
        tensor([[0., 2.],
                [1., 3.]])
    """
    if len(x) == 0:  # which torch's kernel returns as it is
        return x.reshape(0, x.shape[1] * side ** (x.dim() - 2), *(n // side for n in x.shape[2:]))
    if x.dim() == 4:
        return pixel_unshuffle(x, side)
    return x.unflatten(2, (-1, side)).transpose(2, 3).flatten(1, 2)  # (B, C, T f) to (B, C f, T)


def run(part: Callable, *given: Any, again: bool) -> Any:
    """`part(*given)`; with `again` its activations are recomputed in the backward pass instead of being stored.

    The recomputation draws the same random numbers. Second derivatives store the activations of both passes.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> run(torch.exp, x, again=True).sum().backward()
        >>> bool((x.grad == x.exp()).all())
        True
    """
    if again and torch.is_grad_enabled():
        return checkpoint(part, *given, use_reentrant=False)
    return part(*given)


def zeroed(module: nn.Module) -> nn.Module:
    """The module with all parameters set to zero."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


class ResidualBlock(nn.Module):
    """The residual block of DDPM with the condition as scale and shift.

        y = skip(x) + conv_2(dropout(silu(norm_2(h) (1 + scale) + shift))),   h = conv_1(silu(norm_1(x)))

    conv_2 is zero at the start; the skip is the identity, or a 1x1 convolution when the channels change. Scale and
    shift are inputs, since one linear layer computes them for all blocks.

    Arguments:
        dims: 1 or 2 spatial dimensions.
        channels, out_channels: channels before and after.
        dropout: probability of dropping a value.

    Shapes: `x (B, C, *space)`, `modulation (B, 2 out_channels)`, `mask` bool, broadcastable to `(B, 1, *space)`; the
    result is `(B, out_channels, *space)`.
    Source: Ho et al. 2020, appendix B; Nichol and Dhariwal 2021, section 3.

    Example:
        >>> x = torch.randn(2, 8, 7)
        >>> bool((ResidualBlock(1, 8, 8)(x, torch.randn(2, 16)) == x).all())
        True
    """

    def __init__(self, dims: int, channels: int, out_channels: int, dropout: float = 0.0):
        super().__init__()
        convolution = CONVOLUTION[dims]
        self.norm_1 = GroupNorm(channels)
        self.conv_1 = convolution(channels, out_channels, 3, padding=1)
        self.norm_2 = GroupNorm(out_channels, affine=False)
        self.dropout = Dropout(dropout)
        self.conv_2 = zeroed(convolution(out_channels, out_channels, 3, padding=1))
        self.skip = nn.Identity() if channels == out_channels else convolution(channels, out_channels, 1)

    def forward(self, x: Tensor, modulation: Tensor, mask: Tensor | None = None) -> Tensor:
        # A masked norm gives zeros outside the mask, which silu and dropout keep.
        scale, shift = modulation.chunk(2, dim=1)
        h = self.conv_1(silu(self.norm_1(x, mask=mask)))
        h = silu(self.norm_2(h, scale, shift, mask=mask))
        return self.skip(x) + self.conv_2(self.dropout(h))


class NarrowConv2d(nn.Conv2d):
    """A padded 3x3 convolution to few channels: a product per position, a sum of nine shifted maps.

        y[o, p] = b[o] + sum_tap (w[o, :, tap] . x[:, p + tap])

    On a CPU it takes about a third of the time of torch's convolution for up to three channels.

    Example:
        >>> NarrowConv2d(8, 3, 3, padding=1)(torch.zeros(1, 8, 4, 5)).shape
        torch.Size([1, 3, 4, 5])
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *space = x.shape
        # `fold` adds tap k of position p at p + k; the sum reads at p + k, hence the flip.
        taps = self.weight.flip(2, 3).permute(0, 2, 3, 1).reshape(1, -1, channels)
        products = torch.bmm(taps.expand(batch, -1, -1), x.flatten(2))
        return fold(products, tuple(space), 3, padding=1) + self.bias[:, None, None]


class Downsample(nn.Module):
    """A convolution of stride 2: n positions become ceil(n/2).

    Example:
        >>> Downsample(2, 4)(torch.zeros(1, 4, 7, 8)).shape
        torch.Size([1, 4, 4, 4])
    """

    def __init__(self, dims: int, channels: int):
        super().__init__()
        self.conv = CONVOLUTION[dims](channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.conv(hide(x, mask))


class Upsample(nn.Module):
    """Nearest resize up to a given size, then a convolution: ceil(n/2) positions become n.

    Arguments:
        dims: 1 or 2 spatial dimensions.
        channels, out_channels: channels before and after.

    Shapes: `x (B, C, *space)`, `size` with `space = ceil(size / 2)`, `mask` of the larger size; the result is
    `(B, out_channels, *size)`.

    Example:
        >>> Upsample(2, 4, 4)(torch.zeros(1, 4, 4, 4), (7, 8)).shape
        torch.Size([1, 4, 7, 8])
    """

    def __init__(self, dims: int, channels: int, out_channels: int):
        super().__init__()
        self.conv = CONVOLUTION[dims](channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor, size: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
        doubled = tuple(2 * n for n in x.shape[2:]) == tuple(size)
        if mask is None and doubled and len(size) == 2:
            return resized_twice_convolution(x, self.conv.weight, self.conv.bias)
        # By a factor: from sizes torch computes positions in float32, some of which are the next one from 2,095 on.
        x = interpolate(x, scale_factor=2.0, mode="nearest")
        for axis, length in enumerate(size, 2):
            x = x.narrow(axis, 0, length)
        return self.conv(hide(x, mask))


def resized_twice_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Nearest resize by two and a padded 3x3 convolution in one, with 16 products instead of 36.

    Along one axis, with taps w_0 w_1 w_2 and y the result,

        y[2i]     = w_0 x[i-1] + (w_1 + w_2) x[i]
        y[2i + 1] = (w_0 + w_1) x[i] + w_2 x[i+1]

    so each of the four (even or odd row, even or odd column) parts is a 2x2 convolution of the small map.

    Shapes: `x (B, C, H, W)`, `weight (O, C, 3, 3)`, `bias (O,)`; the result is `(B, O, 2H, 2W)`.

    Example:
        >>> x, weight, bias = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 3, 3), torch.zeros(1)
        >>> resized_twice_convolution(x, weight, bias)[0, 0]
        tensor([[4., 6., 6., 4.],
                [4., 6., 6., 4.]])
    """
    batch, _, height, width = x.shape
    out_channels = weight.shape[0]
    parts = _merge_taps(_merge_taps(weight, -2), -1)  # (column parity, row parity, O, C, 2, 2)
    parity = conv2d(x, parts.flatten(0, 2), bias.repeat(4), padding=1)
    parity = parity.view(batch, 2, 2, out_channels, height + 1, width + 1)
    rows = [
        torch.stack([parity[:, b, a, :, a : a + height, b : b + width] for b in (0, 1)], dim=-1)  # (B, O, H, W, 2)
        for a in (0, 1)
    ]
    y = torch.stack(rows, dim=3).reshape(batch, out_channels, 2 * height, 2 * width)
    return y if x.is_contiguous() else y.contiguous(memory_format=torch.channels_last)


def _merge_taps(weight: Tensor, axis: int) -> Tensor:
    """The pairs of taps for even and odd positions along a (negative) axis: (.., 3, ..) to (2, .., 2, ..)."""
    first, middle, last = weight.unbind(axis)
    return torch.stack([torch.stack([first, middle + last], axis), torch.stack([first + middle, last], axis)])


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of each position.

        y[:, p] = (x[:, p] - mean_c x[c, p]) / sqrt(var_c x[c, p] + eps) * weight + bias

    Arguments:
        channels: channels of the map.

    Shapes: `x (B, C, *space)` to the same.
    Source: Ba, Kiros, Hinton 2016, over the channels alone.

    Example:
        >>> ChannelNorm(2)(torch.tensor([[[1.0, 5.0], [3.0, 5.0]]]))
        tensor([[[-1.0000,  0.0000],
                 [ 1.0000,  0.0000]]], grad_fn=<PermuteBackward0>)
    """

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        # For a map in channels-last memory format neither `movedim` copies.
        y = layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias)
        return y.movedim(-1, 1)


#: Log-SNR is clipped to this range, so that +-inf is valid.
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
    low, high = LOG_SNR_RANGE
    return _sinusoids((wide(log_snr).clamp(low, high) - low) * (1000 / (high - low)), width)


def _sinusoids(position: Tensor, width: int) -> Tensor:
    index = torch.arange(width // 2, dtype=position.dtype, device=position.device)
    angle = position[:, None] * torch.exp(-math.log(10000) / (width // 2) * index)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def time_features(times: Tensor, width: int) -> Tensor:
    """Sinusoids of t and of t - s, for the two times of a flow map.

        features of `log_snr_features` with p = 20 t, then with p = 20 (t - s)

    The low frequencies keep derivatives in time, from which mean flows learn, small.

    Shapes: `times (B, 2)`, t and s in [0, 1], to `(B, 2 width)`, float32 or wider whatever the autocast.
    Source: Geng et al., "Mean flows for one-step generative modeling", 2025, table 1c: (t, t - r).

    Example:
        >>> time_features(torch.tensor([[0.5, 0.5]]), 2)  # cos and sin of 10, then of 0
        tensor([[-0.8391, -0.5440,  1.0000,  0.0000]])
    """
    t, s = wide(times).unbind(1)
    return torch.cat([_sinusoids(20 * t, width), _sinusoids(20 * (t - s), width)], dim=1)


def fourier_features(x: Tensor, log_snr: Tensor, octaves: Sequence[int], scale: Tensor | None = None) -> Tensor:
    """Sines and cosines of the noisy data, for details below the scale that a network resolves.

        sin(w x / (r alpha)) d,  cos(w x / (r alpha)) d,   w = 2^n pi,   d = exp(-w^2 / (2 SNR)),   n in octaves

    These are the means of sin(w x_0) and cos(w x_0) given x = r (alpha x_0 + sigma eps) under a flat prior: a frequency
    fades where the noise hides it. The log-SNR is clipped to [-20, 20].

    Shapes: `x (B, C, *space)`, `log_snr (B,)`, `scale` r `(B,)`, 1 by default, to `(B, 2 C len(octaves), *space)`,
    float32 or wider whatever the autocast.
    Source: Kingma et al., "Variational diffusion models", 2021, appendix C, there without d and of x.

    Example:
        >>> fourier_features(torch.full((1, 1, 1), 0.25), torch.tensor([30.0]), [0]).flatten()
        tensor([0.7071, 0.7071])
    """
    x, log_snr = wide(x), wide(log_snr).clamp(*LOG_SNR_RANGE).reshape(-1, *[1] * (x.dim() - 1))
    x = x if scale is None else x / wide(scale).reshape(log_snr.shape)
    clean = x * torch.sqrt(1 + torch.exp(-log_snr))  # x/alpha; the sigmoid of ONNX's runtime is 0 at -20
    angles = torch.cat([2.0**n * math.pi * clean for n in octaves], dim=1)
    fading = torch.cat([torch.exp(-(4.0**n) * math.pi**2 / 2 * torch.exp(-log_snr)).expand_as(x) for n in octaves], 1)
    return torch.cat([angles.sin() * fading, angles.cos() * fading], dim=1)


class ConditionEmbedding(nn.Module):
    """One vector per example from its noise level and its class.

        e = W_2 silu(W_1 features(level)) + class_table[cond]

    Arguments:
        features: width of the sinusoidal features, even.
        hidden: width between the two linear layers.
        width: width of the result.
        num_classes: number of classes, None for an unconditional network. The table has one more row, the null
            class `num_classes`, which is used when `cond` is None and may be given as a label.
        two_times: the level is the two times of a flow map instead of a log-SNR, see `time_features`.

    Shapes: `level (B,)`, or `(B, 2)` with two times; `cond (B,)` int64 or None; the result is `(B, width)`.
    Errors: ValueError when labels reach a network without classes, or are not integers of shape (B,).

    Example:
        >>> embedding = ConditionEmbedding(8, 32, 16, num_classes=3)
        >>> embedding(torch.zeros(2), torch.tensor([0, 3])).shape
        torch.Size([2, 16])
    """

    def __init__(self, features: int, hidden: int, width: int, num_classes: int | None = None, two_times: bool = False):
        super().__init__()
        if features < 2 or features % 2:
            raise ValueError(f"the noise-level features need an even width of at least 2, got {features}")
        self.features, self.num_classes, self.two_times = features, num_classes, two_times
        self.inner = nn.Linear(features * (1 + two_times), hidden)
        self.outer = nn.Linear(hidden, width)
        self.classes = None if num_classes is None else nn.Embedding(num_classes + 1, width)

    def forward(self, level: Tensor, cond: Tensor | None = None) -> Tensor:
        features = (time_features if self.two_times else log_snr_features)(level, self.features)
        embedding = self.outer(silu(self.inner(features.to(self.inner.weight.dtype))))
        if self.classes is None:
            if cond is not None:
                raise ValueError("this network was built without classes: pass cond=None or set num_classes")
            return embedding
        if cond is None:
            return embedding + self.classes.weight[self.num_classes]
        if cond.dim() != 1 or cond.is_floating_point():
            raise ValueError(f"cond must be integer labels (B,), got {cond.dtype} of shape {tuple(cond.shape)}")
        return embedding + self.classes(cond)
