"""Calls and settings that mean nothing are refused in one line."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import (
    Attention,
    MusicTransformer,
    Position,
    Reach,
    Rotary2d,
    Swin2d,
    TransformerXL,
    build_mask,
    sinusoids,
)
from genmodels.nn.attention import (
    backend as paths,
)
from genmodels.nn.attention import (
    relative_keys as xl_module,
)
from genmodels.nn.attention.position import shift_padded
from genmodels.verification.attention_reference import reference_attention
from tests.nn.attention.table import REACHES, draw, kinds, lengths, worst


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


# --- the double loop --------------------------------------------------------------------------------------------------


def reference_error(attention, x, kinds=("sdpa",), **call):
    """The worst difference of outputs and weights from the double loop, over the paths."""
    y, a = reference_attention(attention, x, **call)
    valid = call.get("mask")
    got = attention.weights(x, **call)
    if valid is not None and valid.dim() == 3:
        got = got.masked_fill(~valid[:, :, :, None], 0)  # rows of invalid queries mean nothing
    errors = [worst(got, a)]
    for attention.backend in kinds:
        errors.append(worst(attention(x, **call)[0], y))
    return max(errors)


@torch.no_grad()
def test_self_attention_is_the_double_loop(case):
    for number, reach in enumerate(REACHES if case.space is None else [{}]):
        attention = case.build(**reach)
        for L in (1, 4, 7) if case.space is None else (case.length,):
            x = draw(2, L, 8, seed=L)
            place = {"space": case.space} if case.space else {"offset": number % 2 * 3}
            padding = torch.ones(2, 1, L, dtype=torch.bool)
            padding[1, 0, L // 2 :] = False
            assert reference_error(attention, x[:1], kinds(case), **place) < 1e-10
            assert reference_error(attention, x, kinds(case), mask=padding, **place) < 1e-10


@torch.no_grad()
def test_single_precision_is_near_the_double_loop(case):
    attention = case.build(dtype=torch.float32)
    x = draw(2, case.length, 8, dtype=torch.float32)
    assert reference_error(attention, x, kinds(case), space=case.space) < 2e-5


@torch.no_grad()
def test_full_masks(case):
    L = case.length
    attention = case.build()
    for shape in [(L, L), (1, 2, L, L), (2, 1, 1, L)]:
        full = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.6
        assert reference_error(attention, draw(2, L, 8), kinds(case), mask=full, space=case.space) < 1e-10


@torch.no_grad()
def test_cross_attention_is_the_double_loop(sequence_case):
    for reach in REACHES[:5]:
        attention = sequence_case.build(cross=True, **reach)
        for Lq, Lk in [(1, 4), (3, 1), (3, 5), (6, 2)]:
            x, memory = draw(2, Lq, 8), draw(2, Lk, 8, seed=2)
            mask = torch.ones(2, 1, Lk, dtype=torch.bool)
            mask[0, 0, 0] = False
            own = torch.ones(2, 1, Lq, dtype=torch.bool)
            own[1, 0, -1] = False
            call = {"memory": memory, "memory_mask": mask, "mask": own, "offset": 2}
            assert reference_error(attention, x, kinds(sequence_case), **call) < 1e-10


@torch.no_grad()
def test_every_pair_of_lengths():
    attention = Attention(4, 1, TransformerXL(4, 1, cross=True)).double()
    torch.nn.init.normal_(attention.position.v)
    for C in range(1, 8):
        for L in range(1, 8):
            assert reference_error(attention, draw(1, C, 4), memory=draw(1, L, 4, seed=3)) < 1e-10


def test_gradients_are_those_of_the_double_loop(case):
    attention = case.build()
    x = draw(1, case.length, 8).requires_grad_()
    given = [x, *attention.parameters()]
    wanted = torch.autograd.grad(reference_attention(attention, x, space=case.space)[0].sin().sum(), given)
    for attention.backend in kinds(case):
        got = torch.autograd.grad(attention(x, space=case.space)[0].sin().sum(), given)
        assert max(worst(a, b) for a, b in zip(wanted, got, strict=True)) < 1e-10


def test_the_double_loop_catches_a_shift_that_keeps_too_few_columns(table, monkeypatch):
    def keeps_queries(x):
        shifted = shift_padded(x)
        return torch.cat([shifted[..., : x.shape[-2]], torch.zeros_like(shifted[..., x.shape[-2] :])], -1)

    attention, x, memory = table["xl"].build(cross=True), draw(1, 3, 8), draw(1, 4, 8, seed=2)
    monkeypatch.setattr(xl_module, "shift_padded", keeps_queries)
    assert reference_error(attention, x, memory=memory) > 1e-3


class WrongStride(Swin2d):
    """The published slip: the stride of rows is taken from the height."""

    @staticmethod
    def index(space, *, device=None):
        height, width = space
        place = torch.arange(height * width)
        y, x = place // width, place % width
        return (y[:, None] - y + height - 1) * (2 * height - 1) + x[:, None] - x + width - 1


@pytest.mark.parametrize("size, seen", [((2, 2), False), ((3, 2), True), ((2, 3), True)])
def test_the_double_loop_catches_a_wrong_stride_on_maps_that_are_not_square(table, size, seen):
    attention = table["swin"].build(replaced=lambda D, H: WrongStride(D, H, size=size))
    x = draw(1, size[0] * size[1], 8)
    if size[0] > size[1]:
        with pytest.raises(IndexError):  # the stride is larger than the rows: it runs out of the table
            attention(x)
    else:
        assert (reference_error(attention, x) > 1e-3) == seen


# --- signs, zero, shifts ----------------------------------------------------------------------------------------------


@torch.no_grad()
def reversal(attention, x, **call):
    """How much it matters which way time runs."""
    return worst(attention(x, **call)[0], attention(x.flip(1), **call)[0].flip(1))


SYMMETRIC = {"none", "alibi", "mel alibi", "mel"}


def test_past_and_future_differ(case):
    attention = case.build()
    difference = reversal(attention, draw(1, case.length, 8), space=case.space)
    if case.name == "none" or case.name == "alibi":
        assert difference < 1e-12
    elif case.name not in SYMMETRIC:
        assert difference > 1e-3


def test_the_sign_law_catches_the_same_sine_on_both_sides(table, monkeypatch):
    monkeypatch.setattr(xl_module, "sinusoids", lambda r, dim: sinusoids(r.abs(), dim))
    assert reversal(table["xl"].build(), draw(1, 6, 8)) < 1e-12


@torch.no_grad()
def offset_error(attention, x):
    return worst(attention(x)[0], attention(x, offset=1000)[0])


@torch.no_grad()
def test_a_shift_of_all_indices_changes_nothing(sequence_case):
    for kind in kinds(sequence_case):
        assert offset_error(sequence_case.build(backend=kind), draw(2, 6, 8)) < 1e-5
        attention = sequence_case.build(backend=kind, dtype=torch.float32)
        assert offset_error(attention, draw(2, 6, 8, dtype=torch.float32)) < 1e-5


class Absolute(TransformerXL):
    """A fault: the index of the key is taken for a distance."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        return super().score_bias(q, 0, k0, Lq, Lk)


