"""Sums over valid scalars, and every term of training and of the bound on sequences of unlike length."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core import tensors as masks_module
from genmodels.core.tensors import event_mean, event_size, event_sum, hide
from genmodels.diffusion import CosineSchedule, DiscretisedGaussian, Gaussian, GaussianDenoiser, ddpm_times, elbo
from genmodels.diffusion.bound import diffusion_term, prior_term, reconstruction_term
from genmodels.diffusion.objectives import Simple, Vlb

LENGTHS = torch.tensor([5, 2, 4])
MASK = torch.arange(5) < LENGTHS[:, None, None]
SHAPES = [(2, 5), (1, 3, 5)]


def event(shape, seed=0):
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_means_are_those_of_the_sequence_alone(shape):
    x = event(shape)
    dirty = x.masked_fill(~MASK.reshape(3, *(1,) * (len(shape) - 1), 5), math.nan)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = x[row, ..., :length]
        assert torch.allclose(event_sum(dirty, MASK)[row], alone.sum())
        assert torch.allclose(event_mean(dirty, MASK)[row], alone.mean())
        assert int(event_size(dirty, MASK)[row]) == alone.numel()
    assert torch.equal(event_sum(x), x.flatten(1).sum(1)) and torch.equal(event_mean(x), x.flatten(1).mean(1))


def term_values(mask, x, x_hat):
    """Every term of the bound at some noise level, (3,) each."""
    s, t = (torch.full((3,), v, dtype=torch.float64) for v in (2.0, 1.0))
    levels = torch.round(x.clamp(-1, 1) * 2) / 2
    return {
        "prior": prior_term(x, t[:1], mask),
        "diffusion": diffusion_term(x, x_hat, s, t, lambda s, t: torch.full_like(t, 0.3), mask),
        "gaussian": reconstruction_term(x, x, x_hat, t, Gaussian(), lambda s, t: torch.full_like(t, 0.3), mask),
        "levels": reconstruction_term(
            levels, levels, x_hat, t, DiscretisedGaussian(5), lambda s, t: torch.full_like(t, 0.3), mask
        ),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_the_terms_of_a_padded_sequence_are_those_of_the_sequence_alone(shape):
    x, x_hat = hide(event(shape), MASK), event(shape, 1)
    padded = term_values(MASK, x, x_hat)
    for row, length in enumerate(LENGTHS.tolist()):
        one = [v[row : row + 1, ..., :length].expand(3, *[-1] * len(shape)) for v in (x, x_hat)]
        alone = term_values(None, *one)
        for name, value in padded.items():
            assert torch.allclose(value[row], alone[name][0]), name


def test_that_check_catches_padding_that_is_counted(monkeypatch):
    monkeypatch.setattr(masks_module, "hide", lambda x, mask: x)
    with pytest.raises(AssertionError):
        test_the_terms_of_a_padded_sequence_are_those_of_the_sequence_alone((2, 5))


def exact_denoiser():
    return GaussianDenoiser(CosineSchedule(), torch.zeros(1, dtype=torch.float64), 0.5)


@pytest.mark.parametrize("objective", [Simple(), Vlb(Gaussian(), ddpm_times(20))], ids=lambda o: type(o).__name__)
def test_objectives_do_not_see_padding(objective):
    """Whatever stands beyond the end changes nothing, gradients included."""
    found = []
    for fill in (0.0, 50.0):
        x = event((2, 5)).masked_fill(~MASK, fill).requires_grad_()
        out = objective(exact_denoiser(), x, None, torch.Generator().manual_seed(0), 0, 1, MASK)
        (gradient,) = torch.autograd.grad(out.value, x)
        assert bool((gradient.masked_select(~MASK.expand_as(x)) == 0).all())
        found.append(out.per_example.detach())
    assert torch.allclose(*found)


def test_the_bound_does_not_see_padding():
    """Beyond the end nothing counts; where nothing is padded nothing changes."""
    x, times = hide(event((2, 5)), MASK), ddpm_times(20)
    whole = elbo(exact_denoiser(), x, Gaussian(), times, torch.Generator().manual_seed(0), mask=MASK)
    filled = elbo(
        exact_denoiser(), x.masked_fill(~MASK, 9.0), Gaussian(), times, torch.Generator().manual_seed(0), mask=MASK
    )
    assert torch.allclose(whole.total, filled.total)
    unmasked = elbo(exact_denoiser(), x, Gaussian(), times, torch.Generator().manual_seed(0))
    assert torch.allclose(whole.total[0], unmasked.total[0]) and not torch.allclose(whole.total[1], unmasked.total[1])
    stratified = {"mode": "stratified", "draws": 3}
    some = elbo(exact_denoiser(), x, Gaussian(), times, torch.Generator().manual_seed(0), mask=MASK, **stratified)
    assert torch.isfinite(some.total).all()
