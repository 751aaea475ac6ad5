"""Run folders: never two runs in one, nothing left behind by a run that never began, only the same run resumed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from genmodels.cli.compose import composer
from genmodels.cli.main import main
from genmodels.cli.schema import Schema
from genmodels.cli.signatures import target
from genmodels.core.checkpoint import read_header
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.data.vision import Digits
from genmodels.models.build import build
from genmodels.models.checkpoint import write_checkpoint
from genmodels.training import run
from genmodels.training.callbacks import Checkpointing
from tests import commands
from tests.core.test_checkpoint import HEADER
from tests.models import texts


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def checkpoint(path: Path, **header) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(path, {"genmodels": HEADER | header, "state_dict": {}})
    return path


def test_two_runs_of_one_second_have_two_folders():
    first = run.choose_folder(Path("runs"), "ddpm-digits", None)
    second = run.choose_folder(Path("runs"), "ddpm-digits", None)
    assert first != second and first.is_dir() and second.is_dir() and first.parent == Path("runs/ddpm-digits")


def test_a_folder_with_a_run_is_not_taken():
    checkpoint(Path("mine/last.ckpt"))
    with pytest.raises(InputError, match="resume=last"):
        run.choose_folder(Path("runs"), "a", "mine")
    for weights in ("best.ckpt", "model.safetensors"):
        checkpoint(Path(weights, weights))
        with pytest.raises(InputError, match=f"already holds {weights}: choose another folder"):
            run.choose_folder(Path("runs"), "a", weights)
    for number, name in enumerate(("config.yaml", "metrics.csv", "training.json")):
        Path(str(number)).mkdir()
        Path(str(number), name).write_text("of the user")
        with pytest.raises(InputError, match=f"holds a {name} that is of no run"):
            run.choose_folder(Path("runs"), "a", str(number))


def test_a_run_that_wrote_no_checkpoint_is_begun_anew_and_its_time_forgotten():
    Path("mine").mkdir()
    for name in ("log.txt", "config.yaml", "metrics.csv"):
        Path("mine", name).write_text("model:\ndata:\ntrainer:\nlogger:\ncheckpoint:\nseed: 0\n")
    run.add_training_time(Path("mine"), 5.0, 5.0)
    assert run.training_time(run.choose_folder(Path("runs"), "a", "mine")) == 0


def test_what_never_began_leaves_nothing_but_what_was_there():
    folder = run.choose_folder(Path("runs"), "a", None)
    (folder / "log.txt").write_text("x")
    run.discard_unused(folder)
    assert not Path("runs").exists()
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    Path("mine/log.txt").write_text("x")
    run.discard_unused(Path("mine"))
    assert [p.name for p in Path("mine").iterdir()] == ["notes.txt"]
    Path("mine/config.yaml").write_text("of the user")
    Path("mine/log.txt").write_text("x")
    run.discard_unused(Path("mine"), ["notes.txt", "config.yaml"])
    assert sorted(p.name for p in Path("mine").iterdir()) == ["config.yaml", "notes.txt"]
    kept = checkpoint(Path("begun/last.ckpt"))
    run.discard_unused(kept.parent)
    assert kept.exists()


def test_a_folder_is_held_by_one_run():
    Path("mine").mkdir()
    held = run.claim(Path("mine"))
    attempt = "from genmodels.training.run import claim; from pathlib import Path; claim(Path('mine'))"
    refused = commands.run("-c", attempt, cwd=Path.cwd())
    assert "another run is training in mine" in refused.stderr
    held.close()
    run.claim(Path("mine")).close()


def test_resume_finds_the_newest_run_a_folder_or_a_file():
    old, new = (checkpoint(Path(f"runs/a/{name}/last.ckpt")) for name in ("1", "2"))
    os.utime(old, (1, 1))
    assert run.find_resume(Path("runs"), "a", None, "last") == new
    for where in ("runs/a/1", "runs/a/1/last.ckpt"):
            assert run.find_resume(Path("runs"), "a", None, where) == old
    with pytest.raises(InputError, match="no last.ckpt in runs/b"):
        run.find_resume(Path("runs"), "b", None, "last")


def test_a_run_goes_on_in_its_own_folder():
    kept = checkpoint(Path("runs/a/1/last.ckpt"))
    for where in ("runs/a/1", str(kept), str(kept.absolute())):
        assert run.find_resume(Path("runs"), "a", "runs/../runs/a/1", where) == Path(where) / (
            "last.ckpt" if where == "runs/a/1" else "")
        with pytest.raises(InputError, match="run_dir=runs/b is not the folder of resume="):
            run.find_resume(Path("runs"), "a", "runs/b", where)
    assert not Path("runs/b").exists()


def test_a_pipe_is_no_checkpoint_to_resume():
    os.mkfifo("pipe.ckpt")
    with pytest.raises(RunError, match="pipe.ckpt: a pipe, not a checkpoint"):
        run.find_resume(Path("runs"), "a", None, "pipe.ckpt")


def test_the_time_of_training_adds_up_over_resumes(tmp_path):
    assert run.training_time(tmp_path) == 0
    run.add_training_time(tmp_path, 2.5, 1.0)
    run.add_training_time(tmp_path, 4.0, 3.0)
    assert run.training_time(tmp_path) == 6.5 and run.training_time(tmp_path, "cpu_seconds") == 4.0
    (tmp_path / "training.json").write_text('{"seconds": 9.0}')  # begun before CPU time was measured
    run.add_training_time(tmp_path, 1.0, 1.0)
    assert run.training_time(tmp_path) == 10.0 and run.training_time(tmp_path, "cpu_seconds") == 0.0  # unknown
    (tmp_path / "training.json").write_text("{")
    assert run.training_time(tmp_path) == 0


# ---- what a run leaves of itself: a whole configuration, one W&B run that evaluations join, and a log with ----


WORDS = ["model=nsf", "data=toy", "trainer=smoke", "trainer.max_steps=4", "trainer.validate_every_n_steps=2",
         "trainer.sample_every_n_steps=0", "trainer.log_every_n_steps=1", "trainer.progress=false", "data.n_train=200",
         "data.n_val=50", "data.n_test=50", "model.hidden=16", "model.optimizer.lr=0.002"]  # fmt: skip

SHORT = [*WORDS, "logger=csv"]
TEXT_MODELS = ("glow_tts", "mel_ddpm", "mel_energy", "mel_flow_matching", "tacotron")
OPTIMIZER = "genmodels.models.optimizer.Optimizer"


def command(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(list(words)) == 0, err.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a short run that was moved, resumed and evaluated; what its training printed."""
    folder, before = tmp_path_factory.mktemp("run"), Path.cwd()
    os.chdir(folder)
    try:
        printed = command("train", *WORDS, "run_dir=first")
        Path("first").rename("moved")
        printed += command("train", *WORDS, "trainer.max_steps=5", "run_dir=moved", "resume=last")
        command("evaluate", "ckpt=moved/last.ckpt", "stages=[likelihood]", "limit=20")
    finally:
        os.chdir(before)
    return folder / "moved", printed


