"""What a stratified bound of a diffusion model costs, and how its error falls with the number of terms K drawn.

    python benchmarks/bound_error.py CKPT [--draws 1 2 4 8 16] [--items 359] [--seeds 8] [--whole] [--steps 5 10 20 50]

Each row evaluates the same test items with K terms, one drawn from each of K strata, twice over. `se` is the standard
error that one such evaluation states for its mean (of the terms alone), `spread` the standard deviation of the mean
over seeds, which also has the noise of the reconstruction, and `error` the difference of their mean from all terms
(--whole). With --steps the bound of an ancestral sampler of so many steps, all terms, stands before them: what fewer
steps cost. Beneath stands the slope of log se against log K, for K below all terms: -1/2 is that of independent terms,
strata do better. Bits/dim for integers, nats otherwise. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch

from genmodels.core.likelihood import Likelihood
from genmodels.models.build import build
from genmodels.models.checkpoint import load_model

_BATCH = 250


def batches(header: dict, items: int) -> list:
    """The first test items that the model was made for."""
    data, found, number = build(header["config"]["data"]).prepare(), [], 0
    for batch in data.loader("test", _BATCH):
        batch = batch.rows(slice(0, min(len(batch), items - number)))
        found.append(batch)
        number += len(batch)
        if number >= items:
            break
    return found


def evaluated(model, parts: list, **options) -> tuple[float, float | None, float]:
    """Cost of an item in bits/dim (nats), the standard error of its draws, seconds."""
    began = time.perf_counter()
    with torch.no_grad():
        found = Likelihood.concatenate([model.log_likelihood(batch, **options) for batch in parts])
    seconds = time.perf_counter() - began
    if found.levels is None:
        return -found.mean_nats(), found.standard_error("nats").draws, seconds
    return found.mean_bits_per_dim(), found.standard_error("bits_per_dim").draws, seconds


def slope(draws: list[int], errors: list[float]) -> float:
    """Of the least-squares line through (log K, log error).

    Example:
        >>> round(slope([1, 4, 16], [1.0, 0.5, 0.25]), 6)
        -0.5
    """
    x, y = [math.log(k) for k in draws], [math.log(e) for e in errors]
    return statistics.linear_regression(x, y).slope


def main() -> None:
    """One line for each K, then the slope."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="of a continuous schedule")
    parser.add_argument("--whole", action="store_true", help="all terms as well, for the error")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, header = load_model(given.checkpoint)
    if not hasattr(model, "elbo"):
        parser.error(f"{given.checkpoint} is not a diffusion model's, whose bound is a sum of terms")
    parts = batches(header, given.items)
    items = sum(map(len, parts))
    for steps in given.steps:
        trained, model.elbo.num_steps = model.elbo.num_steps, steps
        value, _, seconds = evaluated(model, parts)
        model.elbo.num_steps = trained
        print(f"{steps:4d} steps  {value:.4f}  {items} items in {seconds:.1f} s", flush=True)
    truth = None
    if given.whole:
        truth, _, seconds = evaluated(model, parts)
        print(f"all terms: {truth:.4f}, {items} items, {seconds:.1f} s", flush=True)
    errors = []
    for draws in given.draws:
        rows = [evaluated(model, parts, draws=draws, seed=seed) for seed in range(given.seeds)]
        values = [value for value, _, _ in rows]
        errors.append(math.sqrt(statistics.fmean(math.nan if se is None else se**2 for _, se, _ in rows)))
        line = f"K = {draws:4d}  {statistics.fmean(values):.4f}  se {errors[-1]:.4f}"
        if given.seeds > 1:
            line += f"  spread {statistics.stdev(values):.4f} over {given.seeds} seeds"
        if truth is not None:
            line += f"  error {statistics.fmean(values) - truth:+.4f}"
        seconds = statistics.median(taken for _, _, taken in rows)
        print(f"{line}  {items} items in {seconds:.1f} s, {items * draws * 2 / seconds:.0f} terms/s", flush=True)
    drawn = [(draws, error) for draws, error in zip(given.draws, errors, strict=True) if error > 0]
    if len(drawn) > 1:
        print(f"slope of log se against log K: {slope(*map(list, zip(*drawn, strict=True))):.2f}")


if __name__ == "__main__":
    main()
