"""Items and masks that a user names: numbers, picture files, texts and ranges."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from genmodels.core.data import Batch, DataSpec, Latents, TextCondition
from genmodels.core.errors import InputError
from genmodels.data.image_folder import decode
from genmodels.data.text import to_bytes, to_text
from genmodels.data.vision import Digits
from genmodels.evaluation.materials import _speech_options, interpolate, read_items, read_mask, read_range, template
from genmodels.models.normalizing_flows import Glow
from genmodels.models.text_model import TextReader
from genmodels.plots.images import images_of
from genmodels.speech.text import CHARACTERS

SPEC = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)


@pytest.mark.parametrize("zoom", [8, 16, 80])
def test_a_picture_of_an_item_comes_back_as_the_item(tmp_path, zoom):
    x = torch.randint(0, 17, (1, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    images_of(x, SPEC, smallest=zoom)[0].save(tmp_path / "item.png")
    batch = read_items([str(tmp_path / "item.png")], None, SPEC, "edit")
    assert torch.equal(batch.x, x) and batch.cond is None


@pytest.mark.parametrize("make", [
    lambda: Image.fromarray((np.arange(64).reshape(8, 8) * 1040).astype("u2")),  # 16 bits
    lambda: Image.fromarray(np.eye(8, dtype="u1")[..., None] * np.array([200, 200, 200, 255], "u1"), "RGBA"),
    lambda: Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 24), dtype=np.uint8)),  # wide: cropped
], ids=["16 bits", "transparent", "wide"])  # fmt: skip
def test_pictures_are_read_as_in_training(tmp_path, make):
    file = tmp_path / "picture.png"
    make().save(file)
    expected = (decode(file, 8, 1).double() * 16 / 255).round().to(torch.uint8)
    assert torch.equal(read_items([str(file)], None, Digits().prepare().spec, "edit").x[0], expected)


def test_a_picture_becomes_levels_beyond_a_byte(tmp_path):
    Image.new("L", (8, 8), 200).save(tmp_path / "grey.png")
    deep = DataSpec("deep", (1, 8, 8), levels=1024)
    assert read_items([str(tmp_path / "grey.png")], None, deep, "edit").x.unique().tolist() == [round(200 * 1023 / 255)]
    with pytest.raises(InputError, match="a picture has 1 or 3 channels, and items here have 4: name an item"):
        read_items([str(tmp_path / "grey.png")], None, DataSpec("four", (4, 8, 8), levels=256), "edit")


@pytest.mark.parametrize("base", ["diagonal", "class"])
def test_latents_are_mixed_about_the_mean_of_the_base(base):
    """Half-way between two draws of the base is a draw of the base: of its mean, and of its distance to it."""
    model = Glow(SPEC, steps=1, hidden=8, class_conditional=base == "class", base=base).eval()
    model.initialize(Batch(torch.randint(0, 17, (32, 1, 8, 8)), torch.arange(32) % 10))
    mean = model.core.flow.base.mean
    with torch.no_grad():
        mean.copy_(3 + torch.randn(mean.shape, generator=torch.Generator().manual_seed(0)))
    mean = (mean if base == "diagonal" else mean[4]).flatten().detach()
    seen = {}
    model.latents = lambda ends, weights: Latents((mean + torch.eye(64)[:2],))
    model.from_latents = lambda between, cond, weights: seen.update(z=between.flatten())
    interpolate(model, Batch(torch.zeros(2, 1, 8, 8), torch.tensor([4, 4])), 3, "raw")
    half = (torch.eye(64)[0] + torch.eye(64)[1]) / 2**0.5
    torch.testing.assert_close(seen["z"] - mean, torch.stack([torch.eye(64)[0], half, torch.eye(64)[1]]))


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
    with pytest.raises(ValueError, match="a file is for models of images"):
        read_items(["a.png"], None, DataSpec("v", (2,), levels=None), "edit")
    with pytest.raises(ValueError, match="nothing is left to draw"):
        read_mask(str(tmp_path / "white.png"), SPEC, "mask")
    with pytest.raises(ValueError, match="nothing is kept"):
        read_mask(str(tmp_path / "black.png"), SPEC, "mask")


TEXT = DataSpec("text", (1, 12), levels=256, encoding="utf-8")


def test_a_text_keeps_all_but_its_gaps_and_what_it_lacks():
    known, keep = template(to_bytes("to __ or not"), "_", TEXT)
    assert to_text(known) == "to __ or not" and keep[0].tolist() == [c != "_" for c in "to __ or not"]
    assert template(to_bytes("to be"), "_", TEXT)[1][0].tolist() == [True] * 5 + [False] * 7
    ranged = template(to_bytes("to be or not"), "3:5", TEXT)[1][0].tolist()
    assert ranged == [True] * 3 + [False] * 2 + [True] * 7


@pytest.mark.parametrize("call, said", [
    (lambda: template(to_bytes("to be or not to be"), "_", TEXT), "has 18 bytes, and sequences here have 12"),
    (lambda: template(to_bytes("to be or not"), "_", TEXT), "nothing is left to draw"),
    (lambda: read_range("5:3", 8, "mask"), "mask=5:3 must be from:to"),
    (lambda: read_range("2:9", 8, "mask"), "within 0:8"), (lambda: read_range("m.png", 8, "mask"), "from:to"),
])  # fmt: skip
def test_parts_of_sequences_that_do_not_exist(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_recording_is_edited_in_the_voice_of_its_speaker():
    spec = DataSpec("speech", (2, 9), mel={"hop": 200, "sample_rate": 16000},
                    text={"symbols": CHARACTERS, "blanks": False, "language": "en"}, speakers=("anna", "ben"))
    tokens, mask = torch.tensor([TextReader(spec).tokens("a cab")]), torch.ones(1, 1, 5, dtype=torch.bool)
    batch = Batch(torch.zeros(1, 2, 8), TextCondition(tokens, mask, torch.tensor([1])), mask=None)
    durations = torch.tensor([[1, 2, 1, 3, 1]])
    model = SimpleNamespace(spec=spec, device="cpu", aligned=lambda *_: SimpleNamespace(durations=durations))
    found = _speech_options(model, batch, None, "ema")
    assert found == {"text": "a cab", "durations": durations.tolist(), "seconds": 0.1, "cond": 1}
    assert _speech_options(model, batch, "anna", "ema")["cond"] == "anna"
