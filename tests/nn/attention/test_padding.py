"""What is masked is as if it were not there; who may attend to nothing gets nothing."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn.attention import (
    Attention,
    TransformerXL,
)
from genmodels.nn.attention import backend as paths
from tests.nn.attention.table import DOUBLE, draw, kinds, lengths, worst


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


def test_the_padding_law_catches_zeros_that_are_counted():
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
def test_the_empty_row_law_catches(fault, table, monkeypatch):
    monkeypatch.setattr(paths, "masked_softmax", fault)
    assert not empty_row_error(table["xl"].build(backend="explicit"), draw(1, 4, 8)) < 1e-3
