"""Single items that a user names on the command line: numbers of the test split, or picture files; and masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from genmodels.data.spec import Batch, DataSpec
from genmodels.errors import InputError
from genmodels.files import kind_of


def read_items(names: list[int | str], datamodule: Callable, spec: DataSpec, key: str) -> Batch:
    """Items as one batch: numbers of the test split, or picture files that are resized to the model's images.

    Arguments:
        names: numbers and paths; labels are in the batch when all are numbers.
        datamodule: a function of no arguments that prepares the data, called where there is a number.
        spec: the data of the model.
        key: the key of the command line that errors name.

    Raises:
        InputError: when an item does not exist, is not a picture, or the model's data are none.
    """
    items, labels = [], []
    for name in names:
        if isinstance(name, int) or str(name).isdigit():
            batch = next(iter(datamodule().loader("test", 1, [int(name)])))
            items.append(batch.x)
            labels.append(batch.cond)
        else:
            items.append(_picture(Path(name), spec, key)[None])
            labels.append(None)
    known = all(label is not None for label in labels)
    return Batch(torch.cat(items), torch.cat(labels) if known else None)


def read_mask(name: str, spec: DataSpec, key: str) -> Tensor:
    """(1, H, W) bool from a picture file, True where it is white (over one half).

    Raises:
        InputError: when there is no such picture, or it is of one colour all over.
    """
    grey = _pixels(Path(name), spec, "L", key)[..., 0] > 127.5
    if bool(grey.all()) or not bool(grey.any()):
        colour = "white: nothing is left to draw" if bool(grey.all()) else "black: nothing is kept"
        raise InputError(f"{key}={name} is all {colour}; white is kept, black is drawn")
    return grey[None]


def _picture(path: Path, spec: DataSpec, key: str) -> Tensor:
    if not (spec.is_image and spec.levels):
        raise InputError(f"{key}={path}: these data are no images; name an item of the test split by its number")
    pixels = _pixels(path, spec, "L" if spec.event_shape[0] == 1 else "RGB", key).permute(2, 0, 1)
    return (pixels * ((spec.levels - 1) / 255)).round().to(torch.uint8)


def _pixels(path: Path, spec: DataSpec, mode: str, key: str) -> Tensor:
    """(H, W, channels) float32 of 0 to 255, in the size of the model's images."""
    _, height, width = spec.event_shape
    if path.exists() and not path.is_file():
        raise InputError(f"{key}: {path} is {kind_of(path)}, not a picture")
    try:
        with Image.open(path) as image:
            # Means of whole boxes, so that a picture enlarged by whole pixels comes back as it was.
            how = Image.Resampling.BOX if image.width >= width else Image.Resampling.BILINEAR
            image = image.convert(mode).resize((width, height), how)
    except FileNotFoundError as error:
        raise InputError(f"{key}: there is no file {path}") from error
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{key}: {path} is not a picture") from error
    return torch.from_numpy(np.asarray(image, dtype=np.float32)).reshape(height, width, -1)
