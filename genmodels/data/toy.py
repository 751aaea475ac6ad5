"""Two-dimensional sets with an exactly known density."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, nearest
from genmodels.core.random import seed_of
from genmodels.data.base import SPLITS, DataModule
from genmodels.data.density_forms import (
    Arm,
    Checkerboard,
    Density,
    Graph,
    Mixture,
    NoisyCurve,
    Pinwheel,
    Rings,
    log_normal,
    normal,
    uniform,
)
from genmodels.data.loading import TensorData

_SQRT2 = math.sqrt(2)


def _one(t: Tensor) -> Tensor:
    return torch.ones_like(t)


def _moon(upper: bool) -> Arm:
    def curve(t):
        points = (t.cos(), t.sin()) if upper else (1 - t.cos(), 0.5 - t.sin())
        return torch.stack(points, dim=1)

    return Arm(0.0, math.pi, curve, lambda t: _one(t) / math.pi, lambda u: math.pi * u)


def _spiral(sign: float, width: float = 0.0) -> Arm:
    """n = 3 pi sqrt(U), point sign (-n cos n, n sin n) / 3; n has the density 2 n / (3 pi)^2."""
    end = 3 * math.pi

    def curve(n):
        return sign / 3 * torch.stack([-n * n.cos(), n * n.sin()], dim=1)

    return Arm(0.0, end, curve, lambda n: 2 * n / end**2, lambda u: end * u.sqrt(), sign * width)


def _swiss_roll() -> Arm:
    low, high = 1.5 * math.pi, 4.5 * math.pi

    def curve(t):
        return torch.stack([t * t.cos(), t * t.sin()], dim=1) / 5

    return Arm(low, high, curve, lambda t: _one(t) / (high - low), lambda u: low + (high - low) * u)


def _sine() -> Graph:
    def log_base(x):
        return torch.where(x.abs() <= 2.5, -math.log(5), -math.inf)

    return Graph(
        lambda n, generator: uniform(n, generator, -2.5, 2.5),
        log_base,
        lambda x: 2.5 * x.sin(),
        0.3,
        math.log(5) + 0.5 * math.log(2 * math.pi * math.e * 0.09),
    )


def _banana() -> Graph:
    return Graph(
        lambda n, generator: normal((n,), generator),
        lambda x: log_normal(x, 0.0, 1.0),
        lambda x: x.square() / 2,
        0.5,
        math.log(2 * math.pi * math.e) + math.log(0.5),
    )


_OCTAGON = tuple((4 / _SQRT2 * math.cos(k * math.pi / 4), 4 / _SQRT2 * math.sin(k * math.pi / 4)) for k in range(8))
_GRID = tuple((float(x), float(y)) for x in range(-4, 5, 2) for y in range(-4, 5, 2))
_SPIRALS = (_spiral(1.0), _spiral(-1.0))
_JITTERED = (_spiral(1.0, 0.5 / 3), _spiral(-1.0, 0.5 / 3))

#: Every set by name. Entropies that have no closed form are quadratures of the exact density.
DENSITIES: dict[str, Density] = {
    "moons": NoisyCurve((_moon(True), _moon(False)), 0.1, entropy=1.0075848),
    "moons_sharp": NoisyCurve((_moon(True), _moon(False)), 0.05, entropy=0.2892337),
    "circles": Rings((1.0, 0.5), 0.08, entropy=3.2681357, factor=3.0),
    "rings": Rings((3.0, 2.25, 1.5, 0.75), 0.08, entropy=2.6231828),
    "spirals": NoisyCurve(_SPIRALS, 0.1, entropy=2.5406179),
    "spirals_jittered": NoisyCurve(_JITTERED, 0.1, entropy=2.6454503),
    "swiss_roll": NoisyCurve((_swiss_roll(),), 0.2, entropy=2.6696462),
    "pinwheel": Pinwheel(entropy=2.3177880),
    "checkerboard": Checkerboard(),
    "8gaussians": Mixture(_OCTAGON, 0.5 / _SQRT2, entropy=2.8315784),
    "25gaussians": Mixture(_GRID, 0.2, entropy=2.8378743),
    "sine": _sine(),
    "banana": _banana(),
}


def density(name: str) -> Density:
    """The density of a set, by the set's name or by that of its data ("toy_moons").

    Example:
        >>> x = density("checkerboard").sample(5, torch.Generator().manual_seed(0))
        >>> [round(v, 4) for v in density("toy_checkerboard").log_prob(x).tolist()]
        [-3.4657, -3.4657, -3.4657, -3.4657, -3.4657]
    """
    short = name.removeprefix("toy_")
    if short not in DENSITIES:
        hint = f"; did you mean {near!r}?" if (near := nearest(short, DENSITIES)) else ""
        raise InputError(f"no two-dimensional set {name!r}: they are {', '.join(DENSITIES)}{hint}")
    return DENSITIES[short]


class Toy(DataModule):
    """Independent draws from a density in the plane, float32 (2,); the DataSpec has its entropy in nats.

    Arguments:
        set: which density.
        n_train, n_val, n_test: number of points of each split.
        batch_size, num_workers, seed: see `DataModule`; `seed` draws the points.

    Example:
        >>> data = Toy(set="moons", n_train=1000, n_val=100, n_test=100).prepare()
        >>> data.spec.name, data.spec.event_shape, round(data.spec.entropy, 4)
        ('toy_moons', (2,), 1.0076)
    """

    name = "toy"

    def __init__(
        self,
        *,
        set: Literal[
            "moons",
            "moons_sharp",
            "circles",
            "rings",
            "spirals",
            "spirals_jittered",
            "swiss_roll",
            "pinwheel",
            "checkerboard",
            "8gaussians",
            "25gaussians",
            "sine",
            "banana",
        ] = "moons",
        n_train: int = 50000,
        n_val: int = 10000,
        n_test: int = 10000,
        batch_size: int = 256,
        num_workers: int = 0,
        seed: int = 0,
    ):
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.set, self.density = set, density(set)
        self.sizes = dict(zip(SPLITS, (n_train, n_val, n_test), strict=True))
        for name, size in self.sizes.items():
            if size < 1:
                raise InputError(f"data.n_{name} must be at least 1, got {size}")

    def load(self):
        """Draw the points of each split from its own keyed generator."""
        splits = {}
        for split, size in self.sizes.items():
            generator = torch.Generator().manual_seed(seed_of(self.seed, "toy", self.set, split))
            splits[split] = TensorData(self.density.sample(size, generator).to(torch.float32))
        return DataSpec(f"toy_{self.set}", (2,), entropy=self.density.entropy), splits
