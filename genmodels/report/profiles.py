"""Where a likelihood is spent or lost: noise level by noise level, layer by layer, temperature by temperature."""

from __future__ import annotations

import math

from genmodels.report.markup import Markup, tag
from genmodels.report.plot import Rule, Series, plot
from genmodels.report.view import Model, listing, number


def by_noise_level(models: list[Model]) -> list[Markup]:
    """The bound of diffusion models over log-SNR: the area under a curve is what the noise levels there cost."""
    curves: dict[str, list[Series]] = {}
    for model in models:
        profile = model.get("profile", "diffusion") or {}
        edges, nats = profile.get("log_snr_edges") or [], profile.get("nats") or []
        if not nats or len(edges) != len(nats) + 1:
            continue
        costs, unit = model.per_item([-value if value is not None else math.nan for value in nats])
        bins = [(a, b, cost / abs(b - a)) for a, b, cost in zip(edges, edges[1:], costs, strict=False) if a != b]
        if bins[0][0] > bins[-1][1]:
            bins = [(b, a, height) for a, b, height in reversed(bins)]
        ends = [a for a, _, _ in bins] + [bins[-1][1]]
        heights = [float(h) if math.isfinite(h) else None for _, _, h in bins]
        name = f"{model.name} ({float(sum(costs)):.3f} {unit} in all)"
        curves.setdefault(unit, []).append(Series(name, ends, heights, "steps", colour=model.number))
    return [plot(some, f"Cost of the bound by noise level, {unit}", "log SNR (left: noise, right: data)",
                 f"{unit} for each unit of log SNR", note="The diffusion terms alone, averaged over the items.")
            for unit, some in curves.items()]


def by_layer(models: list[Model]) -> list[Markup]:
    """Drift and log-determinant of the layers of flows, in the order of the data's way."""
    drift, volume, tables = [], [], []
    for model in models:
        layers = model.get("profile", "flow") or []
        if not layers:
            continue
        places = list(range(1, len(layers) + 1))
        drift.append(Series(model.name, places, [one.get("drift") or None for one in layers], colour=model.number))
        if any(one.get("log_det_per_dim") is not None for one in layers):
            heights = [one.get("log_det_per_dim") for one in layers]
            volume.append(Series(model.name, places, heights, colour=model.number))
        tables.append(_layers(model, layers))
    if not drift:
        return []
    limits = {key: value for model in models for key, value in (model.get("drift") or {}).items()}
    rules = [Rule(f"{word} above {limits[key]:g}", limits[key])
             for key, word in (("warn", "warning"), ("fail", "failure")) if limits.get(key)]
    over = [f"{model.name}: first over the limit is {model.get('drift', 'first_over')}." for model in models
            if model.get("drift", "first_over")]
    figures = [plot(drift, "Drift of each layer", "layer, from data to latents",
                    "relative error", log_y=True, rules=rules,
                    note=" ".join([*over, "Layers that lose nothing are not drawn."]))]
    if volume:
        title = "Log-determinant of each layer"
        figures.append(plot(volume, title, "layer, from data to latents", "nats per dimension"))
    return [tag("div", *figures, class_="gallery"), *tables]


def _layers(model: Model, layers: list[dict]) -> Markup:
    rows = [[f"{k}. {one.get('name')}", one.get("kind"), number(one.get("log_det_per_dim")), number(one.get("drift")),
             number(one.get("log_scale"), 2), number(one.get("condition"), 1)] for k, one in enumerate(layers, 1)]
    columns = ["layer", "kind", "log-det per dim", "drift", "largest log-scale", "condition number"]
    return tag("details", tag("summary", f"the {len(layers)} layers of {model.name}"),
               listing(columns, [(None, rows)], f"Layers of {model.name}"))


def by_temperature(models: list[Model]) -> list[Markup]:
    """What annealed importance sampling met on its way from the base to the model."""
    curves: dict[str, list[Series]] = {}
    for model in models:
        profile = model.get("profile", "energy") or {}
        betas = profile.get("betas") or []
        for key, values in profile.items():
            if key != "betas" and isinstance(values, list) and betas and len(values) == len(betas):
                curves.setdefault(key, []).append(Series(model.name, betas, values, colour=model.number))
    return [plot(some, f"Annealing: {name.replace('_', ' ')}", "inverse temperature (0: base, 1: model)",
                 name.replace("_", " ")) for name, some in curves.items()]
