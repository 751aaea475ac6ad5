"""A network, a noise schedule and the meaning of the output: together, a prediction at any time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError
from genmodels.diffusion.process import alpha_sigma, expand
from genmodels.diffusion.schedule import NoiseSchedule


class _Once:
    """A field computed when it is first read; without the lock of functools.cached_property, which does not compile."""

    def __init__(self, compute: Callable):
        self.compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance, owner: type):
        value = self.compute(instance)
        setattr(instance, self.name, value)
        return value


class Prediction:
    """All views of one denoising prediction, each computed when it is first read.

    Fields, all (B, *event): `x0`, `eps`, `v`, `score`, and `output`, what the network returned in its own units.
    `nu` says where the variance of the model's kernel lies between beta_tilde (0) and beta (1), per scalar; None unless
    the network learns it. See `learned_variance`.

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
        nu: Tensor | None = None,
    ):
        self.output, self.sigma, self.nu = output, sigma, nu
        self._x0, self._eps, self._v, self._score = x0, eps, v, score

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
        """(B, *event) the velocity, alpha eps - sigma x_0."""
        return self._v()

    @_Once
    def score(self) -> Tensor:
        """(B, *event) the score of the noised marginal, -eps / sigma; InputError where sigma = 0."""
        return self._score() if self._score is not None else -self.eps / defined(self.sigma, "the score", "sigma")


def defined(divisor: Tensor, field: str, name: str) -> Tensor:
    """The divisor, or an error that names the field which does not exist where the divisor is 0."""
    # Compiled code looks at no values: there such a field is infinite or NaN.
    if not torch.compiler.is_compiling() and bool((divisor == 0).any()):
        end = "t = 0" if name == "sigma" else "t = 1"
        raise InputError(f"{field} is undefined where {name} = 0: keep away from {end}, or read another field")
    return divisor


class Parameterisation:
    """One meaning of the network's output: its training target, its conversion, the scale of its error.

    `loss_weight(log_snr)` turns the squared error of this output into the squared error of x0; `scale_input` makes of
    the noisy x what the network sees.
    """

    name: str

    def check(self, schedule: NoiseSchedule) -> None:
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

    def check(self, schedule: NoiseSchedule) -> None:
        if math.isinf(schedule.end_points[1]):
            raise InputError(
                "eps carries no signal at SNR 0: choose v or x0, or a schedule with log_snr(1) >= -20"
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

    Written with r^2 = sigma^2 + s_d^2 alpha^2 nothing is divided by alpha: the network sees x/r, x0 = (s_d^2 alpha x +
    sigma s_d r F)/r^2 and eps = (sigma x - alpha s_d r F)/r^2 exist at every SNR. With s_d = 1, F is -v. The network is
    given the log-SNR, -8 times the c_noise = log(s)/4 of the paper.

    Arguments:
        sigma_data: s_d, the standard deviation of the data in the model's units.

    Source: Karras et al., "Elucidating the design space of diffusion-based generative models", 2022, table 1.

    Example:
        >>> c_skip, c_out, c_in = EDM().coefficients(torch.zeros(1, dtype=torch.float64))
        >>> round(float(c_skip), 9), round(float(c_out), 9), round(float(c_in), 9)
        (0.2, 0.447213595, 0.894427191)
    """

    name = "edm"

    def __init__(self, *, sigma_data: float = 0.5):
        if not sigma_data > 0:
            raise InputError(f"sigma_data = {sigma_data}: give a positive number")
        self.sigma_data = float(sigma_data)

    def coefficients(self, log_snr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(c_skip, c_out, c_in) of the paper, functions of s = exp(-lambda/2)."""
        squared, data = torch.exp(-log_snr), self.sigma_data
        whole = squared + data**2
        return data**2 / whole, data * torch.sqrt(squared / whole), 1 / torch.sqrt(whole)

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


PARAMETERISATIONS: dict[str, type[Parameterisation]] = {"eps": Eps, "x0": X0, "v": V, "edm": EDM}


class AtAnyTime(nn.Module):
    """What predicts at a log-SNR, called with a time: the face of every denoiser, learned or exact.

    A subclass has a `schedule` and defines `at_log_snr(x, log_snr, cond, mask, estimate) -> Prediction`.
    """

    schedule: NoiseSchedule

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        cond: Tensor | None = None,
        mask: Tensor | None = None,
        estimate: Tensor | None = None,
    ) -> Prediction:
        return self.at_log_snr(x, self.schedule.log_snr(t), cond, mask, estimate)


