"""What is masked is as if it were not there, in every mechanism beside the core; a query that sees nothing gives 0."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn.attention import LSH, LocalDenseSynthesizer, LocalMonotonic, ScoredAttention
from genmodels.nn.attention import nystrom as nystrom_module
from genmodels.nn.attention import seq2seq as seq2seq_module
from tests.nn.attention.table import DOUBLE, MECHANISM, PADDING, draw, lengths, worst


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


def batch_error(attention, x, mask, differentiate=True):
    """Examples of unequal length together and one by one, values and gradients."""
    x = x.clone().requires_grad_()
    together = attention(x, mask=mask)[0]
    alone = torch.zeros_like(together)
    for b in range(len(x)):
        n = int(mask[b].sum())
        row = attention(x[b : b + 1, :n])[0]
        alone = alone + torch.zeros_like(together).index_put((torch.tensor(b),), torch.nn.functional.pad(
            row[0], (0, 0, 0, x.shape[1] - n)))  # fmt: skip
    gradients = [torch.autograd.grad(y.sin().sum(), x, allow_unused=True)[0] for y in (together, alone)]
    return max(worst(together, alone), worst(*gradients) if differentiate else 0)


SUFFIX = lengths([[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])


def test_a_batch_is_its_examples(mechanism):
    assert batch_error(mechanism.build(), draw(4, 6, 8), SUFFIX) < 1e-8


def test_an_example_without_any_valid_position(mechanism):
    mask = torch.ones(2, 1, 6, dtype=torch.bool)
    mask[1] = False
    for dtype in (DOUBLE, torch.float32):
        attention, x = mechanism.build(dtype=dtype), draw(2, 6, 8, dtype=dtype).requires_grad_()
        y = attention(x, mask=mask)[0]
        gradient = torch.autograd.grad(y.sum(), [x, *attention.parameters()], allow_unused=True)
        assert not y[1].any() and bool(y.isfinite().all()) and not gradient[0][1].any()
        assert all(bool(g.isfinite().all()) for g in gradient if g is not None)


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



# --- the laws catch what was published -------------------------------------------------------------------------------


class CountsZeros(ScoredAttention):
    """A fault: padded positions are zeros that take part in the softmax."""

    def choose(self, logits, allowed):
        return super().choose(logits, None)


class MaskIgnored(LocalDenseSynthesizer):
    """The published slip: the mask is taken and not used."""

    def _weigh(self, x, valid):
        return super()._weigh(x, None)


def means_with_zeros(valid, count, dtype):
    """A fault: padded positions are counted in the means of segments."""
    return honest_segments(torch.ones_like(valid), count, dtype)


honest_segments = nystrom_module.segments


class HashesPadding(LSH):
    """A fault: padded positions have buckets like all others."""

    def _mix(self, given, values, drop):
        return super()._mix(given._replace(keys=None), values, drop)


class BatchWidePlace(LocalMonotonic):
    """The published slip: one position for all examples."""

    def _positions(self, given, place, there):
        return super()._positions(given, place, there).mean(0, keepdim=True).expand(len(given.x), -1, -1)


class LongestEnd(LocalMonotonic):
    """A fault: the position is clamped to the longest length of the batch."""

    def _positions(self, given, place, there):
        return super()._positions(given, place, torch.ones_like(there))


@pytest.mark.parametrize("name, fault", [("additive", CountsZeros), ("local dense", MaskIgnored),
                                         ("lsh sign", HashesPadding), ("monotonic", BatchWidePlace),
                                         ("monotonic", LongestEnd)])  # fmt: skip
def test_the_batch_law_catches(name, fault):
    assert batch_error(MECHANISM[name].build(replaced=fault), draw(4, 6, 8), SUFFIX) > 1e-4


def test_the_batch_law_catches_zeros_in_the_means_of_segments(monkeypatch):
    monkeypatch.setattr(nystrom_module, "segments", means_with_zeros)
    assert batch_error(MECHANISM["nystrom"].build(), draw(4, 6, 8), SUFFIX) > 1e-4


def test_the_batch_law_catches_a_norm_of_the_whole_batch(monkeypatch):
    """Published: the start of the iteration is scaled by the largest norm in the batch."""
    def shared(A, iterations):
        scale = A.abs().sum(-2).max() * A.abs().sum(-1).max()
        Z, identity = A.mT / scale, torch.eye(A.shape[-1], dtype=A.dtype)
        for _ in range(iterations):
            AZ = A @ Z
            Z = Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ))) / 4
        return Z

    monkeypatch.setattr(nystrom_module, "iterated_inverse", shared)
    assert batch_error(MECHANISM["nystrom"].build(), draw(4, 6, 8), SUFFIX) > 1e-6


class NotHidden(ScoredAttention):
    """A fault: only the weights of padded keys are zero, and zero times nan is nan."""

    def _keys(self, given):
        return super()._keys(given._replace(source=given.source.where(given.source != 0, math.nan)))


def test_the_padding_law_catches_keys_that_are_not_hidden():
    assert padding_error(MECHANISM["scaled dot"].build(replaced=NotHidden), draw(3, 6, 8), PADDING) == math.inf


@pytest.mark.parametrize("fault", [
    lambda scores, allowed: scores if allowed is None else
    scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1),
    lambda scores, allowed: scores if allowed is None else scores.masked_fill(~allowed, -math.inf).softmax(-1),
])  # fmt: skip
def test_the_empty_row_law_catches(fault, monkeypatch):
    monkeypatch.setattr(seq2seq_module, "masked_softmax", fault)
    mask = lengths([[1, 1, 1, 0], [0, 0, 0, 0]])
    attention = MECHANISM["additive"].build()
    assert not empty_memory_error(attention, draw(2, 3, 8), draw(2, 4, 8, seed=2), mask, (1,)) < 1e-3
