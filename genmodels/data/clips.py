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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError, counted
from genmodels.core.files import cache_folder, kind_of, write_whole
from genmodels.speech.audio import AudioError, MelConfig, log_mel, read_channels, resample

#: The clips in the source of the package (wheels leave them out), and those held out; the rest is for training.
EMBEDDED = Path(__file__).parent / "ljspeech"
_EMBEDDED_SPLITS = {"val": ("LJ001-0061", "LJ001-0125"),
                    "test": ("LJ001-0013", "LJ001-0043", "LJ001-0104", "LJ001-0126")}
_SUFFIXES = (".wav", ".g722")
_SPOKEN_DIGIT = re.compile(r"(\d)_([^_]+)_(\d+)\.wav")
MISSING = "there is no such file"  # the problem of such a clip
_HELD_OUT = 5  # first recordings of each digit and speaker, the test set of the Free Spoken Digits


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
        problem: what is wrong with its row or file, as far as the list shows, or None.
    """

    path: Path
    where: str
    text: str | None = None
    speaker: str | None = None
    label: str | None = None
    split: str | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        """Its name without the line of its list.

        Example:
            >>> Clip(Path("a.wav"), "take (1).wav (clips.csv, line 2)").name, Clip(Path("b.wav"), "take (2).wav").name
            ('take (1).wav', 'take (2).wav')
        """
        return self.where.rpartition(" (")[0] if re.search(r" \([^()]*, line \d+\)$", self.where) else self.where


def read_clips(layout: str, root: Path | None, *, allow_partial: bool = False) -> list[Clip]:
    """The clips of a layout, in a fixed order.

    Arguments:
        layout: one of `LAYOUTS`.
        root: the folder, or the file of a manifest; None for the embedded clips.
        allow_partial: leave out rows whose file is missing.

    Rows with another number of fields than the others, and those whose file is missing, have a `problem`.

    Raises:
        InputError: for a missing folder or list, one without recordings, or an installation without the embedded clips.

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
    found = []
    for clip in LAYOUTS[layout](EMBEDDED if root is None else root):
        if clip.problem is None and not clip.path.is_file():
            if allow_partial:
                continue
            clip = replace(clip, problem=MISSING)
        found.append(clip)
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
    for number, fields in _rows(root / "metadata.csv"):
        where = f"{fields[0].strip() or 'no name'} (metadata.csv, line {number})"
        problem = _row_problem(fields, (2, 3), "id|text or id|text|text in words")
        if problem is not None:
            found.append(Clip(root / "metadata.csv", where, problem=problem))
            continue
        text = fields[2] if len(fields) == 3 and fields[2].strip() else fields[1]
        found.append(Clip(folder / f"{fields[0].strip()}.wav", where, text))
    return found


def manifest(root: Path) -> list[Clip]:
    """A list `path|text` or `path|text|speaker`, the paths relative to it."""
    found, rows = [], list(_rows(root))
    usual = Counter(len(fields) for _, fields in rows if len(fields) in (2, 3)).most_common(1)
    form = "path|text (as in most lines)" if usual and usual[0][0] == 2 else "path|text|speaker (as in most lines)"
    named = any(len(fields) == 3 and fields[2].strip() for _, fields in rows)
    for number, fields in rows:
        where = f"{fields[0].strip() or 'no name'} ({root.name}, line {number})"
        problem = _row_problem(fields, (usual[0][0],) if usual else (), form)
        speaker = fields[2].strip() if len(fields) == 3 and named else None
        if speaker == "" and problem is None:
            problem = "the name of the speaker is missing"
        found.append(Clip(root, where, problem=problem) if problem is not None else
                     Clip(root.parent / fields[0].strip(), where, fields[1], speaker))
    return found


