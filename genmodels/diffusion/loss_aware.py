"""Times drawn where the loss is large: importance sampling from the history of the losses seen in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.errors import InputError
from genmodels.random import Generator
from genmodels.random import shared_uniform as draw_shared


def positions(n: int, rank: int, world: int) -> Tensor:
    """(n,) the places of this process' rows in the global batch."""
    return torch.arange(n, dtype=torch.float64) * world + rank


class LossAwareTimes(nn.Module):
    """p(t) proportional to the root mean square of the losses last seen about t; weight 1/p(t) undoes it.

        p_b = (1 - m) sqrt(mean L_b^2) / sum_b' sqrt(mean L_b'^2) + m / bins,   p(t) = bins p_b in bin b of [0, 1)

    Bins are equal in t, and since the log-SNR decreases in t they are bins of log-SNR too. The mean runs over the last
    `history` losses of each bin; until every bin has so many, p is uniform. Within a batch the draws are systematic:
    one U for all, quantiles U + j/B of p. The history is a buffer, so that a checkpoint holds it.

    Arguments:
        bins: number of bins.
        history: number of losses kept for each bin.
        mixture: m, the share of the uniform density, which bounds the weights by 1/m.

    Source: Nichol and Dhariwal 2021, section 3.3 (10 losses of each step, mixture 0.001).

    Example:
        >>> times = LossAwareTimes(bins=2, history=1, mixture=0.0)
        >>> times.update(torch.tensor([0.2, 0.7]), torch.tensor([1.0, 3.0]))
        >>> times.probabilities().tolist()
        [0.25, 0.75]
        >>> t, weight = times(4, torch.Generator().manual_seed(0))
        >>> weight.sort().values.round(decimals=4).tolist()
        [0.6667, 0.6667, 0.6667, 2.0]
    """

    def __init__(self, *, bins: int = 100, history: int = 10, mixture: float = 0.001):
        super().__init__()
        if bins < 1 or history < 1 or not 0 <= mixture <= 1:
            raise InputError(f"bins = {bins} and history = {history} must be at least 1, mixture = {mixture} in [0, 1]")
        self.bins, self.history, self.mixture = bins, history, mixture
        self.register_buffer("losses", torch.zeros(bins, history, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(bins, dtype=torch.int64))

    def probabilities(self) -> Tensor:
        """(bins,) float64 on the CPU, the probability of each bin."""
        uniform = torch.full((self.bins,), 1 / self.bins, dtype=torch.float64)
        size = self.losses.cpu().double().square().mean(1).sqrt()
        if bool((self.seen < self.history).any()) or not bool(size.sum() > 0):
            return uniform
        return (1 - self.mixture) * size / size.sum() + self.mixture * uniform

    def forward(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        p = self.probabilities()
        shared = draw_shared(1, generator, dtype=torch.float64).cpu()
        quantile = (shared + positions(n, rank, world) / (n * world)) % 1.0
        above = p.cumsum(0)
        above = above / above[-1]
        chosen = torch.searchsorted(above, quantile, right=True).clamp(max=self.bins - 1)
        inside = ((quantile - (above[chosen] - p[chosen])) / p[chosen]).clamp(0, 1 - 1e-12)
        return (chosen + inside) / self.bins, 1 / (self.bins * p[chosen])

    @torch.no_grad()
    def update(self, t: Tensor, losses: Tensor) -> None:
        """Note the losses (n,), without weights, at the times t (n,), in this order.

        Several processes must be given the same: the rows of all of them, in the order of the global batch.
        """
        kept, seen = self.losses.cpu(), self.seen.tolist()
        for b, loss in zip((t * self.bins).long().clamp(0, self.bins - 1).tolist(), losses.tolist(), strict=True):
            kept[b, seen[b] % self.history] = loss
            seen[b] += 1
        self.losses.copy_(kept)
        self.seen.copy_(torch.tensor(seen))
