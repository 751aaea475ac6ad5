"""Fixed orders: where each channel goes, and its way back."""

from __future__ import annotations

import pytest
import torch

from genmodels.flows.linear import Flip, Permute
from genmodels.verification.bijections import check_bijection


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(5, 2, 3), (5, 4), (5,), (1,)])
@pytest.mark.parametrize("make", [Flip, lambda channels: Permute.random(channels, generator(1))])
def test_laws(make, shape):
    compiler = "aot_eager" if len(shape) == 3 else None
    check_bijection(make(shape[0]), shape, compiler=compiler).raise_if_failed()


class SameIndexBack(Permute):
    """Forgets to invert the order."""

    def _inverse(self, z, cond, mask):
        return z.index_select(1, self.index), z.new_zeros(len(z))


def test_laws_catch_a_planted_bug():
    assert check_bijection(SameIndexBack([1, 2, 0]), (3,), compiler=None).failed == ["round trip"]


def test_order():
    z, logdet = Permute([2, 0, 1])(torch.tensor([[10.0, 11.0, 12.0]]))
    assert z.tolist() == [[12.0, 10.0, 11.0]] and logdet.tolist() == [0.0]
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(Flip(3)(x)[0], x.flip(1)) and torch.equal(Flip(3).inverse(x)[0], x.flip(1))


def test_random_orders_come_from_the_generator():
    before = torch.get_rng_state()
    orders = [Permute.random(20, generator(seed)).index.tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == list(range(20))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_order_brings_its_inverse():
    one, other = Permute.random(9, generator(0)), Permute.random(9, generator(1))
    x = torch.randn(2, 9, generator=generator())
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x)[0], one(x)[0]) and torch.equal(other.inverse(other(x)[0])[0], x)
    assert not list(one.parameters())


@pytest.mark.parametrize("index", [[0, 0, 1], [1, 2, 3], [0.0, 1.0], [[0, 1]]])
def test_what_is_no_permutation(index):
    with pytest.raises(ValueError, match="is not a permutation of 0 .. C-1"):
        Permute(index)


def test_another_number_of_channels():
    for call in (Flip(3), Flip(3).inverse):
        with pytest.raises(ValueError, match=r"Flip takes events of shape \(3, ...\), got \(4, 5\)"):
            call(torch.zeros(2, 4, 5))
