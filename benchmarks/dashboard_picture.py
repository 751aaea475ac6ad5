"""docs/dashboards.png: short runs of three families on the two moons, drawn from their TensorBoard event files.

    pip install tensorboard
    python benchmarks/dashboard_picture.py [--steps 2000] [--runs FOLDER]

Panels show what a dashboard shows: curves of one name from all runs, and the last pictures of each.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
ENTROPY = 1.0076  # nats, of the two moons with noise 0.1
MODELS = {"ddpm": [], "nsf": [], "energy": []}
PANELS = [("val/nll", (0.95, 1.7)), ("train/loss", None), ("train/gradient_norm", None)]


def train(folder: Path, steps: int) -> None:
    """One run of every model, unless its folder is there."""
    for model, words in MODELS.items():
        if not (folder / model).exists():
            every = max(1, steps // 10)
            common = ["data=toy", f"trainer.max_steps={steps}", f"trainer.validate_every_n_steps={every}",
                      f"trainer.sample_every_n_steps={steps}", "logger=tensorboard", f"run_dir={folder / model}"]
            subprocess.run([sys.executable, ROOT / "train.py", f"model={model}", *words, *common], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboards.png")
    options = parser.parse_args()
    folder = options.runs or Path(tempfile.mkdtemp())
    train(folder, options.steps)
    runs = {model: EventAccumulator(str(folder / model / "tensorboard"), size_guidance={"images": 0})
            for model in MODELS}  # fmt: skip
    figure = Figure(figsize=(10, 5), dpi=90, layout="constrained")
    axes = figure.subplots(2, 3, height_ratios=[3, 2])
    for events in runs.values():
        events.Reload()
    for axis, (name, limits) in zip(axes[0], PANELS, strict=True):
        for model, events in runs.items():
            values = events.Scalars(name)
            axis.plot([e.step for e in values], [e.value for e in values], label=model, lw=1.2)
        if name == "val/nll":
            axis.axhline(ENTROPY, color="grey", ls=":", label="exact entropy")
        axis.set(title=name, xlabel="step", ylim=limits)
        axis.legend(fontsize=8)
    for axis, (model, events) in zip(axes[1], runs.items(), strict=True):
        shown = Image.open(io.BytesIO(events.Images("pictures/density")[-1].encoded_image_string))
        axis.imshow(shown)
        axis.set_title(f"pictures/density of {model}")
        axis.axis("off")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    with Image.open(options.out) as whole:
        whole.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(options.out, optimize=True)
    print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} kB, from {folder}")


if __name__ == "__main__":
    main()
