"""Averages against the recursion written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from genmodels.models.optimizer import EMA


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


def test_errors():
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        EMA(nn.Linear(1, 1), [1.0])
    with pytest.raises(ValueError, match="there is 0.9"):
        EMA(nn.Linear(1, 1), [0.9]).average(0.99)
