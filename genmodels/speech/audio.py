"""Sound from files: one channel, numbers between -1 and 1, at the rate that is asked for."""

from __future__ import annotations

import math
import struct
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from scipy.io import wavfile
from scipy.signal import resample_poly
from torch import Tensor

from genmodels.files import kind_of

#: Sizes from here on are written where the length was not yet known, to a pipe, or stand in another chunk (RF64).
_UNKNOWN = 2**32 - 2**16
#: What one stands for in each kind of integer that a wav file may hold.
_FULL_SCALE = {np.dtype(np.int16): 2.0**15, np.dtype(np.int32): 2.0**31, np.dtype(np.uint8): 2.0**7}


class AudioError(ValueError):
    """A file that is not sound: its path, and what is wrong."""


def read_wav(path: str | Path, sample_rate: int | None = None) -> tuple[Tensor, int]:
    """The sound of a wav file and its rate: channels averaged, integers scaled, resampled where a rate is asked for.

    Arguments:
        path: a wav file of 8, 16, 24 or 32 bits, integers or floats.
        sample_rate: rate to resample to; None for the file's own.

    Shapes: the sound is `(N,)` float32.
    Raises:
        AudioError: for a file that is missing, unreadable, empty or not finite, with its path.
    """
    try:
        _check_whole(Path(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks beside the sound, such as titles
            rate, samples = wavfile.read(path)
    except FileNotFoundError as error:
        raise AudioError(f"{path}: there is no such file") from error
    except (ValueError, EOFError, OSError, struct.error, UnboundLocalError) as error:  # scipy's, for broken headers
        raise AudioError(f"{path}: not a readable wav file ({error})") from error
    scale = _FULL_SCALE.get(samples.dtype, 1.0)
    wave = samples.astype(np.float64)
    wave = (wave - (scale if samples.dtype == np.uint8 else 0.0)) / scale
    wave = wave.mean(1) if wave.ndim == 2 else wave
    if len(wave) == 0:
        raise AudioError(f"{path}: there is no sound in it")
    if not np.isfinite(wave).all():
        raise AudioError(f"{path}: sample {int(np.flatnonzero(~np.isfinite(wave))[0])} is not finite")
    wanted = rate if sample_rate is None else sample_rate
    return resample(torch.from_numpy(wave), rate, wanted).float(), wanted


def _check_whole(path: Path) -> None:
    """Raise an AudioError where a wav file is shorter than the sound that it declares: scipy reads what there is."""
    if path.exists() and not path.is_file():
        raise AudioError(f"{path}: it is {kind_of(path)}, not a file")
    with open(path, "rb") as file:
        order = ">" if file.read(12)[:4] == b"RIFX" else "<"
        while len(chunk := file.read(8)) == 8:
            size = struct.unpack(f"{order}I", chunk[4:])[0]
            if chunk[:4] != b"data":
                file.seek(size + size % 2, 1)
                continue
            held = path.stat().st_size - file.tell()
            if held < size < _UNKNOWN:
                raise AudioError(f"{path}: cut short, {held} of the {size} bytes of sound that it declares are there")
            return


def resample(wave: Tensor, rate: int, wanted: int) -> Tensor:
    """Sound at another rate, by a polyphase filter; itself where the rates agree.

    Shapes: `(..., N)` to `(..., ceil(N wanted / rate))`.

    Example:
        >>> resample(torch.zeros(16000), 16000, 22050).shape
        torch.Size([22050])
    """
    if rate < 1 or wanted < 1:
        raise ValueError(f"rates are positive, got {rate} and {wanted}")
    if rate == wanted:
        return wave
    common = math.gcd(rate, wanted)
    found = resample_poly(wave.detach().double().cpu().numpy(), wanted // common, rate // common, axis=-1)
    return torch.from_numpy(found).to(wave)


def write_wav(path: str | Path | BinaryIO, wave: Tensor, sample_rate: int) -> float:
    """Write sound (N,) as 16 bits to a path or an open file; what is too loud is made quieter as a whole, never cut.

    Returns the factor it was multiplied by, 1 where it fitted.
    """
    if wave.dim() != 1:
        raise ValueError(f"sound to write has shape (N,), got {tuple(wave.shape)}")
    if not bool(wave.isfinite().all()):
        raise ValueError(f"sound to write is finite, but {int((~wave.isfinite()).sum())} of {len(wave)} values are not")
    peak = float(wave.abs().max()) if len(wave) else 0.0
    factor = 1.0 if peak <= 1 else 1 / peak
    samples = (wave.detach().double().cpu() * (factor * (2**15 - 1))).round().to(torch.int16)
    wavfile.write(path, sample_rate, samples.numpy())
    return factor
