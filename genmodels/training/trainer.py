"""The trainer's options, the endless stream of batches, and which settings may change on resume."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.plugins.io import CheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.tuner import Tuner
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from scipy.signal import savgol_filter
from torch.utils.data import Sampler

from genmodels.core.data import Batch
from genmodels.core.errors import InputError, RunError, at_least, first_line, one_of, terminal
from genmodels.core.files import flat
from genmodels.data.base import DataModule, spread_rows
from genmodels.data.loading import Loader, ResumableBatchSampler, training_loader
from genmodels.models.build import construct
from genmodels.models.checkpoint import read_resumable, write_checkpoint, write_parts
from genmodels.training.callbacks import StepBar
from genmodels.training.processes import environments, require_only_training

_TRIES = 100  # learning rates that the finder tries, one per step


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's interface to the functions for checkpoints."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Write a checkpoint whole."""
        write_checkpoint(path, checkpoint)

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict:
        """Read a checkpoint safely; `weights_only` is always True here."""
        return read_resumable(path, map_location=map_location or "cpu")

    def remove_checkpoint(self, path) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


@dataclass(kw_only=True)
class TrainerOptions:
    """Length, devices and precision of training.

    Arguments:
        max_steps: optimiser steps of the run.
        max_epochs: passes over the training data; the shorter of both limits applies; without either, 10,000 steps.
        accelerator: `auto`, `cpu`, `gpu` or another accelerator of Lightning.
        devices: number of processes, one per device (on the CPU, one per core used).
        strategy: Lightning's strategy: `ddp` for several processes, `fsdp` to shard the weights over them too.
        num_nodes: number of machines.
        precision: `32-true`, `64-true` (of training; a trained model is loaded in float32) or `bf16-mixed`; float16
            needs a loss scaler and is not supported.
        compile: compile the network with torch.compile.
        accumulate: batches per optimiser step.
        validate_every_n_steps: steps between validations, 0 for a single one at the end.
        early_stopping: stop after this many validations in a row without a better metric, 0 for never; a stopped run
            can be resumed with a larger number.
        lr_find: before training, choose model.optimizer.lr by Lightning's learning-rate finder.
        limit_validation: largest number of batches per validation, None for all.
        limit_evaluation: default number of items for evaluate.py on models of this run, None for all.
        sample_every_n_steps: steps between sample grids, 0 for none.
        log_every_n_steps: steps between logged training metrics.
        progress: show a progress bar.
        deterministic: use torch's deterministic kernels on accelerators (slower; needed for exact resume there).
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
    early_stopping: int = 0
    lr_find: bool = False
    limit_validation: int | None = None
    limit_evaluation: int | None = None
    sample_every_n_steps: int = 500
    log_every_n_steps: int = 20
    progress: bool = True
    deterministic: bool = False

    def __post_init__(self):
        one_of("trainer.precision", self.precision, ("32-true", "64-true", "bf16-mixed"))
        for key in ("max_steps", "max_epochs", "limit_validation", "limit_evaluation", "accumulate", "num_nodes",
                    "log_every_n_steps"):
            at_least(1, **{f"trainer.{key}": 1 if getattr(self, key) is None else getattr(self, key)})
        for key in ("validate_every_n_steps", "sample_every_n_steps", "early_stopping"):
            at_least(0, **{f"trainer.{key}": getattr(self, key)})
        if isinstance(self.devices, str) and re.fullmatch(r"-?\d+", self.devices):
            self.devices = int(self.devices)
        if isinstance(self.devices, int) and self.devices < 1 and self.devices != -1:
            raise InputError(f"trainer.devices must be at least 1, or -1 for all, got {self.devices}")
        if isinstance(self.devices, str) and not re.fullmatch(r"auto|\d+(,\d+)*", self.devices):
            raise InputError("trainer.devices must be a number of processes, auto, or a list as in 0,1, got "
                             f"{self.devices!r}")
        one_of("trainer.accelerator", self.accelerator,
               ("auto", "gpu", *AcceleratorRegistry.available_accelerators()))
        if self.strategy not in ("auto", *StrategyRegistry.available_strategies()):
            raise InputError(f"trainer.strategy={self.strategy} is not a strategy of Lightning: use auto, or ddp for "
                             "several processes")

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

    def _strategy(self):
        several = isinstance(self.devices, int) and self.devices * self.num_nodes > 1
        if self.strategy == "ddp" or self.strategy == "auto" and several and not hasattr(sys, "ps1"):
            # Buffers change in the same way in all processes, so they need not be sent at every step.
            return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
        if self.strategy != "fsdp":
            return self.strategy
        if not isinstance(self.devices, int) or self.devices < 1:
            raise InputError(f"trainer.strategy=fsdp needs the number of devices, got trainer.devices={self.devices}")
        return ShardedStrategy(data_parallel_size=self.devices * self.num_nodes, tensor_parallel_size=1,
                               save_distributed_checkpoint=False)

    def build(self, steps: int, callbacks: list, root_dir: str) -> pl.Trainer:
        """The Lightning Trainer for `steps` steps over an endless stream; loggers are set afterwards."""
        every = min(self.validate_every_n_steps or steps, steps)
        if self.early_stopping and not self.validate_every_n_steps:
            raise InputError(f"trainer.early_stopping={self.early_stopping} needs validations during training: give "
                             "trainer.validate_every_n_steps")
        try:
            trainer = pl.Trainer(
                accelerator=self.accelerator,
                devices=self.devices,
                strategy=self._strategy(),
                num_nodes=self.num_nodes,
                precision=self.precision,
                max_steps=steps,
                max_epochs=-1,
                accumulate_grad_batches=self.accumulate,
                val_check_interval=every * self.accumulate,
                check_val_every_n_epoch=None,
                limit_val_batches=self.limit_validation,
                num_sanity_val_steps=0,
                inference_mode=False,  # pictures drawn after a validation may need gradients
                log_every_n_steps=self.log_every_n_steps,
                enable_checkpointing=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                deterministic=self.deterministic or None,
                default_root_dir=root_dir,
                callbacks=callbacks + ([StepBar()] if self.progress else []),
                enable_progress_bar=self.progress,
                logger=False,
                plugins=[AtomicCheckpointIO(), *environments()],
            )
        except (ValueError, TypeError, OverflowError, RuntimeError, ImportError, MisconfigurationException) as error:
            hint = ": trainer.accelerator=auto takes what there is" if "backend found" in str(error) else ""
            raise InputError(f"trainer: {first_line(error).rstrip('!')}{hint}") from error
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):  # copies of a process that has begun a run
            raise InputError("trainer: several processes are started by running a script again, with the strategy ddp "
                             "or fsdp, not from an interactive session: put the call into a file, or use train.py"
                             if self.strategy == "auto" else
                             f"trainer.strategy={self.strategy} copies this process, which has begun the run: use ddp")
        require_only_training(trainer.world_size > 1)
        return trainer


class ShardedStrategy(ModelParallelStrategy):
    """Weights, averages and the optimiser's state sharded over the processes (FSDP2) by the model's hook.

    Each process writes its share of a checkpoint; at the end of training the shares become one plain file.
    """

    def lightning_module_state_dict(self) -> dict:
        """Weights and averages: this process's share; at the end all of them, on the first process."""
        module = self.lightning_module
        return super().lightning_module_state_dict() if module.finished else module.state_dict()

    def optimizer_state(self, optimizer) -> dict:
        """The optimiser's state; empty before the first step, because torch would take and count a step to make one."""
        whole = self.lightning_module.finished and optimizer.state
        return super().optimizer_state(optimizer) if whole else optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict, filepath, storage_options=None) -> None:
        """Write a checkpoint in parts, at the end one file; any number of processes and any strategy can resume it."""
        if self.lightning_module.finished:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            write_parts(filepath, checkpoint)


