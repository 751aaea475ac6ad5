"""Mechanisms outside the core along a memory, with masks of any kind, and step by step; what they refuse and cost."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from genmodels.nn.attention import (
    LSH,
    Attention,
    HardAttention,
    LocalDenseSynthesizer,
    LocalMonotonic,
    MusicTransformer,
    Nystrom,
    Past,
    Path,
    ScoredAttention,
    Shaw,
    TransformerXL,
)
from genmodels.nn.attention import seq2seq as seq2seq_module
from genmodels.verification.mechanism_references import reference_mechanism
from tests.mutants.attention_positions import Encoded
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


# --- weights, offsets, paths ------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_weights_are_those_of_the_output(mechanism):
    """y = W_O (a V) with the values of the same module."""
    attention, x = mechanism.build(), draw(3, 6, 8)
    a = attention.weights(x, mask=PADDING)
    values = attention.project_v(x.masked_fill(~PADDING.transpose(1, 2), 0)).unflatten(-1, (2, 4)).transpose(1, 2)
    y = attention.project_out((a @ values).transpose(1, 2).flatten(2))
    assert worst(y.masked_fill(~PADDING.transpose(1, 2), 0), attention(x, mask=PADDING)[0]) < 1e-10


@torch.no_grad()
def test_an_offset_changes_nothing(mechanism):
    assert torch.equal(mechanism.build()(draw(1, 6, 8), offset=1000)[0], mechanism.build()(draw(1, 6, 8))[0])


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


# ---- what is masked is as if it were not there, in every mechanism outside the core; a query that sees ----


def padding_error(attention, x, mask, **call):
    """The worst difference, in values and gradients, that the content of padding makes; nan counts as infinite."""
    results = []
    for content in (0.0, math.nan, math.inf, 1e4, None):
        filler = draw(*x.shape, seed=9) if content is None else torch.full_like(x, content)
        given = torch.where(mask.transpose(1, 2), x, filler).requires_grad_()
        y = attention(given, mask=mask, **call)[0]
        gradients = torch.autograd.grad(y.sin().sum(), [given, *attention.parameters()], allow_unused=True)
        results.append([y, *(g for g in gradients if g is not None)])
    differences = [worst(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)]
    return max(math.inf if math.isnan(d) else d for d in differences)


def test_the_content_of_padding_changes_nothing_at_all(mechanism):
    assert padding_error(mechanism.build(), draw(3, 6, 8), PADDING) == 0
    if mechanism.cross:
        assert padding_error(mechanism.build(), draw(3, 6, 8), PADDING, memory=draw(3, 2, 8, seed=2)) == 0


def test_the_content_of_a_masked_memory_changes_nothing(mechanism):
    if not mechanism.cross:
        return
    attention, results = mechanism.build(), []
    masks = [PADDING] + [torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool).expand(3, 6)] * mechanism.pairs
    for mask in masks:
        for content in (0.0, math.nan, 1e4):
            hidden = ~mask.transpose(1, 2) if mask.dim() == 3 else ~mask[0, None, :, None]
            memory = draw(3, 6, 8, seed=2).masked_fill(hidden, content)
            y = attention(draw(3, 3, 8), memory, memory_mask=mask)[0]
            gradients = torch.autograd.grad(y.sum(), list(attention.parameters()), allow_unused=True)
            results.append([y, *(g for g in gradients if g is not None)])
        assert all(worst(a, b) == 0 for other in results[1:] for a, b in zip(results[0], other, strict=True))
        results = []


def empty_memory_error(attention, x, memory, mask, empty):
    """Of queries that may attend to nothing: W_O 0, and gradients that are exactly 0."""
    x, memory = x.clone().requires_grad_(), memory.clone().requires_grad_()
    y = attention(x, memory, memory_mask=mask)[0][empty]
    own = list(attention.project_out.parameters())
    given = [x, memory, *(p for p in attention.parameters() if not any(p is q for q in own))]
    gradient = torch.autograd.grad(y.sum(), given, allow_unused=True)
    worst_gradient = max(float(g.abs().nan_to_num(math.inf).max()) for g in gradient if g is not None)
    return max(worst(y, attention.project_out.bias.expand_as(y)), worst_gradient)


def test_a_query_that_sees_nothing_gives_zero(mechanism):
    if not mechanism.cross:
        return
    attention = mechanism.build()
    mask = lengths([[1, 1, 1, 0], [0, 0, 0, 0]])
    assert empty_memory_error(attention, draw(2, 3, 8), draw(2, 4, 8, seed=2), mask, (1,)) == 0
    if mechanism.pairs and not getattr(attention.score, "uses_past", False):
        full = torch.ones(3, 4, dtype=torch.bool)
        full[1] = False
        everything = (slice(None), 1)
        assert empty_memory_error(attention, draw(2, 3, 8), draw(2, 4, 8, seed=2), full, everything) == 0


def test_no_positions_at_all(mechanism):
    attention = mechanism.build()
    assert attention(draw(2, 0, 8))[0].shape == (2, 0, 8) and attention.weights(draw(2, 0, 8)).shape == (2, 2, 0, 0)
    assert attention(draw(2, 0, 8), mask=torch.ones(2, 1, 0, dtype=torch.bool))[0].shape == (2, 0, 8)
    if mechanism.cross:
        assert attention(draw(2, 0, 8), draw(2, 3, 8))[0].shape == (2, 0, 8)
        y = attention(draw(2, 3, 8), draw(2, 0, 8))[0]
        assert worst(y, attention.project_out.bias.expand_as(y)) == 0


# --- the checks catch what was published -----------------------------------------------------------------------------


class NotHidden(ScoredAttention):
    """A fault: only the weights of padded keys are zero, and zero times nan is nan."""

    def _keys(self, given):
        return super()._keys(given._replace(source=given.source.where(given.source != 0, math.nan)))


def test_the_padding_check_catches_keys_that_are_not_hidden():
    assert padding_error(MECHANISM["scaled dot"].build(replaced=NotHidden), draw(3, 6, 8), PADDING) == math.inf


@pytest.mark.parametrize("fault", [
    lambda scores, allowed: scores if allowed is None else
    scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1),
    lambda scores, allowed: scores if allowed is None else scores.masked_fill(~allowed, -math.inf).softmax(-1),
])  # fmt: skip
def test_the_empty_row_check_catches(fault, monkeypatch):
    monkeypatch.setattr(seq2seq_module, "masked_softmax", fault)
    mask = lengths([[1, 1, 1, 0], [0, 0, 0, 0]])
    attention = MECHANISM["additive"].build()
    assert not empty_memory_error(attention, draw(2, 3, 8), draw(2, 4, 8, seed=2), mask, (1,)) < 1e-3


# ---- first and second derivatives, half precision and the compiler, for the mechanisms outside the core ----


def gradients_hold(attention, x):
    names = [name for name, _ in attention.named_parameters()]

    def output(x, *values):
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), (x,))[0]

    given = [x.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in attention.parameters())]
    return torch.autograd.gradcheck(output, given, raise_exception=False, fast_mode=True)


def test_hard_attention_in_training_has_the_derivatives_of_another_function():
    """In evaluation its own, so that divergences and log-determinants are not those of a softmax."""
    attention, x = MECHANISM["hard"].build(), draw(1, 4, 8)
    assert gradients_hold(attention, x) and not gradients_hold(attention.train(), x)


@torch.no_grad()
def test_a_module_in_half_precision(mechanism):
    y = mechanism.build(dtype=torch.bfloat16)(draw(2, 6, 8, dtype=torch.bfloat16))[0]
    assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())


@pytest.mark.parametrize("name", ["additive", "location", "scaled dot", "hard", "monotonic", "monotonic bounded"])
@torch.no_grad()
def test_a_compiled_step_is_eager(name):
    torch._dynamo.reset()
    attention = MECHANISM[name].build(dtype=torch.float32)
    x, memory = draw(3, 6, 8, dtype=torch.float32), draw(3, 4, 8, seed=2, dtype=torch.float32)
    compiled, state = torch.compile(attention, fullgraph=True, backend="eager"), attention.start(memory)
    assert worst(compiled(x, memory, cache=state)[0], attention(x, memory, cache=state)[0]) < 1e-5


# ---- step by step is the whole, for mechanisms that go along a memory ----


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
def test_the_step_check_catches(name, fault):
    attention = MECHANISM[name].build(replaced=fault)
    assert step_error(attention, draw(2, 5, 8), draw(2, 6, 8, seed=2), 1) > 1e-4


# ---- what is linear in the length, counted and not timed: products, and the largest tensor that a call makes ----


class Largest(TorchDispatchMode):
    """Remembers the storage of the largest tensor that anything returns, in bytes."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.size = max([self.size, *sizes])
        return out


