"""model=glow_tts: a density of noisy mels given texts, the same alone and in a batch, and its samples."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genmodels.cli.main import main
from genmodels.core.data import DataSpec, TextCondition
from genmodels.core.errors import InputError
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.data.speech import Speech
from genmodels.data.utterances import FLOOR
from genmodels.models import glow_tts
from genmodels.models.glow_tts import GlowTTS, stream_text
from genmodels.models.mels import MelUnits, alone, with_noise
from genmodels.models.text_model import TextReader
from genmodels.speech.text import Symbols
from genmodels.speech.text_encoder import TextEncoder
from tests.models.texts import ENCODER, N_MELS, batch, spec
from tests.parameters import scattered_model

SMALL = {"encoder": ENCODER, "steps": 2, "hidden": 8, "depth": 1,
         "duration_channels": 8, "speaker_channels": 4}


def model(speakers: tuple[str, ...] = (), **options) -> GlowTTS:
    torch.manual_seed(0)
    found = GlowTTS(spec(speakers), **SMALL | options)
    found.initialize(batch(speaker=bool(speakers)))
    return scattered_model(found)


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


def test_streams_refuse_the_options_that_samples_refuse():
    with pytest.raises(InputError, match="glow_tts has no sampling option 'guidance'"):
        stream_text(model(), "a cab", guidance=2.0)


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
    for wrong, reason in (({"seconds": 0.01}, r"at least 7 frames; seconds=0.08"), ({"speed": 0.0}, "speed"),
                          ({"speed": 1e-9}, "frames are too many for one text"),
                          ({"durations": [[1, 2]]}, "7 tokens"),
                          ({"durations": [[1, 2, 0, 1, 1, 1, 1]]}, "token 2 of text 0 lasts 0 frames"),
                          ({"durations": [[1, 2, True, 1, 1, 1, 1]]}, "token 2 of text 0 lasts True frames"),
                          ({"durations": [[1, 2, 2**70, 1, 1, 1, 1]]}, "token 2 of text 0 lasts"),
                          ({"durations": []}, "a list of numbers of frames for each text, got"),
                          ({"durations": [2, 1]}, "a list of numbers of frames for each text, got"),
                          ({"durations": [[9] * 7], "seconds": 3.0}, "come to 0.73 s, not to seconds=3"),
                          ({"cond": "bob"}, "one voice"),
                          ({"temperature": -1.0}, "temperature")):
        with pytest.raises(InputError, match=reason):
            found.sample(1, text="bad dad", **wrong)
    for text, reason in (("", "examples|no letters"), ("?!", "no letters"), ("a # b", "'#' at position 2")):
        with pytest.raises(InputError, match=reason):
            found.sample(1, text=[text])
    assert found.sample(1, text="a # b", on_unknown="drop").cond.tokens.tolist() == [[2, 28, 3]]
    for text in ("\u043f\u0440\u0438\u0432\u0435\u0442", "\u043f, !"):  # dropped, nothing is left to synthesise
        with pytest.raises(InputError, match="has no letters that this model was trained on"):
            found.sample(1, text=text, on_unknown="drop")
    reader = TextReader(found.spec)
    assert reader.tokens("%") == reader.tokens("percent")


def test_speakers_by_name():
    found = model(("anna", "ben"))
    anna, ben = (found.sample(1, cond=name, text="a cab", temperature=0.0, durations=[[2] * 5]).x
                 for name in ("anna", "ben"))
    assert not torch.allclose(anna, ben, atol=1e-3)
    with pytest.raises(InputError, match="there are anna, ben"):
        found.sample(1, cond="cid", text="a cab")
    assert found.log_likelihood(batch(speaker=True)).nats.isfinite().all()


def test_speakers_whose_names_are_numbers():
    found = model(("1", "84"))
    mels = [found.sample(1, cond=name, text="a cab", temperature=0.0, durations=[[2] * 5]).x
            for name in (1, "1", 84, "84", 0)]
    assert torch.equal(mels[0], mels[1]) and torch.equal(mels[2], mels[3]) and torch.equal(mels[4], mels[0])
    assert not torch.allclose(mels[0], mels[2], atol=1e-3)


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
    with pytest.raises(ValueError, match="heads=4 is for an attention block"):
        model(heads=4)
    with pytest.raises(InputError, match="no texts"):
        GlowTTS(DataSpec("digits", (1, 8, 8), levels=17))
    from genmodels.models.normalizing_flows import Glow

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


# ---- what a speaking model learns: one clip by heart, and from twenty minutes which transcripts are wrong. Slow ----


STEPS, RATE = 300, 2e-3
WRONG = 0.05  # share of transcripts that belong to other clips


def overfitted() -> tuple[float, float, float]:
    """(L1 of the log-mel at the found durations, entropy of the alignment before, after) of one shipped clip."""
    torch.manual_seed(0)
    data = Speech(batch_size=1).prepare()
    clip = next(iter(data.loader("train", 1)))
    model = GlowTTS(data.spec, encoder={"channels": 96, "depth": 2, "hidden": 192, "dropout": 0.0}, steps=4, hidden=64,
                    depth=2, dropout=0.0, duration_channels=96, ema_decay=0.0)

    def entropy() -> float:
        """Nats a frame of the posterior of its token."""
        model.eval()
        p = model.posterior(clip, "raw").clamp(1e-12, 1)
        model.train()
        return float(-(p * p.log()).sum() / clip.mask.sum())

    model.initialize(clip)
    before = entropy()
    optimizer = torch.optim.Adam(model.core.parameters(), lr=RATE)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20)
        optimizer.zero_grad()
        model.loss(clip, KeyedGenerator(step, clip.item_index, "overfit")).value.backward()
        torch.nn.utils.clip_grad_norm_(model.core.parameters(), 5)
        optimizer.step()
    after = entropy()
    model.eval()
    said = clip.cond.tokens[0, clip.cond.mask[0, 0]].tolist()
    found = model.aligned(clip, "raw").durations[0, clip.cond.mask[0, 0]].tolist()
    text = Symbols(tuple(data.spec.text["symbols"]), data.spec.text["blanks"]).decode(said)
    spoken = model.sample(1, temperature=0, text=text, durations=[found], weights="raw")
    frames = int(clip.mask.sum())
    return float((spoken.x[0, :, :frames] - clip.x[0, :, :frames]).abs().mean()), before, after


@pytest.mark.slow
def test_one_clip_is_learnt_by_heart(monkeypatch):
    far, before, after = overfitted()
    assert far < 0.3 and after < before / 2
    # Without a gradient into the means the text says nothing, and the same steps come nowhere near.
    whole = TextEncoder.forward

    def detached(self, *inputs):
        h, mu, log_sigma = whole(self, *inputs)
        return h, mu.detach(), log_sigma

    monkeypatch.setattr(TextEncoder, "forward", detached)
    assert overfitted()[0] > 0.6


@pytest.mark.slow
def test_wrong_transcripts_stand_first_by_the_evidence(tmp_path, monkeypatch, shared_data):
    """A model trained on texts of which one in twenty belongs to another clip, without being told which, finds them."""
    source, root = shared_data / "LJSpeech-sample", tmp_path / "data"
    if not source.is_dir():
        pytest.skip(f"no LJSpeech-sample in {shared_data}")
    root.mkdir()
    (root / "wavs").symlink_to(source / "wavs")
    rows = [line.split("|") for line in (source / "metadata.csv").read_text().splitlines()]
    chosen = random.Random(0).sample(range(len(rows)), round(WRONG * len(rows)))
    texts = [rows[k][1:] for k in chosen]
    for k, text in zip(chosen, texts[1:] + texts[:1], strict=True):
        rows[k][1:] = text
    (root / "metadata.csv").write_text("\n".join(map("|".join, rows)) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=glow_tts", "data=speech", "data.layout=ljspeech", f"data.root={root}", "run_dir=run",
                 "data.blanks=false", "data.max_frames=1600", "model.steps=4", "model.dropout=0.1", "logger=csv",
                 "model.optimizer.lr=2e-3", "trainer.max_steps=1500", "trainer.validate_every_n_steps=1500",
                 "trainer.sample_every_n_steps=0", "trainer.progress=false"]) == 0  # fmt: skip
    assert main(["evaluate", "ckpt=run/last.ckpt", "split=train", "audit=true", "stages=[likelihood]",
                 "out=audit.json"]) == 0  # fmt: skip
    ranking = json.loads((tmp_path / "audit.json").read_text())["audit"]
    wrong = {rows[k][0] for k in chosen} & {Path(row["name"]).stem for row in ranking}

    def found(order: list[dict]) -> float:
        """Share of the wrong transcripts among the first tenth."""
        return len(wrong & {Path(row["name"]).stem for row in order[: len(order) // 10]}) / len(wrong)

    assert len(wrong) >= 5 and found(sorted(ranking, key=lambda row: row["rank_by_evidence"])) >= 0.8
    # The likelihood of the sound alone says how well clips are known, and does not find them.
    assert found(ranking) < 0.8
