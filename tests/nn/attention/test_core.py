"""Calls and settings that mean nothing are refused in one line."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.tensors import wide
from genmodels.nn.attention import (
    Attention,
    Position,
    Reach,
    Rotary2d,
    Slots,
    Swin2d,
    TransformerXL,
    build_mask,
    sinusoids,
)
from genmodels.nn.attention import backend as paths
from genmodels.nn.attention import relative_keys as xl_module
from genmodels.nn.attention.position import shift_padded
from genmodels.verification.attention_reference import reference_attention
from tests.mutants.attention_positions import UnmaskedSkew
from tests.nn.attention.table import (
    BY_NAME,
    DIM,
    DOUBLE,
    PADDING,
    REACHES,
    draw,
    half_error,
    kinds,
    lengths,
    worst,
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


def test_the_sign_check_catches_the_same_sine_on_both_sides(table, monkeypatch):
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


def test_the_shift_check_catches_an_absolute_index(table):
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


def test_the_batch_check_catches_a_statistic_of_the_batch(table):
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


def test_the_sum_check_catches_a_missing_renormalisation(table, monkeypatch):
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


def test_the_locality_check_catches_a_window_off_by_one(table):
    attention = table["xl"].build(window=(2, 1))
    attention.reach = Reach(window=(2, 2))
    assert leak(attention, draw(1, 6, 8), build_mask(6, 6, window=(2, 1))[0, 0]) > 1e-6


def test_the_causality_check_catches_an_unmasked_skew(table):
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


# ---- what is masked is as if it were not there; who may attend to nothing gets nothing ----


def padding_error(attention, x, mask, **call):
    """The worst difference, in values and gradients, that the content of padding makes; nan counts as infinite."""
    results = []
    for content in (0.0, math.nan, 1e4, None):
        filler = draw(*x.shape, seed=9) if content is None else torch.full_like(x, content)
        given = torch.where(mask.transpose(1, 2), x, filler).requires_grad_()
        y = attention(given, mask=mask, **call)[0]
        gradients = torch.autograd.grad(y.sin().sum(), [given, *attention.parameters()])
        results.append([y, *gradients])
    differences = [worst(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)]
    alone = [worst(attention(x[b : b + 1, mask[b, 0]], **call)[0], results[0][0][b : b + 1, mask[b, 0]])
             for b in range(len(x))] if call.get("space") is None else []  # fmt: skip
    return max(math.inf if math.isnan(d) else d for d in [*differences, *(d for d in alone if d > 1e-10)])


def test_the_content_of_padding_changes_nothing_at_all(case):
    L = case.length
    mask = torch.ones(2, 1, L, dtype=torch.bool)
    mask[1, 0, L - 2 :] = False
    for kind in kinds(case):
        assert padding_error(case.build(backend=kind), draw(2, L, 8), mask, space=case.space) == 0


def test_the_content_of_a_masked_memory_changes_nothing(sequence_case):
    for kind in kinds(sequence_case):
        attention = sequence_case.build(backend=kind, cross=True)
        x, results = draw(2, 3, 8), []
        for shape in (lengths([[1, 1, 0, 0], [0, 1, 1, 0]]), torch.tensor([True, True, True, False]).expand(3, 4)):
            for content in (0.0, math.nan):
                hidden = ~shape.transpose(1, 2) if shape.dim() == 3 else ~shape[0, None, :, None]
                memory = draw(2, 4, 8, seed=2).masked_fill(hidden, content)
                y = attention(x, memory, memory_mask=shape)[0]
                results.append([y, *torch.autograd.grad(y.sum(), list(attention.parameters()), allow_unused=True)])
        for a, b in (results[:2], results[2:]):
            assert all(s is None or worst(s, t) == 0 for s, t in zip(a, b, strict=True))


class CountsZeros(Attention):
    """A fault: padded frames are set to zero, and still take part in the softmax."""

    def _allowed(self, call):
        return super()._allowed(call._replace(padding=None))


def test_the_padding_check_catches_zeros_that_are_counted():
    attention = CountsZeros(8, 2, TransformerXL(8, 2)).double().eval()
    mask = lengths([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert padding_error(attention, draw(2, 4, 8), mask) > 1e-3


def empty_row_error(attention, x, space=None):
    """Of queries that may attend to nothing: outputs must be W_O 0, gradients finite and zero."""
    x = x.clone().requires_grad_()
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    mask[1] = False
    y = attention(x, mask=mask, space=space)[0]
    bias = attention.project_out.bias
    error = worst(y[:, 1], bias.expand_as(y[:, 1]))
    gradient = torch.autograd.grad(y[:, 1].sum(), [x, *(p for p in attention.parameters())], allow_unused=True)
    gradient = [g for g, p in zip(gradient, [x, *attention.parameters()], strict=True)
                if g is not None and not any(p is own for own in attention.project_out.parameters())]  # fmt: skip
    return max([error, *(float(g.abs().nan_to_num(math.inf).max()) for g in gradient)])


def test_a_query_that_sees_nothing_gives_zero(case):
    for kind in kinds(case):
        for dtype in (DOUBLE, torch.float32):
            attention = case.build(backend=kind, dtype=dtype)
            assert empty_row_error(attention, draw(2, case.length, 8, dtype=dtype), case.space) == 0


def test_an_example_without_any_valid_key(case):
    mask = torch.ones(2, 1, case.length, dtype=torch.bool)
    mask[1] = False
    for kind in kinds(case):
        attention = case.build(backend=kind)
        y = attention(draw(2, case.length, 8), mask=mask, space=case.space)[0]
        assert not y[1].any() and bool(y.isfinite().all())


def fills_with_least(scores, allowed):
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)


def fills_with_minus_infinity(scores, allowed):
    return scores.masked_fill(~allowed, -math.inf).softmax(-1)


@pytest.mark.parametrize("fault", [fills_with_least, fills_with_minus_infinity])
def test_the_empty_row_check_catches(fault, table, monkeypatch):
    monkeypatch.setattr(paths, "masked_softmax", fault)
    assert not empty_row_error(table["xl"].build(backend="explicit"), draw(1, 4, 8)) < 1e-3


# ---- first and second derivatives, backward and forward mode ----


def gradients_hold(attention, x, space=None):
    names = [name for name, _ in attention.named_parameters()]

    def output(x, *values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(attention, given, (x,), {"space": space})[0]

    given = [x.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in attention.parameters())]
    return torch.autograd.gradcheck(output, given, raise_exception=False, fast_mode=True)


def test_first_derivatives(case):
    x = draw(1, 3 if case.space is None else case.length, 8)
    for kind in kinds(case):
        assert gradients_hold(case.build(backend=kind), x, case.space)


class Detached(TransformerXL):
    """A fault: the position term has no gradient."""

    def score_bias(self, *arguments):
        return super().score_bias(*arguments).detach()


def test_the_derivative_check_catches_a_detached_term(table):
    assert not gradients_hold(table["xl"].build(replaced=Detached), draw(1, 3, 8))


def test_second_derivatives_and_forward_mode(case):
    attention = case.build(derivatives=2)
    assert attention.explain(4, 4).kind == "explicit"
    x = draw(1, 3 if case.space is None else case.length, 8).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: attention(x, space=case.space)[0], x, fast_mode=True)
    direction = draw(*x.shape, seed=7)
    _, tangent = torch.func.jvp(lambda x: attention(x, space=case.space)[0], (x.detach(),), (direction,))
    step = 1e-6
    ends = [attention(x.detach() + sign * step * direction, space=case.space)[0] for sign in (1, -1)]
    assert worst(tangent, (ends[0] - ends[1]) / (2 * step)) < 1e-7


def test_the_fused_path_has_no_second_derivatives(table):
    """Why `derivatives=2` exists; when torch learns it, the explicit path is no longer needed."""
    attention, x = table["none"].build(), draw(1, 4, 8).requires_grad_()
    gradient = torch.autograd.grad(attention(x)[0].sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(gradient.pow(2).sum(), x)


# ---- half precision, the compiler, files ----


def test_half_precision_is_near(case):
    """Found: 0.8 to 1.8."""
    for kind in kinds(case):
        attention = case.build(backend=kind, dtype=torch.float32)
        assert half_error(attention, draw(2, case.length, 8, dtype=torch.float32), space=case.space) < 4


def test_the_check_of_half_precision_catches_eight_bits(monkeypatch):
    """What comes in half precision loses four more bits on its way to the scores."""
    coarse = {torch.bfloat16: torch.float8_e4m3fn}
    monkeypatch.setattr(paths, "wide", lambda t: wide(t.to(coarse.get(t.dtype, t.dtype)).to(t.dtype)))
    attention = BY_NAME["none"].build(backend="explicit", dtype=torch.float32)
    assert half_error(attention, draw(2, 6, 8, dtype=torch.float32)) > 4


def test_a_module_in_half_precision(case):
    attention = case.build(dtype=torch.bfloat16)
    y = attention(draw(2, case.length, 8, dtype=torch.bfloat16), space=case.space)[0]
    assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())


def test_the_softmax_is_in_single_precision():
    q, k = (4 * draw(1, 1, 64, 4, seed=s).bfloat16() for s in (1, 2))
    exact = (q.double() @ k.double().mT / 2).softmax(-1)
    assert worst(paths.explicit_weights(q, k, None, None), exact) < 1e-4
    assert worst((q @ k.mT / 2).softmax(-1), exact) > 3e-2


#: One of each scheme: further options are other numbers in the same code.
SCHEMES = ["none", "xl", "shaw clip", "shaw zero", "shaw keys", "music", "t5", "alibi", "rotary", "rotary half", "swin",
           "rotary 2d", "mel", "mel xl"]


@pytest.mark.parametrize("name", SCHEMES)
def test_compiled_is_eager(name):
    case = BY_NAME[name]
    torch._dynamo.reset()
    attention = case.build(backend=kinds(case)[0], dtype=torch.float32)
    x = draw(2, case.length, 8, dtype=torch.float32)
    mask = torch.ones(2, 1, case.length, dtype=torch.bool)
    mask[1, 0, -1] = False
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert worst(compiled(x, mask=mask, space=case.space)[0], attention(x, mask=mask, space=case.space)[0]) < 1e-5


def test_a_compiled_cache(table):
    torch._dynamo.reset()
    attention, x = table["xl"].build(causal=True, dtype=torch.float32), draw(2, 4, 8, dtype=torch.float32)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    y, cache = compiled(x[:, :2], cache=attention.empty_cache(x))
    z, _ = compiled(x[:, 2:], cache=cache)
    assert worst(torch.cat([y, z], 1), attention(x)[0]) < 1e-5


def test_compiled_once_for_many_lengths(table):
    torch._dynamo.reset()
    attention = table["xl"].build(window=(2, 0), dtype=torch.float32)
    compiled = torch.compile(attention, fullgraph=True, backend="eager", dynamic=True)
    for L in (5, 9, 17, 300):  # the last in blocks
        x = draw(1, L, 8, dtype=torch.float32)
        assert worst(compiled(x)[0], attention(x)[0]) < 1e-5


@pytest.mark.slow
def test_compiled_by_the_real_compiler(table):
    torch._dynamo.reset()
    attention, x = table["xl"].build(window=(2, 1), dtype=torch.float32), draw(2, 6, 8, dtype=torch.float32)
    assert worst(torch.compile(attention, fullgraph=True)(x)[0], attention(x)[0]) < 1e-5


class Reads(TransformerXL):
    """A fault: a value of a tensor is read."""

    def score_bias(self, q, *arguments):
        return super().score_bias(q, *arguments) * (1.0 if self.u.abs().max().item() >= 0 else 0.0)


def test_the_compiler_check_catches_a_value_that_is_read(table):
    torch._dynamo.reset()
    attention = table["xl"].build(replaced=Reads, dtype=torch.float32)
    with pytest.raises(Exception, match="item|data-dependent"):
        torch.compile(attention, fullgraph=True, backend="eager")(draw(1, 4, 8, dtype=torch.float32))


@torch.no_grad()
def test_weights_load_whatever_lengths_were_seen(case):
    attention = case.build()
    attention(draw(1, case.length, 8), space=case.space)
    if case.space is None:
        attention(draw(1, 11, 8))
    state = attention.state_dict()
    other = case.build(seed=1)
    other.load_state_dict(state)
    x = draw(1, case.length, 8)
    assert torch.equal(other(x, space=case.space)[0], attention(x, space=case.space)[0])
    allowed = {"project_q", "project_k", "project_v", "project_out"}
    for name, value in case.build().state_dict().items():
        assert name.split(".")[0] in allowed or value.shape == state[name].shape


# ---- step by step is the whole ----


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
def test_the_cache_check_catches(fault, table):
    attention = table["xl"].build(replaced=fault, causal=True)
    assert max(cache_error(attention, draw(1, 6, 8), step)[0] for step in range(1, 7)) > 1e-3


# ---- room for the past, written in place -----------------------------------------------------------------------------


def decoded(attention, x, sizes, mask=None):
    """The outputs of a causal attention for a sequence that comes in pieces."""
    slots, parts = Slots(x.shape[1]), []
    for size in sizes:
        end = slots.filled + size
        parts.append(attention.decode(x[:, slots.filled : end], slots, None if mask is None else mask[..., :end]))
        slots.filled = end
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", ["none", "xl", "shaw clip", "music", "t5", "alibi", "rotary"])
def test_slots_hold_what_a_whole_sequence_sees(name):
    attention, x = BY_NAME[name].build(causal=True), draw(3, 6, DIM)
    for mask in (None, PADDING, PADDING.flip(-1)):
        whole = attention(x, mask=mask)[0]
        for sizes in ([1] * 6, [2, 3, 1], [6]):
            assert worst(decoded(attention, x, sizes, mask), whole) < 1e-12
            with torch.no_grad():
                assert worst(decoded(attention, x, sizes, mask), whole) < 1e-12


def test_mutants_of_the_slots_are_caught(monkeypatch):
    attention, x = BY_NAME["rotary"].build(causal=True), draw(3, 6, DIM)
    whole = attention(x)[0]
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "put", lambda self, k, v: (k, v))
        assert worst(decoded(attention, x, [2, 3, 1]), whole) > 1e-3
    with monkeypatch.context() as patch:  # every piece begins at place 0
        right = attention.position.rotate
        patch.setattr(attention.position, "rotate", lambda q, k, q0, k0, space=None: right(q, k, 0, 0, space))
        assert worst(decoded(attention, x, [2, 3, 1]), whole) > 1e-3


def test_slots_are_written_again_until_they_are_moved_on():
    attention, x = BY_NAME["rotary"].build(causal=True), draw(3, 6, DIM)
    whole, slots = attention(x)[0], Slots(6)
    with torch.no_grad():
        attention.decode(x[:, :2], slots)
        slots.filled = 2
        attention.decode(x[:, 2:] + 1, slots)  # a guess, taken back
        assert worst(attention.decode(x[:, 2:], slots), whole[:, 2:]) < 1e-12
