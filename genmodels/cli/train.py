"""`genmodels train`: build data and model, train, and report the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genmodels.training.callbacks import CheckpointOptions
    from genmodels.training.loggers import LoggerOptions
    from genmodels.training.run import Outcome
    from genmodels.training.trainer import TrainerOptions


_OPEN = (None, "auto")  # values of options that a model decides


def run(
    *,
    model: dict,
    data: dict,
    trainer: TrainerOptions | dict | None = None,
    logger: LoggerOptions | dict | None = None,
    checkpoint: CheckpointOptions | dict | None = None,
    seed: int = 0,
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
        resume: `last`, a run folder or a checkpoint to continue from, with the same result as an uninterrupted run;
            `auto`, to continue where this job of SLURM or torchrun, or `run_dir`, has a checkpoint, and else to start;
            of a sweep, `last` or its folder, to run only what is missing.
        run_dir: the run folder; default runs/<model>-<data>/<time>.
        trust: further packages whose classes the configuration may name.
    """
    import errno
    import json
    import logging
    import time
    from pathlib import Path

    from genmodels.cli.schema import TARGET, Schema
    from genmodels.core.errors import InputError, RunError, explain
    from genmodels.models.build import build, construct
    from genmodels.models.checkpoint import join_parts, read_resumable, restoring
    from genmodels.training import run as parts
    from genmodels.training.callbacks import (
        Checkpointing,
        CheckpointOptions,
        FiniteMetrics,
        NoBetter,
        SampleGrid,
        metric_of,
    )
    from genmodels.training.dashboards import LearnedDensity, LossProfile, NoiseLevels, Throughput
    from genmodels.training.loggers import LoggerOptions, close, log_config
    from genmodels.training.processes import agreed, fitted, is_first, watched
    from genmodels.training.trainer import (
        TrainerOptions,
        check_same,
        find_learning_rate,
        initial_batch,
        training_stream,
    )

    config = {"model": model, "data": data, "trainer": trainer or {}, "logger": logger or {}}
    config |= {"checkpoint": checkpoint or {}, "seed": seed, "trust": trust or []}
    options = fitted(construct(TrainerOptions, **(trainer or {})), trainer or {})
    logging_options = construct(LoggerOptions, **(logger or {}))
    logging_options.check()
    checkpoints = construct(CheckpointOptions, **(checkpoint or {}))

    import torch

    from genmodels.core.random import seed_of

    datamodule = build(data, trust=trust or [])
    processes = 1
    if isinstance(options.devices, int) and options.devices > 0:
        processes = options.devices * options.num_nodes
        if datamodule.batch_size % processes:
            raise InputError(f"data.batch_size={datamodule.batch_size} must be a multiple of the {processes} processes")
    datamodule.order_seed = seed
    datamodule.prepare_data()
    datamodule.setup("fit")
    held_out = len(datamodule.split("val"))
    if processes > held_out:
        raise InputError(f"{datamodule.spec.name} has {held_out} validation items, fewer than the {processes} "
                         "processes that are to share them: start fewer, or hold out more")
    torch.manual_seed(seed_of(seed, "weights"))
    network = build(model, datamodule.spec, trust=trust or [])
    whole = Schema("genmodels.cli.train.run", trust=trust or []).complete
    built = {type(part) for part in (*network.modules(), *vars(network).values())}
    config = whole(config, built)
    config["trainer"] |= {"devices": options.devices, "num_nodes": options.num_nodes}
    decided = {key: value for key, value in network.decided.items() if config["model"].get(key) in _OPEN}
    config["model"] |= decided
    network.seed, network.run_config = seed, config
    network.hparams.update({key: value for key, value in config["model"].items() if key != TARGET})

    name = f"{network.family}-{datamodule.spec.name}"
    root = Path("runs")
    header: dict = {}
    changed: list[str] = []
    steps = options.steps(len(datamodule.train_dataloader()))
    held = None

    def rated(rate: float) -> None:
        config["model"]["optimizer"]["lr"] = network.optimizer_options.lr = rate

    def claimed() -> str:
        nonlocal held
        place = parts.place_of(root, name, run_dir, resume)
        held = parts.claim(place.folder)
        if place.checkpoint is not None:
            join_parts(place.checkpoint)
        return json.dumps([str(place.folder), place.checkpoint and str(place.checkpoint)])

    folder, path = (where and Path(where) for where in json.loads(agreed(claimed, options.num_nodes)))
    if path is not None:
        header = read_resumable(path, mmap=True)["genmodels"]
        if options.lr_find:
            rated(whole(header["config"], built)["model"]["optimizer"]["lr"])
        try:
            then = whole(header["config"], built)
            then["model"] |= {key: value for key, value in decided.items() if then["model"].get(key) in _OPEN}
            changed = check_same(header | {"config": then}, config, path)
        except InputError as error:
            from genmodels.cli.compose import how_to_resume

            raise InputError(f"{error}: {how_to_resume(header['config'], path, config)}") from None
        if steps < header["step"]:
            raise InputError(f"the run in {path.parent} has made {header['step']} steps, for {steps} there is nothing "
                             "left to do: give a larger trainer.max_steps (or max_epochs) to go on")
    log, loggers, start = parts.Log(folder / "log.txt"), [], None
    checkpointing = Checkpointing(folder, checkpoints)
    try:
        done = header.get("step", 0)
        count = sum(p.numel() for p in network.core.parameters())
        drawn = [SampleGrid(folder, options.sample_every_n_steps), NoiseLevels(folder), LearnedDensity(folder)]
        drawn = drawn if options.sample_every_n_steps else []
        early = [NoBetter(options.early_stopping)] if options.early_stopping else []
        speed = Throughput(options.sample_every_n_steps)
        callbacks = [speed, *early, FiniteMetrics(), LossProfile(), *drawn, checkpointing]
        lightning = options.build(steps, callbacks, str(folder))
        parts.say(
            f"{network.family} with {amount(count)} parameters on {datamodule.spec.name} "
            f"{datamodule.spec.event_shape}: {steps} steps of {datamodule.batch_size}, in {folder}"
            + (f", resumed at step {done}" if path else ""),
            *(f"note: {line}" for line in [*changed, *datamodule.notes()]),
        )
        before = steps
        if lightning.strategy.root_device.type == "cpu":
            parts.keep_freed_memory()
        if path is None and options.lr_find:
            with torch.random.fork_rng():
                rated(find_learning_rate(options, build(model, datamodule.spec, trust=trust or []), datamodule))
            parts.say(f"note: model.optimizer.lr={network.optimizer_options.lr:g} by the learning-rate finder")
        if path is None:
            network.initialize(initial_batch(datamodule))
        else:
            then = construct(TrainerOptions, **header["config"].get("trainer") or {})
            before = then.steps(len(datamodule.train_dataloader()))
        if is_first():
            parts.write_config(folder, config)
        lightning.loggers = loggers = logging_options.build(folder, network.family, datamodule.spec.name, done)
        if options.compile:
            parts.compile_network(network)
        log_config(loggers, config | parts.described(network, datamodule))
        if before != steps:
            parts.say(f"note: the run now has {steps} steps instead of {before}; from here on the learning rate "
                      "follows the new length")
        if options.compile and not network.compiled_parts():
            parts.say(f"note: trainer.compile has no effect on {network.family}, which needs second derivatives")
        logging.getLogger("genmodels").info("started with %s", config)
        for line in parts.attention_paths(network.core, lightning.strategy.root_device.type):
            logging.getLogger("genmodels").info("attention %s", line)
        start = time.monotonic()
        with (restoring(path, lambda: checkpointing.saved_step is not None),
              watched(lambda: getattr(lightning.strategy.launcher, "procs", []))):
            lightning.fit(
                network,
                train_dataloaders=training_stream(datamodule, header.get("batches_seen", 0)),
                val_dataloaders=datamodule.val_dataloader(),
                ckpt_path=None if path is None else str(path),
                weights_only=True,
            )
        if lightning.should_stop:
            parts.say(f"note: stopped at step {lightning.global_step} of {steps}, after {options.early_stopping} "
                      "validations in a row without a better metric")
        elif lightning.global_step < steps:
            raise RunError(f"stopped at step {lightning.global_step} of {steps}")
        validated = options.validate_every_n_steps and steps % min(options.validate_every_n_steps, steps) == 0
        validated = validated or lightning.should_stop
        if not validated or not network.figures or done == steps:  # figures of a checkpoint lack their errors
            lightning.validate(network, datamodule.val_dataloader(), verbose=False)
        parts.conclude(network, folder, time.monotonic() - start, speed.line(lightning))
        return parts.Outcome(parts.figures_of(network), metric_of(network), lightning.global_step, str(folder))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        safe = "nothing was saved" if checkpointing.saved_step is None else f"step {checkpointing.saved_step} is saved"
        raise RunError(f"no space left in {folder} ({safe}): free some, then continue with resume=last") from error
    except BaseException as error:
        known = explain("train", error)
        logging.getLogger("genmodels").error("%s", known[0] if known else repr(error))
        raise
    finally:
        for each in loggers:
            close(each)
        log.close()
        if held is not None and start is not None and checkpointing.saved_step is not None:
            parts.add_training_time(folder, time.monotonic() - start)
        if held is not None:
            held.close()
        if path is None and is_first():
            parts.discard_unused(folder)


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
