"""NICE on MNIST by maximum likelihood and by each score loss: score-matching loss and log-likelihood of test data.

    python benchmarks/nice_mnist.py data_root [--hidden 200] [--steps 1500] [--out nice.json]

The setting is that of Song et al. (2019), section 6.2, and of their code: four additive couplings on every second pixel
with four hidden layers, a scale for each dimension, a normal base; pixels x/255 + (u - 1/2)/256, cut off at .001 and
.999, in logits; densities are in that space. Their networks have 1000 hidden units and see 100 epochs (42,000 steps);
`--hidden` and `--steps` state what is done here. The cut puts half of the background exactly on one value, where score
matching has no minimum: its losses go on falling as long as training goes on.

The score-matching loss of test data is estimated without bias by `sliced_vr` with ten directions. The published
table is printed too, marked as such.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import MNIST

from genmodels.energy import (
    DenoisingScoreMatching,
    FiniteDifferenceScoreMatching,
    LogDensity,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
)
from genmodels.energy import Loss as ScoreLoss
from genmodels.flows import Additive, ChannelSplit, Compose, Coupling, DiagonalNormal, Flow, Permute
from genmodels.nn.perceptron import MLP

PIXELS = 784


class Likelihood:
    """-log p(x): what maximum likelihood minimises."""

    def __call__(self, model: LogDensity, x: Tensor, generator: torch.Generator, cond: None = None) -> Tensor:
        return model.energy(x)


LOSSES: dict[str, ScoreLoss] = {
    "likelihood": Likelihood(),
    "sliced_vr": SlicedScoreMatchingVR(),
    "sliced": SlicedScoreMatching(),
    "denoising 0.1": DenoisingScoreMatching(sigma=0.1),
    "denoising 1.74": DenoisingScoreMatching(sigma=1.74),
    "finite_difference": FiniteDifferenceScoreMatching(step=0.1),
}
#: Score-matching loss and log-likelihood of test data in Song et al. (2019), table 2.
PUBLISHED = {
    "likelihood": (-579, -791),
    "sliced_vr": (-8054, -3355),
    "sliced": (-2428, -2039),
    "denoising 0.1": (-3035, -4363),
    "denoising 1.74": (-97, -8082),
}


def nice(hidden: int) -> Flow:
    """The flow; the standard deviations of its base are the scale layer of the source."""
    every_second = torch.cat([torch.arange(0, PIXELS, 2), torch.arange(1, PIXELS, 2)])
    layers = [Permute(every_second)]
    for number in range(4):
        split = ChannelSplit(PIXELS, swap=number % 2 == 1)
        layers.append(Coupling(split, Additive(), MLP(split.kept, split.changed, hidden=hidden, depth=4)))
    return Flow(Compose(layers, (PIXELS,)), DiagonalNormal((PIXELS,)))


def pixels(root: Path, train: bool) -> Tensor:
    """(N, 784) bytes."""
    try:
        return MNIST(str(root), train=train, download=False).data.flatten(1)
    except RuntimeError:
        raise SystemExit(f"no MNIST in {root}: give the folder that holds MNIST/raw") from None


def logits(x: Tensor, generator: torch.Generator) -> Tensor:
    """The points in the space of the densities."""
    noise = torch.rand(x.shape, generator=generator) - 0.5
    return torch.logit((x.float() / 255 + noise / 256).clamp(1e-3, 1 - 1e-3))


def train(flow: Flow, loss: ScoreLoss, data: Tensor, steps: int, lr: float, batch: int = 128) -> float:
    """Trains in place; seconds it took."""
    generator, model = torch.Generator().manual_seed(0), LogDensity(flow)
    optimizer = torch.optim.Adam(flow.parameters(), lr=lr)
    start = time.monotonic()
    for _ in range(steps):
        x = logits(data[torch.randint(len(data), (batch,), generator=generator)], generator)
        optimizer.zero_grad()
        loss(model, x, generator).mean().backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 1e4)  # a guard: a step that large is an accident
        optimizer.step()
    return time.monotonic() - start


def evaluate(flow: Flow, data: Tensor) -> dict[str, float]:
    """Score-matching loss and log-likelihood of test data, with standard errors over items."""
    generator, model = torch.Generator().manual_seed(1), LogDensity(flow)
    loss, found = SlicedScoreMatchingVR(projections=10), {"score_matching": [], "log_likelihood": []}
    for some in data.split(500):
        x = logits(some, generator)
        with torch.no_grad():
            found["score_matching"].append(loss(model, x, generator))
            found["log_likelihood"].append(model.log_density(x))
    values = {key: torch.cat(parts).double() for key, parts in found.items()}
    means = {key: float(v.mean()) for key, v in values.items()}
    return means | {f"{key}_stderr": float(v.std() / len(v) ** 0.5) for key, v in values.items()}


def main() -> None:
    """A line for each loss, as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--hidden", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--test", type=int, default=10_000, help="number of test items")
    parser.add_argument("--out", type=Path, default=Path("nice.json"))
    given = parser.parse_args()
    training, test = pixels(given.root, True), pixels(given.root, False)[: given.test]
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.losses:
        torch.manual_seed(0)
        flow = nice(given.hidden)
        row = {"hidden": given.hidden, "steps": given.steps, "lr": given.lr}
        row |= {"seconds": train(flow, LOSSES[name], training, given.steps, given.lr)} | evaluate(flow, test)
        results[name] = row
        given.out.write_text(json.dumps(results, indent=1))
        published = PUBLISHED.get(name)
        print(
            f"{name:18} score matching {row['score_matching']:10.1f} +- {row['score_matching_stderr']:.1f}   "
            f"log-likelihood {row['log_likelihood']:10.1f} +- {row['log_likelihood_stderr']:.1f}   "
            f"{row['seconds']:.0f} s   published {published if published else '-'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
