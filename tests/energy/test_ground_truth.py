"""Fields that are gradients of a scalar: the energy they have, in the precision that is promised, masks included."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from genmodels.core.errors import InputError, RunError
from genmodels.energy import (
    DoubleWell,
    Energy,
    GaussianMixture,
    LogDensity,
    Potential,
    Quadratic,
    ScoreNetwork,
    quadrature,
)
from genmodels.nn.energy_nets import EnergyMLP


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


WIDE = [(-6.0, 6.0)]


def known(integrate):
    one, two = integrate(DoubleWell(), WIDE), integrate(DoubleWell(), 2 * WIDE)
    assert one.log_z == pytest.approx(0.679926243, abs=1e-8)
    assert math.exp(two.log_z) == pytest.approx(5.13038120758, abs=1e-8)
    assert two.log_z == pytest.approx(1.63517997, abs=1e-8)
    assert max(one.error, two.error) < 1e-8


def test_double_wells():
    known(quadrature)
    weighted = LogDensity(lambda x: x[:, 0].square().log() - DoubleWell().energy(x))
    second_moment = math.exp(quadrature(weighted, WIDE).log_z - quadrature(DoubleWell(), WIDE).log_z)
    assert second_moment == pytest.approx(0.832745487, abs=1e-8)


def test_check_catches_the_sign_of_log_z():
    def wrong(model, limits):
        found = quadrature(model, limits)
        return replace(found, log_z=-found.log_z)

    with pytest.raises(AssertionError):
        known(wrong)


def test_a_density_integrates_to_one():
    torch.manual_seed(0)
    for model in (Energy(EnergyMLP((2,), hidden=(16, 16))).double(), DoubleWell()):
        limits = [(-8.0, 8.0), (-9.0, 7.0)]
        log_z = quadrature(model, limits).log_z
        normalised = LogDensity(lambda x, m=model, z=log_z: m.log_density(x) - z)
        assert quadrature(normalised, limits).log_z == pytest.approx(0, abs=1e-8)


def test_narrow_modes_and_huge_offsets():
    means = torch.tensor([[0.77, -0.31], [-3.03, 2.2], [3.1, 3.2]], dtype=torch.float64)
    mixture = GaussianMixture(torch.tensor([0.2, 0.3, 0.5]).double(), means, 0.05, log_z=2.0)
    assert quadrature(mixture, [(-4, 4), (-4, 4)]).log_z == pytest.approx(2, abs=1e-7)
    deep = Quadratic(torch.eye(2, dtype=torch.float64), offset=-5000.0)
    assert quadrature(deep, 2 * [(-9, 9)]).log_z == pytest.approx(deep.log_normaliser, abs=1e-8)


def test_limits_too_narrow_show_at_the_edge():
    normal = Quadratic(torch.eye(1, dtype=torch.float64))
    assert quadrature(normal, [(-9, 9)]).edge < 1e-15 and quadrature(normal, [(-1, 9)]).edge > 0.5


def test_float32_networks():
    torch.manual_seed(0)
    net = EnergyMLP((2,), hidden=(16, 16))
    low = quadrature(Energy(net), 2 * WIDE, dtype=torch.float32)
    high = quadrature(Energy(net.double()), 2 * WIDE)
    assert low.log_z == pytest.approx(high.log_z, abs=1e-5)


def test_conditions():
    class Moved(DoubleWell):
        def energy(self, x, cond=None):
            return 0.5 * (x - cond[:, None]).square().sum(1) - cond

    found = quadrature(Moved(), [(-9, 9)], cond=torch.tensor([1.5], dtype=torch.float64))
    assert found.log_z == pytest.approx(0.5 * math.log(2 * math.pi) + 1.5, abs=1e-8)


def test_errors():
    with pytest.raises(ValueError, match="one or two dimensions, not 3"):
        quadrature(DoubleWell(), 3 * WIDE)
    with pytest.raises(ValueError, match="finite pairs"):
        quadrature(DoubleWell(), [(0.0, math.inf)])
    with pytest.raises(ValueError, match="needs an energy"):
        quadrature(ScoreNetwork(lambda x: -x), WIDE)
    with pytest.raises(RuntimeError, match="NaN at x = "):
        quadrature(LogDensity(lambda x: torch.full((len(x),), torch.nan)), WIDE)
    narrow = GaussianMixture(torch.tensor([0.5, 0.5]).double(), torch.tensor([[0.0], [3.3333]]).double(), 1e-4)
    with pytest.raises(RunError, match="missed all modes, which are narrower than the cells"):
        quadrature(narrow, [(-8, 8)])


@pytest.mark.parametrize(("reason", "make"), [
    ("must be symmetric", lambda: Quadratic(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))),
    ("not positive definite", lambda: Quadratic(torch.diag(torch.tensor([1.0, -1.0]))).log_normaliser),
    ("not positive definite", lambda: Quadratic(torch.zeros(2, 2)).sample(1, torch.Generator())),
    ("must be positive", lambda: GaussianMixture(torch.tensor([1.0, 0.0]), torch.zeros(2, 1), 1.0)),
    ("must be positive", lambda: GaussianMixture(torch.ones(2), torch.zeros(2, 1), 0.0)),
])
def test_what_is_no_density_is_refused(refuses, reason, make):
    refuses(InputError, reason, make)