class EndlessBatchSampler(Sampler):
    """Epoch after epoch of a `ResumableBatchSampler`, starting after `done` batches of the run; it has no length.

    Example:
        >>> def first(done, n):
        ...     batches = iter(EndlessBatchSampler(ResumableBatchSampler(7, 2, order_seed=1), done))
        ...     return [next(batches)[1].tolist() for _ in range(n)]
        >>> first(0, 8)[5:] == first(5, 3)
        True
    """

    def __init__(self, epochs: ResumableBatchSampler, done: int = 0):
        self.epochs, self.done = epochs, done

    def __iter__(self) -> Iterator:
        epoch, position = divmod(self.done, len(self.epochs))
        while True:
            self.epochs.set_position(epoch, position)
            yield from self.epochs
            epoch, position = epoch + 1, 0


def training_stream(datamodule: DataModule, batches_seen: int = 0) -> Loader:
    """This process's endless training batches, after the first `batches_seen` batches of the run.

    The stream has no epochs, so that its position is a single number. Workers run across epochs, and batches that were
    prefetched when a run was killed are fetched again.
    """
    loader = datamodule.train_dataloader()
    sampler = EndlessBatchSampler(loader.batch_sampler, batches_seen)
    return training_loader(
        datamodule.split("train"), loader.batch_sampler, datamodule.flip, loader.num_workers, loader.pin_memory, sampler
    )


