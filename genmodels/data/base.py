"""The base class of all data modules: splits, loaders, position in training; a subclass only reads its data."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from genmodels.core.data import Batch, DataSpec, require_continuous
from genmodels.core.errors import InputError, an, at_least
from genmodels.core.processes import rank_world
from genmodels.data.loading import BatchDataset, Loader, ResumableBatchSampler, SequentialBatches, training_loader

SPLITS = ("train", "val", "test")

_EXAMINED = 20_000  # items that are checked for constant columns and copies
_CONSTANT = "is constant"
_OUTLIER = 1e4  # interquartile ranges from the median, beyond any heavy tail that can be modelled


def items_of(split: str) -> str:
    """The items of a split in words.

    Example:
        >>> items_of("test"), items_of("train")
        ('test items', 'training items')
    """
    return f"{ {'train': 'training', 'val': 'validation'}.get(split, split)} items"


class OfLightning:
    """Makes a class a subclass of Lightning's class `_lightning` too, but only where Lightning has been imported.

    Sampling need not wait for that import, which takes longer than all others. An instance made before the import
    joins at the first `isinstance` that asks for more than its type, such as that of `Trainer.fit`.
    """

    _lightning: str

    def __new__(cls, *args, **options):
        return super().__new__(_with_lightning(cls))

    @property
    def __class__(self):
        own, joined = type(self), _with_lightning(type(self))
        if joined is own:
            return own
        vars(self).update(vars(_theirs(own)()) | vars(self))
        object.__dict__["__class__"].__set__(self, joined)
        return type(own.__name__, (joined,), {})  # isinstance ignores an answer that equals type(self), now `joined`

    def __reduce_ex__(self, protocol):
        own = type(self)
        _, (_, *arguments), *state = super().__reduce_ex__(protocol)
        return _unpickled, (vars(own).get("_alone", own), *arguments), *state


def _theirs(cls: type) -> type | None:
    return getattr(sys.modules.get("pytorch_lightning"), cls._lightning, None)


def _with_lightning(cls: type) -> type:
    found = _theirs(cls)
    return cls if found is None or issubclass(cls, found) else _both(cls, found)


def _unpickled(cls: type, *arguments):
    return cls.__new__(cls, *arguments)


@functools.cache
def _both(cls: type, base: type) -> type:
    # Named as the class itself in headers, messages and pickles; unpickling makes the pair again.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_alone": cls}
    return type(cls.__name__, (cls, base), names)


class DataModule(OfLightning):
    """A data set with its three splits; a subclass implements `load` (and `fetch`, if something can be downloaded).

    Arguments:
        batch_size: items per optimiser step over all processes together, so that more processes do not change the
            result; it must be a multiple of their number.
        num_workers: worker processes per loader; 0 loads in the training process, which is fastest for data in memory.
        seed: seed of the splits (the order of the data has its own seed, `order_seed`, which comes from the run).

    Attributes:
        order_seed: seed of shuffling and random mirroring; set before training.
        flip: whether training items are mirrored left to right at random.

    Errors: `InputError` with one line if the data are missing, empty or damaged.
    """

    _lightning = "LightningDataModule"
    name: str = ""
    flip: bool = False
    #: Whether `seed` draws the items themselves, and not only which of them are held out.
    draws_items: bool = False

    def __init__(self, *, batch_size: int = 64, num_workers: int = 0, seed: int = 0):
        super().__init__()
        at_least(1, **{"data.batch_size": batch_size})
        at_least(0, **{"data.num_workers": num_workers, "data.seed": seed})
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.order_seed = 0
        self._loaded: tuple[DataSpec, dict[str, BatchDataset]] | None = None

    def fetch(self) -> None:
        """Download missing files; most data sets have nothing to download."""

    def load(self) -> tuple[DataSpec, dict[str, BatchDataset]]:
        """Read the data: the DataSpec and the splits train, val, test."""
        raise NotImplementedError

    def prepare(self) -> DataModule:
        """Download if allowed, read and split the data, and return self; further calls return immediately."""
        if self._loaded is None:
            self.prepare_data()
            self.setup()
        return self

    def prepare_data(self) -> None:
        """Lightning's hook: download."""
        if self._loaded is None:
            self.fetch()

    def setup(self, stage: str | None = None) -> None:
        """Lightning's hook: read the data, once."""
        if self._loaded is not None:
            return
        spec, splits = self.load()
        for name in SPLITS:
            if not hasattr(splits[name], "__getitems__"):
                raise InputError(f"data {spec.name}: the {name} split is {an(type(splits[name]).__name__)}, which "
                                 "gives no batches: return TensorData(x) of genmodels.data.loading, or the like")
            if len(splits[name]) == 0:
                items, share = sum(len(split) for split in splits.values()), f"{name}_fraction"
                more = f": raise {share}" if share in inspect.signature(type(self).__init__).parameters else ""
                raise InputError(f"data {spec.name}: the {name} split is empty, every split needs at least one item; "
                                 f"there {'is' if items == 1 else 'are'} {items} in all{more}")
        sizes = ", ".join(f"{len(splits[name])} {name}" for name in SPLITS)
        self._loaded = replace(spec, fingerprint=spec.fingerprint or sizes), splits

    @property
    def spec(self) -> DataSpec:
        """The DataSpec of these data; available after `prepare()`."""
        return self._ready()[0]

    def split(self, name: str) -> BatchDataset:
        """The data set of one split: train, val or test."""
        splits = self._ready()[1]
        if name not in splits:
            raise InputError(f"no split {name!r}: the splits are {', '.join(SPLITS)}")
        return splits[name]

    def _ready(self):
        if self._loaded is None:
            raise RuntimeError(f"call {type(self).__name__}.prepare() before using its data")
        return self._loaded

    def train_dataloader(self) -> Loader:
        """Batches of this process for training: shuffled, whole batches only."""
        data = self.split("train")
        return training_loader(data, self.training_batches(data), self.flip, self.num_workers, self._pin())

    def training_batches(self, data: BatchDataset) -> ResumableBatchSampler:
        """The sampler that decides which items each training batch holds."""
        return ResumableBatchSampler(len(data), self.batch_size, self.order_seed, self._processes)

    def val_dataloader(self) -> Loader:
        """This process's share of the validation split, in order, no item twice."""
        return self._share("val")

    def test_dataloader(self) -> Loader:
        """This process's share of the test split, in order, no item twice."""
        return self._share("test")

    def loader(self, split: str, batch_size: int, indices: Sequence[int] | Tensor | None = None) -> Loader:
        """The items of a split (or those at `indices`) in this order, unaltered, without shuffling or sharding."""
        at_least(1, batch_size=batch_size)
        data = self.split(split)
        positions = torch.arange(len(data)) if indices is None else torch.as_tensor(indices)
        if positions.dtype.is_floating_point and len(positions) or positions.dtype == torch.bool:
            raise InputError(f"indices are numbers of items, got values of type {positions.dtype}")
        positions = positions.to(torch.int64)
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(data):
            raise InputError(f"indices must lie in 0..{len(data) - 1}, the {split} split of {self.spec.name}")
        return Loader(data, SequentialBatches(positions, batch_size), self.num_workers, self._pin())

    def items(self, split: str, indices: Sequence[int] | Tensor | None = None) -> Batch:
        """The items of `loader` as one batch; shorter ones are padded."""
        from genmodels.data.utterances import joined

        parts = list(self.loader(split, 4096, indices))
        if not parts:
            raise InputError(f"indices is empty: give at least one item of the {split} split")
        return Batch(*(joined([getattr(part, one.name) for part in parts]) for one in fields(Batch)))

    def problems(self) -> list[str]:
        """One line per problem that would stop or spoil training on these data; empty if there are none."""
        try:
            self.prepare()
        except (InputError, OSError) as error:
            return [str(error)]
        found = []
        for name in SPLITS:
            for batch in self.loader(name, 1024):
                try:
                    self.spec.check(batch)
                except ValueError as error:
                    found.append(f"{name} split: {error}")
        return found + [fault for fault in self._faults() if _CONSTANT in fault]

    def warnings(self) -> list[str]:
        """One line per finding that does not stop training but should be checked."""
        loaded = self._loaded is not None  # otherwise `problems` reports why
        return [fault for fault in self._faults() if _CONSTANT not in fault] + (self.notes() if loaded else [])

    def notes(self) -> list[str]:
        """The warnings that training prints: behaviour that does not follow from the settings."""
        items = len(self.split("train"))
        large = [f"data.batch_size={self.batch_size} is more than the {items} training items: every step takes all "
                 f"{items}"]
        return (large if self.batch_size > items else []) + self._untrained() + self._outliers()

    def _untrained(self) -> list[str]:
        """The classes of which training sees no item, of data that hold their labels in memory."""
        data, classes = self.split("train"), self.spec.num_classes
        labels, rows = getattr(data, "cond", None), getattr(data, "rows", None)
        if classes is None or not isinstance(labels, Tensor):
            return []
        seen = set((labels if rows is None else labels[rows]).tolist())
        missing = [name for c, name in enumerate(self.spec.class_names or range(classes)) if c not in seen]
        some = ", ".join(map(str, missing[:3])) + ", ..." * (len(missing) > 3)
        return [f"{self.spec.name}: no training item has class {some} ({len(missing)} of {classes})"] * bool(missing)

    def _outliers(self) -> list[str]:
        """Columns of continuous vectors with extreme outliers, which would dominate the standardisation."""
        if self.spec.levels is not None or len(self.spec.event_shape) != 1:
            return []
        found, data = [], self.split("train")
        rows = spread_rows(len(data), min(len(data), getattr(data, "most_at_once", len(data))))
        x = data.__getitems__(rows).x.double()
        for k, column in enumerate(x.T):
            ordered = column.sort().values
            low, middle, high = (float(ordered[int(share * (len(ordered) - 1))]) for share in (0.25, 0.5, 0.75))
            far = (column - middle).abs()
            item = int(far.argmax())
            if high > low and float(far[item]) > _OUTLIER * (high - low):
                found.append(f"{self.spec.name}: column {self.spec.column(k)} of training item {int(rows[item])} is "
                             f"{float(column[item]):.3g}, but half of the column is between {low:.3g} and {high:.3g}: "
                             "drop it if it is a mistake")
        return found

    def _faults(self) -> list[str]:
        """Why continuous vectors have no density, if they have none; training refuses only constant columns."""
        if self._loaded is None or self.spec.levels is not None or len(self.spec.event_shape) != 1:
            return []
        x = next(iter(self.loader("train", _EXAMINED))).x
        if not bool(x.isfinite().all()):
            return []  # already reported by `DataSpec.check`
        try:
            require_continuous(x, self.spec.names_of_columns)
        except InputError as error:
            return [f"{self.spec.name}: {error}"]
        return []

    def _share(self, split: str) -> Loader:
        data = self.split(split)
        batches = SequentialBatches(torch.arange(len(data)), self.batch_size, self._processes)
        return Loader(data, batches, self.num_workers, self._pin())

    def _processes(self) -> tuple[int, int]:
        """This process's rank and the number of processes."""
        return rank_world()

    def _pin(self) -> bool:
        return self.num_workers > 0 and torch.cuda.is_available()


