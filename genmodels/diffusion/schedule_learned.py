"""A noise schedule that is learned: a monotone network between two fixed end points."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from genmodels.diffusion.schedule import NoiseSchedule, _check_ends, _wide
from genmodels.errors import InputError

_CELLS = 1000  # of the table that finds the time of a log-SNR


class LearnedSchedule(NoiseSchedule):
    """lambda(t) = l_0 + (l_1 - l_0) (m(t) - m(0)) / (m(1) - m(0)), m increasing with learned parameters.

        m(t) = w t + mean_j c_j s(a_j t + b_j),   w, a_j, c_j > 0 by softplus, s logistic

    The end points l_0 and l_1 are fixed and hold exactly whatever the parameters. The bound in continuous time depends
    on them alone: the shape between them changes only the variance of its estimates, and is trained to lower it by the
    objective `Continuous`. The start is close to a straight line.

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
        _check_ends(log_snr_max, log_snr_min)
        if math.isinf(log_snr_max) or math.isinf(log_snr_min):
            raise InputError("log_snr_max and log_snr_min of a learned schedule must be finite")
        if hidden < 1:
            raise InputError(f"hidden = {hidden}: give a positive number")
        self.first, self.last = float(log_snr_max), float(log_snr_min)
        # Units of slope 10 with their centres spread over [0, 1]: every part of the curve can bend on its own.
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
        """m(t) - m(0) and m(1) - m(0): the second is computed as the first is, so that their ratio at 1 is exact."""
        t = _wide(t).to(self.offsets.device)
        line, heights, _, offsets, units = self._units(torch.cat([t.flatten(), t.new_ones(1)]))
        rise = line * torch.cat([t.flatten(), t.new_ones(1)]) + (heights * (units - torch.sigmoid(offsets))).mean(-1)
        return rise[:-1].reshape(t.shape), rise[-1]

    def log_snr(self, t: Tensor) -> Tensor:
        rise, whole = self._rise(t)
        share = rise / whole
        return self.first * (1 - share) + self.last * share

    def log_snr_rate(self, t: Tensor) -> Tensor:
        t = _wide(t).to(self.offsets.device)
        line, heights, slopes, _, units = self._units(t)
        slope = line + (heights * slopes * units * (1 - units)).mean(-1)
        return (self.last - self.first) * slope / self._rise(t.new_zeros(0))[1]

    @torch.no_grad()
    def time_of(self, log_snr: Tensor) -> Tensor:
        """The time at which lambda has this value: a table's cell, then Newton's method; no gradient flows through."""
        log_snr = _wide(log_snr).to(self.offsets.device)
        grid = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64, device=log_snr.device)
        cell = torch.searchsorted(-self.log_snr(grid), -log_snr.contiguous(), right=True).clamp(1, _CELLS) - 1
        t = (cell + 0.5) / _CELLS
        for _ in range(6):
            step = (self.log_snr(t) - log_snr) / self.log_snr_rate(t)
            t = torch.minimum(torch.maximum(t - step, grid[cell]), grid[cell + 1])
        return t


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))