class Denoiser(AtAnyTime):
    """`denoiser(x, t, cond, mask, estimate) -> Prediction`: the network sees the noisy x and its log-SNR.

    Shapes: x (B, *event), t (B,) in [0, 1], cond as the network takes it, mask (B, 1, T) or None, estimate like x.

    The schedule is evaluated in float64, which autocast leaves alone. The network runs in the dtype of its parameters
    (or as autocast says) and its output is cast to the dtype of x, float32 at least.

    Arguments:
        net: called as `net(x, log_snr, cond)`, with the mask as fourth argument where there is one; returns a tensor of
            the shape of x. log_snr is (B,), float32 (float64 for float64 networks), and may be infinite.
        schedule: the noise schedule.
        parameterisation: the meaning of the output.
        learned_variance: the network returns twice the channels; the second half, o, gives nu = (o + 1)/2, from which
            `learned_variance` makes the variance of the kernel (Nichol and Dhariwal 2021, section 3.1).
        self_conditioning: the network also sees an earlier estimate of x_0 as further channels, zeros where there is
            none (Chen et al., "Analog bits", 2023, section 2.2).

    Errors: a parameterisation that the schedule rules out (eps with zero terminal SNR); an output of the wrong shape.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, V
        >>> denoiser = Denoiser(lambda x, log_snr, cond: torch.zeros_like(x), CosineSchedule(), V())
        >>> denoiser(torch.ones(2, 3), torch.tensor([0.0, 0.5])).x0.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        net: nn.Module,
        schedule: NoiseSchedule,
        parameterisation: Parameterisation,
        *,
        learned_variance: bool = False,
        self_conditioning: bool = False,
    ):
        super().__init__()
        parameterisation.check(schedule)
        self.net, self.schedule, self.parameterisation = net, schedule, parameterisation
        self.learned_variance, self.self_conditioning = learned_variance, self_conditioning

    def at_log_snr(
        self,
        x: Tensor,
        log_snr: Tensor,
        cond: Tensor | None = None,
        mask: Tensor | None = None,
        estimate: Tensor | None = None,
    ) -> Prediction:
        """The prediction where the log-SNR (B,) is known rather than the time."""
        inner = self._net_dtype(x)
        seen = self.parameterisation.scale_input(x, log_snr)
        if self.self_conditioning:
            seen = torch.cat([seen, torch.zeros_like(x) if estimate is None else estimate.to(seen)], 1)
        extra = () if mask is None else (mask,)
        output = self.net(seen.to(inner), log_snr.to(torch.promote_types(inner, torch.float32)), cond, *extra)
        self._check(output, x)
        output, nu = output.to(torch.promote_types(x.dtype, torch.float32)), None
        if self.learned_variance:
            output, nu = output.chunk(2, 1)
            nu = (nu + 1) / 2
        return self.parameterisation.to_prediction(output, x, log_snr, nu)

    def _check(self, output: Tensor, x: Tensor) -> None:
        batch, channels, *space = x.shape
        expected = (batch, 2 * channels if self.learned_variance else channels, *space)
        if tuple(output.shape) != expected:
            hint = ": a learned variance needs twice the channels" if self.learned_variance else ""
            raise InputError(
                f"the network turned {tuple(x.shape)} into {tuple(output.shape)}, not into {expected}{hint}"
            )

    def _net_dtype(self, x: Tensor) -> torch.dtype:
        parameters = self.net.parameters() if isinstance(self.net, nn.Module) else iter(())
        return next((p.dtype for p in parameters if p.is_floating_point()), x.dtype)
