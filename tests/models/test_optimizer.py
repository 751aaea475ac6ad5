"""Learning-rate schedules against their formulas, and refused options."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.models.optimizer import EMA, Optimizer


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
        ({"half_life": 5}, "optimizer.half_life=5 is for decay=exponential"),
        ({"betas": (0.9, float("nan"))}, "two numbers in"),
    ],
)
def test_errors(options, said):
    with pytest.raises(ValueError, match=said):
        Optimizer(**options)


# ---- averages against the recursion written out by hand ----


def by_hand(values: list[float], decay: float) -> float:
    average = values[0]
    for n, value in enumerate(values[1:]):
        r = min(decay, (1 + n) / (10 + n))
        average = r * average + (1 - r) * value
    return average


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_averages_follow_the_precision_of_training(precision):
    source = nn.Linear(2, 2)
    both = nn.ModuleList([source, EMA(source, [0.9])]).to(precision)
    with torch.no_grad():
        source.weight.add_(1.0)
    both[1].update(source, step=0)
    assert both[1].average().weight.dtype == precision
    torch.testing.assert_close(source.weight - both[1].average().weight, torch.full((2, 2), 0.1, dtype=precision))


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_recursion(decay):
    source = nn.Linear(1, 1, bias=False).double()
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)).tolist()
    nn.init.constant_(source.weight, values[0])
    ema = EMA(source, [decay, 0.1])
    for n, value in enumerate(values[1:]):
        nn.init.constant_(source.weight, value)
        ema.update(source, n)
    assert abs(float(ema.average(decay).weight.detach()) - by_hand(values, decay)) < 1e-6
    assert abs(float(ema.average(0.1).weight.detach()) - by_hand(values, 0.1)) < 1e-6
    without_warm_up = values[0] * decay**39 + sum((1 - decay) * v * decay ** (38 - n) for n, v in enumerate(values[1:]))
    assert decay < 0.9 or abs(float(ema.average().weight.detach()) - without_warm_up) > 1e-3


def test_averages_are_float32_never_train_and_take_no_gradient():
    ema = EMA(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).to(torch.bfloat16), [0.9])
    ema.train()
    assert not ema.average().training and all(p.dtype == torch.float32 for p in ema.parameters())
    assert not any(p.requires_grad for p in ema.parameters())


def test_buffers_are_copied():
    source = nn.BatchNorm1d(2)
    ema = EMA(source, [0.9])
    source.running_mean.fill_(3.0)
    ema.update(source, 0)
    assert ema.average().running_mean.tolist() == [3.0, 3.0]


def test_errors_of_ema():
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        EMA(nn.Linear(1, 1), [1.0])
    with pytest.raises(ValueError, match="there is 0.9"):
        EMA(nn.Linear(1, 1), [0.9]).average(0.99)
