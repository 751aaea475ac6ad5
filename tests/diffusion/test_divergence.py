"""Divergences against the trace of autograd's Jacobian, for fields of every shape, with and without masks."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.diffusion import divergence as divergence_module
from genmodels.diffusion.divergence import exact_divergence, hutchinson, rademacher
from genmodels.random import KeyedGenerator

LENGTHS = (5, 2, 3)


def mask_of(event_shape, masked: bool):
    return torch.arange(event_shape[-1]) < torch.tensor(LENGTHS)[:, None, None] if masked else None


class Mixing:
    """f(x) = tanh(W x) * x: every scalar of an example reaches every other, examples stay apart."""

    def __init__(self, dims: int):
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(dims, dims, generator=generator, dtype=torch.float64) / math.sqrt(dims)

    def __call__(self, x):
        return (torch.tanh(x.flatten(1) @ self.weight) * x.flatten(1)).view(x.shape)


def case(event_shape, masked):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, *event_shape, generator=generator, dtype=torch.float64)
    return Mixing(math.prod(event_shape)), x, mask_of(event_shape, masked)


def trace_by_jacobian(field, x, mask):
    """The trace over the valid scalars, where invalid ones are held at zero."""
    valid = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand_as(x)
    values = []
    for example, keep in zip(x, valid, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: field(v[None])[0], example * keep)
        diagonal = jacobian.reshape(example.numel(), -1).diagonal()
        values.append(diagonal[keep.flatten()].sum())
    return torch.stack(values)


CASES = [((4,), False), ((2, 5), False), ((2, 5), True), ((1, 2, 5), False), ((1, 2, 5), True)]


@pytest.mark.parametrize("event_shape, masked", CASES)
def test_the_exact_divergence_is_the_trace_of_the_jacobian(event_shape, masked):
    field, x, mask = case(event_shape, masked)
    with torch.no_grad():  # the caller's mode does not matter
        value, found = exact_divergence(field, x, mask if mask is None or len(event_shape) > 1 else None)
    assert found.shape == (3, 1) and not found.requires_grad
    assert torch.allclose(found[:, 0], trace_by_jacobian(field, x, _like(mask, x)), atol=1e-12)
    assert mask is None or bool((value.masked_select(~_like(mask, x).expand_as(x)) == 0).all())


def _like(mask, x):
    return None if mask is None else mask.reshape(len(x), *(1,) * (x.dim() - 2), -1)


@pytest.mark.parametrize("event_shape, masked", CASES)
def test_all_pairs_of_signs_make_hutchinson_exact(event_shape, masked):
    """E[e e^T] = I, here as a mean over the rows of a Hadamard matrix, which is that expectation without noise."""
    field, x, mask = case(event_shape, masked)
    signs = _hadamard(16)[:, : x[0].numel()].view(1, 16, *event_shape).expand(3, -1, *[-1] * len(event_shape))
    found = hutchinson(field, x, signs, mask)[1].mean(1)
    assert torch.allclose(found, trace_by_jacobian(field, x, _like(mask, x)), atol=1e-12)


def _hadamard(n):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("masked", [False, True])
def test_hutchinson_is_unbiased_and_its_spread_is_that_of_theory(masked):
    """Var e^T J e = 2 (sum of squares of the symmetric part off the diagonal) for signs."""
    field, x, mask = case((2, 5), masked)
    probes = rademacher((3, 1500, 2, 5), KeyedGenerator(0, torch.arange(3), "test"))
    found = hutchinson(field, x, probes, mask)[1]
    truth = trace_by_jacobian(field, x, _like(mask, x))
    stderr = found.std(1) / math.sqrt(found.shape[1])
    assert ((found.mean(1) - truth).abs() < 4 * stderr).all()
    for row in range(3):
        keep = torch.ones(10, dtype=torch.bool) if mask is None else mask[row].expand(2, 5).flatten()
        start = x[row] * keep.view(2, 5)
        jacobian = torch.autograd.functional.jacobian(lambda v: field(v[None])[0], start).view(10, 10)[keep][:, keep]
        symmetric = (jacobian + jacobian.T) / 2
        variance = 2 * (symmetric.square().sum() - symmetric.diagonal().square().sum())
        assert abs(float(found[row].var() / variance) - 1) < 0.2


@pytest.mark.parametrize("event_shape, masked", [((2, 5), True), ((4,), False)])
def test_those_laws_catch_a_sign_and_padding_that_counts(event_shape, masked, monkeypatch):
    field, x, mask = case(event_shape, masked)
    truth = trace_by_jacobian(field, x, _like(mask, x))
    assert not torch.allclose(exact_divergence(lambda v: -field(v), x, mask)[1][:, 0], truth)
    if masked:
        monkeypatch.setattr(divergence_module, "hide", lambda x, mask: x)
        assert not torch.allclose(exact_divergence(field, x, mask)[1][:, 0], truth)


def test_probes_are_signs_keyed_by_the_example():
    whole = rademacher((4, 2, 3), KeyedGenerator(0, torch.arange(4), "probes"))
    alone = rademacher((1, 2, 3), KeyedGenerator(0, torch.tensor([2]), "probes"))
    assert bool((whole.abs() == 1).all()) and torch.equal(whole[2:3], alone) and len(whole.unique()) == 2


def test_an_example_does_not_see_the_others():
    field, x, mask = case((2, 5), True)
    whole = exact_divergence(field, x, mask)[1]
    alone = torch.cat([exact_divergence(field, x[i : i + 1], mask[i : i + 1])[1] for i in range(3)])
    assert torch.allclose(whole, alone, atol=1e-14)
