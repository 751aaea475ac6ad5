"""Fidelity of a diffusion model's samples against sampler and number of steps.

    python benchmarks/sampler_table.py CKPT [--n 2000] [--rows ddpm:1000 ddim:20 dpmpp_2m:20 ...] [--keep FOLDER]

Every row draws the same n samples of seed 0, each class in turn, and compares them with the training split: the Fréchet
distance between features of the classifier that `evaluate` uses too, precision, recall, and the share of samples that
this classifier reads as the class they were asked for. Fréchet distances of other n or other features do not compare.
The first line gives as many held-out items as a scale, or all where they are fewer. With --keep the samples are written
to a folder in parts, and a run that was stopped goes on from there. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from genmodels.core.checkpoint import checkpoint_hash
from genmodels.core.samples import SamplingOptions
from genmodels.evaluation.features import FeatureNetwork, Items, network_for
from genmodels.evaluation.fidelity import frechet_distance, precision_recall
from genmodels.evaluation.samples import draw
from genmodels.models.build import build
from genmodels.models.checkpoint import load_model

ROWS = (
    "ddpm:1000", *(f"{name}:{n}" for n in (5, 10, 20, 50) for name in ("ddim", "dpmpp_2m")),
    "euler:50", "heun:10", "edm:20", "unipc:5", "unipc:10", "unipc:20",
)  # fmt: skip
_MOST = 2000  # items that precision and recall compare


def items_of(header: dict) -> Items:
    """The training and test items that the model was made for."""
    data = build(header["config"]["data"]).prepare()
    x, y = {}, {}
    for split in ("train", "test"):
        batches = list(data.loader(split, 2048))
        x[split], y[split] = torch.cat([b.x for b in batches]), torch.cat([b.cond for b in batches])
    return Items(data.spec, x["train"], x["test"], y["train"], y["test"])


def drawn(model, row: str, n: int, part: int, keep: Path | None) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    """(samples, classes, seconds, network calls of one sample) of a row, from the folder what it holds already."""
    sampler, steps, *options = row.split(":")
    chosen = {"sampler": sampler, "steps": int(steps)} | {
        key: float(value) for key, value in (option.split("=") for option in options)
    }
    xs, classes, seconds, calls = [], [], 0.0, 0
    for first in range(0, n, part):
        count = min(part, n - first)
        place = keep / f"{row.replace(':', '-')}-{first}-{count}.pt" if keep else None
        if place is not None and place.is_file():
            found = torch.load(place, weights_only=True)
        else:
            began = time.perf_counter()
            options = SamplingOptions(n=count, start=first, **chosen)
            samples = draw(model, options, batch_size=part, progress=False)
            found = {"x": samples.x, "cond": samples.cond, "seconds": time.perf_counter() - began,
                     "calls": samples.made["evaluations"]}  # fmt: skip
            if place is not None:
                keep.mkdir(parents=True, exist_ok=True)
                torch.save(found, place)
        xs.append(found["x"])
        classes.append(found["cond"])
        seconds, calls = seconds + found["seconds"], found["calls"]
    return torch.cat(xs), torch.cat(classes), seconds, calls


def evaluated(network: FeatureNetwork, real: torch.Tensor, x: torch.Tensor, classes: torch.Tensor) -> dict:
    """The metrics of one set of samples with respect to real items."""
    found = network(x)
    most = min(_MOST, len(found), len(real))
    precision, recall = precision_recall(real[:most], found[:most])
    read = float((network.classes(x) == classes).double().mean())
    return {"frechet": frechet_distance(found, real), "precision": precision, "recall": recall, "read as class": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="sampler:steps, with :option=number behind")
    parser.add_argument("--part", type=int, default=250, help="samples drawn at once")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, header = load_model(arguments.checkpoint)
    items = items_of(header)
    network = network_for(items)
    real = network(items.train)
    test, labels = items.test[: arguments.n], items.test_labels[: arguments.n]
    facts = {"n": arguments.n, "network": network.described(), "step": header["step"]}
    scale = {"n": len(test)} | evaluated(network, real, test, labels)
    print(json.dumps(facts | {"test split": scale}), flush=True)
    keep = arguments.keep and arguments.keep / checkpoint_hash(arguments.checkpoint)[:12]
    for row in arguments.rows:
        x, classes, seconds, calls = drawn(model, row, arguments.n, arguments.part, keep)
        figures = evaluated(network, real, x, classes)
        line = {"row": row, "calls": calls, "ms per image": 1000 * seconds / len(x)} | figures
        print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in line.items()}), flush=True)


if __name__ == "__main__":
    main()