def started(folder: Path) -> list:
    from tests.test_run import offline_records

    return [record.run for record in offline_records(folder) if record.HasField("run")]


def test_training_resume_and_evaluation_are_one_run_of_wandb(whole_run):
    records = started(whole_run[0])
    assert len({one.run_id for one in records}) == 1 and len(list((whole_run[0] / "wandb").glob("offline-run-*"))) == 3
    (name,) = {one.display_name for one in records}
    assert re.fullmatch(r"nsf-toy_\w+-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", name)
    assert {(one.run_group, *one.tags) for one in records} == {(name[:-20], "nsf", name[4:-20])}


def test_wandb_has_the_whole_configuration_and_what_it_made(whole_run):
    from tests.test_run import offline_records

    found = {}
    for record in offline_records(whole_run[0]):
        updates = [*record.config.update, *record.run.config.update]
        found |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}
    assert found["model"]["optimizer"]["betas"] == [0.9, 0.999] and found["model"]["optimizer"]["lr"] == 0.002
    assert found["trainer"]["precision"] == "32-true" and found["data"]["batch_size"]
    assert found["parameters"]["all"] == read_header(whole_run[0] / "last.ckpt")["parameters"] > 0
    assert found["data_card"]["event_shape"] == [2]
    assert found["data_card"]["items"] == {"train": 200, "val": 50, "test": 50}


