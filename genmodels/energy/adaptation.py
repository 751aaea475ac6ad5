"""Step sizes that find a wanted acceptance by themselves, during warm-up."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class DualAveraging(NamedTuple):
    """Dual averaging of the logarithm of the step size, one for every chain.

        H_t = (1 - 1/(t + t0)) H_{t-1} + (wanted - acceptance_t)/(t + t0)
        log h_{t+1} = mu - sqrt(t)/gamma H_t,   log h_bar = t^-kappa log h + (1 - t^-kappa) log h_bar

    Each chain adapts by its own acceptance alone, so that it is the same in any batch. Use `step_size` while adapting
    and `averaged` afterwards, unchanged: a chain whose step follows its past does not leave the target invariant.

    Shapes: all `(B,)` float64, `count` an integer.
    Source: Hoffman and Gelman 2014, section 3.2.1, with its constants.

    Example:
        >>> state = DualAveraging.start(0.1, 1)
        >>> for _ in range(500):  # an acceptance that falls with the step: .65 at h = .35
        ...     state = state.update(1 - state.step_size, wanted=0.65)
        >>> round(float(state.averaged), 2)
        0.35
    """

    error: Tensor
    log_step: Tensor
    log_averaged: Tensor
    centre: Tensor
    count: int

    @classmethod
    def start(cls, step_size: float, chains: int, device=None) -> DualAveraging:
        """Before the first step; the step size is drawn towards ten times the one given."""
        log_step = torch.full((chains,), math.log(step_size), dtype=torch.float64, device=device)
        return cls(torch.zeros_like(log_step), log_step, log_step.clone(), log_step + math.log(10), 0)

    @property
    def step_size(self) -> Tensor:
        """(B,) for the next step of the warm-up."""
        return self.log_step.exp()

    @property
    def averaged(self) -> Tensor:
        """(B,) for all steps after the warm-up."""
        return self.log_averaged.exp()

    def update(self, acceptance: Tensor, *, wanted: float) -> DualAveraging:
        """The state after a step with that probability of acceptance (B,)."""
        t = self.count + 1
        share = 1 / (t + 10)
        error = (1 - share) * self.error + share * (wanted - acceptance.to(torch.float64))
        log_step = self.centre - math.sqrt(t) / 0.05 * error
        weight = t**-0.75
        return DualAveraging(error, log_step, torch.lerp(self.log_averaged, log_step, weight), self.centre, t)
