"""Any folder of images: resized, cropped, with classes from its sub-folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError, at_least, one_of
from genmodels.core.files import cache_folder, kind_of, write_whole
from genmodels.data.base import SPLITS, DataModule, data_root, mixed, rows_of_splits, split_fractions
from genmodels.data.loading import BatchDataset, TensorData

SUFFIXES = frozenset(".png .jpg .jpeg .jfif .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .jp2".split())
SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
               "test": "test", "testing": "test"}
INDEX_NAME = ".genmodels-index.json"
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # tags of TIFF
_SINGLE_PICTURE = ("MPO",)  # formats whose further frames are other views of the same photograph


def image_files(root: Path) -> list[str]:
    """Sorted paths, relative to root, of all files with the suffix of an image, hidden ones excepted.

    Raises:
        InputError: for a folder that cannot be read, whose images would be missing.
    """

    def stop(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read ({error.strerror}): make it readable, or move it elsewhere")

    found, visited = [], set()
    for folder, below, files in os.walk(root, onerror=stop, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:  # a link that leads back
            below.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        below[:] = [name for name in below if not name.startswith((".", "__MACOSX", "lost+found"))]
        below.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))  # a folder before links to it
        images = (f for f in files if not f.startswith(".") and os.path.splitext(f)[1].lower() in SUFFIXES)
        found += [os.path.relpath(os.path.join(folder, name), root) for name in images]
    return sorted(found)


def decode(file: Path | BinaryIO, size: int, channels: int) -> Tensor:
    """One image as uint8 levels (channels, size, size): shorter side resized to `size`, centre cropped.

    Transparent parts become white, values of 12 and 16 bits are scaled to 8 bits, palettes, CMYK and the camera's
    orientation are converted. A ValueError or OSError explains why a file cannot be used.
    """
    if isinstance(file, Path) and not file.is_file() and file.exists():
        raise ValueError(f"is {kind_of(file)}, not a file")
    with Image.open(file) as image:
        picture = fitted(image, (size, size), "L" if channels == 1 else "RGB", Image.Resampling.BICUBIC)
    array = np.array(picture, dtype=np.uint8).reshape(size, size, channels)
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def fitted(image: Image.Image, size: tuple[int, int], mode: str, resampling: Image.Resampling) -> Image.Image:
    """An opened picture with 8 bits per channel, upright, resized and cropped around its centre to (width, height).

    A ValueError or OSError explains why a file cannot be used.
    """
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format not in _SINGLE_PICTURE:
        raise ValueError(f"holds {frames} frames, not one picture")
    image.load()
    tags = getattr(image, "tag_v2", {})
    largest = 2 ** tags.get(_BITS_PER_SAMPLE, (16,))[0] - 1
    inverted = tags.get(_PHOTOMETRIC) == 0  # white is 0, which Pillow does not heed for more than 8 bits
    upright = _eight_bit(ImageOps.exif_transpose(image), image.format, largest, inverted)
    return ImageOps.fit(upright.convert(mode), size, resampling)


def _eight_bit(image: Image.Image, form: str | None, largest: int, inverted: bool) -> Image.Image:
    """The same picture, of a file of such a format and wide values, with 8 bits per channel and no transparency."""
    if image.mode.startswith("I;16") or (image.mode == "I" and form in ("PNG", "PPM")):
        wide = np.asarray(image).astype(np.int64)
        wide = largest - wide if inverted else wide
        levels = ((wide * 255 + largest // 2) // largest).astype(np.uint8)
        levels[wide == image.info.get("transparency", -1)] = 255
        return Image.fromarray(levels)
    if image.mode in ("I", "F"):
        raise ValueError(f"holds values ({image.mode}, 32 bits) of no known range")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image


def try_decode(file: Path | BinaryIO, size: int, channels: int) -> Tensor | str:
    """The image, or a phrase that explains why it cannot be decoded."""
    try:
        return decode(file, size, channels)
    except Exception as error:  # decoders raise all kinds of exceptions for damaged files
        return _reason(file, error)


def _reason(file: Path | BinaryIO, error: Exception) -> str:
    if isinstance(file, Path) and file.is_file() and file.stat().st_size == 0:
        return "empty file"
    return "not an image" if isinstance(error, Image.UnidentifiedImageError) else in_one_line(error)


def in_one_line(error: Exception) -> str:
    """The whole message of an error on one line, or its class if there is none."""
    return " ".join(str(error).split()) or type(error).__name__


def in_threads(function: Callable, items: Sequence) -> list:
    """[function(item) for item in items] in threads: decoding releases the interpreter lock."""
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        return list(pool.map(function, items))


def find_problems(root: Path, files: Sequence[str], size: int, channels: int) -> dict[str, str]:
    """The files that cannot be used, with the reason: every file is decoded once and the result kept in an index file.

    The index (one entry per path, with size, time and channels) is in `root`, or in the user's cache folder if root
    cannot be written.
    """
    known = _read_index(root)
    stamps = {name: [*_stamp(root / name), channels] for name in files}
    unknown = [name for name in files if known.get(name, [None])[:3] != stamps[name]]

    def fault(name: str) -> str | None:
        result = try_decode(root / name, size, channels)
        return result if isinstance(result, str) else None  # without the images, which may not fit in memory

    for name, reason in zip(unknown, in_threads(fault, unknown), strict=True):
        known[name] = [*stamps[name], reason]
    if unknown:
        _write_index(root, {name: known[name] for name in files})
    return {name: known[name][3] for name in files if known[name][3] is not None}


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:  # a link to nowhere
        return [-1, -1]
    return [status.st_size, status.st_mtime_ns]


def _contents(root: Path, files: Sequence[str]) -> str:
    """A hash of the sizes of all files, and of the beginnings of up to a thousand, spread over them."""
    content = hashlib.sha256(str([_stamp(root / name)[0] for name in files]).encode())
    for name in files[:: -(-len(files) // 1000)]:
        with open(root / name, "rb") as file:
            content.update(file.read(2**16))
    return content.hexdigest()


def _index_places(root: Path) -> list[Path]:
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()
    return [root / INDEX_NAME, cache_folder() / f"index-{digest[:16]}.json"]


def _read_index(root: Path) -> dict[str, list]:
    for place in _index_places(root):
        try:
            if place.is_file():
                content = json.loads(place.read_text(encoding="utf-8"))
                if content["format"] == 2 and all(map(_is_entry, content["files"].values())):
                    return content["files"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # damaged, or written by another program: every file is decoded again
    return {}


def _is_entry(entry) -> bool:
    size, time, channels, reason = entry
    return type(size) is type(time) is type(channels) is int and (reason is None or type(reason) is str)


def _write_index(root: Path, files: dict[str, list]) -> None:
    text = json.dumps({"format": 2, "files": files})
    for place in _index_places(root):
        with contextlib.suppress(RunError):  # try the next place; without any, files are decoded again next time
            return write_whole(place, lambda file: file.write(text), mode="w")


class FileData(Dataset):
    """A split whose images are decoded on request (in the loader's workers)."""

    def __init__(self, root: Path, files: Sequence[str], cond: Tensor | None, size: int, channels: int):
        self.root, self.files, self.cond, self.size, self.channels = root, list(files), cond, size, channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, positions: Sequence[int] | Tensor) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.int64)
        images = []
        for position in index.tolist():
            image = try_decode(self.root / self.files[position], self.size, self.channels)
            if isinstance(image, str):
                raise RunError(f"{self.root / self.files[position]} can no longer be read: {image}")
            images.append(image)
        return Batch(torch.stack(images), None if self.cond is None else self.cond[index], index=index)


