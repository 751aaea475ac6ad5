"""Image files: which there are, whether each can be used, and how one becomes levels (C, size, size)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from genmodels.data.spec import Batch
from genmodels.errors import RunError
from genmodels.files import kind_of, write_whole
from genmodels.user_cache import cache_folder

SUFFIXES = frozenset(".png .jpg .jpeg .jfif .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .jp2".split())
INDEX_NAME = ".genmodels-index.json"
_SINGLE_PICTURE = ("MPO",)  # formats that hold other views of the same photograph as further frames


def image_files(root: Path) -> list[str]:
    """Paths, relative to root and sorted, of all files with the suffix of an image; what is hidden is left out."""
    found, visited = [], set()
    for folder, below, files in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:  # a link that leads back
            below.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        below[:] = [name for name in below if not name.startswith((".", "__MACOSX"))]
        images = (f for f in files if not f.startswith(".") and os.path.splitext(f)[1].lower() in SUFFIXES)
        found += [os.path.relpath(os.path.join(folder, name), root) for name in images]
    return sorted(found)


def decode(path: Path, size: int, channels: int) -> Tensor:
    """One image as uint8 levels (channels, size, size): shorter side resized to `size`, centre cropped.

    Transparent parts lie on white, 16-bit values are divided by 257, palettes, CMYK and the camera's orientation are
    resolved. A ValueError or OSError says why a file cannot be used.
    """
    if not path.is_file() and path.exists():
        raise ValueError(f"is {kind_of(path)}, not a file")
    with Image.open(path) as image:
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format not in _SINGLE_PICTURE:
            raise ValueError(f"holds {frames} frames, not one picture")
        image.load()
        mode = "L" if channels == 1 else "RGB"
        picture = ImageOps.fit(_eight_bit(ImageOps.exif_transpose(image)).convert(mode), (size, size), Image.BICUBIC)
    array = np.array(picture, dtype=np.uint8).reshape(size, size, channels)
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def _eight_bit(image: Image.Image) -> Image.Image:
    """The same picture with 8 bits per channel and no transparency."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        wide = np.asarray(image).astype(np.int64)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its values ({image.mode}, 32 bits) have no known range")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image


def try_decode(path: Path, size: int, channels: int) -> Tensor | str:
    """The image, or one phrase that says why there is none."""
    try:
        return decode(path, size, channels)
    except Exception as error:  # decoders of broken files raise whatever they trip over
        return _reason(path, error)


def _reason(path: Path, error: Exception) -> str:
    if path.is_file() and path.stat().st_size == 0:
        return "empty file"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image"
    return " ".join(str(error).split()) or type(error).__name__


def in_threads(function: Callable, items: Sequence) -> list:
    """[function(item) for item in items], several at a time: decoding leaves the interpreter free."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def find_problems(root: Path, files: Sequence[str], size: int, channels: int) -> dict[str, str]:
    """Which files cannot be used, and why: every file is decoded once, what was found is kept in an index file.

    The index (one entry per path, with size and time of the file) lies in `root`, or in the user's cache folder where
    root cannot be written.
    """
    known = _read_index(root)
    stamps = {name: _stamp(root / name) for name in files}
    unknown = [name for name in files if known.get(name, [None])[:2] != stamps[name]]
    results = in_threads(lambda name: try_decode(root / name, size, channels), unknown)
    for name, result in zip(unknown, results, strict=True):
        known[name] = [*stamps[name], result if isinstance(result, str) else None]
    if unknown:
        _write_index(root, {name: known[name] for name in files})
    return {name: known[name][2] for name in files if known[name][2] is not None}


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:  # a link to nowhere
        return [-1, -1]
    return [status.st_size, status.st_mtime_ns]


def _index_places(root: Path) -> list[Path]:
    return [root / INDEX_NAME, cache_folder() / f"index-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.json"]


def _read_index(root: Path) -> dict[str, list]:
    for place in _index_places(root):
        try:
            if place.is_file():
                content = json.loads(place.read_text(encoding="utf-8"))
                if content["format"] == 1 and all(map(_is_entry, content["files"].values())):
                    return content["files"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # cut, or written by something else: every file is looked at again
    return {}


def _is_entry(entry) -> bool:
    size, time, reason = entry
    return type(size) is type(time) is int and (reason is None or type(reason) is str)


def _write_index(root: Path, files: dict[str, list]) -> None:
    text = json.dumps({"format": 1, "files": files})
    for place in _index_places(root):
        with contextlib.suppress(RunError):  # the next place, or none: then every file is looked at again
            return write_whole(place, lambda file: file.write(text), mode="w")


class FileData(Dataset):
    """A split whose images are decoded when they are asked for (in the loader's workers)."""

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
                raise RunError(f"{self.root / self.files[position]} could be read before, but no more: {image}")
            images.append(image)
        return Batch(torch.stack(images), None if self.cond is None else self.cond[index], index=index)
