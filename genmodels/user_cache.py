"""Where genmodels keeps what it can compute again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$GENMODELS_CACHE, or genmodels in the user's cache folder."""
    given = os.environ.get("GENMODELS_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "genmodels"
