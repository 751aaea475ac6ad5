"""The encoder of Glow-TTS: masks, reach of its positions, dropout, compilation."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn import ATTENTION, Transformer, transformer
from genmodels.nn.attention import Shaw

LENGTHS = (7, 1, 4)


def build(**options):
    torch.manual_seed(0)
    net = Transformer(8, **{"depth": 2, "hidden": 12, "window": 2, **options}).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.4)
    return net


def example():
    x = torch.randn(3, 8, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, (torch.arange(7) < torch.tensor(LENGTHS)[:, None])[:, None]


@torch.no_grad()
def mask_errors(net):
    """Largest effect of what stands outside the mask, of the padding's length, and what is left outside."""
    x, mask = example()
    y = net(x, mask)
    filled = [net(x.masked_fill(~mask, fill), mask) for fill in (1e4, torch.nan)]
    content = max(float((other - y).abs().nan_to_num(torch.inf).max()) for other in filled)
    alone = max(float((net(x[b : b + 1, :, :n]) - y[b : b + 1, :, :n]).abs().max()) for b, n in enumerate(LENGTHS))
    return content, alone, float(y.masked_fill(mask, 0).abs().max())


def test_padding_does_not_exist():
    content, alone, outside = mask_errors(build())
    assert content == 0 and alone < 1e-12 and outside == 0


def test_check_catches_a_convolution_that_sees_padding(monkeypatch):
    monkeypatch.setattr(transformer, "hide", lambda x, mask: x)
    content, alone, outside = mask_errors(build())
    assert content > 1e-3 and alone > 1e-3 and outside > 1e-3


def test_no_gradient_reaches_padding_and_all_parameters_get_one():
    net, (x, mask) = build(), example()
    x.requires_grad_()
    net(x, mask).square().sum().backward()
    assert (x.grad.masked_fill(mask, 0) == 0).all()
    # The keys' bias cancels in the softmax.
    unreached = [name for name, p in net.named_parameters() if not p.grad.abs().max() > 1e-9]
    assert [name for name in unreached if "project_k.bias" not in name] == []


def test_distances_beyond_the_window_add_nothing():
    """Without convolutions between neighbours, two far positions can be exchanged; two near ones cannot."""
    net = build(depth=1, kernel_size=1)
    x, _ = example()
    far, near = [0, 1, 2, 3, 4, 6, 5], [1, 0, 2, 3, 4, 5, 6]
    y = net(x)[..., 0:1]
    assert (net(x[..., far])[..., 0:1] - y).abs().max() < 1e-12
    moved = net(x[..., near])[..., 2:3] - net(x)[..., 2:3]
    assert moved.abs().max() > 1e-3


def test_positions_are_those_of_the_paper():
    layer = Transformer().layers[0]
    position = layer.attention.position
    assert isinstance(position, Shaw) and (position.K, position.outside, position.heads) == (4, "zero", 2)
    assert position.keys.shape == position.values.shape == (1, 9, 96)
    assert len(Transformer().layers) == 6


def test_dropout_acts_in_training_only():
    net, (x, mask) = build(dropout=0.5), example()
    assert torch.equal(net(x, mask), net(x, mask))
    net.train()
    assert not torch.equal(net(x, mask), net(x, mask))
    assert net.layers[0].dropout.p == net.layers[0].attention.dropout == 0.5


def test_traces_without_a_graph_break():
    net, (x, mask) = build(), example()
    torch._dynamo.reset()
    traced = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.allclose(traced(x, mask), net(x, mask), atol=1e-12)


@pytest.mark.parametrize("attention", [name for name, kind in ATTENTION.items() if 1 in kind.dims])
def test_every_attention_for_sequences(attention):
    """Padding does not exist, and every parameter is trained; without one the convolutions are left."""
    net = build(attention=attention, window=None)
    content, alone, outside = mask_errors(net)
    assert content == 0 and alone < 1e-12 and outside == 0
    x, mask = example()
    net.train()(x, mask).square().sum().backward()
    unreached = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9]
    assert [name for name in unreached if "project_k.bias" not in name] == []
    assert (net.layers[0].attention is None) == (attention == "none")


def test_the_window_of_shaw():
    tables = {kind: Transformer(8, depth=1, hidden=4, attention=kind).layers[0].attention.position for kind in
              ("shaw", "shaw_shared", "shaw_zero")}  # fmt: skip
    assert {kind: (p.K, p.outside, len(p.keys)) for kind, p in tables.items()} == {
        "shaw": (16, "clip", 2), "shaw_shared": (16, "clip", 1), "shaw_zero": (4, "zero", 1)}  # fmt: skip
    assert Transformer(8, depth=1, hidden=4, attention="shaw", window=3).layers[0].attention.position.K == 3


@pytest.mark.parametrize("attention", ["shaw_zero", "rope", "none"])
def test_sequences_without_positions(attention):
    net = Transformer(8, depth=2, hidden=4, attention=attention)
    for mask in (None, torch.zeros(2, 1, 0, dtype=torch.bool)):
        assert net(torch.zeros(2, 8, 0), mask).shape == (2, 8, 0)


@pytest.mark.parametrize("make, words", [
    (lambda: Transformer(8, attention="swin2d"), "'swin2d' is not one of .* for sequences"),
    (lambda: Transformer(8, attention="shaw_zeros"), "did you mean 'shaw_zero'"),
    (lambda: Transformer(8, attention="rope", window=4), "window = 4 is for attention = shaw, .* not rope"),
    (lambda: Transformer(8, kernel_size=4), "kernel_size = 4 must be odd"),
    (lambda: Transformer(8, heads=3), "heads = 3 does not divide the width 8"),
    (lambda: Transformer(8, hidden=4)(torch.zeros(2, 5, 8)), r"takes x \(B, 8, T\), got \(2, 5, 8\)"),
])  # fmt: skip
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)
