"""scikit-learn's 8x8 handwritten digits: real data on every machine, no download."""

from __future__ import annotations

import torch

from genmodels.data.base import DataModule, split_rows
from genmodels.data.loading import TensorData
from genmodels.data.spec import DataSpec


class Digits(DataModule):
    """1,797 handwritten digits, (1, 8, 8), 17 grey levels, 10 classes; split 70/10/20 within each class.

    Source: E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI repository, 1998 (its test part,
    as in scikit-learn).

    Example:
        >>> data = Digits().prepare()
        >>> data.spec.event_shape, data.spec.levels, [len(data.split(s)) for s in ("train", "val", "test")]
        ((1, 8, 8), 17, [1258, 180, 359])
    """

    name = "digits"

    def __init__(self, *, batch_size: int = 64, num_workers: int = 0, seed: int = 0):
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)

    def load(self):
        """All in memory, as uint8."""
        from sklearn.datasets import load_digits

        table = load_digits()
        x = torch.from_numpy(table.images).to(torch.uint8)[:, None]
        labels = torch.from_numpy(table.target).to(torch.int64)
        rows = split_rows(labels, len(x), (0.7, 0.1, 0.2), self.seed)
        splits = {name: TensorData(x, labels, r) for name, r in zip(("train", "val", "test"), rows, strict=True)}
        return DataSpec("digits", (1, 8, 8), levels=17, num_classes=10), splits
