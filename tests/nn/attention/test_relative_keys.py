"""Shaw: rows of the tables, both ways beyond the window, and no tensor of L x L x d."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Attention, MusicTransformer, Shaw, TransformerXL, sinusoids
from genmodels.nn.attention import relative_keys as module
from genmodels.nn.attention.position import rel_shift

CLIPPED = [[2, 3, 4, 4, 4], [1, 2, 3, 4, 4], [0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [0, 0, 0, 1, 2]]


def centre_error(position):
    """Distance 0 is the centre row."""
    return int((position.rows(6).diagonal() - position.K).abs().max())


def test_rows():
    assert Shaw(8, 2, K=2).rows(5).tolist() == CLIPPED
    assert Shaw(8, 2, K=2).rows(2, 5, q0=3).tolist() == CLIPPED[3:]
    assert centre_error(Shaw(8, 2, K=4)) == 0


class OffCentre(Shaw):
    """A fault: the table is centred on half of a longest length."""

    def rows(self, Lq, Lk=None, q0=0, k0=0, *, device=None):
        return (super().rows(Lq, Lk, q0, k0) + 1).clamp(max=2 * self.K)


def test_a_table_off_its_centre_is_caught():
    assert centre_error(OffCentre(8, 2, K=2)) > 0


@pytest.mark.parametrize("L", [2, 3, 4, 6])
def test_both_conventions_differ_as_soon_as_something_is_outside(L):
    torch.manual_seed(0)
    clip = Attention(8, 2, Shaw(8, 2, K=2))
    zero = Attention(8, 2, Shaw(8, 2, K=2, outside="zero"))
    zero.load_state_dict(clip.state_dict())
    x = torch.randn(1, L, 8)
    assert (float((clip(x)[0] - zero(x)[0]).detach().abs().max()) > 1e-4) == (L > 3)


def test_tables():
    torch.manual_seed(0)
    position = Shaw(256, 4, K=8)
    assert position.keys.shape == position.values.shape == (4, 17, 64)
    assert abs(float(position.keys.detach().std()) - 1 / 8) < 0.005
    assert Shaw(8, 2, K=1, shared=True).keys.shape == (1, 3, 4)
    assert Shaw(8, 2, values=False).values is None and not Shaw(8, 2, values=False).adds_values
    assert Shaw(8, 2, K=0).rows(3).tolist() == [[0] * 3] * 3


def test_nothing_grows_with_length_squared_times_width():
    """The largest tensor made is no larger than the scores and their indices."""
    L, heads, d = 96, 2, 32
    attention = Attention(heads * d, heads, Shaw(heads * d, heads, K=4))
    x = torch.randn(1, L, heads * d)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple | list) else [result]:
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.untyped_storage().nbytes())
            return result

    with torch.no_grad(), Watch():
        attention(x)
    assert largest <= 2 * 4 * heads * L * L < 4 * L * L * d


@pytest.mark.parametrize("options, words", [
    ({"K": -1}, "cannot be negative"), ({"outside": "mirror"}, "outside must be one of"),
])  # fmt: skip
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        Shaw(8, 2, **options)


# ---- transformer-XL: the vector of one head of width 1, distance zero, no longest length ----


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
    with pytest.raises(ValueError, match=f"heads = {heads} does not divide the width {dim}"):
        TransformerXL(dim, heads)


# ---- music Transformer: the last row is distance zero, causality is forced, no length is too long ----


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


def test_errors_of_music_transformer():
    with pytest.raises(ValueError, match="max_len must be at least 1"):
        MusicTransformer(8, 2, max_len=0)
