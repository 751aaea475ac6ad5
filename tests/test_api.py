"""`import genmodels as gm`: the same numbers, names and refusals as the commands."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

import genmodels as gm
from genmodels.cli import CONFIGURED
from genmodels.cli.compose import composer, words_by_name
from genmodels.cli.sample import run as sample_command
from genmodels.core.checkpoint import checkpoint_hash
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.data.vision import Digits
from genmodels.models.checkpoint import Source
from genmodels.models.glow_tts import GlowTTS
from genmodels.speech.text import CHARACTERS
from tests.untrained import digits_ddpm, write

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder with a network that is not trained, and the same as model.safetensors in another."""
    folder, model = tmp_path_factory.mktemp("run"), digits_ddpm()
    write(model, folder / "best.ckpt")
    write(model, folder / "exported" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return gm.load(folder, device="cpu")


def test_samples_are_those_of_the_command(model, folder, tmp_path):
    sample_command(ckpt=str(folder), n=5, cond=[3, 8], steps=2, seed=4, out=str(tmp_path / "command.npz"))
    drawn = model.sample(5, cond=[3, 8], steps=2, seed=4, batch_size=2, progress=False)
    assert torch.equal(drawn.x, torch.from_numpy(np.load(tmp_path / "command.npz")["x"]))
    assert np.load(drawn.save(tmp_path / "a.npz"))["x"].shape == (5, 1, 8, 8)
    with Image.open(drawn.save(tmp_path / "a.png")) as image:
        assert image.text["genmodels.seed"] == "4" and len(image.text["genmodels.checkpoint"]) == 64
        assert image.size == drawn.picture.size
    assert drawn._repr_png_().startswith(b"\x89PNG") and drawn._repr_html_() is None


def test_an_exported_model_is_the_same(model, folder):
    other = gm.load(folder / "exported")
    ours, theirs = (one.sample(2, steps=2, ema=False, progress=False).x for one in (model, other))
    assert torch.equal(ours, theirs) and other.header == model.header


@pytest.mark.parametrize("change", [
    lambda network: next(network.core.parameters()).add_(0.1),
    lambda network: [p.copy_(p.flip(0)) for p in network.core.parameters()],
    lambda network: next(network.buffers()).add_(0.1),
    lambda network: network.double(),
], ids=["values", "order", "buffers", "precision"])  # fmt: skip
def test_weights_that_have_changed_are_not_those_of_the_file(change, folder, tmp_path, refuses):
    """What works on files asks for one of them; what uses the network in memory says so in its record."""
    trained = digits_ddpm()
    trained.figures, trained.finished = {"val/bits_per_dim": 1.5}, True
    trained._trainer = SimpleNamespace(global_step=5)
    write(trained, tmp_path / "run" / "best.ckpt")
    model = gm.load(tmp_path / "run", device="cpu")
    moved, record = copy.deepcopy(model), model.sample(1, steps=2, progress=False).made
    assert record["checkpoint"] == checkpoint_hash(tmp_path / "run" / "best.ckpt") and record["step"] == 5

    def uses(one):
        return (lambda: one.evaluate(limit=4), lambda: gm.evaluate([folder, one]), one.verify,
                lambda: one.push(licence="mit", out=tmp_path / "card"))

    with torch.no_grad():
        change(model.network)
    for call in uses(model):
        refuses(InputError, "the weights or their precision have changed since .* from .*run: export the model", call)
    assert model.sample(1, steps=2, progress=False).made["checkpoint"] == f"{record['checkpoint']}, changed in memory"
    model.network._trainer = SimpleNamespace(global_step=2)
    model.export(tmp_path / "new.safetensors")
    again = gm.load(tmp_path / "new.safetensors")
    assert again.header["figures"] == {} and again.header["step"] == 7 and not again.header["finished"]
    model.network._trainer = SimpleNamespace(global_step=7, ckpt_path="run")  # which went on from its steps
    model.export(tmp_path / "same.safetensors")
    assert gm.load(tmp_path / "same.safetensors").header["step"] == 7

    write(digits_ddpm(num_steps=21), tmp_path / "run" / "best.ckpt")  # as a run that goes on
    assert moved.sample(1, steps=2, progress=False).made["checkpoint"] == record["checkpoint"]
    for call in uses(moved):
        refuses(InputError, "run has been replaced since the model was loaded from it: load it again", call)
    (tmp_path / "run" / "best.ckpt").write_bytes(b"abc")
    for call in uses(moved):
        refuses(RunError, "best.ckpt", call)
    moved.export(tmp_path / "moved.safetensors")
    assert gm.load(tmp_path / "moved.safetensors").header["figures"] == {"val/bits_per_dim": 1.5}


def test_a_state_that_is_more_than_tensors_is_compared_too(folder):
    class Extra(torch.nn.Module):
        state = 1

        def get_extra_state(self):
            return {"a": self.state}

    model = gm.load(folder, device="cpu")
    model.network.core.extra = Extra()
    model.network.core.register_buffer("phase", torch.ones(2, dtype=torch.complex64).conj())
    source = Source(model.network, model.header, folder)
    assert source.is_of(model.network)
    model.network.core.extra.state = 2
    assert not source.is_of(model.network)
    model.network.core.extra.state = 1
    model.network.core.phase.mul_(1j)
    assert not source.is_of(model.network)


def test_loading_imports_what_it_needs_and_no_more(folder):
    code = "import sys, genmodels; genmodels.load(sys.argv[1], device='cpu').sample(2, steps=1); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=REPOSITORY, capture_output=True, text=True)
    heavy = {"pytorch_lightning", "torchmetrics", "torch._dynamo", "torchvision", "scipy", "matplotlib", "hydra"}
    assert "torch" in done.stdout.split() and not heavy & set(done.stdout.split()), done.stderr


def test_likelihoods_are_those_of_the_model(model):
    items = model.items(3)
    direct = model.network.log_likelihood(items, seed=1, draws=4).nats
    found = model.log_likelihood(items, seed=1, draws=4, batch_size=2)
    assert torch.allclose(found.nats, direct) and "lower_bound" in found._repr_html_() and str(found)[:2] == "<="
    given = model.log_likelihood(items.x.numpy(), items.cond.tolist(), seed=1, draws=4)
    assert torch.allclose(given.nats, direct)
    unlike = model.log_likelihood(items.x, (items.cond + 1) % 10, seed=1, draws=4)
    assert not torch.allclose(unlike.nats, direct)


REFUSED = [
    (lambda model: model.sample(2, stepps=3), "no sampling option 'stepps': did you mean 'steps'?"),
    (lambda model: model.sample(0), "n must be at least 1, got 0"),
    (lambda model: model.sample(2.5), "n must be an integer, got '2.5' \\(in Python\\)"),
    (lambda model: model.sample(2, batch_size=0), "batch_size must be at least 1, got 0"),
    (lambda model: model.sample(2, batch_size="all"), "batch_size must be a whole number, got 'all'"),
    (lambda model: model.items(-1), "n must be at least 1, got -1"),
    (lambda model: model.log_likelihood(model.items(3), batch_size=-1), "batch_size must be at least 1, got -1"),
    (lambda model: model.log_likelihood(torch.zeros(0, 1, 8, 8)), "items must be at least 1, got 0"),
    (lambda model: model.sample(2, steps=2.5), "steps must be an integer or null, got '2.5' \\(in Python\\)"),
    (lambda model: model.sample(2, seed=-1), "seed must be at least 0, got -1"),
    (lambda model: model.sample(2, temperature="hot"), "temperature must be a number or null, got 'hot'"),
    (lambda model: model.evaluate(stages=["likelihoods"]), "did you mean 'likelihood'"),
    (lambda model: model.evaluate(limit=2.5), "limit must be an integer"),
    (lambda model: model.evaluate(seed=-1), "seed must be at least 0, got -1"),
    (lambda model: model.sample(2, cond="eleven"), "class 'eleven' does not exist"),
    (lambda model: model.sample(2, inpaint=3), "inpaint=3 needs mask="),
    (lambda model: model.sample(2, strength=0.5), "strength=0.5 needs edit="),
    (lambda model: model.sample(2, rounds=3), "rounds=3 needs inpaint="),
    (lambda model: model.sample(2, steps=2, progress=False).save("a.txt"), "end it in .png"),
    (lambda model: model.sample(2, steps=2, progress=False).save_path("a.gif"), "no trajectory was kept"),
    (lambda model: model.log_likelihood(torch.zeros(2, 1, 8, 8)), "has 17 integer levels"),
    (lambda model: model.log_likelihood(torch.zeros(2, 3, dtype=torch.uint8)), "events of shape \\(3,\\)"),
    (lambda model: model.log_likelihood(model.items(3), cond=[1, 2]), "cond has 2 classes for 3 items"),
    (lambda model: model.log_likelihood(model.items(3), cond=torch.arange(4)), "cond has 4 classes for 3 items"),
    (lambda model: model.sample(2, steps=4, path=4, progress=False).save_path("a.jpg"), "written to a .png"),
    (lambda model: model.sample(2, steps=4, path=4, progress=False).save_path("a.png", 0), "frames must be at least 2"),
    (lambda model: model.evaluate(processes=2), "processes is for the command"),
    (lambda model: model.verify(max_dim=2), "verify has no option 'max_dim': did you mean 'max_dims'?"),
    (lambda model: model.verify(patience=0), "patience must be positive"),
    (lambda model: model.verify(max_dims="x"), "max_dims must be an integer, got 'x'"),
    (lambda model: gm.load(None), "None is no checkpoint"),
    (lambda model: gm.train("nsf", data="toy", lr="abc"), "lr must be a number, got 'abc' \\(in Python\\)"),
    (lambda model: model.log_likelihood(None), "items are a Batch or an array, got NoneType"),
    (lambda model: model.log_likelihood(torch.zeros(1, 1, 8, 8) + 0j), "the batch is torch.complex64"),
    (lambda model: model.sample(1, ema="raw"), "ema must be a finite number from 0 to 1, got 'raw'"),
    (lambda model: model.sample(1, edit=torch.zeros(1, 8, 8)), "edit is a file or the number of an item"),
    (lambda model: model.sample(1, weights="raw"), "weights are chosen by ema="),
    (lambda model: model.sample(1, inpaint=3, mask="m.png", keep=torch.ones(1, 8, 8)), "known and keep by inpaint="),
    (lambda model: model.log_likelihood(3.0), "items are a Batch or an array, got float"),
    (lambda model: model.transcribe("a.wav"), "holds a ddpm: transcribe is for model=recognizer"),
    (lambda model: model.transcribe("a.wav", beams=2), "did you mean 'beam'"),
    (lambda model: model.push(licence="mit"), "say where"),
    (lambda model: gm.evaluate([]), "names no checkpoint"),
    (lambda model: gm.evaluate(None), "None is no checkpoint"),
    (lambda model: gm.train("nsf", data=(np.zeros((4, 2)), None)), "data takes no array: write it to a file by numpy"),
    (lambda model: gm.train("nsf", data={"name": "arrays", "file": torch.zeros(4, 2)}), "data.file takes no array: w"),
    (lambda model: gm.train("ddpm", net={"multipliers": np.ones(2)}), "net.multipliers takes no array: give a list"),
    (lambda model: model.log_likelihood(model.items(2), seed=-1), "seed must be at least 0, got -1"),
    (lambda model: gm.train("dppm", max_steps=1), "did you mean 'ddpm'"),
    (lambda model: gm.train("ddpm", data="toy", nonsens=2), "has no option .nonsens."),
    (lambda model: gm.train("nsf", data="toy", max_steps="many"), "trainer.max_steps"),
]


@pytest.mark.parametrize("call, said", REFUSED)
def test_a_refusal_is_the_line_of_the_command(model, call, said, refuses):
    refuses(InputError, said, call, model)


def test_a_comparison_trusts_what_its_models_trust(model, monkeypatch):
    trusted = []
    monkeypatch.setattr("genmodels.cli.evaluate.asked", lambda _, request: (trusted.append(request.trust), request))
    monkeypatch.setattr("genmodels.cli.evaluate.evaluate", lambda *_: None)
    theirs = [gm.Model(model.network, model.header, model.ckpt, trust) for trust in (["one", "both"], ["both"])]
    gm.evaluate(theirs, trust=["given"])
    theirs[1].evaluate()
    assert trusted == [["given", "one", "both"], ["both"]]


def test_samples_are_saved_in_the_home_folder(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    samples = model.sample(2, steps=4, path=4, progress=False)
    assert samples.save("~/a.npz") == tmp_path / "a.npz" and (tmp_path / "a.npz").is_file()
    assert samples.save_path("~/a.gif") == tmp_path / "a.gif" and (tmp_path / "a.gif").is_file()


def test_saving_replaces_what_is_ours_alone(model, tmp_path, refuses):
    samples = model.sample(2, steps=1, progress=False)
    samples.save(tmp_path / "ours")
    samples.save(tmp_path / "ours")  # again
    (tmp_path / "mine").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "mine" / "000001.png")
    refuses(InputError, "000001.png is no sample and would be replaced", samples.save, tmp_path / "mine")
    points = gm.api.Samples.of(gm.core.samples.Samples(torch.zeros(2, 3), None, torch.arange(2), {}),
                               DataSpec("table", (3,)))
    (tmp_path / "t.json").write_text("mine")
    refuses(InputError, "also writes .*t.json, which exists", points.save, tmp_path / "t.csv")
    assert (tmp_path / "t.json").read_text() == "mine" and not (tmp_path / "t.csv").exists()


def test_elements_of_tensors_are_numbers_of_classes(model):
    """Also where the names of the classes are integers."""
    network = copy.deepcopy(model.network)
    network.spec = replace(network.spec, class_names=tuple(str(number) for number in range(1, 11)))
    named = gm.Model(network, model.header, model.ckpt)
    for cond in (torch.tensor([1, 2]), np.array([1, 2]), ["2", "3"], [2, 3], (2, 3)):
        assert named.sample(2, cond=cond, steps=1, progress=False).cond.tolist() == [1, 2]
    assert named.sample(1, cond=torch.tensor(1), steps=1, progress=False).cond.tolist() == [1]
    assert named.sample(1, cond="10", steps=1, progress=False).cond.tolist() == [9]


def test_items_are_those_that_the_model_was_trained_on(tmp_path, refuses):
    x = np.random.default_rng(0).normal(size=(60, 2)).astype("float32")
    np.savez(tmp_path / "t.npz", x=x)
    model = gm.train("maf", data="arrays", file=str(tmp_path / "t.npz"), max_steps=1, run_dir=str(tmp_path / "run"),
                     logger={"wandb": "off"}, trainer={"progress": False})  # fmt: skip
    assert model.items().x.shape[1:] == (2,)
    np.savez(tmp_path / "t.npz", x=np.concatenate([x, x[:1] + 1]))
    refuses(InputError, "has changed since training", gm.load(tmp_path / "run").items)


def test_a_missing_file_is_a_failure(tmp_path):
    with pytest.raises(RunError, match="no such checkpoint"):
        gm.load(tmp_path / "nothing.ckpt")


def test_training_leaves_torch_and_logging_as_they_were(tmp_path, monkeypatch, request):
    def of_torch():
        return (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark,
                os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.get_float32_matmul_precision())

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True, warn_only=True)
    state, level, before = torch.get_rng_state(), logging.getLogger().level, of_torch()
    gm.train("ddpm", data="toy", run_dir=str(tmp_path / "a"), logger={"wandb": "off"},
             trainer={"deterministic": True, "compile": True, "max_steps": 1, "sample_every_n_steps": 0})  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state) and logging.getLogger().level == level
    assert of_torch() == before


