"""Sound files: one that is shorter than it says is not the sound that was recorded."""

from __future__ import annotations

import math
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from genmodels.speech.audio import (
    AudioError,
    MelConfig,
    filter_bank,
    log_mel,
    log_pitch,
    read_wav,
    resample,
    slaney_hz,
    slaney_mel,
    write_wav,
)

WAVE = np.random.default_rng(0).normal(size=4000)
KINDS = {
    "8 bits": (WAVE * 20 + 128).clip(0, 255).astype(np.uint8), "16 bits": (WAVE * 8000).astype(np.int16),
    "32 bits": (WAVE * 5e8).astype(np.int32), "float": (WAVE / 8).astype(np.float32),
    "stereo": np.stack([WAVE, -WAVE / 2], 1).astype(np.float32),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_anywhere_in_its_sound_is_refused(kind, tmp_path):
    path = tmp_path / "a.wav"
    wavfile.write(path, 8000, KINDS[kind])
    whole = path.read_bytes()
    assert read_wav(path)[0].shape == (4000,)
    for share in (0.9, 0.5, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(AudioError, match=r"a.wav: truncated, it has \d+ of the \d+ bytes"):
            read_wav(path)


def test_chunks_next_to_the_sound_and_lengths_that_were_not_known(tmp_path):
    path = tmp_path / "a.wav"
    wavfile.write(path, 8000, KINDS["16 bits"])
    whole, true = path.read_bytes(), read_wav(path)[0]
    assert whole[36:40] == b"data"
    title = b"LIST" + struct.pack("<I", 5) + b"title" + b"\0"
    path.write_bytes(whole[:36] + title + whole[36:] + title)
    assert torch.equal(read_wav(path)[0], true)
    path.write_bytes(whole + whole[36:])  # a second chunk of sound
    with pytest.raises(AudioError, match="several chunks of sound"):
        read_wav(path)
    for unknown in (2**32 - 1, 0x7FFFF000):  # as ffmpeg and SoX write to a pipe
        size = struct.pack("<I", unknown)
        path.write_bytes(whole[:4] + size + whole[8:40] + size + whole[44:])
        assert torch.equal(read_wav(path)[0], true)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    (tmp_path / "b.wav").mkdir()
    for name, kind in (("a.wav", "a pipe"), ("b.wav", "a folder")):
        with pytest.raises(AudioError, match=f"{name}: it is {kind}, not a file"):
            read_wav(tmp_path / name)


CLIPS = Path(__file__).resolve().parents[3] / "shared" / "data" / "LJSpeech-sample" / "wavs"


def speechlike(samples: int = 30000, seed: int = 0) -> torch.Tensor:
    """A glide with overtones in noise of changing loudness, float64."""
    t = torch.arange(samples, dtype=torch.float64) / 22050
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    phase = 2 * torch.pi * (120 * t + 40 * t**2)
    tone = sum(torch.sin(k * phase) / k for k in range(1, 20))
    return 0.2 * tone * torch.sin(3 * t).abs() + 0.01 * noise * torch.cos(2 * t).abs()


def test_frames():
    config = MelConfig()
    tacotron = replace(config, padding="tacotron")
    assert config.frames(22050) == 86 and tacotron.frames(22050) == 87
    for samples in (385, 512, 1000, 22050, 22051):
        assert log_mel(torch.zeros(samples)).shape[-1] == config.frames(samples) == samples // 256
    assert log_mel(torch.zeros(22050), tacotron).shape[-1] == 87
    with pytest.raises(ValueError, match="384 samples is too short: it needs at least 385"):
        log_mel(torch.zeros(384))
    sparse = replace(config, hop=512)  # of which a window reaches over what is reflected
    assert log_mel(torch.zeros(512), sparse).shape[-1] == 1
    with pytest.raises(ValueError, match="511 samples is too short: it needs at least 512"):
        log_mel(torch.zeros(511), sparse)


def test_silence_and_a_tone():
    assert log_mel(torch.zeros(5000, dtype=torch.float64)).sub(np.log(1e-5)).abs().max() < 1e-12
    tone = 0.5 * torch.sin(2 * torch.pi * 1000 * torch.arange(22050, dtype=torch.float64) / 22050)
    assert int(log_mel(tone).mean(1).argmax()) == 26


def test_bands():
    bank = filter_bank(MelConfig())
    assert bank.sum() == pytest.approx(3.713688, abs=1e-6)
    assert bank.sum(1).min() == pytest.approx(0.04492, abs=1e-5)
    assert bank.sum(1).max() == pytest.approx(0.04914, abs=1e-5)
    with pytest.raises(ValueError, match="mel band .* of 400 is empty"):
        MelConfig(n_mels=400)
    hz = np.linspace(0, 11025, 200)
    np.testing.assert_allclose(slaney_hz(slaney_mel(hz)), hz, atol=1e-8)


SMALL = {"sample_rate": 16000, "n_fft": 512, "hop": 128, "n_mels": 40, "f_min": 50.0}


@pytest.mark.parametrize("settings", [{}, SMALL])
def test_librosa_agrees(settings):
    librosa = pytest.importorskip("librosa", reason="librosa is not installed")
    config, wave = MelConfig(**settings), speechlike()
    theirs = librosa.filters.mel(sr=config.sample_rate, n_fft=config.n_fft, n_mels=config.n_mels, fmin=config.f_min,
                                 fmax=config.f_max, dtype=np.float64)
    np.testing.assert_allclose(filter_bank(config), theirs, atol=1e-12)
    padded = np.pad(wave.numpy(), config.padded, mode="reflect")
    bins = librosa.stft(padded, n_fft=config.n_fft, hop_length=config.hop, center=False, dtype=np.complex128)
    magnitude = np.sqrt(bins.real**2 + bins.imag**2 + 1e-9)
    expected = np.log(np.maximum(theirs @ magnitude, 1e-5))
    np.testing.assert_allclose(log_mel(wave, config).numpy(), expected, atol=1e-10)
    difference = np.abs(log_mel(wave.float(), config).numpy() - expected)
    assert difference.mean() < 1e-5 and difference.max() < 2e-3
    # Mistakes that look right are far outside.
    wide = np.pad(wave.numpy(), config.n_fft // 2, mode="reflect")
    late = librosa.stft(wide, n_fft=config.n_fft, hop_length=config.hop, center=False, dtype=np.complex128)
    frames = expected.shape[1]
    wrong = {
        "padding of n_fft/2": np.log(np.maximum(theirs @ np.abs(late), 1e-5))[:, :frames],
        "power": np.log(np.maximum(theirs @ magnitude**2, 1e-5)),
        "bands of HTK": np.log(np.maximum(librosa.filters.mel(
            sr=config.sample_rate, n_fft=config.n_fft, n_mels=config.n_mels, fmin=config.f_min, fmax=config.f_max,
            htk=True) @ magnitude, 1e-5)),
    }
    for name, values in wrong.items():
        assert np.abs(values - expected).max() > 0.1, name


@pytest.mark.skipif(not CLIPS.is_dir(), reason="the LJSpeech sample is not at hand")
@pytest.mark.parametrize("clip, samples, frames, mean, std", [
    ("LJ001-0002", 41885, 163, -5.13499, 2.16494),
    ("LJ001-0001", 212893, 831, -5.14818, 2.04570),
])
def test_known_clips(clip, samples, frames, mean, std):
    wave, rate = read_wav(CLIPS / f"{clip}.wav")
    found = log_mel(wave)
    assert rate == 22050 and len(wave) == samples and found.shape == (80, frames)
    assert float(found.mean()) == pytest.approx(mean, abs=1e-4)
    assert float(found.std(correction=0)) == pytest.approx(std, abs=1e-4)


def test_a_batch_is_each_clip_alone():
    waves = torch.stack([speechlike(9000, k) for k in range(3)])
    torch.testing.assert_close(log_mel(waves), torch.stack([log_mel(w) for w in waves]), atol=1e-12, rtol=0)


def band_limited(rate: int) -> torch.Tensor:
    """Two seconds of tones below 5 kHz as they are at a rate."""
    t = torch.arange(2 * rate, dtype=torch.float64) / rate
    return sum(torch.sin(2 * torch.pi * f * t + f) for f in (130.0, 440.0, 1234.0, 2900.0, 4700.0)) / 10


def test_resampling_keeps_the_mel():
    original, other = log_mel(band_limited(22050)), log_mel(resample(band_limited(16000), 16000, 22050))
    # The first and last frames see where the tones begin and end.
    inner, lowest = slice(4, -4), 66  # bands of up to 5 kHz
    assert (original - other)[:lowest, inner].abs().mean() < 0.05
    inverted = log_mel(resample(band_limited(22050), 22050, 16000))
    frames = min(original.shape[1], inverted.shape[1])
    assert (original[:, :frames] - inverted[:, :frames])[:lowest, inner].abs().mean() > 0.5


@pytest.mark.parametrize("kind, tolerance", [("int16", 1e-4), ("int32", 1e-6), ("float32", 1e-7), ("uint8", 1e-2)])
def test_files_of_every_kind(tmp_path, kind, tolerance):
    from scipy.io import wavfile

    wave = speechlike(2000).numpy()
    scale = {"int16": 2**15 - 1, "int32": 2**31 - 1, "uint8": 127}.get(kind)
    centre = 128 if kind == "uint8" else 0
    samples = wave.astype(kind) if scale is None else np.round(wave * scale + centre).astype(kind)
    wavfile.write(tmp_path / "mono.wav", 22050, samples)
    wavfile.write(tmp_path / "stereo.wav", 22050, np.stack([samples, samples], 1))
    for name in ("mono.wav", "stereo.wav"):
        found, rate = read_wav(tmp_path / name)
        assert rate == 22050 and np.abs(found.numpy() - wave).max() < tolerance


@pytest.mark.parametrize("kind", ["i2", "i4", "f4"])
def test_big_endian_files_sound_the_same(tmp_path, kind):
    samples = np.round(speechlike(100).numpy() * (2 ** (8 * int(kind[1]) - 1) - 1 if kind[0] == "i" else 1), 6)
    size = int(kind[1])
    form = struct.pack(">4sIHHIIHH", b"fmt ", 16, 3 if kind == "f4" else 1, 1, 22050, 22050 * size, size, 8 * size)
    data = samples.astype(f">{kind}").tobytes()
    body = b"WAVE" + form + struct.pack(">4sI", b"data", len(data)) + data
    (tmp_path / "big.wav").write_bytes(struct.pack(">4sI", b"RIFX", len(body)) + body)
    assert np.abs(read_wav(tmp_path / "big.wav")[0].numpy() - speechlike(100).numpy()).max() < 1e-4


def test_what_is_written_is_read_and_never_cut(tmp_path):
    wave = speechlike(3000).float()
    assert write_wav(tmp_path / "a.wav", wave, 22050) == 1
    assert (read_wav(tmp_path / "a.wav")[0] - wave).abs().max() < 1e-4
    factor = write_wav(tmp_path / "loud.wav", 5 * wave / wave.abs().max(), 22050)
    assert factor == pytest.approx(0.2, rel=1e-5)
    found = read_wav(tmp_path / "loud.wav")[0]
    assert (found - wave / wave.abs().max()).abs().max() < 1e-4


def test_bad_files_are_named(tmp_path):
    from scipy.io import wavfile

    (tmp_path / "text.wav").write_text("not sound")
    wavfile.write(tmp_path / "empty.wav", 22050, np.zeros(0, np.int16))
    wavfile.write(tmp_path / "nan.wav", 22050, np.array([0, np.nan], np.float32))
    wavfile.write(tmp_path / "fast.wav", 1_899_999_999, np.ones(5000, np.int16))  # resampling would take 31 GB
    wavfile.write(tmp_path / "long.wav", 22050, np.ones(50, np.int64))
    wavfile.write(tmp_path / "sixteen.wav", 22050, np.array([[0, 1], [1, -3000]], np.float32))
    wavfile.write(tmp_path / "overshoot.wav", 22050, np.array([0, -8], np.float32))
    assert read_wav(tmp_path / "overshoot.wav")[0].tolist() == [0, -8]
    for name, message in [("none.wav", "no such file"), ("long.wav", "64 bits a sample are not read"),
                          ("text.wav", "not a readable"), ("empty.wav", "no sound"),
                          ("nan.wav", "sample 1 is not finite"), ("sixteen.wav", "reach 3000, .*divide them by 32768"),
                          ("fast.wav", "1899999999 samples a second")]:
        with pytest.raises(AudioError, match=rf"{name}.*{message}"):
            read_wav(tmp_path / name)


def test_bad_settings_and_sound():
    for settings in ({"f_max": 20000.0}, {"hop": 2000}, {"n_fft": 1023}, {"padding": "none"}, {"n_mels": 0}):
        with pytest.raises(ValueError):
            MelConfig(**settings)
    with pytest.raises(ValueError, match="not finite"):
        log_mel(torch.full((1000,), torch.nan))
    with pytest.raises(ValueError, match="float32 or float64"):
        log_mel(torch.zeros(1000, dtype=torch.int16))
    assert MelConfig().differences(replace(MelConfig(), hop=200)) == ["hop: 256 and 200"]


def test_the_pitch_of_tones():
    """Five harmonics of a known frequency, with a pause of noise: to two steps, and nothing in the pause."""
    pytest.importorskip("librosa")
    for config, hertz in ((MelConfig(), 110.0), (MelConfig(sample_rate=16000, hop=320), 233.0),
                          (MelConfig(sample_rate=8000, n_fft=512, hop=128, f_max=4000.0, n_mels=40), 180.0)):
        time = torch.arange(config.sample_rate, dtype=torch.float64) / config.sample_rate
        wave = sum(torch.sin(2 * math.pi * hertz * k * time) / k for k in range(1, 6)) / 4
        pause = slice(config.sample_rate // 2, None)
        generator = torch.Generator().manual_seed(0)
        wave[pause] = 0.1 * torch.randn(len(wave[pause]), generator=generator, dtype=torch.float64)
        frames = config.frames(len(wave))
        found = log_pitch(wave, config, frames)
        assert found.shape == (frames,)
        inside = found[5 : frames // 2 - 5]
        assert np.abs(inside - 12 * math.log2(hertz)).max() < 0.2
        assert np.isnan(found[frames // 2 + 5 :]).mean() > 0.9
        assert np.isnan(log_pitch(torch.zeros(config.sample_rate), config, frames)).all()


def test_pitch_without_librosa_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "librosa", None)
    with pytest.raises(ValueError, match=r"the pitch needs librosa: pip install 'genmodels\[speech\]'"):
        log_pitch(torch.zeros(9000), MelConfig(), 35)
