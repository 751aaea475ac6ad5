"""Callbacks of a validation: the ELBO by noise level, learned densities, the loss by log-SNR, the training speed.

The names are the same for every family, see docs/dashboards.md.
"""

from __future__ import annotations

import logging
import math
import re
import time
from pathlib import Path

import torch
from PIL import Image
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from genmodels.core.data import Batch
from genmodels.core.errors import RunError
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import gather, rank_world
from genmodels.models.density import extent_of, midpoints, on_grid, width_of
from genmodels.plots.images import aspect_of, panels, rendered, truth_of
from genmodels.training.loggers import show

_PIXELS = 96  # of a density, per side
_POINTS = 2000  # validation items that determine its extent


class NoiseLevels(Callback):
    """A picture of a diffusion bound as a function of log-SNR; the area under the curve is its diffusion part.

    Arguments:
        run_dir: the run folder; pictures go to its `noise_levels`.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)

    def on_validation_end(self, trainer, pl_module) -> None:
        """Draw the profile of this validation."""
        found = pl_module.validated
        if trainer.is_global_zero and found is not None and found.profile is not None:
            show(self.run_dir, trainer.loggers, "noise_levels", picture_of_profile(found), trainer.global_step)


class LearnedDensity(Callback):
    """A picture of the learned density of points in the plane, with the true one if it is known.

    Diffusion models compute it by their probability-flow ODE, on a coarser grid.

    Arguments:
        run_dir: the run folder; pictures go to its `density`.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self._points: list[Tensor] = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        """Keep points that determine the extent of the picture."""
        spec = pl_module.spec
        wanted = spec.event_shape == (2,) and spec.levels is None and pl_module.num_classes is None
        if wanted and trainer.is_global_zero and sum(map(len, self._points)) < _POINTS:
            self._points.append(batch.x.cpu())

    def on_validation_end(self, trainer, pl_module) -> None:
        """Draw the density, if the model has one."""
        if not self._points:
            return
        points, self._points = torch.cat(self._points)[:_POINTS], []
        extent = extent_of(points)
        density = density_of(pl_module, extent)
        if density is not None:
            show(self.run_dir, trainer.loggers, "density", picture_of_density(density, extent, pl_module.spec),
                 trainer.global_step)


def density_of(model, extent: list[float], pixels: int = _PIXELS) -> Tensor | None:
    """The log-density of a model in a box, (pixels, pixels); None if the model has none, or none yet.

    Arguments:
        model: a model of points in the plane.
        extent: [x0, x1, y0, y1].
        pixels: points per side; a third of them if the density takes an ODE solution.
    """
    method, options = "log_likelihood", {}
    if model.has_ode_likelihood:
        method, options, pixels = "ode_likelihood", {"solver": "heun", "steps": 8, "rows": 4096}, pixels // 3
    mode = model.training
    try:
        model.eval()
        two = Batch(midpoints(extent, 2)[:2].to(width_of(model)), index=torch.arange(2)).to(model.device)
        if getattr(model, method)(two, **options).kind == "unnormalised":
            return None
        return on_grid(model, extent, pixels, method=method, **options)
    except RunError:  # log Z is not finite yet, or the ODE cannot be solved: nothing to show
        return None
    finally:
        model.train(mode)


def picture_of_density(log_density: Tensor, extent: list[float], spec) -> Image.Image:
    """A learned density in colours, with the true one if it is known, on the same scale."""
    truth = truth_of(spec)
    shown = [("learned", log_density)]
    if truth is not None:
        points = midpoints(extent, len(log_density)).double()
        shown.insert(0, ("true", truth.log_prob(points).view_as(log_density)))
    top = float(shown[0][1][shown[0][1].isfinite()].double().exp().max())
    figure, axes = panels(4.0 * len(shown), 4.3, columns=len(shown))
    aspect = aspect_of(extent[1] - extent[0], extent[3] - extent[2])
    for one, (name, values) in zip(axes[0], shown, strict=True):
        density = values.double().exp().cpu().numpy()
        one.imshow(density, origin="lower", extent=extent, aspect=aspect, vmin=0, vmax=top)
        one.set_title(f"{name} density")
    return rendered(figure)


