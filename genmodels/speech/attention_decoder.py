"""Listen, attend and spell: a text character by character, each from those before it and from attention to frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.core.errors import at_least
from genmodels.core.random import Generator, uniform
from genmodels.core.tensors import wide
from genmodels.nn.attention import Keys
from genmodels.nn.dropout import Dropout
from genmodels.speech.decoding import BLANK, Hypothesis, Search, beam_search
from genmodels.speech.tacotron import AttentionKind, make_attention


class Heard(NamedTuple):
    """Encoded speech: `h (B, T, C)`, its keys for the attention, and the mask of frames `(B, 1, T)`."""

    h: Tensor
    keys: Keys
    mask: Tensor


class SpellerState(NamedTuple):
    """The cell of the LSTM, the last context vector, and the state of the attention."""

    cell: tuple[Tensor, Tensor]
    context: Tensor
    attention: tuple


class AttentionDecoder(nn.Module):
    """Each character of a text, and then its end, given the ones before it.

        s_u = LSTM((e(y_{u-1}), c_{u-1}), s_{u-1}),    c_u = attention(W s_u; h)
        p(y_u | y_<u, h) = softmax(V (s_u, c_u))

    Class 0 is the beginning and the end of a text. With triggers, character u sees frames up to `trigger_u + delay`
    alone, so that it can be written while the rest is yet to come.

    Arguments:
        channels: of h.
        classes: number of characters and the end.
        attention: score function, as of `model=tacotron`: `additive`, `location`, `scaled_dot`, ...
        hidden: width of the LSTM.
        dropout: of characters read and of the output's input.
        delay: frames of h after its trigger that a character sees; None for all frames, without triggers.

    Shapes: `h (B, C, T)` with `frames (B,)` valid ones, `y (B, N)` with `counts (B,)` valid characters, `triggers
        (B, N)` frames of h, one for each character.
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

    def listen(self, h: Tensor, frames: Tensor) -> Heard:
        """Frames, projected once for all characters."""
        mask = (torch.arange(h.shape[2], device=h.device) < frames[:, None])[:, None]
        return Heard(h.mT, self.attention.keys(h.mT, mask), mask)

    def start(self, heard: Heard) -> SpellerState:
        """The state before the first character."""
        zeros = heard.h.new_zeros(len(heard.h), self.hidden)
        return SpellerState((zeros, zeros), zeros.new_zeros(len(zeros), heard.h.shape[2]),
                            self.attention.start(heard.h))

    def step(self, tokens: Tensor, state: SpellerState, heard: Heard) -> tuple[Tensor, SpellerState]:
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
            triggers: one frame for each character, where the decoder has a delay.
            sampled: probability that a character is fed back as the decoder foresaw it, and not as it is (scheduled
                sampling, Bengio et al. 2015).
            generator: of that choice.
        """
        heard = self.listen(h, frames)
        state, entering, found = self.start(heard), torch.full_like(frames, BLANK), []
        given = None if not sampled else uniform(tuple(y.shape), generator, device=y.device) >= sampled
        if triggers is not None:  # the end of a text sees all frames, also where longer texts go on
            beyond = torch.arange(y.shape[1], device=y.device) >= counts[:, None]
            triggers = triggers.masked_fill(beyond, h.shape[2])
        for u in range(y.shape[1] + 1):
            seen = heard if triggers is None else self.until(heard, triggers[:, u] if u < y.shape[1] else None)
            log_probs, state = self.step(entering, state, seen)
            found.append(log_probs)
            if u < y.shape[1]:
                entering = y[:, u] if given is None else torch.where(given[:, u], y[:, u], log_probs.argmax(1))
        return torch.stack(found, 1)

    def until(self, heard: Heard, trigger: Tensor | None) -> Heard:
        """What a character with a trigger (B,) sees; all frames for None, as the end of a text does."""
        if trigger is None or self.delay is None:
            return heard
        place = torch.arange(heard.h.shape[1], device=heard.h.device)
        return heard._replace(mask=heard.mask & (place <= (trigger + self.delay)[:, None, None]))

    def log_prob(
        self, h: Tensor, frames: Tensor, y: Tensor, counts: Tensor, triggers: Tensor | None = None
    ) -> Tensor:
        """log p(y | h) in nats with the end of the text, `(B,)`."""
        return -cross_entropy(self(h, frames, y, counts, triggers=triggers), y, counts)

    def search(
        self, h: Tensor, frames: Tensor, how: Search, triggers: Sequence[Sequence[int]] | None = None
    ) -> list[list[Hypothesis]]:
        """The texts found for each item, best first; the triggers of characters beyond those given are the last frame.

        A text is at most as long as there are frames.
        """
        found = []
        for k, n in enumerate(frames.tolist()):
            heard = self.listen(h[k : k + 1, :, :n], frames[k : k + 1])
            given = None if triggers is None else triggers[k]

            def step(tokens: Tensor, state: tuple, heard: Heard = heard, given=given) -> tuple[Tensor, tuple]:
                done, inner = state
                u = int(done[0])
                seen = heard
                if given is not None and u < len(given):
                    seen = self.until(heard, torch.tensor([given[u]], device=h.device))
                rows = len(tokens)
                many = Heard(seen.h.expand(rows, -1, -1), Keys(*(part.expand(rows, -1, -1, -1) for part in seen.keys)),
                             seen.mask.expand(rows, -1, -1))
                log_probs, inner = self.step(tokens, inner, many)
                return log_probs, (done + 1, inner)

            begun = (torch.zeros(1, dtype=torch.int64, device=h.device), self.start(heard))
            found.append(beam_search(step, begun, how, longest=n, device=h.device))
        return found


def cross_entropy(log_probs: Tensor, y: Tensor, counts: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log p of the characters and the end of each text, `(B,)`; with smoothing, of targets spread over all classes.

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
