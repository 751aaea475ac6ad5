"""The result type of likelihoods with its errors, and the conversion of nats to bits/dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, at_least
from genmodels.core.tensors import html_table

#: The mark printed before a value of each kind; `<=` in bits/dim means that the true value is at most this.
MARKS = {"exact": "=", "lower_bound": "<=", "upper_bound": ">=", "ode": "~", "ais": "~?", "unnormalised": "-"}


def bits_per_dim(nats: Tensor, dims: Tensor | int, levels: int | None) -> Tensor:
    """Bits per dimension of integer data: -nats / (dims ln 2).

    `nats` is the log-probability of the integers 0..levels-1, including every volume term (dequantisation, logit,
    scaling). Continuous data (levels None) have no bits/dim and raise a ValueError.

    Example:
        >>> bits_per_dim(torch.tensor(-2000.0, dtype=torch.float64), 784, 256)
        tensor(3.6803, dtype=torch.float64)
    """
    if levels is None:
        raise ValueError("bits/dim is for integer data: continuous data have a density, report nll in nats")
    dims = dims.to(torch.float64) if isinstance(dims, Tensor) else float(dims)
    return -nats.to(torch.float64) / (dims * math.log(2))


@dataclass
class Profile:
    """NLL in nats by noise level: `nats[i]` is the part between `edges[i]` and `edges[i + 1]`, summed over examples.

    Shapes: `edges (n + 1,)` log-SNR from one end to the other, `nats (n,)` float64 sums over `items` examples.
    """

    edges: Tensor
    nats: Tensor
    items: int

    def cpu(self) -> Profile:
        """The same values on the CPU."""
        return Profile(self.edges.cpu(), self.nats.cpu(), self.items)

    def __add__(self, other: Profile) -> Profile:
        if not torch.equal(self.edges, other.edges):
            raise ValueError("profiles over different log-SNR bins cannot be added")
        return Profile(self.edges, self.nats + other.nats, self.items + other.items)

    def __radd__(self, other):
        return self if other == 0 else self + other


@dataclass(frozen=True)
class StandardError:
    """The standard error of a mean over items, in independent parts.

        total^2 = items^2 + draws^2 + log_z^2

    Arguments:
        items: error from the finite number of items; includes that of the draws where they cannot be separated.
        draws: error from the random draws for these items, or None.
        log_z: error of log Z, which all items share, so that more items do not reduce it.

    Example:
        >>> StandardError(0.3, 0.4, 1.2).total
        1.3
    """

    items: float
    draws: float | None = None
    log_z: float = 0.0

    @property
    def total(self) -> float:
        """The standard error."""
        return math.hypot(self.items, self.draws or 0.0, self.log_z)


@dataclass(frozen=True)
class SingleValues:
    """The noise of the value of a single item (None if unknown) and the spread over items, in the same unit.

    `shown` says whether single values are meaningful: noise is at most a third of the spread, a tenth of the variance.

    Example:
        >>> SingleValues(0.1, 0.4).shown, SingleValues(0.7, 0.4).shown, SingleValues(None, 0.4).shown
        (True, False, False)
    """

    noise: float | None
    spread: float
    shown: bool = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "shown", self.noise is not None and 3 * self.noise <= self.spread)


#: Fields of a likelihood that hold one value per example.
_PER_EXAMPLE = ("nats", "dims", "stderr", "index", "evaluations", "solver_change")


@dataclass
class Likelihood:
    """Log-likelihoods of a set of examples, with everything needed to compare them.

    Arguments:
        nats: (N,) natural logarithms, float64; log-probability for integer data, log-density for continuous data.
        kind: exact, lower_bound, upper_bound, ode, ais or unnormalised.
        dims: (N,) number of valid dimensions of each example, or one int for all.
        levels: number of integer levels, None for continuous data.
        stderr: (N,) Monte-Carlo standard error of each value (the draws alone), or None.
        made: how it was computed, plain values: steps, draws, solver, tolerances, weights, seed, ...
        index: (N,) positions in the split, or None.
        parts: named summands of -nats, (N,) each (prior, diffusion, reconstruction of a bound).
        profile: the NLL by noise level, for diffusion.
        evaluations: (N,) network evaluations for each example, where they differ, or None.
        solver_change: (N,) difference to a coarser ODE solution, NaN where none was computed, or None.

    Example:
        >>> l = Likelihood(torch.tensor([-1800.0, -2000.0, -2200.0]), "lower_bound", 784, 256)
        >>> round(l.mean_bits_per_dim(), 10), round(l.standard_error("bits_per_dim").total, 10)
        (3.6803444921, 0.2124847883)
        >>> print(l)
        <= 3.6803(2125) bits/dim
    """

    nats: Tensor
    kind: str
    dims: Tensor | int
    levels: int | None = None
    stderr: Tensor | None = None
    made: dict = field(default_factory=dict)
    index: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    profile: Profile | None = None
    evaluations: Tensor | None = None
    solver_change: Tensor | None = None

    def __post_init__(self):
        if self.kind not in MARKS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(MARKS)}")
        self.nats = self.nats.detach().to(torch.float64)
        if self.nats.dim() != 1:
            raise ValueError(f"nats must be one number per example (N,), got shape {tuple(self.nats.shape)}")
        if not isinstance(self.dims, Tensor):
            self.dims = torch.full(self.nats.shape, int(self.dims), device=self.nats.device)
        if self.stderr is not None:
            self.stderr = self.stderr.detach().to(torch.float64)

    def __len__(self) -> int:
        return len(self.nats)

    def __str__(self) -> str:
        """The mean with its mark, its standard error in the last digits, and its unit: bits/dim, or -log p in nats."""
        if self.kind == "unnormalised" and "reason" in self.made:
            return f"no likelihood: {self.made['reason']}"
        unit, value = ("nats", self.mean_nats()) if self.levels is None else ("bits/dim", self.mean_bits_per_dim())
        value = -value if value is not None and self.levels is None else value
        error = self.standard_error("nats" if self.levels is None else "bits_per_dim")
        return f"{self.mark} {with_error(value, None if error is None else error.total)} {unit}"

    def _repr_html_(self) -> str:
        return html_table(f"Likelihood of {len(self)} items", {"value": self, "kind": self.kind, **self.made})

    def _map(self, function: Callable[[Tensor], Tensor], **changes: Any) -> Likelihood:
        """The same with a function applied to every tensor of values per example."""
        values = {name: None if (value := getattr(self, name)) is None else function(value) for name in _PER_EXAMPLE}
        parts = {name: function(value) for name, value in self.parts.items()}
        return replace(self, parts=parts, **values, **changes)

    def cpu(self) -> Likelihood:
        """The same values on the CPU."""
        profile = None if self.profile is None else self.profile.cpu()
        return self._map(lambda value: value.detach().cpu(), profile=profile)

    @property
    def mark(self) -> str:
        """The sign printed before a value of this kind."""
        return MARKS[self.kind]

    @property
    def nonfinite(self) -> Tensor:
        """Positions (indices where known) of the examples whose value is not finite."""
        bad = (~torch.isfinite(self.nats)).nonzero().flatten()
        return bad if self.index is None else self.index[bad]

    def mean_nats(self) -> float | None:
        """Mean log-likelihood per example; None if a value is not finite (never a silent nanmean)."""
        return None if len(self.nonfinite) else float(self.nats.mean())

    def mean_nll_per_dim(self) -> float | None:
        """-sum(nats) / sum(dims): the mean over dimensions, also when examples differ in length."""
        return None if len(self.nonfinite) else float(-self.nats.sum() / self.dims.sum())

    def mean_bits_per_dim(self) -> float | None:
        """sum(nats) / sum(dims) in bits: the mean over dimensions, also when examples differ in length."""
        if len(self.nonfinite):
            return None
        return float(bits_per_dim(self.nats.sum(), self.dims.sum(), self.levels))

    def standard_error(self, unit: str = "nats") -> StandardError | None:
        """The standard error of the mean in its parts; None for a single item or values that are not finite.

        S^2, the variance of the values over items, contains that of the draws: S^2/N minus the squared error of the
        draws is that of the items. In units per dimension the mean is a ratio of two sums, so that differences in
        length do not count as differences in value:

            S^2 = sum_i (n_i - r d_i)^2 / (N - 1) / mean(d)^2,   r = sum n / sum d

        Neighbouring sequences of a text depend on each other: for text the squares are those of `block_sums`.

        Arguments:
            unit: `nats` (per item), `nats_per_dim`, `bits_per_dim`, or the same of text, `bits_per_character` or
                `bits_per_byte`.
        """
        if len(self.nonfinite) or len(self) < 2:
            return None
        dims, n = self.dims.double(), len(self)
        rest = self.nats - (self.nats.mean() if unit == "nats" else self.nats.sum() / dims.sum() * dims)
        sums = block_sums(rest) if unit in OF_TEXT else rest
        both = float(sums.square().sum()) * len(sums) / (len(sums) - 1) / n**2
        draws = None if self.stderr is None else float(self.stderr.square().sum()) / n**2
        items = both if draws is None else 0.0 if both <= draws else both - draws  # NaN if the draws' error is
        shared = (self.made.get("log_z_stderr") or 0.0) if self.kind == "ais" else 0.0
        size = float(dims.mean())
        bits = size * math.log(2)
        scale = {"nats": 1.0, "nats_per_dim": size}.get(unit, bits)
        return StandardError(math.sqrt(items) / scale, None if draws is None else math.sqrt(draws) / scale,
                             shared / scale)

    def single_values(self) -> SingleValues:
        """The noise of the value of a single item and the spread over items, in nats per dimension.

        The variance over items contains both; subtracting the mean square of `stderr` leaves that of the items.
        Exact values have no draws, hence no noise.
        """
        finite = torch.isfinite(self.nats) & (self.dims > 0)  # an empty transcript has no dimension
        values = (self.nats / self.dims)[finite]
        exact = self.kind in ("exact", "ais", "unnormalised") or (
            self.kind == "ode" and self.made.get("divergence") == "exact")
        if self.stderr is not None:
            noise = float((self.stderr / self.dims)[finite].square().mean().sqrt())
        else:
            drawn = self.kind != "exact" and self.levels is not None or "dequantisation" in self.made
            noise = 0.0 if exact and not drawn and not self.made.get("noise") else None
        both = float(values.var()) if len(values) > 1 else 0.0
        return SingleValues(noise, math.sqrt(max(0.0, both - (noise or 0.0) ** 2)))

    @classmethod
    def concatenate(cls, parts: list[Likelihood]) -> Likelihood:
        """One result from many batches, which must agree in kind, levels and `made`."""
        if not parts:
            raise ValueError("no likelihoods to concatenate")
        first = parts[0]
        for part in parts[1:]:
            for what in ("kind", "levels", "made"):
                if getattr(part, what) != getattr(first, what):
                    raise ValueError(f"likelihoods differ in {what}: {getattr(first, what)!r}, {getattr(part, what)!r}")

        def together(name):
            values = [getattr(part, name) for part in parts]
            return None if any(v is None for v in values) else torch.cat(values)

        joined = {name: together(name) for name in _PER_EXAMPLE}
        common = set.intersection(*(set(part.parts) for part in parts))
        summands = {name: torch.cat([part.parts[name] for part in parts]) for name in first.parts if name in common}
        profile = None if any(part.profile is None for part in parts) else sum(part.profile for part in parts)
        return replace(first, made=dict(first.made), parts=summands, profile=profile, **joined)

    def in_index_order(self, expected: Tensor | None = None) -> Likelihood:
        """The same values sorted by index; raises RunError if one of `expected` (0 .. N-1) is missing or repeated."""
        order = self.index.argsort()
        expected = (torch.arange(len(self)) if expected is None else expected).to(self.index.device)
        if not torch.equal(self.index[order], expected):
            seen = self.index.bincount(minlength=int(expected.max()) + 1)
            missing, repeated = expected[seen[expected] == 0].tolist(), (seen > 1).nonzero().flatten().tolist()
            raise RunError(f"evaluation lost items: missing {missing[:3]}, repeated {repeated[:3]}")
        return self._map(lambda value: value[order])


def packed(likelihood: Likelihood) -> dict:
    """Tensors and plain types, for the cache."""
    stored, profile = dict(vars(likelihood)), likelihood.profile
    del stored["evaluations"]
    return stored | {"profile": profile and (profile.edges, profile.nats, profile.items)}


def unpacked(stored: dict) -> Likelihood:
    """The inverse of `packed`."""
    profile = stored["profile"]
    return Likelihood(**{**stored, "profile": None if profile is None else Profile(*profile)})


_LARGE, _FINEST = 1e7, 12  # values with powers of ten, and most digits of others


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A value with its standard error in the last digits.

    Example:
        >>> with_error(2.12342, 0.0123)
        '2.1234(123)'
        >>> with_error(2.5, None), with_error(None, 0.1), with_error(2.5, math.inf)
        ('2.5000', 'not finite', '2.5000 (error unknown)')
        >>> with_error(2.5, 0.000031), with_error(-1.23e9, 4e6)  # two digits of a small error, powers of a large value
        ('2.500000(31)', '-1.2300e+09 +- 4.0e+06')
    """
    if value is None or math.isnan(value):
        return "not finite"
    if _LARGE <= abs(value) < math.inf and (error is None or math.isfinite(error)):
        resolved = math.floor(math.log10(abs(value))) - math.floor(math.log10(error)) + 1 if error else 4
        return f"{value:.{max(4, resolved)}e}" + ("" if error is None else f" +- {error:.1e}")
    if error and error < 10**-digits:
        digits = min(1 - math.floor(math.log10(error)), _FINEST)
    shown = f"{value:.{digits}f}"
    if error is None:
        return shown
    return f"{shown}({round(error * 10**digits)})" if math.isfinite(error) else f"{shown} (error unknown)"


