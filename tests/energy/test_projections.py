"""Directions with E[v v^T] = I over the whole event."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.energy import PROJECTIONS, Rademacher
from genmodels.random import KeyedGenerator

SHAPES = [(5,), (2, 2, 3), (3, 4)]


def white(law, shape, draws=100_000):
    v = law.draw((draws, *shape), torch.Generator().manual_seed(0), dtype=torch.float64).flatten(1)
    dims = v.shape[1]
    products = v[:, :, None] * v[:, None, :]
    error = products.std(0) / math.sqrt(draws) + 1e-12
    assert ((products.mean(0) - torch.eye(dims, dtype=torch.float64)).abs() < 5 * error).all()
    assert (v.mean(0).abs() < 5 / math.sqrt(draws)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_white(name, shape):
    white(PROJECTIONS[name](), shape)


class RowsOfUnitLength:
    """The sphere of every row of the event by itself, with the radius of the whole."""

    def draw(self, shape, generator, *, dtype):
        v = torch.randn(shape, generator=generator, dtype=dtype)
        return v / v.norm(dim=-1, keepdim=True) * math.sqrt(math.prod(shape[1:]))


class CorrelatedRows:
    def draw(self, shape, generator, *, dtype):
        return torch.randn((shape[0], *shape[1:-1], 1), generator=generator, dtype=dtype).expand(shape)


@pytest.mark.parametrize("bug", [RowsOfUnitLength(), CorrelatedRows()])
def test_law_catches(bug):
    with pytest.raises(AssertionError):
        white(bug, (3, 4), draws=20_000)


def test_the_sphere_has_one_radius():
    v = PROJECTIONS["sphere"]().draw((50, 3, 4), torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(v.flatten(1).square().sum(1), torch.full((50,), 12.0, dtype=torch.float64))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_direction_is_the_same_alone_and_in_a_batch(name):
    law = PROJECTIONS[name]()
    whole = law.draw((8, 2, 3), KeyedGenerator(0, torch.arange(8), "v", 3))
    alone = law.draw((1, 2, 3), KeyedGenerator(0, torch.tensor([5]), "v", 3))
    assert torch.equal(whole[5:6], alone)
    again = KeyedGenerator(0, torch.arange(8), "v", 3)
    assert not torch.equal(law.draw((8, 2, 3), again), law.draw((8, 2, 3), again))


def test_rademacher_in_half_precision():
    v = Rademacher().draw((4, 3), torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    assert v.dtype == torch.bfloat16 and (v.abs() == 1).all()
