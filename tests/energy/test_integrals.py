"""Quadrature against integrals that are known."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.energy import (
    DoubleWell,
    Energy,
    LogDensity,
    NormalMixture,
    Quadratic,
    ScoreNetwork,
    expectation,
    quadrature,
)
from genmodels.nn.energy_nets import EnergyMLP

WIDE = [(-6.0, 6.0)]


def known(integrate):
    one, two = integrate(DoubleWell(), WIDE), integrate(DoubleWell(), 2 * WIDE)
    assert one.log_z == pytest.approx(0.679926243, abs=1e-8)
    assert math.exp(two.log_z) == pytest.approx(5.13038120758, abs=1e-8)
    assert two.log_z == pytest.approx(1.63517997, abs=1e-8)
    assert max(one.error, two.error) < 1e-8


def test_double_wells():
    known(quadrature)
    assert expectation(DoubleWell(), lambda x: x[:, 0] ** 2, WIDE) == pytest.approx(0.832745487, abs=1e-8)


def test_check_catches_the_sign_of_log_z():
    def wrong(model, limits):
        found = quadrature(model, limits)
        return type(found)(-found.log_z, found.error, found.limits, found.edge, found.evaluations)

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
    mixture = NormalMixture(torch.tensor([0.2, 0.3, 0.5]).double(), means, 0.05, log_z=2.0)
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
