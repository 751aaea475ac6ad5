"""Peak memory and time of a training step against the depth of a flow, storing and recomputing activations.

    python benchmarks/memory.py [--threads 2] [--repeats 7] [--steps 8 16 32 64] [--batch 64] [--hidden 64]
    python benchmarks/memory.py --flow tarflow --steps 2 4 8 --batch 16

`glow` is one level on grey images of 32x32 pixels: a squeeze, then as many steps [ActNorm, 1x1, affine coupling] as
asked for. `tarflow` has as many meta-blocks of two layers of the width `--hidden`, on colour images: 256 tokens of 12.
The peak is that of torch's own allocator, from the events that `torch.profiler` records of every allocation and
release (not the process' memory, which holds what was freed too): the most bytes alive at once during forward and
backward beyond those alive before. It includes the gradients of the parameters, which grow with the number of steps in
any mode; the peak without them is that of the activations, with two examples' inputs of every layer for the gauge of
drift, which is why it is not quite flat. Times are those of forward, backward and Adam; both modes
take turns, and the ratio is formed within each round. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import interleaved
from torch import nn
from torch.profiler import ProfilerActivity, profile

from genmodels.flows.bijection import Bijection
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.elementwise import Affine
from genmodels.flows.linear import InvertibleLinear
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze2d
from genmodels.flows.tarflow import tarflow
from genmodels.nn.coupling_networks import ConvNet

MODES = ("store", "inverse")


def glow_level(steps: int, hidden: int, memory: str) -> Compose:
    """A squeeze and so many steps of Glow, with small random weights where they start at zero."""
    torch.manual_seed(0)
    layers: list[Bijection] = [Squeeze2d()]
    for _ in range(steps):
        split = ChannelSplit(4)
        element = Affine(split.changed)
        net = ConvNet(split.kept, element.params_per_dim * split.changed, hidden=hidden)
        layers += [ActNorm(4), InvertibleLinear(4), Coupling(split, element, net)]
    return awake(Compose(layers, (1, 32, 32), memory=memory))


def meta_blocks(blocks: int, width: int, memory: str) -> Compose:
    """A TarFlow of so many meta-blocks, with small random weights where they start at zero."""
    torch.manual_seed(0)
    return awake(tarflow((3, 32, 32), blocks=blocks, width=width, depth=2, memory=memory))


def awake(flow: Compose) -> Compose:
    """The flow with small random weights where they are zero."""
    for parameter in flow.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.01)
    return flow


FLOWS = {"glow": (glow_level, 1), "tarflow": (meta_blocks, 3)}


def backward_step(flow: Compose, x: torch.Tensor) -> Callable[[], None]:
    """A function of no arguments: forward and backward of the negative log-likelihood."""

    def step() -> None:
        for parameter in flow.parameters():
            parameter.grad = None
        z, logdet = flow(x)
        (z.square().flatten(1).sum(1) / 2 - logdet).mean().backward()

    return step


def training_step(flow: Compose, x: torch.Tensor) -> Callable[[], None]:
    """A function of no arguments: forward, backward, Adam."""
    backward, optimizer = backward_step(flow, x), torch.optim.Adam(flow.parameters(), lr=1e-4)

    def step() -> None:
        backward()
        optimizer.step()

    return step


def peak_bytes(work: Callable[[], None]) -> int:
    """The most bytes of tensors alive at once during `work`, beyond those alive before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flow", choices=FLOWS, default="glow")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make, channels = FLOWS[arguments.flow]
    x = torch.randn(arguments.batch, channels, 32, 32)
    for steps in arguments.steps:
        flows = {memory: make(steps, arguments.hidden, memory) for memory in MODES}
        for flow in flows.values():
            flow.initialize(x)
        print(f"{arguments.flow}, {steps} steps, batch {arguments.batch}, hidden {arguments.hidden}")
        for memory, flow in flows.items():
            work = backward_step(flow, x)
            work()
            for p in flow.parameters():
                p.grad = None
            print(f"  {memory:8s} peak {peak_bytes(work) / 2**20:8.2f} MiB")
        timing = interleaved({m: training_step(f, x) for m, f in flows.items()}, arguments.repeats, warm_up=1)
        print("  " + timing.summary("inverse", "store"))


if __name__ == "__main__":
    main()
