"""Probabilities of texts as sums over their alignments with frames: connectionist temporal classification."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss

from genmodels.core.tensors import wide
from genmodels.speech.decoding import BLANK, Hypothesis, ctc_beam, ctc_greedy


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

    def search(self, h: Tensor, frames: Tensor, beam: int) -> list[list[Hypothesis]]:
        """The texts found for each item, best first: that of the best path for a beam of 1."""
        log_probs = self.log_probs(h)
        if beam == 1:
            return [[found] for found in ctc_greedy(log_probs, frames)]
        return [ctc_beam(row[:n], beam=beam) for row, n in zip(log_probs, frames.tolist(), strict=True)]


def least_frames(y: Tensor, counts: Tensor) -> Tensor:
    """The frames (B,) that a text needs at least by CTC: one for each character, and one between two that are equal.

    Example:
        >>> least_frames(torch.tensor([[5, 5, 6], [4, 0, 0]]), torch.tensor([3, 1]))
        tensor([4, 1])
    """
    inside = torch.arange(1, y.shape[1], device=y.device) < counts[:, None]
    return counts + ((y[:, 1:] == y[:, :-1]) & inside).sum(1)
