"""How good samples are and what they cost: grids, distances, neighbours, curves over steps and temperatures."""

from __future__ import annotations

import math

import numpy as np

from genmodels.report.figures import Field, Rule, Series, figure
from genmodels.report.parts import (
    Gallery,
    Listing,
    Model,
    Pictures,
    Sheet,
    Styled,
    Text,
    address,
    facts,
    grouped,
    is_image,
    number,
    percent,
    sheet,
    tiles,
    with_error,
)

_SHOWN = 64
_CURVES = {"frechet": "Fr\u00e9chet distance", "kernel": "kernel distance", "precision": "precision",
           "recall": "recall", "samples_per_second": "samples per second"}


def samples(models: list[Model]) -> list:
    """A grid of samples of every model: number k of the seed stands at the same place in each."""
    figures = []
    for model in models:
        x = model.array(model.get("samples", "x"))
        if x is None:
            continue
        made = model.get("samples", "made") or {}
        recipe = facts(made)
        index = model.array(model.get("samples", "index"))
        if is_image(model.data):
            figures.append(_sheet(model, x[:_SHOWN], index, recipe, len(models) == 1))
        elif model.data.get("event_shape") == [2]:
            points = Series(model.name, x[:, 0].tolist(), x[:, 1].tolist(), "dots", colour=model.number)
            title = f"{len(x):,} samples of {model.name}"
            note = _numbered(index, len(x)) + recipe
            figures.append(figure([points], title, "", "", field=_around(models), note=note))
    return figures


def _around(models: list[Model]) -> Field:
    """The part of the plane that holds the samples of all models, so that they are compared on one scale."""
    inside = np.concatenate([a for model in models if (a := model.array(model.get("samples", "x"))) is not None])
    low, high = np.quantile(inside, 0.002, axis=0), np.quantile(inside, 0.998, axis=0)
    room = 0.06 * (high - low) + 1e-9
    return Field((low[0] - room[0], high[0] + room[0], low[1] - room[1], high[1] + room[1]))


def _numbered(index: np.ndarray | None, count: int) -> str:
    return "" if index is None else f"samples {int(index[0])} to {int(index[count - 1])}, "