def folder(root: Path) -> list[Clip]:
    """One folder for each class; or files `<digit>_<speaker>_<number>.wav` as in the Free Spoken Digits.

    Of the digits, recordings 0 to 4 are the test set, as defined by their authors.
    """
    _require_folder(root)
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if files and all(path.is_relative_to(root / "recordings") for path in files):
        root = root / "recordings"
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
        where = f"{key.strip()} ({lists[0].name}, line {number})"
        if not colon:
            found.append(Clip(lists[0], where, problem="there is no colon where key: text is expected"))
            continue
        if any(mark in text for mark in "[(<") or key.strip() not in shortened:
            continue
        found.append(Clip(shortened[key.strip()], where, text.strip()))
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
        raise InputError(f"{path} {'is not a file' if path.exists() else 'does not exist'}: give the folder or file "
                         "that this layout reads")
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # `splitlines` also cuts at U+2028 within a text
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of a list with the delimiter `|`."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, line.split("|")


def _row_problem(fields: list[str], numbers: tuple[int, ...], form: str) -> str | None:
    """What is wrong with a row that should have one of these numbers of fields and a name, or None."""
    if len(fields) in numbers and fields[0].strip():
        return None
    if len(fields) in numbers:
        return "its first field, which names the recording, is empty"
    return f"{counted(len(fields), 'field')} where {form} is expected: {'|'.join(fields)[:80]!r}"


#: Increased when the content of a cached file, or its computation, changes.
FORMAT = 2
_CLIPPED = 0.999  # share of full scale from which a sample counts as clipped
_LEAST_POWER = 1e-10  # smallest mean square, so that the level of silence is a number
_G722_RATE = 16000
#: What a cached file holds besides the mel.
_PROPERTIES = {"rate": int, "samples": int, "frames": int, "level": float, "clipped": float}
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
        clipped: share of samples at full scale in any channel.
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

    Example:
        >>> found = MelFiles(MelConfig()).read(read_clips("embedded", None)[0].path)
        >>> found.rate, found.samples, found.frames, found.mel().shape
        (22050, 41885, 163, torch.Size([80, 163]))
    """

    def __init__(self, config: MelConfig):
        self.config = config
        settings = json.dumps({"format": FORMAT, **asdict(config)}, sort_keys=True)
        name = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
        self.folder = cache_folder() / "mels" / name

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
                    return Recording(digest, place, *(kind(kept[name]) for name, kind in _PROPERTIES.items()))
            except _DAMAGED:
                place.unlink(missing_ok=True)  # for example truncated by a full disk
        channels, rate = read_sound(path)
        wave = channels.mean(0).float()
        properties = {"rate": rate, "samples": len(wave), "frames": 0,
                      "level": 10 * math.log10(max(float(wave.double().square().mean()), _LEAST_POWER)),
                      "clipped": float((channels.abs() >= _CLIPPED).any(0).double().mean())}
        sound = resample(wave, rate, self.config.sample_rate)
        if len(sound) >= self.config.shortest:
            mel = log_mel(sound, self.config).numpy()
        else:
            mel = np.zeros((self.config.n_mels, 0), np.float32)
        properties["frames"] = mel.shape[1]
        write_whole(place, lambda file: np.savez(file, mel=mel, **properties))
        return Recording(digest, place, **properties)

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
    variance = squares / count - mean.square()
    variance = variance.where(~(variance <= 1e-13 * mean.square()), 0.0)  # rounding of constant cells
    return {"per": per, "mean": mean.tolist(), "std": variance.sqrt().tolist()}


def read_sound(path: Path) -> tuple[Tensor, int]:
    """The channels (C, N) and the rate of a wav file, or of a G.722 file by the package G722.

    Raises:
        AudioError: for a file that is not sound, or a missing package.
    """
    if path.suffix.lower() != ".g722":
        return read_channels(path)
    try:
        from G722 import G722
    except ImportError:
        raise AudioError(f"{path}: g722 files need a decoder: pip install 'genmodels[asterisk]'") from None
    samples = np.asarray(G722(_G722_RATE, 64000).decode(path.read_bytes()), dtype=np.float32)
    if len(samples) == 0:
        raise AudioError(f"{path}: there is no sound in it")
    return torch.from_numpy(samples / 2.0**15)[None], _G722_RATE
