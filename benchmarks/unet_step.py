"""Training and denoising steps of our U-Net compared with diffusers' `UNet2DModel`, at equal size, in one run.

    python benchmarks/unet_step.py [--threads 2] [--repeats 7] [--settings small mnist] [--ours-channels-last]

The peer is built from `UNet2DModel` with the same channels per level, the same number of residual blocks, attention
at the same level (its lowest: `AttnDownBlock2D`, `AttnUpBlock2D`) and in the middle, as many heads, and the same
dropout; everything else is its default. Parameters agree within 2 %, which is printed. Both get the same input, plain
mean squared error, and the same `torch.optim.Adam`. They take turns, and the ratio is formed within each round: a
value below 1 means that ours is faster. Nothing is asserted.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from _steps import Unwrapped, denoising_step, training_step
from _timing import interleaved
from torch import nn

from genmodels.nn import UNet


@dataclass(frozen=True)
class Setting:
    """One size at which the two networks meet."""

    event_shape: tuple[int, int, int]
    channels: int
    multipliers: tuple[int, ...]
    blocks: int
    batch: int
    heads: int = 4
    dropout: float = 0.0


SETTINGS = {
    "small": Setting((1, 32, 32), channels=32, multipliers=(1, 2, 2), blocks=2, batch=32),
    "mnist": Setting((1, 28, 28), channels=64, multipliers=(1, 2, 2), blocks=2, batch=32, dropout=0.1),
}


def build_ours(setting: Setting, channels_last: bool) -> nn.Module:
    return UNet(
        setting.event_shape,
        channels=setting.channels,
        multipliers=setting.multipliers,
        blocks=setting.blocks,
        heads=setting.heads,
        dropout=setting.dropout,
        channels_last=channels_last,
    )


def build_peer(setting: Setting) -> nn.Module:
    from diffusers import UNet2DModel

    widths = tuple(setting.channels * m for m in setting.multipliers)
    plain = len(widths) - 1
    return UNet2DModel(
        sample_size=setting.event_shape[-1],
        in_channels=setting.event_shape[0],
        out_channels=setting.event_shape[0],
        block_out_channels=widths,
        layers_per_block=setting.blocks,
        down_block_types=("DownBlock2D",) * plain + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * plain,
        attention_head_dim=widths[-1] // setting.heads,
        dropout=setting.dropout,
    )


def compare(name: str, setting: Setting, repeats: int, channels_last: bool) -> None:
    """Print the parameters and both ratios of one setting."""
    torch.manual_seed(0)
    ours, peer = build_ours(setting, channels_last), Unwrapped(build_peer(setting))
    sizes = [sum(p.numel() for p in network.parameters()) for network in (ours, peer)]
    x, target = torch.randn(2, setting.batch, *setting.event_shape)
    with_log_snr, with_step = (x, torch.linspace(-10, 10, setting.batch)), (x, torch.arange(setting.batch) * 31)
    print(f"{name}: batch {setting.batch} of {setting.event_shape}, {sizes[0]:,} parameters against {sizes[1]:,} "
          f"({sizes[0] / sizes[1] - 1:+.2%})")
    training = {"ours": training_step(ours, with_log_snr, target), "diffusers": training_step(peer, with_step, target)}
    print("  training step:  " + interleaved(training, repeats, warm_up=2).summary("ours", "diffusers"))
    denoising = {"ours": denoising_step(ours, with_log_snr), "diffusers": denoising_step(peer, with_step)}
    print("  denoising step: " + interleaved(denoising, repeats, warm_up=2).summary("ours", "diffusers"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--ours-channels-last", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.settings:
        compare(name, SETTINGS[name], arguments.repeats, arguments.ours_channels_last)


if __name__ == "__main__":
    main()
