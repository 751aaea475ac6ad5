"""What README and docs/ddpm.md promise of the first command, and the bound of MNIST's preset.

Minutes, and most of an hour for MNIST: run with `pytest -m slow tests/test_quality.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genmodels.cli.main import main

ROOT = Path(__file__).parents[1]
#: Value and standard error of the first command's model in docs/ddpm.md: bound in bits/dim, Fréchet distance.
BOUND, FRECHET = (1.84, 0.015), (1.74, 0.5)


@pytest.mark.slow
def test_the_default_model_draws_digits_and_beats_the_pixel_histogram(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=ddpm", "run_dir=run", "logger=csv", "trainer.progress=false"]) == 0
    command = [sys.executable, str(ROOT / "benchmarks" / "digits_quality.py"), "run/best.ckpt", "500"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert read["svm_on_real_test"] >= 0.98
    assert read["dpmpp_2m_20"] >= 0.9 and read["ddpm_all"] >= 0.9
    assert main(["evaluate", "ckpt=run"]) == 0
    report = json.loads(Path("run/report.json").read_text())
    histogram = next(r["value"] for r in report["references"] if "histogram" in r["name"])
    row = report["likelihood"][0]
    assert row["bits_per_dim"] + 4 * row["se_data"] < histogram
    assert row["bits_per_dim"] <= BOUND[0] + 3 * BOUND[1]
    assert report["fidelity"]["frechet"] <= FRECHET[0] + 3 * FRECHET[1]


def test_the_promised_figures_are_those_of_the_documentation():
    (row,) = [line for line in (ROOT / "docs" / "ddpm.md").read_text().splitlines()
              if line.startswith("| digits 8x8") and "`python train.py model=ddpm`" in line]
    assert f"<= {BOUND[0]:.3f}({BOUND[1] * 1000:.0f})" in row
    assert f"distance {FRECHET[0]:.2f}({FRECHET[1] * 100:.0f})" in row


@pytest.mark.slow
def test_the_preset_of_mnist_beats_the_pixel_histogram(tmp_path, monkeypatch, shared_data):
    monkeypatch.chdir(tmp_path)
    train = ["model=ddpm", "data=mnist", f"data.root={shared_data}", "run_dir=run", "logger=csv"]
    assert main(["train", *train, "trainer.sample_every_n_steps=0", "trainer.progress=false"]) == 0
    assert main(["evaluate", "ckpt=run", "stages=[likelihood]", "ode=false", "limit=1000", "draws=20"]) == 0
    report = json.loads(Path("run/report.json").read_text())
    histogram = next(r["value"] for r in report["references"] if "histogram" in r["name"])
    row = report["likelihood"][0]
    assert row["bits_per_dim"] + 4 * row["se_data"] < histogram
