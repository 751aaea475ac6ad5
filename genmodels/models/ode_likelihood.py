"""The likelihood of a model by its probability-flow ODE, in the data's own units: what all such models share."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from genmodels.data.spec import Batch
from genmodels.diffusion.masks import event_size
from genmodels.diffusion.ode import OdeDensity, OdeLogProb, last_log_snr
from genmodels.diffusion.solvers import SolverError
from genmodels.errors import InputError, RunError
from genmodels.evaluation.likelihood import Likelihood
from genmodels.flows.discrete import log_mean_exp
from genmodels.nn.autograd import outside_inference
from genmodels.random import KeyedGenerator

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
