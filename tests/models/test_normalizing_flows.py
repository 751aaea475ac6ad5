"""Jet as a model: published sizes, conditioning, options that reach the flow."""

from __future__ import annotations

import torch

from genmodels.core.data import DataSpec
from genmodels.flows.coupling import Coupling
from genmodels.models.normalizing_flows import Jet

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)


def test_options_reach_the_flow():
    model = Jet(DIGITS, couplings=3, width=16, depth=2, heads=2, attention="swin2d", class_conditional=True)
    nets = [layer.net for layer in model.core.modules() if isinstance(layer, Coupling)]
    assert len(nets) == 3 and all(len(net.transformer.blocks) == 2 and net.uses_cond for net in nets)
    assert model.header()["model"]["attention"] == "swin2d"


def test_the_published_size_has_the_published_depth():
    """ImageNet 64: 64 couplings of 5 layers of width 512; patches of 4 make 256 tokens of 48 numbers."""
    with torch.device("meta"):
        spec = DataSpec("imagenet64", (3, 64, 64), levels=256)
        model = Jet(spec, patch=4, couplings=1, spatial=1, width=512, depth=5, heads=8, ema_decay=0)
    each = sum(p.numel() for p in model.core.parameters())
    assert abs(each / (5 * 12 * 512**2) - 1) < 0.02
