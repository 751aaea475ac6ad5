"""The order of the data: a pure function of (seed, epoch, global batch size), resumable, sharded, never duplicated."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from genmodels.core.errors import InputError
from genmodels.data.base import split_rows
from genmodels.data.loading import Loader, ResumableBatchSampler, SequentialBatches, TensorData, training_loader

SIZE, BATCH = 53, 8


def served(sampler) -> list[list[int]]:
    """Positions of each batch of one iteration."""
    return [positions.tolist() for _, positions in sampler]


def check_tail(make) -> None:
    """Starting after k batches of epoch 2 gives the rest of epoch 2, once; then epochs are whole again."""
    whole = make()
    whole.set_epoch(2)
    full = served(whole)
    for done in range(len(full)):
        sampler = make()
        sampler.set_position(2, done)
        assert served(sampler) == full[done:]
        assert served(sampler) == full
        sampler.set_epoch(3)
        assert len(served(sampler)) == len(full)


def check_shards(make, size: int) -> None:
    """Two processes together serve the batches of one process, no item twice."""
    single = make(size, BATCH, 0, 1)
    pair = [make(size, BATCH, rank, 2) for rank in (0, 1)]
    for epoch in (0, 1):
        for sampler in (single, *pair):
            sampler.set_epoch(epoch)
        whole, parts = served(single), [served(sampler) for sampler in pair]
        assert len(parts[0]) == len(parts[1]) == len(whole) == len(single)
        items = [position for batch in parts[0] + parts[1] for position in batch]
        assert len(set(items)) == len(items)
        for b, batch in enumerate(whole):
            assert parts[0][b] == batch[0::2] and parts[1][b] == batch[1::2]


def _sampler(size=SIZE, batch_size=BATCH, rank=0, world=1):
    return ResumableBatchSampler(size, batch_size, 7, lambda: (rank, world))


class _ForgetsPosition(ResumableBatchSampler):
    def set_position(self, epoch, batches_done):
        self.set_epoch(epoch)


class _KeepsPosition(ResumableBatchSampler):
    def __iter__(self):
        position = self._position
        yield from super().__iter__()
        self._position = position


class _Pads(ResumableBatchSampler):
    """Like torch's DistributedSampler: repeats items until every process has as many."""

    def __len__(self):
        return -(-self.size // self.batch_size)

    def order(self, epoch):
        order = super().order(epoch)
        return torch.cat([order, order])[: len(self) * self.batch_size]


class _OwnOrder(ResumableBatchSampler):
    def order(self, epoch):
        return super().order(epoch + 100 * self.processes()[0])


def test_resuming_serves_the_tail():
    check_tail(_sampler)
    check_tail(lambda: _sampler(rank=1, world=2))


@pytest.mark.parametrize("wrong", [_ForgetsPosition, _KeepsPosition])
def test_the_tail_check_catches(wrong):
    with pytest.raises(AssertionError):
        check_tail(lambda: wrong(SIZE, BATCH, 7))


@pytest.mark.parametrize("size", [16, 53, 64])
def test_two_processes_serve_what_one_does(size):
    check_shards(_sampler, size)


@pytest.mark.parametrize("wrong", [_Pads, _OwnOrder])
def test_the_shard_check_catches(wrong):
    with pytest.raises(AssertionError):
        check_shards(lambda size, batch, rank, world: wrong(size, batch, 7, lambda: (rank, world)), 53)


def test_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = served(_sampler())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert served(_sampler()) == first
    assert torch.equal(torch.get_rng_state(), state)
    other = ResumableBatchSampler(SIZE, BATCH, 8)
    assert served(other) != first
    other = _sampler()
    other.set_epoch(1)
    assert served(other) != first
    assert sorted(sum(first, [])) == sorted(set(sum(first, []))) and len(sum(first, [])) == SIZE // BATCH * BATCH


def test_end_of_an_epoch_is_the_start_of_the_next():
    sampler, expected = _sampler(), _sampler()
    sampler.set_position(2, len(sampler))
    expected.set_epoch(3)
    assert served(sampler) == served(expected)


def test_an_incomplete_batch_is_kept_only_when_it_is_the_only_one():
    assert [len(batch) for batch in served(_sampler(size=20, batch_size=8))] == [8, 8]
    assert [len(batch) for batch in served(_sampler(size=5, batch_size=8))] == [5]
    with pytest.raises(InputError, match="data.batch_size=8 is more than the 5 training items"):
        served(_sampler(size=5, batch_size=8, world=2))
    with pytest.raises(InputError, match="data.batch_size=8 must be a multiple of the 3 processes"):
        served(_sampler(world=3))


def test_processes_may_be_joined_after_the_loader_was_made():
    joined = [(0, 1)]
    sampler = ResumableBatchSampler(SIZE, BATCH, 7, lambda: joined[0])
    loader = training_loader(_data(), sampler)
    whole = [batch.index.tolist() for batch in loader]
    joined[0] = (1, 2)
    assert [batch.index.tolist() for batch in loader] == [batch[1::2] for batch in whole]


def _data(n: int = SIZE) -> TensorData:
    x = torch.arange(n * 4, dtype=torch.int64).reshape(n, 1, 1, 4)
    return TensorData(x, torch.arange(n) % 3)


def _epochs(workers: int, position=None) -> list[list]:
    sampler = _sampler()
    if position:
        sampler.set_position(*position)
    loader = training_loader(_data(), sampler, flip=True, num_workers=workers)
    first = position[0] if position else 0
    epochs = []
    for epoch in range(first, 3):
        iterator = iter(loader)
        loader.set_epoch(epoch)  # Lightning's order: the iterator comes first
        epochs.append([(batch.index.tolist(), batch.x.tolist(), batch.cond.tolist()) for batch in iterator])
    return epochs


def test_workers_change_nothing_and_resuming_repeats_nothing():
    alone, helped = _epochs(0), _epochs(2)
    assert alone == helped
    assert alone[0] != alone[1]
    for workers in (0, 2):
        resumed = _epochs(workers, position=(1, 3))
        assert resumed[0] == alone[1][3:] and resumed[1] == alone[2]


def test_leaving_an_epoch_early_with_workers_does_not_leak_into_the_next():
    loader, expected = training_loader(_data(), _sampler(), num_workers=2), _epochs(0)[1]
    for _ in loader:
        break
    loader.set_epoch(1)
    assert [batch.index.tolist() for batch in loader] == [index for index, _, _ in expected]


def test_mirroring_is_a_function_of_epoch_and_item():
    sampler, wide = _sampler(), ResumableBatchSampler(SIZE, 16, 7)
    flipped = {}
    for name, chosen in (("narrow", sampler), ("wide", wide)):
        loader = training_loader(_data(), chosen, flip=True)
        for batch in loader:
            for index, x in zip(batch.index.tolist(), batch.x, strict=True):
                turned = bool(x[0, 0, 0] > x[0, 0, 3])
                assert flipped.setdefault((index, "any"), turned) == turned, name
    share = sum(flipped.values()) / len(flipped)
    assert 0.2 < share < 0.8


def test_ordered_loader_serves_the_order_it_is_given():
    positions = torch.tensor([5, 3, 3, 50, 0])
    batches = list(Loader(_data(), SequentialBatches(positions, 2)))
    assert [batch.index.tolist() for batch in batches] == [[5, 3], [3, 50], [0]]
    assert all(torch.equal(b.x[:, 0, 0, 0], 4 * b.index) for b in batches)
    assert list(Loader(_data(), SequentialBatches(torch.arange(0), 2))) == []
    parts = [list(SequentialBatches(positions, 4, lambda rank=rank: (rank, 2))) for rank in (0, 1)]
    assert [[part.tolist() for part in mine] for mine in parts] == [[[5, 3], [0]], [[3, 50]]]


def test_loader_is_torchs_and_leaves_the_global_generator_alone():
    loader = Loader(_data(), SequentialBatches(torch.arange(SIZE), 8))
    assert isinstance(loader, DataLoader) and isinstance(loader, Loader) and len(loader) == 7
    state = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), state)


