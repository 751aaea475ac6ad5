"""Cost of score-matching losses in units of a plain energy step of the same network: time, and bytes kept for backward.

    python benchmarks/score_matching_step.py [--threads 2] [--repeats 5] [--cases mlp256 mlp1024 conv] [--exact]
                                             [--clock cpu]

The unit is forward of the energy and gradient of its parameters. The contestants take turns, ratios are formed within
each round. Bytes are those of the distinct storages that autograd saves for the backward pass, without the weights.
`--exact` adds the exact loss (D backward passes), on a tenth of the batch where D is large. Nothing is asserted.
`--clock cpu --threads 1` counts seconds of the processor, for machines that others use at the same time.
Peer: `pip install torchebm`, on the very same network; it is left out where it is absent, and for images, over whose
last axis alone its sliced loss takes inner products.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import weakref
from collections.abc import Callable
from statistics import median

import torch
from _timing import interleaved
from torch import Tensor, nn

from genmodels.energy import (
    DenoisingScoreMatching,
    Energy,
    ExactScoreMatching,
    FiniteDifferenceScoreMatching,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
)
from genmodels.nn.energy_nets import EnergyConv, EnergyMLP

LOSSES = {
    "sliced, jet": SlicedScoreMatching(route="jet"),
    "sliced, double backward": SlicedScoreMatching(route="double_backward"),
    "sliced_vr": SlicedScoreMatchingVR(),
    "sliced_vr, forward over reverse": SlicedScoreMatchingVR(route="forward_over_reverse"),
    "finite_difference": FiniteDifferenceScoreMatching(),
    "denoising": DenoisingScoreMatching(),
}


def peers(model: Energy, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The losses of torchebm with one direction, on the network of `model`."""
    if importlib.util.find_spec("torchebm") is None or x.dim() > 2:
        return {}
    from torchebm.core import BaseModel
    from torchebm.losses import DenoisingScoreMatching as Denoising
    from torchebm.losses import ScoreMatching as Exact
    from torchebm.losses import SlicedScoreMatching as Sliced

    class Same(BaseModel):
        def __init__(self):
            super().__init__()
            self.network = model.network

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

    same = Same()
    losses = {"torchebm sliced": Sliced(same, n_projections=1), "torchebm denoising": Denoising(same, noise_scale=0.1)}
    found = {name: lambda loss=loss: loss(x) for name, loss in losses.items()}
    exact = Exact(same)
    return found | ({"torchebm exact": lambda: exact(x)} if x[0].numel() <= _FEW else {})


_FEW = 2  # dimensions up to which the exact loss of a peer takes its turn among the others

Make = Callable[[], nn.Module]
Clock = Callable[[], float]
DIMS = (2, 64, 784)


def mlp(dims: int, hidden: int) -> tuple[str, Make, tuple[int, ...]]:
    """A perceptron of three hidden layers: name, network, shape of its batch."""
    return f"MLP {hidden}, D = {dims}", lambda: EnergyMLP((dims,), hidden=(hidden,) * 3), (256, dims)


CASES: dict[str, list[tuple[str, Make, tuple[int, ...]]]] = {
    "mlp256": [mlp(dims, 256) for dims in DIMS],
    "mlp1024": [mlp(dims, 1024) for dims in DIMS],
    "conv": [("conv 28x28", lambda: EnergyConv((1, 28, 28), channels=(32, 32, 64, 64, 64)), (64, 1, 28, 28))],
}


class Kept:
    """A tensor in the hands of autograd: it is gone when the node that saved it is."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def kept_bytes(work: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    """Bytes of the storages that are still saved for backward when `work` has made its loss."""
    saved: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        saved.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        loss = work()
    storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage().nbytes() for kept in saved}
    own = {p.untyped_storage().data_ptr() for p in parameters}
    assert loss.requires_grad
    return sum(size for address, size in storages.items() if address not in own)


def measure(name: str, make: Make, shape: tuple[int, ...], repeats: int, exact: bool, clock: Clock) -> float:
    """Prints the row of one network; gives the seconds of the sliced loss."""
    torch.manual_seed(0)
    model, x, generator = Energy(make()), torch.randn(shape), torch.Generator().manual_seed(0)
    parameters = list(model.parameters())

    def step(value: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(value(), parameters, allow_unused=True)

    values = {"plain": lambda: model.energy(x).mean()}
    values |= {key: lambda loss=loss: loss(model, x, generator).mean() for key, loss in LOSSES.items()}
    values |= peers(model, x)
    timing = interleaved({key: step(value) for key, value in values.items()}, repeats, clock=clock)
    plain = kept_bytes(values["plain"], parameters)
    print(f"{name}: plain step {timing.median('plain') * 1e3:.2f} ms, {plain / 2**20:.2f} MiB kept")
    for key in list(values)[1:]:
        ratios = timing.ratios(key, "plain")
        # The tensors of forward-mode differentiation have no storage of their own to count.
        uncounted = "forward" in key or key == "torchebm exact"
        memory = "" if uncounted else f"   memory {kept_bytes(values[key], parameters) / plain:.2f}x"
        print(f"  {key:34s} {median(ratios):5.2f}x  ({ratios[0]:.2f} .. {ratios[-1]:.2f}){memory}")
    if exact:
        few = x[: max(1, len(x) // 10)] if x[0].numel() > 100 else x
        loss = ExactScoreMatching(chunk=8)
        contestants = {"plain": step(lambda: model.energy(few).mean()), "exact": step(lambda: loss(model, few).mean())}
        found = interleaved(contestants, repeats, clock=clock)
        ratio = median(found.ratios("exact", "plain"))
        print(f"  {'exact':34s} {ratio:5.0f}x  (batch {len(few)})")
    return timing.median("sliced, jet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    for case in options.cases:
        seconds = [measure(*row, options.repeats, options.exact, clock) for row in CASES[case]]
        if len(seconds) > 1:
            print(f"  sliced at the largest D over the smallest: {seconds[-1] / seconds[0]:.2f}x the time")


if __name__ == "__main__":
    main()
