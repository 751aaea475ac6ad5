"""The autoregressive baseline: teacher forcing is free running fed the truth, masks are exact, stops are its own."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from genmodels.nn.attention.local import LocalMonotonic
from genmodels.nn.attention.seq2seq import ScoredAttention
from genmodels.speech.tacotron import AttentionKind, Tacotron, make_attention
from genmodels.speech.text_encoder import TextEncoder
from tests.parameters import scattered
from tests.speech.test_glow_tts import SYMBOLS, keyed, padded

KINDS = get_args(AttentionKind)
#: Attentions with frames per step: every attention, and steps that do not divide the lengths of the mels.
STEPS = [*((kind, 1) for kind in KINDS), ("location", 3), ("local_monotonic", 2)]


def model(attention: str = "location", **changed) -> Tacotron:
    torch.manual_seed(0)
    encoder = TextEncoder(SYMBOLS, 4, channels=8, depth=1, hidden=16)
    sizes = {"hidden": 12, "prenet": 6, **changed}
    return scattered(Tacotron(encoder, attention=attention, **sizes), 0.3, seed=0).double().eval()


def fed(taco: Tacotron, y, tokens, generator):
    """Means, stops and weights of single steps, each given the true frame before it."""
    memory = taco.remember(tokens)
    state, frame, said = taco.start(memory), torch.zeros_like(y[:, :, 0]), []
    kept = torch.cat([next(blocks) for blocks in [taco.factors(generator, len(y), y)] for _ in range(2)], 1)
    for step, some in enumerate(y.split(taco.frames_per_step, 2)):
        here, state = taco.step(frame, kept[:, step], state, memory)
        frame = some[:, :, -1]
        said.append(here)
    return [torch.cat(part, -1)[..., : y.shape[2]] for part in zip(*said, strict=True)]


@pytest.mark.parametrize(("attention", "frames"), STEPS)
def test_teacher_forcing_is_free_running_fed_the_truth(attention, frames, monkeypatch):
    taco, generator = model(attention, frames_per_step=frames), torch.Generator().manual_seed(1)
    y, tokens = torch.randn(2, 4, 70, generator=generator).double(), torch.tensor([[3, 1, 2, 5], [4, 4, 1, 0]])
    forced = taco(y, taco.remember(tokens), keyed([0, 1]))
    for a, b in zip(forced, fed(taco, y, tokens, keyed([0, 1])), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    # Another draw of the prenet's dropout is another mel.
    assert (fed(taco, y, tokens, keyed([0, 2]))[0][1] - forced.mean[1]).abs().max() > 1e-3
    if attention in ("additive", "scaled_dot", "hard"):
        return  # they do not ask where they looked before
    kind = LocalMonotonic if attention == "local_monotonic" else ScoredAttention
    step = kind.step
    monkeypatch.setattr(kind, "step", lambda self, q, m, k, state, mask: (*step(self, q, m, k, state, mask)[:2], state))
    assert (fed(taco, y, tokens, keyed([0, 1]))[0] - forced.mean).abs().max() > 1e-4


@pytest.mark.parametrize(("frames", "first"), [(1, 6), (2, 6), (3, 6), (4, 8)])
def test_a_frame_depends_on_the_steps_before_it_alone(frames, first):
    """A change of frames 5 to 8 is first seen by frame `first`, with which the next step begins."""
    taco, y = model(prenet=32, frames_per_step=frames), torch.randn(1, 4, 9, dtype=torch.float64)
    memory = taco.remember(torch.tensor([[3, 1, 2]]))
    other = y.clone()
    other[:, :, 5:] += 1
    one, two = (taco(v, memory, keyed([0])).mean for v in (y, other))
    assert one[:, :, :first].equal(two[:, :, :first]) and not one[:, :, first].equal(two[:, :, first])


@pytest.mark.parametrize(("attention", "frames"), STEPS)
def test_a_padded_batch_is_each_item_alone(attention, frames):
    taco, (y, tokens, mask, text_mask, sizes) = model(attention, frames_per_step=frames), padded()
    y[1, :, 4:] = torch.nan

    def losses(y, tokens, generator, mask=None, text_mask=None):
        memory = taco.remember(tokens, text_mask)
        nats, stop = taco.loss(y, taco(y, memory, generator, mask), mask)
        taco.zero_grad()
        (nats + stop).sum().backward()
        return nats + stop, [p.grad.clone() for p in taco.parameters() if p.grad is not None]

    together, gradients = losses(y, tokens, keyed([5, 6, 7]), mask, text_mask)
    total = [torch.zeros_like(g) for g in gradients]
    for k, (n, t) in enumerate(sizes):
        alone, own = losses(y[k : k + 1, :, :t], tokens[k : k + 1, :n], keyed([5 + k]))
        torch.testing.assert_close(together[k], alone[0], atol=1e-10, rtol=1e-10)
        total = [a + b for a, b in zip(total, own, strict=True)]
    for a, b in zip(gradients, total, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert taco.encoder.head.weight.grad is None


@pytest.mark.parametrize(("attention", "frames"), STEPS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_samples_are_themselves_in_a_batch(attention, frames, temperature):
    taco, (_, tokens, _, text_mask, sizes) = model(attention, frames_per_step=frames), padded()
    options = {"temperature": temperature, "max_frames": 80}
    with torch.no_grad():
        taco.stop.bias.fill_(-99.0)
        spoken = taco.sample(tokens, text_mask, generator=keyed([5, 6, 7]), **options)
        logits = taco(spoken.mel, taco.remember(tokens, text_mask), keyed([5, 6, 7])).stop
        # A bias with which the items stop at frames of their own; none of the logits is so near to it that rounding,
        # which is not the same in a batch, could decide.
        ordered = logits.flatten().sort().values
        limits = (ordered[1:] + ordered[:-1])[ordered.diff() > 1e-6] / 2
        above = [logits > limit for limit in limits]
        first = [torch.where(a.any(1), a.int().argmax(1), 80) for a in above]
        best = max(range(len(first)), key=lambda k: len(first[k].unique()))
        taco.stop.bias.sub_(limits[best])
    found = taco.sample(tokens, text_mask, generator=keyed([5, 6, 7]), **options)
    lengths = found.mask.sum((1, 2))
    assert len(set(lengths.tolist())) > 1
    for k, (n, _) in enumerate(sizes):
        alone = taco.sample(tokens[k : k + 1, :n], generator=keyed([5 + k]), **options)
        assert alone.mask.sum() == lengths[k] and alone.stopped[0] == found.stopped[k]
        torch.testing.assert_close(found.mel[k, :, : lengths[k]], alone.mel[0], atol=1e-9, rtol=0)
        torch.testing.assert_close(found.weights[k, :n, : lengths[k]], alone.weights[0], atol=1e-9, rtol=0)
        assert not found.mel[k, :, lengths[k] :].any()


@pytest.mark.parametrize("frames", [1, 4])
def test_free_running_is_fed_with_itself(frames):
    taco, tokens = model(frames_per_step=frames), torch.tensor([[3, 1, 2]])
    with torch.no_grad():
        taco.stop.bias.fill_(-50.0)
    spoken = taco.sample(tokens, generator=keyed([4]), max_frames=70)
    forced = taco(spoken.mel, taco.remember(tokens), keyed([4]))
    torch.testing.assert_close(forced.mean, spoken.mel, atol=1e-9, rtol=0)
    torch.testing.assert_close(forced.weights, spoken.weights, atol=1e-9, rtol=0)
    # Broken off later, it begins alike.
    longer = taco.sample(tokens, generator=keyed([4]), max_frames=90)
    torch.testing.assert_close(longer.mel[:, :, :70], spoken.mel, atol=1e-9, rtol=0)
    assert not spoken.stopped.any() and spoken.mel.shape[2] == 70
    both = taco.sample(tokens.expand(2, -1), generator=keyed([4, 4]), max_frames=torch.tensor([70, 30]))
    assert both.mask.sum((1, 2)).tolist() == [70, 30] and not both.stopped.any()
    torch.testing.assert_close(both.mel[0], spoken.mel[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("frames", [1, 3])
def test_stops_are_its_own(frames):
    taco, tokens = model(frames_per_step=frames), torch.tensor([[3, 1, 2]])
    with torch.no_grad():
        taco.stop.bias.fill_(-50.0)
        taco.stop.bias[-1] = 50.0  # the last frame of the first step
    spoken = taco.sample(tokens, generator=keyed([4]), max_frames=70)
    assert spoken.stopped.all() and spoken.mask.sum() == spoken.mel.shape[2] == frames
    with torch.no_grad():
        taco.stop.bias.fill_(50.0)
    # At the very last frame a stop is a stop, too.
    assert taco.sample(tokens, generator=keyed([4]), max_frames=1).stopped.all()
    with torch.no_grad():
        taco.stop.weight.zero_()
        taco.stop.bias.fill_(math.log(0.4 / 0.6))
    assert not taco.sample(tokens, generator=keyed([4]), max_frames=3).stopped.any()
    assert taco.sample(tokens, generator=keyed([4]), max_frames=3, threshold=0.3).stopped.all()


def test_the_density_is_laplace():
    taco, (y, tokens, mask, text_mask, sizes) = model(), padded()
    forced = taco(y, taco.remember(tokens, text_mask), keyed([5, 6, 7]), mask)
    found, (nats, stop) = taco.log_prob(y, forced, mask), taco.loss(y, forced, mask)
    b = taco.log_scale.exp()
    for k, (_, t) in enumerate(sizes):
        mean = forced.mean[k, :, :t]
        expected = torch.distributions.Laplace(mean, b[:, None]).log_prob(y[k, :, :t]).sum()
        torch.testing.assert_close(found[k], expected)
        torch.testing.assert_close(nats[k], -expected / (4 * t))
        p = forced.stop[k, :t].sigmoid()
        torch.testing.assert_close(stop[k], -(torch.log(1 - p[:-1]).sum() + p[-1].log()) / t)


def test_temperature_scales_the_standard_deviations():
    taco, tokens = model(), torch.tensor([[3, 1, 2]]).expand(2000, -1)
    one, half = (taco.sample(tokens, generator=keyed(range(2000)), temperature=t, max_frames=1).mel for t in (1.0, 0.5))
    mean = taco.sample(tokens, generator=keyed(range(2000)), max_frames=1).mel
    torch.testing.assert_close(half - mean, 0.5 * (one - mean), atol=1e-9, rtol=0)
    ratio = (one - mean)[:, :, 0].square().mean(0) / (2 * taco.log_scale.exp() ** 2)
    # The square of a Laplace variable has mean 2 b^2 and variance 20 b^4.
    assert ((ratio - 1).abs() < 4 * math.sqrt(5 / 2000)).all()


def test_dropout_is_on_when_speaking():
    taco, tokens = model(), torch.tensor([[3, 1, 2]])
    one, other = (taco.sample(tokens, generator=keyed([k]), max_frames=9).mel for k in (1, 2))
    assert one.shape != other.shape or (one - other).abs().max() > 1e-4
    factors = next(taco.factors(keyed([1]), 1, torch.zeros(1)))
    assert set(factors.unique().tolist()) == {0.0, 2.0} and abs(float(factors.mean()) - 1) < 4 / math.sqrt(64 * 12)
    assert next(model(dropout=0.0).factors(keyed([1]), 1, torch.zeros(1))).eq(1).all()


def test_the_postnet_refines_and_knows_no_padding(monkeypatch):
    """A batch is each item alone, in training's distance and in samples; frames as they come are not touched."""
    taco, plain, all_three = model(postnet=10), model(), keyed([0, 1, 2])
    plain.load_state_dict({name: value for name, value in taco.state_dict().items() if "postnet" not in name})
    y, tokens, mask, text_mask, sizes = padded(4)
    forced = taco(y, taco.remember(tokens, text_mask), all_three, mask)
    alone = []
    for k, (n, t) in enumerate(sizes):
        one = y[k : k + 1, :, :t]
        said = taco.remember(tokens[k : k + 1, :n])
        alone.append(float(taco.refinement(one, taco(one, said, keyed([k])))[0].detach()))
    assert taco.refinement(y, forced, mask).tolist() == pytest.approx(alone, abs=1e-9)
    assert torch.equal(taco.log_prob(y, forced, mask), plain.log_prob(y, forced, mask))
    limits = torch.tensor([9, 5, 2])
    refined, raw = (found.sample(tokens, text_mask, generator=all_three, max_frames=limits) for found in (taco, plain))
    torch.testing.assert_close(refined.mel, taco.postnet(raw.mel, raw.mask))
    assert (refined.mel - raw.mel).abs().max() > 1e-3 and not refined.mel.masked_select(~refined.mask).any()
    # A post-net that reads what stands behind the end is seen.
    monkeypatch.setattr("genmodels.speech.tacotron.hide", lambda x, mask: x)
    assert taco.refinement(y, forced, mask).tolist() != pytest.approx(alone, abs=1e-6)


def test_the_postnet_leaves_the_means_their_gradient():
    y, tokens, mask, text_mask, _ = padded(4)
    taco, plain = model(postnet=10), model()
    distances = [found.refinement(y, found(y, found.remember(tokens, text_mask), keyed([0, 1, 2]), mask), mask)
                 for found in (taco, plain)]  # fmt: skip
    distances[0].sum().backward()
    assert taco.head.weight.grad is None and float(taco.postnet.last.weight.grad.abs().sum()) > 0
    assert distances[1] is None


def test_bad_input():
    with pytest.raises(ValueError, match="additive, location, location_previous, scaled_dot, hard, local_monotonic"):
        make_attention("dot", 8)
    with pytest.raises(ValueError, match="dropout"):
        model(dropout=1.0)
    cases = [({"temperature": -1.0}, "temperature must be"), ({"threshold": 1.0}, "max_frames be at least 1"),
             ({"max_frames": 0}, "max_frames be at least 1")]
    for wrong, said in cases:
        with pytest.raises(ValueError, match=said):
            model().sample(torch.tensor([[1]]), generator=keyed([0]), **wrong)
