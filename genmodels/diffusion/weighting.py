"""Weights of the noise levels in the simple loss, and samplers of the times of a batch.

A weighting is a function of the log-SNR, the same for every parameterisation: w(lambda) multiplies |x0 - x0_hat|^2, so
w(lambda) loss_weight(lambda) multiplies |target - output|^2. Only `none` gives the error of each output weight one. SNR
is written u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError, one_of, positive
from genmodels.core.random import Generator
from genmodels.core.random import shared_uniform as draw_shared
from genmodels.core.random import uniform as draw_rows
from genmodels.diffusion.parameterisation import Parameterisation


class Weighting(Protocol):
    """`(parameterisation, log_snr (B,), rate (B,)) -> (B,)`, the factor of |target - output|^2; rate is d lambda/dt."""

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor: ...


class Unweighted:
    """1, in the units of the network's own output (Ho et al. 2020, equation 14)."""

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor:
        return torch.ones_like(log_snr)


class MinSNR:
    """w = min(u, gamma): min(u, gamma)/u for eps, min(u, gamma)/(u + 1) for v.

    Source: Hang et al., "Efficient diffusion training via min-SNR weighting strategy", 2023, section 3.4.

    Example:
        >>> from genmodels.diffusion import V
        >>> round(float(MinSNR()(V(), torch.tensor([5.0], dtype=torch.float64), torch.ones(1))), 10)
        0.0334642546
    """

    def __init__(self, *, gamma: float = 5.0):
        self.gamma = positive("gamma", gamma)

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor:
        return torch.exp(log_snr).clamp(max=self.gamma) * parameterisation.loss_weight(log_snr)


class P2:
    """w = u / (k + u)^gamma: 1/(k + u)^gamma for eps, which spares the low noise levels.

    Source: Choi et al., "Perception prioritized training of diffusion models", 2022, equation 8.

    Example:
        >>> from genmodels.diffusion import Eps
        >>> float(P2()(Eps(), torch.zeros(1, dtype=torch.float64), torch.ones(1)))
        0.5
    """

    def __init__(self, *, k: float = 1.0, gamma: float = 1.0):
        self.k, self.gamma = positive("k", k), positive("gamma", gamma)

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor:
        u = torch.exp(log_snr)
        return u / (self.k + u) ** self.gamma * parameterisation.loss_weight(log_snr)


class EDMWeighting:
    """w = -lambda'(t) N(lambda; m, d^2) (1 + s_d^2 u) / s_d^2: EDM's weights and its noise levels under any schedule.

    The paper draws log(sigma/alpha) = -lambda/2 from N(-1.2, 1.2^2), so lambda from N(2.4, 2.4^2); here t is drawn, and
    -lambda' N(lambda) is the ratio of the two densities. For `edm` prediction the other factor becomes 1.

    Source: Karras et al. 2022, table 1; as a weight of the ELBO in Kingma and Gao, "Understanding diffusion
    objectives as the ELBO with simple data augmentation", 2023, table 1.

    Example:
        >>> from genmodels.diffusion import EDM
        >>> log_snr, rate = torch.tensor([2.4], dtype=torch.float64), torch.tensor([-10.0])
        >>> round(float(EDMWeighting()(EDM(), log_snr, rate)), 4)  # 10 / (2.4 sqrt(2 pi))
        1.6623
    """

    def __init__(self, *, mean: float = 2.4, std: float = 2.4, sigma_data: float = 0.5):
        self.mean, self.std = mean, positive("std", std)
        self.sigma_data = positive("sigma_data", sigma_data)

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor:
        z = (log_snr - self.mean) / self.std
        density = torch.exp(-z.square() / 2) / (self.std * math.sqrt(2 * math.pi))
        data = self.sigma_data**2
        weight = -rate * density * (1 / data + torch.exp(log_snr)) * parameterisation.loss_weight(log_snr)
        return _zero_without_signal(weight, log_snr)


class SigmoidWeighting:
    """w = -lambda'(t) u s(b - lambda), s logistic: the weight of the ELBO, reduced at noise levels below e^(-b/2).

    Without the logistic factor this is twice the integrand of the continuous ELBO. As it is monotone in lambda, the
    loss is a bound on the NLL of noised data.

    Source: Kingma and Gao 2023, section 4 (b = 2).

    Example:
        >>> from genmodels.diffusion import Eps
        >>> log_snr, rate = torch.tensor([2.0], dtype=torch.float64), torch.tensor([-10.0])
        >>> round(float(SigmoidWeighting()(Eps(), log_snr, rate)), 6)
        5.0
    """

    def __init__(self, *, bias: float = 2.0):
        self.bias = float(bias)

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor:
        kept = torch.sigmoid(self.bias - log_snr) * torch.exp(log_snr)
        return _zero_without_signal(-rate * kept * parameterisation.loss_weight(log_snr), log_snr)


