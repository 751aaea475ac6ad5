"""The U-Net of DDPM, conditioned on the log-SNR, for images and sequences of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from genmodels.core.errors import at_least, one_of
from genmodels.core.tensors import hide
from genmodels.nn.attention_block import AttentionKind, check_kind, make_attention
from genmodels.nn.blocks import (
    CONVOLUTION,
    ConditionEmbedding,
    Downsample,
    GroupNorm,
    NarrowConv2d,
    ResidualBlock,
    Upsample,
    check_channels,
    check_frames,
    fourier_features,
    run,
    zeroed,
)


class UNet(nn.Module):
    """Residual U-Net from a noisy event and its log-SNR to an event of the same shape.

    Level l has `channels * multipliers[l]` channels and `ceil(n / 2^l)` positions a side, `blocks` residual blocks on
    the way down and one more, with skip connections, on the way up. An embedding of noise level and class scales and
    shifts every block. The output is zero at the start.

    Arguments:
        event_shape: (C, H, W) or (C, T); other sizes may be given to `forward`, the channels are fixed.
        num_classes: number of classes, None for an unconditional network; `cond=None` stands for the null class.
        double_output: twice the channels in the output, as learned variances need.
        extra_channels: further input channels after the event's own, as self-conditioning needs.
        two_times: in place of the log-SNR the network takes the two times of a flow map, (B, 2).
        channels: channels of the first level.
        multipliers: one per level.
        blocks: residual blocks per level.
        attention_at: sizes (of the first spatial side) of the levels with attention; None for the lowest level. The
            middle always has attention, unless `attention` is none.
        attention: kind of attention, an entry of `ATTENTION` (see `genmodels.nn.attention_block`); `plain` has no
            positions.
        heads: heads of each attention; divides the channels wherever there is attention.
        dropout: probability of dropping a value inside the residual blocks.
        fourier: octaves n of the further inputs sin(2^n pi x) and cos(2^n pi x), see `fourier_features`.
        fourier_of: the x of these, `data` with noise, or the `input`, of which the path or the parameterisation may
            make another scale; the networks of earlier versions have the latter.
        channels_last: keep images in channels-last memory format.
        checkpointing: recompute the blocks in the backward pass instead of storing their activations.
        condition: width of the embedding of noise level and class, 2.5 `channels` by default.
        narrow_early: whether the convolution after a resize, and not the next block as in diffusers, changes to the
            width of the next level; with fewer weights.

    Shapes: `x (B, *event)`, `log_snr (B,)`, `cond (B,)` int64 or None, `mask (B, 1, T)` bool, True = valid, or None,
    with T the last axis of the event; `scale (B,)` is the r of x = r (alpha x_0 + sigma eps), None for 1. The result is
    like `x`, zero where the mask is False.
    Errors: ValueError for events too small for the levels, heads that do not divide the channels, unknown sizes.
    Source: Ho et al. 2020, appendix B.

    Example:
        >>> unet = UNet((1, 7, 9), num_classes=3, channels=8, multipliers=(1, 2), blocks=1)
        >>> unet(torch.randn(2, 1, 7, 9), torch.zeros(2), torch.tensor([0, 2])).shape
        torch.Size([2, 1, 7, 9])
    """

    def __init__(
        self,
        event_shape: tuple[int, ...],
        num_classes: int | None = None,
        double_output: bool = False,
        extra_channels: int = 0,
        two_times: bool = False,
        *,
        channels: int = 64,
        multipliers: list[int] | tuple[int, ...] = (1, 2, 2),
        blocks: int = 2,
        attention_at: list[int] | tuple[int, ...] | None = None,
        attention: AttentionKind = "plain",
        heads: int = 4,
        dropout: float = 0.0,
        fourier: list[int] | tuple[int, ...] = (),
        fourier_of: Literal["data", "input"] = "data",
        channels_last: bool = False,
        checkpointing: bool = False,
        condition: int | None = None,
        narrow_early: bool = True,
    ):
        super().__init__()
        in_channels, *space = event_shape
        dims = len(space)
        if dims not in CONVOLUTION:
            raise ValueError(f"the U-Net takes events (C, T) or (C, H, W), got {tuple(event_shape)}: use the MLP")
        if not multipliers or min(*multipliers, channels, blocks) < 1:
            raise ValueError(
                f"channels = {channels}, multipliers = {list(multipliers)} and blocks = {blocks} must be at least 1"
            )
        if two_times and fourier:
            raise ValueError("Fourier features fade with the log-SNR, and a flow map's network takes times: leave "
                             "fourier out")
        if channels % 2:
            raise ValueError(f"channels = {channels} must be even: the noise-level features come in pairs")
        one_of("fourier_of", fourier_of, ("data", "input"))
        check_kind(attention, dims)
        self.dims, self.in_channels, self.levels = dims, in_channels + extra_channels, len(multipliers)
        self.fourier, self.fourier_of = tuple(fourier), fourier_of
        self.takes_scale = bool(fourier) and fourier_of == "data"
        self.channels_last, self.checkpointing = channels_last and dims == 2, checkpointing
        self.narrow_early = narrow_early
        self._check_size(space)
        attends = _attending_levels(space[0], len(multipliers), attention_at)

        def stage(inputs: int, width: int, level: int, attending: bool) -> _Stage:
            block, size = ResidualBlock(dims, inputs, width, dropout), tuple(-(-n // 2**level) for n in space)
            return _Stage(block, make_attention(attention, width, heads, dims=dims, space=size) if attending else None)

        convolution = CONVOLUTION[dims]
        widths = [channels * m for m in multipliers]
        condition = 5 * channels // 2 if condition is None else condition
        at_least(1, condition=condition)
        self.embedding = ConditionEmbedding(channels, 4 * channels, condition, num_classes, two_times)
        self.stem = convolution(self.in_channels * (1 + 2 * len(self.fourier)), channels, 3, padding=1)

        # Down: skip connections start at the stem, every block and every downsampling.
        current, skips = channels, [channels]
        self.down, self.down_samples = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):
            inputs = [current, *[width] * (blocks - 1)]
            self.down.append(nn.ModuleList(stage(n, width, level, level in attends) for n in inputs))
            current = width
            skips += [width] * blocks
            if level + 1 < len(widths):
                self.down_samples.append(Downsample(dims, current))
                skips.append(current)

        self.middle = nn.ModuleList([stage(current, current, level, True), stage(current, current, level, False)])

        self.up, self.up_samples = nn.ModuleList(), nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            inputs = [n + skips.pop() for n in [current, *[width] * blocks]]
            self.up.append(nn.ModuleList(stage(n, width, level, level in attends) for n in inputs))
            current = width
            if level > 0:
                self.up_samples.append(Upsample(dims, current, widths[level - 1] if narrow_early else current))
                current = widths[level - 1] if narrow_early else current

        out_channels = in_channels * (2 if double_output else 1)
        last = NarrowConv2d if dims == 2 and out_channels <= 6 else convolution
        self.head_norm = GroupNorm(current)
        self.head = zeroed(last(current, out_channels, 3, padding=1))

        stages = [s for part in (*self.down, self.middle, *self.up) for s in part]
        self._modulation_widths = [2 * s.block.conv_1.out_channels for s in stages]
        self.modulation = nn.Linear(condition, sum(self._modulation_widths))
        if self.channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(
        self, x: Tensor, log_snr: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        check_channels("the U-Net", x, self.in_channels, self.dims)
        self._check_size(x.shape[2:])
        masks = _masks(mask, self.dims, self.levels)
        # Scale and shift of every block in one product.
        modulation = iter(self.modulation(silu(self.embedding(log_snr, cond))).split(self._modulation_widths, dim=1))
        inputs = hide(x, masks[0])
        if self.fourier:
            features = fourier_features(inputs, log_snr, self.fourier, scale).to(x.dtype)
            inputs = torch.cat([inputs, hide(features, masks[0])], dim=1)
        h = self.stem(inputs)
        if self.channels_last:
            # After the stem, since the memory format of a map of one channel is ambiguous.
            h = h.contiguous(memory_format=torch.channels_last)
        again, skips = self.checkpointing, [h]
        for level, stage in enumerate(self.down):
            for block in stage:
                h = run(block, h, next(modulation), masks[level], again=again)
                skips.append(h)
            if level + 1 < self.levels:
                h = self.down_samples[level](h, masks[level])
                skips.append(h)
        for block in self.middle:
            h = run(block, h, next(modulation), masks[-1], again=again)
        for step, stage in enumerate(self.up):
            level = self.levels - 1 - step
            for block in stage:
                h = run(block, torch.cat([h, skips.pop()], dim=1), next(modulation), masks[level], again=again)
            if level > 0:
                h = self.up_samples[step](h, skips[-1].shape[2:], masks[level - 1])
        h = self.head(silu(self.head_norm(h, mask=masks[0])))
        return hide(h, masks[0]).to(x.dtype)

    def _check_size(self, space: Sequence[int]) -> None:
        smallest = min(space)
        if smallest < 2 ** (self.levels - 1):
            raise ValueError(
                f"events of size {'x'.join(map(str, space))} are too small for {self.levels} "
                f"levels: give multipliers with at most {smallest.bit_length()} entries"
            )


class _Stage(nn.Module):
    """A residual block and the attention after it, if any: the unit that is checkpointed."""

    def __init__(self, block: ResidualBlock, attention: nn.Module | None):
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: Tensor, modulation: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.block(x, modulation, mask)
        return x if self.attention is None else self.attention(x, mask)


def _attending_levels(size: int, levels: int, attention_at: Sequence[int] | None) -> set[int]:
    """The levels whose size is listed."""
    sizes = [-(-size // 2**level) for level in range(levels)]
    if attention_at is None:
        return {levels - 1}
    attention_at = list(attention_at)
    for n in attention_at:
        if n not in sizes:
            raise ValueError(f"attention_at = {n} is the size of no level: choose from "
                             f"{', '.join(map(str, sizes))}")
    return {level for level, n in enumerate(sizes) if n in attention_at}


def _masks(mask: Tensor | None, dims: int, levels: int) -> list[Tensor | None]:
    """The mask of each level, (B, 1, T) or (B, 1, 1, T): a coarse frame is valid if the even frame under it is."""
    if mask is None:
        return [None] * levels
    check_frames(mask)
    mask = mask if dims == 1 else mask[:, :, None]
    return [mask[..., :: 2**level] for level in range(levels)]
