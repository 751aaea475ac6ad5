"""Why a step is not finite: the item, the noise level and the first layer, in one line."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

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


def explain_nonfinite(model, batch, loss) -> str:
    """One line for a loss or gradient that is not finite: step, item, time, log-SNR, layer, and what to try."""
    step = model.trainer.global_step
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
    model.batches_seen -= 1  # the same noise again
    try:
        with torch.no_grad(), _first_nonfinite(model.core) as layers:
            model.loss(batch, model.training_generator(len(batch)))
    except Exception:
        # A loss that cannot be taken a second time, watched and without gradients, names no layer; the rest is told.
        pass
    finally:
        model.batches_seen += 1
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
