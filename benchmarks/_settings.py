"""What the results in a folder were made with, so that others are not taken for them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def require_same(file: Path, given: argparse.Namespace, keys: tuple[str, ...]) -> None:
    """Write these settings to a file; end the program where it is there with others."""
    settings = {key: getattr(given, key) for key in keys}
    if file.exists() and json.loads(file.read_text()) != settings:
        raise SystemExit(f"{file.parent} has runs of other settings, give another --out: {file.read_text()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))