def test_training_with_a_precision_of_each_backend(tmp_path):
    """Torch's newer settings, which exclude the one for all backends, and cannot be taken back within a process."""
    code = """import sys, torch, genmodels as gm
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    gm.train("nsf", data="toy", run_dir=sys.argv[1], trainer={"max_steps": 1, "sample_every_n_steps": 0})
    assert torch.backends.cuda.matmul.fp32_precision == "tf32" """
    done = subprocess.run([sys.executable, "-c", code.replace("\n    ", "\n"), tmp_path / "a"], cwd=REPOSITORY,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_model_can_be_copied_while_it_is_trained(folder):
    model = gm.load(folder, device="cpu")
    trainer = pl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False, accelerator="cpu", limit_val_batches=0)  # fmt: skip
    trainer.fit(model.network.train(), Digits(batch_size=8).prepare())
    _, loss = model.network.latest[-1]
    assert not loss.value.requires_grad and not any(part.requires_grad for part in loss.parts.values())
    assert torch.equal(*(next(one.core.parameters()) for one in (model.network, copy.deepcopy(model.network))))


def test_a_resumed_run_names_its_own_settings(tmp_path):
    run = str(tmp_path / "run")
    quick = {"logger": {"wandb": "off"}, "trainer": {"progress": False, "sample_every_n_steps": 0}}
    gm.train("nsf", data="toy", hidden=8, max_steps=1, run_dir=run, **quick)
    assert gm.train(resume=run, max_steps=2).header["step"] == 2
    with composer("train") as hydra:
        assert words_by_name(hydra, [], {"resume": run, "layers": 2})[-1] == "model.layers=2"


