"""Pictures show the levels they are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from genmodels.core.data import DataSpec
from genmodels.evaluation.samples import evenly_changing
from genmodels.plots.images import columns_for, grid, images_of, in_turn, panels, picture_of, rendered, to_uint8

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
    assert columns_for([*range(10)] * 6, 60) == 10 and columns_for([*range(10)], 10) == 10
    assert columns_for([3, 5] * 32, 64) == 8  # four turns of two
    assert columns_for(None, 60) is columns_for([7] * 9, 9) is columns_for([*range(100)] * 2, 200) is None


def ink(picture, box) -> int:
    """Pixels of a part of a picture that are not white."""
    return int((np.asarray(picture.crop(box).convert("L")) < 128).sum())


def test_grids_are_legible_and_say_what_stands_where():
    x = torch.full((20, 1, 8, 8), 16, dtype=torch.uint8)  # white tiles: all ink is words
    spec = DataSpec("g", (1, 8, 8), levels=17, num_classes=10)
    cond, index = torch.arange(100, 120) % 10, torch.arange(100, 120)
    plain, labelled = picture_of(x, spec), picture_of(x, spec, cond, index)
    assert plain.size == (5 * 66 + 2, 4 * 66 + 2) and ink(plain, (0, 0, *plain.size)) == 0
    side, head = labelled.width - 10 * 66 - 2, labelled.height - 2 * 66 - 2
    assert 20 < side < 50 and 10 < head < 20  # numbers of three digits, one line
    for column in range(10):
        assert ink(labelled, (side + 66 * column, 0, side + 66 * column + 66, head)) > 3
    for row in range(2):
        assert ink(labelled, (0, head + 66 * row, side, head + 66 * row + 66)) > 20
    assert ink(labelled, (side, head + 2, *labelled.size)) == 0


def test_names_fit_their_column_and_stand_over_each_image_where_columns_have_several():
    tiles = [Image.new("L", (40, 40), 255)] * 6
    long = grid(tiles, 3, names=["a name that is much too long for a column of forty"] * 3 + ["b"] * 3)
    assert long.size == (3 * 42 + 2, 2 * (42 + 15) + 2)
    for row, column in ((0, 0), (0, 2), (1, 1)):
        assert ink(long, (2 + 42 * column, 57 * row, 42 * column + 44, 57 * row + 17)) > 3
    same = grid(tiles, 3, names=["7"] * 6)
    assert ink(same, (0, 0, 44, 17)) > 3 and ink(same, (44, 0, *same.size)) == 0  # one class all over is labelled once


def test_a_dollar_in_a_title_is_no_formula():
    figure, ((axes,),) = panels(4, 2)
    axes.set_title("From $5% to $6")  # which matplotlib would refuse as a formula
    assert rendered(figure).size == (400, 200)


def test_the_shown_frames_change_evenly():
    """x_t = (1 - s) noise + s data with s = t^8, as for a chain whose first half is noise alone."""
    generator = torch.Generator().manual_seed(0)
    noise, data = torch.randn(2, 4, 1, 8, 8, generator=generator)
    share = torch.linspace(0, 1, 400)[:, None, None, None, None] ** 8
    path = (1 - share) * noise + share * data
    chosen = evenly_changing(path, 9)
    assert chosen[0] == 0 and chosen[-1] == 399 and (chosen.diff() > 0).all()
    moved = share.flatten()[chosen].diff()
    assert float((moved - 1 / 8).abs().max()) < 0.03  # steps of s are 0.02 at most
    even = share.flatten()[torch.linspace(0, 399, 9).round().long()].diff()
    assert float(even.max()) > 0.6
    assert evenly_changing(path[:3], 9).tolist() == [0, 1, 2]
    still = evenly_changing(torch.zeros(5, 1, 2), 3)
    assert still[0] == 0 and (still.diff() > 0).all()


def test_points_have_a_picture_and_long_vectors_have_none():
    points = picture_of(torch.randn(50, 2), DataSpec("p", (2,)))
    assert points.size[0] > 100 and np.asarray(points).std() > 0
    alone = np.asarray(picture_of(torch.tensor([[1.0, 2.0]]), DataSpec("p", (2,))))
    income = np.asarray(picture_of(torch.randn(50, 2) * torch.tensor([1.0, 1e4]), DataSpec("p", (2,))))
    for picture in (alone, income):  # columns of pixels that are not white: the points fill the square
        assert picture.shape == np.asarray(points).shape and (picture.std(axis=(0, 2)) > 1).mean() > 0.4
    assert picture_of(torch.randn(5, 7), DataSpec("v", (7,))) is None


def test_continuous_values_are_rounded_to_the_nearest_grey():
    x = torch.tensor([0.0, 0.001, 0.0021, 0.999, 1.5]).view(-1, 1, 1, 1)
    greys = [image.getpixel((0, 0)) for image in images_of(x, DataSpec("greys", (1, 1, 1)))]
    assert greys == [0, 0, 1, 255, 255]


def test_classes_of_many_samples_are_found_in_linear_time():
    labels = [0] * 20_000 + [1]
    found = in_turn(labels, range(5, 5 + len(labels)))
    assert len(found) == len(labels) and found.index(1) == 4 and sum(found) == 1
