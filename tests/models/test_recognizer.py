"""The recogniser as a model: its likelihood is of texts, items are themselves in a batch, and what it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from genmodels.core.data import Batch, TextCondition
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import SamplingOptions
from genmodels.data.speech import Speech
from genmodels.data.utterances import padded_tokens
from genmodels.models.build import NETWORKS
from genmodels.models.mels import alone
from genmodels.models.recognizer import Recognizer, characters
from genmodels.speech.audio import MelConfig, log_mel
from genmodels.speech.decoding import Hypothesis, Search
from genmodels.speech.text import Symbols
from tests.models import texts
from tests.parameters import scattered_model

SIZES = ((3, 19), (5, 24), (2, 12))


#: What the tests take for granted of every criterion, with small sizes.
CRITERIA = {
    "ctc": {}, "transducer": {"transducer": {"hidden": 8}}, "attention": {"decoder": {"hidden": 8, "dropout": 0.0}},
    "joint": {"decoder": {"hidden": 8, "dropout": 0.0, "delay": 1}},
}  # fmt: skip


def model(criterion: str = "ctc", net: dict | None = None, **options) -> Recognizer:
    torch.manual_seed(0)
    if net is None or "_target_" not in net:
        net = {"channels": 8, "depth": 1, "heads": 2, "hidden": 8, "convolution": 3, "dropout": 0.0, **(net or {})}
    own = {**CRITERIA[criterion], **options}
    return scattered_model(Recognizer(texts.spec(), criterion=criterion, net=net, **own))


def item_error(recognizer: Recognizer) -> float:
    """The largest difference of the likelihood and loss of an item in a batch from those of it alone."""
    whole, errors = texts.batch(SIZES), []
    whole = Batch(whole.x.masked_fill(~whole.mask, 55.0), whole.cond, whole.mask, whole.index)
    nats = recognizer.log_likelihood(whole).nats
    losses = recognizer.loss(whole, KeyedGenerator(0, whole.index, "train")).per_example
    for k in range(len(SIZES)):
        one = alone(whole, k)
        loss = recognizer.loss(one, KeyedGenerator(0, one.index, "train")).per_example
        errors += [recognizer.log_likelihood(one).nats[0] - nats[k], loss[0] - losses[k]]
    return float(torch.stack(errors).detach().abs().max())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_an_item_is_itself_in_a_batch(criterion):
    assert item_error(model(criterion)) < 1e-4


PYRAMID = {"_target_": NETWORKS["pyramid"], "channels": 8, "dropout": 0.0, "subsampling": 2}


def test_the_listener_of_las_encodes_and_is_no_stream():
    recognizer = model("joint", net=PYRAMID)
    assert item_error(recognizer) < 1e-4
    with pytest.raises(InputError, match="stream is for"):
        next(recognizer.stream(texts.batch(SIZES)))
    with pytest.raises(InputError, match="use model.net.subsampling=2, or leave it out"):
        short = model(net=PYRAMID | {"subsampling": 8})
        short.loss(texts.batch(SIZES), KeyedGenerator(0, torch.arange(3), "train"))


def test_an_encoder_that_sees_padding_is_noticed(monkeypatch):
    encode = Recognizer.encode
    monkeypatch.setattr(Recognizer, "encode", lambda self, batch, core: encode(self, replace(batch, mask=None), core))
    assert item_error(model()) > 1e-2


def test_the_likelihood_is_one_of_texts():
    recognizer, whole = model(gain=0.0), texts.batch(SIZES)
    found = recognizer.log_likelihood(whole)
    assert found.kind == "exact" and found.dims.tolist() == [3, 5, 2] and found.made["given"] == "mel"
    loss = recognizer.loss(whole, KeyedGenerator(0, whole.index, "train")).per_example
    torch.testing.assert_close(-found.nats / found.dims, loss.detach().double(), rtol=1e-4, atol=1e-5)
    assert found.mean_bits_per_dim() == pytest.approx(-float(found.nats.sum()) / 10 / math.log(2))
    assert recognizer.modelled.unit == "bits_per_character"


def gain_error(recognizer: Recognizer) -> float:
    """The largest difference of mels made louder or quieter in training from those of the scaled sound."""
    wave = torch.randn(1, 6000, generator=torch.Generator().manual_seed(0)) * 0.05
    wave[:, :2500] = 0  # stays silence, however loud
    config = MelConfig(sample_rate=8000, n_fft=512, hop=128, f_max=4000)
    x, keyed = log_mel(wave, config).expand(32, -1, -1), KeyedGenerator(0, torch.arange(32), "train")
    found = recognizer._with_random_gain(x, keyed)
    gains = (found - x)[:, :, 30:].mean((1, 2))  # nats of each item's sound
    largest = 0.1151293 * recognizer.gain  # nats
    assert gains.abs().max() <= largest + 1e-5 and gains.std() == pytest.approx(largest / math.sqrt(3), rel=0.2)
    assert torch.equal(found[:, :, :15], x[:, :, :15])
    true = torch.cat([log_mel(wave * math.exp(gain), config) for gain in gains.tolist()])
    return float((found - true)[:, :, 30:].abs().max())


def test_training_hears_sounds_at_other_levels(monkeypatch):
    recognizer, batch = model(gain=12.0), texts.batch(SIZES)
    assert gain_error(recognizer) < 1e-2
    keyed = KeyedGenerator(0, batch.index, "train")
    assert not torch.equal(recognizer.loss(batch, keyed).per_example, model(gain=0.0).loss(batch, keyed).per_example)
    with pytest.raises(InputError, match="gain must be"):
        model(gain=-1.0)
    monkeypatch.setattr("genmodels.models.recognizer.math.log", lambda x: 1.0)  # another base of decibels
    with pytest.raises(AssertionError):
        gain_error(recognizer)


def test_texts_without_room_are_named_before_training():
    data = Speech(root=None, blanks=False).prepare()
    recognizer = Recognizer(data.spec, net={"channels": 8, "depth": 1, "heads": 2, "hidden": 8})
    recognizer.check_items(data)
    item = data.split("val").items[1]
    long = item.text * 4
    data.split("val").items[1] = replace(item, text=long)
    with pytest.raises(InputError, match=rf"in speech, .* for each: {item.name} \(\d+ for \d+\): leave"):
        recognizer.check_items(data)
    spelt = Recognizer(data.spec, criterion="attention", net={"channels": 8, "depth": 1, "heads": 2, "hidden": 8})
    spelt.check_items(data)  # needs no room


def test_blanks_of_the_table_and_padding_are_no_characters():
    symbols = Symbols()
    said = ["a cab", "so, it is!"]
    tokens, mask = padded_tokens([symbols.encode(text) for text in said])
    batch = Batch(torch.zeros(2, 6, 30), TextCondition(tokens.masked_fill(~mask[:, 0], 9), mask))
    y, counts = characters(batch)
    assert counts.tolist() == [5, 10] and y.shape == (2, 10)
    assert model().said(batch) == said


def test_a_text_that_has_no_room_is_named():
    recognizer, whole = model(), texts.batch(((9, 12), (5, 24)))
    with pytest.raises(InputError, match="item 0 of speech needs 9 frames for its 9 characters, and has 6 of 2"):
        recognizer.loss(whole, KeyedGenerator(0, whole.index, "train"))
    assert recognizer.log_likelihood(whole).nonfinite.tolist() == [0]


FEW = ((3, 14), (2, 12))


def learnt(criterion: str, steps: int = 50, rate: float = 4e-2, **options) -> Recognizer:
    recognizer, whole = model(criterion, **options), texts.batch(FEW)
    optimizer = torch.optim.Adam(recognizer.core.parameters(), lr=rate)
    for step in range(steps):
        optimizer.zero_grad()
        recognizer.loss(whole, KeyedGenerator(0, whole.index, "train", step)).value.backward()
        optimizer.step()
    return recognizer


@pytest.mark.parametrize("criterion", ["ctc", "attention", "joint"])
def test_it_learns_what_is_said_and_writes_it_down(criterion):
    recognizer, whole = learnt(criterion, **({} if criterion == "ctc" else {"smoothing": 0.0})), texts.batch(FEW)
    for beam in (1, 4):
        found = recognizer.transcribe(whole, Search(beam=beam), weights="raw")
        assert [recognizer.written(one[0]) for one in found] == recognizer.said(whole)
    best = found[1][0]
    nats = recognizer.log_likelihood(whole, weights="raw").nats
    assert best.score == pytest.approx(float(nats[1]), abs=1e-2)


def rescoring_error(recognizer: Recognizer) -> float:
    """How far the scores of a joint model's search are from w log p(CTC) + (1 - w) log p(decoder), w = 0.3."""
    whole, core, errors = texts.batch(FEW), recognizer.core.eval(), []
    h, frames = recognizer.encode(whole, core)
    for k, (found, proposed) in enumerate(zip(recognizer.transcribe(whole, Search(beam=6), weights="raw"),
                                              core.ctc.search(h, frames, Search(beam=6)), strict=True)):  # fmt: skip
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        first = dict(proposed)
        assert set(first) == {one.tokens for one in found}
        for text, score in found:
            one = h[k : k + 1], frames[k : k + 1], padded_tokens([text])[0], torch.tensor([len(text)])
            ctc, decoder = (float(part.log_prob(*one).detach()) for part in (core.ctc, core.decoder))
            errors.append(abs(score - (first[text] - ctc) - 0.3 * ctc - 0.7 * decoder))
    return max(errors)


