"""Streaming synthesis: mels and sound in chunks, equal to the result of decoding everything at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from genmodels.core.random import Generator
from genmodels.flows.bijection import Bijection, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.linear import GroupedLinear, InvertibleLinear
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze1d
from genmodels.nn.attention import Attention, LocalDenseSynthesizer
from genmodels.nn.coupling_networks import WaveNet
from genmodels.speech.audio import MelConfig
from genmodels.speech.glow_tts import GlowTTS, Latent


class Reach(NamedTuple):
    """The receptive field of a decoder.

    Attributes:
        context: frames on either side that a frame of its output depends on.
        multiple: frames processed together, by squeezes and by chunks of attention; chunks begin at multiples of this.
    """

    context: int
    multiple: int


def reach(decoder: Compose) -> Reach:
    """The receptive field of a flow over sequences, from its layers.

        context = sum over couplings of factor [sum_i (kernel_i - 1)/2 dilation_i + reach of the attention, if any]

    with the factor of the squeezes around. For Glow-TTS this is 2 * 12 * 4 * 2 = 192 frames. Attention in chunks (the
    streaming form of Transformer-XL, `attention=xl_chunks`) reaches size (left + 1) - 1 positions: each of 12 couplings
    with chunks of 16 and one before adds 62 frames. Pieces begin where chunks do, so that their chunks are the same.

    Errors: ValueError for a layer of unknown reach, and for attention without a bounded one.

    Example:
        >>> from genmodels.speech.glow_tts import mel_decoder
        >>> reach(mel_decoder(4, hidden=8))
        Reach(context=192, multiple=2)
    """
    context, factor, multiple = 0, 1, 1
    for layer in decoder.layers:
        if isinstance(layer, Squeeze1d):
            factor *= layer.factor
        elif isinstance(layer, Inverse) and isinstance(layer.bijection, Squeeze1d):
            factor //= layer.bijection.factor
        else:
            own, chunk = _own_reach(layer)
            context += factor * own
            multiple = math.lcm(multiple, factor * chunk)
        multiple = math.lcm(multiple, factor)
    return Reach(context, multiple)


def _own_reach(layer: Bijection) -> tuple[int, int]:
    """The positions on either side that one layer depends on, and the size of its chunks."""
    if isinstance(layer, ActNorm | GroupedLinear | InvertibleLinear):
        return 0, 1
    if isinstance(layer, Coupling) and isinstance(layer.split, ChannelSplit) and isinstance(layer.net, WaveNet):
        own = sum((gate.kernel_size[0] - 1) // 2 * gate.dilation[0] for gate in layer.net.gates)
        mechanism = getattr(layer.net.attention, "mechanism", None)
        if layer.net.attention is None:
            return own, 1
        if isinstance(mechanism, LocalDenseSynthesizer):
            return own + mechanism.c // 2, 1
        chunk = mechanism.reach.chunk if isinstance(mechanism, Attention) else None
        if chunk is not None and chunk[1] is not None:
            return own + chunk[0] * (chunk[1] + 1) - 1, chunk[0]
        raise ValueError("a decoder with such an attention looks at all frames and cannot be streamed: use attention = "
                         "xl_chunks or local_dense")
    raise ValueError(f"a decoder with a {type(layer).__name__} cannot be streamed: how far it looks is not known")


@torch.no_grad()
def stream_decoder(decoder: Compose, z: Tensor, cond: Tensor | None = None, *, chunk: int = 64) -> Iterator[Tensor]:
    """Latents decoded in chunks, each with the context that it depends on.

    The concatenated chunks equal `decoder.inverse(z)`. The cost of a chunk is that of its frames and of the context on
    both sides.

    Arguments:
        decoder: the flow from mels to latents.
        z: latents of items without padding.
        cond: vectors of the speakers, (B, K).
        chunk: frames per chunk; the last may be shorter.

    Shapes: `z (B, C, T)`; pieces `(B, C, chunk)`.
    Errors: ValueError for a chunk below 1, and what `reach` refuses.

    Example:
        >>> from genmodels.speech.glow_tts import mel_decoder
        >>> decoder = mel_decoder(4, steps=1, hidden=8, depth=1)
        >>> decoder.initialize(torch.randn(1, 4, 40))
        >>> [piece.shape[2] for piece in stream_decoder(decoder, torch.randn(1, 4, 40), chunk=15)]
        [15, 15, 10]
    """
    if chunk < 1:
        raise ValueError(f"a chunk has one frame at least, got {chunk}")
    context, multiple = reach(decoder)
    length = z.shape[2]
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        first = max(0, start - context) // multiple * multiple
        last = min(length, -(-(end + context) // multiple) * multiple)
        y, _ = decoder.inverse(z[:, :, first:last], cond)
        yield y[:, :, start - first : end - first]


def stream(
    model: GlowTTS, tokens: Tensor, speaker: Tensor | None = None, *, generator: Generator, temperature: float = 0.667,
    speed: float | Tensor = 1.0, frames: Tensor | None = None, durations: Tensor | None = None, chunk: int = 64,
) -> Iterator[Tensor]:  # fmt: skip
    """The mel of one text in chunks; concatenated they equal `model.sample` with the same arguments.

    Text, durations and latents are computed before the first chunk, the flow for each chunk.

    Arguments:
        tokens: one text.
        speaker, generator, temperature, speed, frames, durations: as of `GlowTTS.sample`.
        chunk: frames per chunk.

    Shapes: `tokens (1, N)`; pieces `(n_mels, chunk)`, the last one shorter.
    Errors: ValueError for more than one text, and what `GlowTTS.sample` and `stream_decoder` refuse.
    Source: Kim et al. 2020 (Glow-TTS); streaming is ours.
    """
    if len(tokens) != 1:
        raise ValueError(f"one text is streamed at a time, got {len(tokens)}")
    reach(model.decoder)  # so that a decoder that cannot be streamed is refused before the text is encoded
    drawn = model.latent(tokens, None, speaker, generator=generator, temperature=temperature, speed=speed,
                         frames=frames, durations=durations)
    yield from stream_latent(model, drawn, speaker, chunk=chunk)


def stream_latent(model: GlowTTS, drawn: Latent, speaker: Tensor | None = None, *, chunk: int = 64) -> Iterator[Tensor]:
    """The mel of the latents `drawn` by `model.latent` for one text, in chunks; see `stream`.

    Shapes: pieces `(n_mels, chunk)`, the last one shorter.
    """
    total = int(drawn.durations.sum())
    cond = speaker if model.decoder.uses_cond else None
    done = 0
    for piece in stream_decoder(model.decoder, drawn.z, cond, chunk=chunk):
        kept = piece[0, :, : total - done]  # an odd length was decoded with one frame more
        done += kept.shape[1]
        if kept.shape[1]:
            yield kept


class Vocoder(Protocol):
    """A vocoder that can be streamed: hop samples per frame, which depend on `context` frames on either side."""

    config: MelConfig

    @property
    def context(self) -> int:
        """Frames on either side that the sound of a frame depends on."""

    def __call__(self, mel: Tensor, generator: Generator | None = None, *, first_frame: int = 0) -> Tensor: ...


def stream_sound(vocoder: Vocoder, mels: Iterable[Tensor], generator: Generator | None = None) -> Iterator[Tensor]:
    """Sound from chunks of a mel, each as soon as all frames that it depends on have arrived.

    The concatenated sound is that of the whole mel. HiFi-GAN has a latency of 13 frames; Griffin-Lim of three frames
    per iteration, two seconds in total.

    Arguments:
        vocoder: `HiFiGAN`, or `GriffinLim` of mels with `hifigan` padding.
        mels: the chunks.
        generator: of Griffin-Lim's phases, a KeyedGenerator of one row or None.

    Shapes: pieces `(n_mels, any)`; sound `(hop frames,)`.
    Errors: ValueError for mels with another padding, whose samples are not a hop for each frame.

    Example:
        >>> from genmodels.speech.vocoder import GriffinLim
        >>> pieces = torch.zeros(80, 20).split(8, dim=1)
        >>> [len(sound) // 256 for sound in stream_sound(GriffinLim(iterations=1), pieces)]
        [2, 8, 4, 6]
    """
    if vocoder.config.padding != "hifigan":
        raise ValueError(f"sound is streamed from mels with hifigan padding, these have {vocoder.config.padding}")
    context, hop = vocoder.context, vocoder.config.hop
    held: Tensor | None = None
    first = done = 0  # the first frame in `held`, and the first whose sound has not been returned

    def given(ready: int) -> Tensor:
        return vocoder(held, generator, first_frame=first)[(done - first) * hop : (ready - first) * hop]

    for mel in mels:
        held = mel if held is None else torch.cat([held, mel], dim=1)
        ready = first + held.shape[1] - context
        if ready > done:
            yield given(ready)
            done = ready
            surplus = max(0, done - context - first)
            held, first = held[:, surplus:], first + surplus
    if held is not None and first + held.shape[1] > done:
        yield given(first + held.shape[1])


class Collected(NamedTuple):
    """A concatenated stream: `whole (.., N)`, seconds until the first chunk, and until the last."""

    whole: Tensor
    first_packet: float
    seconds: float


def collect(pieces: Iterable[Tensor], clock: Callable[[], float] = time.perf_counter) -> Collected:
    """Run a stream to its end, and time it.

    Errors: ValueError for a stream without pieces.

    Example:
        >>> collect(iter([torch.zeros(80, 4), torch.zeros(80, 2)])).whole.shape
        torch.Size([80, 6])
    """
    began, times, found = clock(), [], []
    for piece in pieces:
        times.append(clock() - began)
        found.append(piece)
    if not found:
        raise ValueError("the stream had no pieces")
    return Collected(torch.cat(found, dim=-1), times[0], times[-1])
