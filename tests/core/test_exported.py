"""Exported models: what is altered, cut or foreign is one line; names of the hub."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from genmodels.core.checkpoint import checkpoint_hash, nonfinite_weight, read_header, verify
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.core.exported import located, metadata
from genmodels.models.checkpoint import load_model, read_resumable, write_exported
from genmodels.models.nsf import NSF

SPEC = DataSpec("plane", (2,))


@pytest.fixture
def file(tmp_path):
    model = NSF(SPEC, layers=1, hidden=4, ema_decay=0.9)
    state = {"state_dict": model.state_dict()}
    model.on_save_checkpoint(state)
    write_exported(tmp_path / "model.safetensors", state)
    return tmp_path / "model.safetensors"


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
def test_any_change_is_found(file, change):
    whole = file.read_bytes()
    assert change(whole) != whole
    file.write_bytes(change(whole))
    with pytest.raises(RunError, match="altered or cut|truncated or its index is damaged") as error:
        verify(file)
    assert "\n" not in str(error.value)


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
