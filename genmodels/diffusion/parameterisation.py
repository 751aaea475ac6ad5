"""What the network's output means: eps, x0 or v. Nothing outside these classes asks which one it is.

    eps: x0 = (x - sigma eps) / alpha      x0: eps = (x - alpha x0) / sigma      v = alpha eps - sigma x0:
    x0 = alpha x - sigma v,  eps = sigma x + alpha v                             score = -eps / sigma
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from genmodels.diffusion.process import alpha_sigma, expand
from genmodels.diffusion.schedule import NoiseSchedule
from genmodels.errors import InputError


class Prediction:
    """All views of one denoising prediction, each computed when it is first read.

    Fields, all (B, *event): `x0`, `eps`, `v`, `score`, and `output`, what the network returned in its own units.
    `log_var` is the log-variance of the model's kernel, None unless the network learns it.

    Errors: a field that does not exist at this noise level (the score where sigma = 0) raises when it is read.

    Arguments:
        output: (B, *event).
        sigma: sigma_t, shaped to multiply `output`.
        x0, eps, v: functions without arguments that compute the field.
        score: the same for the score, where it is known otherwise than as -eps / sigma.
    """

    def __init__(
        self,
        output: Tensor,
        sigma: Tensor,
        *,
        x0: Callable[[], Tensor],
        eps: Callable[[], Tensor],
        v: Callable[[], Tensor],
        score: Callable[[], Tensor] | None = None,
        log_var: Tensor | None = None,
    ):
        self.output, self.sigma, self.log_var = output, sigma, log_var
        self._x0, self._eps, self._v, self._score = x0, eps, v, score

    @cached_property
    def x0(self) -> Tensor:
        return self._x0()

    @cached_property
    def eps(self) -> Tensor:
        return self._eps()

    @cached_property
    def v(self) -> Tensor:
        return self._v()

    @cached_property
    def score(self) -> Tensor:
        return self._score() if self._score is not None else -self.eps / defined(self.sigma, "the score", "sigma")


def defined(divisor: Tensor, field: str, name: str) -> Tensor:
    """The divisor, or an error that names the field which does not exist where the divisor is 0."""
    if bool((divisor == 0).any()):
        end = "t = 0" if name == "sigma" else "t = 1"
        raise InputError(f"{field} is undefined where {name} = 0: keep away from {end}, or read another field")
    return divisor


class Parameterisation:
    """One meaning of the network's output: its training target, its conversion, the scale of its error.

    `loss_weight(log_snr)` turns the squared error of this output into the squared error of x0.
    """

    name: str

    def check(self, schedule: NoiseSchedule) -> None:
        """Raise where this output cannot be trained under the schedule."""

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        """What the network should return at alpha x0 + sigma noise; (B, *event), log_snr (B,)."""
        raise NotImplementedError

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, log_var: Tensor | None = None) -> Prediction:
        """All views of `output`, predicted at the noisy x (B, *event) with log_snr (B,)."""
        raise NotImplementedError

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        """(B,) w with |x0 - x0_hat|^2 = w |target - output|^2."""
        raise NotImplementedError


class Eps(Parameterisation):
    """The network predicts the noise (Ho et al. 2020, equation 11); impossible where the SNR is 0.

    Example:
        >>> p = Eps().to_prediction(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.float64))
        >>> round(float(p.x0), 4)
        1.4142
    """

    name = "eps"

    def check(self, schedule: NoiseSchedule) -> None:
        if math.isinf(schedule.end_points[1]):
            raise InputError(
                "eps carries no signal at SNR 0: choose v or x0, or a schedule with log_snr(1) >= -20"
            )

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        return noise

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, log_var: Tensor | None = None) -> Prediction:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        return Prediction(
            output,
            sigma,
            x0=lambda: (x - sigma * output) / defined(alpha, "x0 from eps", "alpha"),
            eps=lambda: output,
            v=lambda: (output - sigma * x) / defined(alpha, "v from eps", "alpha"),
            log_var=log_var,
        )

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        return torch.exp(-log_snr)


class X0(Parameterisation):
    """The network predicts the clean data.

    Example:
        >>> p = X0().to_prediction(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.float64))
        >>> round(float(p.eps), 4)
        1.4142
    """

    name = "x0"

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        return x0

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, log_var: Tensor | None = None) -> Prediction:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        return Prediction(
            output,
            sigma,
            x0=lambda: output,
            eps=lambda: (x - alpha * output) / defined(sigma, "eps from x0", "sigma"),
            v=lambda: (alpha * x - output) / defined(sigma, "v from x0", "sigma"),
            log_var=log_var,
        )

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        return torch.ones_like(log_snr)


class V(Parameterisation):
    """The network predicts v = alpha eps - sigma x0 (Salimans and Ho 2022, section 4): x0 and eps exist at every SNR.

    Example:
        >>> p = V().to_prediction(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.float64))
        >>> round(float(p.x0), 4), round(float(p.eps), 4)
        (0.7071, 0.7071)
    """

    name = "v"

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        alpha, sigma = alpha_sigma(log_snr)
        return expand(alpha, x0) * noise - expand(sigma, x0) * x0

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, log_var: Tensor | None = None) -> Prediction:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        return Prediction(
            output,
            sigma,
            x0=lambda: alpha * x - sigma * output,
            eps=lambda: sigma * x + alpha * output,
            v=lambda: output,
            log_var=log_var,
        )

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr)


PARAMETERISATIONS: dict[str, type[Parameterisation]] = {"eps": Eps, "x0": X0, "v": V}
