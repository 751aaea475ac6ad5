"""What every datamodule promises: splits, contract, loaders, positions, messages."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.data.arrays import Arrays
from genmodels.data.base import DataModule
from genmodels.data.image_folder import ImageFolder
from genmodels.data.loading import TensorData
from genmodels.data.shard_writer import write_shards
from genmodels.data.shards import Shards
from genmodels.data.toy import Toy
from genmodels.data.vision import Digits
from tests.two_processes import fork, forked, joined

SPLITS = ("train", "val", "test")


def _images(tmp_path: Path, **options):
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(40):
        place = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(place)
    return ImageFolder(root=str(tmp_path / "photos"), size=8, batch_size=8, **options)


def _array(tmp_path: Path, **options):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "set.npz", x=rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8), y=np.arange(60) % 3)
    return Arrays(file=str(tmp_path / "set.npz"), batch_size=8, **options)


def _shards(tmp_path: Path, **options):
    if not (tmp_path / "shards").exists():
        write_shards(_array(tmp_path).prepare(), tmp_path / "shards", 7, {})
        (tmp_path / "shards" / "dataset.json").unlink()  # as somebody else would write them, without their splits
        for number, place in enumerate(sorted((tmp_path / "shards").glob("*.tar"))):
            place.rename(tmp_path / "shards" / f"{number}.tar")
    return Shards(root=str(tmp_path / "shards"), size=8, batch_size=8, **options)


MODULES = {
    "digits": lambda tmp_path, **options: Digits(batch_size=8, **options),
    "toy": lambda tmp_path, **options: Toy(n_train=100, n_val=20, n_test=30, batch_size=8, **options),
    "image_folder": _images,
    "image_folder_decoded_late": lambda tmp_path, **options: _images(tmp_path, cache="none", **options),
    "arrays": _array,
    "shards": _shards,
}


@pytest.fixture(params=MODULES)
def make(request, tmp_path):
    """A maker of one kind of datamodule."""
    return lambda **options: MODULES[request.param](tmp_path, **options)


def _all(module, split):
    return [batch for batch in module.loader(split, 16)]


def test_batches_keep_the_contract(make):
    module = make().prepare()
    assert module.problems() == []
    for split in SPLITS:
        batches = _all(module, split)
        for batch in batches:
            module.spec.check(batch)
            assert batch.x.dtype == (torch.float32 if module.spec.levels is None else torch.uint8)
            assert batch.cond is None or batch.cond.dtype == torch.int64
            assert (batch.cond is None) == (module.spec.num_classes is None)
        index = torch.cat([batch.index for batch in batches])
        assert torch.equal(index, torch.arange(len(module.split(split))))
    assert DataSpec.from_dict(module.spec.to_dict()) == module.spec


def test_splits_are_disjoint_fixed_and_seeded(make):
    def items(**options):
        module = make(**options).prepare()
        return {s: [row.numpy().tobytes() for b in _all(module, s) for row in b.x] for s in SPLITS}

    first, again, other = items(), items(), items(seed=1)
    assert first == again and first != other
    seen = [set(first[split]) for split in SPLITS]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_training_differs_by_epoch_and_its_loader_has_constant_length(make):
    def epochs(workers=0):
        module = make(num_workers=workers).prepare()
        module.order_seed = 4
        loader = module.train_dataloader()
        result = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            result.append([(batch.index.tolist(), batch.x.numpy().tobytes()) for batch in loader])
            assert len(loader) == len(module.split("train")) // 8
        return result

    whole = epochs()
    assert whole == epochs(workers=2) and whole[0] != whole[1]


def test_order_seed_decides_the_order(make):
    def order(seed):
        module = make().prepare()
        module.order_seed = seed
        return [batch.index.tolist() for batch in module.train_dataloader()]

    assert order(1) == order(1) != order(2)


def test_evaluation_never_mirrors_and_training_does_where_it_makes_sense(make):
    module = make().prepare()
    plain = {int(i): x for b in _all(module, "train") for i, x in zip(b.index, b.x, strict=True)}
    loader = module.train_dataloader()
    changed = total = 0
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            for i, x in zip(batch.index.tolist(), batch.x, strict=True):
                same = torch.equal(x, plain[i])
                assert same or torch.equal(x, plain[i].flip(-1))
                changed, total = changed + (not same), total + 1
    assert (0.25 * total < changed < 0.75 * total) if module.flip else changed == 0
    assert module.flip == isinstance(module, ImageFolder)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_work_without_duplicates(make, world):
    def shares(loader_name):
        parts = []
        for rank in range(world):
            module = make().prepare()
            module._processes = lambda rank=rank: (rank, world)
            parts.append([batch.index.tolist() for batch in getattr(module, loader_name)()])
        return parts

    module = make().prepare()
    whole = [batch.index.tolist() for batch in module.train_dataloader()]
    parts = shares("train_dataloader")
    for b, batch in enumerate(whole):
        assert [parts[i % world][b][i // world] for i in range(8)] == batch
    for split in ("val", "test"):
        together = sorted(i for part in shares(f"{split}_dataloader") for batch in part for i in batch)
        assert together == list(range(len(module.split(split))))


def test_batch_size_counts_all_processes():
    module = Digits(batch_size=9).prepare()
    module._processes = lambda: (0, 2)
    with pytest.raises(InputError, match="data.batch_size=9 must be a multiple of the 2 processes"):
        next(iter(module.train_dataloader()))


def test_loader_serves_chosen_items(make):
    module = make().prepare()
    whole = torch.cat([batch.x for batch in _all(module, "val")])
    chosen = torch.cat([batch.x for batch in module.loader("val", 2, [1, 0, 1])])
    assert torch.equal(chosen, whole[[1, 0, 1]])
    with pytest.raises(InputError, match=r"indices must lie in 0\.\."):
        module.loader("val", 2, [10_000])
    with pytest.raises(InputError, match="batch_size must be at least 1"):
        module.loader("val", 0)
    for wrong in ([True, False], [0.5], torch.ones(2, dtype=torch.bool)):
        with pytest.raises(InputError, match="indices are numbers of items"):
            module.items("val", wrong)
    with pytest.raises(InputError, match="indices is empty: give at least one item of the val split"):
        module.items("val", [])
    with pytest.raises(InputError, match="no split 'validation': the splits are train, val, test"):
        module.split("validation")


def test_data_must_be_prepared_first(make):
    with pytest.raises(RuntimeError, match=r"prepare\(\)"):
        _ = make().spec
    module = make()
    assert module.prepare() is module


def test_splits_travel_to_spawned_workers(make):
    module = make().prepare()
    data = pickle.loads(pickle.dumps(module.split("test")))
    assert torch.equal(data.__getitems__([0, 1]).x, module.split("test").__getitems__([0, 1]).x)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"num_workers": -1}])
def test_common_options_are_checked(options):
    with pytest.raises(InputError, match=f"data.{next(iter(options))} must be at least"):
        Digits(**options)


def test_an_empty_split_is_refused():
    class Hollow(DataModule):
        def load(self):
            x = torch.zeros(3, 2)
            return DataSpec("hollow", (2,)), {"train": TensorData(x), "val": TensorData(x[:0]), "test": TensorData(x)}

    module = Hollow(batch_size=1, num_workers=0, seed=0)
    assert module.problems() == ["data hollow: the val split is empty, every split needs at least one item; "
                                 "there are 6 in all"]


class Broken(DataModule):
    """One value is not a number."""

    def load(self):
        x = torch.zeros(5, 2)
        x[3, 1] = torch.nan
        parts = {"train": x, "val": x[:2], "test": x[:2]}
        return DataSpec("broken", (2,)), {name: TensorData(part) for name, part in parts.items()}


def test_problems_name_bad_values():
    found = Broken(batch_size=1, num_workers=0, seed=0).problems()
    assert found == ["train split: item 3 of broken holds a value that is not finite"]


def test_a_split_that_gives_no_batches_is_refused():
    class Bare(DataModule):
        def load(self):
            return DataSpec("bare", (2,)), dict.fromkeys(("train", "val", "test"), torch.zeros(5, 2))

    with pytest.raises(InputError, match="the train split is a Tensor.*TensorData"):
        Bare(batch_size=1, num_workers=0, seed=0).prepare()


class _Recorder(pl.LightningModule):
    """Keeps what each epoch was served."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[int, list] = {}

    def training_step(self, batch, number):
        self.seen.setdefault(self.current_epoch, []).append(batch.index.tolist())
        return self.weight * batch.x.float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_serves_each_epoch_in_its_own_order(workers):
    module = Toy(n_train=40, n_val=5, n_test=5, batch_size=8, num_workers=workers).prepare()
    expected = {}
    loader = module.train_dataloader()
    for epoch in range(3):
        loader.set_epoch(epoch)
        expected[epoch] = [batch.index.tolist() for batch in loader]
    recorder = _Recorder()
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)
    trainer.fit(recorder, datamodule=Toy(n_train=40, n_val=5, n_test=5, batch_size=8, num_workers=workers))
    assert recorder.seen == expected


