"""Audio files, resampling, log-mel-spectrograms, and pitch."""

from __future__ import annotations

import math
import struct
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from genmodels.core.files import kind_of

#: Sizes that mean an unknown length (written to a pipe by SoX, by ffmpeg), or one in another chunk (RF64).
_UNKNOWN = range(0x7FFFF000, 2**31), range(2**32 - 2**16, 2**32)
_RATES = 1000, 1_000_000  # samples a second of a recording; other rates are those of a damaged header
#: The integer of full scale for each type of sample in a wav file.
_FULL_SCALE = {np.dtype(np.int16): 2.0**15, np.dtype(np.int32): 2.0**31, np.dtype(np.uint8): 2.0**7}
_LOUDEST = 100.0  # 40 dB above full scale: beyond any recording in floats, below 16-bit integers written as floats


class AudioError(ValueError):
    """A file that cannot be read as sound; the message has its path and the reason."""


def read_wav(path: str | Path, sample_rate: int | None = None) -> tuple[Tensor, int]:
    """The sound of a wav file and its rate: channels averaged, integers scaled, resampled if a rate is given.

    Arguments:
        path: a wav file of 8, 16, 24 or 32 bits, integers or floats.
        sample_rate: rate to resample to; None for the file's own.

    Shapes: the sound is `(N,)` float32.
    Raises:
        AudioError: as `read_channels`.
    """
    channels, rate = read_channels(path)
    wanted = rate if sample_rate is None else sample_rate
    return resample(channels.mean(0), rate, wanted).float(), wanted