_MEMORY = 512 * 2**20  # bytes up to which decoded images are held in memory
_THREADS = min(8, os.cpu_count() or 1)  # that decode at once
_DECODED = 3  # bytes a value takes while an image is resized
_NAMED = 10  # unusable files named by an error


class ImageFolder(DataModule):
    """All images below a folder as (channels, size, size), 256 levels.

    If every image is in a sub-folder and there are at least two of them, the sub-folders of the first level are the
    classes. If the sub-folders of the first level are train, val (valid, validation) and test (training, Test, ...),
    they are the splits, and classes are one level deeper; a missing val or test is held out of train.

    Arguments:
        root: the folder.
        size: height and width of the images: the shorter side is resized to it, the longer one cropped at both ends.
        channels: 3 for colour, 1 for grey.
        val_fraction, test_fraction: share of the images held out for validation and test.
        skip_bad: leave out images that cannot be used (with a warning) instead of stopping.
        cache: "memory" decodes once and holds all images, "none" decodes in the workers at every epoch, "auto" is
            "memory" up to 512 MB.
        flip: mirror training images at random.
        batch_size, num_workers, seed: see `DataModule`.

    Errors: `InputError` for a missing or empty folder, and for images that are damaged, empty, animated or of unknown
    value range, all before training.
    """

    name = "image_folder"

    def __init__(
        self,
        *,
        root: str,
        size: int = 32,
        channels: Literal[1, 3] = 3,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        skip_bad: bool = False,
        cache: Literal["auto", "memory", "none"] = "auto",
        flip: bool = True,
        **shared,
    ):
        super().__init__(**shared)
        at_least(1, **{"data.size": size})
        one_of("data.channels", channels, (1, 3))
        one_of("data.cache", cache, ("auto", "memory", "none"))
        self.root, self.size, self.channels = Path(data_root(root)), size, channels
        self.fractions = split_fractions(val_fraction, test_fraction)
        self.skip_bad, self.cache, self.flip = skip_bad, cache, flip
        self._examined: tuple[list[str], Tensor | None, dict[str, str]] | None = None

    def load(self):
        """Find all images and those that cannot be used, then split the rest."""
        files, images, bad = self._examined or self._examine()
        if bad and not self.skip_bad:
            raise InputError(
                f"{len(bad)} of {len(files)} images in {self.root} cannot be used: {listed(bad)}; "
                "repair or remove them, or set data.skip_bad=true to leave them out"
            )
        if bad:
            warnings.warn(f"left out {len(bad)} of {len(files)} images in {self.root}: {listed(bad)}", stacklevel=2)
        files = [name for name in files if name not in bad]
        if not files:
            raise InputError(f"none of the images in {self.root} can be used")
        parts, classes, labels = _arrange(files)
        splits: dict[str, BatchDataset] = {}
        for split, ordered in rows_of_splits(parts, labels, len(files), self.fractions, self.seed).items():
            rows = ordered if split == "train" else mixed(ordered, self.seed)  # files are sorted by their class
            if images is not None:
                splits[split] = TensorData(images, labels, rows)
            else:
                chosen = [files[row] for row in rows.tolist()]
                splits[split] = FileData(
                    self.root, chosen, None if labels is None else labels[rows], self.size, self.channels
                )
        name = self.root.resolve().name or self.name
        shape = (self.channels, self.size, self.size)
        names = hashlib.sha256("\n".join(files).encode("utf-8", "surrogateescape")).hexdigest()
        fingerprint = f"{len(files)} pictures, names {names[:12]}, contents {_contents(self.root, files)[:12]}"
        return DataSpec(name, shape, 256, len(classes) or None, classes, fingerprint=fingerprint), splits

    def problems(self) -> list[str]:
        """One line for each image that stops training; without any, the problems that the base class finds."""
        try:
            self._examined = self._examine()  # kept for `load`, which need not decode the images again
            bad = {} if self.skip_bad else self._examined[2]
            return [f"{self.root / name}: {reason}" for name, reason in bad.items()] or super().problems()
        except InputError as error:
            return [str(error)]
        finally:
            self._examined = None

    def _examine(self) -> tuple[list[str], Tensor | None, dict[str, str]]:
        """All files, the usable images if they are held in memory, and the unusable files with the reason."""
        if not self.root.is_dir():
            what = "is not a folder" if self.root.exists() else "does not exist"
            raise InputError(f"data.root={self.root} {what}: give a folder of images")
        files = image_files(self.root)
        if not files:
            raise InputError(f"no images below data.root={self.root} (looked for {' '.join(sorted(SUFFIXES))})")
        at_once = self.channels * self.size**2 * max(4 * self.batch_size, _DECODED * _THREADS) / 1e9
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else math.inf
        if at_once > memory:
            raise InputError(f"data.size={self.size}: {self.batch_size} images at once would take {at_once:,.0f} GB of "
                             f"{memory:,.0f} GB of memory: lower data.size or data.batch_size")
        small = len(files) * self.channels * self.size**2 <= _MEMORY
        if self.cache == "none" or (self.cache == "auto" and not small):
            return files, None, find_problems(self.root, files, self.size, self.channels)
        results = in_threads(lambda name: try_decode(self.root / name, self.size, self.channels), files)
        bad = {name: result for name, result in zip(files, results, strict=True) if isinstance(result, str)}
        images = [result for result in results if not isinstance(result, str)]
        return files, torch.stack(images) if images else None, bad


