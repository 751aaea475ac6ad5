"""Feature networks: named, hashed, the same in every batch and every process; a missing download in one line."""

from __future__ import annotations

from urllib.error import URLError

import pytest
import torch
import torchvision.models

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.evaluation.features import Items, chosen_network, fewest_items, network_for, wilson

SHAPES = {"images": (1, 8, 8), "large images": (3, 20, 24), "sequences": (5, 12), "vectors": (3,)}


def items(name: str) -> Items:
    shape = SHAPES[name]
    levels = None if name == "vectors" else 17
    x = torch.randint(0, 17, (40, *shape), generator=torch.Generator().manual_seed(0))
    x = x.float() if levels is None else x.to(torch.uint8)
    return Items(DataSpec(name, shape, levels=levels), x[:30], x[30:])


@pytest.mark.parametrize("name", SHAPES)
def test_features_do_not_depend_on_the_batch_or_on_what_ran_before(name):
    given = items(name)
    first = network_for(given)
    torch.randn(17)
    second = network_for(given)
    assert first.sha256 == second.sha256 and first.name == ("coordinates" if name == "vectors" else "random-conv")
    assert torch.allclose(first(given.test, rows=3), second(given.test), atol=1e-6)
    assert first(given.test).shape == (10, first.dims) and chosen_network(given.spec) == first.name
    assert fewest_items(given.spec) == (2 * first.dims if first.moments else 4)


def test_items_longer_than_all_of_training_stay_in_range():
    """Where every training mel is silent nothing varies, and what sounds there must not be scaled by that."""
    x = torch.randn(40, 5, 12, generator=torch.Generator().manual_seed(0)) - 5
    x[:, :, 9:] = -11.5
    longer = x[30:].clone()
    longer[0, :, 9:] = -5.0
    network = network_for(Items(DataSpec("mels", (5, 12)), x[:30], longer))
    ordinary = network(x[30:])
    assert network(longer).abs().max() < 20 * ordinary.abs().max() and not torch.allclose(network(longer), ordinary)


def test_inception_needs_a_range_of_values():
    with pytest.raises(InputError, match="grey or colour images of integers"):
        chosen_network(DataSpec("greys", (1, 8, 8)), "inception")
    assert chosen_network(DataSpec("digits", (1, 8, 8), levels=17), "inception") == "inception"


def test_one_training_item_has_no_scale():
    with pytest.raises(InputError, match="p has a single training item"):
        network_for(Items(DataSpec("p", (2,)), torch.randn(1, 2), torch.randn(5, 2)))


def test_columns_without_spread_are_not_enlarged():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 7.0
    network = network_for(Items(DataSpec("table", (3,)), x[:30], x[30:]))
    found = network(x[30:] + torch.tensor([0.0, 0.1, 0.0]))
    assert torch.allclose(found[:, 1], torch.tensor(0.1), atol=1e-5)
    assert torch.allclose(network(x[:30])[:, 0].std(), torch.tensor(1.0))


def test_weights_that_cannot_be_had_are_named_in_one_line(monkeypatch, refuses):
    def offline(*arguments, **options):
        raise URLError("no route to host")

    monkeypatch.setattr(torchvision.models, "inception_v3", offline)
    message = refuses(InputError, None, network_for, items("images"), "inception")
    for word in ("inception_v3_google", "https://", "no route to host", "place it in", "checkpoints"):
        assert word in message


@pytest.mark.parametrize("data, name, said", [("vectors", "random-conv", "coordinates"),
                                              ("images", "coordinates", "is for vectors"),
                                              ("images", "classifier", "needs labels"),
                                              ("sequences", "inception", "grey or colour images")])
def test_networks_say_what_they_are_for(data, name, said):
    with pytest.raises(InputError, match=said):
        network_for(items(data), name)


def test_the_accuracy_of_the_classifier_has_an_interval(monkeypatch):
    monkeypatch.setattr("genmodels.evaluation.features._STEPS", 2)
    given = items("images")
    labels = given.train[:, 0, 0, 0].long() % 2, given.test[:, 0, 0, 0].long() % 2
    spec = DataSpec("images", SHAPES["images"], levels=17, num_classes=2)
    network = network_for(Items(spec, given.train, given.test, *labels), "classifier")
    hits = int((network.classes(given.test) == labels[1]).sum())
    assert network.accuracy == hits / 10 and network.interval == wilson(hits, 10) == network.described()["interval"]
    assert network.interval[0] < network.accuracy < network.interval[1] or hits in (0, 10)
