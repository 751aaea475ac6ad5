"""The likelihood of a diffusion model: the evidence lower bound, in the data's own units."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from genmodels.data.spec import Batch
from genmodels.diffusion import ElboTerms, continuous_elbo, elbo
from genmodels.diffusion.denoiser import AtAnyTime
from genmodels.evaluation.likelihood import Likelihood, Profile
from genmodels.flows.boundary import one_of
from genmodels.random import KeyedGenerator


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
