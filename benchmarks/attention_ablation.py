"""What do positions add to a DDPM on digits? The bound in bits/dim of each kind of attention, same budget, over seeds.

    python benchmarks/attention_ablation.py [--kinds none plain absolute swin2d rope2d xl] [--seeds 0 1 2]
                                            [--steps 600] [--channels 16] [--draws 20]
                                            [--out runs/attention_ablation]

Each run is a small U-Net with two heads of attention on the maps of 8 x 8 and of 4 x 4, otherwise the first command of
the README, and is evaluated on the whole test split by a stratified bound: the same items and the same noise for every
model, so that their differences are known better than the figures themselves. A run that is there already is not made
again. The table gives the mean over the seeds with its standard error, and that of the differences from `none`, seed
by seed. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from statistics import fmean, stdev

from _settings import require_same

from genmodels.cli.main import main as command
from genmodels.nn import ATTENTION

KINDS = ("none", "plain", "absolute", "swin2d", "rope2d", "xl")


def run(kind: str, seed: int, options: argparse.Namespace) -> dict:
    """The figures of one kind and one seed, from its file where there is one."""
    folder = options.out / f"{kind}-{seed}"
    path = folder / "ablation.json"
    if path.exists():
        return json.loads(path.read_text())
    start = time.monotonic()
    train(kind, seed, options, folder)
    seconds = time.monotonic() - start
    report = folder / "report.json"
    if command(["evaluate", f"ckpt={folder / 'last.ckpt'}", f"draws={options.draws}", f"out={report}"]):
        raise SystemExit(f"{kind}, seed {seed}: the evaluation failed")
    evaluated = json.loads(report.read_text())
    (line,) = evaluated["likelihood"]
    found = {"kind": kind, "seed": seed, "steps": options.steps, "seconds": seconds}
    found |= {"parameters": evaluated["checkpoint"]["parameters"]}
    found |= {name: line[name] for name in ("bits_per_dim", "se_data", "se_mc")}
    path.write_text(json.dumps(found))
    return found


def train(kind: str, seed: int, options: argparse.Namespace, folder: Path) -> None:
    """A run from the beginning, in place of one that was cut off."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        "model=ddpm", "data=digits", f"model.net.channels={options.channels}", f"model.net.attention={kind}",
        "model.net.attention_at=[8,4]", "model.net.heads=2", "model.ema_decay=0.99", f"seed={seed}",
        f"trainer.max_steps={options.steps}", "trainer.validate_every_n_steps=0", "trainer.sample_every_n_steps=0",
        "trainer.progress=false", "logger=csv", f"run_dir={folder}",
    ]  # fmt: skip
    if command(["train", *words]):
        raise SystemExit(f"{kind}, seed {seed}: the training failed")


def error(values: list[float]) -> float:
    """The standard error of a mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def table(found: list[dict], kinds: list[str]) -> str:
    """Bits/dim and the difference from no attention, with their standard errors over the seeds."""
    by = {(row["kind"], row["seed"]): row["bits_per_dim"] for row in found}
    lines = ["| attention | bits/dim, at most | minus `none`, same seed | seeds |", "|---|---|---|---|"]
    for kind in kinds:
        own = {seed: value for (name, seed), value in by.items() if name == kind}
        if not own:
            continue
        gaps = [value - by["none", seed] for seed, value in own.items() if ("none", seed) in by]
        gap = f"{fmean(gaps):+.4f} ± {error(gaps):.4f}" if kind != "none" and gaps else ""
        values = list(own.values())
        lines.append(f"| `{kind}` | {fmean(values):.4f} ± {error(values):.4f} | {gap} | {len(values)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(ATTENTION), default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/attention_ablation"))
    options = parser.parse_args()
    require_same(options.out / "settings.json", options, ("steps", "channels", "draws"))
    found = []
    for seed in options.seeds:
        for kind in options.kinds:
            found.append(run(kind, seed, options))
            print(json.dumps(found[-1]), flush=True)
        print(table(found, options.kinds), flush=True)


if __name__ == "__main__":
    main()
