"""Streaming: pieces side by side are the whole, for every size of piece, and no shorter context would do."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.random import KeyedGenerator
from genmodels.flows.bijection import Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.elementwise import Affine
from genmodels.flows.linear import Flip
from genmodels.flows.squeeze import Squeeze1d
from genmodels.nn.condition import Condition
from genmodels.nn.coupling_networks import WaveNet
from genmodels.speech import streaming
from genmodels.speech.audio import MelConfig, log_mel
from genmodels.speech.glow_tts import GlowTTS, mel_decoder
from genmodels.speech.streaming import (
    DecoderStream,
    Reach,
    WaveNetStream,
    collect,
    reach,
    stream_decoder,
    stream_latent,
    stream_sound,
)
from genmodels.speech.text_encoder import DurationPredictor, TextEncoder
from genmodels.speech.vocoder import GriffinLim
from tests.parameters import scattered
from tests.speech.test_audio import speechlike
from tests.speech.test_glow_tts import SYMBOLS, keyed
from tests.speech.test_vocoder import installed


def decoder(
    dtype=torch.float64, *, steps: int = 2, depth: int = 2, kernel_size: int = 3, speakers: int = 0,
    attention: str = "none",
) -> Compose:  # fmt: skip
    torch.manual_seed(0)
    cond = Condition("vector", speakers) if speakers else None
    found = mel_decoder(4, steps=steps, hidden=8, depth=depth, kernel_size=kernel_size, cond=cond,
                        attention=attention).eval()
    found.initialize(torch.randn(4, 4, 60) * 2 + 1, torch.randn(4, speakers) if speakers else None)
    return scattered(found, seed=0).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("speakers", [0, 3])
def test_pieces_are_the_whole(dtype, tolerance, speakers):
    flow, z = decoder(dtype, speakers=speakers), torch.randn(2, 4, 50, dtype=dtype)
    cond = torch.randn(2, 3, dtype=dtype) if speakers else None
    whole, _ = flow.inverse(z, cond)
    for chunk in [*range(1, 52), 1000]:
        pieces = list(stream_decoder(flow, z, cond, chunk=chunk))
        assert [p.shape[2] for p in pieces[:-1]] == [chunk] * (len(pieces) - 1)
        torch.testing.assert_close(torch.cat(pieces, 2), whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("steps", "depth", "kernel_size", "expected"), [
    (2, 2, 3, 8), (1, 1, 5, 4), (3, 2, 5, 24), (12, 4, 5, 192),
])  # fmt: skip
def test_the_context_is_that_of_the_layers(steps, depth, kernel_size, expected):
    assert reach(decoder(steps=steps, depth=depth, kernel_size=kernel_size)) == Reach(expected, 2)


@pytest.mark.parametrize(("steps", "depth", "kernel_size"), [(2, 2, 3), (1, 1, 5), (2, 2, 5)])
def test_autograd_sees_no_farther(steps, depth, kernel_size):
    flow = decoder(steps=steps, depth=depth, kernel_size=kernel_size)
    context = reach(flow).context
    z = torch.randn(1, 4, 4 * context + 8, dtype=torch.float64, requires_grad=True)
    at = 2 * context + 2
    y, _ = flow.inverse(z)
    (y[0, :, at : at + 2] * torch.randn(4, 2, dtype=torch.float64)).sum().backward()
    touched = z.grad[0].abs().sum(0).nonzero().flatten()
    # A pair of frames is touched as soon as one of them is.
    assert int(touched.min()) // 2 == (at - context) // 2 and int(touched.max()) // 2 == (at + context) // 2


def test_a_shorter_context_is_seen(monkeypatch):
    """A chunk is then too short."""
    flow, z = decoder(), torch.randn(1, 4, 50, dtype=torch.float64)
    monkeypatch.setattr(streaming, "reach", lambda decoder: Reach(6, 2))
    assert next(stream_decoder(flow, z, chunk=8)).shape[2] < 8
    # Pieces that begin between the frames of a pair are another squeeze.
    monkeypatch.setattr(streaming, "reach", lambda decoder: Reach(9, 1))
    with pytest.raises(ValueError, match="divisible by 2"):
        list(stream_decoder(flow, z, chunk=8))


def pieces_error(flow: Compose, z: torch.Tensor, size: int) -> float:
    states, parts = DecoderStream(flow), z.split(size, 2)
    found = [states.push(part, part is parts[-1]) for part in parts]
    return float((torch.cat(found, 2) - flow.inverse(z)[0]).abs().max())


@pytest.mark.parametrize("depth", [1, 3])
def test_states_are_the_context(depth, monkeypatch):
    """Pieces of any even size, also such of which at first nothing is known."""
    flow, z = decoder(depth=depth, kernel_size=5), torch.randn(2, 4, 60, dtype=torch.float64)
    for size in (2, 6, 34, 60):
        with torch.no_grad():
            assert pieces_error(flow, z, size) < 1e-10
    assert DecoderStream(flow).push(z[:, :, :2]).shape == (2, 4, 0)
    push = WaveNetStream.push

    def forgets(self, x, last=False):
        self.held = [None if held is None else torch.cat([0 * held[..., :1], held[..., 1:]], 2) for held in self.held]
        return push(self, x, last)

    monkeypatch.setattr(WaveNetStream, "push", forgets)
    with torch.no_grad():
        assert pieces_error(flow, z, 34) > 1e-6  # a lost frame is seen


def test_every_position_is_computed_once(monkeypatch):
    """The frames that the couplings' networks see in all: those of the text, where contexts were six times as many."""
    flow, z = decoder(steps=3, depth=2, kernel_size=5), torch.randn(1, 4, 200, dtype=torch.float64)
    seen = []
    for layer in flow.layers:
        if isinstance(layer, Coupling):
            layer.net.stem.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[2]))
    list(stream_decoder(flow, z, chunk=10))
    assert sum(seen) == 3 * 200 // 2
    seen.clear()
    for start in range(0, 200, 10):  # each chunk with the context of 24 frames on both sides
        flow.inverse(z[:, :, max(0, start - 24) : start + 34])
    assert sum(seen) > 5 * 3 * 200 // 2


