"""Glow-TTS as a density: it integrates to one, masks are exact, volumes are autograd's, samples follow their noise."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.speech import glow_tts
from genmodels.speech.alignment import log_paths
from genmodels.speech.glow_tts import GlowTTS, mel_decoder, normal_scores
from genmodels.speech.text_encoder import DurationPredictor, TextEncoder, duration_loss
from tests.parameters import scattered

SYMBOLS = 9


def model(n_mels: int = 4, *, groups: int = 4, learn_sigma: bool = True, speakers: int = 0) -> GlowTTS:
    """A small model in float64 whose every part does something."""
    from genmodels.nn.condition import Condition

    torch.manual_seed(0)
    cond = Condition("vector", speakers) if speakers else None
    encoder = TextEncoder(SYMBOLS, n_mels, channels=8, depth=1, hidden=16, learn_sigma=learn_sigma,
                          speaker_channels=speakers)
    decoder = mel_decoder(n_mels, steps=2, hidden=8, depth=2, groups=groups, cond=cond)
    found = GlowTTS(encoder, decoder, DurationPredictor(8, hidden=8)).double().eval()
    found.decoder.initialize(torch.randn(4, n_mels, 6, dtype=torch.float64) * 2 + 1,
                             torch.randn(4, speakers, dtype=torch.float64) if speakers else None)
    return scattered(found)


def padded(n_mels: int = 4):
    """Three items of unequal sizes; what is padding is full of numbers that must not matter."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(3, 8), (2, 4), (1, 2)]
    y = 50 * torch.randn(3, n_mels, 8, generator=generator, dtype=torch.float64)
    tokens = torch.randint(SYMBOLS, (3, 3), generator=generator)
    mask, text_mask = torch.zeros(3, 1, 8, dtype=torch.bool), torch.zeros(3, 1, 3, dtype=torch.bool)
    for k, (n, t) in enumerate(sizes):
        y[k, :, :t] = torch.randn(n_mels, t, generator=generator, dtype=torch.float64)
        mask[k, :, :t], text_mask[k, :, :n] = True, True
    return y, tokens, mask, text_mask, sizes


@pytest.mark.parametrize("alignment", ["marginal", "best"])
def test_a_padded_batch_is_each_item_alone(alignment):
    tts, (y, tokens, mask, text_mask, sizes) = model(), padded()
    together = tts.log_prob(y, tokens, mask, text_mask, alignment=alignment)
    for k, (n, t) in enumerate(sizes):
        alone = tts.log_prob(y[k : k + 1, :, :t], tokens[k : k + 1, :n], alignment=alignment)
        torch.testing.assert_close(together[k], alone[0], atol=1e-9, rtol=1e-9)


