"""Group normalisation against a plain loop."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn import GroupNorm, group_count


def by_loop(x, groups, eps, a, b, length=None):
    """Normalise each example and group in turn, over the first `length` of the last axis; zero beyond."""
    y = torch.zeros_like(x)
    width = x.shape[1] // groups
    for i in range(len(x)):
        stop = x.shape[-1] if length is None else int(length[i])
        for c in range(0, x.shape[1], width):
            part = x[i, c : c + width, ..., :stop]
            y[i, c : c + width, ..., :stop] = (part - part.mean()) / (part.var(unbiased=False) + eps).sqrt()
        for c in range(x.shape[1]):
            y[i, c, ..., :stop] = y[i, c, ..., :stop] * a[i, c] + b[i, c]
    return y


def example(*space):
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(3, 12, *space, generator=generator, dtype=torch.float64)
    scale, shift = torch.randn(2, 3, 12, generator=generator, dtype=torch.float64)
    return x, scale, shift


@pytest.mark.parametrize("space", [(7,), (4, 5), (1, 2)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_scale_and_shift_equal_the_loop(space, memory_format):
    x, scale, shift = example(*space)
    norm = GroupNorm(12, affine=False)
    expected = by_loop(x, norm.groups, norm.eps, 1 + scale, shift)
    if len(space) == 2:
        x = x.contiguous(memory_format=memory_format)
    assert torch.allclose(norm(x, scale, shift), expected, atol=1e-12)
    # Planted bug: the scale of one example given to another.
    assert not torch.allclose(norm(x, scale.roll(1, 0), shift), expected, atol=1e-2)


@pytest.mark.parametrize("space", [(7,), (4, 7)])
@pytest.mark.parametrize("conditioned", [False, True])
def test_masked_norm_equals_the_loop_over_valid_positions(space, conditioned):
    x, scale, shift = example(*space)
    length = torch.tensor([7, 4, 1])
    mask = (torch.arange(7) < length[:, None]).reshape(3, *(1,) * len(space), 7)
    norm = GroupNorm(12, affine=not conditioned).double()
    a, b = (1 + scale, shift) if conditioned else (torch.ones(3, 12), torch.zeros(3, 12))
    given = (scale, shift) if conditioned else ()
    expected = by_loop(x, norm.groups, norm.eps, a, b, length)
    assert torch.allclose(norm(x, *given, mask=mask), expected, atol=1e-12)
    # Planted bug: mean and variance over the padding too.
    assert not torch.allclose(norm(x, *given) * mask, expected, atol=1e-2)


def test_masked_norm_of_everything_is_the_plain_norm():
    x, scale, shift = example(5)
    norm = GroupNorm(12, affine=False)
    everything = norm(x, scale, shift, mask=torch.ones(3, 1, 5, dtype=torch.bool))
    assert torch.allclose(everything, norm(x, scale, shift), atol=1e-12)


def test_an_example_without_valid_positions_stays_finite():
    x, scale, shift = example(5)
    y = GroupNorm(12, affine=False)(x, scale, shift, mask=torch.zeros(3, 1, 5, dtype=torch.bool))
    assert (y == 0).all()


@pytest.mark.parametrize("channels", [1, 3, 4, 6, 8, 20, 32, 48, 64, 96, 100, 128, 192, 256, 1024])
def test_groups_are_the_largest_legal_divisor(channels):
    legal = [n for n in range(1, 33) if channels % n == 0 and channels / n >= 4]
    assert group_count(channels) == (legal[-1] if legal else 1)