def test_train_and_evaluate(tmp_path, capsys, monkeypatch):
    settings = {"trainer": {"progress": False, "sample_every_n_steps": 0}, "logger": {"wandb": "off"}, "hidden": 8}
    model = gm.train("nsf", "seed=3", data="toy", max_steps=2, batch_size=16, run_dir=str(tmp_path / "a"), **settings)
    assert model.header["step"] == 2 and model.header["seed"] == 3 and model.family == "nsf"
    config = model.header["config"]
    assert config["data"]["batch_size"] == 16 and config["model"]["hidden"] == 8
    points = model.sample(4)
    assert points.x.shape == (4, 2)
    monkeypatch.setattr(Image.Image, "show", lambda picture: print("a window"))
    points.show()
    assert "a window" in capsys.readouterr().out
    found = gm.evaluate([model], limit=20, stages=["likelihood"], cache=False)
    assert capsys.readouterr().out == "" and found.page.is_file() and not found.failed
    row = found.table.models[0].likelihood[0]
    assert row.kind == "exact" and f"{row.value:.4f}" in str(found) and f"{row.value:.4f}" in found._repr_html_()
    assert row.value == pytest.approx(-model.log_likelihood(model.items(20)).mean_nats(), abs=1e-5)


def test_every_command_has_its_function():
    """Besides those that look at files, write data or serve a page, which are of use in a shell."""
    own = set(CONFIGURED) - {"shards", "corpus", "demo"}
    assert own == {name for name in own if hasattr(gm, name) or hasattr(gm.Model, name)}