def picture_of_profile(result: Likelihood) -> Image.Image:
    """The terms of a diffusion bound per unit of log-SNR, as steps."""
    edges, nats = result.profile.edges.double().cpu(), result.profile.nats.double().cpu() / result.profile.items
    unit = 1.0 if result.levels is None else float(result.dims.double().mean()) * math.log(2)
    name = "nats" if result.levels is None else "bits/dim"
    heights = nats / unit / edges.diff().abs()
    figure, ((axes,),) = panels(5.0, 5.0)
    if edges[0] > edges[-1]:
        edges, heights = edges.flip(0), heights.flip(0)
    axes.stairs(heights.numpy(), edges.numpy(), fill=True, alpha=0.4)
    axes.set(xlabel="log SNR (left: noise, right: data)", ylabel=f"{name} per unit of log SNR")
    axes.set_title(f"diffusion terms: {float(nats.sum()) / unit:.3f} {name} in total")
    return rendered(figure)


BINS, CLEANEST, NOISIEST = 20, 15.0, -15.0


class LossProfile(Callback):
    """Mean and variance of a diffusion loss since the last validation, by log-SNR, logged with every validation.

        bin k of n:  c - k w < lambda <= c - (k - 1) w,    c = 15, w = 30 / n;    the outermost are open

    The bins are in log-SNR, not time, so that runs with different schedules are comparable; empty bins are left out. If
    few bins have most of the variance, a loss-aware time sampler helps. Sums are kept on the device and stored in the
    checkpoint: a resumed run logs the same values as an uninterrupted one.

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
        """Count losses (n,) at these log-SNRs (n,), without synchronising with the device."""
        share = (CLEANEST - log_snr.double()) / (CLEANEST - NOISIEST)
        chosen = (share.clamp(0, 1) * self.bins).long().clamp(max=self.bins - 1)
        losses = losses.double()
        values = torch.stack([torch.ones_like(losses), losses, losses.square()])
        self.sums = self.sums.to(losses.device).index_add(1, chosen, values)

    def figures(self, sums: Tensor | None = None) -> dict[str, float]:
        """The means by name, then the variances of bins with at least two losses."""
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
        """The sums so far, of every process; all must call it."""
        return {"sums": torch.stack(gather([self.sums.cpu()]))}

    def load_state_dict(self, state_dict: dict) -> None:
        """The inverse of `state_dict`; where the number of processes has changed, the first takes the sums of all."""
        rank, world = rank_world()
        sums = state_dict["sums"].reshape(-1, 3, self.bins)
        if len(sums) != world:
            sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(world, 3, self.bins)])
        self.sums = sums[rank].clone()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Count the losses of a batch, if the model reports their times."""
        _, loss = pl_module.latest[-1]
        schedule = getattr(pl_module.core, "schedule", None)
        if loss.times is not None and schedule is not None:
            self.add(schedule.log_snr(loss.times).detach(), loss.per_example.detach())

    def on_validation_epoch_end(self, trainer, pl_module) -> None:
        """Log the sums over all processes, and reset them."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        sums = pl_module.all_gather(self.sums.to(pl_module.device))
        sums = sums.reshape(-1, 3, self.bins).sum(0)
        pl_module.log_dict(self.figures(sums), rank_zero_only=False)
        self.sums = torch.zeros_like(self.sums)


#: Dense bfloat16 operations per second of GPUs, by a part of their name, from the data sheets.
PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12,
    "RTX 4090": 165e12, "A10G": 70e12, "L4": 121e12,
}  # fmt: skip
_WARM_UP = 3  # steps in which kernels are chosen or compiled
_ROWS, _COUNTED_AT = 4, 50  # rows of the batch on which a forward pass is counted, and its number in the run


def peak_of(device: torch.device) -> float | None:
    """Dense bfloat16 operations per second of a device; None if unknown.

    Example:
        >>> peak_of(torch.device("cpu")) is None
        True
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if re.search(rf"{part}(?!\d)", name)), None)


