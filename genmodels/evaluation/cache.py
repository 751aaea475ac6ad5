"""What was computed once: results by the hash of everything they depend on."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from genmodels.core.files import write_whole

#: Raised when the layout of stored results changes.
FORMAT = 1


@functools.cache
def code_hash() -> str:
    """A hash of the sources of this package: other code is not trusted to have computed the same."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(**parts) -> str:
    """The name of a result: a hash of plain values.

    Example:
        >>> key_of(stage="cost", seed=0) == key_of(seed=0, stage="cost") != key_of(stage="cost", seed=1)
        True
    """
    text = json.dumps({**parts, "format": FORMAT}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """Results in a folder, one file each, written whole; a file that cannot be read is as good as none.

    Arguments:
        folder: where; None keeps nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = Cache(Path(folder))
        ...     first = cache.get("a"), cache.put("a", {"x": torch.ones(2)})["x"].tolist()
        ...     first, cache.get("a")["x"].tolist(), Cache(None).get("a")
        ((None, [1.0, 1.0]), [1.0, 1.0], None)
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    def get(self, key: str):
        """The result of that name, or None."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.pt"
        if not path.is_file():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # cut by a full disk, or written by something else: computed anew and overwritten
            return None

    def put(self, key: str, value):
        """Keep a result of tensors and plain types; returns it."""
        if self.folder is not None:
            write_whole(self.folder / f"{key}.pt", lambda file: torch.save(value, file))
        return value

    def parts(self, key: str, own: Sequence[int], compute: Callable[[list[int]], Iterable[tuple[int, Any]]]) -> dict:
        """The results of a stage's parts by their numbers: those that are kept, and those that `compute` yields.

        Each is kept as soon as it is finished, so that after a kill it is not computed again.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     cache = Cache(Path(folder))
            ...     _ = cache.put("a_1", 0.5)
            ...     cache.parts("a", [0, 1, 2], lambda missing: [(number, 2.0 * number) for number in missing])
            {0: 0.0, 1: 0.5, 2: 4.0}
        """
        kept = {number: self.get(f"{key}_{number}") for number in own}
        missing = [number for number in own if kept[number] is None]
        return kept | {number: self.put(f"{key}_{number}", value) for number, value in compute(missing)}

    def forget(self, key: str) -> None:
        """Remove the parts of a stage that is finished."""
        for path in [] if self.folder is None else self.folder.glob(f"{key}_*.pt"):
            path.unlink(missing_ok=True)