def test_gradients_of_a_padded_batch():
    tts, (y, tokens, mask, text_mask, sizes) = model(), padded()
    (-tts.log_prob(y, tokens, mask, text_mask).sum()).backward()
    together = [p.grad.clone() for p in tts.parameters() if p.grad is not None]
    tts.zero_grad()
    for k, (n, t) in enumerate(sizes):
        (-tts.log_prob(y[k : k + 1, :, :t], tokens[k : k + 1, :n]).sum()).backward()
    for a, b in zip(together, [p.grad for p in tts.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


def test_the_volume_is_that_of_autograd():
    flow = model().decoder
    y = torch.randn(4, 6, dtype=torch.float64)
    mask = (torch.arange(6) < 4)[None, None]
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None], mask=mask)[0][0], y)
    valid = jacobian[:, :4, :, :4].reshape(16, 16)
    _, logdet = flow(y[None], mask=mask)
    torch.testing.assert_close(logdet[0], torch.linalg.slogdet(valid).logabsdet, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("length", [2, 4, 38])
def test_round_trip(length):
    flow = model().decoder
    y = torch.randn(2, 4, length, dtype=torch.float64)
    z, logdet = flow(y)
    back, negative = flow.inverse(z)
    torch.testing.assert_close(back, y, atol=1e-9, rtol=0)
    torch.testing.assert_close(negative, -logdet, atol=1e-9, rtol=0)


def integral(tts: GlowTTS, n: int) -> float:
    """The density over all mels of one band and two frames, by a fine grid."""
    side = torch.linspace(-40, 40, 401, dtype=torch.float64)
    total = 0.0
    for rows in side.split(100):
        points = torch.cartesian_prod(rows, side)[:, None]
        tokens = torch.arange(1, n + 1).expand(len(points), -1)
        total += float(tts.log_prob(points, tokens).exp().sum())
    return total * float(side[1] - side[0]) ** 2


@pytest.mark.parametrize("n", [1, 2])
def test_the_density_integrates_to_one(n):
    with torch.no_grad():
        assert integral(model(1, groups=2), n) == pytest.approx(1, abs=1e-3)


def test_the_integral_sees_the_variance_in_the_place_of_the_standard_deviation(monkeypatch):
    tts, n = model(1, groups=2), 1
    with torch.no_grad():
        true = glow_tts.normal_scores
        monkeypatch.setattr(glow_tts, "normal_scores", lambda z, mu, log_sigma: true(z, mu, 2 * log_sigma)
                            + (log_sigma.sum(1))[:, :, None])
        assert abs(integral(tts, n) - 1) > 0.02


def test_bounds_of_the_sum_over_alignments():
    tts, (y, tokens, mask, text_mask, _) = model(), padded()
    best = tts.log_prob(y, tokens, mask, text_mask, alignment="best")
    marginal = tts.log_prob(y, tokens, mask, text_mask)
    count = log_paths(text_mask.sum((1, 2)), mask.sum((1, 2)))
    assert (best - count <= marginal + 1e-9).all() and (marginal <= best + 1e-9).all()
    assert marginal[0] < best[0] - 1e-3
    with pytest.raises(ValueError, match="marginal or best"):
        tts.log_prob(y, tokens, alignment="viterbi")


def test_scores_are_the_normal_density():
    z, mu, log_sigma = (torch.randn(2, 3, k, dtype=torch.float64) for k in (5, 4, 4))
    expected = torch.distributions.Normal(mu[..., None], log_sigma.exp()[..., None]).log_prob(z[:, :, None]).sum(1)
    torch.testing.assert_close(normal_scores(z, mu, log_sigma), expected, atol=1e-12, rtol=1e-12)


def error_under_autocast(monkeypatch, ignored: bool = False) -> float:
    """Of the scores of bfloat16 latents under autocast, against those of the same numbers in float64."""
    z, mu, log_sigma = (torch.randn(2, 80, k, generator=torch.Generator().manual_seed(k)).bfloat16() for k in (5, 4, 4))
    true = normal_scores(z.double(), mu.double(), log_sigma.double())
    with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patch:
        if ignored:
            patch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
        found = normal_scores(z, mu, log_sigma)
    assert found.dtype == torch.float32
    return float((found - true).abs().max() / true.abs().max())


def test_scores_are_those_of_float32_under_autocast(monkeypatch):
    assert error_under_autocast(monkeypatch) < 1e-6
    assert error_under_autocast(monkeypatch, ignored=True) > 1e-4


def test_the_loss_is_the_density_along_the_path():
    tts, (y, tokens, mask, text_mask, sizes) = model(), padded()
    aligned = tts.align(y, tokens, mask, text_mask)
    nll, duration = tts.loss(aligned, mask, text_mask)
    best = tts.log_prob(y, tokens, mask, text_mask, alignment="best")
    expected = torch.stack([-best[k] / (4 * t) for k, (_, t) in enumerate(sizes)])
    torch.testing.assert_close(nll, expected)
    log_d = aligned.durations[0].clamp(min=1).double().log()
    torch.testing.assert_close(duration[0], (aligned.log_durations[0] - log_d).square().mean())
    # Durations teach the predictor alone.
    duration.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in tts.encoder.parameters())
    assert any(p.grad is not None and p.grad.any() for p in tts.durations.parameters())


def keyed(index, seed=0):
    return KeyedGenerator(seed, torch.as_tensor(index), "sample")


@pytest.mark.parametrize("frames", [3, 4, 7, 37])
def test_samples_are_themselves_in_a_batch(frames):
    tts, (_, tokens, _, text_mask, sizes) = model(), padded()
    wanted = torch.tensor([frames, frames + 1, 3])
    y, mask, durations = tts.sample(tokens, text_mask, generator=keyed([5, 6, 7]), frames=wanted)
    assert durations.sum(1).equal(wanted) and mask.sum((1, 2)).equal(wanted)
    for k, (n, _) in enumerate(sizes):
        alone, _, _ = tts.sample(tokens[k : k + 1, :n], generator=keyed([5 + k]), frames=wanted[k : k + 1])
        torch.testing.assert_close(y[k, :, : wanted[k]], alone[0], atol=1e-9, rtol=0)
        assert not y[k, :, wanted[k] :].any()