def test_the_shift_law_catches_an_absolute_index(table):
    assert offset_error(table["xl"].build(replaced=Absolute), draw(2, 6, 8)) > 1e-2


# --- examples, order, sums --------------------------------------------------------------------------------------------


@torch.no_grad()
def batch_error(attention, x, space):
    together = attention(x, space=space)[0]
    return max(worst(attention(x[b : b + 1], space=space)[0], together[b : b + 1]) for b in range(len(x)))


def test_a_batch_is_its_examples(case):
    for kind in kinds(case):
        assert batch_error(case.build(backend=kind), draw(3, case.length, 8), case.space) < 1e-6


class BatchWide(Position):
    """A fault: the bias depends on the other examples."""

    score = "content"

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        return (q.mean((0, 3))[None, :, :, None] * torch.arange(Lk)).expand(len(q), -1, -1, -1)


def test_the_batch_law_catches_a_statistic_of_the_batch(table):
    assert batch_error(table["xl"].build(replaced=BatchWide), draw(3, 6, 8), None) > 1e-3


@torch.no_grad()
def test_without_positions_the_order_means_nothing(table):
    attention, x = table["none"].build(), draw(2, 6, 8)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    assert worst(attention(x[:, order])[0], attention(x)[0][:, order]) < 1e-6


@torch.no_grad()
def row_sum_error(attention, x, **call):
    sums = attention.weights(x, **call).sum(-1)
    return worst(sums, sums.round())