class _FlopCounter(TorchDispatchMode):
    """As torch's FlopCounterMode, which fails on losses that take derivatives themselves."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        named, formula = named or {}, flop_registry.get(function._overloadpacket)
        if formula is None:
            with self:  # a composite operation is counted by its parts
                result = function.decompose(*arguments, **named)
            if result is not NotImplemented:
                return result
        result = function(*arguments, **named)
        self.total += 0 if formula is None else formula(*arguments, **named, out_val=result)
        return result


def forward_flops(model, batch) -> float:
    """Floating-point operations of the loss of one item: matrix products, convolutions and attention.

    Neither the weights and buffers nor the random numbers of training change.
    """
    some, mode = batch.rows(slice(0, _ROWS)), model.training
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}  # the loss may write: chains that go on
    cuda = [batch.x.device] if batch.x.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(cuda), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with _FlopCounter() as counter:
                model.loss(some, model.training_generator(len(some)))
    finally:
        model.train(mode)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return counter.total / len(some)


class Throughput(Callback):
    """The speed of training, a line in the log at every validation.

        items/s = items / t,    FLOP/s = 3 forward FLOPs items/s,    utilisation = FLOP/s / (peak of all devices)

    The backward pass counts twice the forward pass, whatever is recomputed (Chowdhery et al. 2022, "PaLM", appendix B).
    The first steps, and steps around a validation, a checkpoint or pictures, do not count. It must be the first
    callback, so that its clock stops before the work of the others.

    Arguments:
        pictures_every: steps between pictures, 0 for none.
    """

    def __init__(self, pictures_every: int = 0):
        self.every = pictures_every
        self.items, self.seconds, self.waited = 0, 0.0, 0.0
        self.flops: float | None = None  # of the forward pass of one item
        self._batches, self._last, self._waited, self._disturbed = 0, 0.0, 0.0, True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Count the operations of a forward pass, once."""
        if self.flops is None and self._batches >= _COUNTED_AT:
            self.flops = forward_flops(pl_module, batch)
            self._disturbed = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Add the time from the end of the previous step to the end of this one."""
        now, waited = time.perf_counter(), getattr(trainer.train_dataloader, "waited", 0.0)
        if not self._disturbed and self._batches >= _WARM_UP * trainer.accumulate_grad_batches:
            self.items += len(batch) * trainer.world_size
            self.seconds += now - self._last
            self.waited += waited - self._waited
        self._batches, self._last, self._waited = self._batches + 1, now, waited
        self._disturbed = bool(self.every) and trainer.global_step % self.every == 0

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        """Do not time the step after a checkpoint."""
        self._disturbed = True

    def on_validation_start(self, trainer, pl_module) -> None:
        """Log the speed so far; do not time the step after a validation."""
        self._disturbed = True
        if trainer.is_global_zero and (line := self.line(trainer)):
            logging.getLogger("genmodels").info("%s", line)

    def line(self, trainer) -> str | None:
        """The measurements so far in one line; None before the first."""
        if not self.seconds:
            return None
        rate, device = self.items / self.seconds, trainer.strategy.root_device
        speed = 3 * (self.flops or 0.0) * rate  # FLOP/s
        rounded = f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
        found = f"speed:    {rounded} items/s, {100 * self.waited / self.seconds:.1f} % of it waiting for data"
        for factor, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
            if speed >= factor:
                found += f", {speed / factor:.3g} {unit}"
                break
        peak = peak_of(device)
        if peak is not None and speed:
            name, many = torch.cuda.get_device_name(device), f"{trainer.world_size} x " * (trainer.world_size > 1)
            found += f" ({100 * speed / (peak * trainer.world_size):.1f} % of the bfloat16 peak of {many}{name})"
        return found
