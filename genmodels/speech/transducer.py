"""Probabilities of texts as sums over their alignments with frames: CTC and the transducer (RNN-T)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, pad

from genmodels.core.errors import at_least
from genmodels.core.tensors import wide
from genmodels.speech.decoding import BLANK, Hypothesis, Search, ctc_beam, ctc_greedy, plus


class CTC(nn.Module):
    """A character or a blank at every frame, independent of one another given the frames.

        p(y | h) = sum over paths that collapse to y of prod_t p(k_t | h_t)

    A path collapses to a text by counting repetitions once and then dropping the blanks (class 0). The probabilities
    of all texts add up to one.

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
        """The texts found for each item, best first: that of the best path for a beam of 1."""
        log_probs = self.log_probs(h)
        if how.beam == 1:
            return [[found] for found in ctc_greedy(log_probs, frames)]
        return [ctc_beam(row[:n], how) for row, n in zip(log_probs, frames.tolist(), strict=True)]


def least_frames(y: Tensor, counts: Tensor) -> Tensor:
    """The frames (B,) that a text needs at least by CTC: one for each character, and one between two that are equal.

    Example:
        >>> least_frames(torch.tensor([[5, 5, 6], [4, 0, 0]]), torch.tensor([3, 1]))
        tensor([4, 1])
    """
    inside = torch.arange(1, y.shape[1], device=y.device) < counts[:, None]
    return counts + ((y[:, 1:] == y[:, :-1]) & inside).sum(1)


def transducer_log_prob(blank: Tensor, emit: Tensor, frames: Tensor, counts: Tensor) -> Tensor:
    """The sum over all ways to take the frames and to write the characters of a text in turn.

        alpha(t, u) = alpha(t-1, u) blank(t-1, u) + alpha(t, u-1) emit(t, u-1),    alpha(0, 0) = 1
        log p(y | h) = log alpha(T-1, U) + log blank(T-1, U)

    in logarithms, one anti-diagonal t + u after the other. The gradient is that of autograd, the posterior of every
    step.

    Arguments:
        blank: log-probability of going on to the next frame at (t, u), `(B, T, U + 1)`.
        emit: log-probability of writing character u + 1 at (t, u), `(B, T, U)`.
        frames, counts: valid ones of each item, `(B,)`.

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
    t = (torch.arange(last, device=blank.device)[:, None] - u).clamp(0, length - 1)  # the frame of cell u on each one
    skew = t.expand(batch, last, places)
    stays, moves = blank.gather(1, skew), pad(emit, (0, 1)).gather(1, skew)
    alpha = torch.zeros_like(blank[:, 0])
    diagonals = [alpha]
    for n in range(1, last):
        stayed, moved = alpha + stays[:, n - 1], pad((alpha + moves[:, n - 1])[:, :-1], (1, 0))
        # A first frame has no frame before it, and no characters none either: there the other way is the only one.
        alpha = torch.where(u == n, moved, torch.where(u == 0, stayed, torch.logaddexp(stayed, moved)))
        # Cells outside of the lattice hold 0, not minus infinity, whose derivatives are not numbers.
        alpha = torch.where((u <= n) & (n - u < length), alpha, 0)
        diagonals.append(alpha)
    rows = torch.arange(batch, device=blank.device)
    ends = torch.stack(diagonals, 1)[rows, frames - 1 + counts, counts]
    return ends + blank[rows, frames - 1, counts]


class Transducer(nn.Module):
    """A character or a blank at every frame and after every text so far, which a recurrent network reads.

        p(k | t, u) = softmax(W tanh(h_t + g_u)),    g = LSTM(blank, y_1, ..., y_U)
        p(y | h) = sum over alignments, a blank goes on to the next frame (`transducer_log_prob`)

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
        """The texts found for each item, best first, frame after frame; alignments of the same text are summed."""
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
                    # Two texts that differ never have the same continuation.
                    longer |= {(*text, k): score + p for k, p in enumerate(row) if k != BLANK}
                kept = dict(how.best(longer))
                if len(done) >= how.beam and max(map(how.ranked, kept.items())) < how.ranked(how.best(done)[-1]):
                    break  # none of these, nor what goes on from them, would be kept
            kept = dict(how.best(done))
        return how.finished(kept)
