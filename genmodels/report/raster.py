"""Pictures made of pixels, as addresses that hold their own data: sheets of samples and maps of densities."""

from __future__ import annotations

import base64
import io
import math

import numpy as np
import torch
from PIL import Image

from genmodels.data.spec import DataSpec
from genmodels.evaluation.pictures import images_of


def address(picture: Image.Image) -> str:
    """A picture as a `data:` address, PNG inside.

    Example:
        >>> address(Image.new("L", (1, 1)))[:22]
        'data:image/png;base64,'
    """
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def is_image(data: dict) -> bool:
    """Whether items of a data set (its description in a report) can be seen."""
    shape = data.get("event_shape") or []
    return len(shape) == 3 and shape[0] in (1, 3)


def tiles(x: np.ndarray, data: dict, smallest: int = 32) -> list[Image.Image]:
    """Items (n, C, H, W) in the data's own units as pictures, enlarged by whole pixels."""
    spec = DataSpec(str(data.get("name")), tuple(data["event_shape"]), levels=data.get("levels"))
    return images_of(torch.as_tensor(np.ascontiguousarray(x)), spec, smallest)


def sheet(pictures: list[Image.Image], columns: int, gap: int = 2) -> Image.Image:
    """Pictures of one size in rows, with nothing between them: the page shows through.

    Example:
        >>> sheet([Image.new("L", (8, 8), 255)] * 3, columns=2).size
        (18, 18)
    """
    width, height = pictures[0].size
    rows = math.ceil(len(pictures) / columns)
    mode = "RGBA" if pictures[0].mode == "RGB" else "LA"
    whole = Image.new(mode, (columns * (width + gap) - gap, rows * (height + gap) - gap))
    for k, picture in enumerate(pictures):
        whole.paste(picture, (k % columns * (width + gap), k // columns * (height + gap)))
    return whole


def density_map(log_density: np.ndarray, top: float) -> Image.Image:
    """Densities (H, W), row 0 at the bottom, as colours from 0 (dark) to `top` (light); what is not finite is red."""
    from matplotlib import colormaps

    with np.errstate(over="ignore"):
        values = np.exp(np.asarray(log_density, dtype=np.float64))
    colours = (colormaps["viridis"](np.clip(np.nan_to_num(values / top), 0, 1))[..., :3] * 255).round().astype(np.uint8)
    colours[np.isnan(values)] = (220, 30, 30)
    return Image.fromarray(colours[::-1])
