"""Mel-spectrograms as pictures: sheets of several, one with its tokens, and which frames belong to which token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from genmodels.data.spec import Batch, DataSpec
from genmodels.evaluation.pictures import grid

_LOWEST, _HIGHEST = math.log(1e-5), 2.0  # of log-mels, the same colours in every picture
_LEGIBLE = 10  # points of a token's letter


def mel_image(mel: Tensor, width: int = 1, height: int = 2) -> Image.Image:
    """A log-mel (n_mels, T), low bands at the bottom, each cell so many pixels wide and high.

    Example:
        >>> from torch import zeros
        >>> mel_image(zeros(80, 100)).size
        (100, 160)
    """
    import matplotlib

    share = ((mel.double().cpu() - _LOWEST) / (_HIGHEST - _LOWEST)).clamp(0, 1).flip(0)
    colours = matplotlib.colormaps["magma"](share.numpy(), bytes=True)[..., :3]
    return Image.fromarray(np.repeat(np.repeat(colours, height, 0), width, 1))


def mel_sheet(x: Tensor, columns: int | None = None, **told) -> Image.Image:
    """Several log-mels (N, n_mels, T) on one sheet, with `names` and `numbers` as in `grid`.

    Example:
        >>> from torch import zeros
        >>> mel_sheet(zeros(3, 80, 100)).mode
        'RGB'
    """
    columns = columns or max(1, round(math.sqrt(len(x)) * 160 / max(160, x.shape[2])))
    return grid([mel_image(mel) for mel in x], columns, gap=4, **told)


def spoken(
    mel: Tensor, spec: DataSpec, tokens: Sequence[int], durations: Sequence[int], title: str = ""
) -> Image.Image:
    """A mel with the time of every token: the path of the alignment over it, and its symbols above."""
    hop = spec.mel["hop"] / spec.mel["sample_rate"]
    table = spec.text["symbols"]
    frames, ends = mel.shape[1], np.cumsum(durations)
    figure, axes = _figure(max(6.0, min(40.0, frames / 28)), 3.6)
    axes.imshow(mel.cpu().numpy(), origin="lower", aspect="auto", cmap="magma", vmin=_LOWEST, vmax=_HIGHEST,
                extent=(0, frames * hop, 0, mel.shape[0]), interpolation="nearest")
    height = mel.shape[0] / len(tokens)
    starts = np.concatenate([[0], ends[:-1]])
    axes.step(np.concatenate([starts, ends[-1:]]) * hop, np.arange(len(tokens) + 1) * height, where="post",
              color="white", linewidth=1.2)
    for token, start, end in zip(tokens, starts, ends, strict=True):
        if token > 1:
            axes.text((start + end) / 2 * hop, mel.shape[0] + 1, table[token], ha="center", va="bottom",
                      fontsize=_LEGIBLE - 2, family="monospace")
    axes.set_xlabel("seconds; the white line climbs one step a token")
    axes.set_ylabel("mel band")
    axes.set_title(title, pad=16, fontsize=_LEGIBLE)
    return _drawn(figure)


def alignments(posterior: Tensor, batch: Batch, spec: DataSpec) -> Image.Image:
    """For each item its mel, and below it the probability (N, T) of every token at every frame."""
    count = len(posterior)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * count, 6), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, count, squeeze=False)
    for k in range(count):
        frames, tokens = int(batch.mask[k].sum()), int(batch.cond.mask[k].sum())
        mel, likely = batch.x[k, :, :frames].cpu().numpy(), posterior[k, :tokens, :frames].detach().cpu().numpy()
        axes[0, k].imshow(mel, origin="lower", aspect="auto", cmap="magma", vmin=_LOWEST, vmax=_HIGHEST)
        said = "".join(spec.text["symbols"][t] for t in batch.cond.tokens[k, :tokens].tolist() if t > 1)
        axes[0, k].set_title(said if len(said) < 60 else f"{said[:57]}...", fontsize=8)
        axes[1, k].imshow(likely, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
        axes[1, k].set_xlabel("frame")
    axes[0, 0].set_ylabel("mel band")
    axes[1, 0].set_ylabel("token")
    return _drawn(figure)


def _figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _drawn(figure) -> Image.Image:
    figure.canvas.draw()
    return Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
