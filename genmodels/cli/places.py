"""Where the configuration files are: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from genmodels.errors import InputError, RunError

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"


def groups() -> dict[str, list[str]]:
    """The config groups and their choices, as the folders have them.

    Example:
        >>> "ddpm" in groups()["model"]
        True
    """
    folders = sorted(f for f in CONFIG_DIR.iterdir() if f.is_dir() and not f.name.startswith((".", "_")))
    return {f.name: sorted(p.stem for p in f.glob("*.yaml")) for f in folders}


def check_writable(key: str, target: Path) -> None:
    """Find out before any work is done whether a file can be written; nothing is left behind.

    Raises:
        InputError: where a file stands in the place of a folder, or a folder in that of the file.
        RunError: when the folder cannot be written, or the disk is full.
    """
    if target.suffix and target.is_dir():
        raise InputError(f"{key}={target} is a folder: name a file in it")
    folder = target if target.is_dir() else target.parent
    try:
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise InputError(f"{key}={target}: {folder} is a file, not a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except NotADirectoryError as error:
        raise InputError(f"{key}={target}: a file stands in the place of a folder") from error
    except OSError as error:
        raise RunError(f"{key}={target} cannot be written: {os.strerror(error.errno)}") from error