def test_the_public_names_are_typed():
    pytest.importorskip("mypy", reason="mypy is not installed (pip install 'genmodels[test]')")
    words = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_speech(tmp_path, monkeypatch):
    text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello", "a cab"]}
    mel = {"sample_rate": 8000, "n_fft": 256, "hop": 64, "n_mels": 4, "f_min": 0.0, "f_max": 4000.0}
    spec = DataSpec("speech", (4, 40), mel=mel, statistics={"mean": -5.0, "std": 2.0}, text=text)
    torch.manual_seed(0)
    network = GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1)
    write(network, tmp_path / "best.ckpt")
    speech = gm.load(tmp_path).sample(text="a cab", seconds=0.2)
    (place,) = speech.save(tmp_path / "cab.wav")
    assert place.stat().st_size > 1000 and len(speech.waves[0]) == 1600
    assert speech._repr_html_().count("<audio") == 1 and repr(speech) == "speech: 'a cab'"
    with pytest.raises(InputError, match="items of speech need their texts"):
        gm.load(tmp_path).log_likelihood(torch.zeros(2, 4, 40))
    twice = gm.load(tmp_path).sample(2, text="a cab", seconds=0.2)
    assert twice._repr_html_().count("<audio") == 2
    monkeypatch.setenv("HOME", str(tmp_path))
    (first,), (cold,) = speech.save("~/out"), gm.load(tmp_path).sample(text="a cab", temperature=0).save("~/out")
    assert first != cold and first.parent == cold.parent == tmp_path / "out" and "temperature" in cold.name
    (tmp_path / "mine.png").write_text("mine")
    with pytest.raises(InputError, match="also writes .*mine.png, which exists"):
        speech.save(tmp_path / "mine.wav")
    for texts in (["a cab", " "], ["", "a cab"]):
        with pytest.raises(InputError, match="there is no text to synthesise: text . is empty"):
            gm.load(tmp_path).sample(text=texts)
    with pytest.raises(InputError, match="did you mean 'vocoder'"):
        gm.load(tmp_path).sample(text="a cab", vocodr="hifigan")
    for n in (0, -1):
        with pytest.raises(InputError, match=f"n must be at least 1, got {n}"):
            gm.load(tmp_path).sample(n, text="a cab")


def test_a_notebook_draws_the_picture_once(model, monkeypatch):
    drawn, calls = model.sample(2, steps=2, progress=False), []
    monkeypatch.setattr("genmodels.api.picture_of", lambda *given: calls.append(given) or Image.new("L", (1, 1)))
    assert drawn._repr_png_() and drawn._repr_html_() is None and len(calls) == 1
