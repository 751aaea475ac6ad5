"""Two-dimensional sets with an exactly known density."""

from __future__ import annotations

from typing import Literal

import torch

from genmodels.data.base import SPLITS, DataModule
from genmodels.data.densities import density
from genmodels.data.loading import TensorData
from genmodels.data.spec import DataSpec
from genmodels.errors import InputError
from genmodels.random import seed_of


class Toy(DataModule):
    """Independent draws from a density in the plane, float32 (2,); the DataSpec carries its entropy in nats.

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
