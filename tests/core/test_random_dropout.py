"""Masks of dropout belong to the items: neither the number of processes nor the padding changes them."""

from __future__ import annotations

import math

import pytest
import torch
import torch._inductor.config
from torch import nn

from genmodels.core import random as module
from genmodels.core.random import Dropout, dropout
from genmodels.nn.attention import Attention
from genmodels.nn.transformer import TransformerLayer

SHAPES = [(6, 5), (6, 7, 3), (6, 2, 4, 4), (6, 2, 3, 4, 2, 3)]


def masks(function, monkeypatch, shape, world: int) -> torch.Tensor:
    """The result on ones (B, *event) of a batch that `world` processes share."""
    whole = torch.zeros(shape)
    for rank in range(world):
        monkeypatch.setattr(module, "rank_world", lambda rank=rank: (rank, world))
        torch.manual_seed(3)
        whole[rank::world] = function(torch.ones(shape[0] // world, *shape[1:]), 0.4)
    return whole


@pytest.mark.parametrize("shape", SHAPES)
def test_processes_change_no_mask(monkeypatch, shape):
    one = masks(dropout, monkeypatch, shape, 1)
    assert 0 < (one == 0).float().mean() < 1
    for world in (2, 3):
        assert torch.equal(masks(dropout, monkeypatch, shape, world), one)
    # The mutant: torch's own dropout, under the same seed on every process.
    torchs = nn.functional.dropout
    assert not torch.equal(masks(torchs, monkeypatch, shape, 2), masks(torchs, monkeypatch, shape, 1))


def test_padding_changes_no_mask():
    found = []
    for length in (5, 9):
        torch.manual_seed(0)
        found.append((dropout(torch.ones(4, 6, length), 0.5), dropout(torch.ones(4, 2, length, length), 0.5)))
    assert torch.equal(found[0][0], found[1][0][..., :5]) and torch.equal(found[0][1], found[1][1][..., :5, :5])


def test_of_a_layer_of_a_transformer_too(monkeypatch):
    """With its attention in blocks of queries, where the number of blocks depends on the padding."""
    layer = TransformerLayer(8, 2, hidden=8, window=3, dropout=0.3)
    x = torch.randn(4, 8, 150, generator=torch.Generator().manual_seed(0))

    def run(rank: int, world: int, length: int) -> torch.Tensor:
        monkeypatch.setattr(module, "rank_world", lambda: (rank, world))
        torch.manual_seed(1)
        mask = (torch.arange(length) < 60).expand(4, 1, -1)
        return layer(x[..., :length], mask)[rank::world, :, :60] if world == 1 else layer(
            x[rank::world, :, :length], mask[rank::world])[..., :60]

    whole = run(0, 1, 150)
    for rank in (0, 1):
        torch.testing.assert_close(run(rank, 2, 60), whole[rank::2])


def test_the_share_that_is_dropped_and_the_mean():
    n = 400_000
    assert dropout(torch.ones(2, 3), 1 - 1e-9).isfinite().all()
    for p in (0.1, 0.5, 0.9):
        torch.manual_seed(int(10 * p))
        y = dropout(torch.ones(100, 40, 100), p)
        assert abs(float((y == 0).double().mean()) - p) < 5 * math.sqrt(p * (1 - p) / n)
        assert y.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-4)


def test_values_are_dropped_independently():
    """Neighbours along every dimension, and the same place in two calls."""
    torch.manual_seed(0)
    kept = [(dropout(torch.ones(32, 32, 16, 16), 0.5) > 0).double() - 0.5 for _ in range(2)]
    assert abs(float((kept[0] * kept[1]).mean())) < 5 * 0.25 / math.sqrt(kept[0].numel())
    for d in range(4):
        for step in (1, 4):
            a, b = (kept[0].narrow(d, start, kept[0].shape[d] - step) for start in (0, step))
            assert abs(float((a * b).mean())) < 5 * 0.25 / math.sqrt(a.numel())


def test_gradient_is_the_mask():
    x = torch.randn(5, 7, requires_grad=True)
    y = dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad * x, y)


def test_the_layer_is_the_function_in_training_and_nothing_else():
    x, layer = torch.ones(3, 4), Dropout(0.5)
    torch.manual_seed(0)
    first = layer(x)
    torch.manual_seed(0)
    assert torch.equal(first, dropout(x, 0.5)) and layer.eval()(x) is x and dropout(x, 0.0) is x
    assert dropout(torch.ones(0, 4), 0.5).shape == (0, 4) and dropout(torch.ones(8), 0.5).shape == (8,)


def test_attention_drops_weights_whatever_its_path():
    attention = Attention(8, 2, dropout=0.5)
    x = torch.randn(3, 5, 8)
    torch.manual_seed(0)
    dropped, _ = attention(x)
    torch.manual_seed(0)
    assert torch.equal(attention(x)[0], dropped) and not torch.allclose(attention.eval()(x)[0], dropped)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_compiled_masks_are_the_same(monkeypatch, world):
    torch._dynamo.reset()
    compiled = torch.compile(dropout, fullgraph=True)
    with torch._inductor.config.patch(fallback_random=True):  # keys of torch's generator
        assert torch.equal(masks(compiled, monkeypatch, (12, 16), world), masks(dropout, monkeypatch, (12, 16), world))
        x = torch.ones(12, 16, requires_grad=True)
        y = compiled(x, 0.3)
        y.sum().backward()
    assert torch.equal(x.grad, y.detach())
