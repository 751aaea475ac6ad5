"""The likelihood of a diffusion model: its evidence lower bound, and the density of its probability-flow ODE."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError, at_least, none_or_at_least, one_of
from genmodels.core.likelihood import Likelihood, Profile, check_importance_samples, log_mean_exp
from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import event_size, hide, outside_inference
from genmodels.diffusion.bound import ElboTerms, continuous_elbo, elbo, reconstruction_term
from genmodels.diffusion.decoder import Decoder
from genmodels.diffusion.ode import OdeDensity, OdeLogProb, last_log_snr, standard_normal
from genmodels.diffusion.path import Path, alpha_sigma, sigma2_ts
from genmodels.diffusion.solvers import SolverError


class ElboEstimate(NamedTuple):
    """The terms of a bound, its profile over the noise levels, and how it was computed, in plain values."""

    terms: ElboTerms
    profile: Profile
    made: dict


@dataclass
class Elbo:
    """The evidence lower bound of a diffusion model of T steps, from all its terms or an estimate from some.

        -log p(x) <= KL(q(x_1|x) || N(0, I)) + sum_k E_q KL(q(x_s|x_t, x) || p(x_s|x_t)) - E_q log p(x|x_{t_0})

    Arguments:
        decoder: p(x | x_{t_0}); its `finest_log_snr` limits t_0.
        num_steps: T.
        variance: of the kernels p(x_s|x_t): a name in VARIANCES, or `learned`.

    Source: Ho et al. 2020, equation 5; in continuous time Kingma et al. 2021, equations 17 and 18.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, Gaussian, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> bound = Elbo(Gaussian(), num_steps=10, variance="beta")
        >>> noise = KeyedGenerator(0, torch.arange(3), "elbo")
        >>> found = bound(exact, torch.zeros(3, 2), bound.times(exact.schedule), noise)
        >>> found.terms.diffusion.shape, found.made["estimate"]
        (torch.Size([3, 9]), 'bound, all terms')
    """

    decoder: Decoder
    num_steps: int
    variance: Literal["beta", "beta_tilde", "learned"]

    def steps(self, schedule: Path) -> Tensor:
        """Times t_0 < ... < t_K = 1, evenly spaced, of the objectives that draw steps; (T,) float64.

        A discrete schedule has DDPM's t_0 = 1/T. A continuous one starts where the noise is a quarter of the distance
        between levels, log SNR = 2 log(2 (L - 1)): below, the integers are certain and further steps only
        loosen the ELBO. Every t_0 yields a bound; this one is near the tightest. It is 0 where the schedule always has
        more noise.
        """
        first, finest = 1.0 / self.num_steps, self.decoder.finest_log_snr
        if schedule.num_steps is None:
            cleanest, at_first = schedule.log_snr(torch.tensor([0.0, first], dtype=torch.float64)).detach()
            first = 0.0 if cleanest <= finest else float(schedule.time_of(at_first.clamp(max=finest)).detach())
        return torch.linspace(first, 1.0, self.num_steps, dtype=torch.float64)

    def times(self, schedule: Path) -> Tensor:
        """Times t_0 < ... < t_K = 1 of the ELBO, evenly spaced in log-SNR; (T,) float64.

        Then all steps cost about the same, which makes the ELBO of T steps and its estimate from few draws tight. A
        table keeps its own steps. A log-SNR below -20 at the end counts as -20 for the spacing.
        """
        times = self.steps(schedule)
        if schedule.num_steps is not None:
            return times
        first, last = schedule.log_snr(times[[0, -1]]).detach().clamp(min=-20.0)
        even = schedule.time_of(torch.linspace(float(first), float(last), len(times), dtype=torch.float64)).to(times)
        return torch.cat([times[:1], even[1:-1], times[-1:]])

    def first_log_snr(self, schedule: Path) -> float:
        """The log-SNR at t_0, the cleanest level at which the model is evaluated."""
        return float(schedule.log_snr(self.steps(schedule)[:1]).detach()[0])

    def __call__(
        self, denoiser, x0: Tensor, times: Tensor, generator: KeyedGenerator, *, cond: Tensor | None = None,
        mask: Tensor | None = None, bound: Literal["discrete", "continuous"] = "discrete", draws: int | None = None,
        replicates: int = 2, rows: int | None = None,
    ) -> ElboEstimate:
        """The negative ELBO of data in the network's units.

        Shapes: x0 (B, *event), times (T,), cond (B,) or (B, F), mask (B, 1, T).

        Arguments:
            times: the result of `times`.
            generator: keyed over the items of x0.
            bound: the ELBO of the T steps (`discrete`), or of infinitely many (`continuous`), always estimated.
            draws: number of strata of 1..K (or of the log-SNRs), one term drawn from each; None for all K terms, or K
                strata.
            replicates: independent repetitions of the stratified estimate (>= 2), for its standard error.
            rows: most rows in one call of the network; by default as many as suit the device.

        Errors: another bound, draws or rows below 1, or more draws than terms.
        """
        one_of("bound", bound, ("discrete", "continuous"))
        none_or_at_least(1, draws=draws, rows=rows)
        if draws is not None and bound == "discrete" and draws >= self.num_steps:
            raise InputError(f"draws must lie in 1..{self.num_steps - 1}, the terms of the ELBO, got {draws}")
        times = times.to(x0.device)
        edges = denoiser.schedule.log_snr(times).detach()
        given = {"cond": cond, "mask": mask, "chunk": rows}
        made = {"estimate": "bound, all terms", "terms": len(times) - 1}
        if bound == "continuous":
            given |= {"draws": draws or len(times) - 1, "replicates": replicates}
            terms = continuous_elbo(denoiser, x0, self.decoder, float(times[0]), generator, **given)
            edges = torch.cat([edges[:1], (terms.log_snr[1:] + terms.log_snr[:-1]) / 2, edges[-1:]])
            made = {"estimate": "bound, continuous time", "draws": given["draws"], "replicates": replicates}
        elif draws is None:
            terms = elbo(denoiser, x0, self.decoder, times, generator, variance=self.variance, **given)
        else:
            given |= {"draws": draws, "replicates": replicates, "variance": self.variance}
            terms = elbo(denoiser, x0, self.decoder, times, generator, mode="stratified", **given)
            made |= {"estimate": "bound, stratified terms", "draws": draws, "replicates": replicates}
        return ElboEstimate(terms, _profile(edges, terms.diffusion), made)


def _profile(edges: Tensor, diffusion: Tensor, most: int = 40) -> Profile:
    """The terms summed into at most `most` bins, whose edges are among the given log-SNRs.

    An infinite log-SNR (pure noise or data) is replaced by one beyond all others, 20 at least.
    """
    bins, terms = min(most, diffusion.shape[1]), diffusion.shape[1]
    cuts = torch.arange(bins + 1) * terms // bins
    nats = torch.stack([part.sum() for part in diffusion.sum(0).split(cuts.diff().tolist())])
    edges = edges.double()[cuts * (len(edges) - 1) // terms]
    end = (edges[edges.isfinite()].abs().max() + 1).clamp(min=20)
    return Profile(edges.clamp(-end, end), nats, len(diffusion))


_COARSE_EVERY = 8  # every eighth item is also solved more coarsely
#: (x, cond, mask, noise) to the start of the trajectories, (B, *event) float64, and the log-determinant (B,) of this
#: map.
Start = Callable[[Tensor, Tensor | None, Tensor | None, KeyedGenerator], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class OdeLikelihood:
    """Log-likelihoods by the probability-flow ODE, of kind `ode`: estimates, not bounds.

        w = log p_0(start(x, noise)) + log |det d start/dx|,    nats = log (1/K) sum_k exp(w_k)

    p_0 is the density of the ODE at the cleanest noise level of the model. Every eighth item is solved again with ten
    times the tolerance or half the steps; the difference (`solver_change`) exceeds the error as long as the solver
    converges. A network that varies quickly with the noise level, such as an untrained one, needs a smaller tolerance
    or more steps.

    Arguments:
        importance_samples: K dequantisations of each item.
        dequantisation: noise that fills the gaps between integers: `uniform`, or the model's own (`diffusion`).
        divergence: `exact`, `hutchinson`, or `auto`: exact for up to 64 scalars.
        probes: number of probes of `hutchinson`; the standard error over them needs two.
        solver: `rk45` (adaptive, on the device), `scipy` (one item after the other), `heun` or `rk4` (fixed steps).
        tolerance: relative and absolute tolerance of the adaptive solvers.
        steps: steps of the fixed ones, equal in `variable`.
        variable: integration variable, `log_snr` or `time`, see `OdeDensity`.
        rows: most rows in one call of the network.

    Errors: InputError for K > 1 with random probes, whose noise would bias the logarithm of the mean upwards; RunError
    where the solver fails, naming the item.
    Source: Song et al. 2021, section 4.3 and appendix D.2.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(2), 1.0)
        >>> as_they_are = lambda x, cond, mask, noise: (x.double(), torch.zeros(len(x)).double())
        >>> found = OdeLikelihood()(exact, DataSpec("plane", (2,)), Batch(torch.zeros(1, 2)), None, as_they_are, 15.0)
        >>> round(float(found.nats), 4)
        -1.8379
    """

    importance_samples: int = 1
    dequantisation: Literal["uniform", "diffusion"] = "uniform"
    divergence: Literal["auto", "exact", "hutchinson"] = "auto"
    probes: int = 1
    solver: Literal["rk45", "scipy", "heun", "rk4"] = "rk45"
    tolerance: float = 1e-5
    steps: int = 64
    variable: Literal["log_snr", "time"] = "log_snr"
    rows: int = 256

    def __post_init__(self):
        at_least(1, importance_samples=self.importance_samples)
        one_of("dequantisation", self.dequantisation, ("uniform", "diffusion"))
        self.density()

    def density(self) -> OdeDensity:
        """The density of the ODE at the cleanest noise level, by these settings.

        Raises:
            InputError: for an invalid setting.
        """
        return OdeDensity(divergence=self.divergence, probes=self.probes, solver=self.solver, tolerance=self.tolerance,
                          steps=self.steps, variable=self.variable, rows=self.rows)

    @outside_inference()  # the divergence is a derivative
    def __call__(
        self, denoiser, spec: DataSpec, batch: Batch, cond: Tensor | None, start: Start, log_snr: float, *,
        seed: int = 0,
    ) -> Likelihood:
        """The log-likelihood of each item in its own units.

        Arguments:
            denoiser: predicts at any log-SNR of its schedule.
            spec: the data set.
            cond: as the denoiser takes it.
            start: from items to the noise level `log_snr`.
            seed: seed of dequantisation and probes, which are keyed by (seed, item, draw).
        """
        density = self.density()
        draws = self.importance_samples
        check_importance_samples(draws, spec)
        if draws > 1 and not density.exact(spec.dims):
            raise InputError(
                "importance samples need divergence=exact: the noise of random probes would raise the value; "
                "use importance_samples=1, or divergence=exact"
            )
        index = batch.item_index
        x, cond, mask, item = (None if value is None else value.repeat_interleave(draws, 0)
                               for value in (batch.x, cond, batch.mask, index))
        noise = KeyedGenerator(seed, item, "ode", torch.arange(draws, device=index.device).repeat(len(batch)))
        with torch.no_grad():
            first, volume = start(x, cond, mask, noise)
            found = _ode_log_prob(density, denoiser, first, log_snr, cond, mask, noise)
            change = _solver_change(density, denoiser, first, log_snr, cond, mask, noise, found)
        log_weights = found.log_prob + volume[:, None]
        if draws > 1:
            nats, stderr = log_mean_exp(log_weights.view(len(batch), draws))
        else:
            probed = log_weights.shape[1]
            nats = log_weights.mean(1)
            known = probed > 1 and spec.levels is None  # the spread of probes is not that of dequantisation
            stderr = log_weights.std(1, unbiased=True) / math.sqrt(probed) if known else None
        made = {"estimate": "probability-flow ODE"} | density.made(spec.dims)
        made |= {"coarser": density.coarser().solver_options}
        made |= {"importance_samples": draws, "dequantisation": self.dequantisation} if spec.levels is not None else {}
        made |= {"log_snr": [log_snr, last_log_snr(denoiser.schedule)]}
        return Likelihood(
            nats, "ode", event_size(batch.x, batch.mask).long(), spec.levels, stderr, made, index,
            evaluations=found.evaluations.view(len(batch), draws).sum(1), solver_change=change[::draws],
        )

    def start(
        self, denoiser, x0: Tensor, log_snr: float, noise: KeyedGenerator, decoder: Decoder, *,
        cond: Tensor | None = None, mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The start of trajectories of data in the network's units, and the log-determinant (B,) of the map to it.

            continuous data           alpha_0 x,   D log alpha_0
            integers, `uniform`       alpha_0 y,   D log (alpha_0 width),    y = x + width (u - 1/2)
            integers, `diffusion`     x_0 ~ q(x_0 | x),   log P(x | x_0) - log q(x_0 | x)

        The first line is a normalised density, that of the slightly noised data at `log_snr`. The others bound the
        log-mass of the integers from below in the mean over the noise, up to the errors of solver and divergence;
        `diffusion` takes the noise from the model's forward process, and P(x | x_0) from its decoder.
        """
        first = torch.tensor(log_snr, dtype=torch.float64, device=x0.device)
        (alpha, sigma), size, x = alpha_sigma(first), event_size(x0, mask), x0.double()
        if decoder.levels is None or self.dequantisation == "uniform":
            width = 1.0 if decoder.levels is None else 2 / (decoder.levels - 1)
            if decoder.levels is not None:
                u = noise.child("dequantise").uniform(x.shape, dtype=torch.float64)
                x = x + width * (u - 0.5)
            return alpha * x, size * (torch.log(alpha) + math.log(width))
        eps = hide(noise.child("dequantise").normal(x.shape, dtype=torch.float64), mask)
        noisy = alpha * x + sigma * eps
        t = denoiser.schedule.time_of(first).to(x.device).expand(len(x))
        x0_hat = torch.cat([
            denoiser(*(None if v is None else v[part] for v in (noisy, t, cond, mask))).x0
            for part in (slice(i, i + self.rows) for i in range(0, max(1, len(x)), self.rows))
        ])
        decoded = -reconstruction_term(x, noisy, x0_hat, first[None], decoder, sigma2_ts, mask)
        return noisy, decoded - (standard_normal(eps, mask) - size * torch.log(sigma))


