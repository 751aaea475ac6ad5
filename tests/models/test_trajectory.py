"""Frames of the way from noise to data: which steps they are of, and who is told of a step."""

from __future__ import annotations

import pytest
import torch

from genmodels.models.trajectory import Path


def walk(frames: int, steps: int) -> tuple[list[int], list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    seen = Path(frames, steps, lambda done, total: told.append((done, total)))
    for step in range(steps):
        seen(step, lambda step=step: torch.tensor([step]))
    return [] if seen.kept is None else seen.kept.flatten().tolist(), told


@pytest.mark.parametrize(
    ("frames", "steps", "kept"),
    [(0, 5, []), (1, 5, [0]), (2, 5, [0, 4]), (3, 5, [0, 2, 4]), (5, 5, [0, 1, 2, 3, 4]), (9, 2, [0, 1]), (2, 1, [0])],
)
def test_frames_are_spread_over_the_steps(frames, steps, kept):
    found, told = walk(frames, steps)
    assert found == kept
    assert told == [(done, steps) for done in range(1, steps + 1)]


def test_a_frame_is_made_only_where_it_is_wanted():
    seen = Path(1, 3)
    seen(0, lambda: torch.zeros(1))
    seen(1, lambda: pytest.fail("made for nothing"))


def test_a_negative_number_of_frames_is_refused():
    with pytest.raises(ValueError, match="path is a number of frames, 0 for none, got -1"):
        Path(-1, 3)
