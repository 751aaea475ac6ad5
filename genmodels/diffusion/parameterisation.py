"""Parameterisations: what the output of a network means, and the prediction that follows from it in every form."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from genmodels.core.errors import InputError, positive
from genmodels.diffusion.path import LinearPath, Path, alpha_sigma, expand


class _Once:
    """A field computed when first read; unlike functools.cached_property, whose lock torch.compile rejects."""

    def __init__(self, compute: Callable):
        self.compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance, owner: type):
        value = self.compute(instance)
        setattr(instance, self.name, value)
        return value


class Prediction:
    """A denoising prediction as x0, eps, v, score and velocity, each computed when first read.

    Fields, all (B, *event): `x0`, `eps`, `v`, `score`, `velocity` (of a prediction at a time, along the path of its
    denoiser), and `output`, the network's output in its own units. `nu` places the variance of the model's kernel
    between beta_tilde (0) and beta (1), per scalar, None unless it is learned; see `learned_variance`.

    Errors: reading a field that does not exist at this noise level (the score where sigma = 0).

    Arguments:
        output: (B, *event).
        sigma: sigma_t, shaped to multiply `output`.
        x0, eps, v: functions without arguments that compute the field.
        score: the same for the score, None for -eps / sigma.
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
        nu: Tensor | None = None,
    ):
        self.output, self.sigma, self.nu = output, sigma, nu
        self._x0, self._eps, self._v, self._score = x0, eps, v, score
        self._place: tuple[Path, Tensor] | None = None

    def along(self, path: Path, t: Tensor) -> Prediction:
        """This prediction at the times t (B,) of a path, whose velocity is then `velocity`."""
        self._place = path, t
        return self

    @_Once
    def x0(self) -> Tensor:
        """(B, *event) the estimate of the data, E[x_0 | x_t]."""
        return self._x0()

    @_Once
    def eps(self) -> Tensor:
        """(B, *event) the estimate of the noise, (x_t - alpha x_0) / sigma."""
        return self._eps()

    @_Once
    def v(self) -> Tensor:
        """(B, *event) v = alpha eps - sigma x_0, the target of v-prediction."""
        return self._v()

    @_Once
    def score(self) -> Tensor:
        """(B, *event) the score of the noised marginal, -eps / sigma; InputError where sigma = 0."""
        return self._score() if self._score is not None else -self.eps / defined(self.sigma, "the score", "sigma")

    @_Once
    def velocity(self) -> Tensor:
        """(B, *event) dx_t/dt = alpha' x_0 + sigma' eps, for the path's own x_t (`Path.scale`)."""
        if self._place is None:
            raise InputError("a prediction at a log-SNR has no velocity: predict at a time, or call `along`")
        path, t = self._place
        return sum(expand(rate, part) * part for rate, part in zip(path.rates(t), (self.x0, self.eps), strict=True))


def defined(divisor: Tensor, field: str, name: str) -> Tensor:
    """The divisor; raises InputError for the field that does not exist where it is 0."""
    # Compiled code cannot test values: there such a field is infinite or NaN.
    if not torch.compiler.is_compiling() and bool((divisor == 0).any()):
        end = "t = 0" if name == "sigma" else "t = 1"
        raise InputError(f"{field} is undefined where {name} = 0: keep away from {end}, or read another field")
    return divisor


class Parameterisation:
    """A meaning of the network's output: its training target and conversion, the scale of its error and input."""

    name: str

    def check(self, schedule: Path) -> None:
        """Raise where this output cannot be trained under the schedule."""

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        """What the network should return at alpha x0 + sigma noise; (B, *event), log_snr (B,)."""
        raise NotImplementedError

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, nu: Tensor | None = None) -> Prediction:
        """All views of `output`, predicted at the noisy x (B, *event) with log_snr (B,)."""
        raise NotImplementedError

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        """(B,) w with |x0 - x0_hat|^2 = w |target - output|^2."""
        raise NotImplementedError

    def scale_input(self, x: Tensor, log_snr: Tensor) -> Tensor:
        """The noisy x (B, *event) as the network sees it; log_snr (B,)."""
        return x


class Eps(Parameterisation):
    """The network predicts the noise (Ho et al. 2020, equation 11); impossible where the SNR is 0.

    Example:
        >>> p = Eps().to_prediction(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.float64))
        >>> round(float(p.x0), 4)
        1.4142
    """

    name = "eps"

    def check(self, schedule: Path) -> None:
        if math.isinf(schedule.end_points[1]):
            raise InputError(
                "eps carries no signal at SNR 0: choose v or x0, or a path with log_snr(1) >= -20, such as vp_linear"
            )

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        return noise

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, nu: Tensor | None = None) -> Prediction:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        return Prediction(
            output,
            sigma,
            x0=lambda: (x - sigma * output) / defined(alpha, "x0 from eps", "alpha"),
            eps=lambda: output,
            v=lambda: (output - sigma * x) / defined(alpha, "v from eps", "alpha"),
            nu=nu,
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

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, nu: Tensor | None = None) -> Prediction:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        return Prediction(
            output,
            sigma,
            x0=lambda: output,
            eps=lambda: (x - alpha * output) / defined(sigma, "eps from x0", "sigma"),
            v=lambda: (alpha * x - output) / defined(sigma, "v from x0", "sigma"),
            nu=nu,
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

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, nu: Tensor | None = None) -> Prediction:
        alpha, sigma = (expand(value, x) for value in alpha_sigma(log_snr))
        return Prediction(
            output,
            sigma,
            x0=lambda: alpha * x - sigma * output,
            eps=lambda: sigma * x + alpha * output,
            v=lambda: output,
            nu=nu,
        )

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr)


