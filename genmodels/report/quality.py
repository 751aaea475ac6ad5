"""How good samples are and what they cost: grids, distances, neighbours, curves over steps and temperatures."""

from __future__ import annotations

import math

import numpy as np
import torch

from genmodels.data.base import items_of
from genmodels.data.text import to_text
from genmodels.evaluation.report import Fidelity, Layer, Measures, Scale, Skipped
from genmodels.models.density import extent_of
from genmodels.report.figures import Field, Rule, Series, figure
from genmodels.report.parts import (
    Gallery,
    Listing,
    Model,
    Pictures,
    Sheet,
    Sound,
    Styled,
    Text,
    address,
    facts,
    grouped,
    is_image,
    number,
    percent,
    sheet,
    sound_address,
    tiles,
    with_error,
)

_SHOWN, _WRITTEN = 64, 8
_RECORDED = "recording, vocoded"
_CURVES = {"frechet": "Fr\u00e9chet distance", "kernel": "kernel distance", "precision": "precision",
           "recall": "recall", "samples_per_second": "samples per second"}


def samples(models: list[Model]) -> list:
    """A grid of samples of every model, with number k of the seed at the same place in each."""
    figures = []
    for model in models:
        found, data = model.report.samples, model.report.data
        x = model.array(found.x) if found else None
        if x is None:
            continue
        recipe, index = facts(found.made), model.array(found.index)
        if data.encoding is not None:
            texts = [Text(to_text(torch.as_tensor(one)), "written") for one in x[:_WRITTEN]]
            figures.append(Gallery([Text(f"{_numbered(index, len(texts))}{recipe}"), *texts], model.name))
        elif is_image(data):
            figures.append(_sheet(model, x[:_SHOWN], index, recipe, len(models) == 1))
        elif data.event_shape == [2]:
            points = Series(model.name, x[:, 0].tolist(), x[:, 1].tolist(), "dots", colour=model.number)
            title = f"{len(x):,} samples of {model.name}"
            note = _numbered(index, len(x)) + recipe
            figures.append(figure([points], title, "", "", field=_around(models), note=note))
    return figures


def sound(models: list[Model]) -> list[Listing]:
    """What models of speech say: a row for each text or class, a column for each model, and vocoded recordings."""
    rows: dict[str, dict[str, Sound | str]] = {}
    for model in models:
        report = model.report
        if report.data.mel is None or report.transcription is not None:
            continue
        cond, names = model.array("samples_cond"), report.data.class_names
        for k in sorted(int(key.removeprefix("sound_")) for key in model.arrays if key.startswith("sound_")):
            words = f"sample {k}" if cond is None else str(names[cond[k]] if names else cond[k])
            words = words if report.speech is None else report.speech.played[k]
            row = rows.setdefault(words, {})
            for kind, column in (("sound", model.name), ("vocoded", _RECORDED)):
                samples = model.array(f"{kind}_{k}")
                if samples is not None:
                    address = sound_address(samples, report.data.mel["sample_rate"])
                    row[column] = Sound(address, f"{column}: {words}")
                elif kind == "sound":
                    row[column] = "louder than any sound"
    if not rows:
        return []
    columns = [model.name for model in models] + [_RECORDED]
    listed = [[words, *(row.get(column, "") for column in columns)] for words, row in rows.items()]
    return [Listing(["what is said", *columns], [(None, listed)], "Sound by Griffin-Lim, at most ten seconds")]


def transcripts(models: list[Model]) -> list[Listing]:
    """What recognisers hear in recordings: the first, and those with the most errors of any of them."""
    models = [model for model in models if model.report.transcription is not None]
    rows = {}
    for k in dict.fromkeys(k for model in models for k in model.report.transcription.shown):
        sounds = [(samples, model) for model in models if (samples := model.array(f"sound_{k}")) is not None]
        said = models[0].report.transcription.said[k]
        played = ""
        if sounds:
            samples, model = sounds[0]
            played = Sound(sound_address(samples, model.report.data.mel["sample_rate"]), f"recording: {said}")
        rows[k] = [str(k), played, said, *(model.report.transcription.heard[k] for model in models)]
    columns = ["item", "recording", "said", *(model.name for model in models)]
    title = "The first recordings, and those with the most errors for their length"
    return [Listing(columns, [(None, list(rows.values()))], title)] if rows else []


