"""`genmodels train`: build data and model, train, and report the result."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytorch_lightning as pl
import torch
import yaml

from genmodels.cli.schema import TARGET, Schema
from genmodels.core.checkpoint import read_header, verify
from genmodels.core.errors import InputError, RunError, counted, explain, stored_options
from genmodels.core.files import flat, is_exported, located, write_text
from genmodels.core.random import seed_of
from genmodels.data.base import DataModule
from genmodels.models.base import GenerativeModel
from genmodels.models.build import build, construct
from genmodels.models.checkpoint import join_parts, load_model, read_resumable, restoring
from genmodels.training import run as parts
from genmodels.training.callbacks import (
    Checkpointing,
    CheckpointOptions,
    FiniteMetrics,
    SampleGrid,
    StopWithoutImprovement,
    metric_of,
)
from genmodels.training.dashboards import LearnedDensity, LossProfile, NoiseLevels, Throughput
from genmodels.training.loggers import LoggerOptions, close, log_config
from genmodels.training.processes import agreed, fitted, is_first, watched
from genmodels.training.run import Outcome
from genmodels.training.trainer import (
    TrainerOptions,
    check_same,
    find_learning_rate,
    initial_batch,
    training_stream,
)

_OPEN = (None, "auto")  # values of options that a model decides


def run(
    *,
    model: dict,
    data: dict,
    trainer: TrainerOptions | dict | None = None,
    logger: LoggerOptions | dict | None = None,
    checkpoint: CheckpointOptions | dict | None = None,
    seed: int = 0,
    init: str | None = None,
    resume: str | None = None,
    run_dir: str | None = None,
    trust: list[str] | None = None,
) -> Outcome:
    """Train a model on a data set.

    Arguments:
        model: the model, its class and options.
        data: the data set, its class and options.
        trainer: length, devices, precision, intervals.
        logger: where metrics and pictures go.
        checkpoint: when checkpoints are written.
        seed: seed of weights, order of the data and noise.
        init: a checkpoint, a run folder or hf://user/name of a model with the same options, from whose averaged weights
            training starts (fine-tuning); optimiser, steps and the statistics of the data begin anew.
        resume: `last`, a run folder or a checkpoint to continue from, with the same result as an uninterrupted run; a
            folder or checkpoint brings its settings where no group such as model or logger is chosen; `auto`, to
            continue where this job of SLURM or torchrun, or `run_dir`, has a checkpoint, and else to start; of a
            sweep, `last` or its folder, to run only what is missing.
        run_dir: the run folder; default runs/<model>-<data>/<time>.
        trust: further packages whose classes the configuration may name.
    """
    trust = trust or []
    run_dir, resume = (word if word is None else os.path.expanduser(word) for word in (run_dir, resume))
    if resume is not None and os.path.isfile(resume) and is_exported(resume):
        raise InputError(f"resume={resume}: an exported model holds its weights alone, from which no run can go on: "
                         "give init= in place of resume= to train anew from them, or the run's last.ckpt")
    given = {"model": model, "data": data, "trainer": trainer or {}, "logger": logger or {},
             "checkpoint": checkpoint or {}, "seed": seed, "init": init, "trust": trust}
    options, loggers, checkpoints = options_of(given)
    datamodule = build(data, trust=trust)
    with nullcontext() if resume is None else stored_options():
        network, steps = prepared(given, options, datamodule)
    complete = _completion(network, trust)
    config = complete(given)
    decided = _configure(network, config, options)
    folder, path, lock = _claimed(f"{network.family}-{datamodule.spec.name}", run_dir, resume, options.num_nodes)
    header, changed = ({}, []) if path is None else _resumed(path, network, complete, decided, options, steps)
    config["init"] = header["config"].get("init") if path else init  # what the run began with
    before = os.listdir(folder)
    log, checkpointing = parts.Log(folder / "log.txt"), Checkpointing(folder, checkpoints)
    with ExitStack() as ended, _failures(folder, checkpointing):
        ended.enter_context(parts.settings_of_torch())
        if path is None and is_first():
            ended.callback(parts.discard_unused, folder, before)
        if lock is not None:
            ended.callback(lock.close)
        ended.callback(log.close)
        source = located(init) if path is None and init is not None else None
        if source is not None:
            verify(source)
        speed = Throughput(options.sample_every_n_steps)
        lightning = options.build(steps, [speed, *_callbacks(folder, options), checkpointing], str(folder))
        done = header.get("step", 0)
        parts.say(_opening(network, datamodule, steps, folder) + (f", resumed at step {done}" if path else ""),
                  *(f"note: {line}" for line in [*changed, *datamodule.notes()]))
        device = lightning.strategy.root_device.type
        if device == "cpu":
            parts.keep_freed_memory()
        if path is None:
            _begin(network, datamodule, options, given, source)
        if is_first():
            write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        lightning.loggers = loggers.build(folder, network.family, datamodule.spec.name, done)
        for each in lightning.loggers:
            ended.callback(close, each)
        if options.compile:
            parts.compile_network(network)
        log_config(lightning.loggers, config | parts.described(network, datamodule))
        for line in _notes(network, datamodule, options, header, steps):
            parts.say(f"note: {line}")
        logging.getLogger("genmodels").info("started with %s", config)
        for line in parts.attention_paths(network.core, device):
            logging.getLogger("genmodels").info("attention %s", line)
        start = time.monotonic(), time.process_time()
        if lock is not None:
            ended.callback(lambda: checkpointing.saved_step is not None
                           and parts.add_training_time(folder, *_since(*start)))
        _fit(lightning, network, datamodule, path, header, checkpointing)
        _check_end(lightning, network, datamodule, options, steps, done)
        parts.conclude(network, folder, *_since(*start), speed.line(lightning))
        return Outcome(parts.figures_of(network), metric_of(network), lightning.global_step, str(folder))


def _opening(network: GenerativeModel, datamodule: DataModule, steps: int, folder: Path) -> str:
    """The first line for the user."""
    count = sum(p.numel() for p in network.core.parameters())
    return (f"{network.family} with {amount(count)} parameters on {datamodule.spec.name} "
            f"{datamodule.spec.event_shape}: {steps} steps of {datamodule.batch_size}, in {folder}")


def _begin(
    network: GenerativeModel, datamodule: DataModule, options: TrainerOptions, config: dict, source: Path | None
) -> None:
    """What precedes the first step of a new run: statistics of the data, weights of `init`, the learning rate."""
    network.check_items(datamodule)
    network.initialize(initial_batch(datamodule))
    if source is not None:
        _start_from(source, config["init"], network, config["trust"])  # after this run's statistics of its data
    if options.lr_find:
        with torch.random.fork_rng():
            trial = build(config["model"], datamodule.spec, trust=config["trust"])
            trial.load_state_dict(network.state_dict())
            _set_learning_rate(network, find_learning_rate(options, trial, datamodule))
        parts.say(f"note: model.optimizer.lr={network.optimizer_options.lr:g} by the learning-rate finder")


def _fit(
    lightning: pl.Trainer, network: GenerativeModel, datamodule: DataModule, path: Path | None, header: dict,
    checkpointing: Checkpointing,
) -> None:  # fmt: skip
    """Train, from the checkpoint `path` if it is given."""
    if lightning.precision == "64-true":
        network.double()  # Lightning does it after it has read the checkpoint, whose weights would be rounded
    with (restoring(path, lambda: checkpointing.saved_step is not None),
          watched(lambda: getattr(lightning.strategy.launcher, "procs", []))):
        lightning.fit(
            network,
            train_dataloaders=training_stream(datamodule, header.get("batches_seen", 0)),
            val_dataloaders=datamodule.val_dataloader(),
            ckpt_path=None if path is None else str(path),
            weights_only=True,
        )


def _check_end(
    lightning: pl.Trainer, network: GenerativeModel, datamodule: DataModule, options: TrainerOptions, steps: int,
    done: int,
) -> None:  # fmt: skip
    """Validate at the end, unless the last step was validated.

    Raises:
        RunError: for a training that has stopped before its end.
    """
    if lightning.should_stop:
        parts.say(f"note: stopped at step {lightning.global_step} of {steps}, after "
                  f"{counted(options.early_stopping, 'validation')} in a row without a better metric")
    elif lightning.global_step < steps:
        raise RunError(f"stopped at step {lightning.global_step} of {steps}")
    every = options.validate_every_n_steps or steps
    validated = lightning.should_stop or steps % min(every, steps) == 0
    if not validated or not network.figures or done == lightning.global_step:  # figures of a file lack their errors
        # Its row is that of the last step, as of validations between steps.
        lightning.fit_loop.epoch_loop._batches_that_stepped = max(0, lightning.global_step - 1)
        lightning.validate(network, datamodule.val_dataloader(), verbose=False)


def _since(start: float, cpu_start: float) -> tuple[float, float]:
    """Seconds and CPU seconds of this process since."""
    return time.monotonic() - start, time.process_time() - cpu_start


def _start_from(source: Path, init: str, network: GenerativeModel, trust: list[str]) -> None:
    """Give a network the weights of a trained one."""
    trained, header = load_model(source, device="cpu", trust=trust)
    theirs, own = (flat(node, "model.") for node in (header["model"], network.run_config["model"]))
    differing = {key: f"{key} is {value!r} there and {own[key]!r} here" for key, value in theirs.items()
                 if own.get(key, value) != value and not key.startswith(("model.optimizer.", "model.ema_decay"))}
    try:
        network.start_from(trained)
    except InputError as error:
        same_class = theirs["model._target_"] == own["model._target_"]
        raise InputError("; ".join([f"init={init}: {error}", *(differing.values() if same_class else ())])) from None
    if "model.parameterisation" in differing:
        raise InputError(f"init={init}: its network predicts another quantity: {differing['model.parameterisation']}")
    if differing:
        parts.say(f"note: init={init} has other options: {'; '.join(differing.values())}")


def options_of(config: dict) -> tuple[TrainerOptions, LoggerOptions, CheckpointOptions]:
    """The options of a configuration that neither model nor data belong to, checked."""
    given = [config.get(part) or {} for part in ("trainer", "logger", "checkpoint")]
    options = fitted(construct(TrainerOptions, **given[0]), given[0])
    loggers, checkpoints = construct(LoggerOptions, **given[1]), construct(CheckpointOptions, **given[2])
    loggers.check()
    return options, loggers, checkpoints


def prepared(config: dict, options: TrainerOptions, datamodule: DataModule) -> tuple[GenerativeModel, int]:
    """The model of a configuration with its first weights, and the number of steps; the data are read.

    Raises:
        InputError: for data or a model that cannot be trained so.
    """
    processes = 1
    if isinstance(options.devices, int) and options.devices > 0:
        processes = options.devices * options.num_nodes
        if datamodule.batch_size % processes:
            raise InputError(f"data.batch_size={datamodule.batch_size} must be a multiple of the {processes} processes")
    datamodule.order_seed = config.get("seed", 0)
    datamodule.prepare_data()
    datamodule.setup("fit")
    held_out = len(datamodule.split("val"))
    if processes > held_out:
        raise InputError(f"{datamodule.spec.name} has {held_out} validation items, fewer than the {processes} "
                         "processes that are to share them: start fewer, or hold out more")
    torch.manual_seed(seed_of(datamodule.order_seed, "weights"))
    network = build(config["model"], datamodule.spec, trust=config.get("trust") or [])
    return network, options.steps(len(datamodule.train_dataloader()))


def _completion(network: GenerativeModel, trust: list[str]) -> Callable[[dict], dict]:
    """A function that completes a configuration of this class of models with all defaults."""
    built = {type(part) for part in (*network.modules(), *vars(network).values())}
    schema = Schema("genmodels.cli.train.run", trust=trust)
    return lambda config: schema.complete(config, built)


def _configure(network: GenerativeModel, config: dict, options: TrainerOptions) -> dict:
    """Store a configuration in its network, with the numbers of processes and the options that the model has decided.

    Returns these options.
    """
    decided = {key: value for key, value in network.decided.items() if config["model"].get(key) in _OPEN}
    config["trainer"] |= {"devices": options.devices, "num_nodes": options.num_nodes}
    config["model"] |= decided
    network.seed, network.run_config = config["seed"], config
    network.hparams.update({key: value for key, value in config["model"].items() if key != TARGET})
    return decided


def _set_learning_rate(network: GenerativeModel, rate: float) -> None:
    network.run_config["model"]["optimizer"]["lr"] = network.optimizer_options.lr = rate


def _claimed(name: str, run_dir: str | None, resume: str | None, num_nodes: int) -> tuple:
    """The run folder, the checkpoint that is resumed or None, and in the first process the lock of the folder."""
    lock = None

    def claim() -> str:
        nonlocal lock
        place = parts.place_of(Path("runs"), name, run_dir, resume)
        lock = parts.claim(place.folder)
        if place.checkpoint is not None:
            join_parts(place.checkpoint)
        return json.dumps([str(place.folder), place.checkpoint and str(place.checkpoint)])

    folder, path = (where and Path(where) for where in json.loads(agreed(claim, num_nodes)))
    return folder, path, lock


def _resumed(
    path: Path, network: GenerativeModel, complete: Callable[[dict], dict], decided: dict, options: TrainerOptions,
    steps: int,
) -> tuple[dict, list[str]]:  # fmt: skip
    """The header of the checkpoint that is resumed, and messages about settings that have changed.

    Raises:
        InputError: for a setting that may not change, or a run that has made all its steps.
    """
    header = read_resumable(path, mmap=True)["genmodels"]
    try:
        then = complete(header["config"])
        if options.lr_find:
            _set_learning_rate(network, then["model"]["optimizer"]["lr"])
        then["model"] |= {key: value for key, value in decided.items() if then["model"].get(key) in _OPEN}
        changed = check_same(header | {"config": then}, network.run_config, path)
    except InputError as error:
        settings = path.parent / "config.yaml"
        raise InputError(f"{error}{f': its settings are in {settings}' if settings.is_file() else ''}") from None
    before, now = header["data"].get("fingerprint"), network.spec.fingerprint
    if before and not now.startswith(before):
        raise InputError(f"resume: the data have changed ({now}; in {path} {before}), so that other items would be "
                         "held out: restore them, or begin a new run by init=")
    if steps < header["step"]:
        raise InputError(f"the run in {path.parent} has made {header['step']} steps, for {steps} there is nothing "
                         "left to do: give a larger trainer.max_steps (or max_epochs) to go on")
    _check_last(path, header["step"])
    return header, changed


def _check_last(path: Path, step: int) -> None:
    """Refuse to go on from a checkpoint before the last one of its run, which the next would replace."""
    last = path.with_name("last.ckpt")
    if path.name == last.name or not last.is_file():
        return
    try:
        verify(last)
    except RunError:  # a damaged one is worth nothing
        return
    if (later := read_header(last, check=False)["step"]) > step:
        raise InputError(f"resume: {path} is at step {step}, and {last}, which would be replaced, at {later}: give "
                         "resume=last, or move that file elsewhere first")


def _callbacks(folder: Path, options: TrainerOptions) -> list:
    """All callbacks but `Throughput`, which comes first, and `Checkpointing`, which comes last."""
    early = [StopWithoutImprovement(options.early_stopping)] if options.early_stopping else []
    drawn = [SampleGrid(folder, options.sample_every_n_steps), NoiseLevels(folder), LearnedDensity(folder)]
    return [*early, FiniteMetrics(), LossProfile(), *(drawn if options.sample_every_n_steps else [])]


def _notes(
    network: GenerativeModel, datamodule: DataModule, options: TrainerOptions, header: dict, steps: int
) -> list[str]:
    """Notes for the user before training; `header` is empty unless the run is resumed."""
    lines = []
    if header:
        then = construct(TrainerOptions, **header["config"].get("trainer") or {})
        before = then.steps(len(datamodule.train_dataloader()))
        if before != steps:
            lines.append(f"the run now has {steps} steps instead of {before}; from here on a learning rate that "
                         "decays, and the stages of a consistency model, follow the new length")
    if options.compile:
        lines.append("the first step compiles the network, which may take minutes" if network.compiled_parts() else
                     f"trainer.compile has no effect on {network.family}, which needs second derivatives")
    return lines


@contextmanager
def _failures(folder: Path, checkpointing: Checkpointing) -> Iterator[None]:
    """Log the error that ends a run.

    Raises:
        RunError: for a full disk, with the step that is saved.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        safe = "nothing was saved" if checkpointing.saved_step is None else f"step {checkpointing.saved_step} is saved"
        raise RunError(f"no space left in {folder} ({safe}): free some, then continue with resume=last") from error
    except BaseException as error:
        known = explain("train", error)
        logging.getLogger("genmodels").error("%s", known[0] if known else repr(error))
        raise


def amount(count: int) -> str:
    """A count with three significant digits, in millions or thousands.

    Example:
        >>> amount(1_234_567), amount(54_321), amount(4_321), amount(999_999), amount(321)
        ('1.23 million', '54.3 thousand', '4.32 thousand', '1 million', '321')
    """
    for size, name in ((10**6, "million"), (10**3, "thousand")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {name}"
    return str(count)