def growth(module, L):
    """How many times the products and the largest tensor of a call grow, backward included, when the length doubles."""
    counted = []
    for length in (L, 2 * L):
        torch.manual_seed(0)
        x = torch.randn(1, length, 32, requires_grad=True)
        with FlopCounterMode(display=False) as flops, Largest() as largest:
            module(x)[0].sum().backward()
        counted.append((flops.get_total_flops(), largest.size))
    return max(b / a for a, b in zip(*counted, strict=True))


LINEAR = [
    LocalDenseSynthesizer(32, 2, c=5),
    Nystrom(32, 2, landmarks=8),
    LSH(32, 2, buckets=8, chunk=16),
    LSH(32, 2, buckets=8, chunk=16, hash="sign"),
]


@pytest.mark.parametrize("module", LINEAR, ids=lambda module: type(module).__name__)
def test_cost_is_linear_in_the_length(module):
    assert growth(module, 512) <= 2.1


def test_the_cost_check_catches_a_square():
    assert growth(Attention(32, 2, backend="explicit"), 512) > 2.6


def largest_tensor(position):
    """In units of one score for each head, query and distance, 2 L of them for L queries; forward and backward."""
    L, heads, d = 96, 2, 32
    attention = Attention(heads * d, heads, position(heads * d, heads))
    with Largest() as largest:
        attention(torch.randn(1, L, heads * d, requires_grad=True))[0].sum().backward()
    return largest.size / (4 * heads * L * 2 * L)


@pytest.mark.parametrize("position", [TransformerXL, Shaw, lambda D, H: MusicTransformer(D, H, max_len=96)])
def test_relative_keys_make_nothing_larger_than_the_scores_by_distance(position):
    assert largest_tensor(position) <= 1.1


def test_that_check_catches_a_vector_for_each_pair():
    assert largest_tensor(Encoded) > 10
