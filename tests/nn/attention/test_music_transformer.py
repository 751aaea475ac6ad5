"""Music Transformer: the last row is distance zero, causality is forced, no length is too long."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Attention, MusicTransformer
from genmodels.nn.attention.position import rel_shift


def test_the_last_row_is_distance_zero_whatever_the_length():
    position = MusicTransformer(4, 1, max_len=8)
    q = torch.ones(1, 1, 5, 4)
    for L in (1, 3, 5):
        bias = position.score_bias(q[:, :, :L], 0, 0, L, L)[0, 0].detach()
        wanted = position.E.detach()[0].sum(-1) / 2  # q of ones, sqrt(d) = 2
        for i in range(L):
            for j in range(i + 1):
                assert abs(float(bias[i, j] - wanted[7 + j - i])) < 1e-6


def test_skew_and_shift_agree_on_the_past():
    position, q = MusicTransformer(8, 2, max_len=4), torch.randn(2, 2, 5, 4)
    skewed = position.score_bias(q, 2, 0, 5, 7)
    shifted = rel_shift(q @ position._rows(torch.arange(-6, 5)).mT / 2, 7)
    past = torch.ones(5, 7).tril(2).bool()
    assert torch.allclose(skewed[..., past], shifted[..., past], atol=1e-6)


def test_causality_is_forced_and_longer_inputs_work():
    attention = Attention(8, 2, MusicTransformer(8, 2, max_len=4))
    assert attention.reach.causal
    assert attention(torch.randn(1, 9, 8))[0].isfinite().all()
    assert {n: tuple(t.shape) for n, t in attention.position.state_dict().items()} == {"E": (2, 4, 4)}


def test_heads_can_share_one_table():
    shared, own = MusicTransformer(8, 2, max_len=4, shared=True), MusicTransformer(8, 2, max_len=4)
    assert shared.E.shape == (1, 4, 4)
    own.load_state_dict({"E": shared.E.detach().expand(2, -1, -1)})
    q = torch.randn(3, 2, 6, 4)
    assert torch.equal(shared.score_bias(q, 0, 0, 6, 6), own.score_bias(q, 0, 0, 6, 6))


def test_errors():
    with pytest.raises(ValueError, match="max_len must be at least 1"):
        MusicTransformer(8, 2, max_len=0)
