"""Pairs of two data sets, for a flow from one to the other."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, one_of
from genmodels.core.random import seed_of
from genmodels.data.base import SPLITS, DataModule
from genmodels.data.loading import BatchDataset
from genmodels.data.toy import DENSITIES, Toy
from genmodels.data.vision import CIFAR10, MNIST, Digits, FashionMNIST

_IMAGES = {"digits": Digits, "mnist": MNIST, "fashion_mnist": FashionMNIST, "cifar10": CIFAR10}


class Transported(Dataset):
    """A split in which each item comes with an item of another data set, the source.

    `__getitems__` gives a fixed one, the same in every run. In training it is drawn anew in every epoch, as a pure
    function of (order_seed, epoch, position), so that batch size, processes and resuming do not change it.

    Arguments:
        target, source: the two splits; the flow leads from source to target.
        pools: rows of the source for each label of the target, or one pool for all.
        rows: rows of the target that form the split.
        labels: (N,) of the target's rows, where pools differ.
        conditional: whether batches have the target's classes.

    Example:
        >>> from genmodels.data.loading import TensorData
        >>> ends = TensorData(torch.arange(4.0)[:, None]), TensorData(10 + torch.arange(3.0)[:, None])
        >>> split = Transported(*ends, [torch.arange(3)], torch.arange(4))
        >>> split.__getitems__([0, 1, 2, 3]).source.flatten()
        tensor([11., 10., 12., 10.])
    """

    def __init__(
        self, target: BatchDataset, source: BatchDataset, pools: list[Tensor], rows: Tensor,
        labels: Tensor | None = None, conditional: bool = False,
    ):
        self.target, self.source, self.pools, self.rows = target, source, pools, rows
        self.labels, self.conditional = labels, conditional
        # In a random order, because items of equal sets would come with themselves; a permutation, so that all source
        # items are used about equally often.
        generator = torch.Generator().manual_seed(seed_of("source"))
        self._fixed = torch.randperm(max(len(rows), *map(len, pools)), generator=generator)[: len(rows)]
        self._numbers: tuple[tuple[int, int], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, positions) -> Batch:
        index = torch.as_tensor(positions, dtype=torch.int64)
        return self._batch(index, self._fixed[index])

    def drawn(self, positions: Tensor, order_seed: int, epoch: int) -> Batch:
        """The items at these positions (B,) with the source items of this epoch."""
        if self._numbers is None or self._numbers[0] != (order_seed, epoch):
            generator = torch.Generator().manual_seed(seed_of(order_seed, "source", epoch))
            self._numbers = (order_seed, epoch), torch.randint(2**62, (len(self),), generator=generator)
        return self._batch(positions, self._numbers[1][positions])

    def _batch(self, index: Tensor, numbers: Tensor) -> Batch:
        batch = self.target.__getitems__(self.rows[index])
        chosen = torch.empty_like(index)
        kinds = torch.zeros_like(index) if self.labels is None else self.labels[index]
        for kind in kinds.unique().tolist():
            here, pool = kinds == kind, self.pools[kind]
            chosen[here] = pool[numbers[here] % len(pool)]
        source = self.source.__getitems__(chosen)
        return Batch(batch.x, batch.cond if self.conditional else None, index=index, source=source.x)


class Transport(DataModule):
    """Items of one data set, each with an item of another, the start of a flow.

    Arguments:
        source, target: the two sets, of equal shape: `digits`, `mnist`, `fashion_mnist`, `cifar10`, or one of the
            two-dimensional sets of `data=toy`; in Python also data modules.
        source_classes, target_classes: the classes used of each set; all by default.
        same_class: pair items of equal class and keep the classes; else pairs are independent and have no class.
        root, download: of images, see `MNIST`.
        batch_size, num_workers, seed: see `DataModule`; `seed` is that of both sets, except that points of one
            two-dimensional set are drawn for the source by the next seed.

    Errors: sets of unlike shape, classes that do not exist.

    Example:
        >>> data = Transport(source="moons", target="8gaussians").prepare()
        >>> data.spec.name, data.split("test").__getitems__([0, 1]).source.shape
        ('from_toy_moons_to_toy_8gaussians', torch.Size([2, 2]))
    """

    name = "transport"

    def __init__(
        self,
        *,
        source: str | DataModule = "moons",
        target: str | DataModule = "8gaussians",
        source_classes: list[int] | None = None,
        target_classes: list[int] | None = None,
        same_class: bool = False,
        root: str = "data",
        download: bool = True,
        batch_size: int = 256,
        **shared,
    ):
        super().__init__(batch_size=batch_size, **shared)
        files = {"root": root, "download": download}
        again = self.seed + (source == target)  # else the points of the source were those of the target
        self.ends = [end if isinstance(end, DataModule) else self._made(key, end, files, seed)
                     for key, end, seed in (("source", source, again), ("target", target, self.seed))]
        self.draws_items = all(end.draws_items for end in self.ends)
        self.classes, self.same_class = (source_classes, target_classes), same_class

    def _made(self, key: str, name: str, files: dict, points: int) -> DataModule:
        own = {"batch_size": self.batch_size, "seed": self.seed}
        if not isinstance(name, str):
            raise InputError(f"data.{key} takes the name of a data set (in Python a data module), got {name!r}")
        if name in DENSITIES:
            return Toy(set=name, **own | {"seed": points})
        one_of(f"data.{key}", name, [*_IMAGES, *DENSITIES])
        return _IMAGES[name](**own, **({} if name == "digits" else files))

    def fetch(self) -> None:
        """Download missing files of both."""
        for end in self.ends:
            end.fetch()

    def load(self):
        """Read both sets and pair their splits."""
        for end in self.ends:
            end.setup()
        source, target = (end.spec for end in self.ends)
        if source.event_shape != target.event_shape:
            raise InputError(f"data.source={source.name} has items of {source.event_shape}, and data.target="
                             f"{target.name} of {target.event_shape}: a flow leads between equal shapes")
        if self.same_class and (source.num_classes is None or source.num_classes != target.num_classes):
            raise InputError("data.same_class=true needs two sets of the same classes")
        names = [spec.name + "".join(f"_{c}" for c in classes or ())
                 for spec, classes in zip((source, target), self.classes, strict=True)]
        classes = {"num_classes": target.num_classes, "class_names": target.class_names} if self.same_class else {}
        spec = DataSpec(f"from_{names[0]}_to_{names[1]}", target.event_shape, levels=target.levels, **classes,
                        source={"name": names[0], "levels": source.levels})
        return spec, {name: self._split(name) for name in SPLITS}

    def _split(self, name: str) -> Transported:
        parts = [end.split(name) for end in self.ends]
        (source_rows, source_labels), (rows, labels) = (
            self._rows(end, part, classes) for end, part, classes in zip(self.ends, parts, self.classes, strict=True))
        pools = [source_rows]
        if self.same_class:
            pools = [source_rows[source_labels == c] for c in range(self.ends[0].spec.num_classes)]
            missing = sorted({c for c in labels.unique().tolist() if not len(pools[c])})
            if missing:
                raise InputError(f"data.source has no items of class {missing[0]} in its {name} split")
        return Transported(parts[1], parts[0], pools, rows, labels if self.same_class else None, self.same_class)

    @staticmethod
    def _rows(end: DataModule, part: BatchDataset, classes: list[int] | None) -> tuple[Tensor, Tensor | None]:
        """Rows of a split that have one of the classes, and their labels."""
        every = torch.arange(len(part))
        labels = part.__getitems__(every).cond if end.spec.num_classes is not None else None
        if classes is None:
            return every, labels
        known = end.spec.num_classes or 0
        wrong = [c for c in classes if not 0 <= c < known]
        if wrong or not classes:
            raise InputError(f"{end.spec.name} has no class {wrong[0] if wrong else classes}, it has {known} classes")
        kept = torch.isin(labels, torch.tensor(classes))
        return every[kept], labels[kept]

    def sources(self, split: Literal["train", "val", "test"]) -> Batch:
        """All source items of a split, with their classes if these are kept."""
        whole = self.split(split)
        rows = torch.cat(whole.pools)
        batch = whole.source.__getitems__(rows)
        return Batch(batch.x, batch.cond if self.same_class else None)
