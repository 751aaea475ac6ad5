"""Mel-spectrograms of recordings, computed once and kept in the user's cache under a hash of all they depend on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from genmodels.errors import RunError
from genmodels.files import kind_of, write_whole
from genmodels.speech.audio import AudioError, read_wav, resample
from genmodels.speech.mel import MelConfig, log_mel
from genmodels.user_cache import cache_folder

#: Raised when what a kept file holds, or how it is computed, changes.
FORMAT = 1
_FULL = 0.999  # share of full scale from which a sample counts as cut
_QUIET = 1e-10  # mean square of what is called silence, so that its level is a number
_G722_RATE = 16000
#: What reading a kept file raises that a full disk has cut, or something else has written.
_DAMAGED = (OSError, ValueError, KeyError, EOFError, TypeError, RecursionError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Recording:
    """What is known of a sound file, without its samples.

    Attributes:
        digest: hash of the file's contents.
        place: the kept mel.
        rate: samples per second of the file.
        samples: their number, at that rate.
        frames: of the mel, 0 where the clip is too short for one.
        level: root mean square in dB of full scale.
        clipped: share of samples at full scale.
    """

    digest: str
    place: Path
    rate: int
    samples: int
    frames: int
    level: float
    clipped: float

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.samples / self.rate

    def mel(self) -> Tensor:
        """(n_mels, T) float32.

        Raises:
            RunError: when the kept file is damaged or gone.
        """
        try:
            with np.load(self.place) as kept:
                return torch.from_numpy(kept["mel"])
        except _DAMAGED as error:
            raise RunError(f"{self.place} is damaged ({error}): remove it, and the mel is computed again") from error


class MelFiles:
    """The mels of one configuration.

    The name of a kept file is a hash of the configuration (all of it) and of the recording's contents, so a changed
    setting or a changed recording is computed anew, and a renamed one is not.

    Arguments:
        config: settings of the mels.
        folder: where they are kept; the user's cache when None.

    Example:
        >>> import tempfile
        >>> from genmodels.data.clips import read_clips
        >>> with tempfile.TemporaryDirectory() as kept:
        ...     found = MelFiles(MelConfig(), Path(kept)).read(read_clips("embedded", None)[0].path)
        ...     found.rate, found.samples, found.frames, found.mel().shape
        (22050, 41885, 163, torch.Size([80, 163]))
    """

    def __init__(self, config: MelConfig, folder: Path | None = None):
        self.config = config
        settings = json.dumps({"format": FORMAT, **asdict(config)}, sort_keys=True)
        name = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
        self.folder = (cache_folder() / "mels" if folder is None else folder) / name

    def place(self, path: Path) -> tuple[str, Path]:
        """The hash of a recording's contents, and where its mel is kept.

        Raises:
            AudioError: when it cannot be read.
        """
        if path.exists() and not path.is_file():
            raise AudioError(f"{path}: it is {kind_of(path)}, not a file")
        try:
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        except OSError as error:
            raise AudioError(f"{path}: {os.strerror(error.errno) if error.errno else error}") from error
        return digest, self.folder / digest[:2] / f"{digest}.npz"

    def is_kept(self, path: Path) -> bool:
        """Whether nothing has to be computed."""
        return self.place(path)[1].is_file()

    def read(self, path: Path) -> Recording:
        """What is known of a recording, from the cache or computed and kept.

        Raises:
            AudioError: for a file that is missing, not sound, empty or not finite.
        """
        digest, place = self.place(path)
        if place.is_file():
            try:
                with np.load(place) as kept:
                    return Recording(digest, place, *(kind(kept[name]) for name, kind in _FACTS.items()))
            except _DAMAGED:
                place.unlink(missing_ok=True)  # cut short by a full disk: as good as none
        wave, rate = read_sound(path)
        facts = {"rate": rate, "samples": len(wave), "frames": 0,
                 "level": 10 * math.log10(max(float(wave.double().square().mean()), _QUIET)),
                 "clipped": float((wave.abs() >= _FULL).double().mean())}
        sound = resample(wave, rate, self.config.sample_rate)
        if len(sound) >= self.config.shortest:
            mel = log_mel(sound, self.config).numpy()
        else:
            mel = np.zeros((self.config.n_mels, 0), np.float32)
        facts["frames"] = mel.shape[1]
        write_whole(place, lambda file: np.savez(file, mel=mel, **facts))
        return Recording(digest, place, **facts)

    def statistics(self, recordings: list[Recording], per: str) -> dict:
        """Mean and deviation of all cells of these mels, in float64: two numbers, or two for each band (`per=band`).

        Kept under a hash of the recordings' contents.
        """
        digest = hashlib.blake2b(per.encode(), digest_size=16)
        for name in sorted(recording.digest for recording in recordings):
            digest.update(name.encode())
        place = self.folder / f"statistics-{digest.hexdigest()}.json"
        try:
            kept = json.loads(place.read_text())
            return {"per": per, "mean": kept["mean"], "std": kept["std"]}
        except _DAMAGED:
            found = cell_statistics((recording.mel() for recording in recordings), per)
            write_whole(place, lambda file: file.write(json.dumps(found).encode()))
            return found


def cell_statistics(mels, per: str) -> dict:
    """Mean and population deviation over the cells of mels (n_mels, T), of all or (`per=band`) of each band.

    Example:
        >>> cell_statistics([torch.tensor([[1.0, 3.0], [5.0, 7.0]])], "band")
        {'per': 'band', 'mean': [2.0, 6.0], 'std': [1.0, 1.0]}
    """
    count, total, squares = 0, None, None
    for mel in mels:
        cells = mel.double()
        one, two = cells.sum(1), cells.square().sum(1)
        total, squares = (one, two) if total is None else (total + one, squares + two)
        count += mel.shape[1]
    if per == "global":
        count, total, squares = count * len(total), total.sum(), squares.sum()
    mean = total / count
    return {"per": per, "mean": mean.tolist(), "std": (squares / count - mean.square()).clamp(min=0).sqrt().tolist()}


def read_sound(path: Path) -> tuple[Tensor, int]:
    """Samples (N,) and rate of a wav file, or of a G.722 file by the package G722.

    Raises:
        AudioError: for a file that is not sound, or a missing package.
    """
    if path.suffix.lower() != ".g722":
        return read_wav(path)
    try:
        from G722 import G722
    except ImportError:
        raise AudioError(f"{path}: g722 files need a decoder: pip install 'genmodels[asterisk]'") from None
    samples = np.asarray(G722(_G722_RATE, 64000).decode(path.read_bytes()), dtype=np.float32)
    if len(samples) == 0:
        raise AudioError(f"{path}: there is no sound in it")
    return torch.from_numpy(samples / 2.0**15), _G722_RATE


_FACTS = {"rate": int, "samples": int, "frames": int, "level": float, "clipped": float}
