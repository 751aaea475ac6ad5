"""What training paid at which noise level: mean and variance of the loss in bins of log-SNR."""

from __future__ import annotations

import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

BINS, CLEANEST, NOISIEST = 20, 15.0, -15.0


class LossProfile(Callback):
    """Mean and variance of a diffusion loss since the last validation, by log-SNR, logged with every validation.

        bin k of n:  c - k w < lambda <= c - (k - 1) w,    c = 15, w = 30 / n;    the outermost are open

    The bins are those of the log-SNR and not of time, so that runs of other schedules overlay; a bin in which no time
    was drawn is left out. A loss whose variance sits in few bins is one that a loss-aware time sampler helps. Sums are
    kept on the device and belong to the checkpoint: a resumed run logs what an uninterrupted one would.

    Arguments:
        bins: n.

    Example:
        >>> profile = LossProfile(bins=3)
        >>> profile.add(torch.tensor([20.0, 14.0, 0.0]), torch.tensor([1.0, 3.0, 5.0]))
        >>> {name: round(value, 9) for name, value in profile.figures().items()}
        {'train_noise/1_of_3': 2.0, 'train_noise/2_of_3': 5.0, 'train_noise_variance/1_of_3': 1.0}
    """

    def __init__(self, bins: int = BINS):
        self.bins = bins
        self.sums = torch.zeros(3, bins, dtype=torch.float64)  # number, sum and sum of squares of the losses

    def add(self, log_snr: Tensor, losses: Tensor) -> None:
        """Count losses (n,) at these log-SNRs (n,); neither waits for the device."""
        share = (CLEANEST - log_snr.double()) / (CLEANEST - NOISIEST)
        chosen = (share.clamp(0, 1) * self.bins).long().clamp(max=self.bins - 1)
        losses = losses.double()
        values = torch.stack([torch.ones_like(losses), losses, losses.square()])
        self.sums = self.sums.to(losses.device).index_add(1, chosen, values)

    def figures(self, sums: Tensor | None = None) -> dict[str, float]:
        """The means by name, then the variances where there are two losses or more."""
        number, first, second = (self.sums if sums is None else sums).cpu()
        mean = first / number
        variance = (second / number - mean.square()).clamp(min=0)
        found = {}
        for group, values, least in (("train_noise", mean, 1), ("train_noise_variance", variance, 2)):
            for k, (value, n) in enumerate(zip(values.tolist(), number.tolist(), strict=True), 1):
                if n >= least:
                    found[f"{group}/{k}_of_{self.bins}"] = value
        return found

    def state_dict(self) -> dict:
        """The sums so far."""
        return {"sums": self.sums.cpu()}

    def load_state_dict(self, state_dict: dict) -> None:
        """The inverse of `state_dict`."""
        self.sums = state_dict["sums"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Count the losses of a batch of a model that says at which times it drew them."""
        _, loss = pl_module.latest
        schedule = getattr(pl_module.core, "schedule", None)
        if loss.times is not None and schedule is not None:
            self.add(schedule.log_snr(loss.times).detach(), loss.per_example.detach())

    def on_validation_epoch_end(self, trainer, pl_module) -> None:
        """Log what all processes have seen, and begin anew."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        sums = pl_module.all_gather(self.sums.to(pl_module.device))
        sums = sums.reshape(-1, 3, self.bins).sum(0)
        pl_module.log_dict(self.figures(sums), rank_zero_only=False)
        self.sums = torch.zeros_like(self.sums)
