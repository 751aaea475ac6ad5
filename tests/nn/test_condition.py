"""Conditions and how they reach layers."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn import Condition, Conditioning, modulate


def built(condition, widths, **options):
    torch.manual_seed(0)
    return Conditioning(condition, widths, **options).double()


def test_concatenation_reaches_the_first_layer_or_all():
    condition, x = Condition("vector", 2), torch.zeros(3, 1, 4, 4).double()
    c = torch.randn(3, 2).double()
    (none, shift), *rest = built(condition, [5, 6, 7])(c, x)
    assert none is None and shift.shape == (3, 5, 1, 1) and rest == [None, None]
    pairs = built(condition, [5, 6, 7], everywhere=True)(c, x)
    assert [(scale, shift.shape[1]) for scale, shift in pairs] == [(None, 5), (None, 6), (None, 7)]


def test_film_reaches_all_layers():
    pairs = built(Condition("labels", 4), [5, 6], conditioning="film", dims=1)(
        torch.tensor([0, 3]), torch.zeros(2, 1, 9)
    )
    assert [(scale.shape, shift.shape) for scale, shift in pairs] == [((2, n, 1), (2, n, 1)) for n in (5, 6)]
    assert not torch.equal(pairs[0][0], pairs[0][1])


def test_labels_are_rows_and_vectors_products_and_maps_local():
    labels = built(Condition("labels", 4), [3], dims=0)
    ((_, shift),) = labels(torch.tensor([2, 0, 2]), torch.zeros(3, 1).double())
    assert torch.equal(shift, labels.project.weight[[2, 0, 2]])

    vector, c = built(Condition("vector", 2), [3], dims=0), torch.randn(4, 2).double()
    ((_, shift),) = vector(c, torch.zeros(4, 1).double())
    assert torch.allclose(shift, c @ vector.project.weight.T, atol=1e-12)

    local, c = built(Condition("map", 2), [3], dims=1, kernel_size=3), torch.randn(1, 2, 8).double()
    other = c.clone()
    other[..., 5] += 1
    before, after = (local(part, torch.zeros(1, 1, 8).double())[0][1] for part in (c, other))
    assert ((before - after).abs().amax((0, 1)) > 0).tolist() == [False] * 4 + [True] * 3 + [False]


def test_a_map_is_hidden_outside_the_mask():
    local, c = built(Condition("map", 2), [3], dims=1, kernel_size=3), torch.randn(1, 2, 8).double()
    x, mask = torch.zeros(1, 1, 8).double(), (torch.arange(8) < 5)[None, None]
    ((_, expected),) = local(c[..., :5], x[..., :5])
    ((_, shift),) = local(c.masked_fill(~mask, float("nan")), x, mask)
    assert torch.allclose(shift[..., :5], expected, atol=1e-12)


def test_a_condition_in_another_precision_is_taken_in_that_of_x():
    vector, c = built(Condition("vector", 2), [3], dims=0), torch.randn(4, 2)
    ((_, shift),) = vector(c, torch.zeros(4, 1).double())
    assert shift.dtype == torch.float64


def test_modulate():
    h, scale, shift = torch.randn(3, 2, 5, 4).double()
    assert torch.equal(modulate(h, None), h)
    assert torch.equal(modulate(h, (None, shift)), h + shift)
    assert torch.allclose(modulate(h, (scale, shift)), h * (1 + scale) + shift, atol=1e-12)


def test_squeezed_counts_the_positions_of_maps_only():
    assert Condition("map", 3).squeezed().squeezed(3).stride == 6
    for kind in ("labels", "vector"):
        assert Condition(kind, 3).squeezed() == Condition(kind, 3)


X = torch.zeros(2, 3, 8)
WRONG = {
    "float labels": (Condition("labels", 4), torch.zeros(2)),
    "one-hot labels": (Condition("labels", 4), torch.zeros(2, 4, dtype=torch.int64)),
    "boolean labels": (Condition("labels", 4), torch.zeros(2, dtype=torch.bool)),
    "other batch": (Condition("labels", 4), torch.zeros(3, dtype=torch.int64)),
    "integer vector": (Condition("vector", 4), torch.zeros(2, 4, dtype=torch.int64)),
    "other length": (Condition("vector", 4), torch.zeros(2, 5)),
    "other positions": (Condition("map", 4), torch.zeros(2, 4, 7)),
    "map without positions": (Condition("map", 4), torch.zeros(2, 4)),
    "not squeezed": (Condition("map", 4, stride=2), torch.zeros(2, 4, 8)),
}


@pytest.mark.parametrize("condition, cond", WRONG.values(), ids=WRONG)
def test_a_condition_that_does_not_fit(condition, cond):
    with pytest.raises(ValueError, match="cond must be ") as error:
        built(condition, [3], dims=1)(cond, X)
    assert "\n" not in str(error.value) and str(tuple(cond.shape)) in str(error.value)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Condition("image", 3), "one of labels, vector, map, got 'image'"),
        (lambda: Condition("labels", 0), "size and stride of at least 1, got 0 and 1"),
        (lambda: Condition("map", 2, stride=0), "got 2 and 0"),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()
