"""Step by step is the whole."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import (
    TransformerXL,
    sinusoids,
)
from tests.nn.attention.table import draw, kinds, lengths, worst


@torch.no_grad()
def cache_error(attention, x, step, mask=None):
    whole, none = attention(x, mask=mask)
    assert none is None
    cache, parts, sizes = attention.empty_cache(x), [], []
    for start in range(0, x.shape[1], step):
        now = slice(start, start + step)
        y, cache = attention(x[:, now], mask=None if mask is None else mask[..., now], cache=cache)
        parts.append(y)
        sizes.append(cache.k.shape[2])
    return worst(torch.cat(parts, 1), whole), sizes


CACHED = [{"causal": True}, {"window": (2, 0)}, {"window": (None, 0)}, {"causal": True, "chunk": (3, 1)}]


def test_step_by_step_is_the_whole(sequence_case):
    x = draw(2, 5, 8)
    mask = lengths([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
    for kind in kinds(sequence_case):
        for reach in CACHED:
            attention = sequence_case.build(backend=kind, **reach)
            for step in range(1, 6):
                assert cache_error(attention, x, step)[0] < 1e-10
            assert cache_error(attention, x, 2, mask)[0] < 1e-10


def test_chunks_are_taken_whole(sequence_case):
    attention = sequence_case.build(chunk=(2, 1))
    x = draw(2, 7, 8)
    for step in (2, 4, 6):
        assert cache_error(attention, x, step)[0] < 1e-10
    if not attention.reach.no_future:
        with pytest.raises(ValueError, match="within a chunk of 2"):
            cache_error(attention, x, 3)


def test_a_bounded_reach_bounds_the_cache(table):
    _, sizes = cache_error(table["xl"].build(window=(3, 0)), draw(1, 20, 8), 2)
    assert max(sizes) == 3
    _, sizes = cache_error(table["xl"].build(chunk=(4, 2)), draw(1, 40, 8), 4)
    assert max(sizes) == 8
    _, sizes = cache_error(table["xl"].build(causal=True), draw(1, 20, 8), 5)
    assert sizes == [5, 10, 15, 20]


def test_the_cache_is_never_changed(table):
    attention, x = table["rotary"].build(causal=True), draw(1, 4, 8)
    _, first = attention(x, cache=attention.empty_cache(x))
    kept = [t.clone() for t in first[:2]]
    one, two = (attention(draw(1, 2, 8, seed=5), cache=first)[0] for _ in range(2))
    assert worst(one, two) == 0 and all(torch.equal(a, b) for a, b in zip(kept, first[:2], strict=True))


def test_a_padded_past_joins_an_unpadded_present(table):
    attention, x = table["xl"].build(causal=True), draw(2, 5, 8)
    mask = lengths([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    whole = attention(x, mask=mask)[0]
    y, cache = attention(x[:, :2], mask=mask[..., :2], cache=attention.empty_cache(x))
    z, _ = attention(x[:, 2:], cache=cache)
    assert worst(torch.cat([y, z], 1), whole) < 1e-12


class NotAdvanced(TransformerXL):
    """A fault: every call believes that it begins at the first key."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        return super().score_bias(q, k0, k0, Lq, Lk)


class Unshifted(TransformerXL):
    """A fault: the shift is left out, as some published code with a cache has it."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        r = torch.arange(-Lq, Lk) + (k0 - q0)
        encoded = self.project(sinusoids(r, self.dim)).view(-1, self.heads, self.head_dim).permute(1, 2, 0)
        return ((q + self.v[:, None]) @ encoded)[..., :Lk]


@pytest.mark.parametrize("fault", [NotAdvanced, Unshifted])
def test_the_cache_law_catches(fault, table):
    attention = table["xl"].build(replaced=fault, causal=True)
    assert max(cache_error(attention, draw(1, 6, 8), step)[0] for step in range(1, 7)) > 1e-3
