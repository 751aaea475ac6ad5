"""Exponential moving averages of the weights, kept beside the raw ones."""

from __future__ import annotations

import copy

import torch
from torch import nn


class EMA(nn.Module):
    """Averages of a module's weights, one for each decay, in float32 or wider, updated after each optimiser step.

        w_ema <- r w_ema + (1 - r) w,   r = min(decay, (1 + n) / (10 + n)),   n = number of steps taken

    The warm-up of r lets short runs forget their initial weights. Buffers are copied. The averages are ordinary
    submodules, so a checkpoint holds them and they are always in evaluation mode.

    Arguments:
        source: the module to average.
        decays: one or several decays in [0, 1).

    Example:
        >>> source = nn.Linear(1, 1, bias=False)
        >>> ema = EMA(source, [0.999])
        >>> with torch.no_grad(): _ = source.weight.add_(1.0)
        >>> before = ema.average().weight.clone()
        >>> ema.update(source, step=0)  # r = 1/10
        >>> round(float((ema.average().weight - before).detach()), 4)
        0.9
    """

    def __init__(self, source: nn.Module, decays: list[float]):
        super().__init__()
        if not decays or not all(0 <= d < 1 for d in decays):
            raise ValueError(f"EMA decays must be numbers in [0, 1), got {decays}")
        self.decays = list(decays)
        self.averages = nn.ModuleList(copy.deepcopy(source).float() for _ in decays)
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> EMA:
        """Averages never train: no dropout, whatever the mode of the module that holds them."""
        return super().train(False)

    @torch.no_grad()
    def update(self, source: nn.Module, step: int) -> None:
        """Move every average towards `source` after optimiser step number `step` (counted from 0)."""
        warm = (1 + step) / (10 + step)
        for decay, average in zip(self.decays, self.averages, strict=True):
            means = list(average.parameters())
            current = [p.detach().to(mean.dtype) for p, mean in zip(source.parameters(), means, strict=True)]
            torch._foreach_lerp_(means, current, 1 - min(decay, warm))
            for mine, theirs in zip(average.buffers(), source.buffers(), strict=True):
                mine.copy_(theirs)

    def average(self, decay: float | None = None) -> nn.Module:
        """The averaged module of one decay; the first by default.

        Raises:
            ValueError: when no average of that decay is kept.
        """
        if decay is None:
            return self.averages[0]
        if decay not in self.decays:
            raise ValueError(f"no average with decay {decay} is kept; there is {', '.join(map(str, self.decays))}")
        return self.averages[self.decays.index(decay)]
