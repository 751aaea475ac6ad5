"""Local monotonic attention: the worked example, the position, the window."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import LocalMonotonic
from genmodels.nn.attention.seq2seq import Keys
from tests.nn.attention.table import DOUBLE, MECHANISM, draw, lengths, worst


@torch.no_grad()
def worked(kind=LocalMonotonic):
    """p = 1.5, sigma = 1, lam = a_S = 1 over six frames whose values are their numbers."""
    attention = kind(1, 1, sigma=1.0, max_step=3.0).double()
    for parameter in attention.parameters():
        parameter.zero_()
    attention.project_v.weight.fill_(1.0)
    attention.project_out.weight.fill_(1.0)
    attention.additive.logits = lambda x, keys, past=None: torch.ones(1, 1, x.shape[1], 6, dtype=DOUBLE)
    frames = torch.arange(6, dtype=DOUBLE).view(1, 6, 1)
    return attention.step(torch.zeros(1, 1, dtype=DOUBLE), frames, None, attention.start(frames))


def example_error(context, a, place):
    wanted = torch.tensor([0.324652, 0.882497, 0.882497, 0.324652, 0, 0])
    return max(worst(a[0, 0], wanted), abs(float(context) - 3.621448), abs(float(place.position) - 1.5))


def test_the_worked_example():
    assert example_error(*worked()) < 1e-6


class IntegerOffsets(LocalMonotonic):
    """The published slip: the Gaussian is taken at whole numbers."""

    def gaussian(self, position, height, there):
        return super().gaussian(position.round(), height, there)


def test_the_worked_example_catches_whole_numbers():
    assert example_error(*worked(IntegerOffsets)) > 1e-2


@torch.no_grad()
def trail(attention, x, memory, mask=None):
    state, places = attention.start(memory), []
    for i in range(x.shape[1]):
        state = attention.step(x[:, i], memory, None, state, mask)[2]
        places.append(state.position)
    return torch.stack(places, -1)  # (B, H, Lq)


@pytest.mark.parametrize("name", ["monotonic", "monotonic bounded"])
def test_the_position_moves_forward_until_the_end(name):
    attention, mask = MECHANISM[name].build(), lengths([[1] * 6, [1, 1, 1, 0, 0, 0]])
    places = trail(attention, draw(2, 30, 8), draw(2, 6, 8, seed=2), mask)
    ends = torch.tensor([5.0, 2.0]).view(2, 1, 1)
    steps = torch.cat([torch.zeros(2, 2, 1), places], -1).diff()
    assert bool((steps[places < ends] > 0).all()) and bool((steps >= 0).all())
    assert bool((places <= ends).all()) and torch.equal(places[..., -1:], ends.double().expand(2, 2, 1))


def test_a_bounded_step_stays_below_its_bound():
    places = trail(MECHANISM["monotonic bounded"].build(), 100 * draw(1, 8, 8), draw(1, 40, 8))
    assert float(places.diff().max()) <= 1.5


def test_beyond_the_end_everything_stays_finite():
    attention = MECHANISM["monotonic"].build()
    torch.nn.init.constant_(attention.V_p, 200.0)
    x, memory = draw(1, 5, 8).requires_grad_(), draw(1, 4, 8, seed=2)
    y = attention(x, memory)[0]
    assert bool(y.isfinite().all()) and bool(torch.autograd.grad(y.sum(), x)[0].isfinite().all())


def test_the_step_is_learned():
    attention = MECHANISM["monotonic"].build()
    y = attention(draw(1, 3, 8), draw(1, 9, 8, seed=2))[0]
    for gradient in torch.autograd.grad(y.sum(), [attention.project_step.weight, attention.V_p]):
        assert float(gradient.abs().max()) > 1e-3


@torch.no_grad()
def test_a_wide_window_is_no_window():
    attention = MECHANISM["monotonic"].build(sigma=3.0)
    x, memory = draw(1, 4, 8), draw(1, 6, 8, seed=2)
    p = trail(attention, x, memory)
    height = attention._number(attention.project_height, attention.V_l, x).exp()
    bell = height[..., None] * torch.exp(-((torch.arange(6) - p[..., None]) ** 2) / 18)
    keys = attention.keys(memory)
    assert isinstance(keys, Keys)
    assert worst(attention.weights(x, memory), bell * attention.additive.logits(x, keys.shown)) < 1e-6


@torch.no_grad()
def test_the_window_ends_at_two_sigma():
    attention = MECHANISM["monotonic"].build()
    x, memory = draw(1, 4, 8), draw(1, 9, 8, seed=2)
    a, p = attention.weights(x, memory), trail(attention, x, memory)
    near = (torch.arange(9) - p[..., None]).abs() <= 2
    assert not a[~near].any() and bool((a[near] != 0).all())


class NoTanh(LocalMonotonic):
    """The published slip: the hidden layer has no tanh."""

    def _number(self, projection, vector, x):
        hidden = projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return torch.einsum("bhln,hn->bhl", hidden, vector)


def test_the_double_loop_catches_a_missing_tanh():
    from genmodels.verification.mechanism_references import reference_mechanism

    attention, call = MECHANISM["monotonic"].build(replaced=NoTanh), {"x": draw(1, 3, 8), "memory": draw(1, 6, 8)}
    assert worst(attention(**call)[0], reference_mechanism(attention, **call)) > 1e-3


@pytest.mark.parametrize("options, words", [({"sigma": 0.0}, "sigma"), ({"max_step": 0.0}, "max_step"),
                                            ({"score": "dot"}, "score must be")])  # fmt: skip
def test_what_cannot_be_built(options, words):
    with pytest.raises(ValueError, match=words):
        LocalMonotonic(8, 2, **options)
