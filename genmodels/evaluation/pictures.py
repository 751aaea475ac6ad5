"""Samples as pictures: grids of images, scatter plots of 2-D vectors, curves of longer ones."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from genmodels.data.spec import DataSpec


def to_uint8(x: Tensor, levels: int) -> Tensor:
    """Integer levels 0..levels-1 stretched to 0..255."""
    return (x.to(torch.float32) * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)


def images_of(x: Tensor, spec: DataSpec, smallest: int = 0) -> list[Image.Image]:
    """One PIL image for each example (N, C, H, W), enlarged by whole pixels until it is `smallest` high."""
    levels = spec.levels or 256
    pixels = to_uint8(x, levels) if spec.levels else (x.clamp(0, 1) * 255).to(torch.uint8)
    if pixels.shape[1] not in (1, 3):
        pixels = pixels[:, :1]
    zoom = max(1, math.ceil(smallest / pixels.shape[2])) if smallest else 1
    pixels = pixels.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    arrays = pixels.permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(a[..., 0] if a.shape[-1] == 1 else a) for a in arrays]


def grid(tiles: list[Image.Image], columns: int | None = None, gap: int = 2) -> Image.Image:
    """Images of one size in rows, on white."""
    columns = columns or math.ceil(math.sqrt(len(tiles)))
    width, height = tiles[0].size
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new(tiles[0].mode, (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
    for k, tile in enumerate(tiles):
        sheet.paste(tile, (gap + (k % columns) * (width + gap), gap + (k // columns) * (height + gap)))
    return sheet


def scatter(x: Tensor, title: str = "") -> Image.Image:
    """A scatter plot of points (N, 2) with equal axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = x.numpy()
    axes.scatter(points[:, 0], points[:, 1], s=3, alpha=0.5, linewidths=0)
    axes.set_aspect("equal")
    axes.set_title(title)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def columns_for(spec: DataSpec, n: int, labelled: bool) -> int | None:
    """Columns of a grid of n samples: a column for each class when classes come in turn, else None (a square)."""
    classes = spec.num_classes if labelled else None
    return classes if classes is not None and 2 <= classes <= 20 and n > classes else None


def picture_of(x: Tensor, spec: DataSpec, columns: int | None = None) -> Image.Image | None:
    """The picture that suits the data: a grid of images or mels, a scatter plot of points; None for other vectors."""
    if spec.mel is not None:
        from genmodels.evaluation.mel_pictures import mel_sheet

        return mel_sheet(x, columns)
    if spec.is_image:
        return grid(images_of(x, spec, smallest=32), columns)
    if spec.event_shape == (2,):
        return scatter(x, f"{len(x)} samples")
    return None