def test_the_configuration_and_the_checkpoint_name_every_default(whole_run):
    config = yaml.safe_load((whole_run[0] / "config.yaml").read_text())
    header = read_header(whole_run[0] / "last.ckpt")
    assert header["config"] == config and header["model"] == config["model"]
    for node, dotted in ((config["model"], config["model"]["_target_"]), (config["data"], config["data"]["_target_"]),
                         (config["model"]["optimizer"], OPTIMIZER),
                         (config["trainer"], "genmodels.training.trainer.TrainerOptions"),
                         (config["logger"], "genmodels.training.loggers.LoggerOptions")):
        assert set(node) - {"_target_"} == set(target(dotted).keys)


def test_the_log_holds_the_figures_and_no_advertisements(whole_run):
    folder, printed = whole_run
    log = (folder / "log.txt").read_text()
    for step in range(5):  # counted from 0, as in metrics.csv
        assert re.search(rf"step {step}: .*train/loss -?\d", log), step
    assert re.search(r"step 3: .*val/nll -?\d", log)
    for line in printed.splitlines():
        assert line in log
    for idle in ("Tip", "weights_only", "GPU available", "TPU", "Trainer.fit", "litlogger", "pip install"):
        assert idle not in log, idle


@pytest.mark.parametrize("words", [
    ["model=ddpm"], ["model=ddpm", "data=toy"], ["model=score", "data=toy"], ["model=energy", "data=toy"],
    ["model=energy", "model.network=unet", "~preset"], ["model=realnvp"], ["model=glow"], ["model=maf", "data=toy"],
    *([f"model={name}", "data=speech", "model.encoder.depth=1"] for name in TEXT_MODELS),
    ["model=recognizer", "data=speech", "model.net.depth=1"],
])  # fmt: skip
def test_a_whole_configuration_builds_the_same_model(words):
    with composer("train") as hydra:
        config = hydra.compose(words)
    toy = DataSpec("toy_moons", (2,))
    specs = {"Digits": lambda: Digits().prepare().spec, "Toy": lambda: toy, "Speech": texts.spec}
    spec = specs[config["data"]["_target_"].rpartition(".")[2]]()

    def made(node):
        torch.manual_seed(0)
        return build(node, spec)

    given = made(config["model"])
    built = {type(part) for part in (*given.modules(), *vars(given).values())}
    schema = Schema("genmodels.cli.train.run")
    whole = schema.complete(config, built)
    assert "clip" in whole["model"]["optimizer"] and len(whole["model"]) > len(config["model"])
    for group in ("net", "objective"):
        assert group not in whole["model"] or len(whole["model"][group]) > 2
    again = made(json.loads(json.dumps(whole["model"]))).state_dict()
    assert {k: v.shape for k, v in given.state_dict().items()} == {k: v.shape for k, v in again.items()}
    assert all(torch.equal(v, again[k]) for k, v in given.state_dict().items())
    assert schema.complete(whole) == whole
    assert set(whole["model"]["optimizer"]) == set(target(OPTIMIZER).keys)


@pytest.fixture
def mount(tmp_path):
    """A folder on a file system of its own, of 1 MB, and a function that mounts it again with other options."""
    place = tmp_path / "mount"
    place.mkdir()

    def mounted(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True)
        return done.returncode == 0

    if sys.platform != "linux" or not mounted("size=1m"):
        pytest.skip("mounting is not allowed here")
    yield place, mounted
    subprocess.run(["umount", place], check=True)


TRAIN = ["train", "model=nsf", "data=toy", "data.n_train=200", "model.hidden=8", "model.layers=1", "logger=csv",
         "trainer.progress=false", "trainer.sample_every_n_steps=0", "data.batch_size=50"]  # fmt: skip