def split_rows(
    labels: Tensor | None, size: int, fractions: tuple[float, float, float], seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of train, val and test: a fixed random split, stratified by class if there are labels.

    The totals are round(fraction * size), and every class has its share to within two items.

    Example:
        >>> train, val, test = split_rows(torch.arange(100) % 2, 100, (0.7, 0.1, 0.2), seed=0)
        >>> len(train), len(val), len(test), sorted(torch.cat([train, val, test]).tolist()) == list(range(100))
        (70, 10, 20, True)
    """
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    groups = (order,)
    if labels is not None:
        sizes = labels.unique(return_counts=True)[1].tolist()
        groups = order[labels[order].argsort(stable=True)].split(sizes)
    counts: list[list[int]] = []
    seen = 0
    for group in groups:
        # Rounding running totals instead of each class keeps the sum exact.
        before, seen = seen, seen + len(group)
        val, test = (round(fraction * seen) - round(fraction * before) for fraction in fractions[1:])
        counts.append([len(group) - val - test, val, test])

    def excess(k: int, part: int) -> float:
        return counts[k][part] - fractions[part] * len(groups[k])

    for k in (k for k, count in enumerate(counts) if count[0] < 0):
        # Val and test were both rounded up in a small class: a larger class gives up an item instead.
        swaps = [(part, o) for part in (1, 2) for o, count in enumerate(counts) if counts[k][part] and count[0] > 0]
        part, other = min(swaps, key=lambda swap: max(1 - excess(k, swap[0]), 1 + excess(swap[1], swap[0])))
        for row, item in ((k, 1), (other, -1)):
            counts[row][0], counts[row][part] = counts[row][0] + item, counts[row][part] - item
    parts = zip(*(group.split(count) for group, count in zip(groups, counts, strict=True)), strict=True)
    return tuple(torch.cat(part).sort().values for part in parts)


def mixed(rows: Tensor, seed: int) -> Tensor:
    """The same rows in an order that depends on nothing but the seed, so that any first part of them is like the whole.

    Example:
        >>> sorted(mixed(torch.tensor([3, 5, 8]), seed=0).tolist())
        [3, 5, 8]
    """
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def rows_of_splits(
    given: Tensor | None, labels: Tensor | None, size: int, fractions: tuple[float, float, float], seed: int
) -> dict[str, Tensor]:
    """Rows of each split: those given, a missing val or test held out of train.

    Arguments:
        given: (size,) the number of each item's split in `SPLITS`, None if none is given.
        labels, size, fractions, seed: see `split_rows`.

    Example:
        >>> rows_of_splits(torch.tensor([0, 0, 1, 0, 0]), None, 5, (0.5, 0.25, 0.25), seed=0)["val"]
        tensor([2])
    """
    if given is None:
        return dict(zip(SPLITS, split_rows(labels, size, fractions, seed), strict=True))
    rows = {split: (given == number).nonzero()[:, 0] for number, split in enumerate(SPLITS)}
    missing = [0.0 if len(rows[split]) else fraction for split, fraction in zip(SPLITS, fractions, strict=True)]
    train = rows["train"]
    held = split_rows(None if labels is None else labels[train], len(train), (0.0, missing[1], missing[2]), seed)
    rows["train"] = train[held[0]]
    for split, part in zip(SPLITS[1:], held[1:], strict=True):
        rows[split] = rows[split] if len(rows[split]) else train[part]
    return rows


def spread_rows(size: int, wanted: int) -> Tensor:
    """(wanted,) evenly spaced rows of 0 .. size - 1, including the first and the last; repeated if there are too few.

    Example:
        >>> spread_rows(10, 4).tolist()
        [0, 3, 6, 9]
    """
    return torch.linspace(0, size - 1, wanted, dtype=torch.float64).round().long()


def data_root(root: str) -> str:
    """`root` with `~` and environment variables expanded."""
    return os.path.expanduser(os.path.expandvars(root))


def split_fractions(val_fraction: float, test_fraction: float) -> tuple[float, float, float]:
    """The fractions of train, val and test.

    Raises:
        InputError: unless they leave items for training.

    Example:
        >>> split_fractions(0.25, 0.25)
        (0.5, 0.25, 0.25)
    """
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        got = f"{val_fraction} and {test_fraction}"
        raise InputError(f"data.val_fraction and data.test_fraction must be >= 0 with a sum below 1, got {got}")
    return 1 - val_fraction - test_fraction, val_fraction, test_fraction