def test_a_joint_search_weighs_both():
    recognizer = model("joint", decoder={"hidden": 8, "dropout": 0.0})
    assert rescoring_error(recognizer) < 1e-4
    recognizer.ctc_weight = 0.7  # what a swap of the weights would do
    assert rescoring_error(recognizer) > 1e-2


def test_a_transducer_learns():
    few = texts.batch(FEW)
    before, after = (learnt("transducer", steps, 2e-2).log_likelihood(few, weights="raw").nats for steps in (0, 20))
    assert float(after.sum()) > float(before.sum()) / 2


def test_scheduled_sampling_and_expected_errors_train(monkeypatch):
    recognizer, whole = model("attention", mwer=3, sampled=0.5), texts.batch(SIZES)
    loss = recognizer.loss(whole, KeyedGenerator(0, whole.index, "train"))
    assert set(loss.parts) == {"attention", "wrong_words"}
    torch.testing.assert_close(loss.per_example.detach(), loss.parts["wrong_words"] + 0.01 * loss.parts["attention"])
    recognizer.train()
    searched, modes = Recognizer._searched, []
    monkeypatch.setattr(Recognizer, "_searched", lambda self, core, *rest: (
        modes.append(core.training), searched(self, core, *rest))[1])
    recognizer.loss(whole, KeyedGenerator(0, whole.index, "train"))
    assert modes == [False] and recognizer.core.training  # its lists are made without dropout
    for criterion in ("ctc", "transducer"):
        sharp = learnt(criterion, 3, mwer=3, mwer_keep=0.5)
        assert all(bool(p.isfinite().all()) for p in sharp.core.parameters())


