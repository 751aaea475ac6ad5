"""Masked diffusion against enumeration: a law on 3^3 whose conditionals are exact."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from genmodels.core.errors import NotFinite
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import masked
from genmodels.diffusion.masked import MASKINGS, bound_terms, draw_tokens, masked_bound, masked_nll, unmask

V, L = 3, 3
ALL = torch.tensor(list(itertools.product(range(V), repeat=L)))
LAW = torch.rand(len(ALL), generator=torch.Generator().manual_seed(0), dtype=torch.float64).square()
LAW /= LAW.sum()


def conditionals(tokens):
    """log p(x_i = v | what is not masked), (B, L, V), from the law itself."""
    fits = ((tokens[:, None] == ALL) | (tokens[:, None] == V)).all(2).double() * LAW  # (B, V^L)
    mass = torch.einsum("bn,niv->biv", fits, torch.nn.functional.one_hot(ALL, V).double())
    return (mass / mass.sum(-1, keepdim=True)).clamp(min=1e-300).log()


TABLE = conditionals(torch.tensor(list(itertools.product(range(V + 1), repeat=L))))


def exact(tokens, cond=None):
    return TABLE[(tokens * torch.tensor([16, 4, 1])).sum(1)]


def with_mask(tokens, cond=None):
    """A tenth of the mass on the mask token."""
    return exact(tokens) + math.log(0.9)


def enumerated(x, alpha, predict=exact):
    """The bound of one x by all masks and Gauss-Legendre nodes in time."""
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.legendre.leggauss(40))
    t = (nodes + 1) / 2
    value, rate = alpha(t)
    total = torch.zeros(())
    for hidden in itertools.product([False, True], repeat=L):
        row = torch.tensor([hidden])
        k = int(row.sum())
        chance = (1 - value) ** (k - 1) * value ** (L - k) if k else 0.0
        total = total + (weights / 2 * -rate * chance).sum() * masked_nll(predict, x[None], row, V)[0]
    return float(total)


@pytest.mark.parametrize("name", MASKINGS)
def test_the_bound_is_exact_with_exact_conditionals_whatever_the_masking(name):
    alpha = MASKINGS[name]
    for k in (0, 13, 26):
        wanted = -math.log(LAW[k])
        assert abs(enumerated(ALL[k], alpha) - wanted) < 1e-6
        assert abs(enumerated(ALL[k], lambda t: (alpha(t)[0], -alpha(t)[1])) - wanted) > 1e-2
        assert abs(enumerated(ALL[k], alpha, with_mask) - wanted) > 1e-2


@pytest.mark.parametrize("name", MASKINGS)
def test_rates_are_derivatives(name):
    t = torch.linspace(0.05, 0.95, 7, dtype=torch.float64, requires_grad=True)
    value, rate = MASKINGS[name](t)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), t)[0], rate.detach())
    ends = MASKINGS[name](torch.tensor([0.0, 1.0], dtype=torch.float64))[0]
    torch.testing.assert_close(ends, torch.tensor([1.0, 0.0], dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", MASKINGS)
def test_random_times_and_masks_estimate_the_bound(name):
    n, k = 20_000, 13
    t = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    found = bound_terms(exact, ALL[k].expand(n, L), t, V, torch.Generator().manual_seed(1), masking=name)
    error = float(found.std()) / math.sqrt(n)
    assert abs(float(found.mean()) + math.log(LAW[k])) < 4.5 * error < 0.3
    alpha, rate = MASKINGS[name](t)
    unweighted = found * (1 - alpha) / -rate
    assert abs(float(unweighted.mean()) + math.log(LAW[k])) > 10 * float(unweighted.std()) / math.sqrt(n)


@pytest.mark.parametrize("name", MASKINGS)
def test_times_next_to_zero_add_nothing(name):
    """There 1 - alpha(t) of `quadratic` rounds to 0."""
    t = torch.tensor([0.0, 1e-8], dtype=torch.float64)
    found = bound_terms(exact, ALL[:2], t, V, torch.Generator().manual_seed(0), masking=name)
    assert found.tolist() == [0, 0]


def test_the_standard_error_of_the_bound_covers_it():
    x = ALL[5].expand(200, L)
    found = masked_bound(exact, x, V, KeyedGenerator(0, torch.arange(200)), draws=8, rows=500)
    assert found.shape == (200, 2)
    assert abs(float(found.mean()) + math.log(LAW[5])) < 4.5 * float(found.std()) / math.sqrt(found.numel())
    alone = masked_bound(exact, x[:1], V, KeyedGenerator(0, torch.tensor([7])), draws=8)
    torch.testing.assert_close(alone[0], found[7])
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        masked_bound(exact, x, V, KeyedGenerator(0, torch.arange(200)), draws=8, rows=0)


def frequencies(x):
    return torch.bincount((x * torch.tensor([9, 3, 1])).sum(1), minlength=len(ALL)).double() / len(x)


def test_samples_have_the_law_in_many_steps_and_its_marginals_in_one():
    n = 6000
    blank = torch.full((n, L), V)
    generator = KeyedGenerator(0, torch.arange(n), "sample")
    error = (LAW * (1 - LAW) / n).sqrt()
    assert ((frequencies(unmask(exact, blank, V, generator, steps=100)) - LAW).abs() < 4.5 * error + 3e-3).all()
    once = unmask(exact, blank, V, generator, steps=1)
    marginals = exact(blank[:1])[0].exp()
    for place in range(L):
        p = marginals[place]
        found = torch.bincount(once[:, place], minlength=V) / n
        assert ((found - p).abs() < 4.5 * (p * (1 - p) / n).sqrt()).all()
    assert ((frequencies(once) - LAW).abs() > 6 * error).any()  # one step takes the places to be independent


def test_known_tokens_stay_and_the_rest_is_drawn_given_them():
    n = 4000
    begun = torch.tensor([V, 1, V]).expand(n, L)
    found = unmask(exact, begun, V, KeyedGenerator(1, torch.arange(n)), steps=100)
    given = LAW * (ALL[:, 1] == 1)
    given = given / given.sum()
    assert (found[:, 1] == 1).all()
    assert ((frequencies(found) - given).abs() <= 4.5 * (given * (1 - given) / n).sqrt() + 3e-3).all()


@pytest.mark.parametrize("name", MASKINGS)
def test_confident_samples_unmask_as_planned_and_the_surest_first(name):
    seen = []
    blank = torch.full((5, 8), 2)

    def surer_to_the_left(tokens, cond):
        p = torch.linspace(0.99, 0.6, 8, dtype=torch.float64)
        return torch.stack([p, 1 - p], 1).log().expand(len(tokens), 8, 2)

    x = unmask(surer_to_the_left, blank, 2, KeyedGenerator(0, torch.arange(5)), steps=4, masking=name, confident=True,
               temperature=0.0, callback=lambda step, x: seen.append(x.clone()))
    alphas = MASKINGS[name](torch.linspace(1, 0, 5, dtype=torch.float64))[0][1:]
    for tokens, alpha in zip(seen, alphas, strict=True):
        left = round(8 * (1 - float(alpha)))
        assert ((tokens == 2) == (torch.arange(8) >= 8 - left)).all()
    assert (x == 0).all()


def test_drawn_tokens_follow_the_temperature():
    log_p = torch.tensor([0.2, 0.8]).log().expand(1000, 2)
    u = (torch.arange(1000) + 0.5) / 1000
    assert abs(int(draw_tokens(log_p, u).sum()) - 800) <= 1
    assert abs(int(draw_tokens(log_p, u, 0.5).sum()) - 941) <= 1  # 0.64 / 0.68
    assert draw_tokens(log_p, u, 0.0).all()


def rounded(tokens, cond=None):
    """Equal probabilities but for rounding that depends on the batch, as of a network without positions."""
    noise = torch.rand(*tokens.shape, 2, generator=torch.Generator().manual_seed(len(tokens)), dtype=torch.float64)
    return torch.tensor([0.5, 0.5], dtype=torch.float64).log() + 1e-7 * noise


def differing(monkeypatch, equal: float) -> int:
    """Samples of a batch that differ from the same ones by themselves."""
    monkeypatch.setattr(masked, "_TIE", equal)

    def drawn(index):
        blank = torch.full((len(index), 6), 2)
        return unmask(rounded, blank, 2, KeyedGenerator(0, index), steps=6, confident=True, temperature=0.7,
                      callback=lambda step, x: seen[step].append(x.clone()))

    seen: list[list] = [[] for _ in range(6)]
    drawn(torch.arange(8))
    together = [step[0] for step in seen]
    seen = [[] for _ in range(6)]
    for number in range(8):
        drawn(torch.tensor([number]))
    alone = [torch.cat(step) for step in seen]
    return sum(int((a != b).any(1).sum()) for a, b in zip(together, alone, strict=True))


def test_the_order_of_equal_confidences_is_drawn_and_does_not_depend_on_the_batch(monkeypatch):
    assert differing(monkeypatch, masked._TIE) == 0
    assert differing(monkeypatch, 1e-12) > 0  # the mutant sorts by rounding


def test_networks_without_a_distribution_draw_nothing(refuses):
    log_p = torch.log(torch.tensor([[[0.7, 0.3], [0.0, 1.0]]]))  # -inf is a probability of zero
    assert draw_tokens(log_p, torch.full((1, 2), 0.5)).tolist() == [[0, 1]]
    for broken in (math.nan, math.inf, -math.inf):
        wrong = log_p.clone()
        wrong[0, 0] = broken
        for temperature in (0.0, 0.5, 1.0):
            refuses(NotFinite, "row 0 is not finite", draw_tokens, wrong, torch.full((1, 2), 0.5), temperature)


def test_temperatures_down_to_zero_draw_the_likeliest():
    log_p = torch.log(torch.tensor([[[0.2, 0.7, 0.1]]]))
    for temperature in (1e-3, 1e-20, 1e-39, 0.0):
        assert [int(draw_tokens(log_p, torch.full((1, 1), u), temperature)) for u in (0.01, 0.5, 0.99)] == [1, 1, 1]
    powered = (log_p / 0.5).softmax(-1)[0, 0]
    u = (torch.arange(1000) + 0.5) / 1000
    drawn = draw_tokens(log_p.expand(1000, 1, 3), u[:, None], 0.5)[:, 0]
    assert torch.allclose(torch.bincount(drawn, minlength=3) / 1000, powered, atol=1e-3)


@pytest.mark.parametrize("steps", [0, -1])
def test_unmasking_takes_a_step(steps, refuses):
    refuses(ValueError, "steps must be at least 1", unmask, None, torch.zeros(1, 1, dtype=torch.long), 2,
            torch.Generator(), steps=steps)
