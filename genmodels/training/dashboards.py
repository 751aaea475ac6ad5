"""What a dashboard shows beside samples after a validation: the bound by noise level, densities in the plane.

The names are the same for every family, see docs/dashboards.md.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from genmodels.data.spec import Batch
from genmodels.errors import RunError
from genmodels.evaluation.density import extent_of, midpoints, on_grid, width_of
from genmodels.evaluation.fields import truth_of
from genmodels.evaluation.likelihood import Likelihood
from genmodels.training.loggers import show

_PIXELS = 96  # of a density, per side
_POINTS = 2000  # validation items that span its box


class NoiseLevels(Callback):
    """The cost of a diffusion bound over log-SNR as a picture; the area under the curve is what is paid.

    Arguments:
        run_dir: the run folder; pictures go to its `noise_levels`.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)

    def on_validation_end(self, trainer, pl_module) -> None:
        """Draw what the validation found."""
        found = pl_module.validated
        if trainer.is_global_zero and found is not None and found.profile is not None:
            show(self.run_dir, trainer.loggers, "noise_levels", picture_of_profile(found), trainer.global_step)


class LearnedDensity(Callback):
    """The density that a model of points in the plane has learned, beside the true one where it is known.

    Flows and energies are asked for it, diffusion and score models by their probability-flow ODE on a coarser grid.

    Arguments:
        run_dir: the run folder; pictures go to its `density`.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self._points: list[Tensor] = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        """Keep some points: they say where the data lie."""
        spec = pl_module.spec
        wanted = spec.event_shape == (2,) and spec.levels is None and pl_module.num_classes is None
        if wanted and trainer.is_global_zero and sum(map(len, self._points)) < _POINTS:
            self._points.append(batch.x.cpu())

    def on_validation_end(self, trainer, pl_module) -> None:
        """Draw, where there is a density."""
        if not self._points:
            return
        points, self._points = torch.cat(self._points)[:_POINTS], []
        extent = extent_of(points)
        density = density_of(pl_module, extent)
        if density is not None:
            show(self.run_dir, trainer.loggers, "density", picture_of_density(density, extent, pl_module.spec),
                 trainer.global_step)


def density_of(model, extent: list[float], pixels: int = _PIXELS) -> Tensor | None:
    """The log-density of a model in a box, (pixels, pixels); None where it has none, or none yet.

    Arguments:
        model: a model of points in the plane.
        extent: [x0, x1, y0, y1].
        pixels: points on each side; a third of them where each costs the solution of an equation.
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
    except RunError:  # an energy whose integral is not finite yet, a path that cannot be followed: nothing to see
        return None
    finally:
        model.train(mode)


def picture_of_density(log_density: Tensor, extent: list[float], spec) -> Image.Image:
    """A learned density in colours, beside the true one where it is known, in the same scale."""
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
    """The cost of a bound for each unit of log-SNR."""
    edges, nats = result.profile.edges.double().cpu(), result.profile.nats.double().cpu() / result.profile.items
    unit = 1.0 if result.levels is None else float(result.dims.double().mean()) * math.log(2)
    name = "nats" if result.levels is None else "bits/dim"
    order = edges.argsort()
    heights = nats / unit / edges.diff().abs()
    figure, (axes,) = _figure(1, 5.0)
    falling = bool(edges[0] > edges[-1])
    axes.stairs((heights.flip(0) if falling else heights).numpy(), edges[order].numpy(), fill=True, alpha=0.4)
    axes.set(xlabel="log SNR (left: noise, right: data)", ylabel=f"{name} for each unit of log SNR")
    axes.set_title(f"diffusion terms: {float(nats.sum()) / unit:.3f} {name} in all")
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