def _zero_without_signal(weight: Tensor, log_snr: Tensor) -> Tensor:
    """The weight, and its limit 0 where the SNR is 0 and lambda' infinite."""
    return torch.where(log_snr.isneginf(), 0.0, weight)


WEIGHTINGS: dict[str, type[Weighting]] = {
    "none": Unweighted,
    "min_snr": MinSNR,
    "p2": P2,
    "edm": EDMWeighting,
    "sigmoid": SigmoidWeighting,
}

WeightingName = Literal["none", "min_snr", "p2", "edm", "sigmoid"]


def make_weighting(name: WeightingName | Weighting) -> Weighting:
    """The weighting of a name in WEIGHTINGS; a weighting is returned as it is."""
    if callable(name):
        return name
    one_of("weighting", name, WEIGHTINGS)
    return WEIGHTINGS[name]()


def systematic(n: int, generator: Generator, rank: int, world: int) -> Tensor:
    """(n,) float64 draws (U + j/B) mod 1: one U for the global batch of B rows, j the position of a row in it.

    Of a keyed generator U depends on the step and not on the rows: in training each step needs a generator of its own.
    """
    shared = draw_shared(1, generator, dtype=torch.float64).cpu()
    return (shared + positions(n, rank, world) / (n * world)) % 1.0


def positions(n: int, rank: int, world: int) -> Tensor:
    """(n,) the positions of this process' rows in the global batch."""
    return torch.arange(n, dtype=torch.float64) * world + rank


class LossAwareTimes(nn.Module):
    """p(t) proportional to the root mean square of the latest losses near t, with importance weight 1/p(t).

        p_b = (1 - m) sqrt(mean L_b^2) / sum_b' sqrt(mean L_b'^2) + m / bins,   p(t) = bins p_b in bin b of [0, 1)

    Bins are equal in t. The mean runs over the last `history` losses of each bin; until every bin has so many, p is
    uniform. Draws are systematic: one U for the batch, quantiles U + j/B of p. The history is a buffer, so that a
    checkpoint contains it.

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
        self.pending: list[Tensor] = []

    def probabilities(self) -> Tensor:
        """(bins,) float64 on the CPU, the probability of each bin."""
        uniform = torch.full((self.bins,), 1 / self.bins, dtype=torch.float64)
        size = self.losses.cpu().double().square().mean(1).sqrt()
        if bool((self.seen < self.history).any()) or not bool(size.sum() > 0):
            return uniform
        return (1 - self.mixture) * size / size.sum() + self.mixture * uniform

    def forward(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        p, quantile = self.probabilities(), systematic(n, generator, rank, world)
        above = p.cumsum(0)
        above = above / above[-1]
        chosen = torch.searchsorted(above, quantile, right=True).clamp(max=self.bins - 1)
        inside = ((quantile - (above[chosen] - p[chosen])) / p[chosen]).clamp(0, 1 - 1e-12)
        return (chosen + inside) / self.bins, 1 / (self.bins * p[chosen])

    @torch.no_grad()
    def update(self, t: Tensor, losses: Tensor) -> None:
        """Record the unweighted losses (n,) at the times t (n,), in this order.

        Every process must record the same: the rows of all of them, in the order of the global batch.
        """
        kept, seen = self.losses.cpu(), self.seen.tolist()
        for b, loss in zip((t * self.bins).long().clamp(0, self.bins - 1).tolist(), losses.tolist(), strict=True):
            kept[b, seen[b] % self.history] = loss
            seen[b] += 1
        self.losses.copy_(kept)
        self.seen.copy_(torch.tensor(seen))

    def observe(self, t: Tensor, losses: Tensor) -> None:
        """Keep the losses (n,) of this process at the times t (n,) for `learn`."""
        self.pending.append(torch.stack([t, losses.double()]))

    def learn(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Record the losses kept by `observe`, once the step is known to be finite.

        Arguments:
            gather: (2, n) of one process to (world, 2, n) of all, or to itself where there is one.
        """
        for kept in self.pending:
            t, losses = gather(kept).reshape(-1, *kept.shape).permute(1, 2, 0).flatten(1)  # as in the global batch
            self.update(t, losses)
        self.pending.clear()


class TimeSampler(Protocol):
    """(n, generator, rank, world) -> t (n,), weight (n,), float64 on the CPU."""

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]: ...


class UniformTimes:
    """Independent uniform times, each from its own row of the generator.

    Example:
        >>> t, weight = UniformTimes()(4, torch.Generator().manual_seed(0))
        >>> t.shape, weight.tolist()
        (torch.Size([4]), [1.0, 1.0, 1.0, 1.0])
    """

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        t = draw_rows((n,), generator, dtype=torch.float64).cpu()
        return t, torch.ones_like(t)


