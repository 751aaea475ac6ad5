"""The likelihood of a diffusion model: the evidence lower bound, in the data's own units."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.data import Batch
from genmodels.core.errors import InputError, RunError, one_of
from genmodels.core.likelihood import Likelihood, Profile, log_mean_exp
from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import event_size, event_sum, hide, outside_inference
from genmodels.diffusion import ElboTerms, continuous_elbo, elbo
from genmodels.diffusion.bound import reconstruction_term
from genmodels.diffusion.denoiser import AtAnyTime
from genmodels.diffusion.ode import OdeDensity, OdeLogProb, last_log_snr, standard_normal
from genmodels.diffusion.process import alpha_sigma, sigma2_ts
from genmodels.diffusion.solvers import SolverError


class DiffusionBound:
    """The likelihood of a diffusion model, mixed into a GenerativeModel with `encode`, `core` and `decoder`."""

    def bound_times(self) -> Tensor:
        """Times t_0 < ... < t_K = 1 of the bound, evenly spaced in log-SNR; (T,) float64.

        There a denoiser costs about the same in each step, which makes the bound of T steps and its estimate from few
        draws tight. The steps of a table are its own. A log-SNR below -20 at the end counts as -20 for the spacing.
        """
        times, schedule = self.training_times(), self.core.schedule
        if schedule.num_steps is not None:
            return times
        first, last = schedule.log_snr(times[[0, -1]]).detach().clamp(min=-20.0)
        even = schedule.time_of(torch.linspace(float(first), float(last), len(times), dtype=torch.float64)).to(times)
        return torch.cat([times[:1], even[1:-1], times[-1:]])

    def training_times(self) -> Tensor:
        """Times t_0 < ... < t_K = 1, evenly spaced, of the objectives that draw steps; (T,) float64.

        A discrete schedule has DDPM's t_0 = 1/T. A continuous one starts where the noise first becomes smaller than the
        distance between levels, log SNR = 2 log(2 (L - 1)): below that the integers are certain and each further step
        would only charge for what the decoder gives away. Every t_0 yields a bound; this one is near the tightest. It
        is 0 where the schedule has no less noise than that.
        """
        steps, schedule = self.num_steps, self.core.schedule
        first = 1.0 / steps
        if schedule.num_steps is None:
            ahead = schedule.log_snr(torch.tensor([0.0, first], dtype=torch.float64)).detach()
            top = torch.full((1,), self._finest, dtype=torch.float64)
            starts_late = float(ahead[0]) <= self._finest
            first = 0.0 if starts_late else float(schedule.time_of(torch.minimum(ahead[1:], top))[0])
        return torch.linspace(first, 1.0, steps, dtype=torch.float64)

    @property
    def _finest(self) -> float:
        """The log-SNR beyond which less noise tells nothing more."""
        if self.spec.levels is None:
            return 12.0
        # Where no network helps, levels have to lie twice as many deviations apart to be told from each other.
        apart = 4 if getattr(self.decoder, "reads_noisy", False) else 2
        return 2 * math.log(apart * (self.spec.levels - 1))

    def log_likelihood(
        self,
        batch: Batch,
        *,
        weights: str | float = "ema",
        seed: int = 0,
        bound: Literal["discrete", "continuous"] = "discrete",
        draws: int | None = None,
        replicates: int = 2,
        rows: int | None = None,
    ) -> Likelihood:
        """The lower bound on the log-likelihood, over all terms or over `draws` stratified ones.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of the noise, which is keyed by (seed, item, term).
            bound: that of the model's T steps (`discrete`), or of infinitely many (`continuous`), always estimated.
            draws: number of strata of 1..K (or of the log-SNRs), one term drawn from each; None for all K terms, or K
                strata.
            replicates: independent repetitions of the stratified estimate (>= 2), for its standard error.
            rows: most rows in one call of the network; by default as many as suit the device.
        """
        x0, index = self._entered(batch), batch.item_index
        out, profile, made = self.bounded(
            self.weights(weights), x0, self._cond(batch), batch.mask, KeyedGenerator(seed, index, "elbo"),
            bound=bound, draws=draws, replicates=replicates, rows=rows,
        )
        made |= {"noise": self.noise} if self.noise else {}
        made |= {"variance": self.variance, "weights": str(weights), "seed": seed}
        made |= {"given": "class"} if self.conditional else {}
        parts = out.parts
        if self.spec.levels is None:
            parts["scale"] = self._log_scale(batch.mask).expand(len(index))
        return Likelihood(
            -sum(parts.values()), "lower_bound", self._dims(batch), self.spec.levels, out.stderr, made, index,
            parts=parts, profile=profile,
        )

    def told(self, batch: Batch) -> tuple[AtAnyTime, Tensor | None]:
        """The denoiser, and what it is told of a batch beside the noisy data."""
        return self.core, self._cond(batch)

    def bounded(
        self, denoiser, x0: Tensor, cond: Tensor | None, mask: Tensor | None, generator: KeyedGenerator, *,
        bound: Literal["discrete", "continuous"], draws: int | None, replicates: int, rows: int | None,
    ) -> tuple[ElboTerms, Profile, dict]:
        """The bound of data as the network sees them, its profile over the noise levels, and how it was made.

        Arguments:
            denoiser, x0, cond, mask, generator: as `elbo` takes them.
            bound, draws, replicates, rows: as `log_likelihood` takes them.

        Raises:
            ValueError: for another bound, or more draws than terms.
        """
        if draws is not None and not 1 <= draws < self.num_steps:
            raise ValueError(f"draws must lie in 1..{self.num_steps - 1}, the terms of the bound, got {draws}")
        one_of("bound", bound, ("discrete", "continuous"))
        times = self.bound_times().to(x0.device)
        edges = denoiser.schedule.log_snr(times).detach()
        given = {"cond": cond, "mask": mask, "chunk": rows}
        made = {"estimate": "bound, all terms", "terms": len(times) - 1}
        if bound == "continuous":
            given |= {"draws": draws or len(times) - 1, "replicates": replicates}
            out = continuous_elbo(denoiser, x0, self.decoder, float(times[0]), generator, **given)
            edges = torch.cat([edges[:1], (out.log_snr[1:] + out.log_snr[:-1]) / 2, edges[-1:]])
            made = {"estimate": "bound, continuous time", "draws": given["draws"], "replicates": replicates}
        elif draws is None:
            out = elbo(denoiser, x0, self.decoder, times, generator, variance=self.variance, **given)
        else:
            given |= {"draws": draws, "replicates": replicates, "variance": self.variance}
            out = elbo(denoiser, x0, self.decoder, times, generator, mode="stratified", **given)
            made |= {"estimate": "bound, stratified terms", "draws": draws, "replicates": replicates}
        return out, self._profile(edges, out.diffusion), made

    @staticmethod
    def _profile(edges: Tensor, diffusion: Tensor, most: int = 40) -> Profile:
        """The terms summed over neighbours into at most `most` bins, whose edges are among the log-SNRs given."""
        bins, terms = min(most, diffusion.shape[1]), diffusion.shape[1]
        cuts = torch.arange(bins + 1) * terms // bins
        nats = torch.stack([part.sum() for part in diffusion.sum(0).split(cuts.diff().tolist())])
        return Profile(edges.double()[cuts * (len(edges) - 1) // terms], nats, len(diffusion))


_CHECKED = 8  # one item of so many is also solved more coarsely


class OdeLikelihood:
    """What a model adds to its own likelihood: the density p_0 of its probability-flow ODE, at its cleanest level.

        w = log p_0(start(x, noise)) + log |det d start/dx|,    nats = log (1/K) sum_k exp(w_k)

    A model says where paths start and how the volume changes on the way there (`_start`), by which denoiser they are
    followed (`_denoiser`), from which log-SNR (`_first_log_snr`), and which ways it has to fill the gaps between
    integers (`dequantisations`, the usual one first).
    """

    dequantisations: tuple[str, ...] = ("uniform",)

    @outside_inference()  # the divergence is a derivative
    def ode_likelihood(
        self,
        batch: Batch,
        *,
        weights: str | float = "ema",
        seed: int = 0,
        importance_samples: int = 1,
        dequantisation: Literal["uniform", "diffusion"] = "uniform",
        divergence: Literal["auto", "exact", "hutchinson"] = "auto",
        probes: int = 1,
        solver: Literal["rk45", "scipy", "heun", "rk4"] = "rk45",
        tolerance: float = 1e-5,
        steps: int = 64,
        rows: int = 256,
    ) -> Likelihood:
        """The log-likelihood by the ODE, of kind `ode`: it stands on neither side of the truth for certain.

        Every eighth item is solved a second time with ten times the tolerance or half the steps (`solver_change`). As
        long as the solver converges the value is nearer to the exact solution than that; a network that varies quickly
        with the noise level, as untrained ones do, needs a smaller tolerance or more steps.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of dequantisation and probes, which are keyed by (seed, item, draw).
            importance_samples: K dequantisations of each item.
            dequantisation: noise that fills the gaps between integers: `uniform`, or the model's own (`diffusion`).
            divergence: `exact`, `hutchinson`, or `auto`: exact for up to 64 scalars.
            probes: number of probes of `hutchinson`; the standard error over them needs two.
            solver: `rk45` (adaptive, on the device), `scipy` (one item after the other), `heun` or `rk4` (fixed steps).
            tolerance: relative and absolute tolerance of the adaptive solvers.
            steps: steps of the fixed ones, equal in log-SNR.
            rows: most rows in one call of the network.

        Raises:
            InputError: for K > 1 with random probes, whose noise the logarithm of a mean would turn into a gain.
            RunError: when a path cannot be followed, naming the item.
        """
        if importance_samples < 1:
            raise InputError(f"importance_samples must be at least 1, got {importance_samples}")
        if dequantisation not in self.dequantisations:
            raise InputError(f"dequantisation = {dequantisation!r}: choose {' or '.join(self.dequantisations)}")
        density = OdeDensity(
            divergence=divergence, probes=probes, solver=solver, tolerance=tolerance, steps=steps, rows=rows
        )
        discrete = self.spec.levels is not None
        draws = importance_samples if discrete else 1
        if draws > 1 and not density.exact(self.spec.dims):
            raise InputError(
                "importance samples need divergence=exact: the noise of random probes would raise the value; "
                "use importance_samples=1, or divergence=exact"
            )
        denoiser, mask = self._denoiser(weights), batch.mask
        index = batch.item_index
        each = [None if value is None else value.repeat_interleave(draws, 0)
                for value in (batch.x, mask, self._cond(batch), index)]
        draw = torch.arange(draws, device=index.device).repeat(len(batch))
        noise = KeyedGenerator(seed, each[3], "ode", draw)
        with torch.no_grad():
            start, volume = self._start(denoiser, *each[:3], noise, dequantisation, rows)
            found = self._followed(density, denoiser, start, *each[1:3], noise)
            change = self._solver_change(density, denoiser, start, *each[1:3], noise, found)
        log_weights = found.log_prob + volume[:, None]
        if draws > 1:
            nats, stderr = log_mean_exp(log_weights.view(len(batch), draws))
        else:
            probed = log_weights.shape[1]
            nats = log_weights.mean(1)
            stderr = log_weights.std(1, unbiased=True) / math.sqrt(probed) if probed > 1 else None
        made = {"estimate": "probability-flow ODE"} | density.made(self.spec.dims)
        made |= {"coarser": density.coarser().solver_options}
        made |= {"importance_samples": draws, "dequantisation": dequantisation} if discrete else {}
        made |= {"log_snr": [self._first_log_snr(), last_log_snr(denoiser.schedule)]}
        made |= {"weights": str(weights), "seed": seed}
        made |= {"given": "class"} if self.conditional else {}
        return Likelihood(
            nats, "ode", self._dims(batch), self.spec.levels, stderr, made, index,
            evaluations=found.evaluations.view(len(batch), draws).sum(1), solver_change=change[::draws],
        )

    def _solver_change(
        self, density: OdeDensity, denoiser, start: Tensor, mask, cond, noise: KeyedGenerator, found: OdeLogProb
    ) -> Tensor:
        """(rows,) by how much log p_0 differs when solved more coarsely: of every eighth item, NaN for the others."""
        change = torch.full_like(found.log_prob[:, 0], math.nan)
        chosen = ((noise.index % _CHECKED == 0) & (noise.step == 0)).nonzero().flatten()
        if len(chosen):
            inputs = (None if value is None else value[chosen] for value in (start, mask, cond))
            try:
                coarse = self._followed(density.coarser(), denoiser, *inputs, noise.rows(chosen))
                change[chosen] = (found.log_prob[chosen] - coarse.log_prob).mean(1)
            except RunError:  # the coarser solver does not arrive, which says as much as an infinite difference
                change[chosen] = math.inf
        return change

    def _followed(self, density: OdeDensity, denoiser, start: Tensor, mask, cond, noise: KeyedGenerator) -> OdeLogProb:
        try:
            return density(denoiser, start, self._first_log_snr(), cond=cond, mask=mask, generator=noise)
        except SolverError as error:
            item = int(noise.index[error.row])
            raise RunError(
                f"item {item}: {error.reason} at log-SNR {error.at:.4g}; try solver=rk4, or a larger tolerance"
            ) from error

    def _dims(self, batch: Batch) -> Tensor:
        """(B,) number of valid scalars of each item."""
        return event_size(batch.x, batch.mask).long()

    def _denoiser(self, weights: str | float):
        """What predicts at any log-SNR of its schedule."""
        raise NotImplementedError

    def _first_log_snr(self) -> float:
        """The cleanest level that the model is read at."""
        raise NotImplementedError

    def _start(
        self, denoiser, x: Tensor, mask: Tensor | None, cond: Tensor | None, noise: KeyedGenerator, dequantisation: str,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """Where the paths of items start, float64 like x, and the logarithm (B,) by which volumes change till there."""
        raise NotImplementedError


class DiffusionOde(OdeLikelihood):
    """What a diffusion model adds to its bound: the density p_0 of its probability-flow ODE, at the noise level
    lambda_0 where the bound has its reconstruction.

        continuous data           log p(x) = log p_0(alpha_0 x) + D log alpha_0
        integers, `uniform`       w = log p_0(alpha_0 y) + D log (alpha_0 width),   y = x + width (u - 1/2)
        integers, `diffusion`     w = log p_0(x_0) - log q(x_0 | x) + log P(x | x_0),   x_0 ~ q(x_0 | x)
        nats = log (1/K) sum_k exp(w_k)

    The first line is a normalised density: that of the data as the model sees them at lambda_0, slightly blurred. The
    others bound the log-mass of the integers from below in the mean over the noise, as far as the ODE is solved and
    the divergence is exact; `diffusion` takes the model's own forward process for the noise and its decoder for the way
    back.
    """

    dequantisations = ("uniform", "diffusion")

    def _denoiser(self, weights: str | float):
        return self.weights(weights)

    def _start(
        self, denoiser, x: Tensor, mask: Tensor | None, cond: Tensor | None, noise: KeyedGenerator, dequantisation: str,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """alpha_0 x or x_0, and how volumes change till there."""
        x = hide(self.encode(x), mask)
        first = torch.tensor(self._first_log_snr(), dtype=torch.float64, device=x.device)
        (alpha, sigma), size = alpha_sigma(first), event_size(x, mask)
        levels, x = self.spec.levels, x.double()
        if levels is not None and dequantisation == "diffusion":
            eps = hide(noise.child("dequantise").normal(x.shape, dtype=torch.float64), mask)
            start = alpha * x + sigma * eps
            t = denoiser.schedule.time_of(first).to(x.device).expand(len(x))
            x0_hat = torch.cat([
                denoiser(*(None if v is None else v[part] for v in (start, t, cond, mask))).x0
                for part in (slice(i, i + rows) for i in range(0, len(x), rows))
            ])
            decoded = -reconstruction_term(x, start, x0_hat, first[None], self.decoder, sigma2_ts, mask)
            volume = decoded - (standard_normal(eps, mask) - size * torch.log(sigma))
        else:
            width = 2 / (levels - 1) if levels is not None else 1.0
            if levels is not None:
                u = noise.child("dequantise").uniform(x.shape, dtype=torch.float64)
                x = x + width * (u - 0.5)
            start, volume = alpha * x, size * (torch.log(alpha) + math.log(width))
        if levels is None:
            volume = volume - self._log_scale(mask)
        return start, volume

    def _first_log_snr(self) -> float:
        """Where the bound has its reconstruction, the cleanest level that the model is read at."""
        return float(self.core.schedule.log_snr(self.bound_times()[:1])[0])

    def _log_scale(self, mask: Tensor | None) -> Tensor:
        """log |det| of the map from standardised to continuous data, over the valid scalars of each item."""
        log_scale = self.scale.double().log()
        return log_scale.sum() if mask is None else event_sum(log_scale.expand(len(mask), *log_scale.shape), mask)