def initial_batch(datamodule: DataModule, largest: int = 20_000) -> Batch:
    """Training items for data-dependent initialisation: all of them, or `largest` evenly spaced ones.

    A data set of large items has its own limit, `most_at_once`.
    """
    data = datamodule.split("train")
    largest = getattr(data, "most_at_once", largest)
    return data.__getitems__(spread_rows(len(data), min(len(data), largest)))


def find_learning_rate(options: TrainerOptions, network: pl.LightningModule, datamodule: DataModule) -> float:
    """The learning rate at which the loss falls fastest while the rate grows from 1e-6 up to 1 in 100 steps.

    The network must have its initial weights; the search trains it, so discard it afterwards. If a loss is not finite,
    the search is repeated with a tenth of the largest rate.

    Raises:
        InputError: for several processes, which would each find another rate, and where losses are not finite or do
            not fall.
    """
    if options.num_nodes != 1 or options.devices not in (1, "1", "auto"):
        raise InputError("trainer.lr_find tries learning rates on one process: run it with trainer.devices=1 "
                         "trainer.max_steps=1, then give model.optimizer.lr the rate that it prints")
    start = copy.deepcopy(network.state_dict())
    bar = sys.stderr if options.progress and terminal(sys.stderr) else io.StringIO()  # Lightning's, a line each step
    for largest in (1.0, 0.1, 0.01, 0.001):
        network.load_state_dict(start)
        with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(bar), warnings.catch_warnings(),
              contextlib.suppress(RunError)):
            warnings.simplefilter("ignore")  # about training without validation, which is intended
            trainer = replace(options, progress=False, accumulate=1).build(_TRIES, [], folder)
            trainer.strategy.checkpoint_io = TorchCheckpointIO()  # for the finder's temporary file
            # Losses may be negative, where Lightning's threshold on the loss would end the search at once.
            finder = Tuner(trainer).lr_find(network, training_stream(datamodule), min_lr=1e-6, max_lr=largest,
                                            num_training=_TRIES, early_stop_threshold=None, update_attr=False)
            rate = steepest(np.array(finder.results["lr"]), _single_losses(np.array(finder.results["loss"])))
            if rate is None:
                raise InputError(f"trainer.lr_find tried learning rates from 1e-6 to {largest:g}, and the loss falls "
                                 "at none of them: give model.optimizer.lr")
            return float(f"{rate:.2g}")
    raise InputError("trainer.lr_find found no learning rate, the losses are not finite: give model.optimizer.lr")


