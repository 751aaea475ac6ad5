"""Searches against brute force over all paths, and all texts, of small cases."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from genmodels.speech import decoding
from genmodels.speech.decoding import collapsed, ctc_beam, ctc_greedy


def rows(frames: int, classes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(frames, classes, generator=generator, dtype=torch.float64)).log_softmax(-1)


def of_all_paths(log_probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The probability of every text, by its paths one by one."""
    found = defaultdict(float)
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        found[collapsed(path)] += math.exp(sum(float(log_probs[t, k]) for t, k in enumerate(path)))
    return found


def beam_error(seed: int) -> float:
    """The largest error of a search that drops nothing, over all texts of five frames and two characters."""
    truth = of_all_paths(rows(5, 3, seed))
    found = ctc_beam(rows(5, 3, seed), beam=1000, least=-math.inf)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    heard = {one.tokens: math.exp(one.score) for one in found}
    return max(abs(heard.get(text, 0.0) - truth[text]) for text in {*truth, *heard})


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_has_every_text_with_its_probability(seed):
    assert beam_error(seed) < 1e-12


def test_a_search_that_joins_repeated_characters_is_noticed(monkeypatch):
    monkeypatch.setattr(decoding, "_plus", max)  # the best path in place of their sum
    assert beam_error(0) > 1e-3


def test_the_best_path_is_not_the_best_text():
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert ctc_greedy(log_probs[None])[0].tokens == () and ctc_beam(log_probs)[0].tokens == (1,)


def test_greedy_takes_valid_frames_alone():
    both = torch.stack([rows(6, 4), rows(6, 4, 1)])
    found = ctc_greedy(both, torch.tensor([6, 2]))
    assert found[1] == ctc_greedy(both[1:, :2])[0] and found[0] == ctc_greedy(both[:1])[0]
    path = both[1, :2].max(-1)
    assert found[1].tokens == collapsed(path.indices.tolist())
    assert found[1].score == pytest.approx(float(path.values.sum()), rel=1e-12)


def test_no_beam_is_refused():
    with pytest.raises(ValueError, match="beam must be at least 1"):
        ctc_beam(rows(2, 3), beam=0)
