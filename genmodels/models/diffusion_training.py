"""The training half of a diffusion model: its noise schedule and objective by name, and what one batch costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.diffusion import (
    OBJECTIVES,
    SCHEDULES,
    Denoiser,
    DiscreteSchedule,
    LearnedSchedule,
    LossAwareTimes,
    NoiseSchedule,
    rescale_zero_terminal,
)
from genmodels.diffusion.objectives import ObjectiveOutput
from genmodels.errors import InputError
from genmodels.models.build import keywords
from genmodels.random import KeyedGenerator

ScheduleName = Literal[
    "cosine", "linear", "linear_continuous", "grad_tts", "cosine_discrete", "sigmoid", "linear_log_snr", "learned"
]


class DiffusionTraining:
    """What trains the denoiser of a diffusion model, mixed into a GenerativeModel with `num_steps`, `variance`,
    `decoder` and the times of `DiffusionBound`.
    """

    def make_schedule(
        self, name: ScheduleName, zero_terminal_snr: bool = False, ends: Sequence[float] | None = None
    ) -> NoiseSchedule:
        """The noise schedule of this name for this model's number of steps and its data.

        Arguments:
            name: an entry of SCHEDULES.
            zero_terminal_snr: change it so that no signal is left at t = 1.
            ends: log-SNR at t = 0 and at t = 1.

        Raises:
            InputError: for ends of a schedule that has its own, or not two of them.
        """
        kind = SCHEDULES[name]
        if ends is not None:
            if "log_snr_max" not in keywords(kind):
                raise InputError(f"log_snr_ends is for schedule=cosine, linear_log_snr and learned: {name} has its own")
            if len(ends) != 2:
                raise InputError(f"log_snr_ends are two log-SNRs, at t = 0 and at t = 1, got {list(ends)}")
            schedule = kind(log_snr_max=float(ends[0]), log_snr_min=float(ends[1]))
        elif issubclass(kind, DiscreteSchedule):
            schedule = kind(num_steps=self.num_steps)
        elif issubclass(kind, LearnedSchedule):
            schedule = kind(log_snr_max=self._finest, log_snr_min=-15.0)
        else:
            schedule = kind()
        return rescale_zero_terminal(schedule) if zero_terminal_snr else schedule

    def train_by(self, denoiser: Denoiser, name: str, weighting: str, time_sampler: str) -> None:
        """Take the objective of this name for a denoiser.

        Raises:
            InputError: for options that do not go together.
        """
        kind = OBJECTIVES[name]
        takes = keywords(kind)
        if weighting != "none" and "weighting" not in takes:
            raise InputError(f"weighting={weighting} is for objective=simple and hybrid: {name} has its own")
        if self.variance == "learned" and name not in ("vlb", "hybrid"):
            raise InputError(f"objective={name} trains no variance: choose hybrid or vlb, or variance=beta")
        given = {"weighting": weighting, "variance": self.variance, "time_sampler": time_sampler}
        self.objective = kind(self.decoder, self.training_times(), **{k: v for k, v in given.items() if k in takes})
        self.objective.check(denoiser)
        if isinstance(self.objective.time_sampler, nn.Module):
            self.time_sampler = self.objective.time_sampler  # registered, so that checkpoints hold its history
        self._drawn: list[Tensor] = []

    def measure(
        self, denoiser: Denoiser, x0: Tensor, cond: Tensor | None, generator: KeyedGenerator, mask: Tensor | None
    ) -> ObjectiveOutput:
        """The objective on a batch as the network sees it, at one time for each example.

        Shapes: `x0 (B, *event)`, zero where `mask (B, 1, T)` is False; `cond` as the network takes it.
        """
        rank, world = self._rank_world
        out = self.objective(denoiser, x0, cond, generator, rank, world, mask)
        if isinstance(self.objective.time_sampler, LossAwareTimes) and torch.is_grad_enabled():
            self._drawn.append(torch.stack([out.drawn, out.integrand.double()]))
        return out

    def on_before_optimizer_step(self, optimizer) -> None:
        """As for every model; then, the loss being finite, a loss-aware time sampler learns of it."""
        super().on_before_optimizer_step(optimizer)
        for drawn in self._drawn:
            # (world, 2, n) or (2, n) to the order of the global batch, the same in every process
            t, loss = self.all_gather(drawn).reshape(-1, *drawn.shape).permute(1, 2, 0).flatten(1)
            self.time_sampler.update(t, loss)
        self._drawn.clear()

    def validation_options(self) -> dict:
        """An estimate of the bound: eight terms, twice."""
        return {"draws": min(8, self.num_steps - 1)}
