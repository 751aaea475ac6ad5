"""What one batch costs to load: our loader, torch's usual one, and a bare tensor index.

    python benchmarks/loader.py [--root DIR] [--batch 128] [--rounds 7]

They are measured in turns, epoch by epoch in the same run, so that whatever else the machine does meets them alike;
the median over rounds is printed. `--root` holds MNIST/raw; without it random pixels of the same shape stand in.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils.data import DataLoader, TensorDataset

from genmodels.core.errors import InputError
from genmodels.data.loading import ResumableBatchSampler, TensorData, training_loader
from genmodels.data.vision import MNIST


def bare_index(x: torch.Tensor, labels: torch.Tensor, batch: int) -> Iterable:
    """The least that shuffled batches can cost."""
    order = torch.randperm(len(x))
    for start in range(0, len(x) - batch + 1, batch):
        rows = order[start : start + batch]
        yield x.index_select(0, rows), labels.index_select(0, rows)


def contenders(x: torch.Tensor, labels: torch.Tensor, batch: int, flip: bool) -> dict[str, Callable[[], Iterable]]:
    """Makers of one epoch of batches."""
    ours = {
        name: training_loader(TensorData(x, labels), ResumableBatchSampler(len(x), batch), flip=turned)
        for name, turned in {"genmodels": False, **({"genmodels, flips": True} if flip else {})}.items()
    }
    usual = DataLoader(TensorDataset(x, labels), batch_size=batch, shuffle=True, drop_last=True)
    return {
        **{name: (lambda loader=loader: loader) for name, loader in ours.items()},
        "torch, per item": lambda: usual,
        "bare index": lambda: bare_index(x, labels, batch),
    }


def measure(makers: dict[str, Callable[[], Iterable]], rounds: int) -> dict[str, float]:
    """Median milliseconds per batch, the first round of each discarded."""
    costs: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(rounds + 1):
        for name, make in makers.items():
            start = time.perf_counter()
            count = sum(1 for _ in make())
            costs[name].append((time.perf_counter() - start) / count * 1e3)
    return {name: statistics.median(values[1:]) for name, values in costs.items()}


def mnist(root: str) -> tuple[str, torch.Tensor]:
    """The training images, or random ones where there are none."""
    try:
        return "MNIST", MNIST(root=root, download=False).prepare().split("train").x
    except InputError:
        return "random (no MNIST found)", torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    batch, rounds = given.batch, given.rounds
    sets = [mnist(given.root), ("random 3x32x32", torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8))]
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, batches of {batch}, median of {rounds} epochs")
    for name, x in sets:
        labels = torch.randint(0, 10, (len(x),))
        costs = measure(contenders(x, labels, batch, flip=x.shape[1] == 3), rounds)
        for contender, cost in costs.items():
            ratio = costs["torch, per item"] / cost
            print(f"{name:>24}  {contender:<17} {cost:8.3f} ms per batch  {ratio:6.1f} x torch's rate")


if __name__ == "__main__":
    main()
