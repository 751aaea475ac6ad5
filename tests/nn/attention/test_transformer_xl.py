"""Transformer-XL: the vector of one head of width 1, distance zero, no longest length."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Attention, TransformerXL, sinusoids
from genmodels.nn.attention import relative_keys as module


def test_vector(monkeypatch):
    position = TransformerXL(1, 1)
    with torch.no_grad():
        position.u.fill_(0.5)
        position.v.fill_(-0.5)
    # W_R R[r] = 1, 2, 3 at r = -1, 0, 1; the shift wants one column more on the left.
    monkeypatch.setattr(module, "sinusoids", lambda r, dim: (r + 2.0)[:, None])
    position.project.weight.data.fill_(1.0)
    q, k = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1), torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    scores = (q + position.query_bias()) @ k.mT + position.score_bias(q, 0, 0, 2, 2)
    assert scores[0, 0].tolist() == [[2.5, 0.0], [4.0, 0.5]]


def encoded_at_zero(make_table):
    """What stands at distance 0."""
    return make_table(torch.tensor([-1, 0, 1]), 8)[1].tolist()


def test_distance_zero_is_row_zero_and_a_centred_table_is_caught():
    assert encoded_at_zero(sinusoids) == [0, 1] * 4
    max_len = 512  # the published fault: rows of a table of 0 .. max_len, counted from its middle
    assert encoded_at_zero(lambda r, dim: sinusoids(r + max_len // 2, dim)) != [0, 1] * 4


def test_u_and_v_begin_at_zero_and_nothing_has_a_length():
    attention = Attention(8, 2, TransformerXL(8, 2))
    assert not attention.position.u.any() and not attention.position.v.any()
    assert attention.position.project.bias is None
    shapes = {name: tuple(t.shape) for name, t in attention.position.state_dict().items()}
    assert shapes == {"u": (2, 4), "v": (2, 4), "project.weight": (8, 8)}
    assert attention(torch.randn(1, 700, 8))[0].isfinite().all()


def test_memory_of_the_scores():
    position = TransformerXL(8, 2)
    assert position.score_elements(3, 5, 7) == 3 * 2 * 5 * 12


@pytest.mark.parametrize("dim, heads", [(6, 4), (5, 2), (4, 0)])
def test_heads_divide(dim, heads):
    with pytest.raises(ValueError, match=f"heads = {heads} does not divide dim = {dim}"):
        TransformerXL(dim, heads)
