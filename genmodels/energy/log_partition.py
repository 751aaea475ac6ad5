"""What is known of log Z from weighted chains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogPartition:
    """An estimate of log Z between two bounds.

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
        >>> round(found.lower, 4), round(found.log_z, 4), round(found.upper, 4), found.reliable
        (1.0, 1.0025, 1.2, True)
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
    def reliable(self) -> bool:
        """Whether the bracket is at most 1 + 0.02 D nats wide and at least 5 % of the chains count."""
        narrow = self.width is not None and self.width <= 1 + 0.02 * self.dims
        return narrow and self.ess >= 0.05 * self.chains

    @property
    def note(self) -> str:
        """What has to be said beside the number; empty where nothing has."""
        notes = [] if self.reliable else ["unreliable"]
        notes += ["no upper bound"] if self.reverse is None else []
        notes += ["reverse, approximate"] if self.reverse == "approximate" else []
        return "; ".join(notes)

    def made(self) -> dict[str, float | int | str | bool | None]:
        """Plain values for a `Likelihood` and for reports."""
        names = ("log_z", "stderr", "lower", "lower_stderr", "upper", "upper_stderr", "ess", "chains", "steps", "grid",
                 "kernel", "acceptance", "reverse", "reliable", "note")  # fmt: skip
        return {f"log_z_{n}" if n in ("stderr", "lower", "upper") else n: getattr(self, n) for n in names}


def _mean(log_w: Tensor, log_base: float) -> tuple[float, float]:
    return log_base + float(log_w.mean()), _standard_error(log_w)


def _standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf
