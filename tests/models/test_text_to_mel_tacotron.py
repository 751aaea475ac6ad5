"""The autoregressive baseline as a model: its contract, items under padding, and what it cannot be conditioned on."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.models.build import construct
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.text_to_mel import MelDDPM, MelEnergy, Tacotron
from genmodels.speech.text import CHARACTERS
from tests.parameters import scattered

TEXTS = ["a cab", "hello, you", "so"]


def spec(**changed) -> DataSpec:
    texts = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": TEXTS}
    given = {"mel": {"sample_rate": 22050, "hop": 256}, "statistics": {"mean": -5.0, "std": 2.0}, "text": texts}
    return DataSpec("speech", (4, 40), **{**given, **changed})


def model(attention: str = "location", **changed) -> Tacotron:
    torch.manual_seed(0)
    found = Tacotron(spec(**changed), encoder={"channels": 8, "depth": 1, "hidden": 8}, attention=attention, hidden=8,
                     prenet=8, ema_decay=0)
    scattered(found.core, 0.3, seed=0)
    return found.eval()


def batch(speaker=None) -> Batch:
    torch.manual_seed(1)
    mask = torch.arange(12) < torch.tensor([12, 7, 4])[:, None, None]
    x = torch.where(mask, torch.randn(3, 4, 12) * 2 - 5, 77.0)
    text_mask = torch.arange(5) < torch.tensor([5, 3, 2])[:, None, None]
    return Batch(x, TextCondition(torch.randint(2, 30, (3, 5)), text_mask, speaker), mask, torch.tensor([4, 9, 2]))


def alone(whole: Batch, k: int) -> Batch:
    one, n, t = whole.rows(slice(k, k + 1)), int(whole.cond.mask[k].sum()), int(whole.mask[k].sum())
    cond = TextCondition(one.cond.tokens[:, :n], one.cond.mask[:, :, :n], one.cond.speaker)
    return Batch(one.x[:, :, :t], cond, one.mask[:, :, :t], one.index)


@pytest.mark.parametrize("attention", ["additive", "location", "local_monotonic"])
def test_an_item_is_itself_in_a_batch(attention):
    tacotron, whole = model(attention), batch()
    together = tacotron.log_likelihood(whole)
    assert together.kind == "lower_bound" and together.dims.tolist() == [48, 32, 16]
    for k in range(3):
        found = tacotron.log_likelihood(alone(whole, k))
        assert found.nats[0] == pytest.approx(float(together.nats[k]), rel=1e-5)
        generator = KeyedGenerator(0, whole.index[k : k + 1], "train")
        loss = tacotron.loss(alone(whole, k), generator).per_example[0]
        all_of_them = tacotron.loss(whole, KeyedGenerator(0, whole.index, "train")).per_example[k]
        assert float(loss.detach()) == pytest.approx(float(all_of_them.detach()), rel=1e-5)


def test_the_density_is_that_of_the_data():
    # The volume of whitening, D log 2, is in the likelihood: other units of the same model's latent shift it by that.
    one, other = model(), model(statistics={"mean": -10.0, "std": 4.0})
    one.units.noise = other.units.noise = 0.0
    whole = alone(batch(), 0)
    doubled = Batch(whole.x * 2, whole.cond, whole.mask, whole.index)
    shift = one.log_likelihood(whole).nats - other.log_likelihood(doubled).nats
    assert float(shift) == pytest.approx(48 * math.log(2), abs=1e-3)


def test_samples_are_themselves_and_in_their_units():
    tacotron = model()
    drawn = tacotron.sample(5, max_frames=9)
    assert drawn.durations.sum(1).equal(drawn.mask.sum((1, 2)))
    assert drawn.x.masked_select(~drawn.mask).eq(math.log(1e-5)).all()
    for k in range(5):
        one = tacotron.sample(1, start=k, max_frames=9)
        torch.testing.assert_close(one.x[0], drawn.x[k, :, : one.x.shape[2]], atol=1e-5, rtol=0)
    # The fourth is the first text's second take: other noise, another mel.
    assert (drawn.x[3] - drawn.x[0]).abs().max() > 1e-4
    assert len(drawn.made["words_missing_repeated"]) == 5


def test_durations_count_the_frames_of_the_largest_weights_of_any_sign():
    """Raw scores of local monotonic attention have signs."""
    tacotron, seen = model("local_monotonic"), []
    torch.nn.init.constant_(tacotron.core.tacotron.stop.bias, -50.0)
    sample = tacotron.core.tacotron.sample
    tacotron.core.tacotron.sample = lambda *given, **options: seen.append(sample(*given, **options)) or seen[0]
    drawn = tacotron.sample(2, max_frames=12, weights="raw")
    assert (seen[0].weights < 0).any()
    looked = seen[0].weights.abs().argmax(1, keepdim=True) == torch.arange(drawn.durations.shape[1])[:, None]
    assert drawn.durations.equal((looked & seen[0].mask).sum(2))


def test_a_mel_without_a_stop_is_reported(monkeypatch):
    # Not by caplog: what other tests of the same process have done to logging would count.
    messages = []
    logger = logging.getLogger("genmodels.models.text_to_mel")
    monkeypatch.setattr(logger, "warning", lambda text, *values: messages.append(text % values))
    tacotron = model()
    with torch.no_grad():
        tacotron.core.tacotron.stop.bias.fill_(-50.0)
    drawn = tacotron.sample(2, text="so")
    assert drawn.made["not_stopped"] == [0, 1] and drawn.mask.sum((1, 2)).tolist() == [140, 140]
    assert len(messages) == 1 and messages[0].startswith("2 of 2 mels did not stop")
    with torch.no_grad():
        tacotron.core.tacotron.stop.bias.fill_(50.0)
    assert tacotron.sample(2, text="so").made["not_stopped"] == []


def test_what_it_cannot_be_conditioned_on():
    tacotron = model()
    for options in ({"speed": 2.0}, {"seconds": 1.0}, {"durations": [[1, 1]]}):
        with pytest.raises(InputError, match=f"{next(iter(options))}: a tacotron stops by itself"):
            tacotron.sample(1, **options)
    for most in (0, -1):
        with pytest.raises(InputError, match=f"max_frames must be at least 1, got {most}"):
            tacotron.sample(1, max_frames=most)
    with pytest.raises(InputError, match="one voice"):
        tacotron.sample(1, 1)
    with pytest.raises(InputError, match="temperature must be a finite number"):
        tacotron.sample(1, temperature=-1.0)
    with pytest.raises(InputError, match="has no texts"):
        Tacotron(spec(text=None))
    with pytest.raises(InputError, match="additive, location, location_previous, scaled_dot, hard, local_monotonic"):
        Tacotron(spec(), attention="dot")


KINDS = {kind.__name__: kind for kind in (Tacotron, GlowTTS, MelDDPM, MelEnergy)}
SIZES = [(kind, path, 0) for kind, paths in {
    "Tacotron": ("hidden", "prenet", "speaker_channels", "encoder.channels", "encoder.hidden", "encoder.heads"),
    "GlowTTS": ("hidden", "steps", "depth", "kernel_size", "duration_channels", "speaker_channels", "groups",
                "encoder.channels"),
    "MelDDPM": ("duration_channels", "speaker_channels", "encoder.hidden", "net.channels", "net.blocks"),
    "MelEnergy": ("duration_channels", "speaker_channels", "encoder.heads", "net.channels"),
}.items() for path in paths] + [("Tacotron", "postnet", -1), ("Tacotron", "encoder.depth", -1)]  # fmt: skip


@pytest.mark.parametrize("kind, path, small", SIZES, ids=[f"{kind} {path}" for kind, path, _ in SIZES])
def test_sizes_that_cannot_be_are_refused_by_name(kind, path, small, refuses):
    """Also of the other models of texts, which share the encoder: one line, from 0 and from a negative number."""
    first, _, last = path.rpartition(".")
    for size in (small, -3):
        options = {first: {"channels": 8, last: size}} if first else {last: size}
        refuses(InputError, rf"{last}\b", construct, KINDS[kind], spec(speakers=("ann", "bob")), **options)


def test_speakers_are_conditioned_on():
    tacotron = model(speakers=("ann", "bob"))
    one, other = (tacotron.sample(1, who, text="so", max_frames=5).x for who in ("ann", "bob"))
    assert one.shape != other.shape or (one - other).abs().max() > 1e-5
    voices = [tacotron.log_likelihood(batch(torch.tensor(s))).nats for s in ([0, 0, 0], [1, 0, 0])]
    assert voices[0][0] != voices[1][0] and voices[0][1:].equal(voices[1][1:])


def test_it_learns():
    torch.manual_seed(0)
    tacotron = Tacotron(spec(), encoder={"channels": 8, "depth": 1, "hidden": 8}, hidden=32, prenet=16, dropout=0.0,
                        ema_decay=0).train()
    whole = alone(batch(), 0)
    optimizer, values = torch.optim.Adam(tacotron.core.parameters(), lr=2e-2), []
    for step in range(30):
        loss = tacotron.loss(whole, KeyedGenerator(0, whole.index, "train", step)).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < values[0] - 0.5
