"""How the squared errors of different noise levels are weighed against each other in a simple loss.

A weighting is a function of the log-SNR, the same for every meaning of the network's output: w(lambda) multiplies
|x0 - x0_hat|^2, so w(lambda) loss_weight(lambda) multiplies |target - output|^2. Only `none` weighs each output's own
error by one. SNR is written u.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
from torch import Tensor

from genmodels.diffusion.parameterisation import Parameterisation
from genmodels.errors import InputError


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
        self.gamma = _positive("gamma", gamma)

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
        self.k, self.gamma = _positive("k", k), _positive("gamma", gamma)

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor:
        u = torch.exp(log_snr)
        return u / (self.k + u) ** self.gamma * parameterisation.loss_weight(log_snr)


class EDMWeighting:
    """w = -lambda'(t) N(lambda; m, d^2) (1 + s_d^2 u) / s_d^2: EDM's weights and its noise levels under any schedule.

    The paper draws log(sigma/alpha) = -lambda/2 from N(-1.2, 1.2^2), so lambda from N(2.4, 2.4^2); here t is drawn, and
    -lambda' N(lambda) is the ratio of the two densities. For `edm` prediction the other factor becomes 1.

    Source: Karras et al. 2022, table 1; as a weight of the bound in Kingma and Gao, "Understanding diffusion
    objectives as the ELBO with simple data augmentation", 2023, table 1.

    Example:
        >>> from genmodels.diffusion import EDM
        >>> log_snr, rate = torch.tensor([2.4], dtype=torch.float64), torch.tensor([-10.0])
        >>> round(float(EDMWeighting()(EDM(), log_snr, rate)), 4)  # 10 / (2.4 sqrt(2 pi))
        1.6623
    """

    def __init__(self, *, mean: float = 2.4, deviation: float = 2.4, data_deviation: float = 0.5):
        self.mean, self.deviation = mean, _positive("deviation", deviation)
        self.data_deviation = _positive("data_deviation", data_deviation)

    def __call__(self, parameterisation: Parameterisation, log_snr: Tensor, rate: Tensor) -> Tensor:
        z = (log_snr - self.mean) / self.deviation
        density = torch.exp(-z.square() / 2) / (self.deviation * math.sqrt(2 * math.pi))
        data = self.data_deviation**2
        return -rate * density * (1 / data + torch.exp(log_snr)) * parameterisation.loss_weight(log_snr)


class SigmoidWeighting:
    """w = -lambda'(t) u s(b - lambda), s logistic: the bound's own weight, let go below the noise level e^(-b/2).

    Without the logistic factor this is the integrand of the continuous bound, twice. Monotone in lambda, so the loss is
    a bound on noised data.

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
        return -rate * kept * parameterisation.loss_weight(log_snr)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise InputError(f"{name} = {value}: give a positive number")
    return float(value)


WEIGHTINGS: dict[str, type[Weighting]] = {
    "none": Unweighted,
    "min_snr": MinSNR,
    "p2": P2,
    "edm": EDMWeighting,
    "sigmoid": SigmoidWeighting,
}

WeightingName = Literal["none", "min_snr", "p2", "edm", "sigmoid"]


def make_weighting(name: WeightingName | Weighting) -> Weighting:
    """The weighting of a name in WEIGHTINGS; one that is made already is returned as it is."""
    if callable(name):
        return name
    if name not in WEIGHTINGS:
        raise InputError(f"weighting = {name!r}: choose one of {', '.join(WEIGHTINGS)}")
    return WEIGHTINGS[name]()
