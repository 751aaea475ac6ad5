"""Two thousand steps with the default settings, five seeds: nothing becomes infinite or NaN. Slow."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile

from genmodels.cli.main import main
from genmodels.data.toy import DENSITIES

TABLES = ("nsf", "realnvp", "maf")
UCI = {"red wine": "winequality-red.csv", "white wine": "winequality-white.csv", "parkinsons": "parkinsons_updrs.data"}

# Batches of natural images are small: noisier gradients are the harder test, and on a CPU the only one in reach.
SETTINGS = {
    "glow, digits": ["model=glow", "data=digits"],
    "realnvp, digits": ["model=realnvp", "data=digits"],
    "nsf, digits": ["model=nsf", "data=digits"],
    **{f"nsf, {name}": ["model=nsf", "data=toy", f"data.set={name}"] for name in sorted(DENSITIES)},
    "realnvp, moons": ["model=realnvp", "data=toy"],
    "maf, moons": ["model=maf", "data=toy"],
    **{f"{model}, table": [f"model={model}", "data=arrays", "data.file=table.npz"] for model in TABLES},
    **{f"{model}, {name}": [f"model={model}", "data=arrays", f"data.file={{shared}}/uci/{file}"]
       for model in TABLES for name, file in UCI.items()},
    "glow, clips": ["model=glow", "data=spoken_digits", "data.root=clips"],
    "nsf, mnist": ["model=nsf", "data=mnist", "data.root={shared}", "data.batch_size=2"],
    "glow, mnist": ["model=glow", "data=mnist", "data.root={shared}", "data.batch_size=2"],
    "realnvp, mnist": ["model=realnvp", "data=mnist", "data.root={shared}", "data.batch_size=2"],
    "realnvp, cifar10": ["model=realnvp", "data=arrays", "data.file={cifar10}", "preset=realnvp_cifar10",
                         "data.batch_size=2"],
    "glow, cifar10": ["model=glow", "data=arrays", "data.file={cifar10}", "preset=glow_cifar10", "data.batch_size=2"],
}


def write_clips(rng) -> None:
    """Two classes of twelve tones with overtones that fade, of unequal length, beginning and ending in silence."""
    for label in range(2):
        for k in range(12):
            time = np.arange(int(8000 * rng.uniform(0.3, 0.6))) / 8000
            pitch = 110 * 2 ** (label + rng.uniform(-0.2, 0.2))
            tone = sum(np.sin(2 * np.pi * m * pitch * time) / m for m in range(1, 12)) * np.exp(-4 * time)
            sound = np.concatenate([np.zeros(400), tone, np.zeros(400)])
            place = Path("clips") / str(label) / f"{k}.wav"
            place.parent.mkdir(parents=True, exist_ok=True)
            wavfile.write(place, 8000, (8000 * sound).astype("int16"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_becomes_nan(tmp_path, monkeypatch, request, name, seed):
    """A table with heavy tails and one column of few values, and tones, stand for what users bring.

    CIFAR-10 is read from the file that GENMODELS_CIFAR10 names (an .npz of train_images and test_images).
    """
    places = {}
    if any("{shared}" in word for word in SETTINGS[name]):
        places["shared"] = request.getfixturevalue("shared_data")
    if "cifar10" in name:
        places["cifar10"] = os.environ.get("GENMODELS_CIFAR10") or pytest.skip("GENMODELS_CIFAR10 names no file")
    setting = [word.format(**places) for word in SETTINGS[name]]
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    table = np.concatenate([rng.standard_t(3, (1500, 5)), rng.integers(0, 7, (1500, 1))], axis=1)
    np.savez("table.npz", x=table.astype("float32"))
    if "clips" in name:
        write_clips(rng)
    words = [*setting, f"seed={seed}", "trainer.max_steps=2000", "trainer.validate_every_n_steps=1000",
             "trainer.limit_validation=2", "trainer.sample_every_n_steps=0", "trainer.progress=false", "logger=csv",
             "run_dir=run"]
    assert main(["train", *words]) == 0
    with open("run/metrics.csv") as file:
        values = [float(v) for row in csv.DictReader(file) for v in row.values() if v]
    assert values and all(math.isfinite(v) for v in values)
    assert main(["sample", "ckpt=run/last.ckpt", "n=64", "out=samples.npz"]) == 0
    assert np.isfinite(np.load("samples.npz")["x"].astype("float64")).all()
