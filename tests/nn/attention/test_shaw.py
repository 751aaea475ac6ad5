"""Shaw: rows of the tables, both ways beyond the window, and no tensor of L x L x d."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Attention, Shaw

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


@pytest.mark.parametrize("options, words", [({"K": -1}, "cannot be negative"), ({"outside": "mirror"}, "clip or zero")])
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        Shaw(8, 2, **options)