class EDM(Parameterisation):
    """The network sees x and predicts F, both scaled to unit variance at every noise level, for data of standard
    deviation s_d.

        x0 = c_skip y + c_out F(c_in y),   y = x/alpha,   s = sigma/alpha
        c_skip = s_d^2/(s^2 + s_d^2),   c_out = s s_d/sqrt(s^2 + s_d^2),   c_in = 1/sqrt(s^2 + s_d^2)

    With r^2 = sigma^2 + s_d^2 alpha^2 the network sees x/r, and x0 = (s_d^2 alpha x + sigma s_d r F)/r^2 and
    eps = (sigma x - alpha s_d r F)/r^2 exist at every SNR. With s_d = 1, F is -v. The network is given the log-SNR, -8
    times the c_noise = log(s)/4 of the paper.

    Arguments:
        sigma_data: s_d, the standard deviation of the data in the model's units.

    Source: Karras et al., "Elucidating the design space of diffusion-based generative models", 2022, table 1.
    """

    name = "edm"

    def __init__(self, *, sigma_data: float = 0.5):
        self.sigma_data = positive("sigma_data", sigma_data)

    def _scales(self, x: Tensor, log_snr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(alpha, sigma, r), shaped to multiply x."""
        alpha, sigma = alpha_sigma(log_snr)
        r = torch.sqrt(sigma.square() + (self.sigma_data * alpha).square())
        return tuple(expand(value, x) for value in (alpha, sigma, r))

    def scale_input(self, x: Tensor, log_snr: Tensor) -> Tensor:
        return x / self._scales(x, log_snr)[2]

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        (alpha, sigma, r), data = self._scales(x0, log_snr), self.sigma_data
        return (sigma * x0 - data**2 * alpha * noise) / (data * r)

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, nu: Tensor | None = None) -> Prediction:
        (alpha, sigma, r), data = self._scales(x, log_snr), self.sigma_data

        def x0() -> Tensor:
            return (data**2 * alpha * x + sigma * data * r * output) / r.square()

        def eps() -> Tensor:
            return (sigma * x - alpha * data * r * output) / r.square()

        return Prediction(output, sigma, x0=x0, eps=eps, v=lambda: alpha * eps() - sigma * x0(), nu=nu)

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        data, alpha2, sigma2 = self.sigma_data**2, torch.sigmoid(log_snr), torch.sigmoid(-log_snr)
        return data * sigma2 / (sigma2 + data * alpha2)


class Velocity(Parameterisation):
    """The network sees x_t of the path and predicts its velocity, u = alpha' x0 + sigma' eps (Lipman et al. 2023).

        x0 = (sigma' x_t - sigma u)/D,   eps = (alpha u - alpha' x_t)/D,   D = alpha sigma' - alpha' sigma

    On a path that preserves the variance u = D v, so that `V` learns the same.

    Arguments:
        path: one with finite derivatives; by default the straight path of rectified flow, where u = eps - x0.

    Example:
        >>> u, x = torch.full((1, 1), 3.0), torch.ones(1, 1) / LinearPath().scale(torch.tensor(0.4)).float()
        >>> p = Velocity().to_prediction(u, x, LinearPath().log_snr(torch.tensor([0.4])))  # at x_t = 1
        >>> round(float(p.x0), 4), round(float(p.eps), 4)
        (-0.2, 2.8)
    """

    name = "velocity"

    def __init__(self, path: Path | None = None):
        self.path = path or LinearPath()

    def _scales(self, x: Tensor, log_snr: Tensor) -> tuple[Tensor, ...]:
        """(alpha, sigma, alpha', sigma', r) of the path where it has this log-SNR, shaped to multiply x."""
        t = self.path.time_of(log_snr)
        return tuple(expand(v, x) for v in (*self.path.alpha_sigma(t), *self.path.rates(t), self.path.scale(t)))

    def scale_input(self, x: Tensor, log_snr: Tensor) -> Tensor:
        return x * self._scales(x, log_snr)[-1]

    def target(self, x0: Tensor, noise: Tensor, log_snr: Tensor) -> Tensor:
        _, _, alpha_rate, sigma_rate, _ = self._scales(x0, log_snr)
        return alpha_rate * x0 + sigma_rate * noise

    def to_prediction(self, output: Tensor, x: Tensor, log_snr: Tensor, nu: Tensor | None = None) -> Prediction:
        alpha, sigma, alpha_rate, sigma_rate, r = self._scales(x, log_snr)
        determinant = alpha * sigma_rate - alpha_rate * sigma

        def x0() -> Tensor:
            return (sigma_rate * r * x - sigma * output) / determinant

        def eps() -> Tensor:
            return (alpha * output - alpha_rate * r * x) / determinant

        return Prediction(
            output, sigma / r, x0=x0, eps=eps, v=lambda: (alpha * eps() - sigma * x0()) / r, nu=nu
        )

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        t = self.path.time_of(log_snr)
        (alpha, sigma), (alpha_rate, sigma_rate) = self.path.alpha_sigma(t), self.path.rates(t)
        return (sigma / (alpha * sigma_rate - alpha_rate * sigma)).square()


PARAMETERISATIONS: dict[str, type[Parameterisation]] = {
    "eps": Eps, "x0": X0, "v": V, "edm": EDM, "velocity": Velocity,
}
