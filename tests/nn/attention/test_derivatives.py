"""First and second derivatives, backward and forward mode."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import (
    TransformerXL,
)
from tests.nn.attention.table import draw, kinds, worst


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


def test_the_derivative_law_catches_a_detached_term(table):
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
