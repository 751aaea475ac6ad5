"""One path that judges every family: the same items, the same integers, the same weights, one result."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone

import torch
from torch import Tensor
from tqdm import tqdm

from genmodels import __version__
from genmodels.data.base import DataModule
from genmodels.data.densities import density
from genmodels.data.spec import DataSpec
from genmodels.errors import InputError, Interrupted
from genmodels.evaluation import cost, out_of_distribution, sample_quality
from genmodels.evaluation.cache import Cache, code_hash, key_of
from genmodels.evaluation.checkpoint_proofs import Trial, prove_checkpoint
from genmodels.evaluation.classes import class_accuracy, likelihood_classifier
from genmodels.evaluation.density import extent_of, midpoints, on_grid
from genmodels.evaluation.features import FeatureNetwork, Items, dims_of, network_for
from genmodels.evaluation.flow_proofs import drift_of, layers_of
from genmodels.evaluation.likelihood import Likelihood, Profile
from genmodels.evaluation.lines import Line, faults, lines_of, notes_on, row
from genmodels.evaluation.opened import Opened, fits
from genmodels.evaluation.references import best_histogram, uniform_bits_per_dim
from genmodels.evaluation.request import Request
from genmodels.models.load import weights_of
from genmodels.training.archive import checkpoint_hash

_SHOWN = 64  # samples that are kept for grids
_PROOFS = 60.0  # seconds that proofs may take unless proofs=full
_LABELLED = 500  # items whose class a likelihood is asked for
_STEPS, _TEMPERATURES, _SWEPT = (5, 10, 20, 50), (0.5, 0.7, 0.85, 1.0), 500
_GRID = 160  # cells a side of a density map


class Evaluation:
    """The stages of one checkpoint's evaluation, each of them computed once for the same checkpoint and settings.

    Arguments:
        opened: the model and its data.
        cache: where results are kept.
        shared: what the models of a table have in common (item hashes, the feature network); filled here.

    Attributes:
        report: plain types, as it stands after the stages done so far.
        arrays: numbers for pictures by name.
    """

    def __init__(self, opened: Opened, cache: Cache, shared: dict | None = None):
        self.opened, self.cache, self.shared = opened, cache, {} if shared is None else shared
        self.sha256 = checkpoint_hash(opened.path)
        self.arrays: dict[str, Tensor] = {}
        self.report = self._head()
        self._first: Likelihood | None = None
        self._samples = None

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.opened.request

    # ---- the frame ----------------------------------------------------------------------------------------------

    def _head(self) -> dict:
        opened, header, request = self.opened, self.opened.header, self.opened.request
        spec = opened.spec
        return {
            "format": 1,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "genmodels": {
                "version": __version__, "torch": torch.__version__, "python": platform.python_version(),
                "device": str(opened.model.device), "threads": torch.get_num_threads(),
            },
            "name": header["family"],
            "checkpoint": {
                "path": str(opened.path), "sha256": self.sha256, "step": header["step"], "epoch": header.get("epoch"),
                "family": header["family"], "parameters": header["parameters"],
                "weights": str(weights_of(request.ema)), "training_seconds": header.get("seconds"),
            },
            "config": header["config"],
            "data": {
                "name": spec.name, "split": request.split, "items": opened.items, "limited": opened.limited,
                "item_hash": self._hash(request.split, opened.items), "event_shape": list(spec.event_shape),
                "levels": spec.levels, "units": "levels" if spec.levels else "the data's own",
                "num_classes": spec.num_classes, "class_names": list(spec.class_names),
            },
            "likelihood": [], "references": [], "items": {}, "profile": {}, "drift": {}, "proofs": [], "fidelity": {},
            "sampling": {}, "sweeps": [], "samples": {}, "neighbours": {}, "density": {}, "ood": [],
            "warnings": [], "failed": [], "seconds": {},
        }

    def _hash(self, split: str, count: int | None = None) -> str:
        key = ("hash", id(self.opened.datamodule), split, count)
        if key not in self.shared:
            self.shared[key] = item_hash(self.opened.datamodule, split, count)
        return self.shared[key]

    def _once(self, stage: str, settings: dict, compute: Callable[[], dict]) -> dict:
        """The result of a stage from the cache, or computed and kept."""
        model = self.opened.model
        key = key_of(
            stage=stage, checkpoint=self.sha256, settings=settings, data=self.report["data"]["item_hash"],
            items=self.opened.items, split=self.request.split, weights=str(weights_of(self.request.ema)),
            seed=self.request.seed, batch_size=self.request.batch_size, processes=self.request.processes,
            device=str(model.device), threads=torch.get_num_threads(), torch=torch.__version__, code=code_hash(),
            data_options=self.request.data,
        )
        found = self.cache.get(key)
        return self.cache.put(key, compute()) if found is None else found

    @contextmanager
    def _timed(self, stage: str):
        start = time.monotonic()
        yield
        self.report["seconds"][stage] = round(self.report["seconds"].get(stage, 0.0) + time.monotonic() - start, 3)

    def run(self) -> dict:
        """Every stage that is wanted, in order; the report.

        Raises:
            Interrupted: with what is finished in `report`, which says `partial`.
        """
        stages = {"likelihood": self.likelihood, "ood": self.ood, "fidelity": self.fidelity, "cost": self.cost,
                  "proofs": self.proofs, "sweeps": self.sweeps}
        self.report["references"] = self._references()
        try:
            for name, stage in stages.items():
                if self.request.wants(name):
                    with self._timed(name):
                        stage()
        except KeyboardInterrupt:
            self.report["partial"] = True
            raise Interrupted("interrupted: the stages that were finished are in the report") from None
        return self.report

    def _references(self) -> list[dict]:
        key = ("references", id(self.opened.datamodule), self.request.split, self.opened.items)
        if key not in self.shared:
            limit = self.opened.items if self.opened.limited else None
            self.shared[key] = references(self.opened.datamodule, self.request.split, self.opened.spec, limit)
        return self.shared[key]

    # ---- the stages ---------------------------------------------------------------------------------------------

    def likelihood(self) -> None:
        """Every line; then what the first one says of items, noise levels and, in the plane, of the density."""
        opened, spec = self.opened, self.opened.spec
        lines, notes = lines_of(opened)
        self.report["warnings"] += notes
        x = opened.judged().x if spec.entropy is not None else None
        for number, line in enumerate(lines):
            start = time.monotonic()
            found = self._judged(line)
            told = row(found, spec, line.label, x) | {"values": f"nats_{number}"}
            self.report["likelihood"].append(told | {"seconds": time.monotonic() - start})
            self.arrays[f"nats_{number}"] = found.nats
            self.report["failed"] += faults(told)
            self.report["warnings"] += notes_on(told)
            if self._first is None:
                self._first, self._line = found, line
            self.report["profile"] |= profile_of(found)
        self._extreme_items()
        if spec.event_shape == (2,) and spec.levels is None:
            self._density(lines)

    def _judged(self, line: Line) -> Likelihood:
        stored = self._once("likelihood", {"method": line.method, **line.options}, lambda: _packed(
            self.opened.likelihood(line.method, line.options, line.label)))
        return _unpacked(stored)

    def _extreme_items(self) -> None:
        first = self.report["likelihood"][0]
        if not first["worst"]:
            return  # not one value is finite
        self.report["items"] = {"least": first["worst"], "most": first["best"]}
        for name, rows in self.report["items"].items():
            index = torch.tensor([entry["index"] for entry in rows], dtype=torch.int64)
            batch = next(iter(self.opened.datamodule.loader(self.request.split, len(index), index)))
            self.arrays[f"{name}_x"], self.arrays[f"{name}_index"] = batch.x, index

    def _density(self, lines: list[Line]) -> None:
        """The density in the plane by the best line that has one, beside the truth and the data."""
        kinds = [entry["kind"] for entry in self.report["likelihood"]]
        usable = [k for k, kind in enumerate(kinds) if kind in ("exact", "ode")]
        if not usable or self.request.limit not in (None, "all") or self.opened.limited:
            return
        line, model = lines[usable[0]], self.opened.model
        points = self.opened.judged(2000).x
        extent = extent_of(points)
        size = _GRID if kinds[usable[0]] == "exact" else _GRID // 2

        def compute() -> dict:
            log_density, mass = on_grid(model, extent, size, method=line.method, **line.options)
            return {"log_density": log_density.float(), "mass": mass}

        found = self._once("density", {"method": line.method, **line.options, "extent": extent, "size": size}, compute)
        self.arrays["density"], self.arrays["density_data"] = found["log_density"], points
        truth = true_density(self.opened.spec, extent, size)
        if truth is not None:
            self.arrays["density_true"] = truth
        self.report["density"] = {"extent": extent, "kind": kinds[usable[0]], "unit": "nats", "mass": found["mass"]}

    def ood(self) -> None:
        """Other data sets under the first line: histograms and the probability to tell an item of each apart."""
        if self._first is None:
            self._line = lines_of(self.opened)[0][0]
            self._first = self._judged(self._line)
            self.arrays["nats_0"] = self._first.nats
        spec = self.opened.spec
        for number, name in enumerate(self.request.ood):
            other = self._other(name)
            count = min(self.opened.items, len(other.split(self.request.split)))
            digest = self._other_hash(name, other, count)

            def compute(other=other, name=name, count=count) -> dict:
                return _packed(self.opened.likelihood(self._line.method, self._line.options, name, other, count))

            found = _unpacked(self._once("ood", {"name": name, "items": digest, **self._line.options}, compute))
            self.report["ood"].append(self._told_ood(name, number, found, count, spec))
            order = found.nats.argsort(descending=True)[:8]
            self.arrays[f"ood_{number}_nats"] = found.nats
            self.arrays[f"ood_{number}_x"] = next(iter(other.loader(self.request.split, 8, order))).x

    def _other(self, name: str) -> DataModule:
        key = ("ood", name, id(self.opened.datamodule))
        if key not in self.shared:
            trust = list(self.request.trust)
            self.shared[key] = out_of_distribution.other_data(
                name, self.request.ood_data, self.opened.datamodule, trust)
        try:
            fits(self.opened.model, self.shared[key].spec)
        except InputError as error:
            raise InputError(f"ood={name}: {error}") from error
        return self.shared[key]

    def _other_hash(self, name: str, other: DataModule, count: int) -> str:
        key = ("hash", id(other), count)
        if key not in self.shared:
            self.shared[key] = item_hash(other, self.request.split, count)
        return self.shared[key]

    def _told_ood(self, name: str, number: int, found: Likelihood, count: int, spec: DataSpec) -> dict:
        inside, outside = self._first.nats, found.nats
        entry = {"name": name, "overrides": self.request.ood_data, "n": count, "kind": found.kind,
                 "label": self._line.label, "values": f"ood_{number}_nats", "inside": "nats_0"}
        finite = bool(torch.isfinite(inside).all() and torch.isfinite(outside).all())
        unit = "unnormalised nats" if found.kind == "unnormalised" else "bits_per_dim" if spec.levels else "nats"
        if not finite:
            reason = found.made.get("reason", "values that are not finite")
            return {**entry, "value": unit, "auroc": None, "reason": reason, "said": f"{name}: {reason}"}
        area, error = out_of_distribution.auroc(inside, outside)
        means = {}
        for key, likelihood in (("mean_in", self._first), ("mean_out", found)):
            bits = unit == "bits_per_dim"
            means[key] = likelihood.mean_bits_per_dim() if bits else -likelihood.mean_nats()
        return {**entry, "value": unit, "auroc": area, "se": error, **means,
                "said": out_of_distribution.told(name, area, error, found.kind)}

    def fidelity(self) -> None:
        """Samples beside held-out items in features of one network; copies of training items; classes."""
        request = self.request
        dims = dims_of(self.opened.spec, request.features)
        n, reason = sample_quality.count_for(
            request.samples, self.opened.items, dims, request.force, request.features != "auto")
        if reason is not None:
            self.report["fidelity"] = {"skipped": reason}
            self._show(self._drawn(min(_SHOWN, n)))
            return
        samples = self._drawn(max(n, _SHOWN))
        self._show(samples)
        network, items, real = self._network()
        real = real[sample_quality.chosen(len(real), n, "real")]
        generated = samples["x"][:n]
        if generated.shape[1:] != real.shape[1:]:
            raise InputError(f"samples of shape {tuple(generated.shape[1:])} cannot be compared with items of shape "
                             f"{tuple(real.shape[1:])}")
        scale_key = ("scale", network.sha256, n, self.report["data"]["item_hash"])
        if scale_key not in self.shared:
            key = key_of(stage="scale", network=network.sha256, n=n, data=self.report["data"]["item_hash"],
                         train=items.train_hash, code=code_hash())
            scale = self.cache.get(key) or self.cache.put(key, sample_quality.scale_of(network, items, real))
            self.shared[scale_key] = scale
        scale = self.shared[scale_key]

        def compute() -> dict:
            found = sample_quality.fidelity_of(network, items, real, generated)
            memory, pairs, arrays = sample_quality.copies(network, items, real, generated)
            classes = samples["cond"] is not None and network.classify is not None
            if classes:
                found["class_accuracy"] = sample_quality.classes_of(
                    network, self.opened.spec, generated, samples["cond"][:n])
            return {"found": found, "memorisation": memory, "pairs": pairs, "arrays": arrays}

        settings = {**self._sampling_settings(), "n": n, "network": network.sha256, "train": items.train_hash}
        done = self._once("fidelity", settings, compute)
        self.report["fidelity"] = {
            "network": network.told(), **done["found"], "frechet_floor": scale["floor"],
            "frechet_train": scale["train"], "frechet_noise": scale["noise"], "memorisation": done["memorisation"],
            **self._asked_classes(),
        }
        self.report["neighbours"], self.report["scale"] = done["pairs"], scale
        self.arrays |= done["arrays"]
        if "only" in network.note:
            self.report["warnings"].append(f"feature network {network.name}: {network.note}")
        if done["memorisation"]["flagged"]:
            self.report["warnings"].append(f"samples may be copies: {done['memorisation']['said']}")

    def _network(self) -> tuple[FeatureNetwork, Items, Tensor]:
        key = ("network", id(self.opened.datamodule), self.request.split, self.opened.items)
        if key not in self.shared:
            train, test, judged = self.opened.whole("train"), self.opened.whole("test"), self.opened.judged()
            items = Items(self.opened.datamodule.spec, train.x, test.x, train.cond, test.cond, self._hash("train"),
                          self.cache)
            self.shared[key] = network_for(items, self.request.features), items, judged.x
        return self.shared[key]

    def _sampling_settings(self) -> dict:
        request = self.request
        return {"sampler": request.sampler, "steps": request.steps, "temperature": request.temperature}

    def _drawn(self, n: int) -> dict:
        """The samples that are judged and shown: the same seed and numbers for every model."""

        def compute() -> dict:
            start = time.monotonic()
            samples = self.opened.draw(n)
            return {"x": samples.x, "cond": samples.cond, "index": samples.index, "made": samples.made,
                    "seconds": time.monotonic() - start}

        if self._samples is None or len(self._samples["x"]) < n:
            self._samples = self._once("samples", {**self._sampling_settings(), "n": n}, compute)
        return self._samples

    def _show(self, samples: dict) -> None:
        for key in ("x", "cond", "index"):
            if samples[key] is not None:
                self.arrays[f"samples_{key}"] = samples[key][:_SHOWN if self.opened.spec.event_shape != (2,) else None]
        self.report["samples"] = {"x": "samples_x", "cond": None if samples["cond"] is None else "samples_cond",
                                  "index": "samples_index", "made": samples["made"]}

    def _asked_classes(self) -> dict:
        """p(y|x) of a flow that is told classes: how often the true class is the likeliest."""
        model, spec = self.opened.model, self.opened.spec
        if not hasattr(model.core, "flow") or model.num_classes is None:
            return {}
        batch = self.opened.judged(_LABELLED)
        if batch.cond is None:
            return {}

        def compute() -> dict:
            options = {"weights": weights_of(self.request.ema), "seed": self.request.seed}
            moved = batch.to(model.device)
            found = likelihood_classifier(model, moved, model.num_classes, **options).cpu()
            return class_accuracy(found, batch.cond, model.num_classes, spec.class_names)

        done = self._once("classes", {"items": len(batch)}, compute)
        return {"likelihood_accuracy": {key: done[key] for key in ("accuracy", "interval", "n")}}

    def cost(self) -> None:
        """Network evaluations, samples a second, the wait for one, memory, on this device."""
        small = self.opened.limited
        own = Opened(self.opened.path, self.opened.model, self.opened.header, self.opened.datamodule,
                     _alone(self.request), self.opened.items)
        self.report["sampling"] = self._once("cost", self._sampling_settings(), lambda: cost.measure(
            self.opened.model, lambda n, start: own.draw(n, start=start, progress=False),
            batch_size=16 if small else 64, budget=5.0 if small else 60.0,
        )) | {"seed": self.request.seed}

    def proofs(self) -> None:
        """What is proved of this checkpoint, and the layers of a flow one by one."""
        model, request = self.opened.model, self.request
        weights = weights_of(request.ema)
        batch = self.opened.judged(64).to(model.device)
        line = lines_of(self.opened)[0][0]
        bound = 3600.0 if request.proofs == "full" else 10.0 if self.opened.limited else _PROOFS

        def compute() -> dict:
            trial = Trial(model, batch, weights, request.seed, line.options, self._first,
                          time.monotonic() + bound, self.opened.judged(2000).x)
            with tqdm(desc=f"proofs of {model.family}", unit="check", mininterval=0.5) as bar:

                def watch(name: str) -> None:
                    bar.set_postfix_str(name)
                    bar.update()

                rows = prove_checkpoint(trial, watch)
            layers = layers_of(model, batch, weights) if hasattr(model.core, "flow") else []
            return {"rows": rows, "layers": layers}

        done = self._once("proofs", {"options": line.options, "bound": bound}, compute)
        self.report["proofs"] = done["rows"]
        if done["layers"]:
            self.report["profile"]["flow"] = done["layers"]
            self.report["drift"] = drift_of(done["layers"])
        self.report["failed"] += [f"proof failed: {entry['name']} ({entry['where']})" for entry in done["rows"]
                                  if entry["passed"] is False]

    def sweeps(self) -> None:
        """Fidelity and cost at several numbers of steps, and at several temperatures."""
        for key in self.request.sweeps:
            dims = dims_of(self.opened.spec, self.request.features)
            n, reason = sample_quality.count_for("auto", min(_SWEPT, self.opened.items), dims, self.request.force)
            if reason is not None:
                self.report["warnings"].append(f"no sweep over {key}: {reason}")
                continue
            network, items, real = self._network()
            self._sweep(key, network, items, real[sample_quality.chosen(len(real), n, "real")])

    def _sweep(self, key: str, network: FeatureNetwork, items: Items, real: Tensor) -> None:
        import inspect

        model = self.opened.model
        if key not in inspect.signature(model.sample).parameters:
            self.report["warnings"].append(f"no sweep over {key}: a {model.family} has no such option")
            return
        values = _TEMPERATURES
        if key == "steps":
            most = getattr(model, "num_steps", None)
            values = sorted({min(v, most) for v in (*_STEPS, most)}) if most else [10, 40, 160]
        found: dict = {"key": key, "sampler": None, "values": list(values), "frechet": [], "precision": [],
                       "recall": [], "evaluations": [], "samples_per_second": []}
        for value in values:

            def compute(value=value) -> dict:
                counter = cost.EvaluationCounter(cost.network_of(model.weights()) or torch.nn.Identity())
                start = time.monotonic()
                with counter:
                    samples = self.opened.draw(len(real), **{key: value})
                seconds = time.monotonic() - start
                told = sample_quality.fidelity_of(network, items, real, samples.x)
                evaluations = cost.evaluations_per_sample(model, samples, counter.rows, len(real))
                return {"told": told, "evaluations": evaluations, "rate": len(real) / seconds,
                        "sampler": samples.made.get("sampler")}

            settings = {**self._sampling_settings(), key: value, "n": len(real), "network": network.sha256}
            done = self._once("sweep", settings, compute)
            for name in ("frechet", "precision", "recall"):
                found[name].append(done["told"][name])
            found["evaluations"].append(done["evaluations"])
            found["samples_per_second"].append(done["rate"])
            found["sampler"] = done["sampler"]
        self.report["sweeps"].append(found)


def item_hash(datamodule: DataModule, split: str, limit: int | None = None) -> str:
    """A hash of the items judged: their indices, values and labels."""
    indices = None if limit is None else torch.arange(min(limit, len(datamodule.split(split))))
    digest = hashlib.sha256()
    for batch in datamodule.loader(split, 1024, indices):
        for tensor in (batch.index, batch.x, batch.cond):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def references(datamodule: DataModule, split: str, spec: DataSpec, limit: int | None = None) -> list[dict]:
    """Bits/dim of the uniform model and of the best per-pixel histogram; the exact entropy where it is known."""
    if spec.levels is None:
        known = spec.entropy is not None
        return [{"name": "exact entropy", "unit": "nats", "value": spec.entropy}] if known else []
    rows = [{"name": "uniform", "unit": "bits_per_dim", "value": uniform_bits_per_dim(spec.levels)}]
    if spec.dims * spec.levels <= 2_000_000:
        train, val, judged = (
            torch.cat([b.x for b in datamodule.loader(name, 4096)]) for name in ("train", "val", split)
        )
        nats = best_histogram(train, val, spec.levels).log_prob(judged[:limit])
        value = Likelihood(nats, "exact", spec.dims, spec.levels).mean_bits_per_dim()
        rows.append({"name": "best per-pixel histogram", "unit": "bits_per_dim", "value": value})
    return rows


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


def _alone(request: Request) -> Request:
    """The same request on one process, for what is timed."""
    return Request(**{**asdict(request), "processes": 1})


def _packed(likelihood: Likelihood) -> dict:
    """Tensors and plain types, for the cache."""
    profile = likelihood.profile
    return {
        **{name: getattr(likelihood, name) for name in ("nats", "kind", "dims", "levels", "stderr", "made", "index",
                                                        "parts")},
        "profile": None if profile is None else (profile.edges, profile.nats, profile.items),
    }


def _unpacked(stored: dict) -> Likelihood:
    profile = stored["profile"]
    return Likelihood(**{**stored, "profile": None if profile is None else Profile(*profile)})
