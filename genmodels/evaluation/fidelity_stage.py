"""The stage of samples: beside held-out items in features of one network, copies, classes; sweeps over options."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from genmodels.errors import InputError
from genmodels.evaluation import cost, sample_quality
from genmodels.evaluation.cache import code_hash, key_of
from genmodels.evaluation.classes import class_accuracy, likelihood_classifier
from genmodels.evaluation.families import is_flow
from genmodels.evaluation.features import FeatureNetwork, Items, dims_of, network_for
from genmodels.evaluation.frame import Frame
from genmodels.evaluation.sampling import takes
from genmodels.evaluation.speech_stage import speech_of
from genmodels.models.load import weights_of

_SHOWN = 64  # samples that are kept for grids
_LABELLED = 500  # items whose class a likelihood is asked for
_STEPS, _TEMPERATURES, _SWEPT = (5, 10, 20, 50), (0.5, 0.7, 0.85, 1.0), 500


class FidelityStage:
    """Samples of a model, all from one seed, and what they are like."""

    def __init__(self, frame: Frame):
        self.frame = frame
        self._samples: dict | None = None

    def check(self) -> None:
        """Refuse a number of samples that cannot be compared, before anything is computed.

        Raises:
            InputError: naming the number that is needed.
        """
        self._count()

    def _count(self) -> tuple[int, str | None]:
        opened, request = self.frame.opened, self.frame.request
        if opened.spec.text is not None:
            return 0, None
        dims, items = dims_of(opened.spec, request.features), opened.items
        if request.samples == "auto":
            items = self._matched(items)
        return sample_quality.count_for(request.samples, items, dims, request.force, request.features != "auto")

    def _matched(self, items: int) -> int:
        """As many items as there are others held out to compare them with, where that leaves two thirds of them."""
        names = {"val", "test", self.frame.request.split}
        half = sum(len(self.frame.opened.datamodule.split(name)) for name in names) // 2
        return half if 2 * items <= 3 * half < 3 * items else items

    def run(self) -> None:
        """Samples beside held-out items in features of one network; copies of training items; classes."""
        if self.frame.opened.spec.text is not None:
            self.frame.report["speech"] = speech_of(self.frame)
            return
        n, reason = self._count()
        if reason is not None:
            self.frame.report["fidelity"] = {"skipped": reason}
            self._show(self._drawn(min(_SHOWN, n)))
            return
        samples = self._drawn(max(n, _SHOWN))
        self._show(samples)
        network, items = self._network()
        real, other = self._real(n)
        generated = samples["x"][:n]
        if generated.shape[1:] != real.shape[1:]:
            raise InputError(f"samples of shape {tuple(generated.shape[1:])} cannot be compared with items of shape "
                             f"{tuple(real.shape[1:])}")
        scale = self._scale(network, items, real, other)

        def compute() -> dict:
            found = sample_quality.fidelity_of(network, real, generated)
            memory, pairs, arrays = sample_quality.copies(network, items, real, generated)
            classes = samples["cond"] is not None and network.classify is not None
            if classes:
                found["class_accuracy"] = sample_quality.classes_of(
                    network, self.frame.opened.spec, generated, samples["cond"][:n])
            return {"found": found, "memorisation": memory, "pairs": pairs, "arrays": arrays}

        settings = {**self.frame.sampling_settings(), "n": n, "network": network.sha256, "train": items.train_hash}
        done = self.frame.once("fidelity", settings, compute)
        self.frame.report["fidelity"] = {
            "network": network.told(), **done["found"], "memorisation": done["memorisation"], **self._asked_classes(),
        }
        self.frame.report["neighbours"], self.frame.report["scale"] = done["pairs"], scale
        self.frame.arrays |= done["arrays"]
        if "only" in network.note:
            self.frame.report["warnings"].append(f"feature network {network.name}: {network.note}")
        if done["memorisation"]["flagged"]:
            self.frame.report["warnings"].append(f"samples may be copies: {done['memorisation']['said']}")

    def _scale(self, network: FeatureNetwork, items: Items, real: Tensor, other: Tensor) -> dict:
        """What other held-out items, training items and noise score against the same held-out items."""
        shared, cache, data = self.frame.shared, self.frame.cache, self.frame.report["data"]["item_hash"]
        told = {"network": network.sha256, "n": len(real), "data": data, "train": items.train_hash, "other": len(other)}
        name = ("scale", *told.values())
        if name not in shared:
            key = key_of(stage="scale", **told, code=code_hash())
            shared[name] = cache.get(key) or cache.put(key, sample_quality.scale_of(network, items, real, other))
        return shared[name]

    def _network(self) -> tuple[FeatureNetwork, Items]:
        frame, opened, shared = self.frame, self.frame.opened, self.frame.shared
        key = ("network", id(opened.datamodule))
        if key not in shared:
            train, test = opened.whole("train"), opened.whole("test")
            items = Items(
                opened.datamodule.spec, train.x, test.x, train.cond, test.cond, frame.hash_of("train"), frame.cache)
            shared[key] = network_for(items, frame.request.features), items
        return shared[key]

    def _real(self, n: int) -> tuple[Tensor, Tensor]:
        """The n held-out items that everything is compared with, and others: of the same split, or of both if few."""
        opened, split = self.frame.opened, self.frame.request.split
        whole = opened.whole(split).x
        rows = sample_quality.chosen(opened.items, n, "real")
        left = torch.ones(len(whole), dtype=torch.bool)
        left[rows] = False
        other = whole[left]
        if len(other) < n:
            other = torch.cat([other, *(opened.whole(name).x for name in ("val", "test") if name != split)])
        return whole[rows], other

    def _drawn(self, n: int) -> dict:
        """The samples that are judged and shown: the same seed and numbers for every model."""

        def compute() -> dict:
            start = time.monotonic()
            samples = self.frame.opened.draw(n)
            return {"x": samples.x, "cond": samples.cond, "index": samples.index, "made": samples.made,
                    "seconds": time.monotonic() - start}

        if self._samples is None or len(self._samples["x"]) < n:
            self._samples = self.frame.once("samples", {**self.frame.sampling_settings(), "n": n}, compute)
        return self._samples

    def _show(self, samples: dict) -> None:
        shown = None if self.frame.opened.spec.event_shape == (2,) else _SHOWN
        for key in ("x", "cond", "index"):
            if samples[key] is not None:
                self.frame.arrays[f"samples_{key}"] = samples[key][:shown]
        self.frame.report["samples"] = {"x": "samples_x", "cond": None if samples["cond"] is None else "samples_cond",
                                        "index": "samples_index", "made": samples["made"]}

    def _asked_classes(self) -> dict:
        """p(y|x) of a flow that is told classes: how often the true class is the likeliest."""
        model, spec = self.frame.opened.model, self.frame.opened.spec
        if not is_flow(model) or model.num_classes is None:
            return {}
        batch = self.frame.opened.judged(_LABELLED)
        if batch.cond is None:
            return {}

        def compute() -> dict:
            options = {"weights": weights_of(self.frame.request.ema), "seed": self.frame.request.seed}
            moved = batch.to(model.device)
            found = likelihood_classifier(model, moved, model.num_classes, **options).cpu()
            return class_accuracy(found, batch.cond, model.num_classes, spec.class_names)

        done = self.frame.once("classes", {"items": len(batch)}, compute)
        return {"likelihood_accuracy": {key: done[key] for key in ("accuracy", "interval", "n")}}

    def sweeps(self) -> None:
        """Fidelity and cost at several numbers of steps, and at several temperatures."""
        opened, request = self.frame.opened, self.frame.request
        for key in request.sweeps:
            dims = dims_of(opened.spec, request.features)
            n, reason = sample_quality.count_for("auto", min(_SWEPT, self._matched(opened.items)), dims, request.force)
            if reason is not None:
                self.frame.report["warnings"].append(f"no sweep over {key}: {reason}")
                continue
            self._sweep(key, self._network()[0], self._real(n)[0])

    def _sweep(self, key: str, network: FeatureNetwork, real: Tensor) -> None:
        model = self.frame.opened.model
        if not takes(model.sample, key):
            self.frame.report["warnings"].append(f"no sweep over {key}: a {model.family} has no such option")
            return
        values = _TEMPERATURES
        if key == "steps":
            most = getattr(model, "num_steps", None)
            values = sorted({min(v, most) for v in (*_STEPS, most)}) if most else [10, 40, 160]
        measured = [name + part for name in ("frechet", "kernel", "precision", "recall") for part in ("", "_error")]
        found: dict = {"key": key, "sampler": None, "n": len(real), "values": list(values),
                       **{name: [] for name in (*measured, "evaluations", "samples_per_second")}}
        for value in values:

            def compute(value=value) -> dict:
                counter = cost.EvaluationCounter(cost.network_of(model.weights()) or torch.nn.Identity())
                start = time.monotonic()
                with counter:
                    samples = self.frame.opened.draw(len(real), **{key: value})
                seconds = time.monotonic() - start
                told = sample_quality.fidelity_of(network, real, samples.x)
                evaluations = cost.evaluations_per_sample(model, samples, counter.rows, len(real))
                return {"told": told, "evaluations": evaluations, "rate": len(real) / seconds,
                        "sampler": samples.made.get("sampler")}

            settings = {**self.frame.sampling_settings(), key: value, "n": len(real), "network": network.sha256}
            done = self.frame.once("sweep", settings, compute)
            for name in measured:
                found[name].append(done["told"][name])
            found["evaluations"].append(done["evaluations"])
            found["samples_per_second"].append(done["rate"])
            found["sampler"] = done["sampler"]
        self.frame.report["sweeps"].append(found)