def read_channels(path: str | Path) -> tuple[Tensor, int]:
    """The channels of a wav file, (C, N) float64 with full scale at 1, and its rate.

    Raises:
        AudioError: for a file that is missing, unreadable, empty, not finite or far beyond full scale, with its path.
    """
    from scipy.io import wavfile

    try:
        _check_whole(Path(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # other chunks, such as titles
            rate, samples = wavfile.read(path)
    except FileNotFoundError as error:
        raise AudioError(f"{path}: there is no such file") from error
    except AudioError:
        raise
    except OSError as error:
        raise AudioError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # whatever scipy meets in a broken header
        reason = error if isinstance(error, ValueError) else "its header is broken"
        raise AudioError(f"{path}: not a readable wav file ({reason})") from error
    if not _RATES[0] <= rate <= _RATES[1]:
        raise AudioError(f"{path}: {rate} samples a second are not those of a recording")
    kind = samples.dtype.newbyteorder("=")  # RIFX files are big-endian
    if kind.kind in "iu" and kind not in _FULL_SCALE:
        raise AudioError(f"{path}: {8 * kind.itemsize} bits a sample are not read: convert it to 16, 24 or 32")
    scale = _FULL_SCALE.get(kind, 1.0)
    wave = samples.astype(np.float64)
    wave = (wave - (scale if kind == np.uint8 else 0.0)) / scale
    if wave.size == 0:
        raise AudioError(f"{path}: there is no sound in it")
    if not np.isfinite(wave).all():
        raise AudioError(f"{path}: sample {int(np.nonzero(~np.isfinite(wave))[0][0])} is not finite")
    if (peak := float(np.abs(wave).max())) > _LOUDEST:
        raise AudioError(f"{path}: its samples reach {peak:.6g}, and full scale of floats is 1: divide them by 32768 "
                         "if they are 16-bit integers")
    return torch.from_numpy(wave.reshape(len(wave), -1).T), rate


def _check_whole(path: Path) -> None:
    """Raise an AudioError if a wav file is shorter than it declares, or has two parts, which scipy ignores."""
    if path.exists() and not path.is_file():
        raise AudioError(f"{path}: it is {kind_of(path)}, not a file")
    with open(path, "rb") as file:
        order = ">" if file.read(12)[:4] == b"RIFX" else "<"
        sounds = 0
        while len(chunk := file.read(8)) == 8:
            size = struct.unpack(f"{order}I", chunk[4:])[0]
            if chunk[:4] != b"data":
                file.seek(size + size % 2, 1)
                continue
            held, sounds = path.stat().st_size - file.tell(), sounds + 1
            if sounds == 2:
                raise AudioError(f"{path}: it has several chunks of sound; write them as one")
            if any(size in unknown for unknown in _UNKNOWN):
                return
            if held < size:
                raise AudioError(f"{path}: truncated, it has {held} of the {size} bytes of sound that it declares")
            file.seek(size + size % 2, 1)


def resample(wave: Tensor, rate: int, wanted: int) -> Tensor:
    """Sound at another rate, by a polyphase filter; unchanged if the rates are equal.

    Shapes: `(..., N)` to `(..., ceil(N wanted / rate))`.

    Example:
        >>> resample(torch.zeros(16000), 16000, 22050).shape
        torch.Size([22050])
    """
    if rate < 1 or wanted < 1:
        raise ValueError(f"rates are positive, got {rate} and {wanted}")
    if rate == wanted:
        return wave
    from scipy.signal import resample_poly

    common = math.gcd(rate, wanted)
    found = resample_poly(wave.detach().double().cpu().numpy(), wanted // common, rate // common, axis=-1)
    return torch.from_numpy(found).to(wave)


def write_wav(path: str | Path | BinaryIO, wave: Tensor, sample_rate: int) -> float:
    """Write sound (N,) as 16 bits to a path or an open file; sound beyond full scale is scaled down, never clipped.

    Returns the factor it was multiplied by, 1 if it was not scaled.
    """
    from scipy.io import wavfile

    samples, factor = sixteen_bits(wave)
    wavfile.write(path, sample_rate, samples.numpy())
    return factor


def sixteen_bits(wave: Tensor) -> tuple[Tensor, float]:
    """Sound (N,) as int16, and the factor by which sound beyond full scale was scaled down, else 1.

    Errors: ValueError for another shape, or sound that is not finite.

    Example:
        >>> sixteen_bits(torch.tensor([0.5, -2.0]))
        (tensor([  8192, -32767], dtype=torch.int16), 0.5)
    """
    if wave.dim() != 1:
        raise ValueError(f"sound to write has shape (N,), got {tuple(wave.shape)}")
    if not bool(wave.isfinite().all()):
        raise ValueError(f"sound to write is finite, but {int((~wave.isfinite()).sum())} of {len(wave)} values are not")
    peak = float(wave.abs().max()) if len(wave) else 0.0
    factor = 1.0 if peak <= 1 else 1 / peak
    return (wave.detach().double().cpu() * (factor * (2**15 - 1))).round().to(torch.int16), factor


@dataclass(frozen=True)
class MelConfig:
    """The settings of a mel-spectrogram, which must agree to compare mels or to vocode them.

    Arguments:
        sample_rate: samples per second.
        n_fft: length of the Hann window and of its Fourier transform.
        hop: samples from one frame to the next.
        n_mels: number of mel bands.
        f_min, f_max: lowest and highest frequency of the bands, in Hz.
        padding: `hifigan`: (n_fft - hop)/2 samples on either side, so that N samples are floor(N / hop) frames;
            `tacotron`: n_fft/2, one frame more.

    Errors: ValueError for inconsistent sizes, or bands so narrow that one contains no frequency.

    Example:
        >>> MelConfig().frames(22050), MelConfig(padding="tacotron").frames(22050)
        (86, 87)
    """

    sample_rate: int = 22050
    n_fft: int = 1024
    hop: int = 256
    n_mels: int = 80
    f_min: float = 0.0
    f_max: float = 8000.0
    padding: Literal["hifigan", "tacotron"] = "hifigan"

    def __post_init__(self):
        if min(self.sample_rate, self.hop, self.n_mels) < 1 or self.n_fft < 2 or self.n_fft < self.hop:
            raise ValueError(f"a mel needs positive sizes and n_fft >= hop, got {self}")
        if (self.n_fft - self.hop) % 2 or self.n_fft % 2:
            raise ValueError(f"n_fft and n_fft - hop must be even, got n_fft = {self.n_fft}, hop = {self.hop}")
        if not 0 <= self.f_min < self.f_max <= self.sample_rate / 2:
            raise ValueError(f"0 <= f_min < f_max <= {self.sample_rate / 2} Hz (half the rate), got {self.f_min}, "
                             f"{self.f_max}")
        if self.padding not in ("hifigan", "tacotron"):
            raise ValueError(f"padding must be hifigan or tacotron, got {self.padding!r}")
        filter_bank(self)

    @property
    def padded(self) -> int:
        """Samples that are reflected on either side."""
        return (self.n_fft - self.hop) // 2 if self.padding == "hifigan" else self.n_fft // 2

    @property
    def shortest(self) -> int:
        """The smallest number of samples of a clip: more than are reflected on a side, and enough for one frame."""
        return max(self.padded + 1, self.n_fft - 2 * self.padded)

    def frames(self, samples: int) -> int:
        """Number of frames for a number of samples."""
        return 1 + (samples + 2 * self.padded - self.n_fft) // self.hop

    def differences(self, other: MelConfig) -> list[str]:
        """The fields that differ from another configuration, with both values."""
        return [f"{name}: {value} and {getattr(other, name)}"
                for name, value in vars(self).items() if value != getattr(other, name)]


_FLOOR = 1e-9  # under the root of the magnitude, whose slope is infinite at zero
_CLAMP = 1e-5
#: A log-mel of silence, -11.5129.
FLOOR = math.log(_CLAMP)


def slaney_mel(frequency: np.ndarray | float) -> np.ndarray:
    """Mels of Hz on Slaney's scale: linear below 1,000 Hz (200/3 Hz a mel), logarithmic above (27 mels to 6,400 Hz).

    Example:
        >>> slaney_mel(np.array([0.0, 200.0, 1000.0, 6400.0])).tolist()
        [0.0, 3.0, 15.0, 42.0]
    """
    frequency = np.asarray(frequency, dtype=np.float64)
    above = 15 + 27 * np.log(np.maximum(frequency, 1000) / 1000) / np.log(6.4)
    return np.where(frequency < 1000, 3 * frequency / 200, above)


def slaney_hz(mel: np.ndarray | float) -> np.ndarray:
    """The inverse of `slaney_mel`.

    Example:
        >>> slaney_hz(np.array([3.0, 42.0])).round(6).tolist()
        [200.0, 6400.0]
    """
    mel = np.asarray(mel, dtype=np.float64)
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) * (np.maximum(mel, 15) - 15) / 27))


