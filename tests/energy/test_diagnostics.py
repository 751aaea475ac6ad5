"""Effective sample size and R-hat against autoregressions, whose truth is known."""

from __future__ import annotations

import pytest
import torch

from genmodels.energy import effective_sample_size, split_r_hat


def autoregression(rho, draws=4000, chains=8, seed=0):
    noise = torch.randn(draws, chains, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = [noise[0]]
    for step in noise[1:]:
        x.append(rho * x[-1] + (1 - rho**2) ** 0.5 * step)
    return torch.stack(x)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_effective_sample_size(rho):
    found = float(effective_sample_size(autoregression(rho))) / (4000 * 8)
    assert found == pytest.approx((1 - rho) / (1 + rho), rel=0.15)


def test_effective_sample_size_sees_chains_that_disagree():
    apart = autoregression(0.5) + torch.arange(8, dtype=torch.float64)[:, None]
    assert float(effective_sample_size(apart)) < 40


def test_r_hat():
    mixed = autoregression(0.5)
    assert float(split_r_hat(mixed)) < 1.01
    assert float(split_r_hat(mixed + torch.arange(8)[:, None])) > 1.5
    # A drift that all chains share is seen by their halves alone.
    drifting = mixed + torch.linspace(0, 3, 4000, dtype=torch.float64)[:, None, None]
    assert float(split_r_hat(drifting)) > 1.2


def test_too_few_draws():
    assert split_r_hat(torch.zeros(3, 2, 1)) is None and effective_sample_size(torch.zeros(3, 2, 1)) is None


def test_quantities_are_judged_one_by_one():
    both = torch.cat([autoregression(0.0), autoregression(0.9, seed=1)], dim=2)
    ess = effective_sample_size(both)
    assert ess.shape == (2,) and ess[0] > 10 * ess[1]
