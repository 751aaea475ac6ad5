"""A model and a data set outside genmodels, as docs/extending.md shows them: trained, sampled, evaluated, resumed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from genmodels.cli import main as cli
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.samples import SamplingOptions
from genmodels.evaluation.samples import draw
from genmodels.models.base import GenerativeModel, Samples
from genmodels.models.build import NETWORKS, TARGET, build
from genmodels.models.optimizer import Optimizer

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
SOURCE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)
LINES = [line for line in PAGE.splitlines() if line.startswith("genmodels ") and "trust=[mine]" in line]
COMMANDS = [shlex.split(line)[1:] for line in LINES]


NETWORK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
NETWORK_LINES = [line for line in PAGE.splitlines() if line.startswith("genmodels ") and "trust=[small]" in line]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_example_of_the_docs_from_training_to_a_report(mine, capsys):
    assert [command[0] for command in COMMANDS] == ["train", "sample", "evaluate"]
    for command in COMMANDS:
        assert cli.main(command) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    report = json.loads(Path("runs/mine/report.json").read_text())
    (line,) = report["likelihood"]
    assert line["kind"] == "exact" and 2.5 < line["nll"] < 3.6 and not report["failed"]
    passed = {check["name"] for check in report["checks"] if check["status"] == "passed"}
    assert {"same seed, same value", "batch size 1 against 64", "density integrates to one"} <= passed
    optimizer = yaml.safe_load(Path("runs/mine/config.yaml").read_text())["model"]["optimizer"]
    assert optimizer["lr"] == Optimizer().lr and optimizer["decay"] == Optimizer().decay  # defaults included
    # What is printed to type next works as it stands.
    following = [shlex.split(line.partition(":")[2])[1:] for line in out.splitlines() if line.startswith("sample: ")]
    assert len(following) == 1 and "trust=[mine]" in following[0]
    assert cli.main([*following[0], "out=next.npz"]) == 0
    assert cli.main(["sample", "ckpt=runs/mine", "trust=[mine]", "n=1", "start=5", "out=one.npz"]) == 0
    assert np.allclose(np.load("next.npz")["x"][5], np.load("one.npz")["x"][0], atol=1e-6)
    # So is what the exported file and the card of a published model say.
    capsys.readouterr()
    assert cli.main(["export", "ckpt=runs/mine", "trust=[mine]", "out=m.safetensors"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("use: ")]
    assert cli.main([*shlex.split(line.partition(":")[2])[1:], "n=2", "out=m.npz"]) == 0
    assert cli.main(["push", "ckpt=runs/mine", "trust=[mine]", "licence=mit", "out=card"]) == 0
    card = Path("card/README.md").read_text()
    assert "Its classes are those of mine" in card and "trust=['mine']).sample(16)" in card
    (use,) = [line for line in card.splitlines() if line.startswith("genmodels sample")]
    words = shlex.split(use.replace("<this folder>", "card"))[1:]
    assert "trust=[mine]" in words and cli.main([*words, "n=2", "out=card.npz"]) == 0
    assert np.allclose(np.load("m.npz")["x"], np.load("card.npz")["x"], atol=1e-6)
    assert cli.main([*COMMANDS[0], "resume=last", "trainer.max_steps=310"]) == 0
    capsys.readouterr()
    assert cli.main(["sample", "ckpt=runs/mine"]) == 2 and "trust=[mine]" in capsys.readouterr().err


class Open(GenerativeModel):
    """The contract to the letter: whatever else is asked arrives in `options`."""

    family = "open"

    def sample(self, n, cond=None, temperature=1.0, seed=0, **options):
        index = self.numbered(n, options["start"])
        return Samples(index[:, None].float() * options.get("steps", 1), None, index, {"seed": seed})


class Closed(Open):
    def sample(self, n, cond=None, temperature=1.0, seed=0, *, start=0):
        return super().sample(n, seed=seed, start=start)


class Drawn(GenerativeModel):
    """Defines `draw` and names the options that it heeds."""

    family, sampling_options = "drawn", ("steps",)

    def draw(self, options):
        x = options.temperature * (options.steps or 1) * self.numbered(options.n, options.start)[:, None].float()
        return Samples(x, None, self.numbered(options.n, options.start), {"seed": options.seed})


def test_a_network_of_the_docs_trains_and_is_read_only_if_trusted(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for line in NETWORK_LINES:
        assert cli.main([*shlex.split(line)[1:], *(["trainer.max_steps=2"] if " train " in line else [])]) == 0
    assert next((tmp_path / "runs/small/samples").glob("best_*.png"))
    capsys.readouterr()
    assert cli.main(["sample", "ckpt=runs/small", "n=1"]) == 2
    assert "'small.Small' is not a class of genmodels; to allow it add its package: trust" in capsys.readouterr().err
    reflow = ["train", "model=flow_matching", "data=digits", "~preset", "trainer.max_steps=1", "trust=[small]",
              "model.net._target_=small.Small", "run_dir=runs/a"]
    assert cli.main(reflow) == 0
    assert cli.main([*reflow[:-1], "model.reflow=runs/a", "run_dir=runs/b"]) == 0, capsys.readouterr().err  # a teacher
    with pytest.raises(InputError, match="depth must be") as error:
        build({TARGET: NETWORKS["dit"], "depth": 0}, (1, 8, 8))
    assert str(error.value).startswith("DiT: ")
    with pytest.raises(InputError, match="is not a class of genmodels"):  # trust ends with the model that had it
        build({TARGET: "small.Small"}, (1, 8, 8))


def test_a_model_that_defines_draw_is_sampled_like_any_other():
    model = Drawn(DataSpec("line", (1,)))
    assert model.sample(n=3, temperature=0.5, start=2).x.flatten().tolist() == [1.0, 1.5, 2.0]
    assert draw(model, SamplingOptions(n=2, start=1, steps=4), progress=False).x.flatten().tolist() == [4.0, 8.0]
    with pytest.raises(InputError, match="drawn has no sampling option 'guidance'; it has cond, temperature, seed, st"):
        model.sample(2, guidance=3.0)
    with pytest.raises(InputError, match="temperature must be a finite number"):
        model.sample(2, temperature=-1.0)


def test_a_model_that_takes_any_option_is_given_them():
    x = draw(Open(DataSpec("line", (1,))), SamplingOptions(n=5, start=3, steps=10), batch_size=2, progress=False).x
    assert torch.equal(x[:, 0], 10.0 * torch.arange(3, 8))


def test_what_is_missing_of_the_contract_is_named():
    with pytest.raises(InputError, match=r"Closed.sample does not take weights=, as every model's must"):
        draw(Closed(DataSpec("line", (1,))), SamplingOptions(), progress=False)
    with pytest.raises(InputError, match="open has no sampling option 'steps'; it has cond, temperature, seed"):
        draw(Closed(DataSpec("line", (1,))), SamplingOptions(steps=3), progress=False)
