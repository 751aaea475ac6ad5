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
from genmodels.data.utterances import padded_tokens
from genmodels.models.mels import alone
from genmodels.models.recognizer import Recognizer, characters
from genmodels.speech.text import Symbols
from tests.models import texts

SIZES = ((3, 19), (5, 24), (2, 12))


def model(**options) -> Recognizer:
    torch.manual_seed(0)
    net = {"channels": 8, "depth": 1, "heads": 2, "hidden": 8, "convolution": 3, "dropout": 0.0}
    return texts.scattered(Recognizer(texts.spec(), net=net, **options))


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


def test_an_item_is_itself_in_a_batch(monkeypatch):
    assert item_error(model()) < 1e-4
    encode = Recognizer.encode
    monkeypatch.setattr(Recognizer, "encode", lambda self, batch, core: encode(self, replace(batch, mask=None), core))
    assert item_error(model()) > 1e-2


def test_the_likelihood_is_one_of_texts():
    recognizer, whole = model(), texts.batch(SIZES)
    found = recognizer.log_likelihood(whole)
    assert found.kind == "exact" and found.dims.tolist() == [3, 5, 2] and found.made["given"] == "mel"
    loss = recognizer.loss(whole, KeyedGenerator(0, whole.index, "train")).per_example
    torch.testing.assert_close(-found.nats / found.dims, loss.detach().double(), rtol=1e-4, atol=1e-5)
    assert found.mean_bits_per_dim() == pytest.approx(-float(found.nats.sum()) / 10 / math.log(2))
    assert recognizer.modelled.unit == "bits_per_character"


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


def test_it_learns_what_is_said_and_writes_it_down():
    recognizer, whole = model(), texts.batch(SIZES)
    optimizer = torch.optim.Adam(recognizer.core.parameters(), lr=2e-2)
    for step in range(80):
        optimizer.zero_grad()
        recognizer.loss(whole, KeyedGenerator(0, whole.index, "train", step)).value.backward()
        optimizer.step()
    for beam in (1, 4):
        found = recognizer.transcribe(whole, beam=beam, weights="raw")
        assert [recognizer.written(one[0]) for one in found] == recognizer.said(whole)
    best = recognizer.transcribe(whole, beam=8, weights="raw")[1]
    nats = recognizer.log_likelihood(whole, weights="raw").nats
    assert best[0].score == pytest.approx(float(nats[1]), abs=1e-3)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="has no texts"):
        Recognizer(replace(texts.spec(), text=None))
    with pytest.raises(InputError, match="beam must be at least 1"):
        model().transcribe(texts.batch(SIZES), beam=0)
    with pytest.raises(InputError, match="genmodels transcribe"):
        model().draw(SamplingOptions())
