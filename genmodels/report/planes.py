"""Densities in the plane: what was learned beside the truth and the data, in one scale of colours."""

from __future__ import annotations

import numpy as np

from genmodels.report.markup import Markup
from genmodels.report.plot import Field, Series, plot
from genmodels.report.raster import address, density_map
from genmodels.report.view import Model, with_mark

_POINTS = 1500
_VERDICTS = {True: "one", False: "not one, the check FAILED", None: "not settled"}


def densities(models: list[Model]) -> list[Markup]:
    """The test points, the true density where it is known, and the density of every model."""
    shown = [model for model in models if model.array("density") is not None and model.get("density", "extent")]
    if not shown:
        return []
    first = shown[0]
    truth = next(((model, a) for model in shown if (a := model.array("density_true")) is not None), None)
    top = _top(truth[1]) if truth else max(_top(model.array("density")) for model in shown)
    scale = f"Colours from 0 (dark) to {top:.3g} and above (light), per unit of area; the same in all maps."
    figures = []
    points = first.array("density_data")
    if points is not None:
        points = points[:_POINTS]
        dots = Series("test items", points[:, 0].tolist(), points[:, 1].tolist(), "dots")
        empty = Field("data:,", tuple(first.get("density", "extent")))
        figures.append(plot([dots], f"The data: {len(points):,} test items", "", "", field=empty))
    if truth:
        figures.append(_map(truth[1], truth[0], top, "The true density", scale))
    for model in shown:
        check = next((c for c in model.get("proofs") or [] if c["name"] == "density integrates to one"), None)
        said = "" if check is None or check["value"] is None else (
            f"Its integral is {check['where']}: {_VERDICTS[check['passed']]}. ")
        line = next(iter(model.likelihoods), None)
        value = f"{with_mark(line)}. " if line else ""
        figures.append(_map(model.array("density"), model, top, f"The density of {model.name}", value + said + scale))
    return figures


def _top(log_density: np.ndarray) -> float:
    finite = log_density[np.isfinite(log_density)]
    return float(np.exp(finite.max())) if finite.size else 1.0


def _map(log_density: np.ndarray, model: Model, top: float, title: str, note: str) -> Markup:
    field = Field(address(density_map(log_density, top)), tuple(model.get("density", "extent")))
    return plot([], title, "", "", field=field, note=note)