def test_a_stream_ends_with_what_is_heard_of_the_whole():
    recognizer = model(net={"attention": "xl_chunks"})
    whole = texts.batch(((3, 200),))
    heard = list(recognizer.stream(whole))
    assert len(heard) == 7 and heard[-1] == recognizer.written(recognizer.transcribe(whole)[0][0])
    assert all(later.startswith(sooner) for sooner, later in zip(heard, heard[1:], strict=False))
    with pytest.raises(InputError, match="stream is for"):
        next(model().stream(whole))


def test_a_stream_of_triggered_attention_ends_with_what_is_heard_of_the_whole():
    recognizer = model("joint", net={"attention": "xl_chunks"})
    whole, core = texts.batch(((3, 200),)), recognizer.weights("ema")
    core.ctc.head.bias.data[0] = -1.0  # several characters
    core.decoder.head.bias.data[0] = -4.0
    heard, (found,) = list(recognizer.stream(whole)), recognizer.transcribe(whole)
    assert len(heard) == 7 and heard[-1] == recognizer.written(found[0])
    assert len(set(heard)) > 3
    assert all(later.startswith(sooner) for sooner, later in zip(heard, heard[1:], strict=False))
    (by_path,) = core.ctc.search(*recognizer.encode(whole, core), Search())
    assert heard[-1] != recognizer.written(by_path[0])
    text = TextCondition(*padded_tokens([[k + 1 for k in found[0].tokens]]))
    assert float(recognizer.log_likelihood(replace(whole, cond=text)).nats) == pytest.approx(found[0].score, abs=1e-4)


@pytest.mark.parametrize("said", ["so it is", " so it is "])
def test_words_have_times_and_texts_end_in_no_space(said):
    recognizer, whole = model(), texts.batch(((3, 40),))
    found = Hypothesis(tuple(k - 1 for k in recognizer.symbols.encode(said)), 0.0)
    assert recognizer.written(found) == "so it is"
    words = recognizer.times(whole, found)
    assert [word for word, _, _ in words] == said.split()
    others = [Hypothesis((*found.tokens[:-1], *more), -1.0) for more in ((), found.tokens[-1:])]
    recognizer._searched = lambda *_: [[others[0], found, others[1]]]
    assert recognizer.transcribe(whole)[0] == [others[0], found][: 1 + (said == "so it is")]
    ends = [0.0, *(second for _, begin, end in words for second in (begin, end))]
    assert ends == sorted(ends) and ends[-1] <= 40 * 256 / 22050 + 1e-9
    frame = 2 * 256 / 22050
    assert all(second / frame == pytest.approx(round(second / frame)) for second in ends)
    with pytest.raises(InputError, match="criterion=transducer"):
        model("transducer").times(whole, found)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="has no texts"):
        Recognizer(replace(texts.spec(), text=None))
    with pytest.raises(InputError, match="is a denoiser: model=recognizer takes model.net=pyramid"):
        model(net={"_target_": NETWORKS["unet"]})
    with pytest.raises(InputError, match="genmodels transcribe"):
        model().draw(SamplingOptions())
    with pytest.raises(InputError, match="by=attention: this model has criterion=ctc"):
        model().log_likelihood(texts.batch(SIZES), by="attention")
    for options, said in (({"criterion": "ctc", "decoder": {"hidden": 8}}, "model.decoder is for"),
                          ({"criterion": "attention", "decoder": {"delay": 2}}, "needs triggers"),
                          ({"mwer": 1}, "2 or more"), ({"sampled": 1.5}, "from 0 to 1"),
                          ({"smoothing": 0.2}, "model.smoothing is for model.criterion=attention or joint, not ctc"),
                          ({"criterion": "attention", "ctc_weight": 0.5}, "ctc_weight is for model.criterion=joint")):
        with pytest.raises(InputError, match=said):
            Recognizer(texts.spec(), **options)
