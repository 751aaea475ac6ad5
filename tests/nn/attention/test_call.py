"""Calls and settings that mean nothing are refused in one line."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import (
    Attention,
    Rotary2d,
    Swin2d,
    TransformerXL,
)


@pytest.mark.parametrize("make, words", [
    (lambda: Attention(9, 2), "heads = 2 does not divide dim = 9"),
    (lambda: Attention(8, 2, TransformerXL(8, 4)), r"\(8, 4\), the attention \(8, 2\)"),
    (lambda: Attention(8, 2, dropout=1.0), "dropout"),
    (lambda: Attention(8, 2, window=(-1, 0)), "neither negative"),
    (lambda: Attention(8, 2, chunk=(0, 1)), "size of at least 1"),
    (lambda: Attention(8, 2, Swin2d(8, 2, size=(2, 2)), causal=True), "for maps"),
    (lambda: Attention(8, 2, backend="flash"), "one of auto"),
    (lambda: Attention(8, 2, derivatives=3), "1 or 2"),
])  # fmt: skip
def test_what_cannot_be_built(make, words):
    with pytest.raises(ValueError, match=words):
        make()


X = torch.zeros(2, 4, 8)


@pytest.mark.parametrize("position, options, call, words", [
    (None, {}, {"mask": torch.ones(2, 1, 4)}, "must be boolean"),
    (None, {}, {"mask": torch.ones(2, 1, 5, dtype=torch.bool)}, r"\(2, 1, 5\) does not broadcast to .* \(2, 1, 4\)"),
    (None, {}, {"mask": torch.ones(3, 4, dtype=torch.bool)}, r"\(3, 4\) does not broadcast to .* \(2, 2, 4, 4\)"),
    (None, {}, {"memory_mask": torch.ones(2, 1, 4, dtype=torch.bool)}, "memory_mask without memory"),
    (None, {}, {"memory": torch.zeros(3, 4, 8)}, "different batches"),
    (None, {}, {"memory": torch.zeros(2, 4, 7)}, r"memory must be \(B, L, 8\)"),
    (TransformerXL, {}, {"memory": X}, "TransformerXL has not declared cross"),
    (Rotary2d, {}, {"memory": X, "space": (2, 2)}, "has not declared cross"),
    (Rotary2d, {}, {}, "needs space"),
    (Rotary2d, {}, {"space": (2, 3)}, "does not hold the 4 positions"),
    (Rotary2d, {}, {"space": (2, 2), "offset": 1}, "whole maps"),
    (None, {"causal": True}, {"memory": X, "cache": "empty"}, "not for a memory"),
    (Rotary2d, {}, {"space": (2, 2), "cache": "empty"}, "not for maps"),
    (TransformerXL, {}, {"cache": "empty"}, "a cache holds the past"),
    (TransformerXL, {"window": (1, 1)}, {"cache": "empty"}, "a cache holds the past"),
    (TransformerXL, {"causal": True}, {"cache": "empty", "offset": 2}, "leave offset = 2 out"),
    (TransformerXL, {"causal": True}, {"cache": "empty", "mask": torch.ones(4, 4, dtype=torch.bool)}, "new keys"),
])  # fmt: skip
def test_calls_without_a_meaning(position, options, call, words):
    attention = Attention(8, 2, position and position(8, 2), **options)
    if call.get("cache") == "empty":
        call = call | {"cache": attention.empty_cache(X)}
    with pytest.raises(ValueError, match=words):
        attention(X, **call)


def test_a_cache_of_another_batch():
    attention = Attention(8, 2, causal=True)
    with pytest.raises(ValueError, match="batch of 3, x of 2"):
        attention(X, cache=attention.empty_cache(torch.zeros(3, 1, 8)))


@pytest.mark.parametrize("backend", ["auto", "explicit"])
def test_no_positions_at_all(sequence_case, backend):
    """Sequences of length 0 among queries or keys; a query without any key gets W_O 0."""
    attention = sequence_case.build(cross=True, backend=backend)
    none, some = torch.zeros(2, 0, 8, dtype=torch.float64), torch.ones(2, 3, 8, dtype=torch.float64)
    for memory in (None, none, some):
        assert attention(none, memory)[0].shape == (2, 0, 8)
        assert attention.weights(none, memory).shape == (2, 2, 0, 3 if memory is some else 0)
    y = attention(some, none)[0]
    assert torch.equal(y, attention.project_out.bias.expand_as(y))
