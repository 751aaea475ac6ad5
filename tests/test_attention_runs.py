"""Every kind of attention trains through the command line, and is refused there where it does not exist."""

from __future__ import annotations

from typing import get_args

import pytest

from genmodels.cli.main import main
from genmodels.nn import ATTENTION
from genmodels.speech.tacotron import AttentionKind as TacotronAttention


def train(tmp_path, *words):
    return main(["train", "trainer=smoke", "logger=csv", f"run_dir={tmp_path / 'run'}", *words])


#: Kinds that are the core with a position: the log of a run says which path they take.
OF_THE_CORE = {
    "absolute", "swin2d", "rope2d", "mel", "rope", "xl", "xl_chunks", "music", "music_shared", "t5", "alibi"
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_ddpm_on_digits(attention, tmp_path, capsys):
    assert train(tmp_path, "model=ddpm", f"model.net.attention={attention}") == 0
    assert "val/bits_per_dim" in capsys.readouterr().out
    log = (tmp_path / "run" / "log.txt").read_text()
    assert (": sdpa, fused" in log) == (attention in OF_THE_CORE)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glow", "realnvp"])
@pytest.mark.parametrize("attention", ["swin2d", "local_dense"])
def test_a_flow_on_digits(model, attention, tmp_path, capsys):
    assert train(tmp_path, f"model={model}", f"model.attention={attention}") == 0
    assert "val/bits_per_dim" in capsys.readouterr().out


def test_what_does_not_fit_is_one_line(tmp_path, capsys):
    assert train(tmp_path, "model=ddpm", "model.net.attention=rope2d", "model.net.heads=32") == 2
    error = capsys.readouterr().err.strip()
    assert "not a multiple of 4" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("model, key, names", [
    ("ddpm", "model.net.attention", ATTENTION), ("glow", "model.attention", ATTENTION),
    ("glow_tts", "model.encoder.attention", ATTENTION), ("tacotron", "model.attention", get_args(TacotronAttention)),
    ("recognizer", "model.net.attention", ATTENTION),
])  # fmt: skip
def test_keys_list_every_name_and_wrong_ones_get_the_nearest(model, key, names, tmp_path, capsys):
    data = ["data=speech", "data.root=nowhere"] if model in ("glow_tts", "tacotron", "recognizer") else []
    assert main(["train", f"model={model}", *data, "--keys"]) == 0
    text = capsys.readouterr().out
    entry = text[text.index(f"{key}=") :][:600].replace(",", " ").split()
    assert set(names) <= set(entry)
    assert train(tmp_path, f"model={model}", *data, f"{key}=locaton") == 2
    error = capsys.readouterr().err.strip()
    assert "did you mean" in error and len(error.splitlines()) == 1
