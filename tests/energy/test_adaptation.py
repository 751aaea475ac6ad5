"""Dual averaging finds the step of a wanted acceptance, each chain its own."""

from __future__ import annotations

import torch

from genmodels.energy import DualAveraging


def test_each_chain_finds_its_own_step():
    scales = torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64)
    state = DualAveraging.start(0.1, 3)
    for _ in range(1000):
        state = state.update(torch.exp(-state.step_size / scales), wanted=0.5)
    torch.testing.assert_close(state.averaged, 0.6931 * scales, rtol=0.03, atol=0)


def test_pure():
    state = DualAveraging.start(0.1, 2)
    state.update(torch.ones(2), wanted=0.5)
    assert state.count == 0 and (state.step_size - 0.1).abs().max() < 1e-12
