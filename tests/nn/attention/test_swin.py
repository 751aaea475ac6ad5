"""Swin: the published order of the index, and resampling."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate

from genmodels.nn.attention import Attention, Swin2d
from genmodels.nn.attention.relative_bias import cubic_weights, resample


def test_index_vectors():
    assert Swin2d.index((2, 2)).tolist() == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert Swin2d.index((2, 3)).tolist() == [
        [7, 6, 5, 2, 1, 0], [8, 7, 6, 3, 2, 1], [9, 8, 7, 4, 3, 2],
        [12, 11, 10, 7, 6, 5], [13, 12, 11, 8, 7, 6], [14, 13, 12, 9, 8, 7],
    ]  # fmt: skip
    assert Swin2d.index((3, 2))[0].tolist() == [7, 6, 4, 3, 1, 0]


def table_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2 * size[0] - 1) * (2 * size[1] - 1), 3, generator=generator, dtype=torch.float64)


SIZES = [((3, 3), (5, 5)), ((4, 3), (2, 7)), ((2, 5), (5, 2)), ((4, 4), (3, 4)), ((1, 4), (3, 2)), ((7, 7), (8, 12))]


@pytest.mark.parametrize("size, space", SIZES)
def test_resampling_is_bicubic_with_aligned_corners(size, space):
    table = table_of(size)
    grid = table.view(2 * size[0] - 1, 2 * size[1] - 1, 3).permute(2, 0, 1)[None]
    target = (2 * space[0] - 1, 2 * space[1] - 1)
    wanted = interpolate(grid, target, mode="bicubic", align_corners=True)[0].permute(1, 2, 0).flatten(0, 1)
    assert torch.allclose(resample(table, size, space), wanted, atol=1e-12)


@pytest.mark.parametrize("size, space", [*SIZES, ((3, 4), (1, 4)), ((5, 2), (3, 1)), ((3, 3), (1, 1))])
def test_laws_of_resampling(size, space):
    table, shape = table_of(size), (2 * size[0] - 1, 2 * size[1] - 1, 3)
    target = (2 * space[0] - 1, 2 * space[1] - 1, 3)
    assert torch.allclose(resample(table, size, size), table, atol=1e-12)
    assert torch.allclose(resample(torch.ones_like(table), size, space), torch.ones(1, dtype=torch.float64), atol=1e-12)
    got = resample(table, size, space).view(target)
    for axis in (0, 1):
        mirrored = resample(table.view(shape).flip(axis).flatten(0, 1), size, space).view(target)
        assert torch.allclose(mirrored, got.flip(axis), atol=1e-12)
    assert torch.allclose(got[space[0] - 1, space[1] - 1], table.view(shape)[size[0] - 1, size[1] - 1], atol=1e-12)


def test_weights_of_cubic_convolution():
    for source, target in [(5, 9), (9, 5), (3, 1), (1, 3), (7, 7)]:
        weights = cubic_weights(source, target, like=torch.zeros((), dtype=torch.float64))
        assert weights.shape == (target, source)
        assert torch.allclose(weights.sum(1), torch.ones(target, dtype=torch.float64), atol=1e-12)


def test_the_index_is_not_saved_and_other_sizes_work():
    torch.manual_seed(0)
    attention = Attention(8, 2, Swin2d(8, 2, size=(3, 4)))
    assert list(attention.position.state_dict()) == ["table"] and attention.position.table.shape == (35, 2)
    for space in [(3, 4), (5, 7), (1, 6), (1, 1), (8, 2)]:
        assert attention(torch.randn(2, space[0] * space[1], 8), space=space)[0].isfinite().all()
    with pytest.raises(ValueError, match="35 positions are not the 3 x 4 of Swin2d"):
        attention(torch.randn(2, 35, 8))


def test_errors():
    with pytest.raises(ValueError, match="at least 1 each"):
        Swin2d(8, 2, size=(0, 3))
