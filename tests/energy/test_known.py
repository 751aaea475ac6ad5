"""Fields that are gradients of a scalar: the energy they have, in the precision that is promised, masks included."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from genmodels.energy import Potential


class Field(nn.Module):
    """A network of values and a noise level to values, with a mask as the U-Net takes one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv1d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv1d(32, 3, 3, padding=1))

    def forward(self, x, log_snr, cond=None, mask=None):
        hidden = self.layers(x + 0.1 * log_snr.to(x)[:, None, None])
        return hidden if mask is None else hidden.masked_fill(~mask, 0)


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(6) < torch.tensor([6, 4])[:, None, None]
    return torch.randn(2, 3, 6, generator=generator).to(dtype), torch.tensor([-1.0, 2.0], dtype=dtype), mask


def error_under_autocast(what: str, monkeypatch, ignored: bool = False) -> float:
    """Of energies or gradients under autocast in bfloat16, against those in float64."""
    field, (x, log_snr, mask) = Potential(Field()), batch()
    with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patch:
        if ignored:
            patch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
        found = getattr(field, what)(x, log_snr, None, mask)
    assert found.dtype == torch.float32
    x, log_snr, mask = batch(torch.float64)
    true = getattr(field.double(), what)(x, log_snr, None, mask)
    return float((found - true).detach().abs().max() / true.detach().abs().max())


@pytest.mark.parametrize("what", ["energy", "forward"])
def test_autocast_changes_nothing(what, monkeypatch):
    assert error_under_autocast(what, monkeypatch) < 1e-6
    assert error_under_autocast(what, monkeypatch, ignored=True) > 1e-5


def gradient_error(field: Potential) -> float:
    """Between -grad E by autograd and -x - (alpha/sigma) v, relative."""
    x, log_snr, mask = batch(torch.float64)
    x = x.masked_fill(~mask, 0).requires_grad_()
    (gradient,) = torch.autograd.grad(field.energy(x, log_snr, None, mask).sum(), x)
    v = field(x, log_snr, None, mask)
    expected = x + torch.exp(0.5 * log_snr)[:, None, None] * v
    return float(((gradient - expected) * mask).norm().detach() / gradient.norm())


def test_the_field_is_the_gradient_of_the_energy(monkeypatch):
    assert gradient_error(Potential(Field().double())) < 1e-12
    # The network itself in the place of the gradient is seen.
    monkeypatch.setattr(Potential, "forward", lambda self, *arguments: self.network(*arguments))
    assert gradient_error(Potential(Field().double())) > 1e-2


def test_what_lies_outside_the_mask_has_no_part():
    field, (x, log_snr, mask) = Potential(Field()), batch()
    other = x.masked_fill(~mask, float("nan"))
    assert torch.equal(field.energy(x, log_snr, None, mask), field.energy(other, log_snr, None, mask))
    assert torch.equal(field(x, log_snr, None, mask), field(other, log_snr, None, mask))
    assert not field(x, log_snr, None, mask).masked_select(~mask).any()