def _solver_change(
    density: OdeDensity, denoiser, start: Tensor, log_snr: float, cond, mask, noise: KeyedGenerator, found: OdeLogProb
) -> Tensor:
    """(rows,) how much log p_0 changes when solved more coarsely, for every eighth item; NaN for the others."""
    change = torch.full_like(found.log_prob[:, 0], math.nan)
    chosen = ((noise.index % _COARSE_EVERY == 0) & (noise.step == 0)).nonzero().flatten()
    if len(chosen):
        cond, mask = (None if value is None else value[chosen] for value in (cond, mask))
        try:
            coarse = _ode_log_prob(density.coarser(), denoiser, start[chosen], log_snr, cond, mask, noise.rows(chosen))
            change[chosen] = (found.log_prob[chosen] - coarse.log_prob).mean(1)
        except RunError:  # the coarser solver fails
            change[chosen] = math.inf
    return change


def _ode_log_prob(
    density: OdeDensity, denoiser, start: Tensor, log_snr: float, cond, mask, noise: KeyedGenerator
) -> OdeLogProb:
    """The density, with a RunError that names the item where the solver fails."""
    try:
        return density(denoiser, start, log_snr, cond=cond, mask=mask, generator=noise)
    except SolverError as error:
        item = int(noise.index[error.row])
        raise RunError(
            f"item {item}: {error.reason} at log-SNR {error.at:.4g}; try solver=rk4, or a larger tolerance"
        ) from error
