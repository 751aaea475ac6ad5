"""Items and masks that a user names: numbers and picture files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from genmodels.data.digits import Digits
from genmodels.data.spec import DataSpec
from genmodels.evaluation.items import read_items, read_mask
from genmodels.evaluation.pictures import images_of

SPEC = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)


@pytest.mark.parametrize("zoom", [8, 16, 80])
def test_a_picture_of_an_item_comes_back_as_the_item(tmp_path, zoom):
    x = torch.randint(0, 17, (1, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    images_of(x, SPEC, smallest=zoom)[0].save(tmp_path / "item.png")
    batch = read_items([str(tmp_path / "item.png")], None, SPEC, "edit")
    assert torch.equal(batch.x, x) and batch.cond is None


def test_numbers_are_items_of_the_test_split_with_their_labels():
    data = Digits().prepare()
    truth = next(iter(data.loader("test", 2, [3, 17])))
    batch = read_items([3, "17"], lambda: data, SPEC, "interpolate")
    assert torch.equal(batch.x, truth.x) and torch.equal(batch.cond, truth.cond)


def test_a_mask_is_white_where_the_item_is_kept(tmp_path):
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:, :8] = 255
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    keep = read_mask(str(tmp_path / "mask.png"), SPEC, "mask")
    assert keep.shape == (1, 8, 8) and keep.dtype == torch.bool
    assert keep[:, :, :4].all() and not keep[:, :, 4:].any()


def test_errors_name_the_key(tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    Image.new("L", (8, 8), 0).save(tmp_path / "black.png")
    with pytest.raises(ValueError, match="inpaint: there is no file nowhere.png"):
        read_items(["nowhere.png"], None, SPEC, "inpaint")
    with pytest.raises(ValueError, match="is not a picture"):
        read_items([str(tmp_path / "text.png")], None, SPEC, "edit")
    with pytest.raises(ValueError, match="no images"):
        read_items(["a.png"], None, DataSpec("v", (2,), levels=None), "edit")
    with pytest.raises(ValueError, match="nothing is left to draw"):
        read_mask(str(tmp_path / "white.png"), SPEC, "mask")
    with pytest.raises(ValueError, match="nothing is kept"):
        read_mask(str(tmp_path / "black.png"), SPEC, "mask")
