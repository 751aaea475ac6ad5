"""What a diffusion model learns from each objective: bits/dim and fidelity of the same network after the same steps.

    python benchmarks/ddpm_objectives.py --data digits --seeds 3 --steps 1000
    python benchmarks/ddpm_objectives.py --data mnist --seeds 3 --steps 2200 --options data.root=/data

Every run is `genmodels train model=ddpm data=... model.objective=...` in a folder of its own under --out; what is there
already, run or figures, is not made again. The averaged weights are evaluated: the bound of 1,000 steps on the test
split, from --draws strata drawn twice, and --samples samples, each of two ways: Fréchet distance of the pixels' mean
and covariance to those of the test split, in levels (0 for equal Gaussians; both sets are finite, so that real data
score above 0), and for digits the share that is read as its class by a support-vector machine (digits_quality.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from _settings import require_same

OBJECTIVES = {
    "simple": ["model.objective=simple", "model.variance=beta_tilde"],
    "simple, min-SNR": ["model.objective=simple", "model.weighting=min_snr", "model.variance=beta_tilde"],
    "simple, no Fourier features": ["model.objective=simple", "model.variance=beta_tilde", "model.net.fourier=[]"],
    "hybrid": ["model.objective=hybrid", "model.variance=learned"],
    "hybrid, no Fourier features": ["model.objective=hybrid", "model.variance=learned", "model.net.fourier=[]"],
    "bound": ["model.objective=vlb", "model.variance=beta_tilde"],
    "bound, learned variance": ["model.objective=vlb", "model.variance=learned"],
    "bound, continuous time": ["model.objective=continuous", "model.variance=beta_tilde"],
}
SAMPLERS = {"dpmpp_2m_20": {"sampler": "dpmpp_2m", "steps": 20}, "ddpm_50": {"sampler": "ddpm", "steps": 50}}


def train(folder: Path, name: str, seed: int, given: argparse.Namespace) -> float:
    """Train, or go on with what was begun, unless that has been done; seconds of CPU time."""
    from genmodels.cli.main import main
    from genmodels.core.checkpoint import read_header
    from genmodels.training.run import training_time

    last = folder / "last.ckpt"
    begun = last.exists()
    if begun and read_header(last)["finished"]:
        return training_time(folder, "cpu_seconds")
    code = main([
        "train", "model=ddpm", f"data={given.data}", *OBJECTIVES[name], f"seed={seed}", f"run_dir={folder}",
        f"trainer.max_steps={given.steps}", f"trainer.validate_every_n_steps={given.steps}", "logger=csv",
        "trainer.sample_every_n_steps=0", "trainer.progress=false", "trainer.limit_validation=2",
        *(["resume=last"] if begun else []), *given.options,
    ])  # fmt: skip
    if code:
        raise SystemExit(code)
    return training_time(folder, "cpu_seconds")


def pixels(batches: list) -> np.ndarray:
    """(n, D) float64."""
    return torch.cat(batches).flatten(1).double().numpy()


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), of means and covariances."""
    (mean_a, mean_b), (cov_a, cov_b) = ((f(a), f(b)) for f in (lambda x: x.mean(0), lambda x: np.cov(x.T)))
    values, vectors = np.linalg.eigh(cov_a)
    half = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T  # pixels that never change make C_a singular
    root = np.sqrt(np.linalg.eigvalsh(half @ cov_b @ half).clip(min=0)).sum()
    return float(np.square(mean_a - mean_b).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * root)


def evaluate(folder: Path, given: argparse.Namespace) -> dict:
    """The figures of a finished run."""
    from genmodels.core.likelihood import Likelihood
    from genmodels.core.samples import SamplingOptions
    from genmodels.evaluation.samples import draw
    from genmodels.models.build import build
    from genmodels.models.checkpoint import load_model

    model, header = load_model(folder / "last.ckpt", device="cpu")
    data = build(header["config"]["data"]).prepare()
    indices = None if given.items is None else torch.arange(given.items)
    parts = [model.log_likelihood(batch, draws=given.draws) for batch in data.loader("test", 256, indices)]
    found = Likelihood.concatenate(parts)
    row = {"bits_per_dim": found.mean_bits_per_dim(), "se_data": found.standard_error("bits_per_dim").total}
    row |= {name: float(nats.mean() / (model.spec.dims * np.log(2))) for name, nats in found.parts.items()}
    test = pixels([batch.x for batch in data.loader("test", 2048)])
    if given.data == "digits":
        from digits_quality import fitted_classifier

        classifier, row["svm_on_test"] = fitted_classifier()
    for name, options in SAMPLERS.items():
        samples = draw(model, SamplingOptions(n=given.samples, **options), batch_size=250, progress=False)
        x = pixels([samples.x])
        row[f"{name}_frechet"] = frechet(x, test)
        if given.data == "digits":
            row[f"{name}_read"] = float((classifier.predict(x) == samples.cond.numpy()).mean())
    return row


def main() -> None:
    """One line of JSON for each run, also in --out, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--items", type=int, default=None)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--options", nargs="*", default=[], help="further keys of train")
    given = parser.parse_args()
    kept = ("steps", "draws", "items", "samples", "options")
    require_same(given.out / f"{given.data}-settings.json", given, kept)
    log = given.out / f"{given.data}.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    known = {(row["objective"], row["seed"]): row for row in map(json.loads, lines)}
    results: dict[str, list[dict]] = {name: [] for name in given.objectives}
    for seed in range(given.seeds):
        for name in given.objectives:
            row = known.get((name, seed))
            if row is None:
                folder = given.out / f"{given.data}-{name.replace(', ', '_').replace(' ', '_')}-{seed}"
                row = {"objective": name, "seed": seed, "train_cpu_s": train(folder, name, seed, given)}
                row |= evaluate(folder, given)
                print(json.dumps(row), flush=True)
                with open(log, "a") as file:
                    file.write(json.dumps(row) + "\n")
            results[name].append(row)
    named = ("objective", "seed", "svm_on_test")
    columns = [key for key in results[given.objectives[0]][0] if key not in named]
    print(f"{given.data}, {given.steps} steps: mean over {given.seeds} seeds (standard deviation)")
    print("| objective | " + " | ".join(columns) + " |")
    for name, rows in results.items():
        cells = []
        for key in columns:
            values = [row[key] for row in rows]
            cells.append(f"{np.mean(values):.4g} ({np.std(values, ddof=1) if len(values) > 1 else float('nan'):.2g})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
