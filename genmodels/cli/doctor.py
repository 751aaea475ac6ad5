"""`genmodels doctor`: checks of the environment, and of data before training; one line per check."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from genmodels.core.errors import InputError, RunError, counted, first_line, printable
from genmodels.core.files import check_writable, kind_of, write_text

GIGABYTE = 1e9
_LIST = "# problems found by genmodels doctor"
PAIR = "pip uninstall -y torch torchvision && pip install torch torchvision"


class Failed(Exception):
    """A check that found something wrong; the message says what to do."""


def main(words: list[str]) -> int:
    """`genmodels doctor [data=... data.key=... --fix-list bad.txt]`; 1 if a check fails.

    Raises:
        InputError: for words that are no settings, and for a list without data, or without its file's name.
    """
    failed, fix_list = [], None
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--fix-list=") else [word])]
    if "--fix-list" in words:
        place = words.index("--fix-list")
        if len(words) < 3 or place + 1 == len(words):
            raise InputError("--fix-list names a file for the items that data=... cannot use: --fix-list bad.txt")
        fix_list = Path(words[place + 1]).expanduser()
        del words[place : place + 2]
        if fix_list.exists() and not fix_list.is_file():
            raise InputError(f"--fix-list={fix_list} is {kind_of(fix_list)}, not a file")
        check_writable("--fix-list", fix_list)
        if fix_list.is_file() and fix_list.stat().st_size and _LIST.encode() != fix_list.read_bytes()[: len(_LIST)]:
            raise InputError(f"--fix-list={fix_list} exists, does not begin as a list of the doctor's and would be "
                             "replaced: give another name, or delete it")
    if wrong := [word for word in words if "=" not in word and not word.startswith("~")]:
        raise InputError(f"cannot read {wrong[0]!r}: write key=value, as in data=image_folder data.root=photos; "
                         "`genmodels train --keys` lists the settings")
    read: dict = {"named": any(word.startswith(("model", "experiment")) for word in words)}
    of_words = [("data", lambda: check_data(words, fix_list, read)), ("training", lambda: check_training(read))]
    for name, check in [*CHECKS.items(), *(of_words if words else [])]:
        try:
            if name in NEED_TORCH and "torch" in failed:
                raise Failed("not checked, it needs torch")
            if name == "training" and "data" in failed:
                raise Failed("not checked, it needs the data")
            print(f"OK    {name}: {check()}", flush=True)
        except Failed as error:
            failed.append(name)
            print(f"FAIL  {name}: {error}", flush=True)
    return 1 if failed else 0


def run(*, data: str | None = None) -> int:
    """Check the environment; with settings of train also the data, item by item, and all that training needs.

    Arguments:
        data: a data set as in training, with any other setting of train: data=image_folder data.root=photos model=glow.
    """
    return main([] if data is None else [f"data={data}"])


def installed(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python() -> str:
    """The version of Python."""
    return f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.prefix})"


def check_torch() -> str:
    """torch and torchvision import, and come from the same build."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Failed(f"torch cannot be imported ({first_line(error)}): pip install torch torchvision") from error
    try:
        import torchvision
    except (ImportError, RuntimeError, OSError) as error:
        raise Failed(
            f"torch {torch.__version__} and torchvision {installed('torchvision')} are from different builds "
            f"({first_line(error)}): {PAIR}"
        ) from error
    return f"torch {torch.__version__}, torchvision {torchvision.__version__}"


def check_lightning() -> str:
    """pytorch-lightning is installed, and `lightning`, which has a second copy of every class, is not."""
    ours, other = installed("pytorch-lightning"), installed("lightning")
    if ours is None:
        raise Failed("pytorch-lightning is not installed: pip install 'pytorch-lightning>=2.6.4,<3'")
    if other is not None:
        raise Failed(f"lightning {other} conflicts with pytorch-lightning {ours}: pip uninstall -y lightning")
    return f"pytorch-lightning {ours}"


def check_hydra() -> str:
    """The supported versions of Hydra and OmegaConf."""
    advice = "pip install 'hydra-core>=1.3.8,<1.4' 'omegaconf>=2.3.1,<2.4'"
    for name, low, high in (("hydra-core", (1, 3, 8), (1, 4)), ("omegaconf", (2, 3, 1), (2, 4))):
        found = installed(name)
        if found is None:
            raise Failed(f"{name} is not installed: {advice}")
        numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
        if not low <= numbers < high:
            raise Failed(f"{name} {found} is not supported: {advice}")
    return f"hydra-core {installed('hydra-core')}, omegaconf {installed('omegaconf')}"


