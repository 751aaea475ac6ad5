"""Learning-rate schedules against their formulas, and refused options."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.models.optimizer import Optimizer


@pytest.mark.parametrize("decay", ["none", "cosine"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_the_rate_follows_the_formula(decay, warmup):
    options = Optimizer(name="adam", lr=0.5, warmup_steps=warmup, decay=decay)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer, scheduler = options.build([parameter], total=100)
    for n in range(100):
        expected = 0.5 * (min(1.0, (n + 1) / warmup) if warmup else 1.0)
        if decay == "cosine":
            expected *= (1 + math.cos(math.pi * n / 100)) / 2
        assert math.isclose(optimizer.param_groups[0]["lr"], expected, rel_tol=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"name": "sgd"}, "adam, adamw"),
        ({"decay": "linear"}, "cosine"),
        ({"lr": -1.0}, "lr must be finite and not negative"),
        ({"lr": math.inf}, "lr must be finite"),
        ({"clip": float("nan")}, "clip must be finite and not negative"),
        ({"betas": (2, 3)}, "two numbers in"),
        ({"betas": (0.9, float("nan"))}, "two numbers in"),
    ],
)
def test_errors(options, said):
    with pytest.raises(ValueError, match=said):
        Optimizer(**options)
