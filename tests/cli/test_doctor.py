"""`genmodels doctor`: each check fails for its own reason and says what to do."""

from __future__ import annotations

import builtins
import shutil

import numpy as np
import pytest

from genmodels.cli import doctor
from genmodels.cli.compose import composer
from genmodels.cli.doctor import Failed
from genmodels.cli.main import main
from genmodels.data.arrays import Arrays

VERSIONS = {"pytorch-lightning": "2.6.6", "hydra-core": "1.3.8", "omegaconf": "2.3.1", "wandb": "0.31.0"}


@pytest.fixture
def versions(monkeypatch):
    """Installed versions as the test wishes."""

    def pretend(**changes):
        found = {**VERSIONS, **{name.replace("_", "-"): value for name, value in changes.items()}}
        monkeypatch.setattr(doctor, "installed", lambda package: found.get(package))

    return pretend


def broken_import(monkeypatch, name: str, error: Exception) -> None:
    real = builtins.__import__

    def fake(module, *args, **kwargs):
        if module == name:
            raise error
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_this_environment_passes(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctor.main([]) == 0
    assert all(line.startswith("OK ") for line in capsys.readouterr().out.splitlines())


def test_a_torchvision_of_another_build(monkeypatch, capsys):
    broken_import(monkeypatch, "torchvision", RuntimeError("operator torchvision::nms does not exist"))
    with pytest.raises(Failed, match="from different builds .*torchvision::nms.* pip uninstall -y torch torchvision"):
        doctor.check_torch()


def test_nothing_that_needs_torch_is_tried_without_it(monkeypatch, capsys):
    broken_import(monkeypatch, "torch", ImportError("No module named 'torch'"))
    assert doctor.main(["data=digits"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FAIL")] == ["torch:", "device:", "data:", "training:"]


@pytest.mark.parametrize(
    ("check", "changes", "part"),
    [
        ("check_lightning", {"lightning": "2.6.6"}, "pip uninstall -y lightning"),
        ("check_lightning", {"pytorch_lightning": None}, "not installed"),
        ("check_hydra", {"hydra_core": "1.1.0"}, "hydra-core 1.1.0 is not supported"),
        ("check_hydra", {"hydra_core": "1.4.0"}, "is not supported"),
        ("check_hydra", {"omegaconf": "2.1.0"}, "omegaconf 2.1.0 is not supported"),
        ("check_hydra", {"omegaconf": None}, "not installed"),
        ("check_wandb", {"wandb": None}, "logger=csv"),
    ],
)
def test_packages(versions, check, changes, part):
    versions()
    assert getattr(doctor, check)()
    versions(**changes)
    with pytest.raises(Failed, match=part):
        getattr(doctor, check)()


def test_no_room_on_the_disk(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 10**8))
    with pytest.raises(Failed, match="0.10 GB free"):
        doctor.check_folder()


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(Failed, match="cannot be written"):
        doctor.check_folder()


def test_data_are_read_and_checked(tmp_path):
    assert doctor.check_data(["data=digits"]).startswith("digits, 1 x 8 x 8, ")
    with pytest.raises(Failed, match="did you mean 'root'"):
        doctor.check_data(["data=image_folder", "data.rot=a"])
    with pytest.raises(Failed, match="nowhere"):
        doctor.check_data(["data=image_folder", f"data.root={tmp_path}/nowhere"])


def test_tables_without_a_density(tmp_path, capsys):
    """A constant column fails, as training refuses it; few values, copies and dependence are mentioned."""
    x = np.random.default_rng(0).standard_normal((300, 3))
    tables = {"sound": x, "constant": np.where([False, True, False], 2.0, x),
              "levels": np.where([False, False, True], x.round(), x),
              "copies": np.concatenate([x, x]), "sum": np.concatenate([x, x.sum(1, keepdims=True)], 1)}
    said = {}
    for name, table in tables.items():
        np.save(tmp_path / f"{name}.npy", table.astype("float32"))
        code = doctor.main(["data=arrays", f"data.file={tmp_path / name}.npy", "data.batch_size=64"])
        said[name] = (code, capsys.readouterr().out.split(" data: ")[1])
    assert said["sound"][0] == 0 and "look at" not in said["sound"][1]
    assert said["constant"][0] == 1 and "constant: column 2 is constant: leave it out" in said["constant"][1]
    for name, reason in (("levels", "column 3 has only"), ("copies", "are copies of others"), ("sum", "depend on")):
        assert said[name][0] == 0 and "1 to check" in said[name][1] and reason in said[name][1]


def test_every_problem_of_the_data_is_listed(monkeypatch):
    from genmodels.data.vision import Digits

    monkeypatch.setattr(Digits, "problems", lambda self: ["first", "second", "third"])
    with pytest.raises(Failed, match=r"first \(and 2 more:\n +second\n +third\)"):
        doctor.check_data(["data=digits"])


@pytest.mark.parametrize("model", ["ddpm", "nsf", "energy", "score"])
def test_what_training_refuses_is_printed_in_its_words(model, tmp_path, capsys):
    table = np.random.default_rng(0).standard_normal((60, 3))
    table[:, 1] = 2.5
    path = tmp_path / "people.csv"
    np.savetxt(path, table, delimiter=",", header="age,height,weight", comments="")
    assert doctor.main([f"model={model}", "data=arrays", f"data.file={path}"]) == 1
    assert "people: column 2 (height) is constant" in capsys.readouterr().out
    datamodule = Arrays(file=str(path)).prepare()
    with composer("train") as hydra:
        config = hydra.compose([f"model={model}", "data=arrays", f"data.file={path}"])
    with pytest.raises(Failed, match=r"column 2 \(height\) .*is constant"):
        doctor.check_training({"config": config, "data": datamodule, "named": True})


@pytest.mark.parametrize("words, said", [
    (["trainer.devices=3"], "data.batch_size=512 must be a multiple of the 3 processes"),
    (["trainer.accelerator=banana"], "trainer.accelerator must be one of"),
    (["trainer.devices=2", "trainer.strategy=ddp_fork"], "trainer.strategy=ddp_fork copies this process"),
    (["trainer.early_stopping=2", "trainer.validate_every_n_steps=0"], "trainer.early_stopping=2 needs validations"),
    (["init=missing.ckpt"], "missing.ckpt"),
    (["run_dir=mine"], "run_dir=mine holds a config.yaml that is of no run"),
])  # fmt: skip
def test_settings_that_training_refuses_are_refused_here(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("mine: 1")
    common = ["model=nsf", "data=toy", "data.n_train=600", *words]
    assert doctor.main(common) == 1
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("FAIL")]
    assert line.startswith("FAIL  training: ") and said in line
    assert main(["train", *common]) in (1, 2)
    assert capsys.readouterr().err.strip().endswith(line.removeprefix("FAIL  training: "))
    assert (tmp_path / "mine/config.yaml").read_text() == "mine: 1"


def test_a_sound_start_is_reported_with_its_length(capsys):
    assert doctor.main(["model=nsf", "data=toy", "data.batch_size=100", "trainer.max_steps=7"]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("OK    training: nsf with ") and printed.endswith(" parameters, 7 steps of 100")


def test_data_with_texts_are_sound_without_a_model_named(capsys):
    assert doctor.main(["data=speech"]) == 0
    assert "training: not checked, data with texts" in capsys.readouterr().out
    assert doctor.main(["data=speech", "model=ddpm"]) == 1
    assert "FAIL  training: " in capsys.readouterr().out


def test_a_model_that_does_not_fit_its_data_is_found(capsys):
    assert doctor.main(["model=maf", "data=digits", "model.layers=0"]) == 1
    assert "FAIL  training: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["/proc/x", "/dev/null", ".", "/dev/null/list.txt"])
def test_a_list_that_cannot_be_written_is_said_before_anything_is_checked(name, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"x": lambda: pytest.fail("checked")})
    words = [f"--fix-list={name}"] if name == "." else ["--fix-list", name]
    assert main(["doctor", "data=toy", *words]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and f"--fix-list={name}" in printed.err and printed.out == ""


def test_only_lists_are_replaced(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {})
    for _ in range(2):
        assert doctor.main(["data=toy", "--fix-list", str(tmp_path / "bad.txt")]) == 0
    (tmp_path / "manifest.tsv").write_text("a.wav\thello\n", encoding="utf-8")
    assert main(["doctor", "data=toy", "--fix-list", str(tmp_path / "manifest.tsv")]) == 2
    assert "manifest.tsv exists, does not begin as a list of the doctor's" in capsys.readouterr().err
    assert (tmp_path / "manifest.tsv").read_text(encoding="utf-8") == "a.wav\thello\n"


def test_the_list_may_be_in_the_home_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(doctor, "check_data", lambda words, fix_list, read: str(fix_list))
    monkeypatch.setattr(doctor, "check_training", lambda read: "")
    assert doctor.main(["data=toy", "--fix-list=~/bad.txt"]) == 0
    assert f"data: {tmp_path / 'bad.txt'}" in capsys.readouterr().out


def test_problems_do_not_control_the_terminal(monkeypatch, tmp_path):
    class Data:
        def problems(self):
            return ["\x1b[2J.png: empty\nOK    data: fine"]

        def warnings(self):
            return ["\x07.png: small"]

    monkeypatch.setattr("genmodels.models.build.build", lambda *args, **options: Data())
    with pytest.raises(Failed) as caught:
        doctor.check_data(["data=toy"], tmp_path / "bad.txt")
    assert all(line.isprintable() for line in str(caught.value).split("\n")) and "\nOK" not in str(caught.value)
    assert (tmp_path / "bad.txt").read_text() .split("\n")[1:] == ["\\x1b[2J.png: empty\\nOK    data: fine", ""]


def test_a_word_that_is_no_setting_is_a_usage_error(capsys):
    assert main(["doctor", "digits"]) == 2
    printed = capsys.readouterr()
    assert "cannot read 'digits': write key=value" in printed.err and printed.out == ""
