"""The endless stream of batches, entered anywhere, is the same stream."""

from __future__ import annotations

import itertools

import pytest
import torch

from genmodels.data.digits import Digits
from genmodels.training.stream import initial_batch, training_stream


def indices(done: int, n: int, workers: int = 0) -> list[list[int]]:
    data = Digits(batch_size=300, num_workers=workers).prepare()
    data.order_seed = 5
    return [batch.index.tolist() for batch in itertools.islice(iter(training_stream(data, done)), n)]


@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 11])
def test_entered_anywhere_it_goes_on(done):
    assert indices(done, 6) == indices(0, 20)[done : done + 6]


def test_it_catches_a_position_that_is_ignored():
    assert indices(0, 6) != indices(0, 20)[3:9]


def test_an_epoch_holds_no_item_twice_and_epochs_differ():
    batches = indices(0, 8)  # 1258 items make 4 batches an epoch
    first, second = (list(itertools.chain(*batches[i : i + 4])) for i in (0, 4))
    assert len(set(first)) == len(first) == 1200 and len(set(second)) == 1200 and first != second


def test_the_initial_batch_spreads_over_the_training_split():
    data = Digits().prepare()
    assert len(initial_batch(data)) == len(data.split("train"))
    some = initial_batch(data, largest=10)
    assert len(some) == 10 and some.index[0] == 0 and int(some.index[-1]) == len(data.split("train")) - 1
    assert torch.equal(some.x, data.split("train").__getitems__(some.index).x)