def test_a_full_disk_is_one_line_and_the_last_checkpoint_is_kept(mount, capsys):
    place, mounted = mount
    folder = place / "run"
    assert main([*TRAIN, f"run_dir={folder}", "trainer.max_steps=10"]) == 0
    last = (folder / "last.ckpt").read_bytes()
    with pytest.raises(OSError, match="No space left"), open(place / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    capsys.readouterr()
    assert main([*TRAIN, f"run_dir={folder}", "trainer.max_steps=20", "resume=last"]) == 1
    said = capsys.readouterr().err
    assert "no space left" in said and said.count("\n") == 1
    assert (folder / "last.ckpt").read_bytes() == last and not list(folder.glob(".*.tmp"))
    assert main([*TRAIN, f"run_dir={place / 'other'}", "trainer.max_steps=20"]) == 1
    said = capsys.readouterr().err
    assert "no space left" in said and said.count("\n") == 1 and not (place / "other").exists()
    assert main(["sample", f"ckpt={folder}", "n=4", f"out={place / 'x.npz'}"]) == 1
    assert capsys.readouterr().err.endswith("nothing was overwritten; free some space, then try again\n")
    (place / "fill").unlink()
    assert main([*TRAIN, f"run_dir={folder}", "trainer.max_steps=20", "resume=last"]) == 0


def test_a_folder_that_is_read_only_is_one_line(mount, capsys):
    place, mounted = mount
    assert mounted("remount,ro")
    for folder in (place, place / "run"):
        assert main([*TRAIN, f"run_dir={folder}"]) == 1
        said = capsys.readouterr().err
        assert "Read-only file system" in said and said.count("\n") == 1


OPEN = [
    ("ddpm", {"variance": "beta", "log_snr_ends": [15.0, -15.0]}, ["model.net.hidden=8"]),
    ("energy", {"network": "mlp"}, ["model.net.hidden=[8]"]),
    ("realnvp", {"hidden": 256, "depth": 2}, ["model.couplings=2"]),
]


@pytest.mark.parametrize(("family", "decided", "words"), OPEN, ids=[row[0] for row in OPEN])
def test_what_the_data_decide_is_kept_and_runs_of_before_go_on(family, decided, words, tmp_path, monkeypatch):
    """A run of former versions, which kept null, is that of the default that it was trained with."""
    monkeypatch.chdir(tmp_path)
    words = [f"model={family}", *WORDS[1:-2], "logger=csv", *words, "trainer.max_steps=2", "checkpoint.every_n_steps=1"]
    command("train", *words, "run_dir=new")
    found, header = yaml.safe_load(Path("new/config.yaml").read_text()), read_header(Path("new/last.ckpt"))
    assert {key: found["model"][key] for key in decided} == decided
    assert {key: header["model"][key] for key in decided} == decided and header["config"] == found
    with monkeypatch.context() as before:
        before.setattr("genmodels.models.base.GenerativeModel.decide", lambda self, **options: None)
        command("train", *words, "run_dir=old")
        assert yaml.safe_load(Path("old/config.yaml").read_text())["model"][next(iter(decided))] in (None, "auto")
    weights = []
    for folder in ("new", "old"):
        command("train", *words, "trainer.max_steps=3", f"run_dir={folder}", "resume=last")
        weights.append(torch.load(Path(folder, "last.ckpt"), weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_a_refused_resume_says_where_the_settings_of_the_run_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command("train", *SHORT, "run_dir=a")
    assert main(["train", *SHORT, "seed=1", "run_dir=a", "resume=last"]) == 2
    error = capsys.readouterr().err
    assert "seed is 0 in a/last.ckpt but is 1 here" in error and "its settings are in a/config.yaml" in error


def contents(folder: Path) -> dict:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_fewer_steps_than_were_made_leave_a_run_as_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command("train", *SHORT, "trainer.max_steps=3", "run_dir=a")
    before = contents(Path("a"))
    assert main(["train", *SHORT, "trainer.max_steps=2", "run_dir=a", "resume=last"]) == 2
    found = capsys.readouterr()
    assert "a has made 3 steps, for 2 there is nothing left to do" in found.err and found.err.count("\n") == 1
    assert found.out == "" and contents(Path("a")) == before


def test_a_checkpoint_before_the_last_is_resumed_only_where_the_last_is_not_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*SHORT, "trainer.max_steps=2", "trainer.validate_every_n_steps=2", "run_dir=a"]
    command("train", *words)
    command("train", *SHORT, "trainer.max_steps=3", "trainer.validate_every_n_steps=0", "run_dir=a", "resume=last")
    words = ["train", *SHORT, "trainer.max_steps=4", "resume=a/best.ckpt"]
    assert [read_header(f"a/{name}.ckpt")["step"] for name in ("best", "last")] == [2, 3]
    before = contents(Path("a"))
    assert main(words) == 2 and contents(Path("a")) == before
    assert "best.ckpt is at step 2, and a/last.ckpt, which would be replaced, at 3" in capsys.readouterr().err
    Path("a/last.ckpt").write_bytes(b"damaged")
    assert main(words) == 0 and read_header("a/last.ckpt")["step"] == 4


def test_a_finished_run_that_is_resumed_shows_its_figures_with_their_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SHORT, "trainer.max_steps=3", "trainer.validate_every_n_steps=3", "run_dir=a"]
    printed = [command("train", *words, *more) for more in ([], ["resume=last"])]
    first, again = (next(line for line in out.splitlines() if line.startswith("result:")) for out in printed)
    assert first == again and "(" in first  # the standard error


def test_what_no_run_can_go_on_from_is_refused_before_anything_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command("train", *SHORT, "trainer.max_steps=2", "run_dir=a")
    state = torch.load("a/last.ckpt", weights_only=True)
    for key in ("epoch", "global_step", "pytorch-lightning_version", "loops", "optimizer_states"):
        write_checkpoint("a/last.ckpt", {name: value for name, value in state.items() if name != key})
        assert main(["train", *SHORT, "trainer.max_steps=4", "run_dir=a", "resume=last"]) == 1
        found = capsys.readouterr()
        assert f"last.ckpt: {key} is missing" in found.err and found.out == "" and found.err.count("\n") == 1


class Screen(io.StringIO):
    """A terminal that remembers what it was sent."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("term, plain, coloured", [("xterm", "", True), ("xterm", "1", False), ("dumb", "", False)])
def test_colour_is_for_terminals_that_want_it(term, plain, coloured, monkeypatch):
    screen = Screen()
    for key in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {"TERM": term, "NO_COLOR": plain}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "stdout", screen)
    run.say("ddpm with [a, b] parameters", "note: a line")
    assert ("\x1b[33m" in screen.getvalue()) == coloured and "ddpm with [a, b] parameters" in screen.getvalue()
    assert run.terminal(screen) == (term == "xterm") and not run.terminal(io.StringIO())


def test_temporary_files_of_a_killed_run_are_removed_and_those_of_others_are_kept(tmp_path):
    folder = tmp_path / "run"
    command("train", *SHORT, "trainer.max_steps=2", f"run_dir={folder}")
    stale, other = folder / f".last.ckpt.{'0a' * 8}.tmp", folder / ".notes.tmp"
    for file in (stale, other):
        file.touch()
    command("train", *SHORT, "trainer.max_steps=3", f"run_dir={folder}", "resume=last")
    assert other.exists() and not stale.exists()


def test_what_never_began_leaves_folders_of_the_user():
    Path("empty/own").mkdir(parents=True)
    run.discard_unused(run.choose_folder(Path("runs"), "a", "empty/own"))
    run.discard_unused(run.choose_folder(Path("runs"), "a", "empty/own/new/run"))
    assert Path("empty/own").is_dir() and not Path("empty/own/new").exists()


def test_a_run_killed_before_its_settings_were_written_is_begun_anew():
    Path("mine").mkdir()
    Path("mine/log.txt").write_text("x")
    assert run.place_of(Path("runs"), "a", "mine", "auto").folder == Path("mine")


def test_files_of_another_program_are_no_run():
    Path("mine").mkdir()
    for name in ("log.txt", "config.yaml", "metrics.csv"):
        Path("mine", name).write_text("model:\n  _target_: theirs.Net\n")
    with pytest.raises(InputError, match="holds a config.yaml that is of no run"):
        run.choose_folder(Path("runs"), "a", "mine")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_due_step_is_saved_once(accumulate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved, save = [], Checkpointing.save

    def noted(self, trainer, name):
        saved.append((name, trainer.global_step))
        save(self, trainer, name)

    monkeypatch.setattr(Checkpointing, "save", noted)
    command("train", *SHORT, "trainer.max_steps=5", "checkpoint.every_n_steps=2", f"trainer.accumulate={accumulate}",
            "trainer.validate_every_n_steps=0", "run_dir=a")
    steps = [step for name, step in saved if name == "last.ckpt"]
    assert steps == [0, 2, 4, *[5] * steps.count(5)]  # the last one also at the end of a validation
