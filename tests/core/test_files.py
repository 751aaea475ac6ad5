"""Files: written exclusively, through nobody's link, onto nothing but files."""

from __future__ import annotations

import ast
import json
import os
import secrets
import shlex
import sys
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from genmodels.core.checkpoint import checkpoint_hash, nonfinite_weight, read_header, verify
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.core.files import check_writable, located, metadata, new_folder, open_lock, typed, write_whole
from genmodels.models.checkpoint import load_model, read_resumable, write_exported
from genmodels.models.normalizing_flows import NSF
from tests.untrained import write

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


def test_a_link_to_a_folder_that_is_not_there_is_named(tmp_path):
    """Such as runs/ on a disk that is not mounted: numbered names were tried without end."""
    runs = tmp_path / "runs"
    runs.symlink_to(tmp_path / "disk")
    for make in (lambda: new_folder(runs / "a" / "b"), lambda: write_whole(runs / "a.txt", text("x"), mode="w"),
                 lambda: check_writable("out", runs / "a.txt")):  # fmt: skip
        with pytest.raises(RunError, match=f"{runs} is a link to {tmp_path / 'disk'}, which does not exist"):
            make()
    (tmp_path / "disk").mkdir()
    assert [new_folder(runs / "a").name for _ in range(2)] == ["a", "a_2"]


def test_a_folder_that_cannot_be_read_can_be_written(tmp_path, monkeypatch):
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened(Path(path) / "none" if Path(path) == tmp_path else path,
                                                               *rest))  # fmt: skip
    write_whole(tmp_path / "a", text("x"), mode="w")
    assert (tmp_path / "a").read_text() == "x"


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
    after = os.lstat(tmp_path / "x")
    assert after[:7] == before[:7] and after.st_mtime_ns == before.st_mtime_ns  # a look at a link is an access
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(InputError, match=r"out=.*/x.csv is a (pipe|device|folder): name a file"):
        (tmp_path / "x").rename(tmp_path / "x.csv")
        check_writable("out", tmp_path / "x.csv")


def test_a_name_may_be_as_long_as_the_disk_allows(tmp_path):
    path = tmp_path / ("\N{HIRAGANA LETTER A}" * 80 + ".json")  # 245 bytes
    write_whole(path, text("x"), mode="w")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["x"]


def test_a_home_of_nobody_is_one_line():
    with pytest.raises(InputError, match="~nobody-of-that-name/x.ckpt is no checkpoint: "):
        located("~nobody-of-that-name/x.ckpt")


@pytest.mark.parametrize("value", ["Hello there.", "it's", 'a "b"', "a ${x} $y", "a\\b", "x", ["a b", 1]])
def test_a_typed_setting_is_read_as_it_was(value):
    [word] = shlex.split(typed("key", value))
    read = OverridesParser.create().parse_override(word).value()
    assert OmegaConf.to_container(OmegaConf.create({"key": read}), resolve=True)["key"] == value


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


SPEC = DataSpec("plane", (2,))


@pytest.fixture
def file(tmp_path):
    model = NSF(SPEC, layers=1, hidden=4, ema_decay=0.9)
    return Path(write(model, tmp_path / "model.safetensors"))


def test_it_holds_what_the_checkpoint_holds(file):
    verify(file)
    assert read_header(file)["family"] == "nsf" and len(checkpoint_hash(file)) == 64
    model, header = load_model(file.parent / "model.safetensors")
    assert header == read_header(file) and model.ema is not None and located(file.parent) == file
    with pytest.raises(RunError, match="no run can go on from it"):
        read_resumable(file)


def flip(place):
    def change(content: bytes) -> bytes:
        where = place if place >= 0 else len(content) + place
        return content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :]

    return change


def renamed(content: bytes) -> bytes:
    """Another name for a tensor, of the same length: only the index differs."""
    length = 8 + int.from_bytes(content[:8], "little")
    return content[:length].replace(b"ema.", b"emb.") + content[length:]


def refamilied(content: bytes) -> bytes:
    return content.replace(b'\\"family\\": \\"nsf\\"', b'\\"family\\": \\"msf\\"')


CHANGES = [flip(-1), flip(3), renamed, refamilied, lambda content: content[:-1], lambda content: content + b"\0",
           lambda content: content[:5], lambda content: b""]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_found(file, change, refuses):
    whole = file.read_bytes()
    assert change(whole) != whole
    file.write_bytes(change(whole))
    refuses(RunError, "altered or cut|truncated or its index is damaged", verify, file)


def test_a_file_of_another_program(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(RunError, match="without a genmodels header"):
        verify(tmp_path / "other.safetensors")


def test_a_weight_that_is_not_finite_is_found_without_torch(tmp_path):
    state = {"state_dict": {"a": torch.zeros(3), "n": torch.tensor([2**62]), "b": torch.tensor([1.0, float("inf")])}}
    file = tmp_path / "x.safetensors"
    write_exported(file, {**state, "genmodels": {}})
    assert nonfinite_weight(file) == "b" and json.loads(metadata(file)["genmodels"]) == {}


@pytest.mark.parametrize("name", ["hf://digits", "hf://", "hf://a/b/c"])
def test_names_of_the_hub_have_two_parts(name):
    with pytest.raises(InputError, match="hf://user/name"):
        located(name)


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"genmodels\[hub\]"):
        located("hf://user/name")
