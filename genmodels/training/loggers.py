"""Loggers of metrics, pictures and sounds: CSV, W&B (offline by default) and TensorBoard."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import logging
import netrc
import os
import re
import secrets
import warnings
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from PIL import Image
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from genmodels.core.errors import InputError, RunError
from genmodels.core.files import append_text, write_text, write_whole
from genmodels.core.likelihood import value_of
from genmodels.speech.audio import write_wav

COLUMNS = ["kind", "label", "value", "unit", "se_data", "se_mc", "items", "weights", "made"]
_TIME = "%Y-%m-%d_%H-%M-%S"
#: Paths of single values in a report, by the names they are logged under.
_SINGLE = {
    "frechet": ("fidelity", "frechet"), "kernel_distance": ("fidelity", "kernel"),
    "precision": ("fidelity", "precision"), "recall": ("fidelity", "recall"),
    "class_accuracy": ("fidelity", "class_accuracy", "accuracy"),
    "samples_per_second": ("sampling", "samples_per_second"), "evaluations": ("sampling", "evaluations"),
}  # fmt: skip


def rows_of(report: dict) -> list[list[Any]]:
    """A row of COLUMNS for every likelihood of a report, with its kind, errors and how it was computed."""
    weights = (report.get("checkpoint") or {}).get("weights")
    return [
        [row["kind"], row.get("label") or row["kind"], value_of(row)[1], row["unit"], row.get("se_data"),
         row.get("se_mc"), row["n"], weights, json.dumps(row["made"])]
        for row in report.get("likelihood") or []
    ]  # fmt: skip


def values_of(report: dict) -> dict[str, float]:
    """Single values by name; of several likelihoods of one kind, all but the first have a label in their name.

    Example:
        >>> rows = [{"kind": "lower_bound", "unit": "nats", "nll": 1.5, "label": "K = 1"},
        ...         {"kind": "lower_bound", "unit": "nats", "nll": 1.4, "label": "K = 8"}]
        >>> values_of({"likelihood": rows, "fidelity": {"frechet": 0.1, "recall": None}})
        {'nll/lower_bound': 1.5, 'nll/lower_bound, K = 8': 1.4, 'frechet': 0.1}
    """
    found: dict[str, float] = {}
    for row in report.get("likelihood") or []:
        key, number = value_of(row)
        name = f"{key}/{row['kind']}"
        name = f"{name}, {row.get('label')}" if name in found else name
        if number is not None:
            found[name] = number
    for name, path in _SINGLE.items():
        value: Any = report
        for key in path:
            value = (value or {}).get(key)
        if value is not None:
            found[name] = value
    return found


def as_markdown(report: dict) -> str:
    """The rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows_of(report)]
    cells = [["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in line]
             for line in lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


_LONGEST_TAG = 64  # characters that W&B accepts


@dataclass(kw_only=True)
class LoggerOptions:
    """The loggers of a run.

    Arguments:
        csv: write metrics.csv.
        wandb: `offline` (a run file in the folder, no login, no network), `online`, or `off`.
        tensorboard: write TensorBoard event files (needs the extra `tensorboard`).
        project: the W&B project.
        name: the W&B run's name; default <model>-<data>-<time>.
        group: the W&B group; default <model>-<data>.
        tags: W&B tags; default the model and the data.
    """

    csv: bool = True
    wandb: Literal["offline", "online", "off"] = "offline"
    tensorboard: bool = False
    project: str = "genmodels"
    name: str | None = None
    group: str | None = None
    tags: list[str] | None = None

    def check(self) -> None:
        """Check that the loggers can be built, before a run has a folder.

        Raises:
            InputError: if a package is not installed, W&B would refuse the project or a tag, or it is online without a
                login.
        """
        for wanted, package, name in ((self.tensorboard, "tensorboard", "TensorBoard"),
                                      (self.wandb != "off", "wandb", "W&B")):
            if wanted and importlib.util.find_spec(package) is None:
                raise InputError(f"logger.{package} needs {name}: pip install {package}")
        if self.wandb == "off":
            return
        if wrong := [tag for tag in self.tags or () if not 1 <= len(tag) <= _LONGEST_TAG]:
            raise InputError(f"logger.tags: a tag has 1 to {_LONGEST_TAG} characters, got {wrong[0]!r}")
        if not 1 <= len(self.project) <= 128 or set(self.project) & set("/\\#?%:"):
            raise InputError(f"logger.project={self.project!r}: a project of W&B has 1 to 128 characters, none of "
                             "/ \\ # ? % :")
        if self.wandb == "online" and not _logged_in():
            raise InputError("logger=wandb is online and needs 'wandb login' first; logger=default stays offline")

    def build(self, run_dir: Path, model: str, data: str, resume_step: int = 0) -> list[Logger]:
        """The loggers of a run folder, for a model on a data set; after a resume they continue from that step."""
        loggers: list[Logger] = [LogLines()]
        if self.csv:
            loggers.append(CSVLogger(run_dir / "metrics.csv", resume_step))
        if self.wandb != "off":
            run = self.wandb_run(run_dir, model, data) if rank_zero_only.rank == 0 else None
            loggers.append(WandbLogger(experiment=run, project=self.project, save_dir=str(run_dir),
                                       offline=self.wandb == "offline"))
        if self.tensorboard:
            loggers.append(TensorBoardLogger(str(run_dir), name="", version="tensorboard",
                                             purge_step=resume_step + 1 if resume_step else None))
        return loggers

    def wandb_run(self, run_dir: Path, model: str, data: str):
        """The W&B run of a run folder, open for writing; training, resumes and evaluations share one run."""
        wandb = quiet_wandb()
        run_id, time = identity_of(run_dir)
        try:
            run = wandb.init(
                name=self.name or f"{model}-{data}-{time}",
                group=self.group or f"{model}-{data}",
                tags=[model[:_LONGEST_TAG], data[:_LONGEST_TAG]] if self.tags is None else self.tags,
                project=self.project,
                dir=str(run_dir),
                id=run_id,
                mode=self.wandb,
                resume="allow" if self.wandb == "online" else None,
                reinit="create_new",  # a run of the caller's own goes on
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
            )
        except ValueError as error:  # of its settings in the environment
            said = " ".join(str(error).split()).partition(" [type=")[0]
            raise InputError(f"W&B cannot start ({said}): see its environment variables, or logger=csv") from error
        # W&B's own steps count records: after a resume they begin anew, or go on from the step of the kill.
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return run


def _logged_in() -> bool:
    """Whether there is a W&B key in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def quiet_wandb():
    """The module wandb, imported so that it prints nothing."""
    os.environ.setdefault("WANDB_SILENT", "true")
    # A service inherited from the parent process may not have written the run when this process ends.
    os.environ.pop("WANDB_SERVICE", None)
    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    return wandb


class LogLines(Logger):
    """Metrics as lines of Python's logging, which is log.txt of a run."""

    name, version = "log", ""

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        """The configuration has its own file, config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """One line; single noise levels are left to metrics.csv."""
        shown = [f"{key} {value:.5g}" for key, value in metrics.items()
                 if key != "epoch" and key.split("/")[0] not in ("noise", "train_noise", "train_noise_variance")]
        if shown:
            logging.getLogger("genmodels").info("step %s: %s", step, ", ".join(shown))


class CSVLogger(Logger):
    """A table, metrics.csv, with a row per logged step; a resumed run drops the rows after its checkpoint.

    Arguments:
        path: the file.
        resume_step: rows after this step are dropped from an existing file.
    """

    name, version = "csv", ""

    def __init__(self, path: Path, resume_step: int = 0):
        super().__init__()
        self.path = Path(path)
        self._rows: list[dict[str, Any]] = []
        if resume_step and self.path.exists():
            try:
                lines = [line for line in self.path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
                self._rows = [row for row in csv.DictReader(lines) if int(row["step"]) <= resume_step]
            except (KeyError, TypeError, ValueError, csv.Error):  # csv.Error: a byte 0, in Python 3.10
                raise RunError(f"{path} is no table of a run, with the number of a step in each row: move it away"
                               ) from None
        self._columns = list(dict.fromkeys(["step", *(key for row in self._rows for key in row)]))
        self._written: tuple | None = None  # columns, number of rows, the last of them, and bytes of the file
        self._unsaved = 0

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        """The configuration has its own file, config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add numbers to the row of a step."""
        metrics = {key: value for key, value in metrics.items() if key != "epoch"}
        if not metrics:
            return
        if not self._rows or int(self._rows[-1]["step"]) != step:
            self._rows.append({"step": step})
            self._unsaved += 1
        self._rows[-1].update(metrics)
        self._columns.extend(key for key in metrics if key not in self._columns)
        if self._unsaved > 20:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Append the new rows; write the whole table if its columns, its last written row or the file have changed."""
        if not self._rows:
            return
        done = 0 if self._written is None else self._written[1]
        if done and self._written != (self._columns, done, self._rows[done - 1], self._bytes()):
            done = 0
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns)
        if not done:
            writer.writeheader()
        writer.writerows(self._rows[done:])
        self._unsaved, self._written = 0, None
        try:
            (append_text if done else write_text)(self.path, text.getvalue())
            self._written = [*self._columns], len(self._rows), dict(self._rows[-1]), self._bytes()
        except RunError as error:  # the rows are kept in memory, training goes on
            logging.getLogger("genmodels").warning("%s", error)

    def _bytes(self) -> int | None:
        return self.path.stat().st_size if self.path.is_file() else None

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()


@rank_zero_only
def show(run_dir: Path, loggers: list[Logger], name: str, picture: Image.Image, step: int) -> None:
    """Save a picture in the folder `name` of a run and send it to every logger that supports pictures."""
    import numpy as np

    path, key = run_dir / name / f"step_{step:06d}.png", f"pictures/{name}"
    write_whole(path, lambda file: picture.save(file, format="PNG"))
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(key, [picture], step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(key, np.asarray(picture.convert("RGB")), step, dataformats="HWC")


@rank_zero_only
def play(run_dir: Path, loggers: list[Logger], name: str, waves: list[Tensor], rate: int, step: int) -> None:
    """Save sounds (N,) in the folder `name` of a run and send them to every logger that supports sound.

    Each is logged under its number, because W&B needs a further package for lists.
    """
    key, paths = f"sounds/{name}", []
    for k, wave in enumerate(waves):
        paths.append(run_dir / name / f"step_{step:06d}_{k}.wav")
        write_whole(paths[-1], lambda file, wave=wave: write_wav(file, wave, rate))
    for logger in loggers:
        if isinstance(logger, WandbLogger) and paths:
            import wandb

            logger.log_metrics({f"{key}/{k}": wandb.Audio(str(path)) for k, path in enumerate(paths)}, step=step)
        elif isinstance(logger, TensorBoardLogger):
            for k, wave in enumerate(waves):
                loudest = max(1.0, float(wave.abs().max()))
                logger.experiment.add_audio(f"{key}/{k}", wave[None] / loudest, step, sample_rate=rate)


@rank_zero_only
def log_config(loggers: list[Logger], config: dict) -> None:
    """Send the whole configuration and metadata of the run to every logger that stores them."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.config.update(config, allow_val_change=True)
        elif isinstance(logger, TensorBoardLogger):
            import yaml

            logger.experiment.add_text("config", f"```\n{yaml.safe_dump(config, sort_keys=False)}\n```")


def identity_of(run_dir: Path) -> tuple[str, str]:
    """The W&B id of a run folder and its starting time, from its first W&B record, else new ones.

    W&B puts the id into the record's name, `offline-run-<time>-<id>`, so that it is found even if the folder moves. The
    id begins with our starting time, because the time in the record is that at which W&B has started, seconds later.
    """
    records = sorted(found.groups() for path in (run_dir / "wandb").glob("*run-*")
                     if (found := re.fullmatch(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)", path.name)))
    if not records:
        begun = datetime.now().strftime(_TIME)
        return f"{begun}-{secrets.token_hex(4)}", begun
    record, run_id = records[0]
    ours = re.match(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(?=-)", run_id)  # ids of earlier versions have no time
    return run_id, ours[0] if ours else datetime.strptime(record, "%Y%m%d_%H%M%S").strftime(_TIME)


def log_evaluation(checkpoint: Path, options: LoggerOptions, report: dict, data: str) -> bool:
    """Send an evaluation to the run's W&B records and event files: a table of likelihoods, and single values.

    Arguments:
        checkpoint: a checkpoint in the folder of the run. The names of the values contain what is unusual about the
            evaluation: a checkpoint other than best.ckpt, raw weights, a limit, other data than those of training.
        options: the loggers of the run.
        report: the evaluation, as JSON.
        data: the name of the data of training.

    Returns whether there was a W&B run.
    """
    run_dir, facts, of = checkpoint.parent, report["checkpoint"], report["data"]
    further = [word for word, usual in ((of["name"], data), (checkpoint.stem, "best"), (facts["weights"], "ema"))
               if word != usual]
    further += [f"first{of['items']}"] if of["limited"] else []
    name = f"evaluation/{'_'.join([of['split'], *further])}"
    values = {f"{name}/{key}": value for key, value in values_of(report).items()}
    events = run_dir / "tensorboard"
    if options.tensorboard and events.is_dir() and not os.access(events, os.W_OK):
        warnings.warn(f"{events} cannot be written: the evaluation is not added to it", stacklevel=2)
    elif options.tensorboard and events.is_dir():
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(events)) as writer:
            step = facts["step"]
            writer.add_text(name, as_markdown(report), step)
            for key, value in values.items():
                writer.add_scalar(key, value, step)
    if options.wandb == "off" or not (run_dir / "wandb").is_dir():
        return False
    run, wandb = options.wandb_run(run_dir, facts["family"], data), quiet_wandb()
    table = wandb.Table(columns=COLUMNS)
    for row in rows_of(report):
        table.add_data(*row)
    # One record: what is logged last is the summary too.
    run.log({"trainer/global_step": facts["step"], name: table, **values})
    _finish(run)
    return True


def _finish(run) -> None:
    """End a W&B run, and the service that writes it unless it also writes one of the caller's own.

    Otherwise the file of a second run in this process would be written only at the end of the process.
    """
    run.finish()
    wandb = quiet_wandb()
    if wandb.run is None:
        wandb.teardown()


def close(logger: Logger) -> None:
    """Flush a logger and end its run, so that the next run in this process is separate."""
    logger.save()
    if isinstance(logger, WandbLogger):
        _finish(logger.experiment)
