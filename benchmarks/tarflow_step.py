"""A training step of TarFlow compared with a plain one of the same size around torch's own `TransformerEncoderLayer`.

    python benchmarks/tarflow_step.py [--threads 1] [--repeats 7] [--attention plain rope] [--device cpu]

The peer is the published block written down directly: patches, learned places, causal layers that norm before
attention and perceptron, a projection that is zero at the start, a shift by one token, and the order turned between
blocks. Ours has a bound on the scale and a norm before the last projection too, and with `rope`, the default of the
model, rotary positions; with `plain` attention its positions are those of the peer. Both take the same negative
log-likelihood of the same numbers, clip no gradient and use the same `torch.optim.AdamW`. They take turns, and the
ratio is formed within each round: a value below 1 means that ours is faster. On a GPU both run in bfloat16, by
autocast, and a round is ten steps. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
from _timing import interleaved
from torch import Tensor, nn

from genmodels.flows.tarflow import tarflow


class Setting(NamedTuple):
    """One size at which the two meet."""

    event_shape: tuple[int, int, int]
    patch: int
    blocks: int
    depth: int
    width: int
    heads: int
    batch: int


SETTINGS = {
    "mnist": Setting((1, 28, 28), 4, 6, 2, 128, 4, 64),
    "cifar10": Setting((3, 32, 32), 2, 4, 2, 256, 4, 8),
}


class PlainBlock(nn.Module):
    """z_i = (x_i - m_i) e^-a_i by torch's layers."""

    def __init__(self, setting: Setting, count: int, features: int, reverse: bool):
        super().__init__()
        self.reverse = reverse
        self.enter = nn.Linear(features, setting.width)
        self.places = nn.Parameter(0.01 * torch.randn(count, setting.width))
        layer = nn.TransformerEncoderLayer(setting.width, setting.heads, 4 * setting.width, 0.0, nn.functional.gelu,
                                           batch_first=True, norm_first=True)  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, setting.depth, enable_nested_tensor=False)
        self.leave = nn.Linear(setting.width, 2 * features)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flip(1) if self.reverse else x
        h = self.layers(self.enter(x) + self.places, mask=self.causal, is_causal=True)
        out = self.leave(h)
        m, a = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=1).chunk(2, dim=-1)
        z = (x - m) * torch.exp(-a)
        return z.flip(1) if self.reverse else z, -a.flatten(1).sum(1)


class PlainTarFlow(nn.Module):
    """Patches and plain blocks."""

    def __init__(self, setting: Setting):
        super().__init__()
        channels, height, width = setting.event_shape
        count, features = height * width // setting.patch**2, channels * setting.patch**2
        self.patch = setting.patch
        self.blocks = nn.ModuleList(PlainBlock(setting, count, features, n % 2 == 1) for n in range(setting.blocks))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = nn.functional.pixel_unshuffle(x, self.patch).flatten(2).mT
        total = 0
        for block in self.blocks:
            z, logdet = block(z)
            total = total + logdet
        return z, total


def training_step(flow: nn.Module, x: Tensor):
    """A function of no arguments: the negative log-likelihood, backward, AdamW."""
    optimizer, gpu = torch.optim.AdamW(flow.parameters(), lr=1e-4), x.device.type == "cuda"

    def step() -> None:
        for _ in range(10 if gpu else 1):
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=gpu):
                z, logdet = flow(x)
            (0.5 * z.square().flatten(1).sum(1) - logdet).mean().backward()
            optimizer.step()
        if gpu:
            torch.cuda.synchronize()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--attention", nargs="+", default=["plain", "rope"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--batch", type=int, help="instead of the setting's")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # On one thread its own time is counted, whatever else the machine does.
    clock = time.process_time if arguments.threads == 1 and arguments.device == "cpu" else time.perf_counter
    for name in arguments.settings:
        setting = SETTINGS[name]._replace(**({"batch": arguments.batch} if arguments.batch else {}))
        torch.manual_seed(0)
        x = torch.randn(setting.batch, *setting.event_shape).to(arguments.device)
        _, patch, blocks, depth, width, heads, _ = setting
        flows = {"torch": PlainTarFlow(setting).to(x.device)}
        for kind in arguments.attention:
            flows[kind] = tarflow(setting.event_shape, patch=patch, blocks=blocks, depth=depth, width=width,
                                  heads=heads, attention=kind).to(x.device)  # fmt: skip
            flows[kind].initialize(x)
        sizes = ", ".join(f"{key} {sum(p.numel() for p in flow.parameters()):,}" for key, flow in flows.items())
        print(f"{name}: batch {setting.batch} of {setting.event_shape}, parameters {sizes}")
        steps = {key: training_step(flow, x) for key, flow in flows.items()}
        timing = interleaved(steps, arguments.repeats, 2, clock)
        for kind in arguments.attention:
            print(f"  training step: {timing.summary(kind, 'torch')}")


if __name__ == "__main__":
    main()
