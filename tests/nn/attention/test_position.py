"""Shift, skew and sinusoids against index arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn.attention import rel_shift, relative_positions, sinusoids, skew
from genmodels.nn.attention.position import by_distance, distances, shift_padded


def test_distance_is_key_minus_query():
    rows = [[0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [-2, -1, 0, 1, 2], [-3, -2, -1, 0, 1], [-4, -3, -2, -1, 0]]
    assert relative_positions(5).tolist() == rows
    assert relative_positions(2, 3, q0=5, k0=4).tolist() == [[-1, 0, 1], [-2, -1, 0]]
    assert distances(2, 3, 5, 4).tolist() == [-2, -1, 0, 1]


def test_shift_vector():
    x = torch.arange(1, 22).view(3, 7)
    assert rel_shift(x, 4).tolist() == [[3, 4, 5, 6], [9, 10, 11, 12], [15, 16, 17, 18]]
    full = shift_padded(torch.nn.functional.pad(x, (1, 0)))
    assert full.tolist() == [[3, 4, 5, 6, 7, 0, 8], [9, 10, 11, 12, 13, 14, 0], [15, 16, 17, 18, 19, 20, 21]]


@pytest.mark.parametrize("L", range(1, 7))
@pytest.mark.parametrize("C", range(1, 7))
def test_shift_is_its_index_formula(C, L):
    for width in (2 * L - 1, C + L - 1, C + L + 1):
        x = torch.arange(2 * C * width).view(2, C, width)
        if width < C + L - 1:
            with pytest.raises(ValueError, match=f"{C} queries and {L} keys are {C + L - 1} distances apart"):
                rel_shift(x, L)
            continue
        shifted = rel_shift(x, L)
        assert shifted.shape == (2, C, L)
        assert all(torch.equal(shifted[:, i, j], x[:, i, j + C - 1 - i]) for i in range(C) for j in range(L))


def test_skew_vector():
    assert skew(torch.arange(1, 10).view(3, 3)).tolist() == [[3, 0, 4], [5, 6, 0], [7, 8, 9]]


@pytest.mark.parametrize("C, W", [(1, 1), (4, 4), (3, 5), (1, 6)])
def test_skew_is_right_up_to_the_diagonal(C, W):
    x = torch.arange(C * W).view(C, W)
    skewed = skew(x)
    assert all(skewed[i, j] == x[i, j + C - 1 - i] for i in range(C) for j in range(W - C + i + 1))


def test_by_distance_is_its_index_formula():
    for Lq, Lk in [(1, 1), (3, 5), (5, 3), (4, 4)]:
        table = torch.arange(2 * (Lq + Lk - 1)).view(2, -1)
        found = by_distance(table, Lq, Lk)
        assert all(torch.equal(found[:, i, j], table[:, j + Lq - 1 - i]) for i in range(Lq) for j in range(Lk))


def test_sinusoids():
    R = sinusoids(torch.tensor([-1, 0, 1]), 4)
    assert R[1].tolist() == [0, 1, 0, 1]
    wanted = torch.tensor([0.841471, 0.540302, 0.0099998, 0.99995], dtype=torch.float64)
    assert torch.allclose(R[2], wanted, atol=1e-6)
    assert torch.allclose(R[0], wanted * torch.tensor([-1, 1, -1, 1]), atol=1e-6)
    far = sinusoids(torch.tensor([100_003]), 6)[0]
    assert abs(float(far[2]) - math.sin(100_003 * 10000 ** (-2 / 6))) < 1e-9
    assert sinusoids(torch.tensor([1, 2, 3]), 5).shape == (3, 5)
