"""Shift, skew and sinusoids against index arithmetic; rotary positions: norms, relativity at large offsets, layouts."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn.attention import Attention, Rotary, Rotary2d, rel_shift, relative_positions, sinusoids, skew
from genmodels.nn.attention.position import by_distance, distances, shift_padded, turn


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


PAIRS = torch.tensor([0.540302, 0.841471, 0.99995, 0.0099998])


def test_vector():
    assert torch.allclose(turn(torch.tensor([1.0, 0, 1, 0]), torch.tensor([1]), 10000.0, "interleaved")[0], PAIRS)
    half = turn(torch.tensor([1.0, 1, 0, 0]), torch.tensor([1]), 10000.0, "half")[0]
    assert torch.allclose(half, PAIRS[[0, 2, 1, 3]])


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_norms_are_kept(layout):
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    assert torch.allclose(turn(x, torch.arange(100, 107), 100.0, layout).norm(dim=-1), x.norm(dim=-1), atol=1e-12)


def drift(position, offset):
    """How far scores of float32 move when both indices do."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, 64)

    def scores(start):
        turned_q, turned_k = position.rotate(q, k, start, start)
        return turned_q.double() @ turned_k.double().mT / 8

    return float((scores(offset) - scores(0)).abs().max())


class SingleAngles(Rotary):
    """A fault: angles are made in float32."""

    def _turn(self, x, start):
        index = torch.arange(start, start + x.shape[-2]).float()
        w = 10000 ** (-torch.arange(0, 64, 2).float() / 64)
        angles = index[:, None] * w
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def test_scores_do_not_drift_with_the_offset():
    for offset in (1000, 100_000):
        assert drift(Rotary(64, 1), offset) < 1e-5
    assert drift(SingleAngles(64, 1), 1000) > 1e-5 and drift(SingleAngles(64, 1), 100_000) > 1e-3


@pytest.mark.parametrize("make", [Rotary, Rotary2d])
def test_layouts_do_not_load_into_each_other(make):
    one = Attention(8, 2, make(8, 2))
    one.load_state_dict(Attention(8, 2, make(8, 2)).state_dict())
    other = Attention(8, 2, make(8, 2, layout="half"))
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="pair their values interleaved, this module half"):
            other.load_state_dict(one.state_dict(), strict=strict)


def test_scores_of_maps_depend_on_the_offset_alone():
    torch.manual_seed(0)
    position, space = Rotary2d(8, 1), (4, 5)
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 1, 20, 8) for _ in range(2))
    turned_q, turned_k = position.rotate(q, k, 0, 0, space)
    scores = (turned_q @ turned_k.mT)[0, 0].view(4, 5, 4, 5)
    by_offset = {}
    for yi, xi, yj, xj in torch.cartesian_prod(*map(torch.arange, (4, 5, 4, 5))).tolist():
        by_offset.setdefault((yj - yi, xj - xi), []).append(float(scores[yi, xi, yj, xj]))
    assert max(max(s) - min(s) for s in by_offset.values()) < 1e-12
    assert len({round(s[0], 6) for s in by_offset.values()}) == len(by_offset) == 63


@pytest.mark.parametrize("make, words", [
    (lambda: Rotary(6, 2), "dim = 6 over heads = 2 is the odd width 3"),
    (lambda: Rotary2d(12, 2), "dim = 12 over heads = 2 is the width 6"),
    (lambda: Rotary(8, 2, layout="gptj"), "interleaved, half"),
    (lambda: Rotary2d(8, 2, layout="gptj"), "interleaved, half"),
])  # fmt: skip
def test_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()
