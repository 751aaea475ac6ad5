"""Lightning callbacks: checkpoints, sample grids, progress, and stopping: early, on signals, on non-finite metrics."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ProgressBar
from pytorch_lightning.trainer.states import TrainerFn
from tqdm import tqdm

from genmodels.core.errors import (
    Interrupted,
    NotFinite,
    RunError,
    at_least,
    progress_bar,
    require_finite_rows,
    terminal,
)
from genmodels.core.files import TEMPORARY, write_text
from genmodels.core.processes import rank_world, set_whole
from genmodels.data.text import to_text
from genmodels.models.checkpoint import join_parts
from genmodels.plots.images import has_picture, picture_of
from genmodels.training.loggers import play, show
from genmodels.training.processes import SharedSignal, is_first, requeue
from genmodels.training.run import figures_of

_SOUNDS, _SECONDS = 2, 5.0  # number and longest duration of sounds: Griffin-Lim takes a third of that time
_REQUEUE = getattr(signal, "SIGUSR1", None)  # SLURM's `--signal=USR1@90`; Windows has no such signal


@dataclass(kw_only=True)
class CheckpointOptions:
    """When checkpoints are written.

    Arguments:
        every_n_steps: steps between two versions of last.ckpt.
        keep_best: keep best.ckpt, the checkpoint with the best validation metric.
    """

    every_n_steps: int = 500
    keep_best: bool = True

    def __post_init__(self):
        at_least(1, **{"checkpoint.every_n_steps": self.every_n_steps})


def between_batches(loops: dict, step: int, batches: int) -> dict:
    """Lightning's loop state, rewritten as if `batches` batches and everything due after them were done.

    Lightning's record depends on the hook in which the file is written, and decides whether the validation of that step
    is repeated or skipped; rewritten, a resumed run equals an uninterrupted one.
    """
    fit = loops["fit_loop"]
    done = {"ready": batches, "started": batches, "processed": batches, "completed": batches}
    fit["epoch_loop.batch_progress"].update(total=dict(done), current=dict(done), is_last_batch=False)
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    fresh = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    fit["epoch_loop.val_loop.batch_progress"].update(total=dict(fresh), current=dict(fresh), is_last_batch=False)
    running = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    fit["epoch_progress"].update(total=dict(running), current=dict(running))
    return loops


def metric_of(model) -> float | None:
    """The metric that chooses best.ckpt, the first that a family logs, of the last validation; None before any."""
    return next((value for key, value in model.figures.items() if key.startswith("val/")), None)


class Checkpointing(Callback):
    """Writes `last.ckpt` every n steps, at the start and at the end, and `best.ckpt` after the best validation.

    A step followed by a validation is saved after the validation, which a resumed run so neither repeats nor skips.
    Ctrl-C and SIGTERM stop the run between two steps, after saving; in a job of SLURM, SIGUSR1 also queues it again.
    Several processes stop at the same step, whichever of them received the signal.

    Arguments:
        run_dir: the run folder.
        options: when to save.
    """

    def __init__(self, run_dir: Path, options: CheckpointOptions):
        self.run_dir, self.options = Path(run_dir), options
        self.best: float | None = None
        self.saved_step: int | None = None
        self._due = False
        self._stop: int | None = None
        self._stops: SharedSignal | None = None
        self._handlers: dict = {}

    def state_dict(self) -> dict:
        """The best metric so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict) -> None:
        """The inverse of `state_dict`."""
        best = state_dict["best"]
        if not (best is None or isinstance(best, float) and math.isfinite(best)):
            raise RunError(f"the best metric so far is {best!r}: this checkpoint cannot be resumed")
        self.best = best

    def on_save_checkpoint(self, trainer, pl_module, checkpoint: dict) -> None:
        """Rewrite the loop state."""
        between_batches(checkpoint["loops"], trainer.global_step, pl_module.batches_seen)

    def on_train_start(self, trainer, pl_module) -> None:
        """Remove temporary files of a killed run, save the start, install the signal handlers."""
        if trainer.is_global_zero:
            for stale in self.run_dir.glob(TEMPORARY):
                stale.unlink(missing_ok=True)
        if not trainer.strategy.broadcast((self.run_dir / "best.ckpt").is_file()):
            self.best = None  # resumed from a checkpoint of another folder
        if trainer.global_step == 0:
            self.save(trainer, "last.ckpt")
        self.saved_step, self._seen = trainer.global_step, pl_module.batches_seen
        self._model = pl_module
        self._stops = SharedSignal() if rank_world()[1] > 1 else None
        numbers = [signal.SIGINT, signal.SIGTERM, *([_REQUEUE] if _REQUEUE and "SLURM_JOB_ID" in os.environ else [])]
        if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
            self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number, frame) -> None:
        again, self._stop = self._stop is not None, number
        if self._model.batches_seen == self._seen:  # the first step may take minutes, and the start is saved
            then = f" ({requeue()})" if number == _REQUEUE and is_first() else ""
            raise Interrupted(f"interrupted after step {self.saved_step}, which is saved{then}; continue with the same "
                              "command and resume=last")
        if again and number != _REQUEUE:
            raise Interrupted("interrupted immediately; resume=last continues from the last checkpoint")

    def _restore_signals(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def save(self, trainer, name: str) -> None:
        """Write the metrics so far, then one checkpoint.

        Raises:
            RunError: if it cannot be written, naming the last saved step.
        """
        trainer.lightning_module.finished = trainer.global_step >= trainer.max_steps or trainer.should_stop
        for logger in trainer.loggers:
            logger.save()
        try:
            trainer.save_checkpoint(self.run_dir / name)
        except RunError as error:
            safe = "no step was saved before" if self.saved_step is None else f"step {self.saved_step} is saved"
            raise RunError(f"{error} ({safe})") from error
        if name == "last.ckpt":
            self.saved_step, self._due = trainer.global_step, False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Note whether a save is due."""
        due = trainer.global_step % self.options.every_n_steps == 0 and trainer.global_step != self.saved_step
        self._due = self._due or due

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Save if due and stop after a signal: here, between two steps, the metrics of the last step are logged."""
        # Lightning counts one step too many when a finished run is continued; metrics would have wrong steps.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        stop = self._stop if self._stops is None else self._stops(self._stop)
        if pl_module.batches_seen % trainer.accumulate_grad_batches:
            return
        if (self._due or stop) and trainer.global_step != self.saved_step:
            self.save(trainer, "last.ckpt")
        if stop and pl_module.batches_seen != self._seen:
            self._end(trainer, stop)

    def _end(self, trainer, number: int) -> None:
        """Leave training at the current step, which is saved."""
        if not trainer.is_global_zero:
            raise SystemExit(0)  # the first process reports it
        then = f" and {requeue()}" if number == _REQUEUE else ""
        step = trainer.global_step
        raise Interrupted(f"interrupted at step {step}, saved{then}; continue with the same command and resume=last")

    def on_validation_end(self, trainer, pl_module) -> None:
        """After a validation: best.ckpt if the metric improved, last.ckpt if due."""
        figure = metric_of(pl_module)
        if self.options.keep_best and figure is not None and (self.best is None or figure < self.best):
            self.best = figure
            self.save(trainer, "best.ckpt")
        if trainer.global_step % self.options.every_n_steps == 0 or trainer.state.fn != TrainerFn.FITTING:
            self.save(trainer, "last.ckpt")

    def on_train_end(self, trainer, pl_module) -> None:
        """Save the last step, join checkpoints in parts, and stop if a signal arrived during the last validation."""
        self._restore_signals()
        self.save(trainer, "last.ckpt")
        if trainer.is_global_zero:
            join_parts(self.run_dir / "best.ckpt")
        if self._stops is None and self._stop not in (None, _REQUEUE):  # nothing is left to requeue
            self._end(trainer, self._stop)

    def on_exception(self, trainer, pl_module, exception) -> None:
        """Restore the signal handlers."""
        self._restore_signals()


class SampleGrid(Callback):
    """Pictures of samples with a fixed seed at intervals, in the run folder and on every logger.

    Of mels, the first two are also written as sound. Samples of text and transcripts are written as text files.

    Arguments:
        run_dir: the run folder; samples go to its folder `samples`, other pictures to folders of their name.
        every_n_steps: interval, 0 for never.
        n: number of images; points in the plane are always 2,000, mels and texts 8.
    """

    def __init__(self, run_dir: Path, every_n_steps: int, n: int = 60):
        self.run_dir, self.every, self.n = Path(run_dir), every_n_steps, n

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Draw if due."""
        step = trainer.global_step
        stepped = pl_module.batches_seen % trainer.accumulate_grad_batches == 0
        if self.every and stepped and (step % self.every == 0 or step == trainer.max_steps):
            set_whole(pl_module.weights(), True)  # the first process draws with the weights of all
            self.draw(trainer, pl_module, step)
            set_whole(pl_module.weights(), False)

    def draw(self, trainer, pl_module, step: int) -> None:
        """Draw samples, save and log them; nothing for data that cannot be shown."""
        spec = pl_module.spec
        shown = has_picture(spec) or spec.encoding is not None
        if not trainer.is_global_zero or not shown:
            return
        mode, file = pl_module.training, self.run_dir / "samples" / f"step_{step:06d}.txt"
        pl_module.eval()  # raw weights would draw with dropout
        if not pl_module.generates:
            write_text(file, pl_module.transcripts())
            pl_module.train(mode)
            return
        try:
            count = self.n if spec.is_image else 8 if len(spec.event_shape) == 2 else 2000
            samples = pl_module.sample(count, seed=0)
            require_finite_rows(samples.x)
            further = pl_module.pictures()
        except NotFinite as error:
            pl_module.print(f"step {step}: sample {error.row} is not finite, no samples are shown")
            return
        except RunError as error:  # such as an energy whose log Z does not exist yet
            pl_module.print(f"step {step}: no samples are shown ({error})")
            return
        finally:
            pl_module.train(mode)
        cond = samples.cond.cpu() if isinstance(samples.cond, torch.Tensor) else None
        picture = picture_of(samples.x.cpu(), spec, cond, samples.index.cpu())
        pictures = {} if picture is None else {"samples": picture}
        for name, drawn in (pictures | further).items():
            show(self.run_dir, trainer.loggers, name, drawn, step)
        if spec.encoding is not None:
            write_text(file, "\n\n".join(map(to_text, samples.x)))
        if spec.mel is not None:
            from genmodels.speech.audio import MelConfig
            from genmodels.speech.vocoder import sounds_of

            config = MelConfig(**spec.mel)
            waves = sounds_of(samples.x, samples.mask, config, count=_SOUNDS, seconds=_SECONDS)
            play(self.run_dir, trainer.loggers, "samples", waves, config.sample_rate, step)


class FiniteMetrics(Callback):
    """Stops a run with a non-finite validation metric, before any file is overwritten."""

    def on_validation_end(self, trainer, pl_module) -> None:
        """Check the metrics just computed."""
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val/") and not math.isfinite(float(torch.as_tensor(value))):
                raise RunError(f"step {trainer.global_step}: {name} is not finite; last.ckpt keeps the last saved "
                               "step. Check the validation data, or lower model.optimizer.lr")


class StopWithoutImprovement(EarlyStopping):
    """Lightning's early stopping on the metric that chooses best.ckpt, whose name depends on the family.

    Arguments:
        validations: number of validations in a row without a better metric, after which training stops.
    """

    state_key = "early_stopping"  # Lightning's contains the metric's name, which is unknown before a validation

    def __init__(self, validations: int):
        super().__init__("", patience=validations, check_on_train_epoch_end=False)

    def on_validation_end(self, trainer, pl_module) -> None:
        """Compare the metric of this validation with the best."""
        self.monitor = next((key for key in pl_module.figures if key.startswith("val/")), None)
        if self.monitor is not None:
            super().on_validation_end(trainer, pl_module)

    def on_train_start(self, trainer, pl_module) -> None:
        """Stop a resumed run that had been stopped, unless its patience is larger now."""
        before = next((c.best for c in trainer.callbacks if isinstance(c, Checkpointing)), None)
        if before is not None and self.best_score.isinf():  # the run that is resumed had no early stopping
            self.best_score = torch.tensor(before)
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience

    def load_state_dict(self, state_dict: dict) -> None:
        """The state of the resumed run, with the patience that is configured now."""
        super().load_state_dict(state_dict | {"patience": self.patience})


class Steps:
    """A progress bar with the remaining time, for terminals, with the part of tqdm's interface that `StepBar` uses."""

    def __init__(self, total: int, initial: int):
        from rich import progress
        from rich.console import Console

        self.n = initial
        columns = (progress.TextColumn("{task.description:<10}", style="bold"), progress.BarColumn(bar_width=30),
                   progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TextColumn("left"),
                   progress.TimeRemainingColumn(), progress.TextColumn("{task.fields[shown]}", style="dim"))
        self._progress = progress.Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._task = self._progress.add_task("training", total=total, completed=initial, shown="")
        self._progress.start()

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def set_postfix(self, refresh: bool = False, **shown: str) -> None:
        """Metrics behind the bar."""
        self._progress.update(self._task, shown=" ".join(f"{key} {value}" for key, value in shown.items()))

    def set_description(self, text: str, refresh: bool = False) -> None:
        """The description before the bar."""
        self._progress.update(self._task, description=text)

    def update(self, steps: int) -> None:
        """Advance by a number of steps."""
        self.n += steps
        self._progress.update(self._task, completed=self.n)

    def close(self) -> None:
        """Stop updating the bar."""
        self._progress.stop()


class StepBar(ProgressBar):
    """A progress bar from the first to the last step, and a line for each validation; in files a line every 30 s."""

    def __init__(self):
        super().__init__()
        self._bar: tqdm | Steps | None = None
        self._enabled = True
        self._loss: float | None = None

    def disable(self) -> None:
        """Called by Lightning on processes other than the first."""
        self._enabled = False

    @property
    def is_enabled(self) -> bool:
        """For Lightning, whose modules then `print` through the bar."""
        return self._enabled

    def print(self, *values, sep: str = " ") -> None:
        """A line above the bar."""
        write = self._bar.line if isinstance(self._bar, Steps) else tqdm.write
        write(sep.join(map(str, values)))

    def on_train_start(self, trainer, pl_module) -> None:
        """Open the bar."""
        if not self._enabled:
            return
        if terminal(sys.stderr):
            self._bar = Steps(trainer.max_steps, trainer.global_step)
        else:
            self._bar = progress_bar(total=trainer.max_steps, initial=trainer.global_step, desc="training", unit="step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Advance to the current step; the loss shown is a running mean."""
        if self._bar is None or trainer.global_step == self._bar.n:
            return
        if trainer.global_step % 10 == 0 or self._loss is None:
            loss = float(outputs["loss"].detach()) * trainer.accumulate_grad_batches  # Lightning divides by them
            self._loss = loss if self._loss is None else 0.9 * self._loss + 0.1 * loss
            shown = {key.split("/")[-1]: f"{value:.3f}" for key, value in pl_module.figures.items()}
            self._bar.set_postfix(loss=f"{self._loss:.4f}", **shown, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_start(self, trainer, pl_module) -> None:
        """Show that a validation runs."""
        if self._bar is not None:
            self._bar.set_description("validating", refresh=False)

    def on_validation_end(self, trainer, pl_module) -> None:
        """Back to training, and on a terminal a line with the metrics."""
        if self._bar is None:
            return
        self._bar.set_description("training", refresh=False)
        if isinstance(self._bar, Steps):
            found = "  ".join(f"{name} {value}" for name, value in figures_of(pl_module).items())
            self._bar.line(f"step {trainer.global_step:>6}  {found}")

    def on_train_end(self, trainer, pl_module) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(self, trainer, pl_module, exception) -> None:
        """Close the bar before the message."""
        self.on_train_end(trainer, pl_module)
