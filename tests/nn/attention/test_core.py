"""Attention beyond the checks of genmodels.verification: refusals, cross-attention, blocks, both caches."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn.attention import (
    Attention,
    Rotary2d,
    StaticCache,
    Swin2d,
    TransformerXL,
    build_mask,
    core,
)
from genmodels.nn.attention import backend as paths
from genmodels.nn.attention import relative_keys as xl_module
from genmodels.nn.attention.position import shift_padded
from genmodels.verification.attention_reference import reference_attention
from tests.mutants.attention_positions import ShiftLeftOut
from tests.nn.attention.table import (
    BY_NAME,
    DIM,
    PADDING,
    REACHES,
    draw,
    kinds,
    lengths,
    worst,
)


@pytest.mark.parametrize("make, words", [
    (lambda: Attention(9, 2), "heads = 2 does not divide the width 9"),
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
    (TransformerXL, {}, {"memory": X}, "TransformerXL has no distances .* cross=True"),
    (Rotary2d, {}, {"memory": X, "space": (2, 2)}, "has no distances .* without a position$"),
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


def test_the_double_loop_catches_a_shift_that_keeps_too_few_columns(table, monkeypatch):
    def keeps_queries(x):
        shifted = shift_padded(x)
        return torch.cat([shifted[..., : x.shape[-2]], torch.zeros_like(shifted[..., x.shape[-2] :])], -1)

    attention, x, memory = table["xl"].build(cross=True), draw(1, 3, 8), draw(1, 4, 8, seed=2)
    monkeypatch.setattr(xl_module, "shift_padded", keeps_queries)
    assert reference_error(attention, x, memory=memory) > 1e-3


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


def test_nothing_outside_the_chunks_is_felt(sequence_case):
    x = draw(1, 6, 8)
    for kind in kinds(sequence_case):
        for reach in ({"chunk": (2, 1)}, {"chunk": (3, None), "causal": True}):
            attention = sequence_case.build(backend=kind, **reach)
            allowed = build_mask(6, 6, **reach | {"causal": attention.reach.causal})[0, 0]
            assert leak(attention, x, allowed) == 0


def test_the_locality_check_catches_one_chunk_too_many(table):
    attention = table["xl"].build(chunk=(2, 2))
    assert leak(attention, draw(1, 6, 8), build_mask(6, 6, chunk=(2, 1))[0, 0]) > 1e-6


@torch.no_grad()
def test_blocks_are_the_whole(sequence_case, monkeypatch):
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


# ---- what is masked in a memory ----


def memory_is_hidden(attention):
    """Whether zeros and NaN in what is masked of a memory give the same output and gradients."""
    x, equal = draw(2, 3, 8), []
    for mask in (lengths([[1, 1, 0, 0], [0, 1, 1, 0]]), torch.tensor([True, True, True, False]).expand(3, 4)):
        hidden, results = ~mask.transpose(1, 2) if mask.dim() == 3 else ~mask[0, None, :, None], []
        for content in (0.0, math.nan):
            y = attention(x, draw(2, 4, 8, seed=2).masked_fill(hidden, content), memory_mask=mask)[0]
            results.append([y, *torch.autograd.grad(y.sum(), list(attention.parameters()), allow_unused=True)])
        equal += [s is None or worst(s, t) == 0 for s, t in zip(*results, strict=True)]
    return all(equal)


def test_the_content_of_a_masked_memory_changes_nothing(sequence_case):
    for kind in kinds(sequence_case):
        assert memory_is_hidden(sequence_case.build(backend=kind, cross=True))


def test_the_memory_check_catches_content_that_is_only_weighted_with_zero(table, monkeypatch):
    whole = core.masked_inputs
    monkeypatch.setattr(core, "masked_inputs", lambda x, memory, *rest: whole(x, memory, *rest)._replace(source=memory))
    assert not memory_is_hidden(table["none"].build(cross=True))


# ---- second derivatives, half precision, the compiler ----


def test_the_fused_path_has_no_second_derivatives(table):
    """Why `derivatives=2` exists; when torch learns it, the explicit path is no longer needed."""
    attention, x = table["none"].build(), draw(1, 4, 8).requires_grad_()
    gradient = torch.autograd.grad(attention(x)[0].sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(gradient.pow(2).sum(), x)


def test_a_module_in_half_precision(case):
    attention = case.build(dtype=torch.bfloat16)
    y = attention(draw(2, case.length, 8, dtype=torch.bfloat16), space=case.space)[0]
    assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())


def test_the_softmax_is_in_single_precision():
    q, k = (4 * draw(1, 1, 64, 4, seed=s).bfloat16() for s in (1, 2))
    exact = (q.double() @ k.double().mT / 2).softmax(-1)
    assert worst(paths.explicit_weights(q, k, None, None), exact) < 1e-4
    assert worst((q @ k.mT / 2).softmax(-1), exact) > 3e-2


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


def test_the_cache_check_catches_a_shift_that_is_left_out(table):
    attention = table["xl"].build(replaced=ShiftLeftOut, causal=True)
    assert max(cache_error(attention, draw(1, 6, 8), step)[0] for step in range(1, 7)) > 1e-3


# ---- room for the past, written in place -----------------------------------------------------------------------------


def decoded(attention, x, sizes, mask=None):
    """The outputs of a causal attention for a sequence that comes in pieces."""
    cache, parts = StaticCache(x.shape[1]), []
    for size in sizes:
        end = cache.filled + size
        parts.append(attention.decode(x[:, cache.filled : end], cache, None if mask is None else mask[..., :end]))
        cache.filled = end
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", ["none", "xl", "shaw clip", "music", "t5", "alibi", "rotary"])
def test_a_static_cache_holds_what_a_whole_sequence_sees(name):
    attention, x = BY_NAME[name].build(causal=True), draw(3, 6, DIM)
    for mask in (None, PADDING, PADDING.flip(-1)):
        whole = attention(x, mask=mask)[0]
        for sizes in ([1] * 6, [2, 3, 1], [6]):
            assert worst(decoded(attention, x, sizes, mask), whole) < 1e-12
            with torch.no_grad():
                assert worst(decoded(attention, x, sizes, mask), whole) < 1e-12


def test_mutants_of_the_static_cache_are_caught(monkeypatch):
    attention, x = BY_NAME["rotary"].build(causal=True), draw(3, 6, DIM)
    whole = attention(x)[0]
    with monkeypatch.context() as patch:
        patch.setattr(StaticCache, "put", lambda self, k, v: (k, v))
        assert worst(decoded(attention, x, [2, 3, 1]), whole) > 1e-3
    with monkeypatch.context() as patch:  # every piece begins at place 0
        right = attention.position.rotate
        patch.setattr(attention.position, "rotate", lambda q, k, q0, k0, space=None: right(q, k, 0, 0, space))
        assert worst(decoded(attention, x, [2, 3, 1]), whole) > 1e-3


def test_a_static_cache_has_an_end_and_may_change_the_mode_of_gradients():
    torch.manual_seed(0)
    attention, x = Attention(8, 2, causal=True).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    cache, parts = StaticCache(6), []
    for place in range(6):
        with torch.set_grad_enabled(place in (0, 3)):
            parts.append(attention.decode(x[:, place : place + 1], cache))
        cache.filled = place + 1
    torch.testing.assert_close(torch.cat(parts, dim=1), attention(x)[0], rtol=1e-10, atol=1e-10)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="a cache of 6 positions cannot hold 7"):
            attention.decode(x[:, :1], cache)


def test_a_static_cache_is_written_again_until_it_is_moved_on():
    attention, x = BY_NAME["rotary"].build(causal=True), draw(3, 6, DIM)
    whole, cache = attention(x)[0], StaticCache(6)
    with torch.no_grad():
        attention.decode(x[:, :2], cache)
        cache.filled = 2
        attention.decode(x[:, 2:] + 1, cache)  # a guess, taken back
        assert worst(attention.decode(x[:, 2:], cache), whole[:, 2:]) < 1e-12