def check_importance_samples(count: int, spec: DataSpec) -> None:
    """Raise ValueError for fewer than one importance sample, or for several of real numbers, which need no noise."""
    at_least(1, importance_samples=count)
    if count > 1 and spec.levels is None:
        raise InputError(f"importance_samples={count} is for integers, and {spec.name} has real numbers: leave it out")


#: Units of text, whose items are consecutive pieces of it.
OF_TEXT = ("bits_per_character", "bits_per_byte")


def block_sums(rest: Tensor) -> Tensor:
    """Sums over blocks of about sqrt(N) neighbours of N deviations from a mean: the method of batch means.

    k/(k - 1) times the sum of the squares of k of them is the variance of the sum of N values that depend on those near
    to them. Source: Flegal and Jones 2010, "Batch means and spectral variance estimators in Markov chain Monte Carlo".

    Example:
        >>> block_sums(torch.tensor([1.0, 1.0, -1.0, -1.0])).tolist()
        [2.0, -2.0]
    """
    return torch.stack([part.sum() for part in rest.split(round(math.sqrt(len(rest))))])


def paired(first: Tensor, second: Tensor, dims: Tensor | None = None, of_text: bool = False) -> tuple[float, float]:
    """The mean difference of two models on the same items and its standard error, std(d) / sqrt(N).

    With `dims`, for items of different sizes, it is the error of sum(nats) / sum(dims) times the mean of dims; with
    `of_text` that of neighbours that depend on each other (`block_sums`).

    Example:
        >>> a, b = torch.tensor([3.1, 3.3, 3.6]).double(), torch.tensor([3.0, 3.25, 3.4]).double()
        >>> [round(v, 6) for v in paired(a, b)]
        [0.116667, 0.044096]
    """
    difference = torch.as_tensor(first).double() - torch.as_tensor(second).double()
    rest = difference if dims is None else difference - dims.double() * (difference.sum() / dims.double().sum())
    sums = block_sums(rest - rest.mean()) if of_text else rest - rest.mean()
    k = len(sums)
    return float(difference.mean()), math.inf if k < 2 else float(sums.norm()) * math.sqrt(k / (k - 1)) / len(rest)


