"""The language model: probabilities that add up to one, the past alone, samples of these probabilities."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.data.text import to_bytes
from genmodels.models.checkpoint import load_model
from genmodels.models.masked_diffusion import LanguageModel
from genmodels.nn import CausalTransformer, dit
from genmodels.speech.decoding import ByteLanguage, Search, ctc_beam
from genmodels.verification.check import Options
from genmodels.verification.checkpoints import verify
from tests.untrained import write

SMALL = {"channels": 8, "depth": 2, "heads": 2, "hidden": 16, "dropout": 0.0}


def small(length: int = 4, levels: int = 3, **net) -> LanguageModel:
    torch.manual_seed(0)
    spec = DataSpec("text", (1, length), levels=levels, encoding="utf-8")
    model = LanguageModel(spec, net=SMALL | net, ema_decay=0.0).eval().double()
    with torch.no_grad():
        model.core.head.weight.mul_(4)  # far from uniform
    return model


def every(length: int = 4, levels: int = 3) -> Batch:
    x = torch.tensor(list(itertools.product(range(levels), repeat=length)), dtype=torch.uint8)
    return Batch(x[:, None], index=torch.arange(len(x)))


def mass_error(model: LanguageModel) -> float:
    return abs(float(model.log_likelihood(every()).nats.exp().sum()) - 1)


@pytest.mark.parametrize("attention", ["rope", "xl", "music", "alibi"])
def test_all_texts_have_a_probability_of_one_together(attention):
    model = small(attention=attention)
    found = model.log_likelihood(every())
    assert mass_error(model) < 1e-9 and found.kind == "exact" and float(found.nats.max() - found.nats.min()) > 1
    loss = model.loss(every(), KeyedGenerator(0, torch.arange(81), "train"))
    assert loss.per_example.detach() == pytest.approx(-found.nats / (4 * math.log(2)))


def test_a_model_that_sees_the_future_is_noticed(monkeypatch):
    layer = dit.TransformerLayer
    monkeypatch.setattr(dit, "TransformerLayer", lambda *args, causal, **options: layer(*args, **options))
    assert mass_error(small()) > 1e-3


def test_new_tokens_after_old_ones_are_the_whole():
    network = small(length=9).core
    tokens = torch.randint(3, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = network(tokens)
    state, parts = None, []
    for piece in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        found, state = network.extend(piece, state)
        parts.append(found)
    together = torch.cat(parts, 1)  # from the first token, after the start, to that after the last
    torch.testing.assert_close(together[:, :9], whole, atol=1e-12, rtol=0)


def test_samples_have_the_probabilities_of_the_model():
    model = small(length=2)
    drawn = model.sample(4000, seed=1).x[:, 0].long()
    counts = torch.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=9).double() / 4000
    exact = model.log_likelihood(every(2)).nats.exp()
    assert (counts - exact).abs().max() < 4 * math.sqrt(0.25 / 4000)
    alone = model.sample(1, seed=1, start=7)
    assert torch.equal(alone.x[0, 0].long(), drawn[7]) and alone.x.dtype == torch.uint8
    cold = model.sample(3, temperature=0.0).x
    assert torch.equal(cold[0], cold[2])


def test_a_beginning_is_continued_and_a_gap_refused():
    model = small(length=6)
    known, keep = torch.tensor([[2, 0, 1, 0, 0, 0]]), torch.tensor([[True, True, True, False, False, False]])
    found = model.sample(5, known=known, keep=keep)
    assert (found.x[:, 0, :3] == known[0, :3]).all() and found.made["kept"] == 3
    with pytest.raises(InputError, match="continues a beginning"):
        model.sample(1, known=known, keep=~keep)


def test_what_is_known_may_be_broadcast_and_has_the_shape_of_the_data():
    model, known = small(length=6), torch.tensor([[2, 0, 1, 0, 0, 0]])
    assert (model.sample(2, known=known, keep=torch.tensor(True)).x == known).all()
    with pytest.raises(InputError, match=r"events are \(1, 6\) here, got \(1, 9\)"):
        model.sample(1, known=torch.zeros(1, 9, dtype=torch.long), keep=torch.tensor(True))
    with pytest.raises(InputError, match="known holds values from 0 to 3, and the data are integers from 0 to 2"):
        model.sample(1, known=torch.tensor([[3, 0, 1, 0, 0, 0]]), keep=torch.tensor(True))


def test_a_class_of_texts_is_refused():
    with pytest.raises(ValueError, match="this model is unconditional: leave cond out"):
        small().sample(1, cond=[1])


def test_other_data_and_kinds_of_attention_are_refused():
    with pytest.raises(InputError, match="is for data=text, not for digits"):
        LanguageModel(DataSpec("digits", (1, 8, 8), levels=17))
    with pytest.raises(InputError, match="no causal form"):
        small(attention="nystrom")


def test_the_checks_of_whole_models_hold():
    report = verify(small().float(), small, every().rows(slice(0, 9)), None, Options(randomise=True))
    names = {check.name: check.status for whole in report.wholes for check in whole.checks}
    assert "sample 3 alone and in a batch" in names and set(names.values()) == {"passed"}


def test_it_learns_and_a_checkpoint_holds_it(tmp_path):
    model = LanguageModel(DataSpec("text", (1, 8), levels=256, encoding="utf-8"), net=SMALL, ema_decay=0.0)
    batch = Batch(to_bytes("to be to").expand(4, 1, 8).clone(), index=torch.arange(4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch, KeyedGenerator(0, torch.arange(4), "train")).value.backward()
        optimizer.step()
    found = model.eval().log_likelihood(batch)
    assert found.mean_bits_per_dim() < 0.2
    other, _ = load_model(write(model, tmp_path / "model.ckpt"))
    assert torch.equal(other.log_likelihood(batch).nats, found.nats)


TABLE = [10, 97, 98]  # newline, a, b


def language(longest: int = 64) -> ByteLanguage:
    return ByteLanguage(small(length=longest, levels=256).reader(), TABLE, longest=longest)


def test_of_bytes_those_of_characters_are_left_and_add_up_to_one():
    """Each text after a newline through the network alone; a byte that is no character is never next."""
    model = small(length=64, levels=256)
    own = ByteLanguage(model.reader(), TABLE, longest=64)
    for text in ((), (1,), (1, 2, 2), (2, 1, 1, 2)):
        read = torch.tensor([[256, 10, *(TABLE[k] for k in text)]])
        h = model.core.embedding(read).mT
        for layer in model.core.layers:
            h = layer(h)
        expected = model.core._log_probs(h)[0, -1, TABLE].exp()
        assert own.log_probs(text) == pytest.approx((expected / expected.sum()).log().detach().numpy(), abs=1e-9)
    ended = sum(math.exp(own.log_prob(text)) for n in range(7) for text in itertools.product((1, 2), repeat=n))
    going_on = sum(math.exp(sum(own.log_probs(text[:n])[k] for n, k in enumerate(text)))
                   for text in itertools.product((1, 2), repeat=7))
    assert ended + going_on == pytest.approx(1, abs=1e-9)


def test_texts_beyond_the_length_are_read_from_their_end():
    short, text = language(longest=8), (1, 2) * 8
    assert short.log_prob(text) == pytest.approx(
        sum(float(short.log_probs(text[:n])[k]) for n, k in enumerate((*text, 0))))
    assert short.log_probs(text) == pytest.approx(language(longest=8).log_probs((2, 1, *text)))  # the last seven


def test_states_that_were_dropped_are_made_anew(monkeypatch):
    expected = [language().log_probs(text) for text in ((1, 2, 1), (2, 2), (1, 2, 1, 1))]
    monkeypatch.setattr(ByteLanguage, "_STATES", 1)
    monkeypatch.setattr(ByteLanguage, "_TEXTS", 2)
    few = language()
    for _ in range(2):
        found = [few.log_probs(text) for text in ((1, 2, 1), (2, 2), (1, 2, 1, 1))]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-9)
    assert len(few._known) <= 2 and len(few._states) == 1


def test_fusion_in_a_wide_beam_is_rescoring():
    generator = torch.Generator().manual_seed(0)
    rows = (2 * torch.randn(5, 3, generator=generator, dtype=torch.float64)).log_softmax(-1)
    options = {"beam": 1000, "least": -math.inf, "language": language(), "weight": 0.7}
    later = Search(**options, rescore=True)
    fused, found = ctc_beam(rows, Search(**options)), later.second_pass(ctc_beam(rows, later.first_pass()))
    assert [one.tokens for one in found] == [one.tokens for one in fused]
    assert [one.score for one in found] == pytest.approx([one.score for one in fused], abs=1e-9)


def test_characters_of_several_bytes_are_refused():
    with pytest.raises(ValueError, match="needs a byte for every character"):
        ByteLanguage(lambda read, state: None, [10, 0x259], longest=8)
    assert CausalTransformer(3, **SMALL).levels == 3
    assert CausalTransformer(3, **SMALL)(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 3)
