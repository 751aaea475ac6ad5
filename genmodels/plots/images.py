"""Pictures of samples: grids of images and mels, scatter plots, alignments; densities and scores in the plane."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.speech.audio import FLOOR

LEGIBLE = 64  # smallest height of an image in a grid, in pixels
_LINE, _MARGIN = 15, 8  # pixels of a line of text, and around the number of a row


def to_uint8(x: Tensor, levels: int) -> Tensor:
    """Integer levels 0..levels-1 stretched to 0..255."""
    return (x.to(torch.float32) * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)


def images_of(x: Tensor, spec: DataSpec, smallest: int = 0) -> list[Image.Image]:
    """One PIL image per example (N, C, H, W), enlarged by a whole factor to a height of at least `smallest`."""
    pixels = to_uint8(x, spec.levels or 2)  # continuous values have the range 0 to 1 of two levels
    if pixels.shape[1] not in (1, 3):
        pixels = pixels[:, :1]
    zoom = max(1, math.ceil(smallest / pixels.shape[2])) if smallest else 1
    pixels = pixels.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    arrays = pixels.permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(a[..., 0] if a.shape[-1] == 1 else a) for a in arrays]


def grid(
    tiles: list[Image.Image], columns: int | None = None, gap: int = 2, *, names: Sequence[str] = (),
    numbers: Sequence[int | str] = (),
) -> Image.Image:
    """Images of one size in rows, on white, with labels.

    Arguments:
        tiles: the images.
        columns: images per row; default a square.
        gap: pixels between them.
        names: name of each image, printed once above a column if its images share it, otherwise above each image.
        numbers: number of each image; that of the first is printed before each row, if there are several rows.
    """
    columns = columns or math.ceil(math.sqrt(len(tiles)))
    width, height = tiles[0].size
    rows = math.ceil(len(tiles) / columns)
    kinds = [set(names[column::columns]) for column in range(columns)] if names else []
    over_all = all(len(kind) <= 1 for kind in kinds)  # each column has a single name
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


def stack(pictures: list[Image.Image], across: bool = False) -> Image.Image:
    """Pictures below each other, or from left to right, on white."""
    widths, heights = [p.width for p in pictures], [p.height for p in pictures]
    size = (sum(widths), max(heights)) if across else (max(widths), sum(heights))
    sheet = Image.new(pictures[-1].mode, size, "white")
    for k, picture in enumerate(pictures):
        sheet.paste(picture, (sum(widths[:k]), 0) if across else (0, sum(heights[:k])))
    return sheet


@cache
def _font() -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", _LINE - 4)


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """A text, shortened to fit a width."""
    while font.getlength(text) > width and len(text) > 1:
        text = text[:-2] + "\u2026"
    return text


def panels(width: float, height: float, rows: int = 1, columns: int = 1, dpi: int = 100):
    """A figure of matplotlib with its axes (rows, columns); sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def rendered(figure) -> Image.Image:
    """The pixels of a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for axes in figure.axes:
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
            text.set_parse_math(False)  # a dollar is a dollar
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def aspect_of(width: float, height: float) -> Literal["equal", "auto"]:
    """The aspect of a part of the plane: one scale for both axes, unless one side is more than four times the other.

    Example:
        >>> aspect_of(2.0, 3.0), aspect_of(40.0, 20000.0)
        ('equal', 'auto')
    """
    return "equal" if max(width, height) <= 4 * min(width, height) else "auto"


def scatter(x: Tensor, title: str = "") -> Image.Image:
    """A scatter plot of points (N, 2), with equal axes where their ranges are alike."""
    figure, ((axes,),) = panels(5, 5)
    points = x.numpy()
    size = min(30.0, max(3.0, 1500 / max(1, len(points))))  # a few points are drawn larger
    axes.scatter(points[:, 0], points[:, 1], s=size, alpha=0.5, linewidths=0)
    axes.set_aspect(aspect_of(*np.ptp(points, axis=0)))
    axes.set_title(title)
    return rendered(figure)


def in_turn(cond: Sequence[int], index: Sequence[int]) -> list[int]:
    """The shortest list of classes from which these labels result if sample i takes entry i modulo its length.

    Example:
        >>> in_turn([3, 5, 3, 5, 3], index=[0, 1, 2, 3, 4]), in_turn([5, 3], index=[7, 8])
        ([3, 5], [3, 5])
    """
    if list(index) != list(range(index[0], index[0] + len(cond))):
        raise ValueError("the indices of samples must be consecutive")
    overlaps = [0]  # length of the longest prefix that ends at each label too (Knuth, Morris and Pratt 1977)
    for label in cond[1:]:
        length = overlaps[-1]
        while length and cond[length] != label:
            length = overlaps[length - 1]
        overlaps.append(length + (cond[length] == label))
    period = len(cond) - overlaps[-1]
    return [cond[(k - index[0]) % period] for k in range(period)]


def columns_for(cond: Sequence[int] | None, n: int) -> int | None:
    """Columns of a grid of n samples such that each column has a single class; otherwise None (a square).

    Example:
        >>> columns_for([*range(10)] * 6, 60), columns_for([3, 5] * 32, 64), columns_for(None, 60)
        (10, 8, None)
    """
    turn = 1 if cond is None else len(in_turn(cond, range(n)))
    if turn == 1 or turn > 20:
        return None
    return min(n, turn * max(1, round(math.sqrt(n) / turn)))


def has_picture(spec: DataSpec) -> bool:
    """Whether samples of these data are pictures: images of 1 or 3 channels, mels and points in the plane."""
    return spec.event_shape == (2,) or spec.mel is not None or (spec.is_image and spec.event_shape[0] in (1, 3))


def picture_of(
    x: Tensor, spec: DataSpec, cond: Tensor | None = None, index: Tensor | None = None
) -> Image.Image | None:
    """A picture of samples by type of data: a grid of images or mels, a scatter plot of points; None otherwise.

    Arguments:
        x: (N, *event) samples.
        spec: the data set.
        cond: (N,) classes, printed in a grid.
        index: (N,) numbers of the samples, printed before rows.
    """
    if not has_picture(spec):
        return None
    if spec.event_shape == (2,):
        return scatter(x, f"{len(x)} samples")
    labels = None if cond is None else cond.tolist()
    captions = {} if labels is None else {"names": [class_name(spec, label) for label in labels]}
    captions |= {} if index is None else {"numbers": index.tolist()}
    columns = columns_for(labels, len(x))
    if spec.mel is not None:
        return mel_sheet(x, columns, **captions)
    return grid(images_of(x, spec, smallest=LEGIBLE), columns, **captions)


def class_name(spec: DataSpec, label: int) -> str:
    """The name of a class, or its number if it has none."""
    return str(spec.class_names[label]) if spec.class_names else str(label)


_LOWEST, _HIGHEST = FLOOR, 2.0  # range of log-mels, so that colours are the same in every picture
_FONT_SIZE = 10  # points


def mel_image(mel: Tensor, width: int = 1, height: int = 2) -> Image.Image:
    """An image of a log-mel (n_mels, T), low bands at the bottom, with `width` x `height` pixels per cell.

    Example:
        >>> from torch import zeros
        >>> mel_image(zeros(80, 100)).size
        (100, 160)
    """
    import matplotlib

    share = ((mel.double().cpu() - _LOWEST) / (_HIGHEST - _LOWEST)).clamp(0, 1).flip(0)
    colours = matplotlib.colormaps["magma"](share.numpy(), bytes=True)[..., :3]
    return Image.fromarray(np.repeat(np.repeat(colours, height, 0), width, 1))


def mel_sheet(x: Tensor, columns: int | None = None, **captions) -> Image.Image:
    """Several log-mels (N, n_mels, T) on one sheet, with `names` and `numbers` as in `grid`.

    Example:
        >>> from torch import zeros
        >>> mel_sheet(zeros(3, 80, 100)).mode
        'RGB'
    """
    columns = columns or max(1, round(math.sqrt(len(x)) * 160 / max(160, x.shape[2])))
    return grid([mel_image(mel) for mel in x], columns, gap=4, **captions)


def mel_with_tokens(
    mel: Tensor, spec: DataSpec, tokens: Sequence[int], durations: Sequence[int], title: str = ""
) -> Image.Image:
    """A mel with its alignment drawn over it and the symbol of every token above it."""
    hop = spec.mel["hop"] / spec.mel["sample_rate"]
    table = spec.text["symbols"]
    frames, ends = mel.shape[1], np.cumsum(durations)
    figure, ((axes,),) = panels(max(6.0, min(40.0, frames / 28)), 3.6)
    axes.imshow(mel.cpu().numpy(), origin="lower", aspect="auto", cmap="magma", vmin=_LOWEST, vmax=_HIGHEST,
                extent=(0, frames * hop, 0, mel.shape[0]), interpolation="nearest")
    height = mel.shape[0] / len(tokens)
    starts = np.concatenate([[0], ends[:-1]])
    axes.step(np.concatenate([starts, ends[-1:]]) * hop, np.arange(len(tokens) + 1) * height, where="post",
              color="white", linewidth=1.2)
    for token, start, end in zip(tokens, starts, ends, strict=True):
        if token > 1:
            axes.text((start + end) / 2 * hop, mel.shape[0] + 1, table[token], ha="center", va="bottom",
                      fontsize=_FONT_SIZE - 2, family="monospace")
    axes.set_xlabel("seconds; the white line rises one step per token")
    axes.set_ylabel("mel band")
    axes.set_title(title, pad=16, fontsize=_FONT_SIZE)
    return rendered(figure)


def alignments(posterior: Tensor, batch: Batch, spec: DataSpec) -> Image.Image:
    """The mel of each item, and below it the posterior probability (N, T) of each token at each frame."""
    count = len(posterior)
    figure, axes = panels(4.5 * count, 6, 2, count, dpi=80)
    for k in range(count):
        frames, tokens = int(batch.mask[k].sum()), int(batch.cond.mask[k].sum())
        mel, likely = batch.x[k, :, :frames].cpu().numpy(), posterior[k, :tokens, :frames].detach().cpu().numpy()
        axes[0, k].imshow(mel, origin="lower", aspect="auto", cmap="magma", vmin=_LOWEST, vmax=_HIGHEST)
        text = "".join(spec.text["symbols"][t] for t in batch.cond.tokens[k, :tokens].tolist() if t > 1)
        axes[0, k].set_title(text if len(text) < 60 else f"{text[:57]}...", fontsize=8)
        axes[1, k].imshow(likely, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
        axes[1, k].set_xlabel("frame")
    axes[0, 0].set_ylabel("mel band")
    axes[1, 0].set_ylabel("token")
    return rendered(figure)


Function = Callable[[Tensor], Tensor]

_PIXELS = 160  # of a density, per side
_ARROWS = 22  # of a field, per side
_FAINT = 1e-3  # of the largest density: no arrows below


def truth_of(spec: DataSpec):
    """The exact density of a toy set, None for other data, also for a file of that name, whose entropy is unknown.

    Example:
        >>> truth_of(DataSpec("toy_moons", (2,))) is None, truth_of(DataSpec("toy_moons", (2,), entropy=1.5)) is None
        (True, False)
    """
    if spec.event_shape != (2,) or not spec.name.startswith("toy_") or spec.entropy is None:
        return None
    try:
        from genmodels.data.toy import density

        return density(spec.name)
    except InputError:
        return None


def picture_of_fields(
    spec: DataSpec, score: Function, log_density: Function | None, location: Tensor, scale: Tensor, width: float = 2.6
) -> Image.Image:
    """Density and scores of a model in the plane, with the true ones above them.

    Arguments:
        spec: the data set; the true density is looked up by its name.
        score: maps `(N, 2)` points to the model's scores.
        log_density: maps `(N, 2)` points to `(N,)`; None for a model without a density.
        location, scale: `(2,)` mean and standard deviation of the data.
        width: half-width of the picture in standard deviations.
    """
    box = [(float(m - width * s), float(m + width * s)) for m, s in zip(location, scale, strict=True)]
    truth = truth_of(spec)
    rows = [("learned", log_density, score)]
    if truth is not None:
        rows.append(("true", truth.log_prob, lambda x: _slopes(truth.log_prob, x, 1e-3 * float(scale.min()))))
    shown = log_density if truth is None else truth.log_prob
    columns = 1 if log_density is None else 2
    aspect = aspect_of(float(scale[0]), float(scale[1]))
    height = 4 * float(scale[1] / scale[0]) + 0.5 if aspect == "equal" else 4.5
    figure, axes = panels(4 * columns, len(rows) * min(8.0, max(1.5, height)), len(rows), columns)
    top, arrows = None, None
    for row, (name, log_p, field) in zip(axes, reversed(rows), strict=True):  # the true density sets the scales
        if log_density is not None:
            values = log_p(_grid(box, _PIXELS)).detach().double().exp().cpu().numpy().reshape(_PIXELS, _PIXELS)
            top = float(values.max()) if top is None else top
            row[0].imshow(values.T, origin="lower", extent=[*box[0], *box[1]], aspect=aspect, vmin=0, vmax=top)
            row[0].set_title(f"{name} density")
        arrows = _arrows(row[-1], box, field, shown, arrows)
        row[-1].set_title(f"{name} score")
    return rendered(figure)


def _arrows(axes, box, field: Function, shown: Function | None, longest: float | None) -> float:
    """Draw a vector field where there are data; returns the scale, which all fields of a picture share."""
    points = _grid(box, _ARROWS)
    if shown is not None:
        log_p = shown(points).detach()
        points = points[log_p > log_p.max() + np.log(_FAINT)]
    vectors = field(points).detach().double().cpu()
    lengths = vectors.norm(dim=1, keepdim=True)
    if longest is None:
        longest = float(lengths[lengths.isfinite()].quantile(0.9)) or 1.0
    vectors = (vectors * (longest / lengths).clamp(max=1)).numpy()  # longer ones would hide all others
    size = (box[0][1] - box[0][0]) / _ARROWS
    x = points.cpu().numpy()
    axes.quiver(x[:, 0], x[:, 1], vectors[:, 0], vectors[:, 1], angles="xy", scale_units="xy", scale=longest / size,
                width=0.004)
    axes.set(xlim=box[0], ylim=box[1], aspect=aspect_of(*np.ptp(box, axis=1)))
    return longest


def _grid(box, count: int) -> Tensor:
    sides = [torch.linspace(*side, count) for side in box]
    return torch.stack([side.flatten() for side in torch.meshgrid(*sides, indexing="ij")], dim=1)


def _slopes(log_density: Function, x: Tensor, step: float) -> Tensor:
    """The gradient by central differences, in float64, because not all densities are differentiable everywhere."""
    x = x.double()
    moves = step * torch.eye(2, dtype=x.dtype)
    sides = [(log_density(x + move) - log_density(x - move)) / (2 * step) for move in moves]
    return torch.nan_to_num(torch.stack(sides, dim=1), nan=0.0, posinf=0.0, neginf=0.0)


def show(thing: Any, picture: Image.Image | None = None) -> None:
    """Display an object in a notebook; elsewhere show its picture in a window, or print it."""
    try:
        notebook = get_ipython().display_formatter is not None  # type: ignore[name-defined]  # in a notebook only
    except (NameError, AttributeError):
        notebook = False
    if notebook:
        from IPython.display import display

        display(thing)
    elif picture is not None:
        picture.show()
    else:
        print(thing)
