"""Streaming synthesis: mels and sound in chunks, equal to the result of decoding everything at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from genmodels.core.errors import an
from genmodels.core.random import Generator
from genmodels.flows.bijection import Bijection, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.flow import frames_together
from genmodels.flows.linear import GroupedLinear, InvertibleLinear
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze1d
from genmodels.nn.attention import Attention, LocalDenseSynthesizer
from genmodels.nn.condition import modulate
from genmodels.nn.coupling_networks import WaveNet
from genmodels.speech.audio import MelConfig
from genmodels.speech.glow_tts import GlowTTS, Latent


class Reach(NamedTuple):
    """How far a decoder looks ahead.

    Attributes:
        context: frames after a frame of its output that this depends on.
        multiple: frames processed together by squeezes.
    """

    context: int
    multiple: int


def reach(decoder: Compose) -> Reach:
    """How far a flow over sequences looks ahead, from its layers.

        context = sum over couplings of factor [sum_i (kernel_i - 1)/2 dilation_i + reach of the attention, if any]

    with the factor of the squeezes around. For Glow-TTS this is 2 * 12 * 4 * 2 = 192 frames. Attention in chunks (the
    streaming form of Transformer-XL, `attention=xl_chunks`) sees its chunk to the end: each of 12 couplings with chunks
    of 16 positions adds 30 frames.

    Errors: ValueError for a layer of unknown reach, and for attention without a bounded one.

    Example:
        >>> from genmodels.speech.glow_tts import mel_decoder
        >>> reach(mel_decoder(4, hidden=8))
        Reach(context=192, multiple=2)
    """
    context, factor = 0, 1
    for layer in decoder.layers:
        if isinstance(layer, Squeeze1d):
            factor *= layer.factor
        elif isinstance(layer, Inverse) and isinstance(layer.bijection, Squeeze1d):
            factor //= layer.bijection.factor
        else:
            context += factor * _own_reach(layer)
    return Reach(context, frames_together(decoder))


def _own_reach(layer: Bijection) -> int:
    """The positions after its own that one layer depends on."""
    if isinstance(layer, ActNorm | GroupedLinear | InvertibleLinear):
        return 0
    if isinstance(layer, Coupling) and isinstance(layer.split, ChannelSplit) and isinstance(layer.net, WaveNet):
        own = sum((gate.kernel_size[0] - 1) // 2 * gate.dilation[0] for gate in layer.net.gates)
        if layer.net.attention is None:
            return own
        _, after, chunk = _attended(layer.net.attention)
        return own + after + chunk - 1
    raise ValueError(f"a decoder with {an(type(layer).__name__)} cannot be streamed: how far it looks is not known")


def _attended(block: nn.Module) -> tuple[int, int, int]:
    """The positions before and after a chunk of queries that an attention block sees, and the size of its chunks."""
    mechanism = getattr(block, "mechanism", None)
    if isinstance(mechanism, LocalDenseSynthesizer):
        return mechanism.c // 2, mechanism.c - 1 - mechanism.c // 2, 1
    reach = mechanism.reach if isinstance(mechanism, Attention) else None
    if reach is not None and reach.window is not None and None not in reach.window:
        return *reach.window, 1
    chunk = None if reach is None else reach.chunk
    if chunk is None or chunk[1] is None:
        raise ValueError("a decoder with such an attention looks at all frames and cannot be streamed: use attention = "
                         "xl_chunks, rope_window or local_dense")
    return chunk[0] * chunk[1], 0, chunk[0]


class AttentionStream:
    """An attention block of bounded reach over a sequence in pieces: whole chunks, with the positions that they see.

    Arguments:
        block: the block, whose positions are relative.

    Example:
        >>> from genmodels.nn.attention_block import make_attention
        >>> pieces = AttentionStream(make_attention("xl_chunks", 8, 2, dims=1))  # chunks of 16
        >>> [pieces.push(torch.zeros(1, 8, 20), last).shape[2] for last in (False, False, True)]
        [16, 16, 28]
    """

    def __init__(self, block: nn.Module):
        self.block, (self.before, self.after, self.chunk) = block, _attended(block)
        self.held: Tensor | None = None
        self.first = self.done = 0  # the position of the first that is held, and that of the next output

    def push(self, x: Tensor, last: bool = False) -> Tensor:
        """The output at the positions that are known after a new piece `(B, C, n)`; after the `last` one, at all."""
        self.held = x if self.held is None else torch.cat([self.held, x], 2)
        end = self.first + self.held.shape[2]
        ready = end if last else max(0, end - self.after) // self.chunk * self.chunk
        if ready <= self.done:
            return x[..., :0]
        seen = self.held[..., : min(end, ready + self.after) - self.first]
        found = self.block(seen)[..., self.done - self.first : ready - self.first]
        first = max(0, ready - self.before)
        self.held, self.first, self.done = self.held[..., first - self.first :], first, ready
        return found


class WaveNetStream:
    """A WaveNet over a sequence in pieces: every position is computed once.

    Convolution i of reach r_i keeps r_i inputs before the next position, and those that wait for the r_i after them, so
    that the output lags by the sum of the r_i, and by the reach of an attention. At the ends it sees zeros, as the
    padding of the whole. Attention alone sees the positions in its reach again.

    Arguments:
        net: the network.
        cond: as of the network.

    Example:
        >>> net = WaveNet(2, 2, hidden=4, depth=2, kernel_size=3)
        >>> pieces = WaveNetStream(net)
        >>> [pieces.push(torch.zeros(1, 2, 5), last).shape[2] for last in (False, False, True)]
        [3, 5, 7]
    """

    def __init__(self, net: WaveNet, cond: Tensor | None = None):
        self.net, self.cond = net, cond
        self.held: list[Tensor | None] = [None] * len(net.gates)
        self.attention = None if net.attention is None else AttentionStream(net.attention)

    def push(self, x: Tensor, last: bool = False) -> Tensor:
        """The output at the positions that are known after a new piece `(B, C, n)`; after the `last` one, at all."""
        net = self.net
        x, modulations = net.enter(x, self.cond, None)
        h = net.stem(x)
        both = torch.cat([h, torch.zeros_like(h)], 1)  # the residual stream and the sum of skips
        for number, (gate, branch) in enumerate(zip(net.gates, [*net.branches, net.last], strict=True)):
            reach, width = gate.padding[0], net.hidden
            before = both.new_zeros(len(both), 2 * width, reach) if self.held[number] is None else self.held[number]
            known = torch.cat([before, both], 2)
            seen = pad(known[:, :width], (0, reach if last else 0))
            ready = max(0, seen.shape[2] - 2 * reach)
            self.held[number], both = known[..., ready:], known[..., reach : reach + ready]
            if not ready:
                continue
            found = conv1d(seen, gate.weight, gate.bias, dilation=gate.dilation)
            value, opened = modulate(found, modulations[number]).chunk(2, dim=1)
            u = branch(net.dropout(value.tanh() * opened.sigmoid()))
            both = both + (torch.cat([torch.zeros_like(u), u], 1) if branch is net.last else u)
        skips = both[:, net.hidden :]
        skips = skips if self.attention is None else self.attention.push(skips, last)
        return net.leave(skips, None) if skips.shape[2] else x.new_zeros(len(x), net.out_channels, 0)


class CouplingStream:
    """The inverse of a coupling over a sequence in pieces, see `WaveNetStream`."""

    def __init__(self, layer: Coupling, cond: Tensor | None = None):
        self.layer, self.waiting = layer, None
        self.params = WaveNetStream(layer.net, cond if layer.uses_cond else None)

    def push(self, z: Tensor, last: bool = False) -> Tensor:
        """The event at the positions that are known after a new piece; after the `last` one, at all."""
        layer, seen = self.layer, self.layer.split.take(z)[0]
        params = self.params.push(seen, last).to(z.dtype)
        waiting = z if self.waiting is None else torch.cat([self.waiting, z], 2)
        now, self.waiting = waiting[..., : params.shape[2]], waiting[..., params.shape[2] :]
        seen, changed, squares = layer.split.take(now)
        params = params.view(len(z), layer.transform.params_per_dim, layer.split.changed, now.shape[2])
        found, log_derivative = layer.transform.inverse(changed, params)
        return layer.split.put(seen, found, log_derivative, squares)[0]


class DecoderStream:
    """The inverse of a flow over sequences in pieces, whose couplings keep their states.

    Arguments:
        decoder: the flow.
        cond: vectors of the speakers, (B, K).
    """

    def __init__(self, decoder: Compose, cond: Tensor | None = None):
        self.layers = [CouplingStream(layer, cond) if isinstance(layer, Coupling) else layer
                       for layer in reversed(decoder.layers)]

    def push(self, z: Tensor, last: bool = False) -> Tensor:
        """Frames `(B, C, n)` that are known after a new piece of latents; after the `last` one, all that are left."""
        nothing = z[:, :, :0]
        for layer in self.layers:
            if not z.shape[2]:  # nothing is known yet; the last piece brings at least itself through every layer
                return nothing
            z = layer.push(z, last) if isinstance(layer, CouplingStream) else layer.inverse(z)[0]
        return z


@torch.no_grad()
def stream_decoder(decoder: Compose, z: Tensor, cond: Tensor | None = None, *, chunk: int = 64) -> Iterator[Tensor]:
    """Latents decoded in chunks, as soon as the latents that they depend on are read.

    The concatenated chunks equal `decoder.inverse(z)`. The layers keep their states, so that the first chunk costs its
    frames and those of the context after it, and the others their frames alone.

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
    length, states, ready, read = z.shape[2], DecoderStream(decoder, cond), z[:, :, :0], 0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        until = min(length, -(-(end + context) // multiple) * multiple)
        if until > read:
            ready, read = torch.cat([ready, states.push(z[:, :, read:until], until == length)], 2), until
        yield ready[:, :, : end - start]
        ready = ready[:, :, end - start :]


def stream_latent(model: GlowTTS, drawn: Latent, speaker: Tensor | None = None, *, chunk: int = 64) -> Iterator[Tensor]:
    """The mel of one text in chunks, from its `GlowTTS.latent`; concatenated they equal the mel of `model.sample`.

    Shapes: pieces `(n_mels, chunk)`, the last one shorter.
    Errors: ValueError for more than one text, and what `stream_decoder` refuses.
    Source: Kim et al. 2020 (Glow-TTS); streaming is ours.
    """
    if len(drawn.z) != 1:
        raise ValueError(f"one text is streamed at a time, got {len(drawn.z)}")
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
