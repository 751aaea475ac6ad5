"""Energies and scores of points in the plane: KL divergence from the truth, and whether samples are like fresh data.

    python benchmarks/toy_quality.py runs/energy-toy/<time>/best.ckpt [more.ckpt ...] [--samples 2000] [--sets 10]

KL is the mean of log p - log q over 10,000 fresh points, log q with its log Z by quadrature, where the model has
a likelihood. The maximum mean discrepancy is the root of |mean k(x, .) - mean k(y, .)|^2 with a Gaussian kernel as wide
as 0.3 standard deviations of the data; it is computed between samples and each of `--sets` fresh sets of draws, and
between pairs of such sets.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from genmodels.core.data import Batch
from genmodels.core.samples import SamplingOptions
from genmodels.data.toy import density
from genmodels.evaluation.samples import draw
from genmodels.models.checkpoint import load_model

_WIDTH = 0.3  # of the kernel, in standard deviations of the data
_TEST = 10_000


def discrepancy(x: Tensor, y: Tensor, width: float) -> float:
    """The root of the mean kernel within both sets less twice that between them: biased, never negative."""

    def mean(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * width**2)).mean()

    return float((mean(x, x) + mean(y, y) - 2 * mean(x, y)).clamp(min=0).sqrt())


def evaluate(path: str, samples: int, sets: int) -> dict:
    """All figures of one checkpoint."""
    model, header = load_model(path)
    truth = density(model.spec.name)
    found: dict = {"set": model.spec.name, "family": model.family, "step": header["step"]}
    test = truth.sample(_TEST, torch.Generator().manual_seed(10_000)).float()
    likelihood = model.log_likelihood(Batch(test, index=torch.arange(_TEST)))
    if likelihood.kind == "exact":
        gap = truth.log_prob(test.double()) - likelihood.nats.cpu()
        found |= {"kl": float(gap.mean()), "kl_stderr": float(gap.std() / _TEST**0.5)}
    x = draw(model, SamplingOptions(n=samples), batch_size=samples, progress=False).x.double()
    fresh = [truth.sample(samples, torch.Generator().manual_seed(seed)).double() for seed in range(sets + 1)]
    width = _WIDTH * float(fresh[0].std(0).square().mean().sqrt())
    ours = torch.tensor([discrepancy(x, y, width) for y in fresh[1:]])
    theirs = torch.tensor([discrepancy(a, b, width) for a, b in zip(fresh[:-1], fresh[1:], strict=True)])
    ratios = ours / theirs.mean()
    found |= {"mmd": float(ours.mean()), "mmd_of_data": float(theirs.mean()), "ratio": float(ratios.mean())}
    return found | {"ratio_range": [float(ratios.min()), float(ratios.max())]}


def main() -> None:
    """One line of JSON for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--sets", type=int, default=10)
    given = parser.parse_args()
    for path in given.checkpoints:
        print(json.dumps(evaluate(path, given.samples, given.sets)), flush=True)


if __name__ == "__main__":
    main()