def check_wandb() -> str:
    """W&B, which is offline by default."""
    found = installed("wandb")
    if found is None:
        raise Failed("wandb is not installed: pip install wandb, or train with logger=csv")
    mode = os.environ.get("WANDB_MODE")
    also = f", WANDB_MODE={mode} is set in the environment" if mode else ""
    return f"wandb {found}, offline unless logger=wandb{also}"


def check_folder() -> str:
    """runs/ can be written and has space for checkpoints."""
    place = Path("runs") if Path("runs").exists() else Path(".")
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise Failed(f"{place.absolute()} cannot be written: start elsewhere or give run_dir=...")
    free = shutil.disk_usage(place).free / GIGABYTE
    if free < 1:
        raise Failed(f"{free:.2f} GB free in {place.absolute()}: free at least 1 GB, or set run_dir=... elsewhere")
    return f"runs go to {Path('runs').absolute()}, {free:.0f} GB free"


def check_device() -> str:
    """The device that training would use; having no GPU is not a failure."""
    import torch

    threads = f"{counted(torch.get_num_threads(), 'thread')} on {counted(os.cpu_count() or 1, 'core')}"
    if not torch.cuda.is_available():
        return f"CPU, {threads}; torch {torch.__version__} finds no GPU"
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / GIGABYTE
    bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: keep trainer.precision=32-true"
    return f"{torch.cuda.device_count()} x {name}, {memory:.0f} GB, {bf16}; {threads}"


def check_data(words: list[str], fix_list: Path | None = None, read: dict | None = None) -> str:
    """The data set that training with these words would read exists and its items are valid.

    Problems are listed item by item, then warnings. `fix_list` is a file for the problems; `read` receives the
    configuration and the data for `check_training`.
    """
    from genmodels.cli.compose import composer
    from genmodels.models.build import build

    try:
        with composer("train") as hydra:
            config = hydra.compose(words)
        datamodule = build(config["data"], trust=config.get("trust") or [])
    except InputError as error:
        raise Failed(printable(str(error))) from error
    if read is not None:
        read.update(config=config, data=datamodule)
    problems = [printable(problem) for problem in datamodule.problems()]
    if fix_list is not None:
        write_text(fix_list, "\n".join([_LIST, *problems, ""]))
    if problems:
        more = f" (and {len(problems) - 1} more:" + "".join(f"\n        {p}" for p in problems[1:]) + ")"
        raise Failed(problems[0] + (more if len(problems) > 1 else "") + to_look_at(datamodule.warnings()))
    warnings = to_look_at(datamodule.warnings())
    spec = datamodule.spec
    return f"{spec.name}, {' x '.join(map(str, spec.event_shape))}, " + ", ".join(
        f"{len(datamodule.split(split)):,} {split}" for split in ("train", "val", "test")
    ) + warnings


def check_training(read: dict) -> str:
    """The checks that `train` does with the same words before its first step, with the same messages."""
    from genmodels.cli.train import options_of, prepared
    from genmodels.core.checkpoint import verify
    from genmodels.core.files import located
    from genmodels.training.run import check_unused
    from genmodels.training.trainer import initial_batch

    config, datamodule = read["config"], read["data"]
    if datamodule.spec.text is not None and not read["named"]:  # the default model is for other data
        return "not checked, data with texts need a text-to-speech model: add one, for example model=glow_tts"
    try:
        options, _, _ = options_of(config)
        network, steps = prepared(config, options, datamodule)
        logging.disable(logging.WARNING)  # what Lightning says of the devices
        with tempfile.TemporaryDirectory() as folder:
            options.build(steps, [], folder)
        if config.get("run_dir") and not config.get("resume"):
            check_unused(Path(config["run_dir"]).expanduser())
        if config.get("init"):
            verify(located(config["init"]))
        network.check_items(datamodule)
        network.initialize(initial_batch(datamodule))
    except (InputError, RunError) as error:
        raise Failed(printable(str(error))) from error
    finally:
        logging.disable(logging.NOTSET)
    count = sum(p.numel() for p in network.core.parameters())
    return f"{network.family} with {count:,} parameters, {steps:,} steps of {datamodule.batch_size}"


def to_look_at(warnings: list[str]) -> str:
    """Warnings, one per line.

    Example:
        >>> print(to_look_at(["a.wav: silent"]))
        ; 1 to check:
            a.wav: silent
    """
    return f"; {len(warnings)} to check:" + "".join(f"\n        {printable(w)}" for w in warnings) if warnings else ""


CHECKS: dict[str, Callable[[], str]] = {
    "python": check_python,
    "torch": check_torch,
    "lightning": check_lightning,
    "hydra": check_hydra,
    "wandb": check_wandb,
    "folder": check_folder,
    "device": check_device,
}
NEED_TORCH = ("device", "data", "training")
