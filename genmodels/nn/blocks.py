"""The parts of a U-Net, for one and two spatial dimensions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, fold, interpolate, silu

from genmodels.nn.dropout import Dropout
from genmodels.nn.norm import GroupNorm

CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d}


def zeroed(module: nn.Module) -> nn.Module:
    """The same module with every parameter set to zero, so that the branch it ends is silent at the start."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` with invalid positions set to zero, so that a convolution sees padding there and nothing else.

    A choice, not a product: a product would let a NaN of the padding through.
    """
    return x if mask is None else x.masked_fill(~mask, 0)


class ResidualBlock(nn.Module):
    """The residual block of DDPM with the condition as scale and shift.

        y = skip(x) + conv_2(dropout(silu(norm_2(h) (1 + scale) + shift))),   h = conv_1(silu(norm_1(x)))

    conv_2 is zero at the start; the skip is the identity, or a 1x1 convolution when the channels change. Scale and
    shift come from outside, since one linear layer makes those of all blocks at once.

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
        # A masked norm leaves zeros outside, silu and dropout keep them: both convolutions see padding there.
        scale, shift = modulation.chunk(2, dim=1)
        h = self.conv_1(silu(self.norm_1(x, mask=mask)))
        h = silu(self.norm_2(h, scale, shift, mask=mask))
        return self.skip(x) + self.conv_2(self.dropout(h))


class NarrowConv2d(nn.Conv2d):
    """A padded 3x3 convolution to a few channels (see `narrow_convolution`).

    Example:
        >>> NarrowConv2d(8, 3, 3, padding=1)(torch.zeros(1, 8, 4, 5)).shape
        torch.Size([1, 3, 4, 5])
    """

    def forward(self, x: Tensor) -> Tensor:
        return narrow_convolution(x, self.weight, self.bias)


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
        return self.conv(hide(interpolate(x, size=tuple(size), mode="nearest"), mask))


def resized_twice_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Nearest resize by two and a padded 3x3 convolution, without ever making the large map: 16 products stand for 36.

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


def narrow_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A padded 3x3 convolution to very few channels: one product per position, then nine shifted maps added up.

        y[o, p] = b[o] + sum_tap (w[o, :, tap] . x[:, p + tap])

    The products read the map once and leave 9 O channels. Kernels for convolutions block over output channels instead,
    and take about three times as long on a CPU when there are one to three of them.

    Shapes: `x (B, C, H, W)`, `weight (O, C, 3, 3)`, `bias (O,)`; the result is `(B, O, H, W)`.

    Example:
        >>> x, weight, bias = torch.ones(1, 1, 2, 3), torch.ones(1, 1, 3, 3), torch.zeros(1)
        >>> narrow_convolution(x, weight, bias)[0, 0]
        tensor([[4., 6., 4.],
                [4., 6., 4.]])
    """
    batch, channels, *space = x.shape
    # `fold` adds column k of a position at its tap k; reading at p + tap is writing at p - tap, hence the flip.
    taps = weight.flip(2, 3).permute(0, 2, 3, 1).reshape(1, -1, channels)
    products = torch.bmm(taps.expand(batch, -1, -1), x.flatten(2))
    return fold(products, tuple(space), 3, padding=1) + bias[:, None, None]


def _merge_taps(weight: Tensor, axis: int) -> Tensor:
    """Three taps along a (negative) axis to the pairs for even and for odd positions: (.., 3, ..) to (2, .., 2, ..)."""
    first, middle, last = weight.unbind(axis)
    return torch.stack([torch.stack([first, middle + last], axis), torch.stack([first + middle, last], axis)])
