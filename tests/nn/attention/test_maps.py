"""Maps of any height and width: turned, mirrored, of any duration."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import (
    Attention,
    Rotary2d,
    Swin2d,
)
from tests.nn.attention.table import draw, worst


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: Swin2d(8, 2, size=(3, 4)), lambda: Rotary2d(8, 2)])
@pytest.mark.parametrize("space", [(3, 4), (2, 5), (1, 3), (4, 1)])
def test_turning_a_map_over_its_diagonal(make, space):
    """A map with its axes exchanged, and a scheme with its axes exchanged, give the output with its axes exchanged."""
    torch.manual_seed(0)
    attention = Attention(8, 2, make()).double()
    other = Attention(8, 2, make()).double()
    other.load_state_dict(attention.state_dict())
    position = other.position
    if isinstance(position, Swin2d):
        grid = position.table.data.unflatten(0, (5, 7))
        position.table.data, position.size = grid.transpose(0, 1).flatten(0, 1), (4, 3)
        attention.position.table.data.mul_(50)
        position.table.data.mul_(50)
    else:  # the first half of each head is for rows: exchange the halves of q and k
        for projection in (other.project_q, other.project_k):
            for tensor in (projection.weight, projection.bias):
                tensor.data = tensor.data.unflatten(0, (2, 2, 2)).flip(1).flatten(0, 2)
    height, width = space
    x = draw(1, height * width, 8)
    turned = x.unflatten(1, space).transpose(1, 2).flatten(1, 2)
    y = attention(x, space=space)[0].unflatten(1, space).transpose(1, 2).flatten(1, 2)
    assert worst(other(turned, space=(width, height))[0], y) < 1e-6


@torch.no_grad()
def mirror_error(position, space=(3, 4)):
    """With the table mirrored, the mirrored map has the mirrored output."""
    attention, x = Attention(8, 2, position).double(), draw(1, 12, 8)
    y = attention(x, space=space)[0]
    rows, columns = (2 * n - 1 for n in position.size)
    position.table.data = position.table.data.unflatten(0, (rows, columns)).flip(1).flatten(0, 1)
    mirrored = attention(x.unflatten(1, space).flip(2).flatten(1, 2), space=space)[0]
    return worst(mirrored.unflatten(1, space).flip(2).flatten(1, 2), y)


class Swapped(Swin2d):
    """A fault: height and width are exchanged."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        return super().score_bias(q, q0, k0, Lq, Lk, space and space[::-1])


@pytest.mark.parametrize("size", [(3, 4), (2, 2), (5, 3)])
def test_a_mirrored_table_mirrors_the_output(size):
    torch.manual_seed(0)
    for kind, bound in ((Swin2d, 1e-6), (Swapped, None)):
        position = kind(8, 2, size=size)
        torch.nn.init.normal_(position.table, std=2.0)
        error = mirror_error(position)
        assert error < bound if bound else error > 1e-2
