"""The way between two items through the latents of a flow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from genmodels.data.spec import Batch, DataSpec
from genmodels.errors import InputError


def interpolate(model, ends: Batch, frames: int, weights: str | float = "ema") -> Tensor:
    """Items whose latents lie between those of two items, `(frames, *event)`; the first and the last are the ends.

        z(w) = ((1 - w) z_0 + w z_1) / sqrt((1 - w)^2 + w^2)

    Arguments:
        model: a flow model, with `latents` and `decode`.
        ends: a batch of two; where the model is conditional, both must be of one class.
        frames: how many, at least 2.
        weights: `ema`, `raw`, or one of the decays kept.

    Raises:
        InputError: when a conditional model is given ends of two classes.
    """
    cond = None
    if model.num_classes is not None:
        if ends.cond is None or bool(ends.cond[0] != ends.cond[1]):
            raise InputError("interpolate: this model is conditional, choose two items of one class")
        cond = ends.cond[:1].expand(frames)
    latents = model.latents(ends, weights)
    between = latents.rows(slice(0, 1)).interpolate(latents.rows(slice(1, 2)), torch.linspace(0, 1, frames))
    return model.decode(between, cond, weights)


def read_ends(names: list[int | str], datamodule, spec: DataSpec) -> Batch:
    """Two items: numbers of the test split, or picture files that are resized to the model's images.

    Raises:
        InputError: when there are not two, one does not exist, or is not a picture.
    """
    if len(names) != 2:
        raise InputError(
            f"interpolate takes two items, got {len(names)}: interpolate=[3,17] or interpolate=[a.png,b.png]"
        )
    items, labels = [], []
    for name in names:
        if isinstance(name, int) or str(name).isdigit():
            batch = next(iter(datamodule().loader("test", 1, [int(name)])))
            items.append(batch.x)
            labels.append(batch.cond)
        else:
            items.append(_picture(Path(name), spec)[None])
            labels.append(None)
    known = all(label is not None for label in labels)
    return Batch(torch.cat(items), torch.cat(labels) if known else None)


def _picture(path: Path, spec: DataSpec) -> Tensor:
    channels, height, width = spec.event_shape
    try:
        with Image.open(path) as image:
            # Means of whole boxes, so that a picture enlarged by whole pixels comes back as it was.
            how = Image.Resampling.BOX if image.width >= width else Image.Resampling.BILINEAR
            image = image.convert("L" if channels == 1 else "RGB").resize((width, height), how)
    except FileNotFoundError as error:
        raise InputError(f"interpolate: there is no file {path}") from error
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"interpolate: {path} is not a picture") from error
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)).reshape(height, width, channels).permute(2, 0, 1)
    return (pixels * ((spec.levels - 1) / 255)).round().to(torch.uint8)