class Counter(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_batch_costs_as_many_operations_whatever_its_size():
    data = TensorData(torch.zeros(512, 1, 4, 4, dtype=torch.uint8), torch.zeros(512, dtype=torch.int64))

    def operations(fetch, size):
        with Counter() as counter:
            fetch(size)
        return counter.count

    def whole(size):
        assert len(next(iter(training_loader(data, ResumableBatchSampler(512, size)))).x) == size

    def by_item(size):  # what it replaces
        next(iter(DataLoader(range(512), size, collate_fn=lambda items: [data[i] for i in items])))

    assert operations(whole, 256) == operations(whole, 8) > 0
    assert operations(by_item, 256) > 10 * operations(by_item, 8)


@pytest.mark.parametrize("labels", [None, torch.arange(997) % 7])
def test_splits_are_disjoint_complete_and_stratified(labels):
    parts = split_rows(labels, 997, (0.7, 0.1, 0.2), seed=3)
    assert sorted(torch.cat(parts).tolist()) == list(range(997))
    assert [len(part) for part in parts[1:]] == [100, 199]
    assert all(torch.equal(a, b) for a, b in zip(parts, split_rows(labels, 997, (0.7, 0.1, 0.2), seed=3), strict=True))
    assert not torch.equal(parts[1], split_rows(labels, 997, (0.7, 0.1, 0.2), seed=4)[1])
    if labels is not None:
        for part, share in zip(parts[1:], (0.1, 0.2), strict=True):
            counts = labels[part].bincount(minlength=7)
            assert (counts - share * labels.bincount()).abs().max() <= 1


def test_classes_of_few_items_are_split_too():
    """2,000 random label sets, and folders of one picture each: complete, with the totals and shares promised."""
    generator = torch.Generator().manual_seed(0)
    sets = [torch.arange(6)]
    for classes in torch.randint(1, 20, (2000,), generator=generator).tolist():
        size = int(torch.randint(1, 60, (1,), generator=generator))
        sets.append(torch.randint(classes, (size,), generator=generator))
    fractions = [(0.8, 0.1, 0.1), (0.7, 0.1, 0.2), (0.0, 0.45, 0.5), (0.9, 0.1, 0.0)]
    for k, labels in enumerate(sets):
        shares = fractions[k % 4]
        parts = split_rows(labels, len(labels), shares, seed=k)
        assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
        for part, share in zip(parts[1:], shares[1:], strict=True):
            assert len(part) == round(share * len(labels))
            counts = labels[part].bincount(minlength=int(labels.max()) + 1)
            assert (counts - share * labels.bincount()).abs().max() <= 1 + 1e-6


def test_a_program_ends_while_its_loaders_have_workers():
    """Multiprocessing ends the workers by one signal each, and waits for them."""
    program = ("from genmodels.data.vision import Digits\n"
               "batches = iter(Digits(num_workers=2).prepare().val_dataloader())\nprint(len(next(batches).x))")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stdout) == (0, "64\n"), run.stderr
