"""Hard attention: the worked example, ties, and the probabilities of a drawn choice."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.nn.attention import Additive, HardAttention, ScoredAttention, straight_through
from genmodels.nn.attention.seq2seq import one_hot_of_largest
from tests.nn.attention.table import DOUBLE, draw, worst

E, V = torch.tensor([[1.0, 2.0, 0.5]], dtype=DOUBLE), torch.tensor([1.0, 10.0, 100.0], dtype=DOUBLE)


def test_the_value_is_hard_and_the_gradient_soft():
    e = E.clone().requires_grad_()
    y = (straight_through(e) * V).sum()
    gradient = torch.autograd.grad(y, e)[0]
    soft = torch.autograd.grad((e.softmax(-1) * V).sum(), e)[0]
    assert float(y.detach()) == 10 and worst(gradient, soft) < 1e-12
    assert worst(gradient, torch.tensor([[-4.518342, -6.625340, 11.143681]])) < 1e-6


def test_equal_scores_choose_the_first():
    assert one_hot_of_largest(torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0]), None).tolist() == [0, 1, 0, 0, 0]
    assert one_hot_of_largest(torch.zeros(4), torch.tensor([False, False, True, True])).tolist() == [0, 0, 1, 0]
    assert one_hot_of_largest(torch.zeros(2), torch.tensor([False, False])).tolist() == [0, 0]


def test_an_empty_row_is_zero_with_zero_gradient():
    e = E.clone().requires_grad_()
    a = straight_through(e, torch.tensor([[False, False, False]]))
    assert not a.any() and not torch.autograd.grad((a * V).sum(), e)[0].any()


def test_the_module_has_the_derivatives_of_the_soft_one():
    torch.manual_seed(0)
    hard = HardAttention(8, 2, Additive(8, 2)).double()
    soft = ScoredAttention(8, 2, Additive(8, 2)).double()
    soft.load_state_dict(hard.state_dict())
    x, memory = draw(2, 3, 8), draw(2, 5, 8, seed=2)
    got, wanted = (torch.autograd.grad(attention.train()(x, memory)[0].sum(), list(attention.score.parameters()))
                   for attention in (hard, soft))  # fmt: skip
    assert max(worst(a, b) for a, b in zip(got, wanted, strict=True)) < 1e-12
    assert hard.weights(x, memory).detach().unique().tolist() == [0, 1]


@pytest.mark.parametrize("generator", [torch.Generator().manual_seed(0), KeyedGenerator(0, torch.arange(1), "train")])
@torch.no_grad()
def test_a_drawn_choice_has_the_probabilities_of_the_softmax(generator):
    attention = HardAttention(1, 1, temperature=0.5, generator=generator)
    n = 20000
    a = attention.train().choose(E.expand(1, 1, n, 3), None)[0, 0]
    wanted = E.softmax(-1)[0]
    error = (a.mean(0) - wanted).abs() / (wanted * (1 - wanted) / n).sqrt()
    assert float(error.max()) < 4 and a.unique().tolist() == [0, 1]
    assert attention.eval().choose(E.expand(1, 1, 5, 3), None).sum(2).tolist() == [[[0, 5, 0]]]


def test_the_check_of_the_draw_catches_a_normal_noise():
    n, generator = 20000, torch.Generator().manual_seed(0)
    noise = torch.randn(n, 3, generator=generator, dtype=DOUBLE)
    share = one_hot_of_largest(E + noise, None).mean(0)
    wanted = E.softmax(-1)[0]
    assert float(((share - wanted).abs() / (wanted * (1 - wanted) / n).sqrt()).max()) > 4


def test_a_temperature_must_be_positive():
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            HardAttention(8, 2, temperature=temperature)
