"""Speech recordings on disk: the supported layouts with their texts, and the cache of mels."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError
from genmodels.core.files import cache_folder, kind_of, write_whole
from genmodels.speech.audio import AudioError, MelConfig, log_mel, read_wav, resample

#: The clips in the source of the package (wheels leave them out), and those held out; the rest is for training.
EMBEDDED = Path(__file__).parent / "ljspeech"
_EMBEDDED_SPLITS = {"val": ("LJ001-0061", "LJ001-0125"),
                    "test": ("LJ001-0013", "LJ001-0043", "LJ001-0104", "LJ001-0126")}
_SUFFIXES = (".wav", ".g722")
_SPOKEN_DIGIT = re.compile(r"(\d)_([^_]+)_(\d+)\.wav")
_HELD_OUT = 5  # first recordings of each digit and speaker, the test set of the Free Spoken Digits
_LISTED = 5


@dataclass(frozen=True)
class Clip:
    """One recording.

    Attributes:
        path: the file.
        where: its name in messages, with the line of its list.
        text: the transcript as written, or None.
        speaker: name of the speaker, or None.
        label: its class, or None.
        split: the split given by the layout, or None.
    """

    path: Path
    where: str
    text: str | None = None
    speaker: str | None = None
    label: str | None = None
    split: str | None = None


def read_clips(layout: str, root: Path | None, *, allow_partial: bool = False) -> list[Clip]:
    """The clips of a layout, in a fixed order.

    Arguments:
        layout: one of `LAYOUTS`.
        root: the folder, or the file of a manifest; None for the embedded clips.
        allow_partial: leave out rows whose file is missing instead of stopping.

    Raises:
        InputError: for a missing folder or list, a row with the wrong number of fields (file, line), missing files
            (the first five), or an installation without the embedded clips.

    Example:
        >>> clips = read_clips("embedded", None)
        >>> len(clips), clips[0].path.name, clips[0].text
        (16, 'LJ001-0002.wav', 'in being comparatively modern.')
    """
    if root is None and layout != "embedded":
        raise InputError(f"data.layout={layout} needs data.root=, the folder or file of the recordings")
    if root is not None and layout == "embedded":
        raise InputError(f"data.root={root} needs data.layout=, one of {', '.join(k for k in LAYOUTS if k != layout)}")
    if root is None and not EMBEDDED.is_dir():
        raise InputError("the speech clips are in the source of genmodels, not in its wheel: `pip install -e .` in a "
                         "checkout, or give data.layout=ljspeech data.root=<its folder genmodels/data/ljspeech>")
    clips = LAYOUTS[layout](EMBEDDED if root is None else root)
    missing = [clip for clip in clips if not clip.path.is_file()]
    if missing and not allow_partial:
        shown = ", ".join(str(clip.path) for clip in missing[:_LISTED])
        more = ", ..." if len(missing) > _LISTED else ""
        raise InputError(f"{len(missing)} of {len(clips)} recordings are missing: {shown}{more}; "
                         "data.allow_partial=true leaves them out")
    gone = {clip.path for clip in missing}
    found = [clip for clip in clips if clip.path not in gone]
    if not found:
        raise InputError(f"there are no recordings in {root} (layout {layout})")
    return found


def embedded(root: Path) -> list[Clip]:
    """The embedded clips, with their own splits."""
    held = {name: split for split, names in _EMBEDDED_SPLITS.items() for name in names}
    return [replace(clip, split=held.get(clip.path.stem, "train")) for clip in ljspeech(root)]


def ljspeech(root: Path) -> list[Clip]:
    """`metadata.csv` with `id|as written|in words`, and `wavs/<id>.wav`; quotes have no special meaning."""
    folder = root / "wavs" if (root / "wavs").is_dir() else root
    found = []
    for number, fields in _rows(root / "metadata.csv", least=2, most=3, form="id|text or id|text|text in words"):
        text = fields[2] if len(fields) == 3 and fields[2].strip() else fields[1]
        found.append(Clip(folder / f"{fields[0]}.wav", f"{fields[0]} (metadata.csv, line {number})", text))
    return found


def manifest(root: Path) -> list[Clip]:
    """A list `path|text` or `path|text|speaker`, the paths relative to it."""
    found, rows = [], list(_rows(root, least=2, most=3, form="path|text or path|text|speaker"))
    counts = Counter(len(fields) for _, fields in rows)
    for number, fields in rows:
        if len(counts) > 1 and len(fields) != counts.most_common(1)[0][0]:
            raise InputError(f"{root}, line {number}: {len(fields)} fields, other lines have "
                             f"{counts.most_common(1)[0][0]}; every line names a speaker, or none does")
        speaker = fields[2].strip() if len(fields) == 3 else None
        found.append(Clip(root.parent / fields[0], f"{fields[0]} ({root.name}, line {number})", fields[1], speaker))
    return found


def folder(root: Path) -> list[Clip]:
    """One folder for each class; or files `<digit>_<speaker>_<number>.wav` as in the Free Spoken Digits.

    Of the digits, recordings 0 to 4 are the test set, as defined by their authors.
    """
    _require_folder(root)
    root = root / "recordings" if (root / "recordings").is_dir() else root
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES)
    digits = [_SPOKEN_DIGIT.fullmatch(path.name) for path in files]
    if files and all(digits) and all(path.parent == root for path in files):
        return [Clip(path, path.name, speaker=match[2], label=match[1],
                     split="test" if int(match[3]) < _HELD_OUT else None)
                for path, match in zip(files, digits, strict=True)]
    found = []
    for path in files:
        inside = path.relative_to(root)
        if len(inside.parts) < 2:
            raise InputError(f"{path} is not in a folder of a class: move it into one, or name all files as "
                             "<digit>_<speaker>_<number>.wav")
        found.append(Clip(path, str(inside), label=inside.parts[0]))
    return found


def asterisk(root: Path) -> list[Clip]:
    """Prompts as wav or g722 files with a list `key: text`, in which lines starting with `;` are comments.

    Prompts with a bracket in their text are tones, silence or annotated, and are left out.
    """
    _require_folder(root)
    lists = sorted(root.rglob("core-sounds*.txt")) or sorted(root.rglob("*.txt"))
    if not lists:
        raise InputError(f"data.root={root} has no list of texts (core-sounds-en.txt, with lines `key: text`)")
    keyed = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*"))
             if path.suffix.lower() in _SUFFIXES}
    shortened = {Path(key).name: path for key, path in keyed.items()} | keyed
    found = []
    for number, line in enumerate(_lines(lists[0]), 1):
        if not line.strip() or line.lstrip().startswith(";"):
            continue
        key, colon, text = line.partition(":")
        if not colon:
            raise InputError(f"{lists[0]}, line {number}: expected `key: text`, got {line.strip()[:60]!r}")
        if any(mark in text for mark in "[(<") or key.strip() not in shortened:
            continue
        found.append(Clip(shortened[key.strip()], f"{key.strip()} ({lists[0].name}, line {number})", text.strip()))
    return found


#: The values of `layout=`.
LAYOUTS: dict[str, Callable[[Path], list[Clip]]] = {
    "embedded": embedded, "ljspeech": ljspeech, "manifest": manifest, "folder": folder, "asterisk": asterisk,
}


def _require_folder(root: Path) -> None:
    if not root.is_dir():
        raise InputError(f"data.root={root} {'is not a folder' if root.exists() else 'does not exist'}")


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise InputError(f"{path} does not exist: give the folder or file that this layout reads")
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None


def _rows(path: Path, *, least: int, most: int, form: str):
    """(line number, fields) of a list with the delimiter `|`."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        fields = line.split("|")
        if not least <= len(fields) <= most or not fields[0].strip():
            raise InputError(f"{path}, line {number}: {len(fields)} fields where {form} is expected: {line[:80]!r}")
        yield number, fields


