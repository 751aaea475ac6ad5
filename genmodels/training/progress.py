"""A progress bar over optimiser steps, with the loss, the speed and the last validation figure."""

from __future__ import annotations

import sys

from pytorch_lightning.callbacks import ProgressBar
from tqdm import tqdm


class StepBar(ProgressBar):
    """One bar from the resumed step to the last one; in a log file it prints a line every half minute."""

    def __init__(self):
        super().__init__()
        self._bar: tqdm | None = None
        self._enabled = True
        self._loss: float | None = None

    def disable(self) -> None:
        """Called by Lightning on processes other than the first."""
        self._enabled = False

    def enable(self) -> None:
        """The opposite of `disable`."""
        self._enabled = True

    def on_train_start(self, trainer, pl_module) -> None:
        """Open the bar."""
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            desc="training",
            unit="step",
            dynamic_ncols=terminal,
            mininterval=0.2 if terminal else 30,
            disable=not self._enabled,
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Advance to the current step; the loss shown is a running mean."""
        if self._bar is None or self._bar.disable or trainer.global_step == self._bar.n:
            return
        if trainer.global_step % 10 == 0 or self._loss is None:
            loss = float(outputs["loss"].detach())
            self._loss = loss if self._loss is None else 0.9 * self._loss + 0.1 * loss
            shown = {key.split("/")[-1]: f"{value:.3f}" for key, value in pl_module.figures.items()}
            self._bar.set_postfix(loss=f"{self._loss:.4f}", **shown, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_start(self, trainer, pl_module) -> None:
        """Say what is going on."""
        if self._bar is not None and not trainer.sanity_checking:
            self._bar.set_description("validating")

    def on_validation_end(self, trainer, pl_module) -> None:
        """Back to training."""
        if self._bar is not None:
            self._bar.set_description("training")

    def on_train_end(self, trainer, pl_module) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer, pl_module, exception) -> None:
        """Close the bar before the message."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
