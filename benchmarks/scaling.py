"""What a step of the presets costs, and the efficiency to expect on many GPUs.

    python benchmarks/scaling.py [--presets ddpm_cifar10 experiment=glow_cifar10] [--measure | --milliseconds 62 650]
    python benchmarks/scaling.py --processes 1 2 --steps 150 --rounds 3

For each preset: the weights, the bytes of gradients that a step adds up over the processes (float32), the operations of
a step (three times the counted forward pass), and the time of a step, and of all steps, on one GPU: measured here with
`--measure`, measured elsewhere and given as `--milliseconds`, or else at a stated share of the bfloat16 peak, which
small models come nowhere near. From them, with a ring or a tree of all-reduces that moves 2 (W - 1) / W of the
gradients over the slowest link,

    t_comm = 2 (W - 1) / W bytes / bandwidth + 2 log2(W) latency
    efficiency = t_step / (t_step + max(0, t_comm - overlap t_step))

with overlap = 2/3, the backward pass, during which DDP communicates, and in brackets overlap = 0.

`--processes` trains on this machine's cores instead, by torchrun with one thread in each process, and prints the items
a second that each run states, with the same global batch (strong scaling) and with the same batch in every process
(weak scaling). The runs take turns. DATA_ROOT is the folder of data that are read from files.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from genmodels.cli.compose import composer
from genmodels.core.data import Batch, DataSpec
from genmodels.models.build import build
from genmodels.training.dashboards import PEAKS, forward_flops

ROOT = Path(__file__).resolve().parents[1]
SPECS = {
    "digits": DataSpec("digits", (1, 8, 8), levels=17, num_classes=10),
    "fashion_mnist": DataSpec("fashion_mnist", (1, 28, 28), levels=256, num_classes=10),
    "mnist": DataSpec("mnist", (1, 28, 28), levels=256, num_classes=10),
    "cifar10": DataSpec("cifar10", (3, 32, 32), levels=256, num_classes=10),
}
PRESETS = ["ddpm_mnist", "glow_mnist", "score_mnist", "energy_mnist", "ddpm_cifar10", "glow_cifar10", "realnvp_cifar10"]
#: GPUs, bytes a second of each one's link, and the latency of a message: eight in a machine, then machines.
NETWORKS = [
    (8, 450e9, 5e-6, "NVLink, 450 GB/s each"),
    (64, 50e9, 15e-6, "InfiniBand, 400 Gbit/s each"),
    (512, 50e9, 15e-6, "InfiniBand, 400 Gbit/s each"),
    (64, 25e9 / 8, 30e-6, "Ethernet, 25 Gbit/s each"),
]


@dataclass
class Cost:
    """A step of one process."""

    preset: str
    weights: int
    batch: int
    steps: int
    flops: float
    measured: float | None = None  # seconds

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.weights


def cost_of(preset: str, measure: bool) -> Cost:
    """What a preset's step takes, on random data of its shape."""
    model_name, data = parts(preset)
    with composer("train") as hydra:
        config = hydra.compose([preset] if "=" in preset else [f"model={model_name}", f"data={data}"])
    spec, size = SPECS[data], config["data"].get("batch_size", 128)
    model = build(config["model"], spec)
    x = torch.randint(0, spec.levels, (size, *spec.event_shape), generator=torch.Generator().manual_seed(0))
    batch = Batch(x.to(torch.uint8), torch.arange(size) % 10, index=torch.arange(size))
    model.initialize(batch.rows(slice(0, 8)))
    weights = sum(p.numel() for p in model.core.parameters())
    found = Cost(preset, weights, size, config["trainer"]["max_steps"], 3 * forward_flops(model, batch) * size)
    if measure:
        found.measured = seconds_of_a_step(model, batch)
    return found


