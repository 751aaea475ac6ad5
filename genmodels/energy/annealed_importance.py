"""Annealed importance sampling: estimates of log Z in any dimension, with lower and upper bounds and a standard error.

    E_b = (1 - b) E_q + b E,   0 = b_0 < ... < b_K = 1,   x_0 ~ q,   x_k by a kernel that leaves exp(-E_{b_k}) invariant

    log w = sum_k [E_{b_{k-1}}(x_{k-1}) - E_{b_k}(x_{k-1})],    E[w] = Z / Z_q

Each term is evaluated before the move. By Jensen's inequality E[log w] + log Z_q <= log Z. The reverse sequence of
densities from samples of the model has E[1/w] = Z_q / Z, hence log Z <= E_reverse[log w] + log Z_q. Where the energy of
the model is infinite, E[1/w] is smaller by the share of q outside the support: the bound still holds, less tightly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError, at_least
from genmodels.core.random import Generator, KeyedGenerator, at_step, child
from genmodels.energy.chains import run_chains
from genmodels.energy.function import EnergyFunction, require_energy
from genmodels.energy.ground_truth import GaussianBase
from genmodels.energy.kernels import HMC, Kernel, Point, Target

_FEWEST = 20  # effective sample size below which the standard error of log mean w is too small
_SHARE = 0.05  # least effective sample size, as a share of the chains
_DISAGREE = 3.0  # standard errors
_PILOT = 50, 100  # moves of the pilot run: at the first density, and shared by the others (at least one each)


@dataclass(frozen=True)
class LogPartition:
    """An estimate of log Z between two bounds, each with its standard error over the chains.

    Arguments:
        log_z: log Z_q + log mean w, a lower bound in expectation, tight if the effective sample size is large.
        stderr: its standard error, by the delta method: sd(w) / (mean(w) sqrt(B)).
        lower, lower_stderr: log Z_q + mean log w, and the standard error of that mean.
        upper, upper_stderr: log Z_q + mean of log w over reverse chains; None without them.
        ess: (sum w)^2 / sum w^2, at most the number of chains.
        chains, steps, grid, kernel, acceptance, dims: how it was computed.
        reverse: `exact` if the reverse chains started at draws of the model, otherwise `approximate`: then the upper
            bound holds only as far as the starting points are such draws; None without reverse chains.

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
        """The estimate from the weights of both directions, which may come from several batches of chains."""
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
        """The distance between the bounds, None without an upper bound."""
        return None if self.upper is None else self.upper - self.lower

    @property
    def least(self) -> float:
        """The lower end of the 95 % interval of log Z."""
        return min(value - error for value, error in self._half_widths())

    @property
    def most(self) -> float | None:
        """The upper end of the 95 % interval of log Z; None without reverse chains."""
        # A lower bound of minus infinity, which is that of weights of zero, says nothing about the upper end.
        ends = [value + error for value, error in self._half_widths() if value > -math.inf]
        return None if self.upper is None else max(ends)

    def _half_widths(self) -> list[tuple[float, float]]:
        """Estimate and bounds, each with the half-width of its 95 % interval."""
        from scipy import stats

        t = float(stats.t.ppf(0.975, max(1, self.chains - 1)))
        pairs = [(self.lower, self.lower_stderr), (self.log_z, self.stderr), (self.upper, self.upper_stderr)]
        return [(value, t * error) for value, error in pairs if value is not None]

    @property
    def consistent(self) -> bool:
        """Whether the estimate is not above the upper bound by more than three standard errors of the difference."""
        return self.upper is None or self.log_z - self.upper <= _DISAGREE * math.hypot(self.stderr, self.upper_stderr)

    @property
    def doubts(self) -> list[str]:
        """Reasons why the estimate and its error are unreliable, with the option that helps; empty if reliable."""
        few, allowed = f"{self.ess:.0f} of {self.chains} chains count", 1 + 0.02 * self.dims
        more = "more steps=" if self.kernel == "diffusion" else "more densities="  # the option of the model's method
        doubts = [] if self.consistent else [f"forward and reverse chains disagree: {more}"]
        if self.ess < _SHARE * self.chains:
            doubts.append(f"{few}, at least {_SHARE:.0%} should: {more}")
        elif self.ess < _FEWEST:
            doubts.append(f"{few}, at least {_FEWEST} should: more chains=")
        if self.width is None:
            doubts.append("no upper bound")
        elif not self.width <= allowed:
            doubts.append(f"bounds {self.width:.2f} nats apart, at most {allowed:.2f} should be: {more}")
        return doubts

    @property
    def reliable(self) -> bool:
        """Whether the estimate and its standard error are reliable.

        The two directions agree, the bounds are at most 1 + 0.02 D nats apart, and the effective sample size is at
        least 20 and 5 % of the chains.
        """
        return not self.doubts

    @property
    def note(self) -> str:
        """A note to print with the estimate; empty if there is none."""
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
    """The standard error of a mean; infinite for one value, or if a chain met an infinite energy."""
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf
    return error if math.isfinite(error) else math.inf


