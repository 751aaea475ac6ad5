"""The spelling decoder: its texts sum to one, masks and triggers are exact, its search is that of brute force."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from genmodels.speech import criteria
from genmodels.speech.criteria import AttentionDecoder, PyramidalLSTM, cross_entropy
from genmodels.speech.decoding import Search
from genmodels.speech.tacotron import AttentionKind
from tests.parameters import scattered
from tests.speech.test_criteria_transducer import every_text

FRAMES, COUNTS = torch.tensor([9, 4, 6]), torch.tensor([3, 1, 4])
Y = torch.tensor([[1, 2, 2, 0], [2, 0, 0, 0], [1, 1, 2, 1]])
TRIGGERS = torch.tensor([[1, 3, 5, 9, 0], [2, 1, 0, 0, 0], [0, 1, 2, 5, 9]])


def decoder(**options) -> AttentionDecoder:
    torch.manual_seed(0)
    return scattered(AttentionDecoder(4, 3, **{"hidden": 5, "dropout": 0.0, **options}), 0.6, seed=0).double().eval()


def speech() -> torch.Tensor:
    return torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def item_error(model: AttentionDecoder, triggers=None) -> float:
    """The largest difference of log p of an item in a batch from that of it alone."""
    h = speech()
    hidden = h.masked_fill(torch.arange(9) >= FRAMES[:, None, None], 1e3)
    whole = model.log_prob(hidden, FRAMES, Y, COUNTS, triggers)
    alone = [model.log_prob(h[k : k + 1, :, :t], FRAMES[k : k + 1], Y[k : k + 1, :n], COUNTS[k : k + 1],
                            None if triggers is None else triggers[k : k + 1, : n + 1])
             for k, (t, n) in enumerate(zip(FRAMES.tolist(), COUNTS.tolist(), strict=True))]
    return float((whole - torch.cat(alone)).abs().max())


@pytest.mark.parametrize("attention", get_args(AttentionKind))
def test_an_item_is_itself_in_a_batch(attention):
    assert item_error(decoder(attention=attention)) < 1e-10
    assert item_error(decoder(attention=attention, delay=1), TRIGGERS) < 1e-10


def test_an_unmasked_memory_is_noticed(monkeypatch):
    listen = AttentionDecoder.listen
    monkeypatch.setattr(AttentionDecoder, "listen", lambda self, h, frames: listen(self, h, frames + 9))
    assert item_error(decoder()) > 1e-3


@torch.no_grad()
def total(model: AttentionDecoder, end: int | None = None) -> float:
    """The probability of all texts of up to four characters, and of all longer ones.

    The triggers depend on the place in the text, or, with `end`, on whether it is that of the end of the text.
    """
    h, texts = speech()[:1], list(every_text(3, 4))
    y = torch.tensor([[*text, *[0] * (4 - len(text))] for text in texts])
    counts, frames = torch.tensor([len(text) for text in texts]), FRAMES[:1].expand(len(texts))
    triggers = TRIGGERS[:1].repeat(len(texts), 1)
    if end is not None:
        triggers[torch.arange(len(texts)), counts] = end
    ended = model.log_prob(h.expand(len(texts), -1, -1), frames, y, counts, triggers).exp().sum()
    full, at = y[counts == 4], triggers[counts == 4]
    open_ones = model(h.expand(len(full), -1, -1), frames[: len(full)], full, counts[counts == 4], triggers=at)
    steps = open_ones[:, :-1].gather(2, full[..., None])[..., 0].sum(1)
    return float(ended + (steps.exp() * (1 - open_ones[:, -1, 0].exp())).sum())


@pytest.mark.parametrize("delay", [None, 0, 1])
def test_texts_and_longer_ones_sum_to_one(delay):
    assert total(decoder(delay=delay)) == pytest.approx(1, abs=1e-12)


def test_an_end_that_sees_more_than_a_character_in_its_place_is_noticed():
    assert abs(total(decoder(delay=1), end=9) - 1) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("delay", [None, 1])
def test_a_wide_beam_finds_the_best_of_all_texts(delay):
    model, h = decoder(delay=delay), speech()
    given = None if delay is None else [[0, 1]]
    for k, n in enumerate((3, 4, 3)):
        texts, part = list(every_text(3, n)), h[k : k + 1, :, :n]
        y = torch.tensor([[*text, *[0] * (n - len(text))] for text in texts])
        counts = torch.tensor([len(text) for text in texts])
        frames = torch.full((len(texts),), n)
        triggers = torch.tensor([0, 1, *[n] * (n - 1)]).expand(len(texts), -1)
        scores = model.log_prob(part.expand(len(texts), -1, -1), frames, y, counts, triggers)
        for length in (0.0, 1.0):
            ranked = scores / ((5 + counts.double()) / 6) ** length
            (found,) = model.search(part, frames[:1], Search(beam=1000, length=length), given)
            best = ranked.argsort(descending=True)[:5].tolist()
            assert [one.tokens for one in found[:5]] == [texts[i] for i in best]
            assert found[0].score == pytest.approx(float(ranked[best[0]]), abs=1e-10)
            narrow = model.search(part, frames[:1], Search(beam=2, length=length), given)[0][0]
            assert narrow.score <= found[0].score + 1e-12


def test_a_trigger_hides_what_comes_after_it_and_its_delay():
    model, triggers = decoder(delay=1), torch.tensor([[1, 3, 5, 7, 9]])
    h = speech()[:1].requires_grad_()
    log_probs = model(h, FRAMES[:1], Y[:1], torch.tensor([4]), triggers=triggers)
    for u, t in enumerate(triggers[0, :4].tolist()):
        (gradient,) = torch.autograd.grad(log_probs[0, u, 1], h, retain_graph=True)
        seen = gradient.abs().sum(1)[0] > 0
        assert bool(seen[: t + 2].all()) and not bool(seen[t + 2 :].any())
    (gradient,) = torch.autograd.grad(log_probs[0, 4, 0], h)
    assert bool((gradient.abs().sum(1) > 0).all())  # the end has heard everything
    free = decoder()(h, FRAMES[:1], Y[:1], torch.tensor([4]), triggers=triggers)
    assert float((free[0, 0] - log_probs[0, 0]).abs().max().detach()) > 1e-3  # without a delay triggers hide nothing


def test_what_it_foresees_is_fed_back():
    model, h = decoder(), speech()
    generator = torch.Generator().manual_seed(0)
    true = model(h, FRAMES, Y, COUNTS)
    assert torch.equal(true, model(h, FRAMES, Y, COUNTS, sampled=1e-9, generator=generator))
    own = model(h, FRAMES, Y, COUNTS, sampled=1.0, generator=generator)
    fed = model(h, FRAMES, own[:, :-1].argmax(2), COUNTS)
    torch.testing.assert_close(own, fed)
    assert float((own - true).abs().max().detach()) > 1e-3


def test_smoothing_spreads_the_targets():
    log_probs = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    y, counts = torch.tensor([[1, 4, 2], [3, 0, 0]]), torch.tensor([3, 1])
    found = cross_entropy(log_probs, y, counts, smoothing=0.2)
    for k, target in enumerate(([1, 4, 2, 0], [3, 0])):
        wanted = -sum(sum((0.8 * (c == t) + 0.2 / 5) * float(log_probs[k, u, c]) for c in range(5))
                      for u, t in enumerate(target))
        assert float(found[k]) == pytest.approx(wanted, rel=1e-12)
    assert math.isclose(float(cross_entropy(log_probs, y, counts)[1]), -float(log_probs[1, 0, 3] + log_probs[1, 1, 0]))


def test_what_makes_no_sense_is_refused():
    for options, said in (({"attention": "xl"}, "attention must be one of"), ({"delay": -1}, "delay"),
                          ({"hidden": 0}, "hidden")):
        with pytest.raises(ValueError, match=said):
            AttentionDecoder(4, 3, **options)


def listener(**options) -> PyramidalLSTM:
    torch.manual_seed(0)
    return PyramidalLSTM(5, **{"channels": 6, "dropout": 0.0, **options}).double().eval()


def by_cells(layer: torch.nn.LSTM, x: torch.Tensor) -> torch.Tensor:
    """A bidirectional LSTM (T, C) frame by frame, from the equations of its gates."""
    both = []
    for suffix, order in (("", 1), ("_reverse", -1)):
        w, u, b, c = (getattr(layer, name + suffix) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0",
                                                                 "bias_hh_l0"))
        h = cell = torch.zeros(layer.hidden_size, dtype=x.dtype)
        found = []
        for frame in x.unbind()[::order]:
            enter, forget, new, leave = (w @ frame + b + u @ h + c).chunk(4)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            h = leave.sigmoid() * cell.tanh()
            found.append(h)
        both.append(torch.stack(found[::order]))
    return torch.cat(both, 1)


def listener_error(net: PyramidalLSTM) -> float:
    """The largest difference of the items of a padded batch from each alone, frame by frame."""
    lengths = (21, 8, 1)
    x = torch.randn(3, 5, 21, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = (torch.arange(21) < torch.tensor(lengths)[:, None])[:, None]
    h, valid = net(x.masked_fill(~mask, 1e4), mask)
    assert valid.sum(2).flatten().tolist() == [-(-n // net.subsampling) for n in lengths]
    assert float(h.masked_fill(valid, 0).abs().max()) == 0 and h.shape[2] == -(-21 // net.subsampling)
    errors = []
    for k, n in enumerate(lengths):
        own = by_cells(net.layers[0], x[k, :, :n].T)
        for layer in net.layers[1:]:
            rows = torch.cat([own, own.new_zeros(len(own) % 2, own.shape[1])])
            own = by_cells(layer, torch.cat([rows[::2], rows[1::2]], 1))
        errors.append(float((h[k, :, : len(own)].T - own).abs().max()))
        alone, nothing = net(x[k : k + 1, :, :n])
        assert nothing is None
        torch.testing.assert_close(alone[0].T, own)
    return max(errors)


@pytest.mark.parametrize("subsampling", [2, 4, 8])
def test_the_listener_of_las_is_its_equations_whatever_the_padding(subsampling):
    net = listener(subsampling=subsampling)
    assert len(net.layers) == 1 + math.log2(subsampling)
    with torch.no_grad():
        assert listener_error(net) < 1e-12


def test_a_listener_that_reads_padding_is_noticed(monkeypatch):
    pack = criteria.pack_padded_sequence
    monkeypatch.setattr(criteria, "pack_padded_sequence", lambda h, lengths, **options: pack(
        h, torch.full_like(lengths, h.shape[1]), **options))
    with torch.no_grad(), pytest.raises(AssertionError):
        listener_error(listener())


def test_a_listener_that_makes_no_sense_is_refused():
    for options in ({"channels": 7}, {"subsampling": 3}):
        with pytest.raises(ValueError, match="channels must be even and subsampling 2, 4 or 8"):
            listener(**options)
