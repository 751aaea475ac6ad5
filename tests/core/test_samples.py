"""Options of sampling, and frames of the trajectory from noise to data."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.core.samples import SamplingOptions, Trajectory, require_events, require_guidance


def walk(frames: int, steps: int) -> tuple[list[int], list[tuple[int, int]]]:
    reported: list[tuple[int, int]] = []
    seen = Trajectory(frames, steps, lambda done, total: reported.append((done, total)))
    for step in range(steps):
        seen(step, lambda step=step: torch.tensor([step]))
    return [] if seen.kept is None else seen.kept.flatten().tolist(), reported


@pytest.mark.parametrize(
    ("frames", "steps", "kept"),
    [(0, 5, []), (1, 5, [0]), (2, 5, [0, 4]), (3, 5, [0, 2, 4]), (5, 5, [0, 1, 2, 3, 4]), (9, 2, [0, 1]), (2, 1, [0])],
)
def test_frames_are_spread_over_the_steps(frames, steps, kept):
    found, reported = walk(frames, steps)
    assert found == kept
    assert reported == [(done, steps) for done in range(1, steps + 1)]


def test_a_frame_is_made_only_where_it_is_wanted():
    seen = Trajectory(1, 3)
    seen(0, lambda: torch.zeros(1))
    seen(1, lambda: pytest.fail("made for nothing"))


@pytest.mark.parametrize("wrong, said", [
    ({"n": 0}, "n must be at least 1, got 0"), ({"start": -1}, "start must be at least 0, got -1"),
    ({"start": 2**63 - 1}, "numbered by 64 bits"),
    ({"temperature": float("nan")}, "temperature must be a finite number"),
    ({"guidance": 1e38}, r"guidance must be a finite number from -1e\+06 to 1e\+06, got 1e\+38"),
    ({"guidance": float("nan")}, "guidance must be a finite number"),
    ({"churn": 1e38}, "churn must be a finite number from 0"), ({"churn": float("nan")}, "churn must be a finite"),
    ({"step_size": 1e38}, "step_size must be"), ({"inverse_temperature": 1e38}, "inverse_temperature must be"),
    ({"speed": 1e38}, "speed must be"),
    ({"guidance_interval": [float("nan"), 3.0]}, r"two finite log-SNRs, the lower one first, got \[nan, 3.0\]"),
    ({"guidance_interval": [3.0, -3.0]}, "the lower one first"), ({"guidance_interval": [1.0]}, "two finite"),
    ({"path": -1}, "path is a number of frames, 0 for none, got -1"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        SamplingOptions(**wrong)


@pytest.mark.parametrize("keep", [(8, 9), (2, 8, 8), (1, 1, 8, 8)])
def test_a_mask_must_broadcast_to_the_event(keep):
    known = torch.zeros(1, 8, 8)
    require_events(SamplingOptions(known=known, keep=torch.ones(1, 8) > 0), (1, 8, 8))
    with pytest.raises(InputError, match=re.escape(f"keep must broadcast to the event (1, 8, 8), got {keep}")):
        require_events(SamplingOptions(known=known, keep=torch.ones(keep) > 0), (1, 8, 8))
    with pytest.raises(InputError, match=re.escape("events are (1, 8, 8) here, got (8, 8)")):
        require_events(SamplingOptions(known=known[0], keep=torch.ones(8, 8) > 0), (1, 8, 8))


@pytest.mark.parametrize("given, classes, null, said", [
    ({"edit": torch.zeros(8), "guidance": 2.0}, 10, True, "guidance leads to a class, .*: give cond"),
    ({"known": torch.zeros(8), "keep": torch.ones(8) > 0, "guidance": 0.5}, 10, True, "guidance leads to a class"),
    ({"edit": torch.zeros(8), "guidance": 2.0}, None, False, "needs a model with classes: leave it out"),
    ({"guidance": 2.0}, 10, False, "model.cond_drop above 0"), ({"guidance": 2.0}, 10, True, None),
    ({"edit": torch.zeros(8), "guidance": 2.0, "cond": 3}, 10, True, None),
    ({"edit": torch.zeros(8), "guidance": 0.0}, 10, True, None), ({"edit": torch.zeros(8)}, None, False, None),
])  # fmt: skip
def test_guidance_needs_a_class_and_a_model_without_one(given, classes, null, said):
    with contextlib.nullcontext() if said is None else pytest.raises(InputError, match=said):
        require_guidance(SamplingOptions(**given), classes, null)


def test_defaults_fill_what_was_not_asked_for():
    asked = SamplingOptions(steps=3).with_default(steps=20, sampler="heun")
    assert (asked.steps, asked.sampler) == (3, "heun")
