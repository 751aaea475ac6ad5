"""The likelihoods of a model: which lines of the table there are, how each is computed, and what is reported of it."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import get_args, get_type_hints

import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError, as_input_errors, counted, hint, progress_bar
from genmodels.core.likelihood import Likelihood, SingleValues, packed, unpacked
from genmodels.data.base import DataModule
from genmodels.diffusion.likelihood import OdeLikelihood
from genmodels.diffusion.ode import OdeDensity
from genmodels.evaluation.checkpoint import EvaluationState, Opened
from genmodels.evaluation.report import (
    BitsLine,
    Bracket,
    DensityMap,
    ExtremeItems,
    Item,
    LikelihoodLine,
    NatsLine,
    NoiseLevels,
    faults,
    notes_on,
)
from genmodels.models.checkpoint import weights_of
from genmodels.models.density import extent_of, has_gaps, is_of_noisy_data, midpoints, needs_class, on_grid
from genmodels.plots.images import truth_of

_AUTO_BUDGET = 100_000  # network evaluations of `draws=auto`, as far as 5 to 100 strata allow
_TEXT_BUDGET = 6_400_000  # the same for mels with texts, in scalars
_ODE_BUDGET = 50_000  # scalars of vectors up to which `ode=auto` computes the ODE
_IMPORTANCE_SAMPLES = (1, 8)


@dataclass(frozen=True)
class Line:
    """One likelihood of a model: its name in tables, the model's method, and its options."""

    label: str
    method: str
    options: dict

    @property
    def settings(self) -> dict:
        """What its values depend on, in keys of the cache."""
        return {"method": self.method, **self.options}


def lines_of(opened: Opened) -> tuple[list[Line], list[str]]:
    """The lines of a model for a request, and notes on what was left out.

    Raises:
        InputError: for more terms of a bound than there are.
    """
    request, model, path = opened.request, opened.model, opened.path
    known = inspect.signature(model.log_likelihood).parameters
    options: dict = {"weights": weights_of(request.ema), "seed": request.seed}
    lines, notes = [], []
    if "draws" in known:
        draws = request.draws
        if draws == "auto":
            texts = model.spec.text is not None
            budget = _TEXT_BUDGET // model.spec.dims if texts else _AUTO_BUDGET
            draws = automatic_draws(opened.items, model.num_steps - 1, request.replicates, budget)
        usual = known["bound"].default
        wanted = {"auto": (usual,), "both": ("discrete", "continuous")}.get(request.bound, (request.bound,))
        bounds = [bound for bound in wanted if bound in bounds_of(model)] or [usual]
        if isinstance(draws, int) and draws >= model.num_steps and "discrete" in bounds:
            raise InputError(f"draws must lie in 1..{model.num_steps - 1}, the terms of the ELBO, got {draws}")
        own = {"draws": None if draws == "all" else draws, "replicates": request.replicates}
        if "alignment" in known:  # a bound along the best alignment would be ranked with bounds on the sum
            own["alignment"] = "marginal"
        for bound in bounds:
            label = "bound" if bound == "discrete" else "bound, continuous time"
            lines.append(Line(label, "log_likelihood", options | own | ({} if bound == usual else {"bound": bound})))
    elif "alignment" in known:
        lines += [Line("given the text", "log_likelihood", options | {"alignment": "marginal"}),
                  Line("along the best alignment", "log_likelihood", options | {"alignment": "best"})]
    if "by" in known and model.criterion == "joint":
        lines += [Line(f"by {name}", "log_likelihood", options | {"by": name}) for name in ("attention", "ctc")]
    if "normaliser" in known:
        options |= chosen_partition(request.partition, opened.limited)
    if "importance_samples" in known:
        # An exact density needs no importance samples.
        drawn = bool(model.spec.levels) or has_gaps(model)
        several = drawn and not is_of_noisy_data(model) and options.get("normaliser") != "none"
        counts = sorted({1, *(request.importance_samples or _IMPORTANCE_SAMPLES)}) if several else [1]
        lines += [Line(f"K = {k}" if drawn else "exact", "log_likelihood", options | {"importance_samples": k})
                  for k in counts]
    if model.has_ode_likelihood:
        scalars, vectors = opened.items * model.spec.dims, len(model.spec.event_shape) == 1
        if request.ode is True or (request.ode == "auto" and vectors and scalars <= _ODE_BUDGET):
            lines += _ode_lines(opened, options)
        elif request.ode_options:
            raise InputError(f"ode_options have no effect, since the ODE of {path} is not computed: add "
                             "ode=true, or leave them out")
        elif request.ode == "auto":
            notes.append(f"the probability-flow ODE of {path} was left out, it takes long: ode=true adds it")
    return lines or [Line("", "log_likelihood", options)], notes


