"""Pictures show the levels they are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genmodels.data.spec import DataSpec
from genmodels.evaluation.pictures import columns_for, grid, images_of, picture_of, to_uint8

GRAY = DataSpec("g", (1, 4, 4), levels=17, num_classes=10)
COLOUR = DataSpec("c", (3, 4, 6), levels=256)


@pytest.mark.parametrize("levels", [2, 17, 256])
def test_levels_fill_the_range(levels):
    shown = to_uint8(torch.arange(levels), levels)
    assert shown[0] == 0 and shown[-1] == 255 and (shown.int().diff() > 0).all()


def test_colours_and_places_are_kept():
    x = torch.randint(0, 256, (3, 3, 4, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    images = images_of(x, COLOUR)
    assert images[1].size == (6, 4) and images[1].mode == "RGB"
    assert (np.asarray(images[1]) == x[1].permute(1, 2, 0).numpy()).all()
    large = images_of(x, COLOUR, smallest=12)
    assert large[0].size == (18, 12) and (np.asarray(large[0])[::3, ::3] == np.asarray(images[0])).all()


def test_a_grid_puts_sample_k_in_its_row_and_column():
    x = (torch.arange(6)[:, None, None, None] * 3).expand(6, 1, 4, 4).to(torch.uint8)
    sheet = np.asarray(grid(images_of(x, GRAY), columns=4, gap=2))
    assert sheet.shape == (2 * 6 + 2, 4 * 6 + 2)
    for k in range(6):
        row, column = divmod(k, 4)
        assert sheet[2 + row * 6, 2 + column * 6] == to_uint8(x[k], 17)[0, 0, 0]
    assert sheet[0, 0] == sheet[-3, -3] == 255


def test_a_column_for_each_class():
    assert columns_for(GRAY, 60, labelled=True) == 10
    assert columns_for(GRAY, 10, labelled=True) is columns_for(GRAY, 60, labelled=False) is None
    assert columns_for(COLOUR, 60, labelled=True) is None


def test_points_have_a_picture_and_long_vectors_have_none():
    points = picture_of(torch.randn(50, 2), DataSpec("p", (2,)))
    assert points.size[0] > 100 and np.asarray(points).std() > 0
    assert picture_of(torch.randn(5, 7), DataSpec("v", (7,))) is None
