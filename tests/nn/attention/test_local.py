"""Local attention: worked examples, what weights and windows depend on, how positions move."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import LocalDenseSynthesizer, LocalMonotonic
from genmodels.nn.attention.seq2seq import Keys
from tests.nn.attention.table import DOUBLE, MECHANISM, draw, lengths, worst


def counting(c, boundary):
    """One head, uniform weights, V = x and y = V."""
    attention = LocalDenseSynthesizer(1, 1, c=c, boundary=boundary).double()
    with torch.no_grad():
        attention.W2.zero_()
        for layer in (attention.project_v, attention.project_out):
            layer.weight.fill_(1.0)
            layer.bias.zero_()
    return attention


NUMBERS = torch.arange(1, 6, dtype=DOUBLE).view(1, 5, 1)


@pytest.mark.parametrize("c, boundary, wanted", [
    (3, "renormalise", [1.5, 2, 3, 4, 4.5]),
    (3, "zero", [1, 2, 3, 4, 3]),
    (4, "renormalise", [1.5, 2, 2.5, 3.5, 4]),
    (4, "zero", [0.75, 1.5, 2.5, 3.5, 3]),
    (1, "renormalise", [1, 2, 3, 4, 5]),
    (1, "zero", [1, 2, 3, 4, 5]),
    (20, "renormalise", [3, 3, 3, 3, 3]),
    (20, "zero", [0.75] * 5),
])  # fmt: skip
def test_uniform_weights(c, boundary, wanted):
    y = counting(c, boundary)(NUMBERS)[0]
    assert worst(y[0, :, 0], torch.tensor(wanted, dtype=DOUBLE)) < 1e-12


def test_invalid_neighbours_leave_or_add_nothing():
    mask = lengths([[1, 1, 0, 1, 1]])
    assert counting(3, "renormalise")(NUMBERS, mask=mask)[0][0, :, 0].tolist() == [1.5, 1.5, 0, 4.5, 4.5]
    assert worst(counting(3, "zero")(NUMBERS, mask=mask)[0][0, :, 0], torch.tensor([1, 1, 0, 3, 3])) < 1e-12


@torch.no_grad()
def test_weights_depend_on_their_own_position_alone():
    attention, x = MECHANISM["local dense"].build(), draw(1, 6, 8)
    other = x.clone()
    other[:, 3] += 1
    same = torch.arange(6) != 3
    before, after = attention.local_weights(x), attention.local_weights(other)
    assert torch.equal(before[:, :, same], after[:, :, same]) and worst(before, after) > 1e-3


class Compares(LocalDenseSynthesizer):
    """A fault: weights are made from the mean of the neighbours."""

    def _weigh(self, x, valid):
        return super()._weigh(x + x.roll(1, 1), valid)


@torch.no_grad()
def test_that_check_catches_weights_that_look_around():
    attention, x = MECHANISM["local dense"].build(replaced=Compares), draw(1, 6, 8)
    other = x.clone()
    other[:, 3] += 1
    assert worst(attention.local_weights(x)[:, :, 4], attention.local_weights(other)[:, :, 4]) > 1e-3


@torch.no_grad()
def test_heads_are_not_mixed():
    """W2 of a head sees the hidden layer of that head."""
    attention, x = MECHANISM["local dense"].build(), draw(1, 6, 8)
    before = attention.local_weights(x)
    attention.project_hidden.weight[4:] += 1
    after = attention.local_weights(x)
    assert torch.equal(before[:, 0], after[:, 0]) and worst(before[:, 1], after[:, 1]) > 1e-3
    assert attention.W2.shape == (2, 4, 3)


@pytest.mark.parametrize("c", [4, 5])
@torch.no_grad()
def test_inside_both_boundaries_are_one(c):
    """Published: two code paths that differ in the outer floor(c/2) frames."""
    renormalised, zero = (MECHANISM["local dense"].build(c=c, boundary=b) for b in ("renormalise", "zero"))
    difference = (renormalised(draw(1, 12, 8))[0] - zero(draw(1, 12, 8))[0]).abs().amax((0, 2))
    inside = slice(c // 2, 12 - (c - 1 - c // 2))
    assert float(difference[inside].max()) < 1e-12 and float(difference[0]) > 1e-4


def band(B, c):
    """The weights of neighbours as a matrix, diagonal by diagonal: entry j stands j - floor(c/2) to the right."""
    L = B.shape[2]
    return sum(torch.diag_embed(B[:, :, max(-r, 0) : L - max(r, 0), j], r) for j in range(c)
               if abs(r := j - c // 2) < L)  # fmt: skip


@pytest.mark.parametrize("L", [63, 64, 65, 130])
@torch.no_grad()
def test_blocks_of_positions_are_the_band(L):
    """Longer than one block, against a band that is made without blocks."""
    for c in (1, 4, 7, 70):
        attention, x = MECHANISM["local dense"].build(c=c), draw(2, L, 8)
        values = attention.project_v(x).unflatten(-1, (2, 4)).transpose(1, 2)
        a = band(attention.local_weights(x), c)
        y = attention.project_out((a @ values).transpose(1, 2).flatten(2))
        assert worst(attention(x)[0], y) < 1e-12 and worst(attention.weights(x), a) < 1e-12


def test_the_memory_is_linear_in_the_length():
    explain = LocalDenseSynthesizer(8, 2, c=5).explain
    assert explain(2048, 2048).extra_bytes == 2 * explain(1024, 1024).extra_bytes
    assert "no cheaper" in explain(4, 4).reason and "no cheaper" not in explain(100, 100).reason


@pytest.mark.parametrize("options, words", [({"c": 0}, "c must be"), ({"boundary": "wrap"}, "boundary"),
                                            ({"dropout": 1.0}, "dropout")])  # fmt: skip
def test_what_cannot_be_built_of_neighbours(options, words):
    with pytest.raises(ValueError, match=words):
        LocalDenseSynthesizer(8, 2, **options)


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


@pytest.mark.parametrize("options, words", [({"sigma": 0.0}, "sigma"), ({"max_step": 0.0}, "max_step"),
                                            ({"score": "dot"}, "score must be")])  # fmt: skip
def test_what_cannot_be_built_of_windows(options, words):
    with pytest.raises(ValueError, match=words):
        LocalMonotonic(8, 2, **options)
