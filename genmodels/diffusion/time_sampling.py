"""Which times a training batch looks at: `(t, weight)` with t in [0, 1) and weight 1 / p(t).

The expectation of weight * loss(t) is the integral of the loss for every sampler; they differ in variance. Draws are
made over the global batch: row i of process `rank` is position i * world + rank of n * world.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from genmodels.diffusion.loss_aware import LossAwareTimes, positions
from genmodels.errors import InputError
from genmodels.random import Generator
from genmodels.random import shared_uniform as draw_shared
from genmodels.random import uniform as draw_rows


class TimeSampler(Protocol):
    """(n, generator, rank, world) -> t (n,), weight (n,), float64 on the CPU."""

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]: ...


class UniformTimes:
    """Independent uniform times, each from its own row of the generator.

    Example:
        >>> t, weight = UniformTimes()(4, torch.Generator().manual_seed(0))
        >>> t.shape, weight.tolist()
        (torch.Size([4]), [1.0, 1.0, 1.0, 1.0])
    """

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        t = draw_rows((n,), generator, dtype=torch.float64).cpu()
        return t, torch.ones_like(t)


class StratifiedTimes:
    """t_j = (j + U_j) / B: one independent draw in each of the B equal strata of the global batch.

    Example:
        >>> t, _ = StratifiedTimes()(4, torch.Generator().manual_seed(0))
        >>> (t * 4).floor().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        u = draw_rows((n,), generator, dtype=torch.float64).cpu()
        t = (positions(n, rank, world) + u) / (n * world)
        return t, torch.ones_like(t)


class AntitheticTimes:
    """t_j = (U + j/B) mod 1 with one U for the global batch (Kingma et al. 2021, appendix I.1).

    Example:
        >>> t, _ = AntitheticTimes()(4, torch.Generator().manual_seed(0))
        >>> [round(d, 6) for d in t.sort().values.diff().tolist()]
        [0.25, 0.25, 0.25]
    """

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        shared = draw_shared(1, generator, dtype=torch.float64).cpu()
        t = (shared + positions(n, rank, world) / (n * world)) % 1.0
        return t, torch.ones_like(t)


TIME_SAMPLERS: dict[str, type[TimeSampler]] = {
    "uniform": UniformTimes,
    "stratified": StratifiedTimes,
    "antithetic": AntitheticTimes,
    "loss_aware": LossAwareTimes,
}

TimeSamplerName = Literal["uniform", "stratified", "antithetic", "loss_aware"]


def make_time_sampler(name: TimeSamplerName | TimeSampler) -> TimeSampler:
    """The sampler of a name in TIME_SAMPLERS; one that is made already is returned as it is."""
    if callable(name):
        return name
    if name not in TIME_SAMPLERS:
        raise InputError(f"time_sampler = {name!r}: choose one of {', '.join(TIME_SAMPLERS)}")
    return TIME_SAMPLERS[name]()
