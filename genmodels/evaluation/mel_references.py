"""What a mel costs without a model of time or text: a normal distribution for each band."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.data.base import DataModule
from genmodels.models.mels import NOISE, even_lengths, with_noise
from genmodels.random import KeyedGenerator


def gaussian_per_band(datamodule: DataModule, split: str, limit: int | None = None, *, noise: float = NOISE) -> float:
    """Nats per cell of the first `limit` noisy mels of a split under a normal distribution for each band.

        -1/D sum log N(x + w (u - 1/2); m_c, s_c),    m_c and s_c those of band c in the training split

    The cells are those that a model answers for: frames of silence that make a length even are among them.

    Example:
        >>> from genmodels.data.speech import Speech
        >>> 1.5 < gaussian_per_band(Speech().prepare(), "test") < 2.2
        True
    """
    mean, deviation = _moments(_cells(datamodule, "train", None, noise))
    cost = count = 0.0
    for cells in _cells(datamodule, split, limit, noise):
        normal = torch.distributions.Normal(mean[:, None], deviation[:, None])
        cost, count = cost - float(normal.log_prob(cells).sum()), count + cells.numel()
    return cost / count


def _cells(datamodule: DataModule, split: str, limit: int | None, noise: float):
    """(n_mels, frames) of every batch, float64."""
    size = len(datamodule.split(split))
    rows = torch.arange(size if limit is None else min(size, limit))
    for batch in datamodule.loader(split, 32, rows):
        batch = even_lengths(batch)
        x = with_noise(batch.x, noise, KeyedGenerator(0, batch.index, "likelihood"))
        yield x.transpose(0, 1)[:, batch.mask[:, 0]].double()


def _moments(parts) -> tuple[Tensor, Tensor]:
    count, total, squares = 0, 0.0, 0.0
    for cells in parts:
        count, total, squares = count + cells.shape[1], total + cells.sum(1), squares + cells.square().sum(1)
    mean = total / count
    return mean, (squares / count - mean.square()).sqrt()
