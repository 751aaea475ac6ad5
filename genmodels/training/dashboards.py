"""Pictures and metrics logged after a validation: the bound by noise level, learned densities, the loss by log-SNR.

The names are the same for every family, see docs/dashboards.md.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from genmodels.core.data import Batch
from genmodels.core.errors import RunError
from genmodels.core.likelihood import Likelihood
from genmodels.models.density import extent_of, midpoints, on_grid, width_of
from genmodels.plots.densities import truth_of
from genmodels.training.loggers import show

_PIXELS = 96  # of a density, per side
_POINTS = 2000  # validation items that span its box


class NoiseLevels(Callback):
    """A picture of a diffusion bound as a function of log-SNR; the area under the curve is the bound.

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
    """A picture of the learned density of points in the plane, with the true one where it is known.

    Flows and energy-based models compute it directly, diffusion and score-based models by their probability-flow ODE on
    a coarser grid.

    Arguments:
        run_dir: the run folder; pictures go to its `density`.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self._points: list[Tensor] = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        """Keep some points, which determine the extent of the picture."""
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
    """The log-density of a model in a box, (pixels, pixels); None if it has none (yet).

    Arguments:
        model: a model of points in the plane.
        extent: [x0, x1, y0, y1].
        pixels: points per side; a third of them if each needs an ODE solution.
    """
    how: dict = {"method": "log_likelihood"}
    if hasattr(model, "ode_likelihood"):
        how, pixels = {"method": "ode_likelihood", "solver": "heun", "steps": 8, "rows": 4096}, pixels // 3
    mode = model.training
    try:
        model.eval()
        two = Batch(midpoints(extent, 2)[0][:2].to(width_of(model)), index=torch.arange(2)).to(model.device)
        method = getattr(model, how["method"])
        if method(two, **{key: value for key, value in how.items() if key != "method"}).kind == "unnormalised":
            return None
        return on_grid(model, extent, pixels, **how)[0]
    except RunError:  # log Z is not finite yet, or the ODE cannot be solved: nothing to show
        return None
    finally:
        model.train(mode)


def picture_of_density(log_density: Tensor, extent: list[float], spec) -> Image.Image:
    """A learned density in colours, with the true one where it is known, on the same scale."""
    truth = truth_of(spec)
    panels = [("learned", log_density)]
    if truth is not None:
        points, _ = midpoints(extent, _PIXELS)
        panels.insert(0, ("true", truth.log_prob(points.double()).view(_PIXELS, _PIXELS)))
    top = float(panels[0][1][panels[0][1].isfinite()].double().exp().max())
    figure, axes = _figure(len(panels), 4.0)
    for one, (name, values) in zip(axes, panels, strict=True):
        shown = values.double().exp().cpu().numpy()
        one.imshow(shown, origin="lower", extent=extent, aspect="equal", vmin=0, vmax=top)
        one.set_title(f"{name} density")
    return _picture(figure)


def picture_of_profile(result: Likelihood) -> Image.Image:
    """A bound per unit of log-SNR."""
    edges, nats = result.profile.edges.double().cpu(), result.profile.nats.double().cpu() / result.profile.items
    unit = 1.0 if result.levels is None else float(result.dims.double().mean()) * math.log(2)
    name = "nats" if result.levels is None else "bits/dim"
    order = edges.argsort()
    heights = nats / unit / edges.diff().abs()
    figure, (axes,) = _figure(1, 5.0)
    falling = bool(edges[0] > edges[-1])
    axes.stairs((heights.flip(0) if falling else heights).numpy(), edges[order].numpy(), fill=True, alpha=0.4)
    axes.set(xlabel="log SNR (left: noise, right: data)", ylabel=f"{name} per unit of log SNR")
    axes.set_title(f"diffusion terms: {float(nats.sum()) / unit:.3f} {name} in total")
    return _picture(figure)


def _figure(panels: int, size: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size * panels, size), dpi=100, layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _picture(figure) -> Image.Image:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


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
        """The sums so far."""
        return {"sums": self.sums.cpu()}

    def load_state_dict(self, state_dict: dict) -> None:
        """The inverse of `state_dict`."""
        self.sums = state_dict["sums"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Count the losses of a batch, if the model reports their times."""
        _, loss = pl_module.latest
        schedule = getattr(pl_module.core, "schedule", None)
        if loss.times is not None and schedule is not None:
            self.add(schedule.log_snr(loss.times).detach(), loss.per_example.detach())

    def on_validation_epoch_end(self, trainer, pl_module) -> None:
        """Log the sums over all processes, and reset them."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        sums = pl_module.all_gather(self.sums.to(pl_module.device))
        sums = sums.reshape(-1, 3, self.bins).sum(0)
        pl_module.log_dict(self.figures(sums), rank_zero_only=False)
        self.sums = torch.zeros_like(self.sums)
