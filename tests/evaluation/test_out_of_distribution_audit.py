"""The audit ranks by likelihood, and scores against length as a straight line says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError
from genmodels.core.likelihood import Likelihood
from genmodels.data.base import DataModule
from genmodels.data.utterances import padded_tokens
from genmodels.evaluation import out_of_distribution as module
from genmodels.evaluation.checkpoint import Opened, Request
from genmodels.evaluation.out_of_distribution import against_length, audit, neighbours, picture_of_audit
from genmodels.evaluation.speech import audit_notes
from genmodels.models.glow_tts import GlowTTS
from genmodels.speech.text import CHARACTERS

SIZES = [(3, 9), (5, 14), (2, 6), (4, 22), (6, 30)]


def spec() -> DataSpec:
    text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["a cab"]}
    return DataSpec("speech", (6, 64), mel={"sample_rate": 22050, "hop": 256}, statistics={"mean": -5.0, "std": 2.0},
                    text=text)


class Utterances:
    """A data module of a few random mels, given in batches whose order is not that of the items."""

    layout = None
    items = DataModule.items

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.mels = [-5 + (5 - k) * torch.randn(6, t, generator=generator) for k, (_, t) in enumerate(SIZES)]
        self.tokens = [[2 + (k + i) % 20 for i in range(n)] for k, (n, _) in enumerate(SIZES)]

    def split(self, name):
        items = [SimpleNamespace(name=f"{k}.wav", text=f"text {k}") for k in range(len(SIZES))]
        return type("Split", (list,), {"items": items})(items)

    def loader(self, split, size, indices):
        order = indices.tolist()[::-1]
        for first in range(0, len(order), size):
            rows = order[first : first + size]
            longest = max(self.mels[k].shape[1] for k in rows)
            x = torch.full((len(rows), 6, longest), -11.5)
            for row, k in zip(x, rows, strict=True):
                row[:, : self.mels[k].shape[1]] = self.mels[k]
            mask = torch.stack([torch.arange(longest) < self.mels[k].shape[1] for k in rows])[:, None]
            tokens, valid = padded_tokens([self.tokens[k] for k in rows])
            yield Batch(x, TextCondition(tokens, valid), mask, torch.tensor(rows))


def of_all(opened: Opened) -> Likelihood:
    loader = opened.datamodule.loader("test", 2, torch.arange(opened.items))
    return Likelihood.concatenate([opened.model.log_likelihood(batch) for batch in loader]).in_index_order()


@pytest.fixture(scope="module")
def frame():
    torch.manual_seed(0)
    model = GlowTTS(spec(), encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1,
                    duration_channels=8).eval()
    opened = Opened(None, model, {}, Utterances(), Request(audit=True, batch_size=2), len(SIZES))
    return SimpleNamespace(opened=opened, once=lambda stage, settings, compute: compute())


def test_the_ranking_is_by_likelihood_and_tells_durations(frame):
    likelihood = of_all(frame.opened)
    rows = audit(frame, likelihood)
    # Each utterance alone, by the model itself.
    alone = {}
    for k in range(len(SIZES)):
        (batch,) = frame.opened.datamodule.loader("test", 1, torch.tensor([k]))
        found = frame.opened.model.log_likelihood(batch)
        alone[k] = float(-found.nats / found.dims)
        said = frame.opened.model.aligned(batch).durations[0].tolist()
        (row,) = [row for row in rows if row.index == k]
        assert row.nats_per_dim == pytest.approx(alone[k], rel=1e-4)
        assert row.durations == said and row.frames == sum(said) == SIZES[k][1] + SIZES[k][1] % 2
        assert row.longest.frames == max(said) == said[row.longest.position]
        assert row.tokens == [CHARACTERS[t] for t in frame.opened.datamodule.tokens[k]]
        assert (row.name, row.text) == (f"{k}.wav", f"text {k}")
    assert [row.index for row in rows] == sorted(alone, key=alone.get, reverse=True)
    assert [row.rank for row in rows] == [1, 2, 3, 4, 5]
    by_nats = likelihood.nats.argsort().tolist()
    assert [row.index for row in rows] != by_nats  # nats not divided by dimensions rank by length
    assert f"{rows[0].index}.wav" in audit_notes(rows)[1] and len(audit_notes(rows)) == 12
    assert picture_of_audit(frame.opened, rows).width > 300


def test_the_evidence_for_texts_is_that_of_the_model(frame):
    """Each utterance against all others here, whose texts are shorter than its sound; the least first in the notes."""
    rows = audit(frame, of_all(frame.opened))
    data = frame.opened.datamodule
    for row in rows:
        k = row.index
        (batch,) = data.loader("test", 1, torch.tensor([k]))
        others = [tokens for j, tokens in enumerate(data.tokens) if j != k and len(tokens) <= row.frames]
        assert row.evidence == pytest.approx(float(frame.opened.model.evidence(batch, [others])), abs=1e-5)
    notes = audit_notes(rows)[7:]
    least = min(rows, key=lambda row: row.evidence)
    assert f"{least.name} " in notes[0] and len(notes) == len(rows)
    assert [row.name for row in rows] != [line.split(": ")[1].split()[0] for line in notes]


def test_texts_to_compare_with_are_near_in_length_and_others():
    said = {k: ([k + 1] * (k + 1), 40) for k in range(20)} | {20: ([11] * 11, 40), 21: ([9] * 41, 50)}
    found = neighbours(said, 10, count=4)  # item 20 says the same as item 10
    assert found == [[10] * 10, [12] * 12, [9] * 9, [13] * 13]
    assert all(len(text) <= 40 for text in neighbours(said, 10, count=99)) and len(neighbours(said, 10, count=99)) == 19
    assert neighbours({0: ([1], 5)}, 0) == []


def test_scores_are_those_of_a_line_fitted_by_numpy():
    generator = np.random.default_rng(0)
    frames = generator.integers(20, 900, 40).astype(float)
    values = 1.2 - 0.1 * np.log(frames) + 0.05 * generator.standard_normal(40)
    values[7] += 0.6
    slope, level = np.polyfit(np.log(frames), values, 1)
    rest = values - level - slope * np.log(frames)
    expected = rest / np.sqrt((rest**2).sum() / 38)
    found = against_length(torch.tensor(values), torch.tensor(frames))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)
    assert int(found.argmax()) == 7 and float(found[7]) > 4
    # Length alone is no fault: what lies on the line is not far from it, whatever its value.
    assert abs(float(found[int(frames.argmin())])) < 2.5
    wrong = (values - values.mean()) / values.std(ddof=2)
    assert np.abs(wrong - expected).max() > 0.1  # scores that forget length are seen


def test_scores_without_enough_to_say():
    three = torch.tensor([10.0, 20.0, 30.0])
    assert against_length(torch.tensor([1.0, 2.0]), three[:2]) is None
    assert against_length(torch.tensor([1.0, torch.inf, 2.0]), three) is None
    assert against_length(torch.ones(3), three) is None
    found = against_length(torch.tensor([1.0, 2.0, 1.5, torch.inf]), torch.tensor([10.0, 20.0, 30.0, 40.0]))
    assert found[:3].isfinite().all() and found[3] == torch.inf


def test_data_without_texts_are_refused():
    model = SimpleNamespace(spec=DataSpec("digits", (1, 8, 8), levels=17))
    with pytest.raises(InputError, match="audit: digits has no texts"):
        audit(SimpleNamespace(opened=Opened(None, model, {}, None, Request(), 1)), None)


def test_a_model_without_alignments_has_no_durations(frame, monkeypatch):
    likelihood = of_all(frame.opened)
    monkeypatch.setattr(module, "_aligned", lambda opened: None)
    rows = audit(frame, likelihood)
    assert rows[0].durations is None and "longest" not in audit_notes(rows)[1]


class Clerk:
    """A recogniser that writes how long a mel is and, as the text, how many characters are said."""

    generates, family, spec, device = False, "recognizer", spec(), torch.device("cpu")

    def said(self, batch):
        return ["a" * int(n) for n in batch.cond.mask.sum((1, 2))]

    def transcribe(self, batch, how, weights):
        assert how.beam == 3
        return [["b" * int(n)] for n in batch.mask.sum((1, 2))]

    def written(self, found):
        return found


def test_a_recogniser_says_what_it_heard_in_each_utterance(frame):
    opened = Opened(None, Clerk(), {}, Utterances(), Request(audit=True, beam=3), len(SIZES))
    counts = torch.tensor([n for n, _ in SIZES])
    nats = -torch.tensor([3.0, 30.0, 4.0, 40.0, 1.0])
    likelihood = Likelihood(nats, "exact", counts, 36, None, {}, torch.arange(len(SIZES)))
    clerk = SimpleNamespace(opened=opened, once=frame.once, request=opened.request, arrays={})
    rows = audit(clerk, likelihood)
    assert [row.index for row in rows] == [3, 1, 2, 0, 4]
    # A mutant that takes transcripts in the order of the batches fails here.
    assert all((len(row.heard), row.frames) == SIZES[row.index][::-1] for row in rows)
    assert "10.000 nats/character" in audit_notes(rows)[1] and f'heard "{"b" * 22}"' in audit_notes(rows)[1]
    assert len(audit_notes(rows)) == 1 + len(SIZES)


def test_it_is_done_when_asked_for():
    assert Request(audit=True).wants("audit") and Request(audit=True, stages=["cost"]).wants("audit")
    assert not Request().wants("audit")