@lru_cache(maxsize=32)
def filter_bank(config: MelConfig) -> np.ndarray:
    """Triangular bands of equal area in Hz, (n_mels, n_fft/2 + 1), float64: Slaney's scale and normalisation.

    Raises:
        ValueError: for a band into which no frequency of the transform falls.

    Example:
        >>> bank = filter_bank(MelConfig())
        >>> bank.shape, round(float(bank.sum()), 6)
        ((80, 513), 3.713688)
    """
    # Not by librosa, with which it agrees: data and training on speech work without the extra `speech`.
    frequency = np.arange(config.n_fft // 2 + 1) * config.sample_rate / config.n_fft
    edges = slaney_hz(np.linspace(slaney_mel(config.f_min), slaney_mel(config.f_max), config.n_mels + 2))
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise, fall = (frequency - low) / (centre - low), (high - frequency) / (high - centre)
    bank = np.maximum(0, np.minimum(rise, fall)) * 2 / (high - low)
    empty = np.flatnonzero(bank.max(1) == 0)
    if len(empty):
        raise ValueError(f"mel band {empty[0]} of {config.n_mels} is empty: fewer n_mels, or a larger n_fft")
    bank.setflags(write=False)
    return bank


def log_mel(wave: Tensor, config: MelConfig | None = None) -> Tensor:
    """The log-mel-spectrogram of sound.

        mel = log max(F sqrt(|STFT|^2 + 1e-9), 1e-5),    Hann window, reflected at the ends

    Arguments:
        wave: samples between -1 and 1 at the rate of the configuration.
        config: the settings, those of HiFi-GAN at 22,050 Hz when None.

    Shapes: `wave (..., N)` float32 or float64, which is the width of the computation; the result is
        `(..., n_mels, T)`, natural log.
    Errors: ValueError for sound too short to reflect, or not floating point, or not finite.
    Source: Kong et al. 2020 (HiFi-GAN), on its mel-spectrograms.

    Example:
        >>> silence = log_mel(torch.zeros(22050))
        >>> silence.shape, round(float(silence.max()), 6)
        (torch.Size([80, 86]), -11.512925)
    """
    config = MelConfig() if config is None else config
    if wave.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"sound is float32 or float64 between -1 and 1, got {wave.dtype}")
    if wave.shape[-1] < config.shortest:
        raise ValueError(f"a clip of {wave.shape[-1]} samples is too short: it needs at least {config.shortest}")
    if not bool(wave.isfinite().all()):
        raise ValueError("the sound is not finite")
    bank = torch.tensor(filter_bank(config), dtype=wave.dtype, device=wave.device)
    return (bank @ magnitude(wave, config)).clamp(min=_CLAMP).log()