def listed(bad: dict[str, str]) -> str:
    """The first unusable files with their reasons, for a message."""
    shown = [f"{name!r} ({reason})" for name, reason in list(bad.items())[:_NAMED]]
    return ", ".join(shown) + (f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "")


def _arrange(files: Sequence[str]) -> tuple[Tensor | None, tuple[str, ...], Tensor | None]:
    """The number of each file's split (None: not given by folders), class names and labels."""
    parts = [Path(name).parts for name in files]
    tops = [SPLIT_NAMES.get(part[0].lower()) if len(part) > 1 else None for part in parts]
    # Folders of pictures alone may be classes of these names: a train and a plane.
    nested = any(top and len(part) > 2 for top, part in zip(tops, parts, strict=True))
    if None in tops and (nested or {"train"} < {*tops} - {None}):
        other = parts[tops.index(None)][0]
        named = ", ".join(sorted({part[0] for part, top in zip(parts, tops, strict=True) if top}))
        if any(len(part) != 2 for part in parts):
            raise InputError(f"{other!r} lies next to the folders of the splits ({named}), which would be mixed: move "
                             "it elsewhere, or into one of them, or rename these if they are classes")
        print(f"{named} are classes here and not splits, because of {other!r} next to them")
    given = None not in tops and "train" in tops and (len(set(tops)) > 1 or any(len(part) > 2 for part in parts))
    splits = torch.tensor([SPLITS.index(top) for top in tops]) if given else None
    folders = [part[given:-1] for part in parts]
    names = sorted({folder[0] for folder in folders if folder})
    stray = [name for name, folder in zip(files, folders, strict=True) if not folder]
    if len(names) < 2 or stray:
        if len(names) > 1:
            print(f"there are no classes: {len(stray):,} of {len(files):,} images, such as {stray[0]!r}, are in no "
                  "class folder")
        return splits, (), None
    numbers = {name: number for number, name in enumerate(names)}
    return splits, tuple(names), torch.tensor([numbers[folder[0]] for folder in folders])
