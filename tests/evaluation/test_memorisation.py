"""Copies of training items are flagged, held-out items are not; ranks against scipy's."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import mannwhitneyu

from genmodels.evaluation.classes import class_accuracy, wilson
from genmodels.evaluation.memorisation import memorisation, nearest, smaller_than


def draws(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind, flagged", [("fresh", False), ("copies", True), ("near copies", True)])
def test_copies_are_flagged_and_held_out_items_are_not(kind, flagged):
    train, held = draws(500, 0), draws(300, 1)
    samples = {"fresh": draws(300, 2), "copies": torch.cat([train[:60], draws(240, 2)]),
               "near copies": train[:300] + 1e-3 * draws(300, 2)}[kind]
    found = memorisation(nearest(samples, train), nearest(held, train))
    assert found["flagged"] is flagged
    assert found["duplicates"] == (60 if kind == "copies" else 0)
    assert (found["z"] < -3) is flagged


def test_the_nearest_is_the_nearest():
    items, train = draws(40, 0), torch.cat([draws(300, 1), draws(40, 0)[:5]])
    truth = torch.cdist(items.double(), train.double()).min(1)
    found = nearest(items, train)
    assert torch.equal(found.index, truth.indices) and found.distance[:5].tolist() == [0.0] * 5
    assert torch.allclose(found.distance[5:], truth.values[5:])


def test_ranks_are_those_of_scipy_with_ties():
    a, b = (torch.randint(0, 9, (n,), generator=torch.Generator().manual_seed(n)).double() for n in (30, 50))
    z = smaller_than(a, b)
    p = mannwhitneyu(a.numpy(), b.numpy(), use_continuity=False, method="asymptotic", alternative="less").pvalue
    assert float(torch.special.ndtr(torch.tensor(z, dtype=torch.float64))) == pytest.approx(p, rel=1e-9)


def test_classes():
    found = class_accuracy(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 2]), 3, ("a", "b", "c"))
    assert found["confusion"] == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert [each["accuracy"] for each in found["per_class"]] == [0.5, 1.0, 1.0]
    assert found["per_class"][1]["name"] == "b" and wilson(0, 0) == [0.0, 1.0]


@pytest.mark.parametrize("offset, scale", [((2000.0, 5e4), (1.0, 1.0)), ((1e8, 0.0), (1.0, 1.0)),
                                           ((0.0, 3e9), (1e9, 1e-3))], ids=["offsets", "far", "unlike scales"])
def test_copies_are_found_wherever_the_data_lie(offset, scale):
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(300, 2, generator=generator, dtype=torch.float64) * torch.tensor(scale) + torch.tensor(offset)
    train = torch.cat([train, train[:1] + torch.tensor([0.0, 1e-3])])  # two that are all but equal
    found = nearest(train[:100], train)
    assert found.distance.tolist() == [0.0] * 100 and found.index.tolist() == list(range(100))


def test_many_equal_training_items_and_many_all_but_equal_ones_are_searched_whole():
    train = torch.tensor([[1e9, 0.0]], dtype=torch.float64).repeat(40, 1)
    train[:, 1] = torch.arange(40) * 1e-6  # beside 1e9 no product of float64 holds these
    items = torch.cat([train[[17]], train[[3]] + torch.tensor([1e8, 0.0]), train[[39]]])
    found = nearest(items, torch.cat([train, -train]))
    assert found.index[[0, 2]].tolist() == [17, 39] and found.distance.tolist() == [0.0, 1e8, 0.0]