#: Increased when the content of a cached file, or its computation, changes.
FORMAT = 1
_FULL = 0.999  # share of full scale from which a sample counts as clipped
_QUIET = 1e-10  # smallest mean square, so that the level of silence is a number
_G722_RATE = 16000
#: Exceptions from reading a damaged cached file.
_DAMAGED = (OSError, ValueError, KeyError, EOFError, TypeError, RecursionError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Recording:
    """The properties of a sound file, without its samples.

    Attributes:
        digest: hash of the file's content.
        place: the cached mel.
        rate: samples per second of the file.
        samples: number of samples at that rate.
        frames: length of the mel, 0 if the clip is too short.
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
        """The duration."""
        return self.samples / self.rate

    def mel(self) -> Tensor:
        """(n_mels, T) float32.

        Raises:
            RunError: if the cached file is damaged or missing.
        """
        try:
            with np.load(self.place) as kept:
                return torch.from_numpy(kept["mel"])
        except _DAMAGED as error:
            raise RunError(f"{self.place} is damaged ({error}): remove it, and the mel is computed again") from error


class MelFiles:
    """The cache of mels with one configuration.

    The name of a cached file is a hash of the whole configuration and of the recording's content, so that a changed
    setting or recording is computed again, and a renamed one is not.

    Arguments:
        config: settings of the mels.
        folder: of the cached files; the user's cache if None.

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
        """The hash of a recording's content, and the path of its cached mel.

        Raises:
            AudioError: if it cannot be read.
        """
        if path.exists() and not path.is_file():
            raise AudioError(f"{path}: it is {kind_of(path)}, not a file")
        try:
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        except OSError as error:
            raise AudioError(f"{path}: {os.strerror(error.errno) if error.errno else error}") from error
        return digest, self.folder / digest[:2] / f"{digest}.npz"

    def read(self, path: Path) -> Recording:
        """The properties of a recording, from the cache or computed and cached.

        Raises:
            AudioError: for a file that is missing, not sound, empty or not finite.
        """
        digest, place = self.place(path)
        if place.is_file():
            try:
                with np.load(place) as kept:
                    return Recording(digest, place, *(kind(kept[name]) for name, kind in _FACTS.items()))
            except _DAMAGED:
                place.unlink(missing_ok=True)  # for example truncated by a full disk
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
        """Mean and standard deviation of all cells of these mels, in float64, or (`per=band`) of each band.

        Cached under a hash of the recordings' content.
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
    """Mean and population standard deviation over the cells of mels (n_mels, T), of all or (`per=band`) of each band.

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
