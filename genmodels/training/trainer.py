"""The options of a run's Trainer, and the Lightning Trainer they describe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from genmodels.errors import InputError
from genmodels.training.checkpoint import WholeFiles
from genmodels.training.progress import StepBar


@dataclass(kw_only=True)
class TrainerOptions:
    """How long, where and in which precision a model trains.

    Arguments:
        max_steps: optimiser steps of the run.
        max_epochs: passes over the training data; with both given, the shorter holds; with neither, 10,000 steps.
        accelerator: `auto`, `cpu`, `gpu` or another of Lightning's.
        devices: number of processes, one for each device (cores count as devices on the CPU).
        strategy: Lightning's strategy, `ddp` for several processes.
        num_nodes: number of machines.
        precision: `32-true`, `64-true` or `bf16-mixed`; float16 needs a loss scaler and is not offered.
        compile: compile the network with torch.compile.
        accumulate: batches for each optimiser step.
        validate_every_n_steps: interval of validations, 0 for one at the end.
        limit_validation: most batches of a validation, None for all.
        limit_evaluation: items that evaluate.py judges of this run's models unless it is told otherwise, None for all.
        sample_every_n_steps: interval of sample grids, 0 for none.
        log_every_n_steps: interval of logged training figures.
        progress: show a progress bar.
        deterministic: ask torch for deterministic kernels on accelerators (slower; exact resume needs it there).
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    accelerator: str = "auto"
    devices: int | str = 1
    strategy: str = "auto"
    num_nodes: int = 1
    precision: Literal["32-true", "64-true", "bf16-mixed"] = "32-true"
    compile: bool = False
    accumulate: int = 1
    validate_every_n_steps: int = 500
    limit_validation: int | None = None
    limit_evaluation: int | None = None
    sample_every_n_steps: int = 500
    log_every_n_steps: int = 20
    progress: bool = True
    deterministic: bool = False

    def __post_init__(self):
        if self.precision not in ("32-true", "64-true", "bf16-mixed"):
            raise ValueError(f"trainer.precision must be 32-true, 64-true or bf16-mixed, got {self.precision!r}")
        for key in ("max_steps", "max_epochs", "limit_validation", "limit_evaluation"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"trainer.{key} must be at least 1, got {getattr(self, key)}")
        for key in ("accumulate", "num_nodes", "log_every_n_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.{key} must be at least 1, got {getattr(self, key)}")
        if isinstance(self.devices, int) and self.devices < 1 and self.devices != -1:
            raise ValueError(f"trainer.devices must be at least 1, or -1 for all, got {self.devices}")
        for key in ("validate_every_n_steps", "sample_every_n_steps"):
            if getattr(self, key) < 0:
                raise ValueError(f"trainer.{key} must not be negative, got {getattr(self, key)}")

    def steps(self, batches_per_epoch: int) -> int:
        """Optimiser steps of the run.

        Example:
            >>> TrainerOptions(max_epochs=3, accumulate=2).steps(batches_per_epoch=10)
            15
        """
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.max_epochs is not None:
            limits.append(math.ceil(self.max_epochs * batches_per_epoch / self.accumulate))
        return min(limits, default=10_000)

    def build(self, steps: int, callbacks: list, root_dir: str) -> pl.Trainer:
        """The Lightning Trainer of a run of `steps` steps over an endless stream; loggers are set afterwards."""
        every = min(self.validate_every_n_steps or steps, steps)
        try:
            return pl.Trainer(
                accelerator=self.accelerator,
                devices=self.devices,
                strategy=self.strategy,
                num_nodes=self.num_nodes,
                precision=self.precision,
                max_steps=steps,
                max_epochs=-1,
                accumulate_grad_batches=self.accumulate,
                val_check_interval=every * self.accumulate,
                check_val_every_n_epoch=None,
                limit_val_batches=self.limit_validation,
                num_sanity_val_steps=0,
                inference_mode=False,  # what is drawn after a validation may need gradients
                log_every_n_steps=self.log_every_n_steps,
                enable_checkpointing=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                deterministic=self.deterministic or None,
                default_root_dir=root_dir,
                callbacks=callbacks + ([StepBar()] if self.progress else []),
                enable_progress_bar=self.progress,
                logger=False,
                plugins=[WholeFiles()],
            )
        except (ValueError, TypeError, OverflowError, RuntimeError, ImportError, MisconfigurationException) as error:
            first = str(error).strip().splitlines()[0]
            raise InputError(f"trainer: {first}") from error