def log_mean_exp(log_weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """log of the mean weight of each row, (B,), and its standard error by the delta method (None for one column).

        nats = log (1/K) sum_k exp(w_k),    stderr = std_k(exp(w_k)) / (sqrt(K) mean_k exp(w_k))

    Example:
        >>> log_mean_exp(torch.tensor([[-10.0, -11.0, -13.0]], dtype=torch.float64))[0]
        tensor([-10.7496], dtype=torch.float64)
    """
    samples = log_weights.shape[1]
    at_least(1, samples=samples)
    nats = log_weights.logsumexp(1) - math.log(samples)
    if samples == 1:
        return nats, None
    ratio = torch.exp(log_weights.detach() - nats.detach()[:, None])
    return nats, ratio.std(1, unbiased=True) / math.sqrt(samples)


def value_of(line: Mapping[str, Any]) -> tuple[str, float | None]:
    """Name and value of a likelihood in a report, in the unit of its errors; lower is better, None if not reported.

    Example:
        >>> value_of({"unit": "nats_per_dim", "nll": 90.0, "nll_per_dim": 1.5})
        ('nll_per_dim', 1.5)
        >>> value_of({"unit": "bits_per_character", "bits_per_dim": 2.5})
        ('bits_per_character', 2.5)
    """
    name = {"nats": "nll", "nats_per_dim": "nll_per_dim"}.get(line["unit"], line["unit"])
    return name, line.get("bits_per_dim" if name.startswith("bits") else name)


def breakdown(result: Likelihood, per_dim: bool = False) -> dict[str, float]:
    """Parts of the NLL per item by name, in bits/dim for integers and nats for continuous data (`per_dim`: per cell).

    `val/<part>` are the summands of the negative ELBO. `noise/k_of_n` is the part of the k-th of n equal shares of the
    steps, the first having the least noise: shares of steps, not log-SNRs, so that runs with different schedules have
    the same names. Their sum is `val/diffusion`. `val/solver_change` is the increase by a coarser solution of an ODE.

    Example:
        >>> import torch
        >>> from genmodels.core.likelihood import Profile
        >>> profile = Profile(torch.tensor([4.0, 0.0, -4.0]), torch.tensor([6.0, 2.0], dtype=torch.float64), 2)
        >>> parts = {"prior": torch.tensor([0.5, 0.5]), "diffusion": torch.tensor([4.0, 4.0])}
        >>> result = Likelihood(torch.full((2,), -4.5), "lower_bound", 1, parts=parts, profile=profile)
        >>> breakdown(result)
        {'val/prior': 0.5, 'val/diffusion': 4.0, 'noise/1_of_2': 3.0, 'noise/2_of_2': 1.0}
    """
    dims = float(result.dims.double().mean())
    unit = dims * math.log(2) if result.levels is not None else dims if per_dim else 1.0
    found = {f"val/{name}": float(value.double().mean()) / unit for name, value in result.parts.items()}
    if result.profile is not None:
        shares = (result.profile.nats / result.profile.items / unit).tolist()
        found |= {f"noise/{k}_of_{len(shares)}": share for k, share in enumerate(shares, 1)}
    if result.solver_change is not None:
        found["val/solver_change"] = float(result.solver_change.nanmean()) / unit
    return found


def in_words(line: Mapping[str, Any]) -> tuple[str, str]:
    """A likelihood of a report for a table: its value with mark and error, or its bracket, and its kind.

    Example:
        >>> in_words({"kind": "ais", "mark": "~?", "unit": "nats", "nll": 2.5, "se_data": 0.1, "unreliable": "few"})
        ('~? 2.5000(1000)', 'ais, unreliable')
    """
    kind = ", ".join([line["kind"], *(word for word in ("optimistic", "unreliable") if line.get(word))])
    value, sides = value_of(line)[1], line.get("bracket") or {}
    if line["kind"] == "unnormalised":
        return "none", kind
    if value is None and sides.get("upper") is not None:
        return f"{line['mark']} {sides['lower']:.4f} to {sides['upper']:.4f}", kind
    return f"{line['mark']} {with_error(value, line['se_data'])}", kind
