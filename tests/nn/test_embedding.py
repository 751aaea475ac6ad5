"""The noise level and the class, told to a network."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.nn import ConditionEmbedding, log_snr_features
from genmodels.nn.blocks import fourier_features


def closest(features, spacing: float) -> float:
    """Least distance between the features of any two log-SNRs of a grid over [-20, 20]."""
    grid = torch.arange(-20, 20 + spacing / 2, spacing, dtype=torch.float64)
    return float(torch.pdist(features(grid)).min())


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_noise_levels_are_told_apart(width):
    assert closest(lambda log_snr: log_snr_features(log_snr, width), 0.02) > 0.1


def test_law_catches_features_that_repeat():
    # Without the slow sinusoids every 2 pi of the position looks alike.
    assert closest(lambda log_snr: log_snr_features(log_snr, 128)[:, [0, 64]], 0.02) < 0.01


def test_close_noise_levels_differ_in_float32_too():
    log_snr = torch.linspace(-20, 20, 40001)  # steps of 1e-3
    features = log_snr_features(log_snr, 64)
    assert float((features[1:] - features[:-1]).norm(dim=1).min()) > 0.01


def test_features_equal_the_formula():
    log_snr = torch.tensor([-3.7, 12.25], dtype=torch.float64)
    features = log_snr_features(log_snr, 6)
    for row, value in zip(features, log_snr.tolist(), strict=True):
        position = (value + 20) / 40 * 1000
        angles = [position * 10000 ** (-i / 3) for i in range(3)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert row.tolist() == pytest.approx(expected, abs=1e-10)


def test_values_beyond_the_ends_are_clipped():
    log_snr = torch.tensor([-math.inf, -25.0, -20.0, 20.0, 25.0, math.inf])
    features = log_snr_features(log_snr, 8)
    assert (features[:3] == features[0]).all() and (features[3:] == features[5]).all()


def test_features_stay_wide_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert log_snr_features(torch.zeros(2), 8).dtype == torch.float32
    assert log_snr_features(torch.zeros(2, dtype=torch.bfloat16), 8).dtype == torch.float32
    assert log_snr_features(torch.zeros(2, dtype=torch.float64), 8).dtype == torch.float64


@pytest.mark.parametrize("log_snr", [-3.0, 0.5, 4.0])
def test_fourier_features_are_means_given_the_noisy_data(log_snr):
    # Under a flat prior x_0 given x is N(x / alpha, 1 / SNR): the means of sin and cos by quadrature.
    x = torch.tensor([[[-0.9, 0.2, 1.1]]], dtype=torch.float64)
    found = fourier_features(x, torch.tensor([log_snr], dtype=torch.float64), [0, 2])
    alpha, width = 1 / math.sqrt(1 + math.exp(-log_snr)), math.exp(-log_snr / 2)
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2) / torch.exp(-z.square() / 2).sum()
    for i, value in enumerate(x.flatten().tolist()):
        points = value / alpha + width * z
        means = [(weight * f(2**n * math.pi * points)).sum() for f in (torch.sin, torch.cos) for n in (0, 2)]
        assert found[0, :, i].tolist() == pytest.approx([float(m) for m in means], abs=1e-9)


def test_fourier_features_of_channels_at_the_ends_and_under_autocast():
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = fourier_features(x, torch.tensor([-math.inf, 3.0, math.inf]), [3, 7])
    assert found.shape == (3, 8, 5) and found.dtype == torch.float32 and bool(found.isfinite().all())
    assert bool((found[0] == 0).all())  # nothing but noise
    angles = torch.cat([8 * math.pi * x[2:], 128 * math.pi * x[2:]], 1)
    assert torch.allclose(found[2:], torch.cat([angles.sin(), angles.cos()], 1), atol=1e-3)


def test_no_condition_is_the_null_class():
    torch.manual_seed(0)
    embedding, log_snr = ConditionEmbedding(8, 16, 12, num_classes=3), torch.randn(4)
    null = embedding(log_snr, torch.full((4,), 3))
    assert (embedding(log_snr) == null).all()
    for label in range(3):
        assert (embedding(log_snr, torch.full((4,), label)) - null).abs().max() > 0.01


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ConditionEmbedding(7, 8, 8), "even width"),
        (lambda: ConditionEmbedding(8, 8, 8)(torch.zeros(2), torch.zeros(2, dtype=torch.int64)), "without classes"),
        (lambda: ConditionEmbedding(8, 8, 8, 3)(torch.zeros(2), torch.zeros(2)), "integer labels"),
        (lambda: ConditionEmbedding(8, 8, 8, 3)(torch.zeros(2), torch.zeros(2, 1, dtype=torch.int64)), "labels"),
    ],
)
def test_errors_are_one_line(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)
