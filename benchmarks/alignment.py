"""Monotonic alignment search compared with the Cython package of PyPI.

    python benchmarks/alignment.py [--threads 2] [--repeats 15] [--batch 16] [--tokens 150] [--frames 800]

Every contestant gets the same scores and returns the path of each item; ours also look for what is not finite, and
give durations and scores. They take turns; the ratio to the package is formed within each round. Nothing is asserted
but that all paths are the same. Peer: `pip install monotonic-alignment-search`; numba: `pip install numba`.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch
from _timing import interleaved

from genmodels.speech.alignment import monotonic_alignment_search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("threads", 2), ("repeats", 15), ("batch", 16), ("tokens", 150), ("frames", 800)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    scores = torch.randn(arguments.batch, arguments.tokens, arguments.frames)
    ours = ["torch", *(["numba"] if importlib.util.find_spec("numba") else [])]
    contestants = {
        name: lambda name=name: monotonic_alignment_search(scores, implementation=name).path for name in ours
    }
    unit = "torch"
    if importlib.util.find_spec("monotonic_alignment_search"):
        from monotonic_alignment_search import maximum_path

        mask, unit = torch.ones_like(scores), "cython"
        contestants["cython"] = lambda: maximum_path(scores, mask)
    paths = [work().bool() for work in contestants.values()]
    if not all(path.equal(paths[0]) for path in paths):
        raise SystemExit("the contestants found different paths")
    timing = interleaved(contestants, arguments.repeats, warm_up=3)
    print(f"scores {tuple(scores.shape)}, {arguments.threads} threads, medians of {arguments.repeats}")
    print(f"  {unit} {timing.median(unit):.4f} s")
    for name in contestants:
        if name != unit:
            print("  " + timing.summary(name, unit))


if __name__ == "__main__":
    main()
