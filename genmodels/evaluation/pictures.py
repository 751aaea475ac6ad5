"""Samples as pictures: grids of images, scatter plots of 2-D vectors, curves of longer ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from genmodels.data.spec import DataSpec

LEGIBLE = 64  # pixels that an image of a grid is high at least
_LINE, _MARGIN = 15, 8  # pixels of a line of words, and around the number of a row


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


def grid(
    tiles: list[Image.Image], columns: int | None = None, gap: int = 2, *, names: Sequence[str] = (),
    numbers: Sequence[int] = (),
) -> Image.Image:
    """Images of one size in rows, on white, with what they are in words.

    Arguments:
        tiles: the images.
        columns: how many stand in a row; default a square.
        gap: pixels between them.
        names: of each image; told once over a column that has one name, else over each image.
        numbers: of each image; told before a row, of its first image, where there are several rows.
    """
    columns = columns or math.ceil(math.sqrt(len(tiles)))
    width, height = tiles[0].size
    rows = math.ceil(len(tiles) / columns)
    kinds = [set(names[column::columns]) for column in range(columns)] if names else []
    over_all = all(len(kind) <= 1 for kind in kinds)  # a column has one name
    head, line = (_LINE if names and over_all else 0), (_LINE if names and not over_all else 0)
    before = [str(numbers[row * columns]) for row in range(rows)] if len(numbers) and rows > 1 else []
    font = _font()
    side = math.ceil(max(map(font.getlength, before), default=-_MARGIN)) + _MARGIN
    sheet = Image.new(tiles[0].mode, (side + columns * (width + gap) + gap, head + rows * (height + line + gap) + gap),
                      "white")
    pen = ImageDraw.Draw(sheet)
    for k, tile in enumerate(tiles):
        row, column = divmod(k, columns)
        x, y = side + gap + column * (width + gap), head + gap + row * (height + line + gap) + line
        sheet.paste(tile, (x, y))
        if names and (line or row == 0) and not (head and column and names[k] == names[0] and len(set(names)) == 1):
            pen.text((x + width / 2, y - 4), _fitting(names[k], width, font), fill="black", font=font, anchor="ms")
        if before and column == 0:
            pen.text((side - _MARGIN / 2, y + height / 2), before[row], fill="black", font=font, anchor="rm")
    return sheet


def stack(pictures: list[Image.Image]) -> Image.Image:
    """Pictures below each other, on white."""
    sheet = Image.new(pictures[-1].mode, (max(p.width for p in pictures), sum(p.height for p in pictures)), "white")
    for k, picture in enumerate(pictures):
        sheet.paste(picture, (0, sum(p.height for p in pictures[:k])))
    return sheet


@cache
def _font() -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", _LINE - 4)


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """As much of a text as a width has room for."""
    while font.getlength(text) > width and len(text) > 1:
        text = text[:-2] + "\u2026"
    return text


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


def in_turn(cond: Sequence[int], index: Sequence[int]) -> list[int]:
    """The fewest classes that lead to these labels when sample number i takes entry i modulo their number.

    Example:
        >>> in_turn([3, 5, 3, 5, 3], index=[0, 1, 2, 3, 4]), in_turn([5, 3], index=[7, 8])
        ([3, 5], [3, 5])
    """
    for period in range(1, len(cond) + 1):
        found = dict(zip((i % period for i in index), cond, strict=True))
        if len(found) == period and all(found[i % period] == label for i, label in zip(index, cond, strict=True)):
            return [found[k] for k in range(period)]
    raise ValueError("samples that follow each other have numbers that do")


def columns_for(cond: Sequence[int] | None, n: int) -> int | None:
    """Columns of a grid of n samples: whole turns of the classes, so that each column has one; else None (a square).

    Example:
        >>> columns_for([*range(10)] * 6, 60), columns_for([3, 5] * 32, 64), columns_for(None, 60)
        (10, 8, None)
    """
    turn = 1 if cond is None else len(in_turn(cond, range(n)))
    if turn == 1 or turn > 20:
        return None
    return min(n, turn * max(1, round(math.sqrt(n) / turn)))


def picture_of(
    x: Tensor, spec: DataSpec, cond: Tensor | None = None, index: Tensor | None = None
) -> Image.Image | None:
    """The picture that suits the data: a grid of images or mels, a scatter plot of points; None for other vectors.

    Arguments:
        x: (N, *event) samples.
        spec: what they are.
        cond: (N,) their classes, which a grid names.
        index: (N,) their numbers, told before its rows.
    """
    if spec.event_shape == (2,):
        return scatter(x, f"{len(x)} samples")
    if not (spec.is_image or spec.mel is not None):
        return None
    labels = None if cond is None else cond.tolist()
    told = {} if labels is None else {"names": [class_name(spec, label) for label in labels]}
    told |= {} if index is None else {"numbers": index.tolist()}
    columns = columns_for(labels, len(x))
    if spec.mel is not None:
        from genmodels.evaluation.mel_pictures import mel_sheet

        return mel_sheet(x, columns, **told)
    return grid(images_of(x, spec, smallest=LEGIBLE), columns, **told)


def class_name(spec: DataSpec, label: int) -> str:
    """What a class is called: its name, or its number."""
    return str(spec.class_names[label]) if spec.class_names else str(label)
