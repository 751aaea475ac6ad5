"""Run folders: never two runs in one, nothing left behind by a run that never began, only the same run resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genmodels.core.errors import InputError
from genmodels.models.checkpoint import write_checkpoint
from genmodels.training import run

HEADER = {
    "format": 1, "family": "ddpm", "genmodels": "0.1.0", "torch": "2.6.0",
    "model": {"_target_": "genmodels.models.ddpm.DDPM"}, "config": {},
    "data": {"name": "digits", "event_shape": [1, 8, 8]}, "parameters": 500, "step": 3, "batches_seen": 3,
    "seed": 0, "figures": {}, "finished": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.delenv("GENMODELS_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def forget(monkeypatch):
    monkeypatch.delenv("GENMODELS_RUN_DIR", raising=False)


def checkpoint(path: Path, **header) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(path, {"genmodels": HEADER | header, "state_dict": {}})
    return path


def test_two_runs_of_one_second_have_two_folders(monkeypatch):
    first = run.choose_folder(Path("runs"), "ddpm-digits", None)
    forget(monkeypatch)
    second = run.choose_folder(Path("runs"), "ddpm-digits", None)
    assert first != second and first.is_dir() and second.is_dir() and first.parent == Path("runs/ddpm-digits")


def test_the_processes_of_one_run_share_its_folder():
    assert run.choose_folder(Path("runs"), "a", None) == run.choose_folder(Path("runs"), "a", None)


def test_a_folder_with_a_run_is_not_taken(monkeypatch):
    checkpoint(Path("mine/last.ckpt"))
    with pytest.raises(InputError, match="resume=last"):
        run.choose_folder(Path("runs"), "a", "mine")


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
    kept = checkpoint(Path("begun/last.ckpt"))
    run.discard_unused(kept.parent)
    assert kept.exists()


def test_a_folder_is_held_by_one_run():
    Path("mine").mkdir()
    held = run.claim(Path("mine"))
    attempt = "from genmodels.training.run import claim; from pathlib import Path; claim(Path('mine'))"
    words = [sys.executable, "-c", attempt]
    environment = os.environ | {"PYTHONPATH": str(Path(run.__file__).parents[2])}
    refused = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert "another run is training in mine" in refused.stderr
    held.close()
    assert subprocess.run(words, env=environment).returncode == 0


def test_resume_finds_the_newest_run_a_folder_or_a_file(monkeypatch):
    old, new = (checkpoint(Path(f"runs/a/{name}/last.ckpt")) for name in ("1", "2"))
    os.utime(old, (1, 1))
    assert run.find_resume(Path("runs"), "a", None, "last") == new
    for where in ("runs/a/1", "runs/a/1/last.ckpt"):
        forget(monkeypatch)
        assert run.find_resume(Path("runs"), "a", None, where) == old
    forget(monkeypatch)
    with pytest.raises(InputError, match="no last.ckpt in runs/b"):
        run.find_resume(Path("runs"), "b", None, "last")


def test_the_time_of_training_adds_up_over_resumes(tmp_path):
    assert run.training_time(tmp_path) == 0
    run.add_training_time(tmp_path, 2.5)
    run.add_training_time(tmp_path, 4.0)
    assert run.training_time(tmp_path) == 6.5
    (tmp_path / "training.json").write_text("{")
    assert run.training_time(tmp_path) == 0
