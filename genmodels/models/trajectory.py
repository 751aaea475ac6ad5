"""The way from noise to data, seen while samples are drawn: a few frames of it, and word of each step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Path:
    """What is kept of the steps of a sampler: frames spread evenly over them, the first and the last among them.

    Arguments:
        frames: how many to keep, 0 for none; all steps where there are fewer, the first alone for 1.
        steps: number of steps.
        progress: called after every step with the number of steps done and their total.

    Raises:
        ValueError: for a negative number of frames.

    Example:
        >>> seen = Path(2, 5, lambda done, total: print(done, "of", total) if done == total else None)
        >>> for step in range(5):
        ...     seen(step, lambda: torch.full((1,), step))
        5 of 5
        >>> seen.kept
        tensor([[0],
                [4]])
    """

    def __init__(self, frames: int, steps: int, progress: Callable[[int, int], None] | None = None):
        if frames < 0:
            raise ValueError(f"path is a number of frames, 0 for none, got {frames}")
        self.steps, self.progress = steps, progress
        self._wanted = set(torch.linspace(0, steps - 1, min(frames, steps)).round().int().tolist())
        self._frames: list[Tensor] = []

    def __call__(self, step: int, frame: Callable[[], Tensor]) -> None:
        """Step number `step` (from 0) is done; `frame()` makes its picture `(n, *event)` where it is wanted."""
        if step in self._wanted:
            self._frames.append(frame())
        if self.progress is not None:
            self.progress(step + 1, self.steps)

    @property
    def kept(self) -> Tensor | None:
        """(frames, n, *event), or None where none was wanted."""
        return torch.stack(self._frames) if self._frames else None