def _serve(rank: int, meet: str, out: str) -> None:
    module = Digits(batch_size=64).prepare()
    loaders = module.train_dataloader(), module.val_dataloader()  # made before the processes join, as by train
    with joined(meet, rank):
        torch.save([[batch.index for batch in loader] for loader in loaders], out)


@fork
def test_two_real_processes(tmp_path):
    paths = [str(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    forked(_serve, *((rank, str(tmp_path / "meet"), paths[rank]) for rank in (0, 1)))
    (train0, val0), (train1, val1) = (torch.load(path, weights_only=True) for path in paths)
    whole = [batch.index for batch in Digits(batch_size=64).prepare().train_dataloader()]
    for a, b, batch in zip(train0, train1, whole, strict=True):
        assert torch.equal(a, batch[0::2]) and torch.equal(b, batch[1::2])
    assert torch.equal(torch.cat(val0 + val1).sort().values, torch.arange(180))


@pytest.mark.parametrize("labels, missing", [
    (torch.tensor([0, -1]), "1"), (torch.tensor([1, 7]), "0"), (torch.tensor([0.0, 1.0]), None),
])  # fmt: skip
def test_notes_on_faulty_labels_of_ones_own_data(labels, missing):
    class Mine(DataModule):
        def load(self):
            return DataSpec("mine", (3,), num_classes=2), dict.fromkeys(SPLITS, TensorData(torch.zeros(2, 3), labels))

    notes = Mine(batch_size=2, num_workers=0, seed=0).prepare().notes()
    assert [note for note in notes if "class" in note] == (
        [] if missing is None else [f"mine: no training item has class {missing} (1 of 2)"])