@pytest.mark.parametrize(("attention", "expected", "seen"), [
    ("xl_chunks", Reach(68, 2), (16, 0, 16)), ("local_dense", Reach(36, 2), (7, 7, 1)),
    ("rope_window", Reach(72, 2), (16, 16, 1)),
])  # fmt: skip
def test_attention_of_a_bounded_reach_is_streamed(attention, expected, seen, monkeypatch):
    """Pieces of any size are the whole, by attention to all that it sees and no less, in chunks of its own."""
    flow, z = decoder(attention=attention), torch.randn(1, 4, 400, dtype=torch.float64)
    assert reach(flow) == expected  # two couplings of 2 + 15, 7 or 16 positions, two frames each
    whole = flow.inverse(z)[0].detach()

    def error(chunk):
        return float((torch.cat(list(stream_decoder(flow, z, chunk=chunk)), 2) - whole).abs().max())

    for chunk in (1, 7, 40, 64, 1000):
        assert error(chunk) < 1e-9
    found = [layer.net.attention for layer in flow.layers if isinstance(layer, Coupling)]
    assert {streaming._attended(block) for block in found} == {seen}
    before, after, size = seen
    for less in ((before - 1, after, size), (before, after - 1, size) if after else (before, after, size // 2)):
        with monkeypatch.context() as changed:
            changed.setattr(streaming, "_attended", lambda block, less=less: less)
            changed.setattr(streaming, "reach", lambda decoder: expected)
            assert error(40) > 1e-6


@pytest.mark.parametrize("attention", ["xl_chunks", "local_dense", "rope_window"])
def test_autograd_sees_no_farther_ahead_with_attention(attention):
    flow = decoder(attention=attention)
    context = reach(flow).context
    z = torch.randn(1, 4, 4 * context, dtype=torch.float64, requires_grad=True)
    ends = []
    for at in range(context, context + 64, 2):  # a chunk begins somewhere among these
        (gradient,) = torch.autograd.grad(flow.inverse(z)[0][0, :, at : at + 2].sum(), z)
        ends.append(int(gradient[0].abs().sum(0).nonzero().max()) // 2 * 2 - at)
    assert max(ends) == context if attention != "xl_chunks" else context // 2 < max(ends) <= context


def model(dtype=torch.float64) -> GlowTTS:
    torch.manual_seed(0)
    encoder = TextEncoder(SYMBOLS, 4, channels=8, depth=1, hidden=16, learn_sigma=True)
    durations = DurationPredictor(8, hidden=8)
    return GlowTTS(scattered(encoder), decoder(torch.float32), scattered(durations)).to(dtype).eval()


def streamed(tts, tokens, frames, chunk):
    return stream_latent(tts, tts.latent(tokens, generator=keyed([5]), frames=frames), chunk=chunk)


@pytest.mark.parametrize("frames", [1, 2, 37, 38])
def test_a_text_streamed_is_the_text_sampled(frames):
    tts, tokens = model(), torch.tensor([[3, 1, 2][: min(3, frames)]])
    wanted = torch.tensor([frames])
    whole, _, _ = tts.sample(tokens, generator=keyed([5]), frames=wanted)
    for chunk in (1, 2, 3, 7, 16, 64):
        found = collect(streamed(tts, tokens, wanted, chunk))
        torch.testing.assert_close(found.whole, whole[0], atol=1e-10, rtol=1e-10)
        assert 0 < found.first_packet <= found.seconds
    # A start of the text gives a start of the sound: nothing is drawn anew for a piece.
    first = next(streamed(tts, tokens, wanted, 1))
    torch.testing.assert_close(first, whole[0, :, :1], atol=1e-10, rtol=1e-10)


def sounds(vocoder, mel, sizes, generator=None):
    return torch.cat(list(stream_sound(vocoder, mel.split(sizes, dim=1), generator)))


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.99])
def test_griffin_lim_streamed(iterations, momentum):
    vocoder = GriffinLim(iterations=iterations, momentum=momentum)
    assert vocoder.context == 3 * (iterations + 1)
    mel = log_mel(speechlike(256 * 50))
    for seed in (None, 4):
        generator = None if seed is None else KeyedGenerator(seed, torch.tensor([2]), "phases")
        whole = vocoder(mel, generator)
        for sizes in (50, 7, 20, [1, 30, 19]):
            torch.testing.assert_close(sounds(vocoder, mel, sizes, generator), whole, atol=1e-10, rtol=1e-10)
    other = sounds(vocoder, mel, 7, KeyedGenerator(5, torch.tensor([2]), "phases"))
    assert (other - whole).abs().max() > 1e-4


def test_a_vocoder_that_looks_farther_is_seen(monkeypatch):
    mel = log_mel(speechlike(256 * 50))
    vocoder = GriffinLim(iterations=3)
    whole = vocoder(mel)
    monkeypatch.setattr(GriffinLim, "context", property(lambda self: 4))
    assert (sounds(vocoder, mel, 7) - whole).abs().max() > 1e-4


@installed
def test_hifigan_streamed():
    from genmodels.speech.vocoder import HiFiGAN

    vocoder, mel = HiFiGAN(), log_mel(speechlike(256 * 40).float())
    torch.testing.assert_close(sounds(vocoder, mel, 9), vocoder(mel), atol=1e-5, rtol=1e-5)
    double = mel[:, :30].double()
    torch.testing.assert_close(sounds(vocoder, double, 11), vocoder(double), atol=1e-10, rtol=1e-10)


def test_bad_input():
    tts, tokens = model(), torch.tensor([[3, 1, 2]])
    with pytest.raises(ValueError, match="one text is streamed at a time, got 2"):
        next(stream_latent(tts, tts.latent(tokens.expand(2, -1), generator=keyed([0, 1]))))
    with pytest.raises(ValueError, match="one frame at least"):
        next(streamed(tts, tokens, None, 0))
    split = ChannelSplit(4)
    net = WaveNet(2, 4, hidden=8, depth=1, attention="plain", heads=2)
    with pytest.raises(ValueError, match="looks at all frames and cannot be streamed: use attention = xl_chunks"):
        reach(Compose([Coupling(split, Affine(2), net)], (4, None)))
    with pytest.raises(ValueError, match="Flip cannot be streamed"):
        reach(Compose([Flip(4)], (4, None)))
    with pytest.raises(ValueError, match="have tacotron"):
        next(stream_sound(GriffinLim(MelConfig(padding="tacotron")), []))
    with pytest.raises(ValueError, match="KeyedGenerator"):
        GriffinLim()(torch.zeros(80, 9), torch.Generator(), first_frame=3)
    with pytest.raises(ValueError, match="no pieces"):
        collect([])


def test_chunks_begin_at_multiples_of_all_squeezes():
    """Squeezes by 2 and later by 3 need multiples of 6, not of the larger one."""
    layers = [layer for k in (2, 3) for layer in (Squeeze1d(k), Inverse(Squeeze1d(k)))]
    assert reach(Compose(layers, (4, None))) == Reach(0, 6)