def _sheet(model: Model, x: np.ndarray, index: np.ndarray | None, recipe: str, alone: bool) -> Sheet:
    cond = model.array(model.get("samples", "cond"))
    classes = model.data.get("num_classes") or 0
    turns = cond is not None and 2 <= classes <= 12 and len(x) > classes
    columns = classes if turns else int(np.ceil(np.sqrt(len(x))))
    if alone and len(x) >= 2 * columns:  # a model by itself has the whole width of the page
        columns *= 2
    pictures = tiles(x[: len(x) // columns * columns] if turns else x, model.data)
    order = f"{'two columns' if columns > classes else 'a column'} for each class" if turns else "row by row"
    alt = f"{len(pictures)} samples of {model.name} in {columns} columns, {order}"
    note = f"{order}; {_numbered(index, len(pictures))}{recipe}"
    return Sheet(model.name, address(sheet(pictures, columns)), alt, note)


def fidelity(models: list[Model], scale: dict | None) -> list:
    """Distances of samples to data, one group for each network of features: other networks never share a column."""
    measured = [m for m in models if (m.get("fidelity") or {}).get("network")]
    parts = []
    columns = ["model", "n", "Fr\u00e9chet distance", "kernel distance", "precision", "recall", "class accuracy",
               "p(y|x) accuracy", "memorisation"]
    groups = []
    for (name, digest), some in grouped(measured, lambda m: _network(m)).items():
        rows = []
        for model in some:
            found = model.get("fidelity")
            rows.append([model.name, *_measures(found), _accuracy(found.get("class_accuracy")),
                         _accuracy(found.get("likelihood_accuracy")), _copies(found.get("memorisation") or {})])
        if (scale or {}).get("network") == name:  # what is no model's, measured alike
            rows += [[what, *_measures(found), "", "", ""] for what, found in (scale.get("rows") or {}).items()]
        network = some[0].get("fidelity", "network")
        accuracy = network.get("accuracy")
        own = "" if accuracy is None else f", {percent(accuracy)}{_between(network)} accurate on held-out items"
        note = f", {network['note']}" if network.get("note") else ""
        title = f"Features of {name}{own}{note}" + (f", weights {digest[:12]}" if digest else "")
        groups.append((title, rows))
    if groups:
        parts.append(Listing(columns, groups, "Samples against test items, in the features of a named network"))
    for model in models:
        if model.get("fidelity", "skipped"):
            parts.append(Text(f"{model.name}: not measured, {model.get('fidelity', 'skipped')}"))
    parts += [part for model in measured if (part := _confusion(model)) is not None]
    return parts


def _measures(found: dict) -> list[str]:
    shown = [with_error(found.get(key), found.get(f"{key}_error"), digits)
             for key, digits in (("frechet", 3), ("kernel", 4), ("precision", 3), ("recall", 3))]
    return [number(found.get("n")), *shown]


def _network(model: Model) -> tuple[str, str]:
    network = model.get("fidelity", "network")
    return str(network.get("name")), str(network.get("sha256") or "")


def _accuracy(found: dict | None) -> str:
    if not found or found.get("accuracy") is None:
        return ""
    real = ""
    if found.get("real") is not None:
        real = f"; real items {percent(found['real'])}{_between(found, 'real_interval')}"
    return percent(found["accuracy"]) + _between(found) + real


def _between(found: dict, key: str = "interval") -> str:
    low, high = found.get(key) or (None, None)
    return "" if low is None else f" ({percent(low)} to {percent(high)})"


def _copies(found: dict) -> str | Styled:
    if not found:
        return ""
    said = found.get("said") or f"{percent(found.get('closer'))} closer than expected"
    return Styled(said, "bad") if found.get("flagged") else said


def _confusion(model: Model) -> Listing | None:
    counts = model.get("fidelity", "class_accuracy", "confusion")
    if not counts:
        return None
    names = [str(name) for name in model.data.get("class_names") or range(len(counts))]
    rows = [[name, *(number(count) for count in row)] for name, row in zip(names, counts, strict=False)]
    caption = f"Confusion of {model.name}: class asked for (rows), class recognised (columns)"
    return Listing(["asked for", *names], [(None, rows)], caption, "confusion", f"confusion matrix of {model.name}")


def neighbours(models: list[Model]) -> list[Pictures]:
    """Samples with the training items closest to them."""
    parts = []
    for model in models:
        drawn, near = model.array("neighbours_x"), model.array("neighbours_train")
        if drawn is None or near is None or not is_image(model.data):
            continue
        distances, rows = model.get("neighbours", "distance") or [], model.get("neighbours", "index") or []
        pairs = [sheet([a, b], 2) for a, b in zip(tiles(drawn, model.data), tiles(near, model.data), strict=False)]
        shown = []
        for k, pair in enumerate(pairs):
            row = f"item {rows[k]}" if k < len(rows) else "an item"
            far = f", distance {distances[k]:.3g}" if k < len(distances) and distances[k] is not None else ""
            shown.append((address(pair), f"a sample and training {row}", row + far))
        parts.append(Pictures(f"{model.name}: samples (left) and their nearest training items (right)", shown))
    return parts


def sweeps(models: list[Model]) -> list:
    """Quality and cost over numbers of steps and temperatures; networks of features and devices are kept apart."""
    curves: dict[tuple, list[Series]] = {}
    rules: dict[tuple, Rule] = {}
    for model in models:
        for sweep in model.get("sweeps") or []:
            for metric in _CURVES:
                values = sweep.get(metric) or []
                if not any(value is not None for value in values):
                    continue
                apart = str(model.get("genmodels", "device")) if metric == "samples_per_second" else ""
                if metric != "samples_per_second" and model.get("fidelity", "network"):
                    apart = _network(model)[0]
                name = f"{model.name}, {sweep['sampler']}" if sweep.get("sampler") else model.name
                some = curves.setdefault((sweep.get("key", "steps"), metric, apart), [])
                dash = sum(one.colour == model.number for one in some)
                for what, found in [*(model.get("scale", "rows") or {}).items()][:1]:
                    if found.get(metric) is not None and found["n"] == sweep.get("n"):
                        rules[sweep.get("key", "steps"), metric, apart] = Rule(what, found[metric])
                some.append(Series(name, sweep["values"], values, error=sweep.get(f"{metric}_error"),
                                   colour=model.number, dash=dash))
    figures = []
    for (key, metric, apart), series in curves.items():
        heights = [y for one in series for y in one.y if y is not None]
        wide = metric in ("frechet", "samples_per_second") and min(heights) > 0 and max(heights) > 20 * min(heights)
        places = [x for one in series for x in one.x]
        title = f"{_CURVES[metric].capitalize()} over {key}" + (f" ({apart})" if apart else "")
        far = key == "steps" and min(places) > 0 and max(places) > 8 * min(places)
        label = "steps of the sampler" if key == "steps" else key
        figures.append(figure(series, title, label, _CURVES[metric], log_x=far, log_y=wide,
                              rules=[rules[key, metric, apart]] if (key, metric, apart) in rules else []))
    return figures


def cost(models: list[Model]) -> list[Listing]:
    """What a sample costs, one group for each device and setting: other machines never share a column."""
    columns = ["model", "sampler", "steps", "network evaluations a sample", "samples per second", "batch",
               "one sample, median", "95th percentile", "peak memory", "parameters", "training"]
    measured = [model for model in models if model.get("sampling")]
    groups = []
    for context, some in grouped(measured, lambda m: str(m.get("sampling", "context") or "")).items():
        rows = []
        for model in some:
            found = model.get("sampling")
            latency, memory = found.get("latency") or {}, found.get("peak_memory")
            trained = model.get("checkpoint", "training_seconds")
            rows.append([
                model.name, found.get("sampler"), number(found.get("steps")), number(found.get("evaluations"), 0),
                number(found.get("samples_per_second"), 1), number(found.get("batch_size")),
                *(f"{1000 * latency[p]:,.1f} ms" if latency.get(p) is not None else "" for p in ("p50", "p95")),
                "" if memory is None else f"{memory / 2**20:,.0f} MiB", number(model.get("checkpoint", "parameters")),
                "" if trained is None else f"{trained / 60:.1f} min",
            ])
        groups.append((context or None, rows))
    return [Listing(columns, groups, "Cost of sampling and training")] if groups else []


def by_noise_level(models: list[Model]) -> list:
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
    return [figure(some, f"Cost of the bound by noise level, {unit}", "log SNR (left: noise, right: data)",
                   f"{unit} for each unit of log SNR", note="The diffusion terms alone, averaged over the items.")
            for unit, some in curves.items()]


def by_layer(models: list[Model]) -> list:
    """Drift and log-determinant of the layers of flows, in order from data to latents."""
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
    figures = [figure(drift, "Drift of each layer", "layer, from data to latents", "relative error", log_y=True,
                      rules=rules, note=" ".join([*over, "Layers that lose nothing are not drawn."]))]
    if volume:
        title = "Log-determinant of each layer"
        figures.append(figure(volume, title, "layer, from data to latents", "nats per dimension"))
    return [Gallery(figures), *tables]


def _layers(model: Model, layers: list[dict]) -> Listing:
    rows = [[f"{k}. {one.get('name')}", one.get("kind"), number(one.get("log_det_per_dim")), number(one.get("drift")),
             number(one.get("log_scale"), 2), number(one.get("condition"), 1)] for k, one in enumerate(layers, 1)]
    columns = ["layer", "kind", "log-det per dim", "drift", "largest log-scale", "condition number"]
    summary = f"the {len(layers)} layers of {model.name}"
    return Listing(columns, [(None, rows)], f"Layers of {model.name}", summary=summary)


def by_temperature(models: list[Model]) -> list:
    """Statistics of annealed importance sampling over the inverse temperature, from the base to the model."""
    curves: dict[str, list[Series]] = {}
    for model in models:
        profile = model.get("profile", "energy") or {}
        betas = profile.get("betas") or []
        for key, values in profile.items():
            if key != "betas" and isinstance(values, list) and betas and len(values) == len(betas):
                curves.setdefault(key, []).append(Series(model.name, betas, values, colour=model.number))
    return [figure(some, f"Annealing: {name.replace('_', ' ')}", "inverse temperature (0: base, 1: model)",
                   name.replace("_", " ")) for name, some in curves.items()]