def test_weights_sum_to_one_or_to_nothing(case):
    mask = torch.ones(2, 1, case.length, dtype=torch.bool)
    mask[1, 0, 2:] = False
    assert row_sum_error(case.build(), draw(2, case.length, 8), mask=mask, space=case.space) < 1e-6


def test_the_sum_law_catches_a_missing_renormalisation(table, monkeypatch):
    monkeypatch.setattr(paths, "masked_softmax", lambda scores, allowed: scores.softmax(-1) * allowed)
    mask = lengths([[1, 1, 1, 1, 0, 0]])
    assert row_sum_error(table["xl"].build(), draw(1, 6, 8), mask=mask) > 1e-3


# --- locality ---------------------------------------------------------------------------------------------------------


def leak(attention, x, allowed, space=None):
    """The largest gradient of an output to an input that it may not see."""
    x = x.clone().requires_grad_()
    y = attention(x, space=space)[0]
    worst_leak = 0.0
    for i in range(x.shape[1]):
        gradient = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)[0][0]
        hidden = ~allowed[i]
        if hidden.any():
            worst_leak = max(worst_leak, float(gradient[hidden].abs().max()))
    return worst_leak


def test_nothing_outside_the_reach_is_felt(sequence_case):
    x = draw(1, 6, 8)
    for kind in kinds(sequence_case):
        for reach in REACHES[1:]:
            attention = sequence_case.build(backend=kind, **reach)
            allowed = build_mask(6, 6, **reach | {"causal": attention.reach.causal})[0, 0]
            assert leak(attention, x, allowed) == 0


def test_the_locality_law_catches_a_window_off_by_one(table):
    attention = table["xl"].build(window=(2, 1))
    attention.reach = Reach(window=(2, 2))
    assert leak(attention, draw(1, 6, 8), build_mask(6, 6, window=(2, 1))[0, 0]) > 1e-6


class UnmaskedSkew(MusicTransformer):
    """A fault: the rubbish of the skew is left to be attended to."""

    past_only = False


def test_the_causality_law_catches_an_unmasked_skew(table):
    attention = table["music"].build(replaced=lambda D, H: UnmaskedSkew(D, H, max_len=16))
    assert leak(attention, draw(1, 6, 8), build_mask(6, 6, causal=True)[0, 0]) > 1e-6


@torch.no_grad()
def test_blocks_are_the_whole(sequence_case, monkeypatch):
    from genmodels.nn.attention import core

    for kind in kinds(sequence_case):
        for reach in [{"window": (2, 1)}, {"chunk": (2, 1)}, {"window": (3, 0), "causal": True}]:
            attention = sequence_case.build(backend=kind, cross=True, **reach)
            x, mask = draw(2, 23, 8), torch.rand(2, 1, 23, generator=torch.Generator().manual_seed(0)) < 0.8
            full = torch.rand(2, 1, 23, 23, generator=torch.Generator().manual_seed(0)) < 0.8
            memory = draw(2, 9, 8, seed=4)
            calls = [{}, {"mask": mask}, {"mask": full}, {"memory": memory, "memory_mask": mask[..., :9], "offset": 3}]
            whole = [attention(x, **call)[0] for call in calls]
            monkeypatch.setattr(core, "SMALLEST_BLOCK", 1)
            assert len(attention._blocks(23, 23, 0, 0)) > 2
            assert max(worst(attention(x, **call)[0], y) for call, y in zip(calls, whole, strict=True)) < 1e-12
            monkeypatch.undo()


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sdpa", "explicit"])
def test_dropout_acts_on_weights_and_never_in_evaluation(table, kind):
    attention, x = table["rotary"].build(backend=kind, dropout=0.5), draw(1, 6, 8)
    assert torch.equal(attention(x)[0], attention(x)[0])
    with torch.no_grad():
        for projection in (attention.project_v, attention.project_out):
            projection.weight.copy_(torch.eye(8))
            projection.bias.zero_()
        attention.project_v.weight.zero_()
        attention.project_v.bias.fill_(1.0)
        torch.manual_seed(0)
        attention.train()
        y = torch.cat([attention(x)[0] for _ in range(400)])
    # Dropping the output would leave nothing but 0 and 2.
    assert float(((y > 1e-6) & (y < 2 - 1e-6)).double().mean()) > 0.9
    assert abs(float(y.mean()) - 1) < 0.05
