"""Rotary positions: the vector, norms, relativity at large offsets, layouts."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Attention, Rotary, Rotary2d
from genmodels.nn.attention.rotary import turn

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
