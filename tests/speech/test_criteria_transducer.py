"""Sums over alignments against the alignments one by one, and the probabilities of all texts against one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genmodels.speech import criteria
from genmodels.speech.criteria import CTC, Transducer, least_frames, transducer_log_prob
from genmodels.speech.decoding import Search, plus
from tests.parameters import scattered
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
    monkeypatch.setattr(criteria, "BLANK", 2)
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
    found = model.search(h, frames, Search(beam=beam))
    for k, n in enumerate(frames.tolist()):
        (alone,) = model.search(h[k : k + 1, :, :n], frames[k : k + 1], Search(beam=beam))
        assert [one.tokens for one in alone] == [one.tokens for one in found[k]]


# ---- the transducer ---------------------------------------------------------------------------------------------


def lattice(frames: int, characters: int, seed: int = 0, items: int = 1):
    """Random log-probabilities of blanks and of characters."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(items, frames, characters + 1, 2, generator=generator, dtype=torch.float64).log_softmax(-1)
    return both[..., 0], both[:, :, :-1, 1]


def of_all_alignments(blank, emit) -> float:
    """log of the sum over all orders of T blanks and U characters that end in a blank, one by one."""
    frames, characters = emit.shape
    total = -math.inf
    for when in itertools.combinations(range(frames - 1 + characters), characters):
        t = u = 0
        score = 0.0
        for step in range(frames - 1 + characters):
            if step in when:
                score, u = score + float(emit[t, u]), u + 1
            else:
                score, t = score + float(blank[t, u]), t + 1
        total = plus(total, score + float(blank[t, u]))
    return total


def lattice_error() -> float:
    """The largest error of the sums of lattices of all small sizes, in one padded batch."""
    sizes = [(t, u) for t in range(1, 6) for u in range(5)]
    blank, emit = lattice(5, 4, items=len(sizes))
    found = criteria.transducer_log_prob(blank, emit, *torch.tensor(sizes).T)
    truth = [of_all_alignments(blank[k, :t, : u + 1], emit[k, :t, :u]) for k, (t, u) in enumerate(sizes)]
    return float((found - torch.tensor(truth, dtype=torch.float64)).abs().max())


def test_a_transducer_sums_over_all_alignments():
    assert lattice_error() < 1e-10


def test_a_lattice_without_its_last_blank_or_with_its_maximum_is_noticed(monkeypatch):
    sound = criteria.transducer_log_prob
    monkeypatch.setattr(criteria, "transducer_log_prob", lambda blank, emit, frames, counts:
                        sound(blank, emit, frames, counts) - blank[torch.arange(len(blank)), frames - 1, counts])
    assert lattice_error() > 1e-2
    monkeypatch.undo()
    monkeypatch.setattr(torch, "logaddexp", torch.maximum)
    assert lattice_error() > 1e-2


def test_it_agrees_with_published_values():
    """The small case that the tests of warp-transducer, torchaudio and others have."""
    logits = torch.tensor([[[[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
                            [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]]]],
                          dtype=torch.float64, requires_grad=True)  # fmt: skip
    p = logits.log_softmax(-1)
    emit = p[:, :, :2].gather(3, torch.tensor([1, 2])[None, None, :, None].expand(1, 2, 2, 1))[..., 0]
    loss = -transducer_log_prob(p[..., 0], emit, torch.tensor([2]), torch.tensor([2]))
    assert float(loss.detach()) == pytest.approx(4.495666773770733, abs=1e-8)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    known = [[[-0.13116688, -0.3999269, 0.17703125, 0.17703125, 0.17703125],
              [-0.18572757, 0.12247056, -0.18168412, 0.12247056, 0.12247056],
              [-0.32091254, 0.06269141, 0.06928472, 0.12624499, 0.06269141]],
             [[0.05456069, -0.21824276, 0.05456069, 0.05456069, 0.05456069],
              [0.12073959, 0.12073959, -0.48295835, 0.12073959, 0.12073959],
              [-0.6925882, 0.16871116, 0.18645467, 0.16871116, 0.16871116]]]  # fmt: skip
    torch.testing.assert_close(gradient[0], torch.tensor(known, dtype=torch.float64), rtol=0, atol=1e-6)


def test_its_gradient_is_that_of_finite_differences_and_of_occupied_places():
    blank, emit = (part.requires_grad_() for part in lattice(4, 3, items=2))
    frames, counts = torch.tensor([4, 3]), torch.tensor([3, 1])
    assert torch.autograd.gradcheck(lambda b, e: transducer_log_prob(b, e, frames, counts), (blank, emit), eps=1e-6,
                                    atol=1e-8)  # fmt: skip
    both = torch.autograd.grad(transducer_log_prob(blank, emit, frames, counts).sum(), (blank, emit))
    # Every alignment has T blanks and U characters, so that their posteriors add up to these.
    for part, number in zip(both, (frames, counts), strict=True):
        torch.testing.assert_close(part.sum((1, 2)), number.double())
        assert bool((part >= -1e-12).all())


def model_of_texts() -> Transducer:
    torch.manual_seed(0)
    return scattered(Transducer(4, 3, hidden=5), 0.5, seed=0).double().eval()


@torch.no_grad()
def test_a_text_is_itself_in_a_batch_and_its_search_finds_its_probability():
    model, h = model_of_texts(), torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    frames, counts = torch.tensor([4, 2, 3]), torch.tensor([3, 1, 2])
    y = torch.tensor([[1, 2, 2], [2, 0, 0], [1, 1, 0]])
    whole = model.log_prob(h, frames, y, counts)
    for k, (t, n) in enumerate(zip(frames.tolist(), counts.tolist(), strict=True)):
        alone = model.log_prob(h[k : k + 1, :, :t], frames[k : k + 1], y[k : k + 1, :n], counts[k : k + 1])
        assert float(alone) == pytest.approx(float(whole[k]), abs=1e-10)
    (found,) = model.search(h[1:2], frames[1:2], Search(beam=10**6, symbols=4))
    # Within four characters a frame nothing is dropped: every text of up to four has all of its alignments.
    scores = {one.tokens: one.score for one in found}
    for text in every_text(3, 4):
        padded = torch.tensor([[*text, 0]])
        truth = model.log_prob(h[1:2], frames[1:2], padded, torch.tensor([len(text)]))
        assert scores[text] == pytest.approx(float(truth), abs=1e-10)
    assert [one.score for one in found] == sorted(scores.values(), reverse=True)
    narrow = model.search(h, frames, Search(beam=2))
    assert all(one[0].score <= float(wide[0].score) + 1e-9 for one, wide in zip(
        narrow, model.search(h, frames, Search(beam=200)), strict=True))


def test_an_item_without_frames_has_no_alignment():
    blank, emit = (side.requires_grad_() for side in lattice(4, 3))
    blank, emit = blank.expand(2, -1, -1), emit.expand(2, -1, -1)
    found = transducer_log_prob(blank, emit, torch.tensor([4, 0]), torch.tensor([3, 2]))
    assert found[1] == -torch.inf and found[0].isfinite()
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(found[0] + found[1].exp(), (blank, emit)))


def test_shapes_that_do_not_fit_are_refused():
    blank, emit = lattice(4, 3)
    with pytest.raises(ValueError, match="emit must be"):
        transducer_log_prob(blank, emit[:, :3], torch.tensor([4]), torch.tensor([3]))
