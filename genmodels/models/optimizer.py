"""The optimiser, its learning-rate schedule and gradient clipping, as plain options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adamax": torch.optim.Adamax}


@dataclass(kw_only=True)
class Optimizer:
    """Adam, AdamW or Adamax with warm-up, an optional decay of the rate, and clipping of the gradient's norm.

        rate(n) = lr * min(1, (n + 1) / warmup_steps) * shape(n)
        shape = 1 (none),   (1 + cos(pi n / N)) / 2 over N steps (cosine),   1/2^(n / half_life) (exponential)

    Arguments:
        name: `adam`, `adamw` or `adamax`.
        lr: learning rate after warm-up.
        weight_decay: decoupled weight decay (adamw), or L2 penalty (adam).
        betas: decay of the two moments.
        warmup_steps: steps over which the rate grows linearly from lr / warmup_steps.
        decay: `none`, `cosine` (to zero at the last step) or `exponential`.
        half_life: steps in which an exponential decay halves the rate.
        clip: largest norm of the gradient, 0 for no clipping.

    Example:
        >>> Optimizer(lr=1.0, warmup_steps=4).factor(1, total=100)
        0.5
    """

    name: Literal["adam", "adamw", "adamax"] = "adamw"
    lr: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: int = 0
    decay: Literal["none", "cosine", "exponential"] = "none"
    half_life: int = 10_000
    clip: float = 1.0

    def __post_init__(self):
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer.name must be one of {', '.join(OPTIMIZERS)}, got {self.name!r}")
        if self.decay not in ("none", "cosine", "exponential"):
            raise ValueError(f"optimizer.decay must be none, cosine or exponential, got {self.decay!r}")
        if self.half_life < 1:
            raise ValueError(f"optimizer.half_life must be at least 1, got {self.half_life}")
        for key in ("lr", "weight_decay", "warmup_steps", "clip"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"optimizer.{key} must be finite and not negative, got {getattr(self, key)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {list(self.betas)}")

    def factor(self, step: int, total: int) -> float:
        """The learning rate at a step (counted from 0), as a multiple of `lr`."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        shape = {
            "none": 1.0,
            "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, total)))),
            "exponential": 0.5 ** (step / self.half_life),
        }
        return warm * shape[self.decay]

    def build(self, parameters, total: int):
        """The torch optimiser and its scheduler for a run of `total` steps."""
        fused = {} if self.name == "adamax" else {"fused": True}  # torch has no fused Adamax
        optimizer = OPTIMIZERS[self.name](
            parameters, lr=self.lr, betas=tuple(self.betas), weight_decay=self.weight_decay, **fused
        )
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, total))