def test_expected_frames_come_to_what_was_seen(monkeypatch):
    """Durations with a heavy tail, of which the mean logarithm says two thirds; padding has no part in either sum."""
    generator = torch.Generator().manual_seed(0)
    log_d = 1.5 + 0.9 * torch.randn(200, 4, 12, generator=generator)
    mask = torch.arange(12) < torch.tensor([12, 9, 5, 2])[:, None, None]
    durations = log_d.exp().masked_fill(~mask[:, 0], 1e6)

    def total(observe=DurationPredictor.observe) -> float:
        predictor = DurationPredictor(4, hidden=4)
        with torch.no_grad():
            predictor.head.weight.zero_()
            predictor.head.bias.fill_(1.5)  # the best constant under squares of logarithms
        said = predictor(torch.zeros(4, 4, 12), mask)
        for batch in durations:
            observe(predictor, said, batch, mask)
        return float(predictor.frames(torch.zeros(4, 4, 12), mask).sum().detach())

    wanted = float(durations.masked_select(mask[:, 0]).mean() * mask.sum())
    # The factor is a mean over about a hundred batches of 28 tokens, whose durations deviate by 1.1 of their mean.
    assert total() == pytest.approx(wanted, rel=5 * 1.1 / math.sqrt(100 * 28))
    assert total(lambda *_: None) < 0.75 * wanted
    assert total(lambda self, said, d, mask: DurationPredictor.observe(self, said, d, None)) > 2 * wanted


def test_only_training_observes_durations():
    tts, (y, tokens, mask, text_mask, _) = model(), padded()
    before = tts.durations.seen.clone()
    aligned = tts.align(y, tokens, mask, text_mask)
    tts.loss(aligned, mask, text_mask)
    assert torch.equal(tts.durations.seen, before)
    tts.train().loss(aligned, mask, text_mask)
    assert float(tts.durations.seen[0]) == pytest.approx(0.99 + float(mask.sum()))


def test_one_frame_and_given_durations():
    tts = model()
    y, mask, _ = tts.sample(torch.tensor([[3]]), generator=keyed([0]), frames=torch.tensor([1]))
    assert y.shape == (1, 4, 1) and mask.all()
    given = torch.tensor([[2, 1, 4]])
    _, mask, used = tts.sample(torch.tensor([[3, 1, 2]]), generator=keyed([0]), durations=given)
    assert used.equal(given) and mask.shape[-1] == 7


def test_temperature_scales_the_latent():
    tts, tokens = model(), torch.tensor([[3, 1, 2]]).expand(400, -1)
    frames = torch.full((400,), 6)

    def latents(temperature):
        y, mask, _ = tts.sample(tokens, generator=keyed(range(400)), temperature=temperature, frames=frames)
        return tts.decoder(y)[0]

    still = latents(0.0)
    assert (still - still[0]).abs().max() < 1e-9
    one, half = latents(1.0) - still, latents(0.5) - still
    torch.testing.assert_close(half, 0.5 * one, atol=1e-8, rtol=1e-8)
    _, mu, log_sigma = tts.encoder(tokens[:1])
    variance = one.square().mean(0)[:, 0]
    expected = torch.exp(2 * log_sigma[0, :, 0])
    assert ((variance / expected - 1).abs() < 4 * math.sqrt(2 / 400)).all()


def test_speed():
    tts, tokens = model(), torch.tensor([[3, 1, 2, 4, 5]])
    with torch.no_grad():
        tts.durations.head.bias.fill_(2.0)
    lengths = [tts.sample(tokens, generator=keyed([0]), speed=s)[1].sum().item() for s in (0.5, 1.0, 2.0)]
    assert lengths[0] > lengths[1] > lengths[2]
    for wrong in ({"speed": 0.0}, {"temperature": -1.0}, {"frames": torch.tensor([4])}):
        with pytest.raises(ValueError):
            tts.sample(tokens, generator=keyed([0]), **wrong)


def test_speakers():
    tts, (y, tokens, mask, text_mask, _) = model(speakers=3), padded()
    voices = torch.eye(3, dtype=torch.float64)
    one = tts.log_prob(y, tokens, mask, text_mask, voices)
    other = tts.log_prob(y, tokens, mask, text_mask, voices.flip(0))
    assert (one[[0, 2]] - other[[0, 2]]).abs().min() > 1e-6 and one[1] == other[1]
    with pytest.raises(ValueError, match="built with speakers"):
        tts.log_prob(y, tokens, mask, text_mask)
    with pytest.raises(ValueError, match="without speakers"):
        model().log_prob(y, tokens, mask, text_mask, voices)


def test_duration_loss_counts_valid_tokens():
    log_d, d = torch.zeros(2, 3), torch.tensor([[1, 2, 4], [3, 0, 0]])
    mask = torch.tensor([[[True, True, True]], [[True, False, False]]])
    expected = [(math.log(2) ** 2 + math.log(4) ** 2) / 3, math.log(3) ** 2]
    assert duration_loss(log_d, d, mask).tolist() == pytest.approx(expected)
