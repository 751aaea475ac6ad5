"""Deep kernel energies on UCI tables, one row for each loss: exact score-matching loss and log-likelihood on test data.

    python benchmarks/uci_energy.py winequality-red.csv winequality-white.csv parkinsons_updrs.data --out uci.json

The protocol is that of Song et al. (2019), section 5.1, and Wenliang et al. (2019): columns with few values are filled
by uniform noise as wide as their median gap, PCA-whitened, with N(0, .05^2) on top, in all splits; a tenth is the test
split, a tenth of the rest validates; 200 inducing points from the training rows; Adam at 1e-2, batches of 100 + 100
rows; training ends after `patience` steps without a better validation loss; annealed importance sampling from N(0, 2I).
Whitening comes from the training rows, with `--protocol paper` from all rows, as the published code does it.
Files of wine end with the target, which is left out; of parkinsons_updrs.data the columns from the fourth are taken.
Each result goes to `--out` at once, and what stands there already, with the same settings, is not computed again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.energy import (
    LOSSES,
    AnnealedImportanceSampling,
    DeepKernel,
    DeepKernelLoss,
    ExactScoreMatching,
    GaussianBase,
)
from genmodels.models.score_matching import Encoding
from genmodels.nn.energy_nets import DeepKernelEnergy

OPTIONS = {"exact": {}, "sliced": {}, "sliced_vr": {}, "denoising": {"sigma": 0.1}, "finite_difference": {"step": 0.1}}
_NOISE = 0.05
_EVERY = 25  # steps between validations


def read(path: Path) -> torch.Tensor:
    """The rows of a table, without what does not belong to the density."""
    try:
        with path.open() as file:
            rows = np.genfromtxt(path, delimiter=";" if ";" in file.readline() else ",", skip_header=1)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if rows.ndim != 2 or not np.isfinite(rows[:, 3:]).all():
        raise InputError(f"{path} is no table of numbers below a line of names")
    return torch.from_numpy(rows[:, 3:] if "parkinsons" in path.name else rows[:, :-1]).float()


def split(x: torch.Tensor, seed: int, protocol: str) -> dict[str, torch.Tensor]:
    """White training, validation and test rows of a seed."""
    wine, dims = x.shape[1] == 11, x.shape[1]
    encoding = Encoding(DataSpec("table", (dims,)), whitening="pca", gaps=wine)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held = round(0.1 * len(x))
    validation = round(0.1 * (len(x) - held))
    parts = {"test": order[:held], "val": order[held : held + validation], "train": order[held + validation :]}
    noise = KeyedGenerator(seed, torch.arange(len(x)), "uci")
    fitted = torch.arange(len(x)) if protocol == "paper" else parts["train"]
    encoding.fit(x[fitted], noise.rows(fitted))
    z, _ = encoding(x, noise)
    z = z + _NOISE * noise.child("noise").normal(z.shape)
    return {name: z[rows] for name, rows in parts.items()}


def figure(model: DeepKernel, x: torch.Tensor) -> torch.Tensor:
    """(B,) exact score-matching losses."""
    with torch.no_grad():
        return ExactScoreMatching()(model, x).detach()


def train(rows: dict, name: str, seed: int, steps: int, patience: int) -> tuple[DeepKernel, int]:
    """The model with the best validation figure, and its step."""
    torch.manual_seed(seed)
    loss, train_rows = LOSSES[name](**OPTIONS[name]), rows["train"]
    model = DeepKernel(DeepKernelEnergy((train_rows.shape[1],)))
    generator = torch.Generator().manual_seed(seed)
    model.network.set_points(train_rows[torch.randperm(len(train_rows), generator=generator)[:200]])
    objective = DeepKernelLoss(loss=loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    best, kept, at = float("inf"), None, 0
    for step in range(steps + 1):
        if step % _EVERY == 0:
            some = train_rows[:1000]
            model.fit(some, loss, KeyedGenerator(seed, torch.arange(len(some)), "fit"))
            value = float(figure(model, rows["val"]).mean())
            if value < best:
                best, kept, at = value, copy.deepcopy(model.state_dict()), step
            if step - at >= patience:
                break
        batch = train_rows[torch.randint(0, len(train_rows), (200,), generator=generator)]
        optimizer.zero_grad()
        objective(model, batch, KeyedGenerator(seed, torch.arange(200), "train", step)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.load_state_dict(kept)
    model.fit(train_rows, loss, KeyedGenerator(seed, torch.arange(len(train_rows)), "fit"))
    return model, at


def evaluate(model: DeepKernel, rows: dict, seed: int, chains: int, densities: int) -> dict:
    """Exact loss and log-likelihood of the test rows, with what is known of log Z."""
    test = rows["test"]
    base = GaussianBase(torch.zeros(test.shape[1]), 2 * torch.eye(test.shape[1]))
    keyed = KeyedGenerator(seed, torch.arange(chains), "ais")
    path = AnnealedImportanceSampling(steps=densities, reverse_steps=max(densities, 20))
    found = path(model, base, keyed, chains=chains)
    with torch.no_grad():
        nats = model.log_density(test).double() - found.log_z
    return {"sm": float(figure(model, test).mean()), "nats": float(nats.mean()), **found.made()}


def summary(table: str, rows: list[dict]) -> list[str]:
    """Lines of a table: mean and standard error over the seeds, for each loss."""
    lines = [f"{table}: mean and standard error over seeds"]
    for name in OPTIONS:
        found = [row for row in rows if row["loss"] == name]
        if not found:
            continue
        columns = [[row[key] for row in found] for key in ("sm", "nats", "step", "train_s")]
        error = [np.std(c, ddof=1) / len(c) ** 0.5 if len(c) > 1 else float("nan") for c in columns]
        means = [float(np.mean(c)) for c in columns]
        reliable = sum(row["reliable"] for row in found)
        lines.append(
            f"{name:18} exact loss {means[0]:8.3f} +- {error[0]:.3f}   log-likelihood {means[1]:8.3f} +- {error[1]:.3f}"
            f"   best step {means[2]:5.0f}   {means[3]:5.0f} s   log Z reliable {reliable}/{len(found)}"
        )
    return lines


def main() -> None:
    """One line of JSON for each table, seed and loss, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--losses", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--patience", type=int, default=200)
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--densities", type=int, default=150)
    parser.add_argument("--protocol", choices=("training", "paper"), default="training")
    parser.add_argument("--out", type=Path, default=Path("uci.json"))
    given = parser.parse_args()
    results: list[dict] = json.loads(given.out.read_text()) if given.out.exists() else []
    settings = {key: getattr(given, key) for key in ("steps", "patience", "chains", "densities", "protocol")}
    if any(row["settings"] != settings for row in results):
        raise InputError(f"{given.out} has results of other settings, give another --out: {results[0]['settings']}")
    done = {(row["table"], row["loss"], row["seed"]) for row in results}
    for path in given.tables:
        x = read(path)
        for seed in given.seeds:
            rows = split(x, seed, given.protocol)
            for name in given.losses:
                if (path.stem, name, seed) in done:
                    continue
                start = time.monotonic()
                model, step = train(rows, name, seed, given.steps, given.patience)
                trained = time.monotonic() - start
                row = {"table": path.stem, "loss": name, "seed": seed, "step": step, "train_s": trained,
                       "settings": settings}
                row |= evaluate(model, rows, seed, given.chains, given.densities)
                results.append(row)
                given.out.write_text(json.dumps(results, indent=1))
                print(json.dumps(row), flush=True)
    for path in given.tables:
        print(*summary(path.stem, [row for row in results if row["table"] == path.stem]), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
