"""The likelihood of a diffusion model by its probability-flow ODE, in the data's own units."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from genmodels.data.spec import Batch
from genmodels.diffusion.masks import event_size, event_sum, hide
from genmodels.diffusion.ode import OdeDensity, last_log_snr, standard_normal
from genmodels.diffusion.process import alpha_sigma, sigma2_ts
from genmodels.diffusion.solvers import SolverError
from genmodels.diffusion.terms import reconstruction_term
from genmodels.errors import InputError, RunError
from genmodels.evaluation.likelihood import Likelihood
from genmodels.flows.discrete import log_mean_exp
from genmodels.random import KeyedGenerator


class DiffusionOde:
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
        if dequantisation not in ("uniform", "diffusion"):
            raise InputError(f"dequantisation = {dequantisation!r}: choose uniform or diffusion")
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
        core = self.weights(weights)
        x, mask, cond = self._entered(batch), batch.mask, self._cond(batch)
        index = torch.arange(len(batch), device=x.device) if batch.index is None else batch.index
        each = [None if value is None else value.repeat_interleave(draws, 0) for value in (x, mask, cond, index)]
        draw = torch.arange(draws, device=index.device).repeat(len(batch))
        noise = KeyedGenerator(seed, each[3], "ode", draw)
        with torch.no_grad():
            log_weights, evaluations = self._by_ode(core, density, *each[:3], noise, dequantisation)
        volume = 0.0 if discrete else self._log_scale(mask)
        if draws > 1:
            nats, stderr = log_mean_exp(log_weights.view(len(batch), draws))
        else:
            probed = log_weights.shape[1]
            nats = log_weights.mean(1)
            stderr = log_weights.std(1, unbiased=True) / math.sqrt(probed) if probed > 1 else None
        made = {"estimate": "probability-flow ODE"} | density.made(self.spec.dims)
        made |= {"importance_samples": draws, "dequantisation": dequantisation} if discrete else {}
        made |= {"log_snr": [self._first_log_snr(), last_log_snr(core.schedule)], "weights": str(weights), "seed": seed}
        made |= {"given": "class"} if self.conditional else {}
        return Likelihood(
            nats - volume, "ode", self._dims(batch), self.spec.levels, stderr, made, index,
            evaluations=evaluations.view(len(batch), draws).sum(1),
        )

    def _by_ode(
        self, core, density: OdeDensity, x: Tensor, mask: Tensor | None, cond: Tensor | None, noise: KeyedGenerator,
        dequantisation: str,
    ) -> tuple[Tensor, Tensor]:
        """(log-weights (rows, probes), evaluations (rows,)), of encoded items."""
        first = torch.tensor(self._first_log_snr(), dtype=torch.float64, device=x.device)
        (alpha, sigma), size = alpha_sigma(first), event_size(x, mask)
        levels, x = self.spec.levels, x.double()
        if levels is not None and dequantisation == "diffusion":
            eps = hide(noise.child("dequantise").normal(x.shape, dtype=torch.float64), mask)
            start = alpha * x + sigma * eps
            t = core.schedule.time_of(first).to(x.device).expand(len(x))
            x0_hat = torch.cat([
                core(*(None if v is None else v[part] for v in (start, t, cond, mask))).x0
                for part in (slice(i, i + density.rows) for i in range(0, len(x), density.rows))
            ])
            decoded = -reconstruction_term(x, x0_hat, first[None], self.decoder, sigma2_ts, mask)
            volume = decoded - (standard_normal(eps, mask) - size * torch.log(sigma))
        else:
            width = 2 / (levels - 1) if levels is not None else 1.0
            if levels is not None:
                u = noise.child("dequantise").uniform(x.shape, dtype=torch.float64)
                x = x + width * (u - 0.5)
            start, volume = alpha * x, size * (torch.log(alpha) + math.log(width))
        try:
            found = density(core, start, float(first), cond=cond, mask=mask, generator=noise)
        except SolverError as error:
            item = int(noise.index[error.row])
            raise RunError(
                f"item {item}: {error.reason} at log-SNR {error.at:.4g}; try solver=rk4, or a larger tolerance"
            ) from error
        return found.log_prob + volume[:, None], found.evaluations

    def _first_log_snr(self) -> float:
        """Where the bound has its reconstruction, the cleanest level that the model is read at."""
        return float(self.core.schedule.log_snr(self.bound_times()[:1])[0])

    def _dims(self, batch: Batch) -> Tensor:
        """(B,) number of valid scalars of each item."""
        return event_size(batch.x, batch.mask).long()

    def _log_scale(self, mask: Tensor | None) -> Tensor:
        """log |det| of the map from standardised to continuous data, over the valid scalars of each item."""
        log_scale = self.scale.double().log()
        return log_scale.sum() if mask is None else event_sum(log_scale.expand(len(mask), *log_scale.shape), mask)
