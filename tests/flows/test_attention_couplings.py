"""Couplings whose network has a block of attention obey every law of bijections, for every kind of block."""

from __future__ import annotations

import pytest
import torch

from genmodels.flows.coupling import ChannelSplit, Checkerboard, Coupling
from genmodels.flows.elementwise import Affine
from genmodels.nn import ATTENTION, ConvNet, GatedConvNet, ResidualConvNet
from genmodels.verification.bijections import check_bijection

#: A coupling network does not know the height of its maps, and `none` is the business of other tests.
KINDS = [name for name in ATTENTION if name not in ("none", "mel")]
MAPS = [name for name in KINDS if 2 in ATTENTION[name].dims]
#: Scores that choose one key have no derivative in evaluation, where checks are made.
UNSEEN = {"hard": ("dead parameters",)}
SEQUENCES = [name for name in KINDS if 1 in ATTENTION[name].dims]


def coupling(attention, dims, net=ConvNet, split=ChannelSplit):
    torch.manual_seed(0)
    split = split(4)
    seen = 4 if isinstance(split, Checkerboard) else split.kept
    element = Affine(split.changed)
    wide = element.params_per_dim * split.changed
    return Coupling(split, element, net(seen, wide, hidden=8, depth=1, dims=dims, attention=attention, heads=2))


@pytest.mark.parametrize("attention", MAPS)
def test_images(attention):
    report = check_bijection(coupling(attention, 2), (4, 3, 5), compiler=None, without=UNSEEN.get(attention, ()))
    report.raise_if_failed()


@pytest.mark.parametrize("attention", SEQUENCES)
def test_sequences_with_masks(attention):
    report = check_bijection(coupling(attention, 1), (4, 7), compiler=None, without=UNSEEN.get(attention, ()))
    report.raise_if_failed()
    assert report["padding"].status == report["masked content"].status == "passed"


@pytest.mark.parametrize("net", [ResidualConvNet, GatedConvNet])
@pytest.mark.parametrize("split", [ChannelSplit, Checkerboard])
def test_other_networks_and_splits(net, split):
    check_bijection(coupling("swin2d", 2, net, split), (4, 4, 3), compiler=None).raise_if_failed()


def test_the_laws_notice_a_block_that_is_not_the_same_in_both_directions(monkeypatch):
    layer = coupling("plain", 1)

    def restless(h, mask):
        return h + torch.randn_like(h)

    monkeypatch.setattr(type(layer.net), "attend", lambda self, h, mask: restless(h, mask))
    assert "round trip" in check_bijection(layer, (4, 7), compiler=None).failed
