"""The likelihood stage: every line of a model, and what the first one says of items, noise levels, the plane."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from genmodels.data.densities import density
from genmodels.data.spec import DataSpec
from genmodels.evaluation.density import extent_of, midpoints, on_grid
from genmodels.evaluation.frame import Frame
from genmodels.evaluation.likelihood import Likelihood, packed, unpacked
from genmodels.evaluation.lines import Line, faults, lines_of, notes_on, row

_GRID = 160  # cells a side of a density map


class LikelihoodStage:
    """Likelihoods of the items judged, one line for each way a model has to tell them."""

    def __init__(self, frame: Frame):
        self.frame = frame
        self.lines, self.notes = lines_of(frame.opened)
        self.first: Likelihood | None = None

    def run(self) -> None:
        """Every line; then what the first one says of items, noise levels and, in the plane, of the density."""
        opened, spec = self.frame.opened, self.frame.opened.spec
        self.frame.report["warnings"] += self.notes
        x = opened.judged().x if spec.entropy is not None else None
        for number, line in enumerate(self.lines):
            start = time.monotonic()
            found = self._judged(line)
            told = row(found, spec, line.label, x) | {"values": f"nats_{number}"}
            self.frame.report["likelihood"].append(told | {"seconds": time.monotonic() - start})
            self.frame.arrays[f"nats_{number}"] = found.nats
            self.frame.report["failed"] += faults(told)
            self.frame.report["warnings"] += notes_on(told)
            if number == 0:
                self.first = found
            self.frame.report["profile"] |= profile_of(found)
        self._extreme_items()
        if spec.event_shape == (2,) and spec.levels is None:
            self._density()

    def of_first_line(self) -> tuple[Line, Likelihood]:
        """The first line and its likelihood, which is computed if it was not."""
        if self.first is None:
            self.first = self._judged(self.lines[0])
            self.frame.arrays["nats_0"] = self.first.nats
        return self.lines[0], self.first

    def _judged(self, line: Line) -> Likelihood:
        stored = self.frame.once("likelihood", {"method": line.method, **line.options}, lambda: packed(
            self.frame.opened.likelihood(line.method, line.options, line.label)))
        return unpacked(stored)

    def _extreme_items(self) -> None:
        """The least and most likely items of the first line whose values of single items stand out of their noise."""
        number = next((k for k, line in enumerate(self.frame.report["likelihood"]) if line["worst"]), None)
        if number is None:
            return
        line = self.frame.report["likelihood"][number]
        self.frame.report["items"] = {"line": number, "least": line["worst"], "most": line["best"]}
        for name in ("least", "most"):
            index = torch.tensor([entry["index"] for entry in self.frame.report["items"][name]], dtype=torch.int64)
            batch = next(iter(self.frame.opened.datamodule.loader(self.frame.request.split, len(index), index)))
            self.frame.arrays[f"{name}_x"], self.frame.arrays[f"{name}_index"] = batch.x, index

    def _density(self) -> None:
        """The density in the plane by the best line that has one, beside the truth and the data."""
        kinds = [entry["kind"] for entry in self.frame.report["likelihood"]]
        usable = [k for k, kind in enumerate(kinds) if kind in ("exact", "ode")]
        if not usable or self.frame.request.limit not in (None, "all") or self.frame.opened.limited:
            return
        line, model = self.lines[usable[0]], self.frame.opened.model
        points = self.frame.opened.judged(2000).x
        extent = extent_of(points)
        size = _GRID if kinds[usable[0]] == "exact" else _GRID // 2

        def compute() -> dict:
            log_density, _ = on_grid(model, extent, size, method=line.method, **line.options)
            return {"log_density": log_density.float()}

        settings = {"method": line.method, **line.options, "extent": extent, "size": size}
        found = self.frame.once("density", settings, compute)
        self.frame.arrays["density"], self.frame.arrays["density_data"] = found["log_density"], points
        truth = true_density(self.frame.opened.spec, extent, size)
        if truth is not None:
            self.frame.arrays["density_true"] = truth
        # The map is a window: what lies inside is no check. Whether all of it is one is checked among the proofs.
        self.frame.report["density"] = {"extent": extent, "kind": kinds[usable[0]], "unit": "nats"}


def profile_of(likelihood: Likelihood) -> dict:
    """The bound by noise level: mean nats of an item that each log-SNR bin costs."""
    if likelihood.profile is None:
        return {}
    profile = likelihood.profile
    return {"diffusion": {
        "log_snr_edges": profile.edges.tolist(),
        "nats": (profile.nats / profile.items).tolist(),
    }}


def true_density(spec: DataSpec, extent: list[float], size: int) -> Tensor | None:
    """The exact log-density on a grid, where it is known."""
    if not spec.name.startswith("toy_"):
        return None
    points, _ = midpoints(extent, size)
    return density(spec.name).log_prob(points.double()).float().view(size, size)
