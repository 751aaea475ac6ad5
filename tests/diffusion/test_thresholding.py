"""Thresholds: what they keep in range, what they leave alone, and that the other fields follow."""

from __future__ import annotations

import pytest
import torch

from genmodels.diffusion import (
    THRESHOLDS,
    CosineSchedule,
    GaussianDenoiser,
    ThresholdedDenoiser,
    sample,
    uniform_t,
)
from tests.diffusion.table import INSTANCES, keyed, seeded

FAR = GaussianDenoiser(CosineSchedule(), torch.full((2,), 3.0), 0.01)
NEAR = GaussianDenoiser(CosineSchedule(), torch.zeros(3), 1e-4)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", INSTANCES)
def test_estimates_stay_in_range(name, threshold):
    times, estimates = uniform_t(FAR.schedule, 8), []
    thresholded = ThresholdedDenoiser(FAR, threshold)
    out = sample(thresholded, (3, 2), times, INSTANCES[name], keyed(3), callback=lambda *a: estimates.append(a[2]))
    assert torch.stack(estimates).abs().max() <= 1 and out.x.abs().max() <= 1
    assert sample(FAR, (3, 2), times, INSTANCES[name], keyed(3)).x.mean() > 2


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", INSTANCES)
def test_a_threshold_that_does_not_bind_changes_nothing(name, threshold):
    times = uniform_t(NEAR.schedule, 8)
    a, b = (sample(denoiser, (3, 3), times, INSTANCES[name], keyed(3), dtype=torch.float64).x
            for denoiser in (ThresholdedDenoiser(NEAR, threshold), NEAR))  # fmt: skip
    assert (a - b).abs().max() < 1e-11


def test_dynamic_keeps_what_the_percentile_says():
    x0 = torch.randn(4, 1, 20, 20, generator=seeded()) * torch.tensor([0.2, 1.0, 3.0, 9.0])[:, None, None, None]
    out = THRESHOLDS["dynamic"](x0)
    assert torch.equal(out[0], x0[0])  # within range already
    saturated = (out.abs() >= 1).flatten(1).float().mean(1)
    assert ((saturated[1:] > 0.002) & (saturated[1:] < 0.008)).all()
    inner = x0[3].abs() < 9  # the rest is the same picture with less contrast
    ratio = out[3][inner] / x0[3][inner]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def consistent(prediction, x, alpha, sigma):
    torch.testing.assert_close(alpha * prediction.x0 + sigma * prediction.eps, x)
    torch.testing.assert_close(prediction.score, -prediction.eps / sigma)
    torch.testing.assert_close(prediction.v, alpha * prediction.eps - sigma * prediction.x0)


def test_the_other_fields_follow_the_estimate():
    x, t = torch.randn(5, 2, generator=seeded(), dtype=torch.float64), torch.full((5,), 0.4, dtype=torch.float64)
    alpha, sigma = FAR.schedule.alpha_sigma(t[0])
    prediction = ThresholdedDenoiser(FAR, "static")(x, t)
    consistent(prediction, x, alpha, sigma)
    prediction.eps = FAR(x, t).eps  # as if x_0 alone had been clipped
    with pytest.raises(AssertionError):
        consistent(prediction, x, alpha, sigma)


def test_an_unknown_threshold():
    with pytest.raises(ValueError, match="static, dynamic"):
        ThresholdedDenoiser(FAR, "soft")
