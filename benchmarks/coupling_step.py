"""How much of a training step minibatch optimal transport takes: batches of MNIST's size through its preset's U-Net.

    python benchmarks/coupling_step.py [--batch 256] [--rounds 3] [--threads 1]

The step is `FlowMatchingModel.loss`, backward and AdamW on random levels; the coupling is `Coupling("ot")` on the same
batch and fresh noise, in seconds of the process. They take turns, the share is formed within each round. Nothing is
asserted.
"""

from __future__ import annotations

import argparse
import time

import torch
from _timing import interleaved

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion.flow_matching import Coupling
from genmodels.models.flow_matching import FlowMatchingModel

NET = {"channels": 32, "multipliers": [1, 2, 2], "blocks": 1, "attention_at": [7], "fourier": [3, 4, 5, 6, 7]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("batch", 256), ("rounds", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    index = torch.arange(given.batch)
    model = FlowMatchingModel(DataSpec("mnist", (1, 28, 28), levels=256, num_classes=10), net=NET, ema_decay=0.0)
    x = torch.randint(0, 256, (given.batch, 1, 28, 28)).to(torch.uint8)
    optimizer = torch.optim.AdamW(model.core.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(Batch(x, index % 10, index=index), KeyedGenerator(0, index, "train")).value.backward()
        optimizer.step()

    def ot() -> None:
        Coupling("ot")(model.encode(x), torch.randn(given.batch, 1, 28, 28), None, KeyedGenerator(0, index, "train"))

    print(interleaved({"ot": ot, "step": step}, given.rounds, clock=time.process_time).summary("ot", "step"))


if __name__ == "__main__":
    main()
