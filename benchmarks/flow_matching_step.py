"""A training step of flow matching compared with torchcfm's, with U-Nets of the same channels, levels and attention.

    python benchmarks/flow_matching_step.py [--batch 64] [--repeats 7] [--threads 1]

Ours is `FlowMatchingModel.loss` on integers, backward and AdamW; theirs `ConditionalFlowMatcher` and
`UNetModelWrapper`, mean squared error, backward and AdamW, on the same numbers already scaled to [-1, 1]. Both U-Nets
have 32, 64 and 64 channels, one residual block a level, classes, and attention of four heads at 7x7; they differ in how
the time enters, so that the numbers of their parameters, which are printed, do too. They take turns, and the ratio is
formed within each round: a value below 1 means that ours is faster. Nothing is asserted. Without torchcfm
(`pip install torchcfm`) our time alone is printed.
"""

from __future__ import annotations

import argparse
import time

import torch
from _timing import interleaved

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.models.flow_matching import FlowMatchingModel

NET = {"channels": 32, "multipliers": [1, 2, 2], "blocks": 1, "attention_at": [7], "heads": 4}


def our_step(x: torch.Tensor, cond: torch.Tensor):
    """A function of no arguments that trains our model on the batch, and its network."""
    spec = DataSpec("mnist", tuple(x.shape[1:]), levels=256, num_classes=10)
    model = FlowMatchingModel(spec, net=NET, ema_decay=0.0, cond_drop=0.0)
    optimizer = torch.optim.AdamW(model.core.parameters(), lr=1e-4)
    index = torch.arange(len(x))

    def step() -> None:
        optimizer.zero_grad()
        model.loss(Batch(x, cond, index=index), KeyedGenerator(0, index, "train")).value.backward()
        optimizer.step()

    return step, model.core


def their_step(x: torch.Tensor, cond: torch.Tensor):
    """The same of torchcfm, or None without it."""
    try:
        from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
        from torchcfm.models.unet import UNetModel
    except ImportError:
        return None
    net = UNetModel(dim=tuple(x.shape[1:]), num_channels=32, num_res_blocks=1, channel_mult=[1, 2, 2], num_heads=4,
                    attention_resolutions="7", class_cond=True, num_classes=10)  # fmt: skip
    matcher, optimizer = ConditionalFlowMatcher(sigma=0.0), torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaled = x.float() / 127.5 - 1

    def step() -> None:
        optimizer.zero_grad()
        t, x_t, velocity = matcher.sample_location_and_conditional_flow(torch.randn_like(scaled), scaled)
        torch.nn.functional.mse_loss(net(t, x_t, cond), velocity).backward()
        optimizer.step()

    return step, net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("batch", 64), ("repeats", 7), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    x, cond = torch.randint(0, 256, (given.batch, 1, 28, 28)).to(torch.uint8), torch.arange(given.batch) % 10
    made = {"ours": our_step(x, cond), "torchcfm": their_step(x, cond)}
    made = {name: pair for name, pair in made.items() if pair is not None}
    for name, (_, net) in made.items():
        print(f"{name}: {sum(p.numel() for p in net.parameters()):,} parameters")
    # On one thread its own time is counted, whatever else the machine does.
    clock = time.process_time if given.threads == 1 else time.perf_counter
    timing = interleaved({name: step for name, (step, _) in made.items()}, given.repeats, 2, clock)
    print(timing.summary("ours", "torchcfm") if "torchcfm" in made else f"ours {timing.median('ours'):.4f} s; no "
          "torchcfm to compare with: pip install torchcfm")


if __name__ == "__main__":
    main()
