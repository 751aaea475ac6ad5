"""Where the configuration files are: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path

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
