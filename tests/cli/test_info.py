"""`genmodels info` tells what the header holds, and one line for what is no whole checkpoint."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
import torch

from genmodels.cli import info
from genmodels.cli.main import main
from genmodels.core.checkpoint import seal
from genmodels.core.errors import InputError
from genmodels.models.checkpoint import write_exported

HEADER = {
    "format": 1, "family": "ddpm", "genmodels": "0.1.0", "torch": "2.15.0", "step": 1500,
    "batches_seen": 1500, "seed": 3,
    "parameters": 702753,
    "model": {"_target_": "genmodels.models.ddpm.DDPM", "num_steps": 1000, "net": {"channels": 32}},
    "config": {"model": {"_target_": "genmodels.models.ddpm.DDPM", "net": {"channels": 32}}, "seed": 3, "trust": []},
    "data": {"name": "digits", "event_shape": [1, 8, 8], "levels": 17, "num_classes": 10},
    "figures": {"val/bits_per_dim": 2.3456789}, "finished": True,
}  # fmt: skip

WEIGHTS = torch.nn.Linear(3, 2).state_dict()


@pytest.fixture
def checkpoint(tmp_path):
    def write(name="last.ckpt", weights=WEIGHTS, parts=None, **changes):
        path = tmp_path / name
        torch.save({"state_dict": weights} | ({} if parts is None else {"parts": parts}), path)
        with open(path, "r+b") as file:
            seal(file, {**HEADER, **changes})
        return path

    return write


def test_what_is_printed(checkpoint, capsys):
    assert main(["info", str(checkpoint())]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    printed = {name: value.strip() for name, value in lines.items()}
    assert printed["family"] == "ddpm" and printed["data"] == "digits, 1 x 8 x 8, 17 levels, 10 classes"
    assert printed["parameters"] == "702,753" and printed["steps"] == "1,500"
    assert printed["val/bits_per_dim"] == "2.34568"
    assert printed["settings"] == "model.net.channels=32 seed=3"
    assert printed["versions"] == "genmodels 0.1.0, torch 2.15.0"
    assert printed["verdict"] == "intact (checksum matches), training finished"


def test_full_shows_the_defaults_too(checkpoint, capsys):
    main(["info", str(checkpoint()), "--full"])
    printed = capsys.readouterr().out
    assert "model.num_steps=1000" in printed and "model._target_=genmodels.models.ddpm.DDPM" in printed


def test_the_figures_of_a_run_are_listed_and_opened(checkpoint, capsys, monkeypatch):
    folder = checkpoint().parent
    names = ("density/step_000100.png", "samples/step_000100.png", "samples/step_000200.png", "report.html")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    opened = []
    monkeypatch.setattr(info.webbrowser, "open", opened.append)
    expected = [folder / name for name in names if name != "samples/step_000100.png"]
    assert main(["info", str(folder)]) == 0 and not opened
    out = capsys.readouterr().out
    assert all(str(path) in out for path in expected) and "samples/step_000100" not in out
    assert main(["info", str(folder / "last.ckpt"), "--open"]) == 0
    assert opened == [path.as_uri() for path in expected]


def test_unfinished_and_continuous(checkpoint, capsys):
    data = {"name": "toy_moons", "event_shape": [2], "levels": None, "num_classes": None}
    main(["info", str(checkpoint(finished=False, data=data, figures={}))])
    printed = capsys.readouterr().out
    for part in ("1,500 (not finished)", "toy_moons, 2, continuous", "can be continued with resume="):
        assert part in printed


def test_a_missing_part_is_named(checkpoint, tmp_path, capsys):
    path, place = checkpoint(parts={"0.part": "aa", "1.part": "bb"}), tmp_path / "last.parts"
    place.mkdir()
    for name, verdict in (("0.part", "incomplete: its part 1.part is missing"), ("1.part", "intact")):
        (place / name).touch()
        main(["info", str(path)])
        assert f"verdict:       {verdict}" in capsys.readouterr().out


def test_a_broken_file_is_one_line_and_the_others_are_printed(checkpoint, tmp_path, capsys):
    good, cut = checkpoint(), checkpoint("cut.ckpt")
    cut.write_bytes(cut.read_bytes()[:-100])
    (tmp_path / "other.ckpt").write_bytes(b"something else")
    names = [str(cut), str(tmp_path / "other.ckpt"), str(tmp_path / "missing.ckpt"), str(good)]
    assert main(["info", *names]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 3 and "family:" in printed.out and printed.out.count("verdict:") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None])
def test_weights_that_are_not_finite_are_named(checkpoint, dtype, value, capsys):
    whole = torch.full((4, 3), torch.finfo(dtype).max, dtype=dtype)
    weights = {"count": torch.tensor([1, 2]), "part": whole.T[1:], "empty": torch.zeros(0)}
    whole[0, 0] = torch.nan  # outside the part, so no weight
    if value is not None:
        whole[3, 2] = value
    assert main(["info", str(checkpoint(weights=weights))]) == 0
    printed = capsys.readouterr().out
    assert ("unusable: weight part is not finite" in printed) == (value is not None) != ("intact (check" in printed)


def test_tensors_that_cannot_be_read_are_one_line(tmp_path, capsys):
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"weights" * 100)
    with open(path, "r+b") as file:
        seal(file, HEADER)
    assert main(["info", str(path)]) == 1
    assert "its tensors cannot be read (" in capsys.readouterr().err


def test_a_folder_names_an_intact_checkpoint_of_another_name(checkpoint, tmp_path, capsys):
    kept = checkpoint("ok.ckpt")
    assert main(["info", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"holds neither best.ckpt nor last.ckpt; the newest intact checkpoint in this folder is {kept}" in said
    for name in ("best.ckpt", "last.ckpt"):
        (tmp_path / name).write_bytes(kept.read_bytes()[:-100])
    assert main(["info", str(tmp_path)]) == 1
    assert f"the newest intact checkpoint in this folder is {kept}" in capsys.readouterr().err


def test_a_folder_without_a_best_checkpoint_is_described_by_its_last(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(checkpoint().parent.parent))
    assert main(["info", f"ckpt=~/{tmp_path.name}"]) == 0
    assert f"file:          {tmp_path / 'last.ckpt'}" in capsys.readouterr().out


def test_ckpt_may_be_given_as_in_the_other_commands(checkpoint, capsys):
    a, b = checkpoint("a.ckpt"), checkpoint("b.ckpt")
    assert info.main([f"ckpt=[{a},{b}]"]) == 0
    assert capsys.readouterr().out.count("verdict:") == 2
    odd = checkpoint("a, b.ckpt")
    for word in (f"ckpt={odd}", f"ckpt='{odd}'", f'ckpt="{odd}"'):
        assert info.main([word]) == 0 and capsys.readouterr().out.count("verdict:") == 1
    with pytest.raises(InputError, match="ckpt is missing"):
        info.main(["ckpt="])


def test_an_exported_model_is_not_said_to_be_resumable(tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    write_exported(file, {"genmodels": {**HEADER, "finished": False}, "state_dict": WEIGHTS})
    assert info.main([str(file)]) == 0
    assert "weights alone: sample, evaluate, or train from them with init=" in capsys.readouterr().out


def test_a_name_that_is_too_long_is_one_line(capsys):
    assert main(["info", "x" * 300]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_torch(checkpoint):
    code = "import sys; from genmodels.cli.main import main; main(sys.argv[1:]); print({'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "info", str(checkpoint())], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"
