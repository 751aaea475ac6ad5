"""Two sets told apart by their likelihoods, or not."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.data.vision import Digits
from genmodels.evaluation.out_of_distribution import auroc, other_data


def test_the_area_is_the_share_of_pairs_in_order():
    a, b = (torch.randint(0, 6, (n,), generator=torch.Generator().manual_seed(n)).double() for n in (17, 23))
    pairs = (a[:, None] > b).double() + 0.5 * (a[:, None] == b).double()
    area, error = auroc(a, b)
    assert area == pytest.approx(float(pairs.mean()), abs=1e-12) and 0 < error < 0.2
    assert auroc(b, a)[0] == pytest.approx(1 - area, abs=1e-12)
    assert auroc(torch.ones(3), torch.zeros(4)) == (1.0, 0.0)


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


def test_an_unknown_set_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'fashion_mnist'"):
        other_data("fashion-mnist", {}, Digits(), [])
