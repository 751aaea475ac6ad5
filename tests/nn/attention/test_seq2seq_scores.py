"""Score functions and attention through them: worked examples, zero weights, shifts."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Additive, Location, Past, ScaledDot, ScoredAttention
from tests.nn.attention.table import DOUBLE, MECHANISM, draw, lengths, worst


def ones(score):
    """Every weight 1, every bias 0."""
    for name, parameter in score.named_parameters():
        torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return score.double()


@torch.no_grad()
def test_additive_by_hand():
    score = ones(Additive(1, 1))
    s, h = torch.tensor([[[0.5]]], dtype=DOUBLE), torch.tensor([[[1.0], [-1.0]]], dtype=DOUBLE)
    e = score.logits(s, score.keys(h))[0, 0, 0]
    assert worst(e, torch.tensor([0.905148, -0.462117])) < 1e-6
    a = ScoredAttention(1, 1, score).double().weights(s, h)[0, 0, 0]
    assert worst(a, torch.tensor([0.796938, 0.203062])) < 1e-6


@torch.no_grad()
def test_scaled_dot_by_hand():
    score = ones(ScaledDot(2, 1))
    for layer in (score.project_q, score.project_k):
        layer.weight.copy_(torch.eye(2))
    e = score.logits(torch.tensor([[[1.0, 2.0]]], dtype=DOUBLE), torch.tensor([[[[3.0, -1.0]]]], dtype=DOUBLE))
    assert abs(float(e) - 1 / 2**0.5) < 1e-12


@torch.no_grad()
def test_location_by_hand():
    """One filter that looks one key back at the last weights, and at the sum at the key itself."""
    score = Location(1, 1, channels=1, kernel=3).double()
    for parameter in score.parameters():
        parameter.fill_(1.0)
    score.project_q.bias.zero_()
    score.filters.weight.copy_(torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]))
    past = Past(torch.tensor([[[0.1, 0.2, 0.7]]], dtype=DOUBLE), torch.tensor([[[1.0, 2.0, 3.0]]], dtype=DOUBLE))
    f = torch.tensor([0 + 1.0, 0.1 + 2, 0.2 + 3], dtype=DOUBLE)
    e = score.logits(torch.full((1, 1, 1), 0.5, dtype=DOUBLE), torch.ones(1, 1, 3, 1, dtype=DOUBLE), past)[0, 0, 0]
    assert worst(e, torch.tanh(0.5 + 1 + f)) < 1e-12


def test_location_without_the_sum_sees_the_last_weights_alone():
    score = Location(8, 2, channels=3, kernel=3, cumulative=False).double()
    assert score.filters.weight.shape == (3, 1, 3)
    past, other = Past(draw(1, 2, 6), draw(1, 2, 6, seed=2)), Past(draw(1, 2, 6), draw(1, 2, 6, seed=3))
    assert torch.equal(score.features(past), score.features(other))
    both = Location(8, 2, channels=3, kernel=3).double()
    with torch.no_grad():  # the same score with the sum's filters at zero
        both.load_state_dict(score.state_dict() | {"filters.weight": torch.zeros(3, 2, 3)})
        both.filters.weight[:, :1] = score.filters.weight
    assert worst(both.features(past), score.features(past)) < 1e-12


@pytest.mark.parametrize("name", ["additive", "location", "scaled dot"])
@torch.no_grad()
def test_zero_weights_give_the_mean_over_valid_keys(name):
    attention = MECHANISM[name].build()
    for parameter in attention.score.parameters():
        parameter.zero_()
    memory, mask = draw(2, 5, 8), lengths([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
    y = attention(draw(2, 3, 8, seed=2), memory, memory_mask=mask)[0]
    for b in range(2):
        wanted = attention.project_out(attention.project_v(memory[b, mask[b, 0]].mean(0)))
        assert worst(y[b], wanted.expand(3, -1)) < 1e-12


@torch.no_grad()
def shift_error(score):
    """Of the location term, away from the ends, when the past is moved along the keys."""
    past = Past(draw(1, 2, 20).abs(), draw(1, 2, 20, seed=2).abs())
    moved = Past(*(p.roll(3, -1) for p in past))
    return worst(score.features(moved)[:, :, 8:15], score.features(past)[:, :, 5:12])


def test_the_location_term_moves_with_the_past():
    assert shift_error(MECHANISM["location"].build().score) < 1e-12


class Fixed(Location):
    """A fault: the filters see where a key stands."""

    def features(self, past):
        here = torch.arange(past.previous.shape[-1], dtype=DOUBLE)
        return super().features(Past(past.previous * here, past.cumulative))


def test_the_shift_check_catches_absolute_places():
    torch.manual_seed(0)
    assert shift_error(Fixed(8, 2, channels=2, kernel=3).double()) > 1e-3


@torch.no_grad()
def test_a_location_is_where_earlier_queries_looked():
    """The sum leaves the present out; the first query has no past."""
    attention = MECHANISM["location"].build()
    memory, x = draw(1, 5, 8), draw(1, 3, 8, seed=2)
    first = attention.start(memory)
    assert not first.previous.any() and not first.cumulative.any()
    weights = attention.weights(x, memory)
    _, past = attention(x, memory, cache=first)
    assert worst(past.previous, weights[:, :, -1]) == 0 and worst(past.cumulative, weights.sum(2)) < 1e-12
    assert not first.cumulative.any()


def test_logits_are_finite_and_know_no_mask():
    for name in ("additive", "location", "scaled dot"):
        attention = MECHANISM[name].build()
        memory = draw(2, 4, 8)
        keys, past = attention.keys(memory, lengths([[1, 1, 1, 1], [0, 0, 0, 0]])), attention.start(memory)
        logits = attention.score.logits(draw(2, 1, 8), keys.shown, past)
        assert logits.shape == (2, 2, 1, 4) and bool(logits.isfinite().all())


def test_dropout_acts_on_the_weights_in_training_only():
    attention, x = MECHANISM["additive"].build(dropout=0.5), draw(1, 6, 8)
    assert torch.equal(attention(x)[0], attention(x)[0])
    attention.train()
    assert worst(attention(x)[0], attention(x)[0]) > 1e-3


@pytest.mark.parametrize("make, words", [
    (lambda: Location(8, 2, kernel=4), "kernel must be odd"),
    (lambda: Location(8, 2, channels=0), "channels"),
    (lambda: Additive(8, 2, hidden=0), "hidden"),
    (lambda: Additive(9, 2), "does not divide"),
    (lambda: ScoredAttention(8, 2, Additive(8, 4)), r"\(8, 4\), the attention \(8, 2\)"),
    (lambda: ScoredAttention(8, 2, dropout=1.0), "dropout"),
])  # fmt: skip
def test_what_cannot_be_built(make, words):
    with pytest.raises(ValueError, match=words):
        make()
