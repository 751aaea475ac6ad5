"""Options of the optimiser, averaged weights, and the explanation of a loss that is not finite."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError, at_least, one_of, only_for
from genmodels.core.processes import own

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
        decay: `none`, `cosine` (to zero at the end) or `exponential`.
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
        one_of("optimizer.name", self.name, OPTIMIZERS)
        one_of("optimizer.decay", self.decay, ("none", "cosine", "exponential"))
        at_least(1, **{"optimizer.half_life": self.half_life})
        if self.decay != "exponential":
            only_for("decay=exponential", **{"optimizer.half_life": (self.half_life, type(self).half_life)})
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


class EMA(nn.Module):
    """Averages of a module's weights, one for each decay, in float32 or wider, updated after each optimiser step.

        w_ema <- r w_ema + (1 - r) w,   r = min(decay, (1 + n) / (10 + n)),   n = number of steps taken

    The warm-up of r lets short runs forget their initial weights. Buffers are copied. The averages are submodules, so
    that checkpoints hold them, and always in evaluation mode.

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
        if not decays or not all(0 <= d < 1 for d in decays) or len(set(decays)) < len(decays):
            raise ValueError(f"EMA decays must be different numbers in [0, 1), got {decays}")
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
            means = [own(p) for p in average.parameters()]
            current = [own(p).to(mean.dtype) for p, mean in zip(source.parameters(), means, strict=True)]
            torch._foreach_lerp_(means, current, 1 - min(decay, warm))
            for mine, theirs in zip(average.buffers(), source.buffers(), strict=True):
                mine.copy_(theirs)

    def average(self, decay: float | None = None) -> nn.Module:
        """The averaged module of one decay; the first by default.

        Raises:
            InputError: when no average of that decay is kept.
        """
        if decay is None:
            return self.averages[0]
        if decay not in self.decays:
            raise InputError(f"no average with decay {decay} is kept; there is {', '.join(map(str, self.decays))}")
        return self.averages[self.decays.index(decay)]


_KEPT = "the weights were not changed and last.ckpt is still finite"
_ADVICE = "Start anew with a lower model.optimizer.lr or more warmup_steps"


@contextlib.contextmanager
def _first_nonfinite(module: nn.Module):
    """Collect the names of the submodules whose output is not finite, in the order they ran."""
    found: list[str] = []

    def watch(name):
        def hook(_module, _inputs, output):
            parts = output if isinstance(output, tuple) else (output,)  # a bijection gives (z, logdet)
            values = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
            if not all(bool(torch.isfinite(value).all()) for value in values):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(name)) for name, m in module.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def explain_nonfinite(model, made) -> str:
    """One line for a loss or gradient that is not finite: step, item, time, log-SNR, layer, and what to try.

    Arguments:
        model: the model in training.
        made: (batch, loss) of each micro-batch of the step.
    """
    step = model.trainer.global_step
    first = next((k for k, (_, loss) in enumerate(made) if not torch.isfinite(loss.per_example).all()), len(made) - 1)
    (batch, loss), since = made[first], len(made) - first
    bad = (~torch.isfinite(loss.per_example)).nonzero().flatten()
    what = "loss" if len(bad) else "gradient"
    place, advice = "", _ADVICE
    if len(bad):
        k = int(bad[0])
        if batch.index is not None:
            place = f" for item {int(batch.index[k])} of {model.spec.name}"
            advice += ", or look at that item"
        if loss.times is not None:
            t = loss.times[k]
            place += f" at t = {float(t):.4f}"
            schedule = getattr(model.core, "schedule", None)
            if schedule is not None:
                place += f" (log-SNR {float(schedule.log_snr(t[None])[0]):.2f})"
    model.batches_seen -= since  # the same noise again
    try:
        with torch.no_grad(), _first_nonfinite(model.core) as layers:
            model.loss(batch, model.training_generator(len(batch)))
    except Exception:
        # An error in this second pass is not the one to report; then no layer is named.
        pass
    finally:
        model.batches_seen += since
    weights = [n for n, p in model.core.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    if layers:
        place += f", first in layer {layers[0]}"
    elif weights:
        place += f", in the gradient of {weights[0]}"
    return f"step {step}: the {what} is not finite{place}; {_KEPT}. {advice}"


def explain_failure(model, error: Exception) -> str:
    """One line for a loss that could not be computed at all, such as one with a singular matrix in it."""
    reason = " ".join(str(error).split()).rstrip(".")
    return f"step {model.trainer.global_step}: the loss cannot be computed ({reason}); {_KEPT}. {_ADVICE}"