def _around(models: list[Model]) -> Field:
    """The part of the plane that contains the samples of all models, so that all have one scale."""
    inside = np.concatenate([a for model in models if model.report.samples
                             and (a := model.array(model.report.samples.x)) is not None])
    return Field(tuple(extent_of(torch.as_tensor(np.quantile(inside, [0.002, 0.998], axis=0)))))


def _numbered(index: np.ndarray | None, count: int) -> str:
    return "" if index is None else f"samples {int(index[0])} to {int(index[count - 1])}, "


def _sheet(model: Model, x: np.ndarray, index: np.ndarray | None, recipe: str, alone: bool) -> Sheet:
    cond = model.array(model.report.samples.cond)
    classes = model.report.data.num_classes or 0
    turns = cond is not None and 2 <= classes <= 12 and len(x) > classes
    turns = turns and bool((cond[: len(x)] == np.arange(len(x)) % classes).all())  # a class may have run out of items
    columns = classes if turns else int(np.ceil(np.sqrt(len(x))))
    if alone and len(x) >= 2 * columns:  # a single model has the whole width of the page
        columns *= 2
    pictures = tiles(x[: len(x) // columns * columns] if turns else x, model.report.data)
    order = f"{'two columns' if columns > classes else 'a column'} for each class" if turns else "row by row"
    alt = f"{len(pictures)} samples of {model.name} in {columns} columns, {order}"
    note = f"{order}; {_numbered(index, len(pictures))}{recipe}"
    return Sheet(model.name, address(sheet(pictures, columns)), alt, note)


def fidelity(models: list[Model], scale: Scale | None) -> list:
    """Distances of samples to data, in one group for each feature network: their values are not comparable."""
    measured = [model for model in models if isinstance(model.report.fidelity, Fidelity)]
    parts = []
    columns = ["model", "n", "Fr\u00e9chet distance", "kernel distance", "precision", "recall", "class accuracy",
               "p(y|x) accuracy", "memorisation"]
    groups = []
    for (name, digest), some in grouped(measured, _network).items():
        rows = []
        for model in some:
            found, copies = model.report.fidelity, model.report.fidelity.memorisation
            rows.append([model.name, *_measures(found), _accuracy(found.class_accuracy),
                         _accuracy(found.likelihood_accuracy),
                         Styled(copies["said"], "bad") if copies["flagged"] else copies["said"]])
        if scale is not None and scale.network == name:  # references, measured in the same way
            rows += [[what, *_measures(found), "", "", ""] for what, found in scale.rows.items()]
        network = some[0].report.fidelity.network
        accuracy = network["accuracy"]
        own = "" if accuracy is None else f", {percent(accuracy)}{_between(network)} accurate on held-out items"
        note = f", {network['note']}" if network["note"] else ""
        title = f"Features of {name}{own}{note}" + (f", weights {digest[:12]}" if digest else "")
        groups.append((title, rows))
    if groups:
        real = items_of(measured[0].report.data.split)
        parts.append(Listing(columns, groups, f"Samples against {real}, in the features of a named network"))
    for model in models:
        if isinstance(model.report.fidelity, Skipped):
            parts.append(Text(f"{model.name}: not measured, {model.report.fidelity.skipped}"))
    parts += [part for model in measured if (part := _confusion(model)) is not None]
    return parts


def _measures(found: Measures) -> list[str]:
    shown = [with_error(getattr(found, key), getattr(found, f"{key}_error"), digits)
             for key, digits in (("frechet", 3), ("kernel", 4), ("precision", 3), ("recall", 3))]
    return [number(found.n), *shown]


def _network(model: Model) -> tuple[str, str]:
    network = model.report.fidelity.network
    return network["name"], network["sha256"]


def _accuracy(found: dict | None) -> str:
    if found is None:
        return ""
    real = ""
    if found.get("real") is not None:
        real = f"; real items {percent(found['real'])}{_between(found, 'real_interval')}"
    return percent(found["accuracy"]) + _between(found) + real


def _between(found: dict, key: str = "interval") -> str:
    low, high = found.get(key) or (None, None)
    return "" if low is None else f" ({percent(low)} to {percent(high)})"


def _confusion(model: Model) -> Listing | None:
    if model.report.fidelity.class_accuracy is None:
        return None
    counts = model.report.fidelity.class_accuracy["confusion"]
    names = [str(name) for name in model.report.data.class_names or range(len(counts))]
    rows = [[name, *(number(count) for count in row)] for name, row in zip(names, counts, strict=False)]
    caption = f"Confusion of {model.name}: class asked for (rows), class recognised (columns)"
    return Listing(["asked for", *names], [(None, rows)], caption, "confusion", f"confusion matrix of {model.name}")


def neighbours(models: list[Model]) -> list[Pictures]:
    """Samples with the training items closest to them."""
    parts = []
    for model in models:
        found, data = model.report.neighbours, model.report.data
        drawn, near = model.array("neighbours_x"), model.array("neighbours_train")
        if not found or drawn is None or near is None or not is_image(data):
            continue
        pairs = [sheet([a, b], 2) for a, b in zip(tiles(drawn, data), tiles(near, data), strict=True)]
        shown = [(address(pair), f"a sample and training item {row}", f"item {row}, distance {far:.3g}")
                 for pair, row, far in zip(pairs, found.index, found.distance, strict=True)]
        parts.append(Pictures(f"{model.name}: samples (left) and their nearest training items (right)", shown))
    return parts


def sweeps(models: list[Model]) -> list:
    """Quality and cost over numbers of steps and temperatures; one figure for each feature network or device."""
    curves: dict[tuple, list[Series]] = {}
    rules: dict[tuple, Rule] = {}
    for model in models:
        for sweep in model.report.sweeps:
            for metric in _CURVES:
                values = getattr(sweep, metric)
                if not any(value is not None for value in values):
                    continue
                apart = str(model.report.genmodels["device"]) if metric == "samples_per_second" else ""
                if metric != "samples_per_second" and isinstance(model.report.fidelity, Fidelity):
                    apart = _network(model)[0]
                name = f"{model.name}, {sweep.sampler}" if sweep.sampler else model.name
                some = curves.setdefault((sweep.key, metric, apart), [])
                dash = sum(one.colour == model.number for one in some)
                scale = model.report.scale
                for what, found in [] if scale is None else [*scale.rows.items()][:1]:
                    if getattr(found, metric, None) is not None and found.n == sweep.n:
                        rules[sweep.key, metric, apart] = Rule(what, getattr(found, metric))
                some.append(Series(name, sweep.values, values, error=getattr(sweep, f"{metric}_error", None),
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
    """The cost of samples, in one group for each device and setting: their values are not comparable."""
    columns = ["model", "sampler", "steps", "network evaluations a sample", "samples per second", "batch",
               "one sample, median", "95th percentile", "peak memory of the process", "parameters", "training"]
    measured = [model for model in models if model.report.sampling]
    groups = []
    for context, some in grouped(measured, lambda model: model.report.sampling.context).items():
        rows = []
        for model in some:
            found, memory = model.report.sampling, model.report.sampling.peak_memory
            trained = model.report.checkpoint.training_seconds
            rows.append([
                model.name, found.sampler, number(found.steps),
                "" if found.evaluations is None else f"{found.evaluations:g}",
                number(found.samples_per_second, 1), number(found.batch_size),
                *(f"{1000 * found.latency[p]:,.1f} ms" for p in ("p50", "p95")),
                "" if memory is None else f"{memory / 2**20:,.0f} MiB", number(model.report.checkpoint.parameters),
                "" if trained is None else f"{trained / 60:.1f} min",
            ])
        groups.append((context, rows))
    return [Listing(columns, groups, "Cost of sampling and training")] if groups else []


def by_noise_level(models: list[Model]) -> list:
    """The bounds on the NLL of diffusion models over log-SNR: the area under a curve is the diffusion part of one."""
    curves: dict[str, list[Series]] = {}
    for model in models:
        profile = model.report.profile.diffusion
        if profile is None:
            continue
        edges = profile.log_snr_edges
        costs, unit = model.per_item(-np.array(profile.nats))
        bins = [(a, b, cost / abs(b - a)) for a, b, cost in zip(edges, edges[1:], costs, strict=False) if a != b]
        if bins[0][0] > bins[-1][1]:
            bins = [(b, a, height) for a, b, height in reversed(bins)]
        ends = [a for a, _, _ in bins] + [bins[-1][1]]
        heights = [float(h) if math.isfinite(h) else None for _, _, h in bins]
        name = f"{model.name} ({float(sum(costs)):.3f} {unit} in all)"
        curves.setdefault(unit, []).append(Series(name, ends, heights, "steps", colour=model.number))
    return [figure(some, f"Bound on the NLL by noise level, {unit}", "log SNR (left: noise, right: data)",
                   f"{unit} for each unit of log SNR", note="The diffusion terms alone, averaged over the items.")
            for unit, some in curves.items()]


def by_layer(models: list[Model]) -> list:
    """Drift and log-determinant of the layers of flows, in order from data to latents."""
    flows = [model for model in models if model.report.profile.flow]
    if not flows:
        return []
    drift, log_det, tables, over = [], [], [], []
    for model in flows:
        layers = model.report.profile.flow
        numbers = list(range(1, len(layers) + 1))
        drift.append(Series(model.name, numbers, [one.drift or None for one in layers], colour=model.number))
        log_det.append(Series(model.name, numbers, [one.log_det_per_dim for one in layers], colour=model.number))
        tables.append(_layers(model, layers))
        if model.report.drift.first_over:
            over.append(f"{model.name}: first over the limit is {model.report.drift.first_over}.")
    limits = flows[0].report.drift  # the same for all
    rules = [Rule(f"warning above {limits.warn:g}", limits.warn), Rule(f"failure above {limits.fail:g}", limits.fail)]
    figures = [figure(drift, "Drift of each layer", "layer, from data to latents", "relative error", log_y=True,
                      rules=rules, note=" ".join([*over, "Layers that lose nothing are not drawn."]))]
    title = "Log-determinant of each layer"
    figures.append(figure(log_det, title, "layer, from data to latents", "nats per dimension"))
    return [Gallery(figures), *tables]


def _layers(model: Model, layers: list[Layer]) -> Listing:
    rows = [[f"{k}. {one.name}", one.kind, number(one.log_det_per_dim), number(one.drift), number(one.log_scale, 2),
             number(one.condition, 1)] for k, one in enumerate(layers, 1)]
    columns = ["layer", "kind", "log-det per dim", "drift", "largest log-scale", "condition number"]
    summary = f"the {len(layers)} layers of {model.name}"
    return Listing(columns, [(None, rows)], f"Layers of {model.name}", summary=summary)


def checks(models: list[Model]) -> list[Listing]:
    """The result of every check, with its error and tolerance, in one group for each model."""
    results = {"passed": Styled("\u2713 passed", "good"), "failed": Styled("\u2717 failed", "bad"),
               "not verified": Styled("\u2013 not verified", "odd")}
    groups = [(model.name, [[one.name, results[one.status], number(one.error), number(one.tolerance), one.note]
                            for one in model.report.checks]) for model in models if model.report.checks]
    columns = ["check", "result", "error", "tolerance", "note"]
    return [Listing(columns, groups, "What was checked on the models")] if groups else []
