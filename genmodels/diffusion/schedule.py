"""Noise schedules, given by one decreasing function of time, the log signal-to-noise ratio.

    x_t = alpha_t x_0 + sigma_t eps,   alpha^2 + sigma^2 = 1,   lambda(t) = log SNR = log(alpha_t^2 / sigma_t^2)
    alpha^2 = sigmoid(lambda),   sigma^2 = sigmoid(-lambda)

Time runs over [0, 1] from data to noise. Everything is computed in float64, which autocast leaves alone; beta,
alpha_bar and integer steps are derived from the log-SNR (Kingma et al., "Variational diffusion models", 2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from genmodels.core.errors import InputError, at_least
from genmodels.core.tensors import usable
from genmodels.diffusion.path import Path, alpha_sigma, in_float64


def step_to_time(step: Tensor | int, num_steps: int, *, zero_based: bool = False) -> Tensor:
    """The time of an integer step: t = i / T for DDPM's i in 1..T; `zero_based` counts 0..T-1 as other libraries do.

    Example:
        >>> step_to_time(500, 1000), step_to_time(499, 1000, zero_based=True)
        (tensor(0.5000, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    return (in_float64(step) + int(zero_based)) / num_steps


_END = 1e-7  # derivatives of a schedule are taken at least so far from its ends


class NoiseSchedule(Path):
    """The path of a decreasing log-SNR; a subclass writes `log_snr` and may replace the rest by closed forms.

        alpha_t = sqrt(sigmoid(lambda(t))),   sigma_t = sqrt(sigmoid(-lambda(t)))
        alpha' = alpha sigma^2 lambda' / 2,   sigma' = -sigma alpha^2 lambda' / 2

    Example:
        >>> alpha, sigma = CosineSchedule().alpha_sigma(torch.tensor([0.0, 0.5, 1.0]))
        >>> bool((alpha**2 + sigma**2 - 1).abs().max() < 1e-12)
        True
    """

    def log_snr(self, t: Tensor) -> Tensor:
        """lambda(t)."""
        raise NotImplementedError

    def log_snr_rate(self, t: Tensor) -> Tensor:
        """d lambda / dt (here by autograd)."""
        graph = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            t = in_float64(usable(t))
            t = t if graph and t.requires_grad else t.detach().requires_grad_()
            (rate,) = torch.autograd.grad(self.log_snr(t).sum(), t, create_graph=graph)
        return rate

    def time_of(self, log_snr: Tensor) -> Tensor:
        """The time at which lambda has this value, within 1e-10 (here by bisection)."""
        log_snr = in_float64(log_snr)
        low, high = torch.zeros_like(log_snr), torch.ones_like(log_snr)
        for _ in range(50):
            middle = (low + high) / 2
            later = self.log_snr(middle) > log_snr
            low, high = torch.where(later, middle, low), torch.where(later, high, middle)
        return (low + high) / 2

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha_t, sigma_t)."""
        return alpha_sigma(self.log_snr(t))

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha', sigma') at t."""
        t = in_float64(t).clamp(_END, 1 - _END)  # where no signal is left lambda' is infinite, but alpha' is not
        (alpha, sigma), half = self.alpha_sigma(t), self.log_snr_rate(t) / 2
        return alpha * sigma.square() * half, -sigma * alpha.square() * half

    def alpha_bar(self, t: Tensor) -> Tensor:
        """alpha_t^2, DDPM's alpha_bar."""
        return torch.sigmoid(self.log_snr(t))

    def alpha_bars(self, num_steps: int) -> Tensor:
        """(T,) alpha_bar_i at t = i / T, i = 1..T."""
        return self.alpha_bar(step_to_time(torch.arange(1, num_steps + 1), num_steps))

    def betas(self, num_steps: int) -> Tensor:
        """(T,) beta_i = 1 - alpha_bar_i / alpha_bar_{i-1} with alpha_bar_0 = 1, as DDPM counts."""
        times = step_to_time(torch.arange(1, num_steps + 1), num_steps)
        log_alpha_bar = logsigmoid(self.log_snr(times))
        return -torch.expm1(torch.diff(log_alpha_bar, prepend=log_alpha_bar.new_zeros(1)))


class LinearContinuousSchedule(NoiseSchedule):
    """The continuous limit of DDPM's linear betas: log alpha^2 = -(b_0 t + (b_1 - b_0) t^2 / 2).

    Source: Song et al., "Score-based generative modeling through SDEs", 2021, appendix C, VP SDE.

    Example:
        >>> round(float(LinearContinuousSchedule().log_snr(torch.tensor(1.0))), 7)
        -10.0499568
    """

    def __init__(self, *, beta_min: float = 0.1, beta_max: float = 20.0):
        super().__init__()
        if not 0 < beta_min <= beta_max < math.inf:
            raise InputError(f"beta_min = {beta_min}, beta_max = {beta_max}: give finite 0 < beta_min <= beta_max")
        self.beta_min, self.slope = float(beta_min), float(beta_max - beta_min)

    def log_snr(self, t: Tensor) -> Tensor:
        t = in_float64(t)
        decay = t * (self.beta_min + self.slope * t / 2)
        return -decay - torch.log(-torch.expm1(-decay))  # log(expm1(decay)) without overflow

    def log_snr_rate(self, t: Tensor) -> Tensor:
        t = in_float64(t)
        return (self.beta_min + self.slope * t) / torch.expm1(-t * (self.beta_min + self.slope * t / 2))

    def time_of(self, log_snr: Tensor) -> Tensor:
        decay = -logsigmoid(in_float64(log_snr))
        return 2 * decay / (self.beta_min + torch.sqrt(self.beta_min**2 + 2 * self.slope * decay))


class GradTTSSchedule(LinearContinuousSchedule):
    """The linear rates that mels are diffused by: beta from 0.05 to 20, its integral 10.025.

    Source: Popov et al., "Grad-TTS", 2021, section 4.

    Example:
        >>> alpha, _ = GradTTSSchedule().alpha_sigma(torch.tensor(1.0))
        >>> round(float(alpha), 8)
        0.00665425
    """

    def __init__(self, *, beta_min: float = 0.05, beta_max: float = 20.0):
        super().__init__(beta_min=beta_min, beta_max=beta_max)


class CosineSchedule(NoiseSchedule):
    """lambda = -2 log tan(pi u / 2), u affine in t so that lambda runs from `log_snr_max` to `log_snr_min`.

    Infinite end points give the raw schedule u = t. Source: Nichol and Dhariwal, "Improved DDPM", 2021, equation 17,
    in the log-SNR form of Kingma et al. 2021.

    Example:
        >>> [round(v, 9) for v in CosineSchedule().end_points]
        [15.0, -15.0]
    """

    def __init__(self, *, log_snr_max: float = 15.0, log_snr_min: float = -15.0):
        super().__init__()
        _check_ends(log_snr_max, log_snr_min)
        # Distances of u from 0 and from 1, so that neither end loses digits.
        self.from_zero = 2 / math.pi * math.atan(math.exp(-log_snr_max / 2))
        self.from_one = 2 / math.pi * math.atan(math.exp(log_snr_min / 2))
        self.span = 1 - self.from_zero - self.from_one

    def _angles(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = in_float64(t)
        u, rest = self.from_zero + self.span * t, self.from_one + self.span * (1 - t)
        return math.pi / 2 * u, math.pi / 2 * rest

    def log_snr(self, t: Tensor) -> Tensor:
        angle, rest = self._angles(t)
        return 2 * (torch.log(torch.sin(rest)) - torch.log(torch.sin(angle)))

    def log_snr_rate(self, t: Tensor) -> Tensor:
        angle, rest = self._angles(t)
        return -math.pi * self.span / (torch.sin(angle) * torch.sin(rest))

    def time_of(self, log_snr: Tensor) -> Tensor:
        u = 2 / math.pi * torch.atan(torch.exp(-in_float64(log_snr) / 2))
        return (u - self.from_zero) / self.span


class SigmoidSchedule(NoiseSchedule):
    """alpha_bar(t) = (s(w) - s(2wt - w)) / (s(w) - s(-w)), s logistic; hence lambda = log sinh(w(1-t)) - log sinh(wt).

    lambda(0) = +inf and lambda(1) = -inf: choose v or x0 prediction. Source: Jabri et al., "Scalable adaptive
    computation for iterative generation", 2022, appendix (w = 3, temperature 1).

    Example:
        >>> float(SigmoidSchedule().alpha_bar(torch.tensor(1.0)))
        0.0
    """

    def __init__(self, *, width: float = 3.0):
        super().__init__()
        if not 0 < width <= 700:  # the hyperbolic sine of more is beyond float64
            raise InputError(f"width = {width}: give a positive number, at most 700")
        self.width = float(width)

    def log_snr(self, t: Tensor) -> Tensor:
        t = in_float64(t)
        return torch.log(torch.sinh(self.width * (1 - t))) - torch.log(torch.sinh(self.width * t))

    def log_snr_rate(self, t: Tensor) -> Tensor:
        t = in_float64(t)
        return -self.width * (1 / torch.tanh(self.width * (1 - t)) + 1 / torch.tanh(self.width * t))

    def time_of(self, log_snr: Tensor) -> Tensor:
        log_snr = in_float64(log_snr).clamp(min=-1e3)  # below all but t = 1, where the difference would be NaN
        return (logsigmoid(log_snr + self.width) - logsigmoid(log_snr - self.width)) / (2 * self.width)


class LinearLogSnrSchedule(NoiseSchedule):
    """lambda = a + t (b - a) from a = `log_snr_max` to b = `log_snr_min` (Kingma et al. 2021, section 4).

    Example:
        >>> LinearLogSnrSchedule().log_snr(torch.tensor([0.0, 0.5, 1.0])).tolist()
        [10.0, 0.0, -10.0]
    """

    def __init__(self, *, log_snr_max: float = 10.0, log_snr_min: float = -10.0):
        super().__init__()
        _check_ends(log_snr_max, log_snr_min, "linear log-SNR")
        self.start, self.slope = float(log_snr_max), float(log_snr_min - log_snr_max)

    def log_snr(self, t: Tensor) -> Tensor:
        return self.start + self.slope * in_float64(t)

    def log_snr_rate(self, t: Tensor) -> Tensor:
        return torch.full_like(in_float64(t), self.slope)

    def time_of(self, log_snr: Tensor) -> Tensor:
        return (in_float64(log_snr) - self.start) / self.slope


def _check_ends(log_snr_max: float, log_snr_min: float, finite: str = "") -> None:
    if not log_snr_max > log_snr_min:
        raise InputError(f"log_snr_max = {log_snr_max} must be greater than log_snr_min = {log_snr_min}")
    if finite and (math.isinf(log_snr_max) or math.isinf(log_snr_min)):
        raise InputError(f"log_snr_max and log_snr_min of a {finite} must be finite")


_CELLS = 1000  # of the table that finds the time of a log-SNR


class LearnedSchedule(NoiseSchedule):
    """lambda(t) = l_0 + (l_1 - l_0) (m(t) - m(0)) / (m(1) - m(0)), m increasing with learned parameters.

        m(t) = w t + mean_j c_j s(a_j t + b_j),   w, a_j, c_j > 0 by softplus, s logistic

    The end points l_0 and l_1 are fixed and hold exactly for all parameters. The ELBO in continuous time depends on
    them alone: the shape in between changes only the variance of its estimates, which the objective `Continuous`
    lowers. It is initialised close to a straight line.

    Arguments:
        log_snr_max, log_snr_min: l_0 and l_1.
        hidden: number of logistic units.

    Source: Kingma et al. 2021, section 4 and appendix H.

    Example:
        >>> schedule = LearnedSchedule(log_snr_max=8.0, log_snr_min=-6.0)
        >>> schedule.end_points
        (8.0, -6.0)
    """

    def __init__(self, *, log_snr_max: float = 10.0, log_snr_min: float = -10.0, hidden: int = 1024):
        super().__init__()
        _check_ends(log_snr_max, log_snr_min, "learned schedule")
        at_least(1, hidden=hidden)
        self.first, self.last = float(log_snr_max), float(log_snr_min)
        # Units of slope 10 with their centres spread over [0, 1]: every part of the curve can bend independently.
        slope, centres = 10.0, torch.linspace(0, 1, hidden)
        self.line = nn.Parameter(torch.tensor(_inverse_softplus(1.0)))
        self.slopes = nn.Parameter(torch.full((hidden,), slope))
        self.offsets = nn.Parameter(-slope * centres)
        self.heights = nn.Parameter(torch.full((hidden,), _inverse_softplus(1.0)))

    def _units(self, t: Tensor) -> tuple[Tensor, ...]:
        """(w, c, a, b, s(a t + b)), the last (*t.shape, hidden), all float64."""
        line, heights, slopes = (softplus(p.double()) for p in (self.line, self.heights, self.slopes))
        offsets = self.offsets.double()
        return line, heights, slopes, offsets, torch.sigmoid(slopes * t[..., None] + offsets)

    def _rise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """m(t) - m(0) and m(1) - m(0), computed alike, so that their ratio at t = 1 is exact."""
        t = in_float64(t).to(self.offsets.device)
        line, heights, _, offsets, units = self._units(torch.cat([t.flatten(), t.new_ones(1)]))
        rise = line * torch.cat([t.flatten(), t.new_ones(1)]) + (heights * (units - torch.sigmoid(offsets))).mean(-1)
        return rise[:-1].reshape(t.shape), rise[-1]

    def log_snr(self, t: Tensor) -> Tensor:
        rise, whole = self._rise(t)
        share = rise / whole
        return self.first * (1 - share) + self.last * share

    def log_snr_rate(self, t: Tensor) -> Tensor:
        t = in_float64(t).to(self.offsets.device)
        line, heights, slopes, _, units = self._units(t)
        slope = line + (heights * slopes * units * (1 - units)).mean(-1)
        return (self.last - self.first) * slope / self._rise(t.new_zeros(0))[1]

    @torch.no_grad()
    def time_of(self, log_snr: Tensor) -> Tensor:
        """The time at which lambda has this value, without a gradient: a cell of a table, then Newton's method."""
        log_snr = in_float64(log_snr).to(self.offsets.device)
        grid = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64, device=log_snr.device)
        cell = torch.searchsorted(-self.log_snr(grid), -log_snr.contiguous(), right=True).clamp(1, _CELLS) - 1
        t = (cell + 0.5) / _CELLS
        for _ in range(6):
            step = (self.log_snr(t) - log_snr) / self.log_snr_rate(t)
            t = torch.minimum(torch.maximum(t - step, grid[cell]), grid[cell + 1])
        return t


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))
