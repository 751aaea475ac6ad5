"""The training data of a whole run as one endless stream of batches, entered at any batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from genmodels.data.base import DataModule
from genmodels.data.loading import Loader, ResumableBatchSampler, training_loader
from genmodels.data.spec import Batch


class EndlessBatchSampler(Sampler):
    """Epoch after epoch of a `ResumableBatchSampler`, starting after `done` batches of the run; it has no length.

    Example:
        >>> def first(done, n):
        ...     batches = iter(EndlessBatchSampler(ResumableBatchSampler(7, 2, order_seed=1), done))
        ...     return [next(batches)[1].tolist() for _ in range(n)]
        >>> first(0, 8)[5:] == first(5, 3)
        True
    """

    def __init__(self, epochs: ResumableBatchSampler, done: int = 0):
        self.epochs, self.done = epochs, done

    def __iter__(self) -> Iterator:
        epoch, position = divmod(self.done, len(self.epochs))
        while True:
            self.epochs.set_position(epoch, position)
            yield from self.epochs
            epoch, position = epoch + 1, 0


def training_stream(datamodule: DataModule, batches_seen: int = 0) -> Loader:
    """This process's batches for training, for ever, after `batches_seen` batches of the run.

    One stream without epochs has one meaning for "where was I": a number. Workers keep running across epochs, and what
    they fetched ahead when a run was killed is fetched again.
    """
    loader = datamodule.train_dataloader()
    sampler = EndlessBatchSampler(loader.batch_sampler, batches_seen)
    return training_loader(
        datamodule.split("train"), loader.batch_sampler, datamodule.flip, loader.num_workers, loader.pin_memory, sampler
    )


def initial_batch(datamodule: DataModule, largest: int = 20_000) -> Batch:
    """Training items for data-dependent initialisation: all of them, or `largest` spread evenly.

    A data set of large items says itself how many make a batch, by `most_at_once`.
    """
    data = datamodule.split("train")
    largest = getattr(data, "most_at_once", largest)
    positions = torch.linspace(0, len(data) - 1, min(len(data), largest), dtype=torch.float64).round().long()
    return data.__getitems__(positions)
