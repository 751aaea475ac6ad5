"""Sums over alignments against the alignments one by one, and the probabilities of all texts against one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genmodels.speech import transducer
from genmodels.speech.transducer import CTC, least_frames
from tests.speech.test_decoding import of_all_paths


def ctc(classes: int = 3) -> CTC:
    torch.manual_seed(0)
    return CTC(4, classes).double()


def every_text(classes: int, longest: int):
    for n in range(longest + 1):
        yield from itertools.product(range(1, classes), repeat=n)


def log_prob(model: CTC, h, frames: int, text: tuple[int, ...]) -> float:
    y = torch.tensor([[*text, 0]])
    return float(model.log_prob(h, torch.tensor([frames]), y, torch.tensor([len(text)])).detach())


def ctc_error(model: CTC) -> float:
    """The largest error over all texts of up to five characters in four frames, and that of their sum."""
    h = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = of_all_paths(model.log_probs(h)[0, :4].detach())
    found = {text: math.exp(log_prob(model, h, 4, text)) for text in every_text(3, 5)}
    return max(abs(found[text] - truth.get(text, 0.0)) for text in found) + abs(sum(found.values()) - 1)


def test_ctc_sums_over_all_paths_and_all_texts_sum_to_one():
    assert ctc_error(ctc()) < 1e-12


def test_another_blank_is_noticed(monkeypatch):
    monkeypatch.setattr(transducer, "BLANK", 2)
    assert ctc_error(ctc()) > 1e-3


def test_a_text_needs_a_frame_for_each_character_and_one_between_equal_ones():
    model, h = ctc(), torch.zeros(1, 4, 9, dtype=torch.float64)
    for text in every_text(3, 4):
        y = torch.tensor([[*text, 2, 2]])
        needed = int(least_frames(y, torch.tensor([len(text)])))
        assert log_prob(model, h, needed, text) > -math.inf
        assert needed == 0 or log_prob(model, h, needed - 1, text) == -math.inf


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 4])
def test_a_search_is_that_of_each_item(beam):
    model, h = ctc(), torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    frames = torch.tensor([9, 4, 6])
    found = model.search(h, frames, beam)
    for k, n in enumerate(frames.tolist()):
        (alone,) = model.search(h[k : k + 1, :, :n], frames[k : k + 1], beam)
        assert [one.tokens for one in alone] == [one.tokens for one in found[k]]
