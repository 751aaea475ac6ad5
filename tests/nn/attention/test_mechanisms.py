"""The mechanisms beside the core are their double loops; sums, order, locality, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import HardAttention, Path, relative_positions
from genmodels.verification.mechanism_references import reference_mechanism
from tests.nn.attention.table import MECHANISM, PADDING, draw, lengths, worst


def calls(mechanism):
    """Calls of each kind that a mechanism takes; queries and memory of different lengths."""
    given = [{"x": draw(2, L, 8, seed=L)} for L in (1, 2, 4, 7)]
    given.append({"x": draw(3, 6, 8), "mask": PADDING})
    given.append({"x": draw(2, 6, 8), "mask": PADDING[1:2]})
    if mechanism.cross:
        for Lq, Lk in [(1, 4), (3, 1), (5, 3)]:
            given.append({"x": draw(2, Lq, 8), "memory": draw(2, Lk, 8, seed=2)})
        given.append({"x": draw(3, 4, 8), "memory": draw(3, 6, 8, seed=2), "memory_mask": PADDING,
                      "mask": lengths([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 1]])})  # fmt: skip
    if mechanism.pairs:
        generator = torch.Generator().manual_seed(0)
        given += [{"x": draw(2, 5, 8), "mask": torch.rand(s, generator=generator) < 0.6}
                  for s in [(5, 5), (1, 2, 5, 5), (2, 1, 1, 5)]]  # fmt: skip
    return given


def reference_error(attention, call):
    return worst(attention(**call)[0], reference_mechanism(attention, **call))


@torch.no_grad()
def test_every_mechanism_is_its_double_loop(mechanism):
    for call in calls(mechanism):
        assert reference_error(mechanism.build(), call) < 1e-10


@torch.no_grad()
def test_single_precision_is_near_the_double_loop(mechanism):
    call = {"x": draw(2, 6, 8, dtype=torch.float32)}
    single, double = mechanism.build(dtype=torch.float32), mechanism.build().float().double()
    assert worst(single(**call)[0], reference_mechanism(double, call["x"].double())) < 2e-5 * scale_of(double, call)


def scale_of(attention, call):
    """Raw scores and pseudo-inverses are not means: rounding grows with them."""
    return max(1.0, float(attention(call["x"].double())[0].abs().max()))


def test_gradients_are_those_of_the_double_loop(mechanism):
    attention, x = mechanism.build(), draw(1, 5, 8).requires_grad_()
    given = [x, *attention.parameters()]
    wanted = torch.autograd.grad(reference_mechanism(attention, x).sin().sum(), given, allow_unused=True)
    got = torch.autograd.grad(attention(x)[0].sin().sum(), given, allow_unused=True)
    for a, b in zip(wanted, got, strict=True):
        assert worst(torch.zeros(1) if a is None else a, torch.zeros(1) if b is None else b) < 1e-8



# --- sums, order, locality, files ------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_weights_are_those_of_the_output(mechanism):
    """y = W_O (a V) with the values of the same module; sums are 1 where a mean is promised."""
    attention, x = mechanism.build(), draw(3, 6, 8)
    a = attention.weights(x, mask=PADDING)
    values = attention.project_v(x.masked_fill(~PADDING.transpose(1, 2), 0)).unflatten(-1, (2, 4)).transpose(1, 2)
    y = attention.project_out((a @ values).transpose(1, 2).flatten(2))
    assert worst(y.masked_fill(~PADDING.transpose(1, 2), 0), attention(x, mask=PADDING)[0]) < 1e-10
    if mechanism.sums:
        sums = a.sum(-1)[PADDING.expand(-1, 2, -1)]
        assert worst(sums, torch.ones_like(sums)) < 1e-6


def test_the_sum_law_catches_a_missing_renormalisation():
    attention = MECHANISM["local dense"].build()
    attention.boundary = "zero"
    assert worst(attention.weights(draw(1, 6, 8)).sum(-1), torch.ones(1, 2, 6)) > 1e-3


@torch.no_grad()
def test_without_positions_the_order_means_nothing(mechanism):
    if not mechanism.equivariant:
        return
    attention, x = mechanism.build(), draw(2, 6, 8)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    assert worst(attention(x[:, order])[0], attention(x)[0][:, order]) < 1e-8


@torch.no_grad()
def test_an_offset_changes_nothing(mechanism):
    assert torch.equal(mechanism.build()(draw(1, 6, 8), offset=1000)[0], mechanism.build()(draw(1, 6, 8))[0])


def locality_error(attention, x, allowed):
    """The largest derivative of an output by an input outside of its neighbourhood."""
    jacobian = torch.autograd.functional.jacobian(lambda x: attention(x)[0], x)[0, :, :, 0]  # (L, D, L, D)
    return float(jacobian.abs().amax((1, 3))[~allowed].max())


@pytest.mark.parametrize("c", [1, 2, 3, 4])
def test_nothing_outside_of_the_neighbourhood_is_felt(c):
    attention = MECHANISM["local dense"].build(c=c)
    r = relative_positions(6)
    allowed = (r >= -(c // 2)) & (r < c - c // 2)
    assert locality_error(attention, draw(1, 6, 8), allowed) == 0
    if c < 4:
        wider = MECHANISM["local dense"].build(c=c + 1)
        assert locality_error(wider, draw(1, 6, 8), allowed) > 1e-6


@torch.no_grad()
def test_weights_load_whatever_lengths_were_seen(mechanism):
    attention, other, x = mechanism.build(), mechanism.build(seed=1), draw(1, 6, 8)
    attention(draw(1, 11, 8))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(x)[0], attention(x)[0])


def test_every_call_is_explained(mechanism):
    path = mechanism.build().explain(6, 6, batch=2, masked=True)
    assert isinstance(path, Path) and path.extra_bytes > 0 and path.reason


# --- what is refused -------------------------------------------------------------------------------------------------

X = torch.zeros(2, 4, 8)
ONES = torch.ones(2, 1, 4, dtype=torch.bool)


@pytest.mark.parametrize("call, words", [
    ({"x": X[0]}, r"x must be \(B, L, 8\)"),
    ({"x": X, "mask": ONES.float()}, "must be boolean"),
    ({"x": X, "mask": ONES[..., :3]}, r"\(2, 1, 3\) does not broadcast"),
    ({"x": X, "memory_mask": ONES}, "memory_mask without memory"),
    ({"x": X, "cache": "past"}, "leave the cache out|goes on along a memory|the cache of .* is a"),
])  # fmt: skip
def test_calls_without_a_meaning(mechanism, call, words):
    attention = mechanism.build(dtype=torch.float32)
    with pytest.raises(ValueError, match=words):
        attention(**call)


def test_a_mechanism_refuses_what_it_cannot_do(mechanism):
    attention = mechanism.build(dtype=torch.float32)
    if not mechanism.cross:
        with pytest.raises(ValueError, match="is self-attention"):
            attention(X, X)
    if not mechanism.pairs:
        with pytest.raises(ValueError, match="does not broadcast"):
            attention(X, mask=torch.ones(4, 4, dtype=torch.bool))
    if mechanism.carries:
        with pytest.raises(ValueError, match="goes on along a memory"):
            attention(X, cache=attention.start(X))


def test_a_gumbel_choice_is_hard_all_the_same():
    attention = HardAttention(8, 2, generator=torch.Generator().manual_seed(0)).train()
    assert attention.weights(torch.randn(2, 3, 8)).detach().unique().tolist() == [0, 1]
