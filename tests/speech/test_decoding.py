"""Searches against brute force over all paths, and all texts, of small cases."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from genmodels.speech import decoding
from genmodels.speech.decoding import (
    NGram,
    Search,
    beam_search,
    collapsed,
    ctc_alignment,
    ctc_beam,
    ctc_greedy,
    expected_errors,
    oracle,
)


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
    found = ctc_beam(rows(5, 3, seed), Search(beam=1000, least=-math.inf))
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    heard = {one.tokens: math.exp(one.score) for one in found}
    return max(abs(heard.get(text, 0.0) - truth[text]) for text in {*truth, *heard})


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_has_every_text_with_its_probability(seed):
    assert beam_error(seed) < 1e-12


def test_a_search_that_does_not_sum_is_noticed(monkeypatch):
    monkeypatch.setattr(decoding, "plus", max)  # the best path in place of their sum
    assert beam_error(0) > 1e-3


def test_the_best_path_is_not_the_best_text():
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert ctc_greedy(log_probs[None])[0].tokens == () and ctc_beam(log_probs, Search(beam=2))[0].tokens == (1,)


def test_greedy_takes_valid_frames_alone():
    both = torch.stack([rows(6, 4), rows(6, 4, 1)])
    found = ctc_greedy(both, torch.tensor([6, 2]))
    assert found[1] == ctc_greedy(both[1:, :2])[0] and found[0] == ctc_greedy(both[:1])[0]
    path = both[1, :2].max(-1)
    assert found[1].tokens == collapsed(path.indices.tolist())
    assert found[1].score == pytest.approx(float(path.values.sum()), rel=1e-12)


def language() -> NGram:
    return NGram([(1, 2, 1, 1), (2, 2, 1), (1,)], 3, order=3)


def language_error(model: NGram, longest: int = 7) -> float:
    """By how much the probabilities of texts, ended or of this length, are not one; and those of next characters."""
    ended = sum(math.exp(model.log_prob(text)) for n in range(longest) for text in itertools.product((1, 2), repeat=n))
    going_on = 0.0
    for text in itertools.product((1, 2), repeat=longest):
        going_on += math.exp(sum(model.log_probs(text[:n])[k] for n, k in enumerate(text)))
    return abs(ended + going_on - 1)


def test_a_language_model_is_one_and_counts_by_hand():
    assert language_error(language()) < 1e-12
    # Of three texts, with eight characters and three ends: 1 five times, 2 three times, three kinds.
    nothing = [(3 + 1) / 14, (5 + 1) / 14, (3 + 1) / 14]
    assert [math.exp(p) for p in language().log_probs(())] == pytest.approx(nothing)
    after_two = [(0 + 2 * nothing[0]) / 5, (2 + 2 * nothing[1]) / 5, (1 + 2 * nothing[2]) / 5]  # 1 twice, 2 once
    assert [math.exp(p) for p in language().log_probs((2,))] == pytest.approx(after_two)
    assert language().log_probs((2, 2, 1, 2)) == pytest.approx(language().log_probs((1, 2)))  # order 3 sees two


def test_a_language_model_without_normalisation_is_noticed(monkeypatch):
    monkeypatch.setattr(NGram, "_probs", lambda self, context: np.full(3, 0.35))
    assert language_error(language()) > 0.1


def test_fusion_ranks_all_texts_by_both():
    truth, model = of_all_paths(rows(5, 3)), language()
    found = ctc_beam(rows(5, 3), Search(beam=1000, least=-math.inf, language=model, weight=0.7))
    scores = {text: math.log(p) + 0.7 * model.log_prob(text) for text, p in truth.items()}
    assert {one.tokens: one.score for one in found} == pytest.approx(scores, abs=1e-10)
    assert found[0].tokens == max(scores, key=scores.get)


def test_scores_of_a_language_model_are_kept_for_one_recording_alone():
    how = Search(beam=4, language=language(), weight=0.7)
    ctc_beam(rows(5, 3), how)
    assert how._fused == {}
    attention_lists(how)
    assert how._fused == {}


def attention_lists(how: Search) -> list:
    """Texts of up to four characters by a model that only counts characters."""
    steps = rows(6, 3, 7)

    def step(tokens, state):
        return steps[int(state[0, 0])].expand(len(tokens), 3), state + 1

    return beam_search(step, torch.zeros(1, 1, dtype=torch.int64), how, longest=4)


def test_a_beam_of_one_is_greedy():
    """Smoothed labels leave 0.02 for the end at each of thirty characters, more than the whole text has."""
    right = [1 + k % 4 for k in range(30)] + [0]
    smooth = torch.full((31, 5), 0.02).index_fill(1, torch.tensor(4), 0.1)
    log_probs = smooth.scatter(1, torch.tensor(right)[:, None], 0.84).log()
    for longest, expected in ((40, right[:-1]), (7, right[:7])):
        found = beam_search(lambda tokens, state: (log_probs[state], state + 1), torch.zeros(1, dtype=torch.int64),
                            Search(), longest=longest)  # fmt: skip
        assert list(found[0].tokens) == expected
    assert float(log_probs[0, 0]) > float(log_probs[range(31), right].sum())  # the empty text is more probable


@pytest.mark.parametrize("length", [0.0, 0.6])
def test_rescoring_in_a_wide_beam_is_fusion(length):
    """A search that drops nothing finds every text; the order of the two does not matter then."""
    options = {"beam": 1000, "least": -math.inf, "language": language(), "weight": 0.7, "length": length}
    fused, later = Search(**options), Search(**options, rescore=True)
    for search, by in ((lambda how: ctc_beam(rows(5, 3), how), 0.0), (attention_lists, length)):
        found = later.second_pass(search(later.first_pass()), by)
        expected = search(fused)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-10)
        assert [one.score for one in search(later.first_pass())] != [one.score for one in expected]
    assert fused.second_pass(expected) is expected  # nothing is added twice


def test_the_alignment_is_the_best_of_all_paths():
    for seed, text in enumerate([(1, 2), (1, 1), (2,), (1, 2, 1)]):
        log_probs = rows(6, 3, seed)
        paths = [path for path in itertools.product(range(3), repeat=6) if collapsed(path) == text]
        best = max(paths, key=lambda path, p=log_probs: sum(float(p[t, k]) for t, k in enumerate(path)))
        spans, t = [], 0
        for k, run in itertools.groupby(best):
            length = len(list(run))
            spans += [(t, t + length - 1)] if k else []
            t += length
        assert ctc_alignment(log_probs, text) == spans
    with pytest.raises(ValueError, match="2 characters have no path in 2 frames"):
        ctc_alignment(rows(2, 3), (1, 1))


def test_the_best_of_a_list_and_the_expected_errors():
    assert oracle("so it is", ["no", "so is it", "so is"]).total == 1
    log_probs = rows(2, 4).requires_grad_()
    errors = torch.tensor([[2.0, 0.0, 1.0, 5.0], [1.0, 1.0, 0.0, 3.0]], dtype=torch.float64)
    shares = log_probs.exp() / log_probs.exp().sum(1, keepdim=True)
    (expected,) = torch.autograd.grad((shares * errors).sum(), log_probs, retain_graph=True)
    (found,) = torch.autograd.grad(expected_errors(log_probs, errors).sum(), log_probs)
    torch.testing.assert_close(found, expected)  # the mean changes the variance of lists, never the gradient
    absent = torch.cat([log_probs, torch.full((2, 1), -torch.inf).double()], 1)
    torch.testing.assert_close(expected_errors(absent, torch.cat([errors, torch.ones(2, 1)], 1)),
                               expected_errors(log_probs, errors))


def test_what_makes_no_sense_is_refused():
    for options, said in (({"beam": 0}, "beam must be at least 1"), ({"weight": -1.0}, "weight"),
                          ({"length": -1.0}, "length")):
        with pytest.raises(ValueError, match=said):
            Search(**options)
    with pytest.raises(ValueError, match="outside 1..2"):
        NGram([(1, 3)], 3)
    with pytest.raises(ValueError, match="order"):
        NGram([], 3, order=0)