class Run(NamedTuple):
    """One direction: `log_w (B,)` as above, without log Z_q; acceptance rate; final points."""

    log_w: Tensor
    acceptance: float
    x: Tensor


class AnnealedImportanceSampling:
    """log Z with a two-sided bracket, a standard error and an effective sample size.

    Arguments:
        steps: K, the number of intermediate densities.
        kernel: the invariant moves, HMC if None; ULA is refused, its bias has no known sign.
        tune: chains of a pilot run that finds the step size of each density; 0 uses the kernel's for all. Step sizes
            do not depend on the chains of the estimate, which stays unbiased.
        reverse_steps: HMC steps that generate samples for the reverse run if none are given.

    Errors: InputError for a kernel that is not exact, a score without energy.
    Source: Neal 2001, "Annealed importance sampling"; the bracket is bidirectional Monte Carlo, Grosse et al. 2015,
        with the b_k of its section 5, dense at both ends.

    Example:
        >>> from genmodels.energy import LogDensity
        >>> from genmodels.core.random import KeyedGenerator
        >>> model = LogDensity(lambda x: 1 - 0.5 * x.square().sum(1))  # log Z = 1 + log 2 pi
        >>> base = GaussianBase(torch.zeros(2), 2 * torch.eye(2))
        >>> keyed = KeyedGenerator(0, torch.arange(200), "ais")
        >>> found = AnnealedImportanceSampling(steps=20)(model, base, keyed, chains=200, dtype=torch.float64)
        >>> abs(found.log_z - 2.837877) < 4 * found.stderr
        True
    """

    def __init__(self, *, steps: int = 1000, kernel: Kernel | None = None, tune: int = 64, reverse_steps: int = 500):
        at_least(1, steps=steps)
        self.kernel = HMC() if kernel is None else kernel
        if not self.kernel.exact:
            raise InputError(
                f"{type(self.kernel).__name__} inside annealed importance sampling does not leave the intermediate "
                "densities invariant and its bias has no sign: use HMC or MALA"
            )
        rise = torch.sigmoid(torch.linspace(-4, 4, steps + 1, dtype=torch.float64))
        self.betas = (rise - rise[0]) / (rise[-1] - rise[0])  # (K + 1,)
        self.tune, self.reverse_steps = tune, reverse_steps

    def __call__(
        self, model: EnergyFunction, base: GaussianBase, generator: Generator, *, chains: int,
        samples: Tensor | None = None, exact_samples: bool = False, reverse: bool = True, cond: Tensor | None = None,
        dtype=torch.float32,
    ) -> LogPartition:
        """Run both directions and estimate log Z.

        Arguments:
            base: q, broad enough to cover the model.
            generator: keyed by chain, or a torch.Generator.
            chains: number of chains B of each direction.
            samples: (B', *event) draws of the model for the reverse run; None makes them by HMC from the forward run,
                from those of its chains whose weight is not zero.
            exact_samples: whether `samples` are exact draws of the model; only then is the upper bound guaranteed.
            reverse: whether to run reverse chains too.
            cond: (B, ...) condition, the same for all chains.
            dtype: of the points; energies and weights are float64.
        """
        model = require_energy(model, "annealed importance sampling")
        sizes = self.step_sizes(model, base, generator, cond=cond, dtype=dtype)
        forward = self.forward(model, base, generator, chains, sizes, cond=cond, dtype=dtype)
        back, label = None, None
        if reverse:
            label = "exact" if samples is not None and exact_samples else "approximate"
            if samples is None:
                samples = self._drawn(model, forward, child(generator, "samples"), cond)
            keyed, cond = for_rows(len(samples), child(generator, "reverse"), cond)
            back = self.reverse(model, base, keyed, samples, sizes, cond=cond)
        return LogPartition.of_weights(
            forward.log_w, None if back is None else back.log_w, base.log_normaliser,
            dims=base.mean.numel(), steps=len(self.betas) - 1, grid="sigmoid", kernel=type(self.kernel).__name__,
            acceptance=forward.acceptance, reverse=label,
        )  # fmt: skip

    def _drawn(self, model: EnergyFunction, forward: Run, generator: Generator, cond: Tensor | None) -> Tensor:
        """Approximate draws of the model, by HMC from the last points of the forward chains inside its support."""
        start, inside = forward.x, (forward.log_w > -torch.inf).nonzero().flatten()
        if not len(inside):
            raise RunError(f"the energy is infinite at all {len(start)} draws of the base: use a base that covers the "
                           "model, or more chains")
        if len(inside) < len(start):
            start, cond = start[inside], cond if cond is None else cond[inside]
            generator = generator.rows(inside) if isinstance(generator, KeyedGenerator) else generator
        warm_up = self.reverse_steps // 2
        return run_chains(model, HMC(), start, generator, warm_up=warm_up, steps=self.reverse_steps - warm_up,
                          keep_every=0, cond=cond).samples

    def forward(
        self, model: EnergyFunction, base: GaussianBase, generator: Generator, chains: int, sizes: Tensor, *,
        cond: Tensor | None = None, dtype=torch.float32, callback: Callable[[int, Tensor], None] | None = None,
    ) -> Run:  # fmt: skip
        """From draws of the base to the model: E[exp(log_w)] = Z / Z_q.

        Arguments:
            sizes: (K + 1,) step sizes at each density, from `step_sizes`.
            callback: called after each density as callback(its number from 1, x).
        """
        start = base.sample(chains, at_step(generator, 0), dtype=dtype)
        moves = [(k, k) for k in range(1, len(self.betas))]
        return self._run(Bridge(model, base, cond), start, moves, generator, sizes, callback)

    def reverse(
        self, model: EnergyFunction, base: GaussianBase, generator: Generator, samples: Tensor, sizes: Tensor, *,
        cond: Tensor | None = None,
    ) -> Run:  # fmt: skip
        """From draws of the model to the base, the same weights in the opposite order: E[exp(-log_w)] = Z_q / Z."""
        moves = [(k, k - 1) for k in range(len(self.betas) - 1, 0, -1)]
        return self._run(Bridge(model, base, cond), samples, moves, generator, sizes)

    def _run(
        self, bridge: Bridge, start: Tensor, moves: list[tuple[int, int]], generator: Generator, sizes: Tensor,
        callback: Callable[[int, Tensor], None] | None = None,
    ) -> Run:  # fmt: skip
        """The terms k of log w, each followed by moves at a density, if it is not the base itself."""
        point = bridge.evaluate(start)
        log_w = torch.zeros(len(start), dtype=torch.float64, device=point.x.device)
        accepted = []
        for k, density in moves:
            term = bridge.energy(point, k - 1, self.betas) - bridge.energy(point, k, self.betas)
            # A chain that starts outside the support of the model has weight zero, whatever its later terms are.
            log_w = torch.where(log_w == -torch.inf, log_w, log_w + term)
            if density > 0:
                point, acceptance = self._move(bridge, point, density, generator, sizes)
                accepted.append(acceptance)
            if callback is not None:
                callback(density, point.x)
        bad = (log_w.isnan() | (log_w == torch.inf)).nonzero().flatten()
        if len(bad):
            raise RunError(f"the weight of chain {int(bad[0])} is not finite: the energy is not finite along the chain")
        return Run(log_w, sum(accepted) / len(accepted) if accepted else 1.0, point.x)

    def step_sizes(
        self, model: EnergyFunction, base: GaussianBase, generator: Generator, *,
        cond: Tensor | None = None, dtype=torch.float32,
    ) -> Tensor:  # fmt: skip
        """(K + 1,) a step size for each density, tuned on separate chains, hence independent of the batch."""
        count = len(self.betas)
        if not self.tune:
            return torch.full((count,), self.kernel.step_size, dtype=torch.float64)
        generator, cond = for_rows(self.tune, child(generator, "tune"), cond)
        bridge = Bridge(model, base, cond)
        point = bridge.evaluate(base.sample(self.tune, at_step(generator, 0), dtype=dtype))
        log_size, sizes, done = math.log(self.kernel.step_size), [], 0
        for k in range(count):
            bridge.beta = float(self.betas[k])
            point = bridge.recombined(point)
            # Many steps at the first density, then few at each, since neighbouring densities are similar.
            for _ in range(_PILOT[0] if k == 0 else max(1, _PILOT[1] // count)):
                done += 1
                size = torch.full((self.tune,), math.exp(log_size), dtype=torch.float64, device=point.x.device)
                point, move = self.kernel(bridge, point, at_step(generator, done), size)
                log_size += 0.5 * (float(move.acceptance.mean()) - self.kernel.wanted_acceptance)
            sizes.append(math.exp(log_size))
        return torch.tensor(sizes, dtype=torch.float64)

    def _move(self, bridge: Bridge, point: Point, k: int, generator: Generator, sizes: Tensor) -> tuple[Point, float]:
        """A move that leaves density k invariant, with the noise of step k."""
        bridge.beta = float(self.betas[k])
        point, keyed = bridge.recombined(point), at_step(generator, k)
        point, move = self.kernel(bridge, point, keyed, sizes[k].to(point.x.device).expand(len(point.x)))
        return point, float(move.acceptance.mean())


def for_rows(count: int, generator: Generator, cond: Tensor | None) -> tuple[Generator, Tensor | None]:
    """A generator of the first rows, of this number, and a condition that is the same for all, of as many."""
    if isinstance(generator, KeyedGenerator):
        generator = KeyedGenerator(generator.seed, torch.arange(count, device=generator.index.device), generator.stream)
    return generator, cond if cond is None else cond[:1].expand(count, *cond.shape[1:])


class Bridge(Target):
    """The density between base and model at inverse temperature `beta`; points store both energies to change beta."""

    def __init__(self, model: EnergyFunction, base: GaussianBase, cond: Tensor | None):
        super().__init__(model, cond)
        self.base, self.beta = base, 0.0

    def evaluate(self, x: Tensor) -> Point:
        x = self.kept(x)
        self.evaluations += len(x)
        with torch.no_grad():
            base_energy, base_score = self.base.energy_and_score(x)
            energy, score = self.model.energy_and_score(x, self.cond)
        parts = base_energy, base_score.to(x.dtype), energy.to(torch.float64), score
        return self.recombined(Point(x, energy, score, parts))

    def recombined(self, point: Point) -> Point:
        """The same point under the current beta."""
        base_energy, base_score, energy, score = point.parts
        b = self.beta
        return Point(point.x, _mix(base_energy, energy, b), _mix(base_score, score, b), point.parts)

    def energy(self, point: Point, k: int, betas: Tensor) -> Tensor:
        """(B,) E_{b_k} at a point."""
        return _mix(point.parts[0], point.parts[2], float(betas[k]))


def _mix(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """(1 - beta) a + beta b, and a at beta = 0 even if b is infinite."""
    return a if beta == 0 else (1 - beta) * a + beta * b
