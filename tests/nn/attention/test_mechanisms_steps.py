"""Step by step is the whole, for mechanisms that go along a memory."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import LocalMonotonic, Past, ScoredAttention
from tests.nn.attention.table import MECHANISM, PADDING, draw, lengths, worst


@torch.no_grad()
def step_error(attention, x, memory, size, mask=None, memory_mask=None):
    """Chunks of queries, each going on where the last one ended, and the whole."""
    whole, nothing = attention(x, memory, mask, memory_mask)
    assert nothing is None
    state, parts = attention.start(memory), []
    for start in range(0, x.shape[1], size):
        now = slice(start, start + size)
        own = None if mask is None else mask[..., now]
        y, state = attention(x[:, now], memory, own, memory_mask, cache=state)
        parts.append(y)
    return worst(torch.cat(parts, 1), whole)


def test_step_by_step_is_the_whole(mechanism):
    if not mechanism.carries:
        return
    attention, x, memory = mechanism.build(), draw(3, 5, 8), draw(3, 6, 8, seed=2)
    own = lengths([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 1, 1, 0, 1]])
    for size in range(1, 6):
        assert step_error(attention, x, memory, size) < 1e-10
        assert step_error(attention, x, memory, size, own, PADDING) < 1e-10


@torch.no_grad()
def test_single_steps_are_the_whole(mechanism):
    if not mechanism.carries:
        return
    attention, x, memory = mechanism.build(), draw(3, 5, 8), draw(3, 6, 8, seed=2)
    keys, state = attention.keys(memory, PADDING), attention.start(memory)
    whole, weights = attention(x, memory, memory_mask=PADDING)[0], attention.weights(x, memory, memory_mask=PADDING)
    for i in range(5):
        context, a, following = attention.step(x[:, i], memory, keys, state, PADDING)
        anew = attention.step(x[:, i], memory, None, state, PADDING)[0]
        assert max(worst(context, whole[:, i]), worst(a, weights[:, :, i]), worst(anew, context)) < 1e-10
        state = following


class NotAdvanced(LocalMonotonic):
    """The published slip: the step is computed and dropped."""

    def _attend(self, given, keys, place):
        y, a, _ = super()._attend(given, keys, place)
        return y, a, self.start(given.source) if place is None else place


class Forgets(ScoredAttention):
    """A fault: the weights of the last step are handed on, their sum is not."""

    def _attend(self, given, keys, past):
        y, a, past = super()._attend(given, keys, past)
        return y, a, Past(past.previous, torch.zeros_like(past.cumulative))


@pytest.mark.parametrize("name, fault", [("monotonic", NotAdvanced), ("location", Forgets)])
def test_the_step_law_catches(name, fault):
    attention = MECHANISM[name].build(replaced=fault)
    assert step_error(attention, draw(2, 5, 8), draw(2, 6, 8, seed=2), 1) > 1e-4
