"""Values that no key can mean, over every key of the schema: each is refused in one line, and none is a traceback.

What the annotation lets pass is given to the constructors, as a run would, before any data are read.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from genmodels.cli.compose import composer
from genmodels.cli.main import main
from genmodels.cli.schema import Schema
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, explain
from genmodels.core.files import check_writable
from genmodels.models.build import build, construct
from genmodels.nn.dropout import Dropout
from genmodels.training.callbacks import CheckpointOptions
from genmodels.training.loggers import LoggerOptions
from genmodels.training.trainer import TrainerOptions

RUN = "genmodels.cli.train.run"
BAD = [math.nan, math.inf, -math.inf, -1, 0, -0.5, 10**30, "x", "", [], [1], [2, 3], [math.nan, math.nan], {"a": 1},
       True, None]  # fmt: skip
NEVER = (math.nan, math.inf, -math.inf, 10**30, "")
DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
PLANE = DataSpec("toy_moons", (2,))
SMALL = {
    "ddpm": ("digits", ["model.net.channels=4", "model.net.multipliers=[1]", "model.net.blocks=1"]),
    "realnvp": ("digits", ["model.hidden=4", "model.depth=1"]),
    "glow": ("digits", ["model.hidden=4", "model.levels=1", "model.steps=1"]),
    "nsf": ("toy", ["model.hidden=4", "model.layers=1"]),
    "maf": ("toy", ["model.hidden=4", "model.layers=1"]),
    "energy": ("toy", ["model.net.hidden=[4]"]),
    "score": ("toy", ["model.net.hidden=4"]),
}
SETS = {"toy": [], "arrays": ["data.file=x.npz"], "image_folder": ["data.root=x"], "mnist": [], "cifar10": [],
        "speech": []}  # fmt: skip


def with_value(base: dict, path: str, value) -> dict:
    head, _, rest = path.partition(".")
    return {**base, head: with_value(base.get(head) or {}, rest, value) if rest else value}


def built(config: dict, part: str) -> None:
    """What a run makes of a part of its configuration before it reads data."""
    checked = Schema(RUN).check(config)
    if part == "model":
        model = build(checked["model"], DIGITS if "digits" in str(config["data"]) else PLANE)
        model.optimizer_options.build(model.core.parameters(), 10)
    elif part == "data":
        build(checked["data"])
    elif part == "trainer":
        options = construct(TrainerOptions, **checked["trainer"])
        options.build(options.steps(10), [], ".")
    elif part in ("logger", "checkpoint"):
        construct({"logger": LoggerOptions, "checkpoint": CheckpointOptions}[part], **checked[part])


def faults(config: dict, parts: tuple[str, ...]) -> list[str]:
    """Bad values that end in a traceback, in several lines, or are taken although no key can mean them."""
    found, tried = [], 0
    for path, taker, _ in list(Schema(RUN).walk(config)):
        part = path.split(".")[0]
        if part not in parts or path == part:
            continue
        for bad in BAD:
            tried += 1
            try:
                built(with_value(config, path, bad), part)
                if any(bad is value or bad == value for value in NEVER) and "str" not in str(taker.keys[
                        path.rpartition(".")[2]].type_text):
                    found.append(f"{path}={bad!r} is taken")
            except (InputError, RunError) as error:
                if "\n" in str(error).strip():
                    found.append(f"{path}={bad!r}: {error}")
            except Exception as error:
                if explain("train", error) is None:
                    found.append(f"{path}={bad!r}: {type(error).__name__}: {error}")
    assert tried > 50
    return found


def config_of(*words: str) -> dict:
    with composer("train") as hydra:
        return hydra.compose(list(words))


@pytest.mark.filterwarnings("ignore")
def test_of_the_run():
    config = config_of("model=score", "data=toy", "model.net.hidden=4")
    assert faults(config, ("trainer", "logger", "checkpoint")) == []


@pytest.mark.parametrize("name", SMALL)
def test_of_models(name):
    data, words = SMALL[name]
    assert faults(config_of(f"model={name}", f"data={data}", "~preset", *words), ("model",)) == []


@pytest.mark.parametrize("name", SETS)
def test_of_data_sets(name):
    model = "glow_tts" if name == "speech" else "nsf"
    assert faults(config_of(f"model={model}", f"data={name}", "~preset", *SETS[name]), ("data",)) == []


def test_the_table_finds_what_is_taken_and_what_is_a_traceback(monkeypatch):
    config = config_of("model=score", "data=toy", "~preset", "model.net.hidden=4")
    monkeypatch.setattr("genmodels.cli.schema.usable", lambda value: True)
    monkeypatch.setattr(Dropout, "__init__", lambda self, p=0.5: torch.nn.Dropout.__init__(self, p))
    found = faults(config, ("model",))
    assert "model.net.dropout=nan is taken" in found


@pytest.mark.parametrize(("words", "code", "said"), [
    (["run_dir="], 2, "run_dir= is empty"), (["resume="], 2, "resume= is empty"),
    (["trainer=[1]"], 2, "unknown trainer"), (["data=[toy,toy]"], 2, "unknown data"), (["trainer=[]"], 2, "unknown"),
    (["trainer.devices=-7"], 2, "trainer.devices must be at least 1"), (["trainer.devices=x"], 2, "trainer"),
    (["model.optimizer.lr=inf"], 2, "numbers are finite"), (["seed=99999999999999999999"], 2, "at most 64 bits"),
    (["model.optimizer.betas=[2,3]"], 2, "betas must be two numbers in [0, 1)"),
    (["model.net.dropout=nan"], 2, "numbers are finite"), (["model.net.dropout=1"], 2, "dropout must lie in [0, 1)"),
    (["run_dir=/proc"], 1, "cannot write in the run folder /proc"), (["run_dir=file/x"], 1, "Not a directory"),
    (["-cd", "broken"], 2, "is not YAML"),
])  # fmt: skip
def test_a_bad_run_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, code, said):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("broken").mkdir()
    Path("broken/train.yaml").write_text("a: [1")
    plain = ["model=score", "data=toy", "data.n_train=200", "model.net.hidden=4", "logger=csv", "trainer.max_steps=1"]
    assert main(["train", *plain, "trainer.progress=false", *words]) == code
    message = capsys.readouterr().err.strip()
    assert said in message.splitlines()[-1] and "Traceback" not in message
    assert sorted(place.name for place in tmp_path.iterdir()) == ["broken", "file"]


def test_a_place_that_cannot_be_written_is_found_beforehand(tmp_path):
    (tmp_path / "file").touch()
    for target, error in (("file/x.png", InputError), ("file/a/x.png", InputError), ("folder.png", InputError)):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        with pytest.raises(error, match="out="):
            check_writable("out", tmp_path / target)
    with pytest.raises(RunError, match="cannot be written"):
        check_writable("out", Path("/proc/x.png"))
    check_writable("out", tmp_path / "new" / "folder" / "x.png")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["file", "folder.png"]
