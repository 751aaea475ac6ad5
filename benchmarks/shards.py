"""Tar shards: memory of an epoch against the size of the set, and images per second against a training step.

    python benchmarks/shards.py [--megabytes 320] [--size 128] [--cap 32] [--batch 64] [--rounds 7] [--channels 32]

The set is random images (a PNG of noise does not compress), written by `genmodels shards`' own function into a
temporary folder. Memory: a process whose private memory may grow by `cap` megabytes (RLIMIT_DATA) after its imports
reads all training items in a shuffled order, and prints its peak of resident memory from then on; the same process that
holds every batch must fail, or the limit would show nothing. Speed: batches of a second, smaller set of 32x32 images,
decoded in this process, and optimiser steps of a U-Net on them take turns; the ratio is formed within each round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _timing import interleaved

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.data.base import SPLITS, DataModule
from genmodels.data.shard_writer import write_shards
from genmodels.data.shards import Shards
from genmodels.models.ddpm import DDPM

EPOCH = """
import resource, sys, time
from genmodels.data.shards import Shards
root, cap, keep = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "keep"
data = Shards(root=root, batch_size=16).prepare()
loader = data.train_dataloader()
held, _ = [], next(iter(loader))  # decoders are imported
def megabytes(key):
    return next(int(line.split()[1]) * 1.024e-3 for line in open("/proc/self/status") if line.startswith(key))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak of the imports is forgotten
before = megabytes("VmRSS")
resource.setrlimit(resource.RLIMIT_DATA, (int((megabytes("VmData") + cap) * 1e6),) * 2)
seen = size = 0
start = time.perf_counter()
try:
    for batch in loader:
        seen, size = seen + len(batch), size + batch.x.nbytes
        if keep:
            held.append(batch)
except (MemoryError, RuntimeError) as error:
    print(f"stopped after {size / 1e6:,.0f} MB of items: {str(error).strip().splitlines()[0][:60] or 'MemoryError'}")
else:
    print(f"{seen:,} items, {size / 1e6:,.0f} MB, in {time.perf_counter() - start:.0f} s; peak memory "
          f"{megabytes('VmHWM') - before:,.1f} MB above the {before:,.0f} MB at the start")
"""


class Noise(DataModule):
    """Random images, made when they are asked for."""

    def __init__(self, items: int, size: int):
        super().__init__(batch_size=64, num_workers=0, seed=0)
        self.items, self.size = items, size

    def load(self):
        """Splits of 98, 1 and 1 %."""
        held = max(1, self.items // 100)
        sizes = dict(zip(SPLITS, (self.items - 2 * held, held, held), strict=True))
        shape = (3, self.size, self.size)
        return DataSpec("noise", shape, 256), {split: _Pictures(count, shape) for split, count in sizes.items()}


class _Pictures(torch.utils.data.Dataset):
    def __init__(self, count: int, shape: tuple[int, ...]):
        self.count, self.shape = count, shape

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, positions) -> Batch:
        index = torch.as_tensor(positions)
        return Batch(torch.randint(0, 256, (len(index), *self.shape), dtype=torch.uint8), index=index)


def memory(root: Path, cap: int) -> None:
    """Print what an epoch takes, and that keeping everything is impossible under the same limit."""
    for what in ("drop", "keep"):
        done = subprocess.run([sys.executable, "-c", EPOCH, str(root), str(cap), what], capture_output=True, text=True)
        print(f"memory, batches are {what}ped after use" if what == "drop" else "memory, batches are kept", end=": ")
        print(done.stdout.strip() or done.stderr.strip()[-200:], flush=True)
        if (done.returncode == 0 and not done.stdout.startswith("stopped")) != (what == "drop"):
            raise SystemExit("an epoch must fit under the limit if batches are dropped, and must not if they are kept")


def speed(root: Path, batch: int, rounds: int, channels: int) -> None:
    """Print images per second of the loader and of a training step, and their ratio."""
    data = Shards(root=str(root), batch_size=batch).prepare()
    network = DDPM(data.spec, net={"channels": channels, "multipliers": [1, 2, 2], "blocks": 1, "attention_at": [8]})
    optimizer = torch.optim.AdamW(network.core.parameters(), fused=True)

    def endless():
        while True:
            yield from data.train_dataloader()

    batches = endless()
    item = next(batches)

    def step() -> None:
        optimizer.zero_grad()
        network.loss(item, KeyedGenerator(0, item.index, "train", step=0)).value.backward()
        optimizer.step()

    timing = interleaved({"loader": lambda: next(batches), "step": step}, rounds)
    parameters = sum(p.numel() for p in network.core.parameters())
    loader, trained = (batch / timing.median(name) for name in ("loader", "step"))
    print(f"speed, batches of {batch} images 3 x 32 x 32, {parameters:,} parameters: loader {loader:,.0f} images/s, "
          f"step {trained:,.1f} images/s; {timing.summary('loader', 'step')}")


def main() -> None:
    """Write both sets, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"megabytes": 320, "size": 128, "cap": 32, "batch": 64, "rounds": 7, "channels": 32}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        for name, items, size in (("large", given.megabytes * 10**6 // (3 * given.size**2), given.size),
                                  ("small", 40 * given.batch, 32)):
            start = time.perf_counter()
            write_shards(Noise(items, size).prepare(), Path(folder) / name, 2000, {})
            total = sum(place.stat().st_size for place in (Path(folder) / name).iterdir())
            print(f"{items:,} images 3 x {size} x {size}: {total / 1e6:,.0f} MB of shards written in "
                  f"{time.perf_counter() - start:.0f} s", flush=True)
        memory(Path(folder) / "large", given.cap)
        speed(Path(folder) / "small", given.batch, given.rounds, given.channels)


if __name__ == "__main__":
    main()
