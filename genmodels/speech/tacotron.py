"""Tacotron 2, the autoregressive baseline: each frame from the previous frames and from attention to the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu

from genmodels.core.errors import at_least, check_temperature, one_of
from genmodels.core.random import Dropout, Generator, KeyedGenerator, checked, uniform
from genmodels.core.tensors import hide
from genmodels.nn.attention.local import LocalMonotonic
from genmodels.nn.attention.seq2seq import Additive, HardAttention, Keys, Location, ScaledDot, ScoredAttention, Stepwise
from genmodels.nn.blocks import ChannelNorm, run, zeroed
from genmodels.speech.text_encoder import TextEncoder


class PostNet(nn.Module):
    """A correction of a mel that uses frames on both sides: five convolutions, the last of which starts at zero.

        y = m + W_5 h_4,    h_k = dropout(tanh(norm(W_k h_{k-1}))),    h_0 = m

    A refined frame depends on later frames, so that it has no density given the previous ones: likelihoods are those of
    m. Normalisation is over the channels of each frame (in the source over the batch), so that neither padding nor
    other items matter.

    Arguments:
        n_mels: channels of the mel.
        channels: of the four layers between.
        kernel_size: odd, of every convolution.
        dropout: of every layer but the last.

    Shapes: `(B, n_mels, T)` with `mask (B, 1, T)`; frames outside it are zero.
    Source: Shen et al. 2018 (Tacotron 2), section 2.2.

    Example:
        >>> mean = torch.randn(1, 4, 7)
        >>> torch.equal(PostNet(4, 8)(mean), mean)
        True
    """

    def __init__(self, n_mels: int, channels: int = 512, *, kernel_size: int = 5, dropout: float = 0.5):
        super().__init__()
        widths = [n_mels, *[channels] * 4]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, channels, kernel_size, padding=kernel_size // 2) for width in widths[:-1]
        )
        self.norms = nn.ModuleList(ChannelNorm(channels) for _ in self.convolutions)
        self.dropout = Dropout(dropout)
        self.last = zeroed(nn.Conv1d(channels, n_mels, kernel_size, padding=kernel_size // 2))

    def forward(self, mean: Tensor, mask: Tensor | None = None) -> Tensor:
        h = hide(mean, mask)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            h = hide(self.dropout(torch.tanh(norm(convolution(h)))), mask)
        return hide(mean + self.last(h), mask)


AttentionKind = Literal["additive", "location", "location_previous", "scaled_dot", "hard", "local_monotonic"]

_ATTENTIONS: dict[str, Callable[[int, int], Stepwise]] = {
    "additive": lambda dim, _: ScoredAttention(dim, 1, Additive(dim, 1)),
    "location": lambda dim, _: ScoredAttention(dim, 1, Location(dim, 1)),
    "location_previous": lambda dim, _: ScoredAttention(dim, 1, Location(dim, 1, cumulative=False)),
    "scaled_dot": lambda dim, _: ScoredAttention(dim, 1, ScaledDot(dim, 1)),
    "hard": lambda dim, _: HardAttention(dim, 1),
    "local_monotonic": lambda dim, frames: LocalMonotonic(dim, 1, max_step=float(frames)),  # one token a frame at most
}

_BLOCK = 64  # steps whose dropout is drawn at once


def make_attention(kind: str, dim: int, frames: int = 1) -> Stepwise:
    """The attention of a decoder to a text of `dim` channels, with one head, for steps of some `frames`.

    Raises:
        ValueError: for an unknown kind.

    Example:
        >>> make_attention("location", 16).score.uses_past
        True
    """
    one_of("attention", kind, _ATTENTIONS)
    return _ATTENTIONS[kind](dim, frames)


class Memory(NamedTuple):
    """An encoded text or speech: `h (B, N, C)`, its keys, and its mask `(B, 1, N)` or None."""

    h: Tensor
    keys: Keys
    mask: Tensor | None


class State(NamedTuple):
    """The recurrent state: both LSTM cells, the last context vector, and the state of the attention."""

    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    context: Tensor
    attention: tuple


class Decoded(NamedTuple):
    """The decoder's output for the T frames of one step, or of all.

    Attributes:
        mean: `(B, n_mels, T)`.
        stop: logit that a frame is the last, `(B, T)`.
        weights: of the attention, `(B, N, T)`.
    """

    mean: Tensor
    stop: Tensor
    weights: Tensor


class Synthesised(NamedTuple):
    """Mels synthesised from texts.

    Attributes:
        mel: `(B, n_mels, T)`, zero outside the mask `(B, 1, T)`.
        weights: of the attention, `(B, N, T)`.
        stopped: whether the decoder stopped by itself, `(B,)`; otherwise the item was cut off.
    """

    mel: Tensor
    mask: Tensor
    weights: Tensor
    stopped: Tensor


class Tacotron(nn.Module):
    """Text to mel by two LSTM cells and an attention, with a Laplace density for each number of a frame.

        p_t = prenet(y_{t-1}),    s_t = LSTM_1(p_t, c_{t-1}),    c_t = attention(W s_t; text),    u_t = LSTM_2(s_t, c_t)
        m_t = V (u_t, c_t),       p(y_t | y_<t, text) = prod_c exp(-|y_tc - m_tc| / b_c) / 2 b_c
        P(t is the last frame) = sigmoid(v . (u_t, c_t))

    With r = `frames_per_step` above 1 a step, which sees the last frame of the step before, predicts r frames, which
    are independent given the past: r times fewer steps, and an attention that is learned sooner (Wang et al. 2017).

    The prenet's dropout stays on in synthesis, as published, because without it the decoder relies on the previous
    frame and ignores the text; its masks are drawn from the generator that is passed in.

    Arguments:
        encoder: symbols to h; its head is not used, and not trained.
        attention: `location`; `location_previous` without the sum of earlier weights; `additive`, `scaled_dot`, `hard`
            or `local_monotonic`.
        hidden: width of the LSTM cells.
        prenet: width of the prenet's two layers.
        dropout: of the prenet.
        postnet: channels of a network that refines the complete mel, 0 for none.
        frames_per_step: r, the reduction factor.
        checkpointing: recompute the decoder in the backward pass, 64 steps at a time, instead of storing activations.

    Shapes: mels `y (B, n_mels, T)` with `mask (B, 1, T)`; `tokens (B, N)` with `text_mask (B, 1, N)`.
    Errors: ValueError for an unknown attention, a dropout outside [0, 1).
    Source: Shen et al. 2018 (Tacotron 2), section 2.2; r: Wang et al. 2017 (Tacotron), section 3.3; attention:
        Bahdanau et al. 2015, Chorowski et al. 2015, Tjandra et al. 2017.

    Example:
        >>> model = Tacotron(TextEncoder(9, 4, channels=8, depth=1, hidden=8), hidden=16, prenet=8)
        >>> found = model.sample(torch.tensor([[3, 1, 2]]), generator=torch.Generator().manual_seed(0), max_frames=5)
        >>> found.mel.shape[1], found.weights.shape[1], found.stopped.shape
        (4, 3, torch.Size([1]))
    """

    def __init__(
        self,
        encoder: TextEncoder,
        *,
        attention: AttentionKind = "location",
        hidden: int = 1024,
        prenet: int = 256,
        dropout: float = 0.5,
        postnet: int = 0,
        frames_per_step: int = 1,
        checkpointing: bool = False,
    ):
        super().__init__()
        checked(dropout)
        at_least(1, hidden=hidden, prenet=prenet, frames_per_step=frames_per_step)
        at_least(0, postnet=postnet)
        self.encoder, self.n_mels, self.hidden, self.dropout = encoder, encoder.n_mels, hidden, dropout
        self.frames_per_step, self.checkpointing = frames_per_step, checkpointing
        encoder.head.requires_grad_(False)
        dim = encoder.channels
        self.prenet = nn.ModuleList([nn.Linear(self.n_mels, prenet), nn.Linear(prenet, prenet)])
        self.first = nn.LSTMCell(prenet + dim, hidden)
        self.query = nn.Linear(hidden, dim)
        self.attention = make_attention(attention, dim, frames_per_step)
        self.second = nn.LSTMCell(hidden + dim, hidden)
        self.head = nn.Linear(hidden + dim, frames_per_step * self.n_mels)
        self.stop = nn.Linear(hidden + dim, frames_per_step)
        self.log_scale = nn.Parameter(torch.zeros(self.n_mels))  # log b
        self.postnet = PostNet(self.n_mels, postnet) if postnet else None

    def remember(self, tokens: Tensor, text_mask: Tensor | None = None, speaker: Tensor | None = None) -> Memory:
        """The encoded text, projected once for all frames."""
        h = self.encoder(tokens, text_mask, speaker)[0].mT
        return Memory(h, self.attention.keys(h, text_mask), text_mask)

    def start(self, memory: Memory) -> State:
        """The state before the first frame."""
        zeros = memory.h.new_zeros(len(memory.h), self.hidden)
        context = memory.h.new_zeros(len(memory.h), memory.h.shape[2])
        return State((zeros, zeros), (zeros, zeros), context, self.attention.start(memory.h))

    def step(self, before: Tensor, kept: Tensor, state: State, memory: Memory) -> tuple[Decoded, State]:
        """The next frames, from the last one `(B, n_mels)` and the prenet's dropout `(B, 2, prenet)` as factors."""
        found, weights, state = self._advance(self._prenet(before, kept), state, memory)
        return self._decoded(found[:, None], weights[..., None]), state

    def forward(self, y: Tensor, memory: Memory, generator: Generator, mask: Tensor | None = None) -> Decoded:
        """Every frame from the true previous ones (teacher forcing); later frames have no influence."""
        y, length, r = hide(y, mask), y.shape[2], self.frames_per_step
        before = torch.cat([torch.zeros_like(y[:, :, :1]), y[:, :, r - 1 : length - 1 : r]], dim=2).mT
        steps, factors = before.shape[1], self.factors(generator, len(y), y)
        blocks = [next(factors) for _ in range(-(-steps // _BLOCK))]
        entering = self._prenet(before, torch.cat(blocks, dim=1)[:, :steps])
        state, found, weights = self.start(memory), [], []
        for some in entering.split(_BLOCK, 1):
            here, looked, state = run(self._advance_all, some, state, memory, again=self.checkpointing)
            found.append(here)
            weights.append(looked)
        return Decoded(*(part[..., :length] for part in self._decoded(torch.cat(found, 1), torch.cat(weights, 2))))

    def log_prob(self, y: Tensor, forced: Decoded, mask: Tensor | None = None) -> Tensor:
        """log p(y | text, its number of frames) in nats, (B,), for the dropout that was drawn.

        The expectation over draws is a lower bound of the log of the mean density, by Jensen's inequality.
        """
        y, log_scale = hide(y, mask), self.log_scale[:, None]
        density = -(y - forced.mean).abs() * torch.exp(-log_scale) - log_scale - math.log(2)
        return hide(density, mask).sum((1, 2))

    def loss(self, y: Tensor, forced: Decoded, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Nats per dimension (B,), and the cross-entropy (B,) of the stop, nats per frame."""
        batch, length = forced.stop.shape
        count = torch.full((batch,), length, device=y.device) if mask is None else mask[:, 0].sum(1)
        last = torch.arange(length, device=y.device) == (count - 1)[:, None]
        wrong = binary_cross_entropy_with_logits(forced.stop, last.to(forced.stop.dtype), reduction="none")
        stop = hide(wrong[:, None], mask)[:, 0].sum(1) / count
        return -self.log_prob(y, forced, mask) / (self.n_mels * count), stop

    def refinement(self, y: Tensor, forced: Decoded, mask: Tensor | None = None) -> Tensor | None:
        """Mean absolute error (B,) per cell of the refined means; None without a post-net.

        The means are detached, so that the post-net does not influence them.
        """
        if self.postnet is None:
            return None
        distance = hide((y - self.postnet(forced.mean.detach(), mask)).abs(), mask).sum((1, 2))
        count = y.shape[2] if mask is None else mask[:, 0].sum(1)
        return distance / (self.n_mels * count)

    @torch.no_grad()
    def sample(
        self, tokens: Tensor, text_mask: Tensor | None = None, speaker: Tensor | None = None, *,
        generator: Generator, temperature: float = 0.0, max_frames: int | Tensor = 2000, threshold: float = 0.5,
    ) -> Synthesised:  # fmt: skip
        """Mels of texts, each until the decoder stops.

        Arguments:
            generator: of the prenet's dropout and of the frames' noise.
            temperature: factor on the scales b; 0 for means, as is usual.
            max_frames: where an item is cut off, one number or (B,); its `stopped` is then False, which counts as a
                failure.
            threshold: probability of the stop token from which the decoder stops.

        Raises:
            ValueError: for a temperature below 0 or not finite, a threshold outside (0, 1), max_frames below 1.
        """
        most = torch.as_tensor(max_frames, device=tokens.device)
        check_temperature(temperature)
        if not 0 < threshold < 1 or bool((most < 1).any()):
            raise ValueError("threshold must lie in (0, 1) and max_frames be at least 1, "
                             f"got {threshold} and {max_frames}")
        memory = self.remember(tokens, text_mask, speaker)
        state, frame = self.start(memory), memory.h.new_zeros(len(tokens), self.n_mels)
        limit = math.log(threshold / (1 - threshold))
        noise = generator.child("frames") if isinstance(generator, KeyedGenerator) else generator
        length = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        speaking, stopped = torch.ones_like(length, dtype=torch.bool), torch.zeros_like(length, dtype=torch.bool)
        frames, weights = [], []
        factors = (kept for block in self.factors(generator, len(tokens), frame) for kept in block.unbind(1))
        while bool(speaking.any()):
            decoded, state = self.step(frame, next(factors), state, memory)
            some = decoded.mean
            if temperature:
                some = some + temperature * self.log_scale.exp()[:, None] * _laplace(some, noise)
            frames.append(some)
            weights.append(decoded.weights)
            frame = some[:, :, -1]
            for last in (decoded.stop > limit).unbind(1):
                length += speaking
                stopped |= speaking & last
                speaking = speaking & ~stopped & (length < most)
        mask = (torch.arange(int(length.max()), device=tokens.device) < length[:, None])[:, None]
        mel, looked = (hide(torch.cat(part, 2)[:, :, : mask.shape[2]], mask) for part in (frames, weights))
        refined = mel if self.postnet is None else self.postnet(mel, mask)
        return Synthesised(refined, mask, looked, stopped)

    def factors(self, generator: Generator, batch: int, like: Tensor) -> Iterator[Tensor]:
        """An endless stream of the prenet's dropout factors, `(B, 64, 2, prenet)` at a time: 0, or 1/(1 - dropout).

        Drawn in blocks of steps, so that the start of a mel does not depend on its length.
        """
        width, rate = self.prenet[0].out_features, self.dropout
        source = generator.child("prenet") if isinstance(generator, KeyedGenerator) else generator
        while True:
            drawn = uniform((batch, _BLOCK, 2, width), source, dtype=torch.float32, device=like.device)
            yield (drawn >= rate).to(like.dtype) / (1 - rate)

    def _decoded(self, found: Tensor, weights: Tensor) -> Decoded:
        """The frames of S steps, from the input (B, S, hidden + C) of the output layers and the weights (B, N, S)."""
        mean = self.head(found).unflatten(2, (self.frames_per_step, self.n_mels)).flatten(1, 2).mT
        return Decoded(mean, self.stop(found).flatten(1), weights.repeat_interleave(self.frames_per_step, 2))

    def _prenet(self, before: Tensor, kept: Tensor) -> Tensor:
        """(.., n_mels) to (.., prenet)."""
        for layer, factor in zip(self.prenet, kept.unbind(-2), strict=True):
            before = relu(layer(before)) * factor
        return before

    def _advance_all(self, entering: Tensor, state: State, memory: Memory) -> tuple[Tensor, Tensor, State]:
        """`_advance` for S steps (B, S, prenet), one after the other: (B, S, hidden + C), (B, N, S), the last state."""
        found, weights = [], []
        for one in entering.unbind(1):
            here, looked, state = self._advance(one, state, memory)
            found.append(here)
            weights.append(looked)
        return torch.stack(found, 1), torch.stack(weights, 2), state

    def _advance(self, entering: Tensor, state: State, memory: Memory) -> tuple[Tensor, Tensor, State]:
        """The input of the output layers for the next step, the attention weights (B, N), and the new state."""
        first = self.first(torch.cat([entering, state.context], 1), state.first)
        context, weights, looked = self.attention.step(
            self.query(first[0]), memory.h, memory.keys, state.attention, memory.mask
        )
        second = self.second(torch.cat([first[0], context], 1), state.second)
        return torch.cat([second[0], context], 1), weights[:, 0], State(first, second, context, looked)


def _laplace(like: Tensor, generator: Generator) -> Tensor:
    """Draws of the density exp(-|x|)/2 with the shape of `like`: -sign(u) log(1 - 2|u|) for u uniform around 0."""
    u = uniform(tuple(like.shape), generator, dtype=torch.float64, device=like.device) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.5 - 2.0**-33))).to(like.dtype)