def seconds_of_a_step(model, batch: Batch) -> float:
    """The median of steps after the first: loss, derivatives, optimiser; on a GPU in bfloat16, as with trainer=gpu."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    model, batch = model.to(device), batch.to(device)
    optimizer, _ = model.optimizer_options.build(model.core.parameters(), 10)
    times = []
    for _ in range(15 if gpu else 3):
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = model.loss(batch, model.training_generator(len(batch))).value
        loss.backward()
        optimizer.step()
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[5 if gpu else 1 :])


def parts(preset: str) -> tuple[str, str]:
    """Its model and its data.

    Example:
        >>> parts("score_fashion_mnist")
        ('score', 'fashion_mnist')
    """
    data = next((name for name in SPECS if preset.endswith(f"_{name}")), None)
    if data is None:
        raise SystemExit(f"{preset}: its name has to end with its data, one of {', '.join(SPECS)}")
    return preset.removesuffix(f"_{data}"), data


def efficiency(step: float, size: int, gpus: int, bandwidth: float, latency: float, overlap: float) -> float:
    """Speed-up over one process, divided by the number of processes.

    Example:
        >>> efficiency(1.0, 10**9, 2, 10**9, 0.0, overlap=0.0)
        0.5
    """
    exchange = 2 * (gpus - 1) / gpus * size / bandwidth + 2 * math.log2(gpus) * latency
    return step / (step + max(0.0, exchange - overlap * step))


def items_per_second(preset: str, processes: int, batch: int, steps: int) -> float:
    """What a run of train.py says of its speed, on CPU cores."""
    model, data = parts(preset)
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        root = [] if data == "digits" else [f"data.root={os.environ.get('DATA_ROOT', 'data')}"]
        command = [
            sys.executable, *launch, str(ROOT / "train.py"), f"model={model}", f"data={data}",
            f"data.batch_size={batch}", f"trainer.max_steps={steps}", f"trainer.validate_every_n_steps={steps}",
            "trainer.limit_validation=1", "trainer.sample_every_n_steps=0", "trainer.accelerator=cpu",
            "trainer.progress=false", "logger=csv", f"run_dir={folder}/run", *root,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        found = re.search(r"speed: +([\d,.]+) items/s", (Path(folder) / "run" / "log.txt").read_text())
        if found is None:
            sys.exit(f"no speed of {steps} steps was measured: give more --steps")
        return float(found[1].replace(",", ""))


def scaling_here(presets: list[str], numbers: list[int], steps: int, rounds: int) -> None:
    """Print the items a second of each number of processes and their ratio to the first: median and range of rounds."""
    heads = ["preset", "processes", "batch", "items/s", f"against {numbers[0]} process{'es'[: 2 * (numbers[0] > 1)]}"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for preset in presets:
        with composer("train") as hydra:
            model, data = parts(preset)
            config = hydra.compose([f"model={model}", f"data={data}"])
        batch = config["data"]["batch_size"]
        cases = [(n, size) for n in numbers for size in sorted({batch, batch * n // numbers[0]})]
        rates: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
        for turn in range(rounds):
            for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                rates[case].append(items_per_second(preset, *case, steps))
        for case, found in rates.items():
            ratios = sorted(a / b for a, b in zip(found, rates[cases[0]], strict=True))
            cells = [preset, *map(str, case), f"{median(found):.4g} ({min(found):.4g} to {max(found):.4g})",
                     f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--gpu", choices=sorted(PEAKS), default="H100")
    parser.add_argument("--utilisation", type=float, default=0.3, help="share of the bfloat16 peak without times")
    parser.add_argument("--measure", action="store_true", help="time steps on this machine")
    parser.add_argument("--milliseconds", nargs="+", type=float, help="a step of each preset, as measured elsewhere")
    parser.add_argument("--processes", nargs="+", type=int, help="train on so many processes of this machine instead")
    parser.add_argument("--steps", type=int, default=150, help="steps of each run of --processes")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each number of processes")
    asked = parser.parse_args()
    if asked.processes:
        if named := [preset for preset in asked.presets if "=" in preset]:
            parser.error(f"--processes trains presets such as ddpm_mnist, not {named[0]}")
        scaling_here(asked.presets, asked.processes, asked.steps, asked.rounds)
        return
    if asked.milliseconds and (asked.measure or len(asked.milliseconds) != len(asked.presets)):
        parser.error("--milliseconds takes one number for each preset, and leaves --measure out")
    costs = [cost_of(preset, asked.measure) for preset in asked.presets]
    for cost, given in zip(costs, asked.milliseconds or (), strict=bool(asked.milliseconds)):
        cost.measured = given / 1000
    peak, networks = PEAKS[asked.gpu], [f"{gpus} GPUs, {name}" for gpus, _, _, name in NETWORKS]
    heads = ["preset", "weights", "MB of gradients", "batch", "GFLOP a step", "ms a step",
             f"share of an {asked.gpu}'s peak", "all steps, hours", *networks]  # fmt: skip
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for cost in costs:
        seconds = cost.measured or cost.flops / (asked.utilisation * peak)
        cells = [cost.preset, f"{cost.weights / 1e6:.2f} M", f"{cost.gradient_bytes / 1e6:.1f}", str(cost.batch),
                 f"{cost.flops / 1e9:.0f}", f"{1e3 * seconds:.3g}", f"{cost.flops / seconds / peak:.2%}",
                 f"{cost.steps:,}: {cost.steps * seconds / 3600:.3g}"]  # fmt: skip
        for gpus, bandwidth, latency, _ in NETWORKS:
            best, worst = (efficiency(seconds, cost.gradient_bytes, gpus, bandwidth, latency, o) for o in (2 / 3, 0))
            cells.append(f"{best:.0%} ({worst:.0%})")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
