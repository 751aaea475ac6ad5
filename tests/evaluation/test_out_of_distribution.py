"""Two sets told apart by their likelihoods, or not."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.likelihood import Likelihood
from genmodels.data.speech import Speech
from genmodels.data.vision import Digits
from genmodels.evaluation.out_of_distribution import (
    OtherDataStage,
    auroc,
    auroc_of_typicality,
    compressed_bits,
    less_complexity,
    other_data,
    typicality,
)


def test_the_area_is_the_share_of_pairs_in_order():
    a, b = (torch.randint(0, 6, (n,), generator=torch.Generator().manual_seed(n)).double() for n in (17, 23))
    pairs = (a[:, None] > b).double() + 0.5 * (a[:, None] == b).double()
    area, error = auroc(a, b)
    assert area == pytest.approx(float(pairs.mean()), abs=1e-12)
    variance = pairs.mean(1).var() / len(a) + pairs.mean(0).var() / len(b)
    assert error == pytest.approx(float(variance.sqrt()), abs=1e-12)
    assert auroc(b, a)[0] == pytest.approx(1 - area, abs=1e-12)
    assert auroc(torch.ones(3), torch.zeros(4)) == (1.0, 0.5)  # three draws can miss an event of probability 1/2
    assert auroc(torch.tensor([1.0]), torch.tensor([0.0, 2.0]))[1] == 0.5


def test_the_error_of_the_area_is_that_of_the_bootstrap():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(80, generator=draw) + 0.5, torch.randn(60, generator=draw)
    again = [auroc(a[torch.randint(80, (80,), generator=draw)], b[torch.randint(60, (60,), generator=draw)])[0]
             for _ in range(400)]
    assert auroc(a, b)[1] == pytest.approx(float(torch.tensor(again).std()), rel=0.15)  # four errors of 1/sqrt(800)


def test_sequences_of_other_lengths_are_compared_per_dimension():
    draw = torch.Generator().manual_seed(0)

    def of_lengths(low: int, high: int) -> Likelihood:
        dims = 80 * torch.randint(low, high, (200,), generator=draw)
        return Likelihood(-1.4 * dims + torch.randn(200, generator=draw) * dims.sqrt(), "lower_bound", dims)

    own, other = of_lengths(40, 80), of_lengths(60, 120)
    data = SimpleNamespace(split=lambda name: range(200))
    state = SimpleNamespace(opened=SimpleNamespace(spec=DataSpec("speech", (80, 120), mel={}), datamodule=data),
                            request=SimpleNamespace(ood_data={}, split="test"), arrays={})
    likelihood = SimpleNamespace(of_first_line=lambda: (SimpleNamespace(label="bound"), own))
    found = OtherDataStage(state, likelihood)._entry("other", 0, other, data)
    assert auroc(own.nats, other.nats)[0] > 0.85  # of whole items: the lengths
    assert abs(found.auroc - 0.5) < 3 * found.se and "since lengths differ" in found.said
    assert found.value == "nats_per_dim" and found.mean_in == pytest.approx(1.4, abs=0.01)
    assert torch.equal(state.arrays[found.values], other.nats / other.dims)
    assert torch.equal(state.arrays[found.inside], own.nats / own.dims)


def test_energies_without_their_constant_are_in_nats():
    x = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    data = SimpleNamespace(split=lambda name: range(3), items=lambda split, index: SimpleNamespace(x=x[index]))
    state = SimpleNamespace(opened=SimpleNamespace(spec=DataSpec("digits", (1, 8, 8), levels=17), datamodule=data),
                            request=SimpleNamespace(ood_data={}, split="test"), arrays={})
    own, other = (Likelihood(torch.tensor([-80.0, -90.0, -70.0]) - k, "unnormalised", 64, 17, index=torch.arange(3))
                  for k in (0, 5))
    likelihood = SimpleNamespace(of_first_line=lambda: (SimpleNamespace(label="energy"), own))
    found = OtherDataStage(state, likelihood)._entry("other", 0, other, data)
    assert (found.value, found.mean_in, found.mean_out) == ("unnormalised nats", 80.0, 85.0)


def ratio(draw, measured, repetitions=300):
    """The error that is stated over the standard deviation between repetitions."""
    areas, errors = zip(*(measured(*draw()) for _ in range(repetitions)), strict=True)
    return float(torch.tensor(errors).square().mean().sqrt() / torch.tensor(areas).std())


@pytest.mark.parametrize("n, m, mean, spread", [(100, 100, 1.0, 0.2), (20, 300, 1.0, 1.0), (100, 100, 0.0, 2.0)])
def test_the_error_of_typicality_holds_that_of_the_mean(n, m, mean, spread):
    def draw():
        return torch.randn(n, generator=source), mean + spread * torch.randn(m, generator=source)

    source = torch.Generator().manual_seed(0)
    assert 0.87 < ratio(draw, auroc_of_typicality) < 1.17  # three errors of 1/sqrt(600)
    if mean:  # mutant: as if the mean were known
        assert ratio(draw, lambda a, b: auroc(typicality(a), typicality(b, a))) < 0.8


def test_all_pairs_in_order_have_the_rule_of_three():
    inside = torch.randn(20, generator=torch.Generator().manual_seed(0))
    outside = (inside.mean() + 1.2 * (inside - inside.mean()).abs().max()).expand(10)
    area, error = auroc_of_typicality(inside, outside)
    assert area == 1.0 and error >= 0.15


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.6])
def test_the_error_of_pairs(correlation):
    def draw():
        a, b = torch.randn(2, 100, generator=source)
        return a, 0.2 + correlation * a + math.sqrt(1 - correlation**2) * b

    source = torch.Generator().manual_seed(0)
    assert 0.87 < ratio(draw, lambda a, b: auroc(a, b, paired=True)) < 1.17
    assert not correlation or abs(math.log(ratio(draw, auroc))) > 0.2  # mutant: as if they were independent


def test_typicality_is_the_distance_to_the_mean_of_the_others():
    nats = torch.tensor([-1.0, -4.0, -7.0])
    assert typicality(nats).tolist() == [-4.5, 0.0, -4.5]  # of -5.5, -4, -2.5
    assert typicality(nats, torch.tensor([-6.0, -8.0])).tolist() == [-6.0, -3.0, 0.0]
    with pytest.raises(InputError, match="a single item needs others"):
        typicality(nats[:1])


def test_a_flat_picture_is_not_in_distribution_because_it_is_likely():
    x = torch.randint(0, 256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    x[1] = 7
    noisy, flat = compressed_bits(x, 256).tolist()
    assert compressed_bits(x.long(), 256).tolist() == [noisy, flat]  # however they are stored
    # 192 bytes of noise do not get shorter; a file of one colour has about 70 bytes, heads and all.
    assert 192 * 8 < noisy < 192 * 8 + 800 and flat < 800
    assert compressed_bits(x[:, :2], 256).tolist()[0] >= 128 * 8  # not three channels: zlib
    # In bits: an item of 0 nats, one that is 100 bits likelier and far simpler.
    both = less_complexity(torch.tensor([0.0, 100 * math.log(2)]), x, 256)
    assert both.tolist() == pytest.approx([noisy, flat + 100])


@pytest.mark.parametrize("name", ["noise", "shuffled"])
def test_items_with_texts_or_of_several_lengths_are_not_altered(name):
    """Padding would become part of the sound."""
    with pytest.raises(InputError, match=f"ood={name} is for items of one size without texts, unlike those of"):
        other_data(name, {}, Speech().prepare(), [])


@pytest.mark.parametrize("name", ["noise", "shuffled"])
def test_sets_that_are_always_at_hand(name):
    digits = Digits().prepare()
    other = other_data(name, {}, digits, [])
    first, second = (next(iter(other.loader("test", 359))) for _ in range(2))
    true = next(iter(digits.loader("test", 359)))
    assert torch.equal(first.x, second.x) and other.spec.name == f"digits, {name}"
    other.spec.check(first)
    assert torch.equal(first.cond, true.cond) and not torch.equal(first.x, true.x)
    if name == "shuffled":
        assert torch.equal(first.x.flatten(1).sort(1).values, true.x.flatten(1).sort(1).values)


def test_a_set_that_is_not_there_names_the_options_of_other_data():
    with pytest.raises(InputError, match=r"^ood=arrays needs ood_data\.file=\.\.\.$"):
        other_data("arrays", {}, Digits(), [])
    with pytest.raises(InputError, match=r"^ood_data\.file=none\.npz does not exist"):
        other_data("arrays", {"file": "none.npz"}, Digits(), [])


def test_an_unknown_set_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'fashion_mnist'"):
        other_data("fashion-mnist", {}, Digits(), [])