def _ode_lines(opened: Opened, options: dict) -> list[Line]:
    """The lines of the probability-flow ODE, of integers one for each number of importance samples."""
    model, given = opened.model, opened.request.ode_options
    check_ode_options(given, model)
    own = {"weights": options["weights"], "seed": options["seed"], **given}
    if not model.spec.levels:
        return [Line("probability-flow ODE", "ode_likelihood", own)]
    # The noise of probes would raise the logarithm of a mean over K.
    exact = OdeDensity(divergence=given.get("divergence", "auto")).exact(model.spec.dims)
    counts = sorted(set((exact and opened.request.importance_samples) or [1]))
    return [Line(f"probability-flow ODE, K = {k}", "ode_likelihood", {"importance_samples": k} | own) for k in counts]


def check_ode_options(given: dict, model) -> None:
    """Raise an InputError for options of the ODE that a model does not take, or that have no effect.

    Example:
        >>> from genmodels.models.ddpm import DDPM
        >>> check_ode_options({"solver": "heun", "tolerance": 1e-3}, DDPM(DataSpec("plane", (2,))))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: ode_options: tolerance is for solver=rk45 and scipy, heun takes steps
    """
    own = [field.name for field in fields(OdeLikelihood)]
    known = [*own, *(set(inspect.signature(model.ode_likelihood).parameters) - {"batch", "weights", "seed", "options"})]
    for key in given:
        if key not in known:
            raise InputError(f"ode_options takes {', '.join(known)}, got {key!r}{hint(key, known)}")
    ode = OdeLikelihood(**{key: value for key, value in given.items() if key in own})
    fixed = ode.solver in ("heun", "rk4")
    if "tolerance" in given and fixed:
        raise InputError(f"ode_options: tolerance is for solver=rk45 and scipy, {ode.solver} takes steps")
    if "steps" in given and not fixed:
        raise InputError(f"ode_options: steps is for solver=heun and rk4, {ode.solver} takes tolerance")
    if "probes" in given and OdeDensity(divergence=ode.divergence).exact(model.spec.dims):
        raise InputError("ode_options: probes is for divergence=hutchinson, and this divergence is exact")


def bounds_of(model) -> tuple[str, ...]:
    """The bounds of a diffusion model; none of other models."""
    if "bound" not in inspect.signature(model.log_likelihood).parameters:  # their annotations may not resolve
        return ()
    return get_args(get_type_hints(model.log_likelihood)["bound"])


def likelihood_parts(state: EvaluationState, key: str, line: Line) -> dict[int, dict]:
    """The likelihoods of this process's batches of the evaluated items, by number of the batch."""
    opened = state.opened
    label = f", {line.label}" if line.label else ""
    return batches_of(state, key, line, opened.datamodule, torch.arange(opened.items), label)


def batches_of(
    state: EvaluationState, key: str, line: Line, datamodule: DataModule, rows: torch.Tensor, label: str
) -> dict[int, dict]:
    """The likelihoods of this process's batches of items of a data set, by number of the batch.

    Raises:
        RunError: for an item with invalid values, or when memory runs out.
    """
    model, request = state.opened.model, state.request
    batches = rows.split(request.batch_size)

    def compute(numbers: list[int]) -> Iterator[tuple[int, dict]]:
        own = [batches[number] for number in numbers]
        loader = datamodule.loader(request.split, request.batch_size, torch.cat(own)) if own else []
        bar = progress_bar(loader, desc=f"{model.family}{label} on {request.split}", unit="batch",
                           disable=state.ranks.rank > 0)
        for number, batch in zip(numbers, bar, strict=True):
            yield number, packed(_likelihood(model, batch, line, request.batch_size))

    return state.cache.parts(key, state.ranks.share(range(len(batches))), compute)


def in_one(rows: torch.Tensor, parts: list[dict]) -> dict:
    """The likelihood of all items in index order.

    Raises:
        RunError: when an item was lost or evaluated twice.
    """
    return packed(Likelihood.concatenate([unpacked(part) for part in parts]).in_index_order(rows))