def steepest(rates: np.ndarray, losses: np.ndarray) -> float | None:
    """The rate at which the loss falls fastest per factor of the rate, before it is lowest; None if it does not fall.

    Both come from lines fitted to 21 neighbouring steps. Losses above the first ones count as these, as does all that
    follows an explosion. Lightning's own suggestion is not used: it divides by the distance of two rates, so that the
    noise of the smallest ones decides.

    Example:
        >>> rates = np.logspace(-6, 0, 101)  # with 1e-3 in the middle
        >>> print(f"{steepest(rates, -np.tanh(np.log10(rates) + 3)):.1g}")
        0.001
    """
    first = losses[:10].max()
    exploded = np.maximum.accumulate(losses) > first + 1e6 * (1 + abs(first))  # after which running means lack digits
    losses = np.where(exploded, first, np.minimum(losses, first))
    level, slope = (savgol_filter(losses, 21, 1, deriv=order) for order in (0, 1))
    lowest = level.argmin()
    return float(rates[slope[: lowest + 1].argmin()]) if lowest >= 10 else None


def _single_losses(smoothed: np.ndarray, decay: float = 0.98) -> np.ndarray:
    """The loss of every step from the running means that Lightning's finder records."""
    # Its correction for the start from 0 counts a step too many, which makes the first means half of the losses.
    running = smoothed * (1 - decay ** np.arange(2, len(smoothed) + 2))
    return (running - decay * np.append(0, running[:-1])) / (1 - decay)


#: May change on resume: the location of the data, the speed of loading, what is displayed, and the length of training.
FREE = {
    "trainer.max_steps", "trainer.max_epochs", "data.num_workers", "data.root", "data.file", "data.labels",
    "data.storage", "data.cache", "data.download", "trainer.validate_every_n_steps", "trainer.limit_evaluation",
    "trainer.sample_every_n_steps", "trainer.log_every_n_steps", "trainer.progress", "trainer.early_stopping",
    "trainer.lr_find",
}  # fmt: skip
_ROUNDING = "from here on results are equal up to rounding, not bit for bit"
#: May change on resume with a message about the effect. Settings in neither table must stay the same.
REPORTED = {
    "trainer.limit_validation": "the best metric so far was computed on other validation items",
    "trainer.accelerator": _ROUNDING,
    "trainer.devices": _ROUNDING,
    "trainer.num_nodes": _ROUNDING,
    "trainer.strategy": _ROUNDING,
    "trainer.compile": _ROUNDING,
    "trainer.deterministic": _ROUNDING,
}


def check_same(header: dict, config: dict, path: Path) -> list[str]:
    """Messages about settings that changed on resume; a change to another run is refused.

    Arguments:
        header: the header of the checkpoint.
        config: the configuration given now.
        path: the checkpoint.

    Raises:
        InputError: naming the first setting that may not change, and both values.
    """
    messages = []
    for part in ("model", "data", "seed", "trainer"):
        then, now = _flat(header["config"], part), _flat(config, part)
        for key in dict.fromkeys([*then, *now]):
            if key in FREE or then.get(key) == now.get(key):
                continue
            was, given = (f"is {d[key]!r}" if key in d else "is not set" for d in (then, now))
            if key not in REPORTED:
                raise InputError(f"resume: {key} {was} in {path} but {given} here; a resumed run keeps its model, "
                                 "data, seed, precision and accumulation")
            messages.append(f"resume: {key} {was} in the checkpoint and {given} here: {REPORTED[key]}")
    if header.get("torch", torch.__version__) != torch.__version__:
        messages.append(f"resume: the checkpoint is of torch {header['torch']}, this is torch {torch.__version__}: "
                        f"{_ROUNDING}")
    return messages


def _flat(config: dict, part: str) -> dict:
    """The settings of a part by dotted key, with defaults for the trainer."""
    node = config.get(part)
    return flat({part: vars(construct(TrainerOptions, **(node or {}))) if part == "trainer" else node})
