"""Energy and score models through the command line: trained, sampled, evaluated, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import genmodels as gm
from genmodels.cli.compose import composer
from genmodels.cli.main import main
from genmodels.core.checkpoint import read_header
from genmodels.core.data import Batch
from genmodels.core.errors import RunError
from genmodels.models.checkpoint import read_checkpoint
from genmodels.training.callbacks import Checkpointing

ROOT = Path(__file__).parents[1]
QUICK = ["trainer.max_steps=8", "trainer.validate_every_n_steps=4", "trainer.sample_every_n_steps=0", "logger=csv",
         "trainer.progress=false", "data.batch_size=32"]
ONCE = [*QUICK, "trainer.validate_every_n_steps=8"]
SMALL = ["data=toy", "data.n_val=100", "data.n_test=200", "data.n_train=2000"]
PLANE = ["model=energy", *SMALL, "model.net.hidden=[16,16]"]


def genmodels(*words: str) -> None:
    assert main(list(words)) == 0


@pytest.fixture
def here(tmp_path, monkeypatch, short_pilot):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(name: str = "report.json") -> dict:
    return json.loads(Path("run", name).read_text())


def test_an_energy_of_points_has_an_exact_density_and_pictures(here, capsys):
    genmodels("train", *PLANE, *QUICK, "logger=default", "trainer.sample_every_n_steps=8", "run_dir=run")
    for name in ("samples", "fields"):
        assert Path("run", name, "step_000008.png").is_file()
        assert list(Path("run/wandb").glob(f"offline-run-*/files/media/images/pictures/{name}_*.png"))
    table = Path("run/metrics.csv").read_text().splitlines()[0]
    monitored = ("energy_spread", "score_norm", "trace", "held_out_over_training")
    assert all(f"monitor/{name}" in table for name in monitored)
    genmodels("sample", "ckpt=run", "n=6", "steps=5", "out=six.npz")
    genmodels("sample", "ckpt=run", "n=1", "start=4", "steps=5", "out=one.npz")
    six, one = (np.load(f"{name}.npz") for name in ("six", "one"))
    assert np.abs(six["x"][4] - one["x"][0]).max() < 1e-5
    assert json.loads(str(six["made"]))["sampler"] == "annealed"
    chain = ["sampler=mala", "steps=6", "step_size=0.05"]
    genmodels("sample", "ckpt=run", "n=4", *chain, "inverse_temperature=2", "path=way.gif", "frames=3")
    assert main(["sample", "ckpt=run", "n=4", "temperature=0.5"]) == 2
    assert "times 0.5 is inverse_temperature=4" in capsys.readouterr().err
    capsys.readouterr()
    genmodels("evaluate", "ckpt=run", "stages=[likelihood]")
    assert "by quadrature" in capsys.readouterr().out
    row = report()["likelihood"][0]
    assert row["kind"] == "exact" and row["kl_gap"] == pytest.approx(row["nll"] - row["entropy"]) and row["kl_gap"] > 0


@pytest.mark.parametrize("words", [
    ["model=score", "model.net.hidden=8"], ["model=ddpm", "model.net.hidden=8", "model.num_steps=10"],
], ids=["score", "ddpm"])  # fmt: skip
def test_a_validation_after_the_last_step_draws_densities_too(here, words):
    steps = ["trainer.max_steps=3", "trainer.validate_every_n_steps=2", "trainer.sample_every_n_steps=3"]
    genmodels("train", *words, *SMALL, *QUICK, *steps, "run_dir=run")
    assert sorted(p.name for p in Path("run/density").iterdir()) == ["step_000002.png", "step_000003.png"]


def test_a_table_is_evaluated_by_annealed_importance_sampling(here, capsys):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 3)) @ np.array([[1, 0.5, 0], [0, 1, 0.3], [0, 0, 1]])
    np.savez("table.npz", x=np.concatenate([x, x[:, :1].round() + 0.1 * generator.normal(size=(400, 1))], 1))
    words = ["model.net.inducing=20", "model.net.hidden=8", "data=arrays", "data.file=table.npz"]
    genmodels("train", "model=energy", *words, *QUICK, "run_dir=run")
    capsys.readouterr()
    genmodels("evaluate", "ckpt=run", "stages=[likelihood]", "chains=48", "densities=20")
    out = capsys.readouterr().out
    made = report()["likelihood"][0]["made"]
    assert report()["likelihood"][0]["kind"] == "ais" and made["chains"] == 48 and made["steps"] == 20
    assert "of 48 chains count" in out and "reverse, approximate" in out
    assert report()["likelihood"][0]["se_mc"] is None and made["log_z_stderr"] > 0
    genmodels("evaluate", "ckpt=run", "stages=[likelihood]", "normaliser=none", "out=run/none.json")
    row = report("none.json")["likelihood"][0]
    assert row["kind"] == "unnormalised" and row["nll"] is None and "not asked for" in row["reason"]
    assert "no likelihood" in capsys.readouterr().out


def test_an_energy_of_digits_answers_for_the_integers(here):
    genmodels("train", "model=energy", "model.net.channels=[4,8]", *ONCE, "run_dir=run")
    genmodels("sample", "ckpt=run", "n=3", "steps=3", "out=three.npz")
    x = np.load("three.npz")["x"]
    assert x.dtype == np.uint8 and x.max() <= 16
    few = ["limit=20", "chains=16", "densities=5", "importance_samples=[1,2]"]
    genmodels("evaluate", "ckpt=run", "stages=[likelihood]", *few)
    rows = report("report_first20.json")["likelihood"]
    assert [r["made"]["importance_samples"] for r in rows] == [1, 2] and rows[0]["kind"] == "ais"
    assert rows[1]["bits_per_dim"] < rows[0]["bits_per_dim"]


def test_a_score_model_draws_and_bounds_the_likelihood(here, capsys):
    genmodels("train", "model=score", "model.net.channels=8", "model.net.attention_at=[]", *ONCE, "run_dir=run")
    for sampler in ("predictor_corrector", "annealed_langevin"):
        words = ["ckpt=run", f"sampler={sampler}", "steps=3", "cond=3"]
        genmodels("sample", *words, "n=3", f"out={sampler}.npz")
        genmodels("sample", *words, "n=1", "start=2", "out=one.npz")
        many, one = np.load(f"{sampler}.npz")["x"].astype(int), np.load("one.npz")["x"].astype(int)
        assert np.abs(many[2] - one[0]).max() <= 1
    genmodels("sample", "ckpt=run", "steps=3", "guidance=2", "n=3", "out=three.npz")
    assert main(["sample", "ckpt=run", "sampler=annealed_langevin", "guidance=2"]) == 2
    assert "guidance is an option of the other samplers" in capsys.readouterr().err
    genmodels("evaluate", "ckpt=run", "stages=[likelihood]", "limit=20")
    row = report("report_first20.json")["likelihood"][0]
    assert row["kind"] == "lower_bound" and 3 < row["bits_per_dim"] < 20


def test_an_energy_of_images_at_every_level_is_a_diffusion_model_with_energies(here, capsys):
    net = ["model.net.channels=8", "model.net.attention_at=[]", "model.num_steps=20"]
    genmodels("train", "model=energy_ddpm", *net, *ONCE, "run_dir=run")
    for sampler in ("dpmpp_2m", "ddpm"):
        words = ["ckpt=run", f"sampler={sampler}", "steps=4", "cond=3"]
        genmodels("sample", *words, "n=3", "guidance=2", f"out={sampler}.npz", f"path={sampler}.gif", "frames=2")
        genmodels("sample", *words, "n=1", "start=2", "guidance=2", "out=one.npz")
        many, one = np.load(f"{sampler}.npz")["x"].astype(int), np.load("one.npz")["x"].astype(int)
        assert np.abs(many[2] - one[0]).max() <= 1
    genmodels("evaluate", "ckpt=run", "stages=[likelihood,checks]", "limit=10", "draws=2", "ode=true",
              "ode_options.divergence=hutchinson", "ode_options.solver=heun", "ode_options.steps=2")
    rows = report("report_first10.json")["likelihood"]
    assert [row["kind"] for row in rows] == ["lower_bound", "ode"]  # the density of noisy data is in no line
    capsys.readouterr()
    genmodels("verify", "ckpt=run", "progress=false")
    assert "NoiseLevels, an energy" in capsys.readouterr().out
    model = gm.load("run").network
    items = Batch(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4))
    assert model.energies(items).shape == (4,) and model.partition(3, chains=16, steps=30).log_z > 0


def test_model_energy_of_mnist_is_the_energy_at_every_level():
    with composer("train") as hydra:
        one, other = (hydra.compose([f"model={name}", "data=mnist"]) for name in ("energy", "energy_ddpm"))
    assert one == other and one["model"]["_target_"].endswith("EnergyDDPM")


@pytest.mark.parametrize("words", [
    PLANE, [*PLANE, "model.loss=contrastive", "model.objective.steps=2", "model.objective.size=100"],
    ["model=energy", *SMALL, "model.network=deep_kernel", "~model.net.hidden", "~model.net.activation",
     "~model.net.input_gain", "model.net.inducing=10"],
    ["model=score", *SMALL, "model.net.hidden=16"],
    ["model=energy_ddpm", *SMALL, "model.net.hidden=16", "model.num_steps=20"],
], ids=["energy", "contrastive", "deep kernel", "score", "energy at every level"])
def test_resumed_is_as_never_stopped(here, words):
    words = [*words, *QUICK, "checkpoint.every_n_steps=3"]
    genmodels("train", *words, "run_dir=whole")
    # The same run, cut after its third step: what is left is its checkpoint of that moment.
    def cut(self, trainer, name, *, before=Checkpointing.save):
        before(self, trainer, name)
        if trainer.global_step == 3:
            raise RunError("cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointing, "save", cut)
        assert main(["train", *words, "run_dir=cut"]) == 1
    assert read_header(Path("cut/last.ckpt"))["step"] == 3
    genmodels("train", *words, "run_dir=cut", "resume=last")
    one, two = (read_checkpoint(Path(name, "last.ckpt"))["state_dict"] for name in ("whole", "cut"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_training_on_two_processes_is_training_on_one(here):
    words = [*PLANE, *QUICK, "trainer.accelerator=cpu"]
    genmodels("train", *words, "run_dir=one")
    two = [sys.executable, str(ROOT / "train.py"), *words, "run_dir=two", "trainer.devices=2", "trainer.strategy=ddp"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(two, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    one, two = (read_checkpoint(Path(name, "last.ckpt"))["state_dict"] for name in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("command, words, said", [
    ("train", [*PLANE, "model.loss=slised"], "sliced"),
    ("train", [*PLANE, "model.net.activation=relu"], "softplus"),
    ("train", [*PLANE, "model.objective.projektions=2"], "projections"),
    ("train", [*PLANE, *QUICK, "model.optimizer.lr=1e6", "model.optimizer.clip=0", "run_dir=run",
               "trainer.max_steps=400"], "step"),
])
def test_what_goes_wrong_is_one_line(here, capsys, command, words, said):
    assert main([command, *words]) in (1, 2)
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(f"genmodels {command}: ") and said in message
