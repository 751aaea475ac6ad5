"""Files: written exclusively, through nobody's link, onto nothing but files."""

from __future__ import annotations

import ast
import os
import secrets
from pathlib import Path

import pytest

from genmodels.core.errors import RunError
from genmodels.core.files import open_lock, write_whole

PACKAGE = Path(__file__).resolve().parents[1] / "genmodels"


def text(words: str):
    return lambda file: file.write(words)


def test_a_link_where_the_temporary_file_would_be_is_not_followed(tmp_path, monkeypatch):
    victim, target = tmp_path / "victim", tmp_path / "out.txt"
    victim.write_text("precious")
    names = [f".out.txt.{os.getpid()}.tmp", f"out.txt.{os.getpid()}", "out.txt.tmp", ".out.txt.tmp"]
    for name in names:
        os.symlink(victim, tmp_path / name)
    write_whole(target, text("new"), mode="w")
    assert target.read_text() == "new" and victim.read_text() == "precious"
    assert all((tmp_path / name).is_symlink() for name in names)
    monkeypatch.setattr(secrets, "token_hex", lambda n: "known")
    os.symlink(victim, tmp_path / ".out.txt.known.tmp")
    with pytest.raises(RunError, match="File exists"):
        write_whole(target, text("newer"), mode="w")
    assert target.read_text() == "new" and victim.read_text() == "precious"


def test_names_differ_and_the_mask_of_the_user_holds(tmp_path, monkeypatch):
    seen = []
    for _ in range(2):
        write_whole(tmp_path / "a", lambda file: seen.append(file.name))
    assert len(set(seen)) == 2
    plain = tmp_path / "plain"
    plain.write_text("")
    assert (tmp_path / "a").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)],
                         ids=["pipe", "folder", "device"])  # fmt: skip
def test_only_files_are_replaced(make, tmp_path):
    make(tmp_path / "x")
    before = os.lstat(tmp_path / "x")
    with pytest.raises(RunError, match="not a file"):
        write_whole(tmp_path / "x", text("new"), mode="w")
    assert os.lstat(tmp_path / "x") == before and len(list(tmp_path.iterdir())) == 1


def test_a_lock_empties_nothing_and_follows_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, tmp_path / "lock")
    with pytest.raises(OSError):
        open_lock(tmp_path / "lock")
    open_lock(victim).close()
    assert victim.read_text() == "precious"


def writes(source: str) -> list[int]:
    """Lines where a file is opened to be written other than by this module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
            opened = name == "open" and any(isinstance(w, str) and set(w) & set("wxa+") and len(w) < 4 for w in words)
            if opened or name in ("write_text", "write_bytes"):
                found.append(node.lineno)
    return found


def test_nothing_else_opens_a_file_to_write():
    assert writes("open(p, 'w')") == writes("open(p, mode='wb')") == writes("p.write_text(x)") == [1]
    assert writes("open(p)") == writes("open(p, 'rb')") == []
    allowed = {"files.py", "cost.py"}  # cost.py resets a counter of Linux in /proc
    assert {path.name for path in PACKAGE.rglob("*.py") if writes(path.read_text(encoding="utf-8"))} <= allowed
