"""What is known of log Z from weighted chains.

E[log w] + log Z_q <= log Z bounds it from below, the mean of log w over reverse chains from above, and the logarithm of
the mean weight estimates it. Each is a mean over few chains, so that each has an error of its own, and by these errors
the estimate may lie beyond an upper bound that is close. The limits `least` and `most` hold all three together:

    least = min over the three of (value - t se),    most = max over the three of (value + t se)

with t the quantile 0.975 of Student's distribution for that many chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

_FEWEST = 20  # chains that must count: the error of log mean w holds from about here on, whatever the weights
_SHARE = 0.05
_DISAGREE = 3.0  # standard errors


@dataclass(frozen=True)
class LogPartition:
    """An estimate of log Z between two bounds, each with its standard error over the chains.

    Arguments:
        log_z: log Z_q + log mean w, a lower bound in the mean, and close where the effective sample size is large.
        stderr: its standard error, by the delta method: sd(w) / (mean(w) sqrt(B)).
        lower, lower_stderr: log Z_q + mean log w, and the standard error of that mean.
        upper, upper_stderr: log Z_q + mean of log w over reverse chains; None without them.
        ess: (sum w)^2 / sum w^2, at most the number of chains.
        chains, steps, grid, kernel, acceptance, dims: how it was made.
        reverse: `exact` where the reverse chains started at draws of the model, else `approximate`: then the upper
            bound is one only as far as those are; None without reverse chains.

    Example:
        >>> log_w = torch.tensor([0.0, 0.1, -0.1, 0.0], dtype=torch.float64)
        >>> found = LogPartition.of_weights(log_w, log_w + 0.2, 1.0, dims=2, steps=9, reverse="exact")
        >>> round(found.lower, 4), round(found.log_z, 4), round(found.upper, 4), found.note
        (1.0, 1.0025, 1.2, 'unreliable: 4 of 4 chains count, at least 20 should: more chains=')
        >>> round(found.least, 4), round(found.most, 4)
        (0.8701, 1.3299)
    """

    log_z: float
    stderr: float
    lower: float
    lower_stderr: float
    upper: float | None
    upper_stderr: float | None
    ess: float
    chains: int
    steps: int
    dims: int
    grid: str = ""
    kernel: str = ""
    acceptance: float = 1.0
    reverse: str | None = None

    @classmethod
    def of_weights(
        cls, log_w: Tensor, reverse_log_w: Tensor | None, log_base: float, *, dims: int, steps: int, grid: str = "",
        kernel: str = "", acceptance: float = 1.0, reverse: str | None = None,
    ) -> LogPartition:  # fmt: skip
        """From the weights of both directions; those of many batches of chains may be joined before."""
        log_w = log_w.to(torch.float64)
        count = len(log_w)
        relative = torch.exp(log_w - torch.logsumexp(log_w, 0) + math.log(count))  # w / mean(w)
        upper = upper_stderr = None
        if reverse_log_w is not None:
            upper, upper_stderr = _mean(reverse_log_w.to(torch.float64), log_base)
        lower, lower_stderr = _mean(log_w, log_base)
        return cls(
            log_z=log_base + float(torch.logsumexp(log_w, 0)) - math.log(count),
            stderr=_standard_error(relative),
            lower=lower, lower_stderr=lower_stderr, upper=upper, upper_stderr=upper_stderr,
            ess=count**2 / float(relative.square().sum()),
            chains=count, steps=steps, dims=dims, grid=grid, kernel=kernel, acceptance=acceptance, reverse=reverse,
        )  # fmt: skip

    @property
    def width(self) -> float | None:
        """Of the bracket, None without an upper side."""
        return None if self.upper is None else self.upper - self.lower

    @property
    def least(self) -> float:
        """The lower limit of log Z, at 97.5 % on its side."""
        return min(value - error for value, error in self._spread())

    @property
    def most(self) -> float | None:
        """The upper limit of log Z, at 97.5 % on its side; None without reverse chains."""
        return None if self.upper is None else max(value + error for value, error in self._spread())

    def _spread(self) -> list[tuple[float, float]]:
        """Estimate and bounds, each with t times its standard error."""
        t = float(stats.t.ppf(0.975, max(1, self.chains - 1)))
        found = [(self.lower, self.lower_stderr), (self.log_z, self.stderr), (self.upper, self.upper_stderr)]
        return [(value, t * error) for value, error in found if value is not None]

    @property
    def consistent(self) -> bool:
        """Whether the estimate is not above the upper bound by more than three standard errors of the difference."""
        return self.upper is None or self.log_z - self.upper <= _DISAGREE * math.hypot(self.stderr, self.upper_stderr)

    @property
    def doubts(self) -> list[str]:
        """Why the estimate and its error cannot be relied on, and which option helps; empty where they can."""
        few, allowed = f"{self.ess:.0f} of {self.chains} chains count", 1 + 0.02 * self.dims
        doubts = [] if self.consistent else ["forward and reverse chains disagree: more densities="]
        if self.ess < _SHARE * self.chains:
            doubts.append(f"{few}, at least {_SHARE:.0%} should: more densities=")
        elif self.ess < _FEWEST:
            doubts.append(f"{few}, at least {_FEWEST} should: more chains=")
        if self.width is None:
            doubts.append("no upper bound")
        elif not self.width <= allowed:
            doubts.append(f"bounds {self.width:.2f} nats apart, at most {allowed:.2f} should be: more densities=")
        return doubts

    @property
    def reliable(self) -> bool:
        """Whether the estimate and its standard error can be relied on.

        The two directions agree, the bounds are at most 1 + 0.02 D nats apart, and at least 20 and 5 % of the chains
        count.
        """
        return not self.doubts

    @property
    def note(self) -> str:
        """What has to be said beside the number; empty where nothing has."""
        notes = [f"unreliable: {'; '.join(self.doubts)}"] if self.doubts else []
        notes += ["reverse, approximate"] if self.reverse == "approximate" else []
        return "; ".join(notes)

    def made(self) -> dict[str, float | int | str | bool | None]:
        """Plain values for a `Likelihood` and for reports."""
        names = ("log_z", "stderr", "lower", "lower_stderr", "upper", "upper_stderr", "least", "most", "ess", "chains",
                 "steps", "grid", "kernel", "acceptance", "reverse", "consistent", "reliable", "note")  # fmt: skip
        own = ("stderr", "lower", "upper", "least", "most")
        return {f"log_z_{n}" if n in own else n: getattr(self, n) for n in names}


def _mean(log_w: Tensor, log_base: float) -> tuple[float, float]:
    return log_base + float(log_w.mean()), _standard_error(log_w)


def _standard_error(values: Tensor) -> float:
    """Of a mean; infinite for one value, or where a chain met an infinite energy."""
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf
    return error if math.isfinite(error) else math.inf
