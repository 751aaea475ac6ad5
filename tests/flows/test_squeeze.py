"""Squeezes: which value goes where, masks, and the padding before them."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.flows.composition import Compose
from genmodels.flows.squeeze import Flatten, PadToMultiple, Squeeze1d, Squeeze2d
from genmodels.verification.bijections import check_bijection


class ForwardOrderBack(Squeeze2d):
    """Ignores the order on the way back."""

    def _spread(self, z):
        return torch.nn.functional.pixel_shuffle(z, 2)


class ColumnsFirst(Flatten):
    """Fills the image column by column on the way back."""

    def _inverse(self, z, cond, mask):
        channels, height, width = self.shape
        return z.unflatten(1, (channels, width, height)).mT, z.new_zeros(len(z))


class AnyValidFrame(Squeeze1d):
    """Keeps the mask of the first frames, whatever the factor."""

    def out_mask(self, mask):
        return mask[..., : mask.shape[-1] // self.factor]


@pytest.mark.parametrize("layer, shape, check", [
    (ForwardOrderBack(order="alternative"), (3, 4, 6), "round trip"),
    (AnyValidFrame(), (3, 8), "masked content"),
    (ColumnsFirst((2, 3, 4)), (2, 3, 4), "round trip"),
])  # fmt: skip
def test_checks_catch_mutants(layer, shape, check):
    report = check_bijection(layer, shape, compiler=None)
    assert not report.passed and (check in report.failed or "padding" in report.failed)


def test_vectors():
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    expected = {
        "channel": [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]],
        "alternative": [[0, 2, 8, 10], [5, 7, 13, 15], [1, 3, 9, 11], [4, 6, 12, 14]],
        "far": [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]],
    }
    for order, rows in expected.items():
        z, logdet = Squeeze2d(order=order)(x)
        assert z.shape == (1, 4, 2, 2) and z.flatten(2)[0].tolist() == rows and logdet.tolist() == [0.0]
    z, _ = Squeeze1d()(torch.arange(6.0).reshape(1, 1, 6))
    assert z.tolist() == [[[0, 2, 4], [1, 3, 5]]]


def test_what_cannot_be_a_vector():
    for shape in ((3, None), ()):
        with pytest.raises(ValueError, match="every length must be known"):
            Flatten(shape)
    layer = Flatten((3, 4))
    with pytest.raises(ValueError, match=r"Flatten takes events of shape \(3, 4\), got \(4, 3\)"):
        layer(torch.zeros(1, 4, 3))
    with pytest.raises(ValueError, match=r"\(12,\) on its way back"):
        layer.inverse(torch.zeros(1, 11))
    with pytest.raises(ValueError, match="a vector has no frames"):
        layer(torch.zeros(1, 3, 4), mask=torch.ones(1, 1, 4).bool())


@pytest.mark.parametrize("factor, order", [(2, "channel"), (3, "channel"), (2, "alternative")])
def test_every_value_of_an_image(factor, order):
    """By loops over channels and offsets."""
    channels, offsets = 2, [(i, j) for i in range(factor) for j in range(factor)]
    x = torch.randn(2, channels, 2 * factor, factor, generator=torch.Generator().manual_seed(0))
    z, _ = Squeeze2d(factor, order=order)(x)
    for c in range(channels):
        for p, (i, j) in enumerate(offsets if order == "channel" else [(0, 0), (1, 1), (0, 1), (1, 0)]):
            out = factor**2 * c + factor * i + j if order == "channel" else channels * p + c
            assert torch.equal(z[:, out], x[:, c, i::factor, j::factor])


def test_halves_of_the_alternative_order_are_checkerboards():
    """The first half of the channels holds the pixels with i + j even, of all colours."""
    i, j = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    z, _ = Squeeze2d(order="alternative")(((i + j) % 2).expand(1, 3, 4, 4).float())
    assert not z[:, :6].any() and z[:, 6:].all()


def test_every_value_of_a_sequence():
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    z, _ = Squeeze1d(4)(x)
    for j in range(4):
        for c in range(3):
            assert torch.equal(z[:, 3 * j + c], x[:, c, j::4])


def test_masks():
    mask = (torch.arange(6) < torch.tensor([[6], [4], [0]]))[:, None]
    layer = Squeeze1d()
    shorter = layer.out_mask(mask)
    assert shorter[:, 0].tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert torch.equal(layer.in_mask(shorter), mask)
    everywhere = torch.rand(3, 2, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(layer.out_mask(everywhere), layer(everywhere.float())[0].bool())
    assert torch.equal(layer.in_mask(layer.out_mask(everywhere)), everywhere)


@pytest.mark.parametrize("order", ["channel", "alternative", "far"])
def test_masks_of_images_go_with_the_pixels(order):
    layer, mask = Squeeze2d(order=order), torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(layer.out_mask(mask), layer(mask.float())[0].bool())
    assert torch.equal(layer.in_mask(layer.out_mask(mask)), mask)


@pytest.mark.parametrize("layer, shape, message", [
    (Squeeze2d(), (3, 4, 5), r"Squeeze2d takes events of shape \(C, H, W\) with H and W divisible by 2, got"),
    (Squeeze2d(), (3, 4), "Squeeze2d"),
    (Squeeze1d(), (3, 5), r"Squeeze1d takes .* T divisible by 2 \(PadToMultiple makes it so\), got \(3, 5\)"),
    (Squeeze1d(), (3,), "Squeeze1d"),
])  # fmt: skip
def test_events_that_do_not_fit(layer, shape, message):
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(2, *shape))
    with pytest.raises(ValueError, match=f"layer 0 .{type(layer).__name__}. does not take what the input leaves"):
        Compose([layer], shape)


@pytest.mark.parametrize("layer, shape", [(Squeeze2d(), (6, 2, 2)), (Squeeze1d(), (3, 4))])
def test_latents_that_do_not_fit(layer, shape):
    with pytest.raises(ValueError, match="with C divisible by"):
        layer.inverse(torch.zeros(2, *shape))


@pytest.mark.parametrize("layer, shape", [(Squeeze2d(), (3, 4, 4)), (Squeeze2d(order="alternative"), (3, 4, 4)),
                                          (Squeeze1d(), (3, 4))])  # fmt: skip
def test_empty_batches(layer, shape):
    z, logdet = layer(torch.zeros(0, *shape))
    assert z.shape == (0, *layer.out_shape(shape)) and logdet.shape == (0,)
    assert layer.inverse(z)[0].shape == (0, *shape)


def test_open_lengths():
    assert Squeeze1d(3).out_shape((4, None)) == (12, None) and Squeeze1d(3).in_shape((12, None)) == (4, None)
    assert Squeeze2d().out_shape((4, 6, None)) == (16, 3, None) and Squeeze2d().in_shape((4, 6, None)) == (1, 12, None)


@pytest.mark.parametrize("make", [lambda: Squeeze2d(order="spiral"), lambda: Squeeze2d(3, order="alternative"),
                                  lambda: Squeeze2d(0), lambda: Squeeze1d(0), lambda: PadToMultiple(0)])  # fmt: skip
def test_options_that_do_not_exist(make):
    with pytest.raises(ValueError, match="Squeeze2d|order must|factor must be at least 1"):
        make()


# ---- padding ----


def test_padding_fills_with_the_floor_and_counts_it():
    x = 1 + torch.rand(4, 2, 7, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [1], [0]]))[:, None]
    padding = PadToMultiple(4)
    longer, longer_mask = padding(x.masked_fill(~mask, torch.nan), mask)
    assert longer.shape == (4, 2, 8) and longer_mask.sum(-1)[:, 0].tolist() == [8, 4, 4, 0]
    for row, (length, total) in enumerate([(7, 8), (4, 4), (1, 4), (0, 0)]):
        assert torch.equal(longer[row, :, :length], x[row, :, :length])
        assert (longer[row, :, length:total] == math.log(1e-5)).all() and (longer[row, :, total:] == 0).all()
        assert longer_mask[row, 0, :total].all() and not longer_mask[row, 0, total:].any()
    assert torch.equal(padding.inverse(longer, 7)[0], x[0])
    layer = Squeeze1d(4)
    assert torch.equal(layer.in_mask(layer.out_mask(longer_mask)), longer_mask)


@pytest.mark.parametrize("length, expected", [(6, 6), (7, 9)])
def test_padding_without_a_mask(length, expected):
    x, mask = PadToMultiple(3, floor=-2.0)(torch.zeros(2, 1, length))
    assert x.shape[-1] == expected and mask is None and (x[..., length:] == -2).all()


@pytest.mark.parametrize("x, mask", [
    (torch.zeros(2, 3), None),
    (torch.zeros(2, 3, 4), torch.ones(2, 1, 4)),
    (torch.zeros(2, 3, 4), torch.ones(2, 4, dtype=torch.bool)),
])  # fmt: skip
def test_padding_refuses(x, mask):
    with pytest.raises(ValueError, match="PadToMultiple"):
        PadToMultiple(2)(x, mask)


def test_integers_are_padded_with_integers_only(refuses):
    refuses(ValueError, r"appends -11.51, which torch.uint8 cannot hold: give floor=0", PadToMultiple(4),
            torch.ones(1, 1, 3, dtype=torch.uint8))
    assert PadToMultiple(4, floor=0)(torch.ones(1, 1, 3, dtype=torch.uint8))[0].tolist() == [[[1, 1, 1, 0]]]
