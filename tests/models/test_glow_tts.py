"""model=glow_tts: a density of noisy mels given texts, the same alone and in a batch, and its samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from genmodels.core.data import DataSpec, TextCondition
from genmodels.core.errors import InputError
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.data.utterances import FLOOR
from genmodels.models import glow_tts
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.mels import MelUnits, with_noise
from tests.models.texts import ENCODER, N_MELS, alone, batch, scattered, spec

SMALL = {"encoder": ENCODER, "steps": 2, "hidden": 8, "depth": 1,
         "duration_channels": 8, "speaker_channels": 4}


def model(speakers: tuple[str, ...] = (), **options) -> GlowTTS:
    torch.manual_seed(0)
    found = GlowTTS(spec(speakers), **SMALL | options)
    found.initialize(batch(speaker=bool(speakers)))
    return scattered(found)


def worst_difference(found: GlowTTS, **options) -> float:
    data = batch()
    together = found.log_likelihood(data, **options)
    each = torch.cat([found.log_likelihood(alone(data, k), **options).nats for k in range(3)])
    return float((together.nats - each).abs().max())


@pytest.mark.parametrize("alignment", ["marginal", "best"])
def test_likelihood_in_a_batch_is_that_alone(alignment, monkeypatch):
    found = model()
    assert worst_difference(found, alignment=alignment) < 1e-3
    # Noise that depends on how long an item is padded is caught.
    monkeypatch.setattr("genmodels.models.mels.FrameKeyedGenerator", KeyedGenerator)
    assert worst_difference(found, alignment=alignment) > 1e-2


def test_both_alignments_are_labelled_and_in_order():
    found, data = model(), batch()
    marginal, best = (found.log_likelihood(data, alignment=kind) for kind in ("marginal", "best"))
    assert (marginal.kind, best.kind) == ("exact", "upper_bound") and marginal.made["noise"] == 0.05
    assert (marginal.nats <= best.nats + 1e-4).all()
    # The frame that makes a length even counts as data.
    assert marginal.dims.tolist() == [N_MELS * t for t in (10, 14, 6)]
    with pytest.raises(ValueError, match="one of marginal, best"):
        found.log_likelihood(data, alignment="viterbi")


def test_the_scale_of_the_data_is_in_the_density():
    data = batch()
    noise = KeyedGenerator(0, data.index)
    one, two = (MelUnits(DataSpec("s", (N_MELS, 64), mel={}, statistics={"mean": -5.0, "std": s})) for s in (1.0, 2.0))
    frames = data.mask.sum((1, 2))
    assert torch.allclose(one(data, noise)[1] - two(data, noise)[1], frames * N_MELS * math.log(2.0))
    band = MelUnits(DataSpec("s", (N_MELS, 64), mel={},
                             statistics={"mean": [-5.0] * N_MELS, "std": [1.0, 2.0, *[1.0] * (N_MELS - 2)]}))
    assert torch.allclose(band(data, noise)[1], -frames * math.log(2.0))
    assert not band(data, noise)[0][~data.mask.expand_as(data.x)].any()


def test_noise_has_its_width_and_a_floor_for_the_density():
    x = torch.full((2, N_MELS, 500), FLOOR)
    y = with_noise(x, 0.05, KeyedGenerator(0, torch.arange(2), "a"))
    assert float((y - x).abs().max()) < 0.0250001 and float((y - x).std()) == pytest.approx(0.05 / 12**0.5, rel=0.05)
    assert not torch.equal(y[0], y[1])
    step = [KeyedGenerator(0, torch.arange(2), "a", step=k) for k in (1, 2)]
    assert not torch.equal(with_noise(x, 0.05, step[0]), with_noise(x, 0.05, step[1]))


def test_loss_is_the_density_along_the_path_and_the_durations():
    found, data = model(), batch()
    found.train(False)
    loss = found.loss(data, KeyedGenerator(0, data.index, "likelihood"))
    best = found.log_likelihood(data, alignment="best", weights="raw")
    expected = -best.nats / best.dims
    # The same noise: the stream of a likelihood.
    assert torch.allclose(loss.parts["nll_per_dim"].double(), expected, atol=1e-4)
    assert torch.allclose(loss.per_example, loss.parts["nll_per_dim"] + loss.parts["duration"], atol=1e-5)


def test_a_sample_is_the_same_alone_in_a_batch_and_later():
    found = model()
    texts = ["a cab", "bad dad said no", "ha"]
    together = found.sample(6, text=texts, seed=5)
    for k, text in enumerate(texts):
        one = found.sample(1, text=text, seed=5)
        frames = int(one.mask.sum())
        assert int(together.mask[k].sum()) == frames
        assert torch.allclose(together.x[k, :, :frames], one.x[0], atol=1e-4)
        second = found.sample(1, text=texts, seed=5, start=3 + k)
        assert torch.allclose(together.x[3 + k, :, :frames], second.x[0, :, :frames], atol=1e-4)
        assert not torch.allclose(together.x[k, :, :frames], together.x[3 + k, :, :frames], atol=1e-2)
    assert (together.x[~together.mask.expand_as(together.x)] == FLOOR).all()
    assert not torch.equal(found.sample(1, text="ha", seed=6).x, found.sample(1, text="ha", seed=5).x)


def test_temperature_zero_speed_seconds_and_durations():
    found = model()
    still = [found.sample(1, text="bad dad", temperature=0.0, seed=s).x for s in (0, 1)]
    assert torch.equal(still[0], still[1])
    exact = found.sample(1, text="bad dad", seconds=0.5)
    assert int(exact.mask.sum()) == math.ceil(0.5 * 22050 / 256) == 44
    given = [[2, 1, 3, 1, 1, 2, 4]]
    assert found.sample(2, text="bad dad", durations=given).durations[1].tolist() == given[0]
    for wrong, reason in (({"seconds": 0.01}, r"7 frames at least; seconds=0.08"), ({"speed": 0.0}, "speed"),
                          ({"durations": [[1, 2]]}, "7 tokens"),
                          ({"durations": [[1, 2, 0, 1, 1, 1, 1]]}, "token 2 of text 0 lasts 0 frames"),
                          ({"durations": [[9] * 7], "seconds": 3.0}, "come to 0.73 s and seconds=3"),
                          ({"cond": "bob"}, "one voice"),
                          ({"temperature": -1.0}, "temperature")):
        with pytest.raises(InputError, match=reason):
            found.sample(1, text="bad dad", **wrong)
    for text, reason in (("", "examples|no letters"), ("?!", "no letters"), ("a # b", "'#' at position 2")):
        with pytest.raises(InputError, match=reason):
            found.sample(1, text=[text])
    assert found.sample(1, text="a # b", on_unknown="drop").cond.tokens.tolist() == [[2, 28, 3]]


def test_speakers_by_name():
    found = model(("anna", "ben"))
    anna, ben = (found.sample(1, cond=name, text="a cab", temperature=0.0, durations=[[2] * 5]).x
                 for name in ("anna", "ben"))
    assert not torch.allclose(anna, ben, atol=1e-3)
    with pytest.raises(InputError, match="there are anna, ben"):
        found.sample(1, cond="cid", text="a cab")
    assert found.log_likelihood(batch(speaker=True)).nats.isfinite().all()


def test_posterior_of_the_alignment_sums_to_one():
    found, data = model(), batch()
    posterior = found.posterior(data)
    frames = glow_tts.even_lengths(data).mask[:, 0]
    assert torch.allclose(posterior.sum(1)[frames], torch.ones(int(frames.sum())), atol=1e-4)
    assert not posterior.sum(1)[~frames].any()


def test_evidence_is_what_likelihoods_under_other_texts_come_to(monkeypatch):
    """The density of each mel under its own text and under two others, by the exact likelihood, item by item."""
    found, data = model(("anna", "ben")), batch(((3, 9), (5, 14), (2, 6)), speaker=True)
    others = [[[4, 9], [7, 7, 7, 7]], [[3] * 9, [6, 5]], [[8], [2, 3, 4, 5]]]

    def nats(k: int, tokens: list[int]) -> float:
        one = alone(data, k)
        text = torch.tensor([tokens])
        said = TextCondition(text, torch.ones(1, 1, len(tokens)).bool(), data.cond.speaker[k : k + 1])
        return float(found.log_likelihood(replace(one, cond=said)).nats)

    expected = []
    for k, texts in enumerate(others):
        own = data.cond.tokens[k, data.cond.mask[k, 0]].tolist()
        under = torch.tensor([nats(k, tokens) for tokens in texts], dtype=torch.float64).exp().mean().log()
        expected.append((nats(k, own) - float(under)) / (int(data.mask[k].sum()) + int(data.mask[k].sum()) % 2))
    assert found.evidence(data, others).tolist() == pytest.approx(expected, abs=1e-4)
    # Without the number of alignments a text is the better, the more alignments it has.
    monkeypatch.setattr("genmodels.speech.alignment.log_paths", lambda tokens, frames: torch.zeros(len(tokens)))
    assert max(abs(a - b) for a, b in zip(found.evidence(data, others).tolist(), expected, strict=True)) > 1e-2


def test_alignments_are_searched_in_full_precision_under_autocast():
    found, data = model(), batch()
    full = found.aligned(data)
    with torch.autocast("cpu", torch.bfloat16):
        half = found.aligned(data)
        loss = found.loss(data, KeyedGenerator(0, data.index, "train")).value
    assert half.scores.dtype == half.mu.dtype == torch.float32 and loss.isfinite()
    assert torch.allclose(half.scores, full.scores, rtol=0.05, atol=0.5)


def test_too_many_tokens_are_named_and_other_data_refused():
    with pytest.raises(InputError, match=r"item 0 has 12 tokens but only 6 frames.*items \[0\] of speech"):
        model().log_likelihood(batch(((12, 6),)))
    with pytest.raises(InputError, match="no texts"):
        GlowTTS(DataSpec("digits", (1, 8, 8), levels=17))
    from genmodels.models.glow import Glow

    with pytest.raises(InputError, match="model=glow_tts"):
        Glow(spec())


def test_frame_keyed_noise_depends_on_the_frame_alone():
    long, short = (FrameKeyedGenerator(0, torch.arange(3), "s").normal((3, 2, t)) for t in (20, 7))
    assert torch.equal(long[:, :, :7], short)
    row = FrameKeyedGenerator(0, torch.tensor([2]), "s").normal((1, 2, 7))
    assert torch.equal(row[0], short[2])
    assert abs(float(FrameKeyedGenerator(0, torch.arange(50), "s").normal((50, 20, 20)).std()) - 1) < 0.02
    plain = [KeyedGenerator(0, torch.arange(3), "s").normal((3, 2, t)) for t in (20, 7)]
    assert not torch.equal(plain[0][:, :, :7], plain[1])