def magnitude(wave: Tensor, config: MelConfig) -> Tensor:
    """sqrt(|STFT|^2 + 1e-9), (..., N) to (..., n_fft/2 + 1, T).

    Example:
        >>> magnitude(torch.zeros(22050), MelConfig()).shape
        torch.Size([513, 86])
    """
    return torch.view_as_real(fourier(wave, config)).square().sum(-1).add(_FLOOR).sqrt()


def fourier(wave: Tensor, config: MelConfig) -> Tensor:
    """The short-time Fourier transform with a Hann window, reflected at the ends, (..., N) to (..., n_fft/2 + 1, T).

    Example:
        >>> fourier(torch.zeros(22050), MelConfig()).shape
        torch.Size([513, 86])
    """
    padded = pad(wave.reshape(-1, 1, wave.shape[-1]), (config.padded, config.padded), mode="reflect")[:, 0]
    window = torch.hann_window(config.n_fft, dtype=wave.dtype, device=wave.device)
    bins = torch.stft(padded, config.n_fft, config.hop, window=window, center=False, return_complex=True)
    return bins.reshape(*wave.shape[:-1], *bins.shape[1:])


_LOWEST, _HIGHEST = 60.0, 500.0  # Hz, of voices


def log_pitch(wave: Tensor, config: MelConfig, frames: int) -> np.ndarray:
    """The fundamental frequency of each frame of a mel in semitones above 1 Hz, 12 log2 F0, (T,); NaN where unvoiced.

    By pYIN between 60 and 500 Hz in steps of a tenth of a semitone.

    Arguments:
        wave: the sound of the mel.
        config: its settings.
        frames: T.

    Errors: ValueError if librosa is not installed.
    Source: Mauch and Dixon 2014 (pYIN).
    """
    try:
        from librosa import pyin
    except ImportError as error:
        raise ValueError("the pitch needs librosa: pip install 'genmodels[speech]'") from error
    window = 2 ** math.ceil(math.log2(config.sample_rate / 25))  # two periods of the lowest pitch, and more
    found, _, _ = pyin(wave.detach().double().cpu().numpy(), fmin=_LOWEST, fmax=_HIGHEST, sr=config.sample_rate,
                       frame_length=window, hop_length=config.hop)
    found = 12 * np.log2(found[:frames])
    return np.pad(found, (0, frames - len(found)), constant_values=np.nan)
