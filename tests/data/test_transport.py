"""Pairs of two data sets: independent, of one class where asked, the same ones whoever serves them."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.data.base import DataModule
from genmodels.data.loading import TensorData
from genmodels.data.transport import Transport
from genmodels.training.trainer import training_stream


class Numbers(DataModule):
    """Items `first`, `first` + 1, ..; item k has class k modulo 3."""

    def __init__(self, first: int, items: int):
        super().__init__(batch_size=4, num_workers=0, seed=0)
        self.first, self.items = first, items

    def load(self):
        k = torch.arange(self.items)
        data = TensorData((self.first + k).float()[:, None], k % 3)
        return DataSpec(f"from{self.first}", (1,), num_classes=3), dict.fromkeys(("train", "val", "test"), data)


def pairs(**options):
    return Transport(source=Numbers(100, 30), target=Numbers(0, 60), batch_size=6, **options).prepare()


def served(data, batches, seen=0):
    stream = iter(training_stream(data, seen))
    return [torch.stack([b.x[:, 0], b.source[:, 0]], 1) for b in (next(stream) for _ in range(batches))]


def test_pairs_of_training_are_drawn_anew_in_every_epoch_and_go_on_where_a_run_stopped():
    whole = served(pairs(), 25)
    assert all(torch.equal(a, b) for a, b in zip(served(pairs(), 5, seen=20), whole[20:], strict=True))
    one, two = (dict(torch.cat(part).int().tolist()) for part in (whole[:10], whole[10:20]))
    assert set(one) == set(two) == set(range(60)) and set(one.values()) <= set(range(100, 130))
    assert sum(one[k] == two[k] for k in one) < 12  # 2 by chance


def test_the_draws_are_uniform_and_independent_of_the_item():
    batch = torch.cat(served(pairs(), 500))  # 50 epochs
    counts = torch.bincount(batch[:, 1].long() - 100, minlength=30).double()
    assert float(((counts - 100) ** 2 / 100).sum()) < 29 + 4 * 58**0.5  # chi-squared of 29 degrees of freedom
    correlation = torch.corrcoef(batch.T.double())[0, 1]
    assert abs(float(correlation)) < 4 / 3000**0.5


def test_items_of_one_class_and_classes_that_are_chosen():
    data = pairs(same_class=True)
    batch = next(iter(data.val_dataloader()))
    assert data.spec.num_classes == 3 and torch.equal((batch.source[:, 0] - 100) % 3, batch.cond.float())
    data = pairs(source_classes=[1], target_classes=[2])
    batch = next(iter(data.loader("test", 50)))
    assert batch.cond is None and data.spec.num_classes is None and data.spec.name == "from_from100_1_to_from0_2"
    assert (batch.x % 3 == 2).all() and ((batch.source - 100) % 3 == 1).all() and len(batch) == 20
    assert data.sources("test").x.flatten().tolist() == list(range(101, 130, 3))


@pytest.mark.parametrize("name", ["moons", "digits"])
def test_held_out_items_of_one_set_do_not_come_with_themselves(name):
    data = Transport(source=name, target=name).prepare()
    for split in ("val", "test"):
        batch = next(iter(data.loader(split, 200)))
        ends = torch.stack([batch.x, batch.source]).flatten(2).double()
        same = (ends[0] == ends[1]).all(1)
        assert int(same.sum()) < 8  # 1 by chance
        cost, apart = (ends[0] - ends[1]).square().sum(1).mean(), ends.flatten(0, 1).var(0).sum()
        assert abs(float(cost / (2 * apart)) - 1) < 0.25
        again = next(iter(Transport(source=name, target=name).prepare().loader(split, 200)))
        assert torch.equal(again.source, batch.source)
    points = (data.sources("val").x[:, None] == data.split("val").target.__getitems__(torch.arange(50)).x).flatten(2)
    assert bool(points.all(2).any()) is (name == "digits")  # other points, and the same pictures


def test_fixed_pairs_use_all_source_items_about_equally():
    test = pairs().split("test")
    batch = test.__getitems__(torch.arange(60))
    assert torch.bincount(batch.source[:, 0].long() - 100).tolist() == [2] * 30
    assert torch.equal(test.__getitems__([7, 3]).source, batch.source[[7, 3]])
    few = Transport(source=Numbers(0, 60), target=Numbers(0, 20), batch_size=6).prepare().split("val")
    drawn = few.__getitems__(torch.arange(20)).source[:, 0]
    assert len(drawn.unique()) == 20 and float(drawn.max()) > 40


def test_points_are_drawn_and_pictures_are_not():
    assert Transport(source="moons", target="8gaussians").draws_items
    assert not Transport(source="moons", target="digits").draws_items


def test_what_does_not_fit():
    with pytest.raises(InputError, match=r"items of \(2,\), and data.target=digits of \(1, 8, 8\)"):
        Transport(source="moons", target="digits").prepare()
    with pytest.raises(InputError, match="two sets of the same classes"):
        Transport(same_class=True).prepare()
    with pytest.raises(InputError, match="no class 9, it has 3"):
        pairs(target_classes=[9])
    with pytest.raises(InputError, match="data.source must be one of digits"):
        Transport(source="mars")