class StratifiedTimes:
    """t_j = (j + U_j) / B: one independent draw in each of the B equal strata of the global batch.

    Example:
        >>> t, _ = StratifiedTimes()(4, torch.Generator().manual_seed(0))
        >>> (t * 4).floor().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        u = draw_rows((n,), generator, dtype=torch.float64).cpu()
        return (positions(n, rank, world) + u) / (n * world), torch.ones_like(u)


class AntitheticTimes:
    """t_j = (U + j/B) mod 1 with one U for the global batch (Kingma et al. 2021, appendix I.1).

    Example:
        >>> t, _ = AntitheticTimes()(4, torch.Generator().manual_seed(0))
        >>> [round(d, 6) for d in t.sort().values.diff().tolist()]
        [0.25, 0.25, 0.25]
    """

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        t = systematic(n, generator, rank, world)
        return t, torch.ones_like(t)


class LogitNormalTimes(AntitheticTimes):
    """t = sigmoid(m + s n), n standard normal, by the quantiles of antithetic draws: more often in the middle.

    Its density N(logit t; m, s^2)/(t (1 - t)) is the weight of the loss. Source: Esser et al., "Scaling rectified flow
    transformers", 2024, section 3.1.

    Example:
        >>> t, _ = LogitNormalTimes()(1000, torch.Generator().manual_seed(0))
        >>> round(float((t < torch.sigmoid(torch.tensor(-1.0))).double().mean()), 2)  # Phi(-1)
        0.16
    """

    def __init__(self, *, mean: float = 0.0, std: float = 1.0):
        self.mean, self.std = mean, positive("std", std)

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        u, weight = super().__call__(n, generator, rank, world)
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(u)), weight


class CosMapTimes(AntitheticTimes):
    """t = 1 - 1/(tan(pi u/2) + 1): density 2/(pi (1 - 2t + 2t^2)), which gives the straight path cosine log-SNRs.

    Source: Esser et al. 2024, section 3.1.

    Example:
        >>> t, _ = CosMapTimes()(1000, torch.Generator().manual_seed(0))
        >>> round(float((t < 0.25).double().mean()), 2)  # 2/pi atan(1/3)
        0.2
    """

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        u, weight = super().__call__(n, generator, rank, world)
        return 1 - 1 / (torch.tan(math.pi / 2 * u) + 1), weight


class LogUniformTimes(AntitheticTimes):
    """t = t_0^u, u uniform: log t uniform from log t_0 to 0, as often in every octave of the noise level.

    Its density 1/(t log(1/t_0)) is the weight of the loss. Along the straight path an error d of the velocity costs the
    ELBO int (1 - t)/t d^2 dt nats, nearly this weight.

    Arguments:
        least: t_0; no times below it are drawn.

    Example:
        >>> t, _ = LogUniformTimes()(1000, torch.Generator().manual_seed(0))
        >>> [round(float((t < bound).double().mean()), 2) for bound in (0.001, 0.01, 0.1)]
        [0.0, 0.33, 0.67]
    """

    def __init__(self, *, least: float = 1e-3):
        if not 0 < least < 1:
            raise InputError(f"least = {least}: give a time between 0 and 1")
        self.least = float(least)

    def __call__(self, n: int, generator: Generator, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        u, weight = super().__call__(n, generator, rank, world)
        return self.least**u, weight


TIME_SAMPLERS: dict[str, type[TimeSampler]] = {
    "uniform": UniformTimes,
    "stratified": StratifiedTimes,
    "antithetic": AntitheticTimes,
    "loss_aware": LossAwareTimes,
    "logit_normal": LogitNormalTimes,
    "cosmap": CosMapTimes,
    "log_uniform": LogUniformTimes,
}

TimeSamplerName = Literal[
    "uniform", "stratified", "antithetic", "loss_aware", "logit_normal", "cosmap", "log_uniform"
]


#: Samplers whose density is itself the weight of the loss: an average over their times is no bound.
WEIGHTING_TIMES = (LogitNormalTimes, CosMapTimes, LogUniformTimes)


def make_time_sampler(name: TimeSamplerName | TimeSampler, *, bound: bool = False) -> TimeSampler:
    """The sampler of a name in TIME_SAMPLERS; a sampler is returned as it is.

    Raises:
        InputError: for an unknown name, or one of WEIGHTING_TIMES where the loss is a `bound`.
    """
    if not callable(name):
        one_of("time_sampler", name, TIME_SAMPLERS)
    made = name if callable(name) else TIME_SAMPLERS[name]()
    if bound and isinstance(made, WEIGHTING_TIMES):
        raise InputError(
            f"time_sampler = {type(made).__name__} weights the loss, so that it is no bound: choose antithetic or "
            "loss_aware, or objective=simple"
        )
    return made
