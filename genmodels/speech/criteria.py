"""Likelihoods of texts given frames: CTC, the transducer (RNN-T), and LAS: its listener and attention decoders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, pad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from genmodels.core.errors import at_least
from genmodels.core.random import Dropout, Generator, uniform
from genmodels.core.tensors import hide, wide
from genmodels.nn.attention import Keys
from genmodels.speech.decoding import BLANK, Hypothesis, Search, beam_search, ctc_beam, ctc_greedy, plus
from genmodels.speech.tacotron import AttentionKind, Memory, make_attention


class CTC(nn.Module):
    """A character or a blank at every frame, conditionally independent given the frames.

        p(y | h) = sum over paths that collapse to y of prod_t p(k_t | h_t)

    A path collapses to a text by merging repetitions and then removing blanks (class 0). The probabilities of all texts
    add up to one.

    Arguments:
        channels: of h.
        classes: number of characters and the blank.

    Shapes: `h (B, C, T)` with `frames (B,)` valid ones, `y (B, N)` with `counts (B,)` valid characters.
    Source: Graves et al. 2006, section 3.

    Example:
        >>> ctc, h = CTC(4, 3), torch.zeros(1, 4, 2)
        >>> ctc.log_prob(h, torch.tensor([2]), torch.tensor([[1, 1]]), torch.tensor([2])).exp()  # needs a blank between
        tensor([0.], grad_fn=<ExpBackward0>)
    """

    kind = "exact"

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.head = nn.Linear(channels, classes)

    def log_probs(self, h: Tensor) -> Tensor:
        """log p of every class at every frame, `(B, T, V)`, float32 or wider."""
        return wide(self.head(h.mT)).log_softmax(-1)

    def log_prob(self, h: Tensor, frames: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        """log p(y | h) in nats, `(B,)`; minus infinity for a text that has no path."""
        rows = self.log_probs(h).transpose(0, 1)
        return -ctc_loss(rows, y, frames, counts, blank=BLANK, reduction="none")

    def search(self, h: Tensor, frames: Tensor, how: Search) -> list[list[Hypothesis]]:
        """The texts found for each item, best first; for a beam of 1 the text of the best path."""
        log_probs = self.log_probs(h)
        if how.beam == 1:
            return [[found] for found in ctc_greedy(log_probs, frames)]
        return [ctc_beam(row[:n], how) for row, n in zip(log_probs, frames.tolist(), strict=True)]


def least_frames(y: Tensor, counts: Tensor) -> Tensor:
    """The fewest frames (B,) of a text by CTC: one for each character, and one between equal neighbours.

    Example:
        >>> least_frames(torch.tensor([[5, 5, 6], [4, 0, 0]]), torch.tensor([3, 1]))
        tensor([4, 1])
    """
    inside = torch.arange(1, y.shape[1], device=y.device) < counts[:, None]
    return counts + ((y[:, 1:] == y[:, :-1]) & inside).sum(1)


def transducer_log_prob(blank: Tensor, emit: Tensor, frames: Tensor, counts: Tensor) -> Tensor:
    """The log-probability of a text by a transducer, summed over all alignments.

        alpha(t, u) = alpha(t-1, u) blank(t-1, u) + alpha(t, u-1) emit(t, u-1),    alpha(0, 0) = 1
        log p(y | h) = log alpha(T-1, U) + log blank(T-1, U)

    computed in logarithms by anti-diagonals t + u. The gradient, by autograd, is the posterior of every step.

    Arguments:
        blank: log-probability of moving to the next frame at (t, u), `(B, T, U + 1)`.
        emit: log-probability of character u + 1 at (t, u), `(B, T, U)`.
        frames, counts: valid frames and characters of each item, `(B,)`.

    An item without frames has no alignment: minus infinity.
    Errors: ValueError for shapes that do not fit.
    Source: Graves 2012, equations 16 to 18; anti-diagonals: Bagby et al. 2018.

    Example:
        >>> half = torch.full((1, 2, 2), 0.5).log()
        >>> transducer_log_prob(half, half[..., :1], torch.tensor([2]), torch.tensor([1])).exp()  # two ways of 1/8
        tensor([0.2500])
    """
    batch, length, places = blank.shape
    if emit.shape != (batch, length, places - 1):
        raise ValueError(f"emit must be (B, T, U) = {(batch, length, places - 1)}, got {tuple(emit.shape)}")
    u = torch.arange(places, device=blank.device)
    last = length + places - 1
    t = (torch.arange(last, device=blank.device)[:, None] - u).clamp(0, length - 1)  # frame of each diagonal's cells
    skew = t.expand(batch, last, places)
    stays, moves = blank.gather(1, skew), pad(emit, (0, 1)).gather(1, skew)
    alpha = torch.zeros_like(blank[:, 0])
    diagonals = [alpha]
    for n in range(1, last):
        stayed, moved = alpha + stays[:, n - 1], pad((alpha + moves[:, n - 1])[:, :-1], (1, 0))
        # The first frame (u = n) and the empty text (u = 0) have one predecessor.
        alpha = torch.where(u == n, moved, torch.where(u == 0, stayed, torch.logaddexp(stayed, moved)))
        # Cells outside the lattice are 0, because the derivatives at minus infinity are NaN.
        alpha = torch.where((u <= n) & (n - u < length), alpha, 0)
        diagonals.append(alpha)
    rows = torch.arange(batch, device=blank.device)
    before = (frames - 1).clamp(min=0)
    ends = torch.stack(diagonals, 1)[rows, before + counts, counts]
    return torch.where(frames > 0, ends + blank[rows, before, counts], -torch.inf)


class Transducer(nn.Module):
    """A character or a blank at every frame and after every prefix of the text, encoded by a recurrent network.

        p(k | t, u) = softmax(W tanh(h_t + g_u)),    g = LSTM(blank, y_1, ..., y_U)
        p(y | h) = sum over alignments, where a blank moves to the next frame (`transducer_log_prob`)

    Its probabilities take 4 B T (U + 1) V bytes, and a few times that in training.

    Arguments:
        channels: of h.
        classes: number of characters and the blank.
        hidden: width of the LSTM and of the joint network.

    Shapes: as in `CTC`.
    Source: Graves 2012; the joint network: Graves et al. 2013, section 3.

    Example:
        >>> model, h = Transducer(4, 3, hidden=5), torch.zeros(2, 4, 7)
        >>> model.log_prob(h, torch.tensor([7, 2]), torch.tensor([[1, 2], [2, 0]]), torch.tensor([2, 1])).shape
        torch.Size([2])
    """

    def __init__(self, channels: int, classes: int, *, hidden: int = 256):
        super().__init__()
        at_least(1, hidden=hidden)
        self.embedding = nn.Embedding(classes, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.frame = nn.Linear(channels, hidden)
        self.text = nn.Linear(hidden, hidden, bias=False)
        self.head = nn.Linear(hidden, classes)

    def joint(self, frames: Tensor, texts: Tensor) -> Tensor:
        """log p of every class, from `frame(h)` and `text(g)` of shapes that broadcast to `(.., hidden)`."""
        return wide(self.head(torch.tanh(frames + texts))).log_softmax(-1)

    def log_prob(self, h: Tensor, frames: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        """log p(y | h) in nats, `(B,)`."""
        g, _ = self.lstm(self.embedding(pad(y, (1, 0), value=BLANK)))
        log_probs = self.joint(self.frame(h.mT)[:, :, None], self.text(g)[:, None])  # (B, T, U + 1, V)
        chosen = y[:, None, :, None].expand(-1, h.shape[2], -1, 1)
        emit = log_probs[:, :, :-1].gather(3, chosen)[..., 0]
        return transducer_log_prob(log_probs[..., BLANK], emit, frames, counts)

    def search(self, h: Tensor, frames: Tensor, how: Search) -> list[list[Hypothesis]]:
        """The texts found for each item, best first; alignments of the same text are summed."""
        return [self._search(row[:, :n], how) for row, n in zip(h, frames.tolist(), strict=True)]

    def _search(self, h: Tensor, how: Search) -> list[Hypothesis]:
        known: dict[tuple[int, ...], tuple[Tensor, tuple[Tensor, Tensor]]] = {}

        def read(text: tuple[int, ...]) -> Tensor:
            if text not in known:
                if text:
                    read(text[:-1])
                state, token = (known[text[:-1]][1], text[-1]) if text else (None, BLANK)
                g, state = self.lstm(self.embedding(torch.tensor([[token]], device=h.device)), state)
                known[text] = self.text(g)[0, 0], state
            return known[text][0]

        kept: dict[tuple[int, ...], float] = {(): 0.0}
        for frame in self.frame(h.T):
            done: dict[tuple[int, ...], float] = {}
            for _ in range(how.symbols + 1):
                rows = self.joint(frame, torch.stack([read(text) for text in kept])).double().tolist()
                longer = {}
                for (text, score), row in zip(kept.items(), rows, strict=True):
                    done[text] = plus(done.get(text, -math.inf), score + row[BLANK])
                    # Different texts never have the same continuation.
                    longer |= {(*text, k): score + p for k, p in enumerate(row) if k != BLANK}
                kept = dict(how.best(longer))
                if len(done) >= how.beam and max(map(how.ranked, kept.items())) < how.ranked(how.best(done)[-1]):
                    break  # neither these nor their continuations would be kept
            kept = dict(how.best(done))
        return how.finished(kept)


class PyramidalLSTM(nn.Module):
    """The listener of LAS: an encoder of bidirectional LSTMs, each after the first at half the rate of that below.

        h^0 = BLSTM(x),    h^j_i = BLSTM(h^{j-1}_{2i}, h^{j-1}_{2i+1}),    j = 1, ..., log2 subsampling

    It reads the whole utterance, so that it cannot be streamed.

    Arguments:
        n_mels: channels of the mel.
        channels: of h, half of them from each direction; even.
        subsampling: frames of the mel for each of h, 2, 4 or 8.
        dropout: of the input of every layer after the first, and of h.

    Shapes: `x (B, n_mels, T)` with `mask (B, 1, T)` to `(B, C, ceil(T / subsampling))` with the mask of these; padding
        has no influence.
    Errors: ValueError for an odd number of channels, or another factor.
    Source: Chan et al. 2016 (LAS), section 3.1.

    Example:
        >>> h, _ = PyramidalLSTM(4, channels=6, subsampling=8)(torch.zeros(1, 4, 9))
        >>> h.shape
        torch.Size([1, 6, 2])
    """

    chunk = None  # of streams, as of `SpeechEncoder`

    def __init__(self, n_mels: int, *, channels: int = 256, subsampling: Literal[2, 4, 8] = 4, dropout: float = 0.1):
        super().__init__()
        at_least(1, n_mels=n_mels, channels=channels)
        if channels % 2 or subsampling not in (2, 4, 8):
            raise ValueError(f"channels must be even and subsampling 2, 4 or 8, got {channels} and {subsampling}")
        self.channels, self.subsampling = channels, subsampling
        widths = [n_mels, *[2 * channels] * (subsampling.bit_length() - 1)]
        self.layers = nn.ModuleList(
            nn.LSTM(width, channels // 2, batch_first=True, bidirectional=True) for width in widths)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        h, valid = hide(x, mask).mT, x.new_ones(len(x), 1, x.shape[2]).bool() if mask is None else mask
        for number, layer in enumerate(self.layers):
            if number:
                h = pad(h, (0, 0, 0, h.shape[1] % 2))
                h, valid = self.dropout(h).unflatten(1, (-1, 2)).flatten(2), valid[..., ::2]
            # Packed, so that the backward direction begins at the end of each utterance.
            packed = pack_padded_sequence(h, valid.sum((1, 2)).cpu(), batch_first=True, enforce_sorted=False)
            h, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=valid.shape[2])
        return self.dropout(h).mT, None if mask is None else valid


class SpellerState(NamedTuple):
    """The cell of the LSTM, the last context vector, and the state of the attention."""

    cell: tuple[Tensor, Tensor]
    context: Tensor
    attention: tuple


class AttentionDecoder(nn.Module):
    """Each character of a text, and its end, given the previous ones.

        s_u = LSTM((e(y_{u-1}), c_{u-1}), s_{u-1}),    c_u = attention(W s_u; h)
        p(y_u | y_<u, h) = softmax(V (s_u, c_u))

    Class 0 is the beginning and the end of a text. With triggers, character u attends to frames up to `trigger_u +
    delay` only, so that decoding can be streamed.

    Arguments:
        channels: of h.
        classes: number of characters and the end.
        attention: as of `model=tacotron`: `additive`, `location`, `scaled_dot`, ...
        hidden: width of the LSTM.
        dropout: of the embedded characters and of the input of the output layer.
        delay: frames of h after its trigger that a character attends to; None for all frames, without triggers.

    Shapes: `h (B, C, T)` with `frames (B,)` valid ones, `y (B, N)` with `counts (B,)` valid characters, `triggers
        (B, N + 1)` frames of h, one for each character and for the end; T for all frames.
    Errors: ValueError for an unknown attention, a width below 1, a delay below 0.
    Source: Chan et al. 2016 (LAS), section 3.2; triggers: Moritz et al. 2019, section 2.

    Example:
        >>> decoder, h = AttentionDecoder(4, 3, hidden=5).eval(), torch.zeros(2, 4, 7)
        >>> decoder.log_prob(h, torch.tensor([7, 2]), torch.tensor([[1, 2], [2, 0]]), torch.tensor([2, 1])).shape
        torch.Size([2])
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        attention: AttentionKind = "location",
        hidden: int = 256,
        dropout: float = 0.1,
        delay: int | None = None,
    ):
        super().__init__()
        at_least(1, hidden=hidden)
        if delay is not None:
            at_least(0, delay=delay)
        self.hidden, self.delay = hidden, delay
        self.embedding = nn.Embedding(classes, hidden)
        self.cell = nn.LSTMCell(hidden + channels, hidden)
        self.query = nn.Linear(hidden, channels)
        self.attention = make_attention(attention, channels)
        self.head = nn.Linear(hidden + channels, classes)
        self.dropout = Dropout(dropout)

    def listen(self, h: Tensor, frames: Tensor) -> Memory:
        """The frames, projected once for all characters."""
        mask = (torch.arange(h.shape[2], device=h.device) < frames[:, None])[:, None]
        return Memory(h.mT, self.attention.keys(h.mT, mask), mask)

    def start(self, heard: Memory) -> SpellerState:
        """The state before the first character."""
        zeros = heard.h.new_zeros(len(heard.h), self.hidden)
        return SpellerState((zeros, zeros), zeros.new_zeros(len(zeros), heard.h.shape[2]),
                            self.attention.start(heard.h))

    def step(
        self, tokens: Tensor, state: SpellerState, heard: Memory
    ) -> tuple[Tensor, SpellerState]:
        """log p of every class `(B, V)` after one more character `(B,)`."""
        entering = torch.cat([self.dropout(self.embedding(tokens)), state.context], 1)
        cell = self.cell(entering, state.cell)
        context, _, looked = self.attention.step(self.query(cell[0]), heard.h, heard.keys, state.attention, heard.mask)
        logits = self.head(self.dropout(torch.cat([cell[0], context], 1)))
        return wide(logits).log_softmax(-1), SpellerState(cell, context, looked)

    def forward(
        self, h: Tensor, frames: Tensor, y: Tensor, counts: Tensor, *, triggers: Tensor | None = None,
        sampled: float = 0.0, generator: Generator | None = None,
    ) -> Tensor:
        """log p of every class after every true prefix of a text, `(B, N + 1, V)`.

        Arguments:
            triggers: the frame of each character and of the end, where the decoder has a delay.
            sampled: probability that the predicted instead of the true character is fed back (scheduled sampling,
                Bengio et al. 2015).
            generator: of that choice.
        """
        heard = self.listen(h, frames)
        state, entering, found = self.start(heard), torch.full_like(frames, BLANK), []
        given = None if not sampled else uniform(tuple(y.shape), generator, device=y.device) >= sampled
        for u in range(y.shape[1] + 1):
            seen = heard if triggers is None else self.until(heard, triggers[:, u])
            log_probs, state = self.step(entering, state, seen)
            found.append(log_probs)
            if u < y.shape[1]:
                entering = y[:, u] if given is None else torch.where(given[:, u], y[:, u], log_probs.argmax(1))
        return torch.stack(found, 1)

    def until(self, heard: Memory, trigger: Tensor) -> Memory:
        """The frames for a character with a trigger (B,)."""
        if self.delay is None:
            return heard
        place = torch.arange(heard.h.shape[1], device=heard.h.device)
        return heard._replace(mask=heard.mask & (place <= (trigger + self.delay)[:, None, None]))

    def log_prob(self, h: Tensor, frames: Tensor, y: Tensor, counts: Tensor, triggers: Tensor | None = None) -> Tensor:
        """log p(y | h) in nats with the end of the text, `(B,)`."""
        return -cross_entropy(self(h, frames, y, counts, triggers=triggers), y, counts)

    def search(
        self, h: Tensor, frames: Tensor, how: Search, triggers: Sequence[Sequence[int]] | None = None,
        longest: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The texts found for each item, best first; characters beyond the triggers given attend to all frames.

        A text has at most `longest` characters, by default as many as there are frames.
        """
        found = []
        for k, n in enumerate(frames.tolist()):
            heard = self.listen(h[k : k + 1, :, :n], frames[k : k + 1])
            given = None if triggers is None else triggers[k]

            def step(
                tokens: Tensor, state: tuple, heard: Memory = heard, given=given
            ) -> tuple[Tensor, tuple]:
                done, inner = state
                u = int(done[0])
                seen = heard
                if given is not None and u < len(given):
                    seen = self.until(heard, torch.tensor([given[u]], device=h.device))
                rows = len(tokens)
                keys = Keys(*(part.expand(rows, -1, -1, -1) for part in seen.keys))
                many = Memory(seen.h.expand(rows, -1, -1), keys, seen.mask.expand(rows, -1, -1))
                log_probs, inner = self.step(tokens, inner, many)
                return log_probs, (done + 1, inner)

            begun = (torch.zeros(1, dtype=torch.int64, device=h.device), self.start(heard))
            found.append(beam_search(step, begun, how, longest=n if longest is None else longest, device=h.device))
        return found


def cross_entropy(log_probs: Tensor, y: Tensor, counts: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log p of the characters and the end of each text, `(B,)`, with label smoothing e.

        sum_u [-(1 - e) log p(y_u) - e/V sum_k log p(k)]

    Shapes: `log_probs (B, N + 1, V)`, `y (B, N)`, `counts (B,)`.
    Source: Szegedy et al. 2016, section 7.

    Example:
        >>> even = torch.full((1, 2, 4), 0.25).log()
        >>> cross_entropy(even, torch.tensor([[3]]), torch.tensor([1])).exp()  # a character and the end
        tensor([16.])
    """
    place = torch.arange(log_probs.shape[1], device=y.device)
    target = torch.where(place == counts[:, None], BLANK, pad(y, (0, 1)))
    wanted = log_probs.gather(2, target[..., None])[..., 0]
    spread = wanted if not smoothing else (1 - smoothing) * wanted + smoothing * log_probs.mean(2)
    return -spread.masked_fill(place > counts[:, None], 0).sum(1)