def _likelihood(model, batch: Batch, line: Line, size: int) -> Likelihood:
    try:
        model.spec.check(batch)
    except ValueError as error:
        raise RunError(str(error)) from error
    try:
        with as_input_errors():
            return getattr(model, line.method)(batch.to(model.device), **line.options).cpu()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error):
            raise RunError(f"out of memory at batch_size={size}: try batch_size={max(1, size // 4)}") from error
        raise


def automatic_draws(items: int, terms: int, replicates: int, budget: int = _AUTO_BUDGET) -> int | str:
    """`all` terms of a bound where that is cheap, else 5 to 100 strata within the budget, each of 4 terms or more.

    Example:
        >>> automatic_draws(20, 999, 2), automatic_draws(100, 999, 2), automatic_draws(10_000, 999, 2)
        ('all', 100, 5)
    """
    if items * terms <= (budget if terms <= 100 * replicates else budget // 5) or terms < 20:
        return "all"
    return min(terms // 4, max(5, min(100, budget // (items * replicates))))


def chosen_partition(given: dict, limited: bool) -> dict:
    """The options of log Z; annealed importance sampling has fewer chains and densities if few items are evaluated.

    Example:
        >>> chosen_partition({"chains": 32}, True)
        {'normaliser': 'auto', 'chains': 32, 'densities': 50}
    """
    usual = {"chains": 64, "densities": 50} if limited else {"chains": 256, "densities": 1000}
    return {"normaliser": "auto", **usual, **given}


def row(likelihood: Likelihood, spec: DataSpec, label: str = "", x: torch.Tensor | None = None) -> LikelihoodLine:
    """One likelihood as a line: mean, errors, extreme items, named parts, and how it was computed.

    Arguments:
        likelihood: of all items in index order.
        spec: of the data.
        label: name of the line; some kinds have a name that says more.
        x: the items, for the paired gap to their exact density if it is known.

    The extreme items are named only if values of single items exceed their noise. For log p(x | y), given the class,
    `class_cost` is log C in the line's unit: with C classes drawn evenly p(x) >= p(x | y)/C.
    """
    mean, made = likelihood.mean_nats(), likelihood.made
    dims = float(likelihood.dims.double().mean())
    scale = {"nats": 1.0, "nats_per_dim": dims}.get(spec.unit, dims * math.log(2))  # nats in one unit
    value, error = None if mean is None else -mean / scale, likelihood.standard_error(spec.unit)
    numbers = {"bits_per_dim": value} if spec.levels is not None else {
        "nll": None if mean is None else -mean, "nll_per_dim": likelihood.mean_nll_per_dim()}
    numbers |= {"se_data": None, "se_items": None, "se_mc": None} if error is None else {
        "se_data": error.total, "se_items": error.items, "se_mc": error.draws}
    if made.get("given") == "class":
        numbers["class_cost"] = math.log(spec.num_classes) / scale
    if spec.entropy is not None and value is not None:
        numbers |= {"entropy": spec.entropy, "kl_gap": value - spec.entropy, **paired_gap(likelihood, spec, x)}
    found = {}
    if likelihood.kind == "ais" and made.get("log_z_stderr") is not None:
        numbers["se_log_z"] = made["log_z_stderr"] / scale
        found = _optimism(made, value, scale)
    reason = _reason(likelihood)
    if reason is not None:
        numbers = dict.fromkeys(numbers)
    samples = made.get("importance_samples", 1)
    if samples > 1 and likelihood.stderr is not None and mean is not None:
        found["ess_median"] = float((samples / (1 + (samples - 1) * likelihood.stderr.square())).median())
    single, size = likelihood.single_values(), dims / scale
    order = (likelihood.nats / likelihood.dims).argsort()
    named = single.shown and (reason is None or likelihood.kind == "unnormalised")
    order = order[torch.isfinite(likelihood.nats[order])] if named else order[:0]
    return (NatsLine if spec.levels is None else BitsLine)(
        label=_label(likelihood, label), kind=likelihood.kind, mark=likelihood.mark, unit=spec.unit, mean_nats=mean,
        **numbers, **found, reason=reason, how=how(likelihood),
        single=SingleValues(None if single.noise is None else single.noise * size, single.spread * size),
        n=len(likelihood), nonfinite=len(likelihood.nonfinite), nonfinite_first=likelihood.nonfinite[:3].tolist(),
        worst=_extremes(likelihood, order[:8]), best=_extremes(likelihood, order.flip(0)[:8]),
        parts_nats={name: float(part.double().mean()) for name, part in likelihood.parts.items()}, made=made,
    )


def _optimism(made: dict, value: float | None, scale: float) -> dict:
    """The fields of a line on annealed importance sampling: the bracket of its value, and whether it is unreliable."""
    bracket = None if value is None else Bracket(*(None if end is None else value + (end - made["log_z"]) / scale
                                                   for end in (made["log_z_least"], made["log_z_most"])))
    return {"optimistic": True, "bracket": bracket, "unreliable": None if made["reliable"] else made["note"]}


def _reason(likelihood: Likelihood) -> str | None:
    """Why a likelihood has no value that can be compared; None if it has one."""
    if likelihood.kind == "unnormalised":
        return likelihood.made["reason"]
    if len(likelihood.nonfinite):
        return "not finite"
    if not likelihood.made.get("consistent", True):  # only the bracket is given
        return "forward and reverse chains disagree on log Z"
    return None


def paired_gap(likelihood: Likelihood, spec: DataSpec, x: torch.Tensor | None) -> dict:
    """The mean of log p_true - log q over the items and its standard error, if the true density is known."""
    truth = truth_of(spec)
    if x is None or len(x) < 2 or truth is None:
        return {}
    gaps = truth.log_prob(x.double()) - likelihood.nats
    shared = (likelihood.made.get("log_z_stderr") or 0.0) if likelihood.kind == "ais" else 0.0
    return {"kl_paired": float(gaps.mean()), "se_gap": math.hypot(gaps.std() / math.sqrt(len(gaps)), shared)}


def how(likelihood: Likelihood) -> str:
    """How a likelihood was computed, in a few words.

    Example:
        >>> how(Likelihood(torch.zeros(1), "lower_bound", 1, 2, made={"terms": 999, "draws": 20}))
        '20 of 999 terms'
    """
    made, words = likelihood.made, []
    if "terms" in made:
        words.append(f"{made.get('draws', 'all')} of {made['terms']} terms")
    elif "draws" in made:
        words.append(f"continuous time, {made['draws']} strata")
    if "importance_samples" in made:
        words.append(f"K = {made['importance_samples']}, {made['dequantisation']}")
    if likelihood.kind == "ode":
        trace = made["divergence"] if made["divergence"] == "exact" else counted(made["probes"], "probe")
        words += [f"{made['solver']}, {trace}", *_solved(likelihood)]
    if "log_z" in made and likelihood.kind != "ais":
        words.append("log Z by quadrature")
    if likelihood.kind == "ais":
        words.append(f"{made['chains']} chains, {made['steps']} densities")
    if "noise" in made:
        words.append(f"mels with noise of width {made['noise']:g}")
    if "given" in made:
        criterion = f"by {made['estimate']}, " if made["given"] == "mel" else ""  # a recogniser may have two
        words.append(f"{criterion}given the {made['given']}")
    return ", ".join(words)


def _solved(likelihood: Likelihood) -> list[str]:
    """The resolution of the ODE's solution, and the change by a coarser one, root mean square over the items checked.

    Example:
        >>> change, made = torch.tensor([-3e-3, math.nan]), {"steps": 64, "coarser": {"steps": 32}}
        >>> _solved(Likelihood(torch.zeros(2), "ode", 1, made=made, solver_change=change))
        ['64 steps (32 differ by 0.003 nats an item)']
    """
    change = likelihood.solver_change
    change = None if change is None else change[~change.isnan()]
    if change is None or not len(change):
        return []
    (name, fine), = ((key, likelihood.made[key]) for key in likelihood.made["coarser"])
    coarse, size = likelihood.made["coarser"][name], float(change.double().square().mean().sqrt())
    if name == "steps":
        where = " in time" if likelihood.made.get("variable") == "time" else ""
        return [f"{fine} steps{where} ({coarse} differ by {size:.2g} nats an item)"]
    return [f"tolerance {fine:g} ({coarse:g} differs by {size:.2g} nats an item)"]


def _label(likelihood: Likelihood, label: str) -> str:
    if likelihood.kind == "ais":
        return "annealed importance sampling" + (f", {label}" if label.startswith("K") else "")
    if likelihood.kind == "unnormalised":
        return "no likelihood"
    if likelihood.kind == "exact" and "log_z" in likelihood.made:
        return "quadrature"
    return label or likelihood.kind


def _extremes(likelihood: Likelihood, rows: torch.Tensor) -> list[Item]:
    index = torch.arange(len(likelihood)) if likelihood.index is None else likelihood.index
    errors = torch.zeros(len(likelihood)) if likelihood.stderr is None else likelihood.stderr
    return [Item(int(index[i]), float(likelihood.nats[i]), float(errors[i])) for i in rows]


_GRID = 160  # cells along each side of a density map


class LikelihoodStage:
    """The likelihoods of the evaluated items, one line for each way of the model to compute them."""

    def __init__(self, state: EvaluationState):
        self.state = state
        self.lines, self.notes = lines_of(state.opened)
        self.first: Likelihood | None = None

    def run(self) -> None:
        """Every line, the extreme items and the noise levels, and the density of data in the plane."""
        opened, spec, report = self.state.opened, self.state.opened.spec, self.state.report
        report.warnings += self.notes
        x = opened.evaluated().x if spec.entropy is not None else None
        for number, line in enumerate(self.lines):
            start = time.monotonic()
            found = self._evaluated(line)
            entry = row(found, opened.model.modelled, line.label, x)
            entry.values, entry.seconds = f"nats_{number}", time.monotonic() - start
            report.likelihood.append(entry)
            self.state.arrays[f"nats_{number}"] = found.nats
            if entry.unit != "nats" and (spec.levels is None or bool((found.dims != found.dims[:1]).any())):
                self.state.arrays[f"dims_of_nats_{number}"] = found.dims.long()
            report.failed += faults(entry)
            report.warnings += notes_on(entry)
            if number == 0:
                self.first = found
            if found.profile is not None and report.profile.diffusion is None:  # that of the first such line
                mean = found.profile.nats / found.profile.items
                report.profile.diffusion = NoiseLevels(found.profile.edges.tolist(), mean.tolist())
        self._extreme_items()
        if spec.event_shape == (2,) and spec.levels is None:
            self._density()

    def of_first_line(self) -> tuple[Line, Likelihood]:
        """The first line and its likelihood, computed if its stage was not run."""
        if self.first is None:
            self.first = self._evaluated(self.lines[0])
            self.state.arrays["nats_0"] = self.first.nats
        return self.lines[0], self.first

    def _evaluated(self, line: Line) -> Likelihood:
        join = partial(in_one, torch.arange(self.state.opened.items))
        return unpacked(self.state.once_by_all("likelihood", line.settings, join, likelihood_parts, line))

    def _extreme_items(self) -> None:
        """The least and most likely items of the first line that names them."""
        number, line = next(((k, one) for k, one in enumerate(self.state.report.likelihood) if one.worst), (None, None))
        if line is None:
            return
        self.state.report.items = ExtremeItems(number, line.worst, line.best)
        for name, entries in (("least", line.worst), ("most", line.best)):
            index = torch.tensor([entry.index for entry in entries], dtype=torch.int64)
            batch = self.state.opened.datamodule.items(self.state.request.split, index)
            self.state.arrays[f"{name}_x"], self.state.arrays[f"{name}_index"] = batch.x, index

    def _density(self) -> None:
        """The density in the plane by the first line that has one, the true density, and the data."""
        opened, arrays = self.state.opened, self.state.arrays
        number, kind = next(((k, one.kind) for k, one in enumerate(self.state.report.likelihood)
                             if one.kind in ("exact", "ode") and not needs_class(opened.model)), (None, ""))
        if number is None or self.state.request.limit not in (None, "all") or opened.limited:
            return
        line, points = self.lines[number], opened.evaluated(2000).x
        extent, size = extent_of(points), _GRID if kind == "exact" else _GRID // 2

        def compute() -> dict:
            found = on_grid(opened.model, extent, size, method=line.method, **line.options)
            return {"log_density": found.float()}

        found = self.state.once("density", {**line.settings, "extent": extent, "size": size}, compute)
        arrays["density"], arrays["density_data"] = found["log_density"], points
        if (truth := truth_of(opened.spec)) is not None:
            arrays["density_true"] = truth.log_prob(midpoints(extent, size).double()).float().view(size, size)
        # A window, so that its mass is not checked here; one of the checks integrates the whole density.
        self.state.report.density = DensityMap(extent, kind)
