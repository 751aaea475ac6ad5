"""Training and denoising steps of our DiT compared with diffusers' `DiTTransformer2DModel`, at equal size, in one run.

    python benchmarks/dit_step.py [--threads 2] [--repeats 7] [--settings small S]

The peer has the same depth, width, heads, patches and classes, and learns no variance either; diffusers embeds the
time in every block, ours once. Ours turns queries and keys by row and column, the peer adds sinusoids of the place at
the entry; `plain` leaves ours without positions. Both get the same input, plain mean squared error, and the same
`torch.optim.Adam`. They take turns, and the ratio is formed within each round: a value below 1 means that ours is
faster. Nothing is asserted. Without diffusers (extra `bench`) our times alone are printed, with a line that says so.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
from _steps import Unwrapped, denoising_step, training_step
from _timing import interleaved
from torch import nn

from genmodels.nn import DiT


class Setting(NamedTuple):
    """One size at which the networks meet."""

    event_shape: tuple[int, int, int]
    depth: int
    width: int
    heads: int
    batch: int


SETTINGS = {"small": Setting((1, 32, 32), 4, 128, 4, 32), "S": Setting((4, 32, 32), 12, 384, 6, 4)}
CLASSES = 10


def build_ours(setting: Setting, attention: str) -> nn.Module:
    sizes = {"depth": setting.depth, "width": setting.width, "heads": setting.heads}
    return DiT(setting.event_shape, CLASSES, attention=attention, **sizes)


def build_peer(setting: Setting) -> nn.Module | None:
    try:
        from diffusers import DiTTransformer2DModel
    except ImportError:
        return None
    channels, side, _ = setting.event_shape
    return DiTTransformer2DModel(
        num_attention_heads=setting.heads, attention_head_dim=setting.width // setting.heads, in_channels=channels,
        out_channels=channels, num_layers=setting.depth, sample_size=side, patch_size=2, num_embeds_ada_norm=CLASSES,
    )  # fmt: skip


def compare(name: str, setting: Setting, repeats: int) -> None:
    """Print parameters, times and ratios of one setting."""
    torch.manual_seed(0)
    networks = {"ours": build_ours(setting, "rope2d"), "plain": build_ours(setting, "plain")}
    peer = build_peer(setting)
    if peer is not None:
        networks["diffusers"] = Unwrapped(peer)
    sizes = ", ".join(f"{key} {sum(p.numel() for p in net.parameters()):,}" for key, net in networks.items())
    print(f"{name}: batch {setting.batch} of {setting.event_shape}, parameters {sizes}")
    x, target = torch.randn(2, setting.batch, *setting.event_shape)
    cond = torch.arange(setting.batch) % CLASSES
    times = {"diffusers": torch.arange(setting.batch) * 31}
    for what, make in (("training step", lambda net, given: training_step(net, given, target)),
                       ("denoising step", denoising_step)):
        steps = {key: make(net, (x, times.get(key, torch.linspace(-10, 10, setting.batch)), cond))
                 for key, net in networks.items()}
        # On one thread its own time is counted, whatever else the machine does.
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        timing = interleaved(steps, repeats, warm_up=2, clock=clock)
        if peer is None:
            print(f"  {what}: ours {timing.median('ours'):.4f} s, plain {timing.median('plain'):.4f} s; "
                  "no diffusers to compare with: pip install '.[bench]'")
            continue
        for own in ("ours", "plain"):
            print(f"  {what}: {timing.summary(own, 'diffusers')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.settings:
        compare(name, SETTINGS[name], arguments.repeats)


if __name__ == "__main__":
    main()
