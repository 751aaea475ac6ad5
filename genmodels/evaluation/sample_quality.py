"""Sample quality: features of samples compared with those of held-out items; training items and noise as a scale."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, an
from genmodels.core.random import KeyedGenerator, seed_of
from genmodels.core.samples import Samples
from genmodels.data.utterances import joined
from genmodels.evaluation import cost
from genmodels.evaluation.checkpoint import EvaluationState, chosen, classes_in_turn
from genmodels.evaluation.features import FeatureNetwork, Items, code_hash, fewest_items, key_of, network_for, wilson
from genmodels.evaluation.fidelity import (
    Nearest,
    cubic_kernel,
    frechet_with_error,
    gaussian_kernel,
    kernel_distance,
    memorisation,
    nearest,
    precision_recall,
    precision_recall_errors,
)  # fmt: skip
from genmodels.evaluation.out_of_distribution import ALTERATIONS
from genmodels.evaluation.report import Fidelity, Measures, Neighbours, SampleFacts, Scale, Skipped, Sweep
from genmodels.evaluation.samples import draw_parts, parts_of, sounds_by_class, takes_temperature
from genmodels.evaluation.speech import speech_of, transcription_of
from genmodels.flows.flow import class_posterior
from genmodels.models.checkpoint import weights_of
from genmodels.models.density import is_flow, is_of_noisy_data
from genmodels.models.score import SAMPLERS as LEVEL_SAMPLERS


def class_accuracy(found: Tensor, wanted: Tensor, num_classes: int, names: Sequence[str] = ()) -> dict:
    """The accuracy of predicted classes, overall and for each class, and the confusion matrix.

    Arguments:
        found, wanted: (n,) predicted and true classes.
        num_classes: K.
        names: of the classes; their numbers if empty.

    Example:
        >>> result = class_accuracy(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
        >>> round(result["accuracy"], 4), result["confusion"]
        (0.6667, [[1, 1], [0, 1]])
    """
    table = torch.bincount(wanted * num_classes + found, minlength=num_classes**2).view(num_classes, num_classes)
    each = []
    for label, row in enumerate(table.tolist()):
        n, hits = sum(row), row[label]
        name = names[label] if names else str(label)
        each.append({"label": label, "name": name, "n": n, "interval": wilson(hits, n),
                     "accuracy": hits / n if n else None})
    hits = int(table.diagonal().sum())
    return {"accuracy": hits / len(found), "n": len(found), "interval": wilson(hits, len(found)), "per_class": each,
            "confusion": table.tolist()}


_FEWEST = 4  # samples with three neighbours each
_NEIGHBOURS = 8  # closest pairs that are shown
_MOST = 10_000  # items that precision and recall compare
_SHOWN = 64  # samples that are kept for grids
_LABELLED = 500  # items that are classified by likelihood
_STEPS, _TEMPERATURES, _SWEPT = (1, 2, 4, 10, 20, 50), (0.5, 0.7, 0.85, 1.0), 500


def noise_like(x: Tensor, spec: DataSpec) -> Tensor:
    """Noise of the same shape: uniform over the levels, or Gaussian with the data's mean and standard deviation."""
    return ALTERATIONS["noise"](x, spec, KeyedGenerator(seed_of("fidelity", "noise"), torch.arange(len(x)), "noise"))


def count_for(samples: int | str, items: int, fewest: int, force: bool, insist: bool = False) -> tuple[int, str | None]:
    """The number of samples, and of held-out items, that are compared; with the reason if there are too few.

    Raises:
        InputError: if the requested number is too small, or larger than the number of items; with `insist` also for
            `samples="auto"`.

    Example:
        >>> count_for("auto", 359, 128, False)
        (359, None)
        >>> count_for("auto", 100, 128, False)[1]
        '100 items are too few to compare: at least 128 are needed'
    """
    n = min(1000, items) if samples == "auto" else int(samples)
    if n > items:
        raise InputError(f"samples={n} is more than the {items} held-out items they are compared with: as many of both "
                         "are needed (limit=all takes the whole split)")
    fewest = _FEWEST if force else fewest
    if n >= fewest:
        return n, None
    items_are = "item is" if n == 1 else "items are"
    reason = f"{n} {items_are} too few to compare: at least {fewest} are needed"
    if samples != "auto" or insist:
        more = "" if n < _FEWEST else " (force=true compares them all the same)"
        raise InputError(f"{reason}{more}")
    return n, reason


def scale_of(network: FeatureNetwork, items: Items, real: Tensor, other: Tensor) -> dict:
    """The `Measures` of n items that are not samples, by name, as a scale for the samples of models.

    `other held-out items`, `training items` and `noise` are compared with the same n held-out items as the samples. A
    set of fewer than n items is left out, because distances depend on n.
    """
    n, features = len(real), network(real)
    compared = {"other held-out items": other, "training items": items.train, "noise": noise_like(real, items.spec)}
    return {name: vars(measures_of(network, features, network(x[chosen(len(x), n, name)])))
            for name, x in compared.items() if len(x) >= n}


def measures_of(network: FeatureNetwork, true: Tensor, found: Tensor) -> Measures:
    """Distances, precision and recall of equally many samples and held-out items, each with its standard error.

    The Fréchet distance of features with `moments`; the kernel is cubic for these, for coordinates Gaussian.

    Arguments:
        true, found: (n, D) features of held-out items and of samples.
    """
    frechet = frechet_with_error(found, true) if network.moments else (None, None)
    kernel = kernel_distance(found, true, cubic_kernel if network.moments else gaussian_kernel)
    most = min(_MOST, len(found))
    precision, recall = precision_recall(true[:most], found[:most])
    precision_error, recall_error = precision_recall_errors(true[:most], found[:most])
    return Measures(n=len(found), frechet=frechet[0], frechet_error=frechet[1], kernel=kernel.value,
                    kernel_error=kernel.error, precision=precision, precision_error=precision_error, recall=recall,
                    recall_error=recall_error)


def near_training(items: Items, x: Tensor, features: Tensor, trained: Tensor) -> dict:
    """The nearest training item of each of a few samples, in the data's units and in features; the closest pairs.

    Arguments:
        x, features: (n, *event) samples and (n, D) their features.
        trained: (N, D) features of the training items.
    """
    found = nearest(x, items.train)
    closest = found.distance.argsort(stable=True)[:_NEIGHBOURS]
    return {"distance": found.distance, "nearest": found.index, "closest": closest, "closest_x": x[closest],
            "distance_features": nearest(features, trained).distance}


def copies(
    items: Items, real: Tensor, features: Tensor, trained: Tensor, drawn: dict, n: int
) -> tuple[dict, dict, dict]:
    """Memorisation of n samples, the closest pairs of samples and training items, and their pictures as arrays.

    Arguments:
        real, features: held-out items and their features.
        trained: features of the training items.
        drawn: the samples, from `all_samples`.
    """
    found = Nearest(drawn["distance"][:n], drawn["nearest"][:n])
    in_features = Nearest(drawn["distance_features"][:n], drawn["nearest"][:n])
    held, held_features = nearest(real, items.train), nearest(features, trained)
    closest = found.distance.argsort(stable=True)[:_NEIGHBOURS]
    # The samples that were kept: the closest of every part, and the first ones, which are all if n is small.
    numbers = torch.cat([drawn["closest"], torch.arange(len(drawn["x"]))]).tolist()
    kept = torch.cat([drawn["closest_x"], drawn["x"]])
    pairs = {"distance": found.distance[closest].tolist(), "index": found.index[closest].tolist()}
    arrays = {"neighbours_x": kept[[numbers.index(row) for row in closest.tolist()]],
              "neighbours_train": items.train[found.index[closest]]}
    return memorisation(found, held, (in_features, held_features)), pairs, arrays


def share_outside(outside: Tensor | None) -> dict | None:
    """The mean share of values outside the levels' range over samples (n,), and its standard error.

    Example:
        >>> share_outside(torch.tensor([0.0, 0.5, 0.0, 0.5]))["share"], share_outside(None)
        (0.25, None)
    """
    if outside is None or len(outside) < 2:
        return None
    n = len(outside)
    values = outside.double()
    return {"share": float(values.mean()), "error": float(values.std()) / math.sqrt(n), "n": n}


def sample_parts(state: EvaluationState, key: str, n: int, options: dict, measured: str) -> dict[int, dict]:
    """This process's parts of the first n samples by number; only what is shown or measured of them is kept.

    Arguments:
        options: sampling options in addition to those of the request.
        measured: `features`, `copies` (features and the nearest training items), or nothing.

    Returns for each part: the samples to show, index, cond and share outside the range; the measurements; how the
    first batch was made, the network evaluations and the seconds.
    """
    opened, size = state.opened, min(state.request.batch_size, 64)
    model, asked = opened.model, opened.sampling(n, **options)
    parts = parts_of(asked, size)
    shown = n if opened.spec.event_shape == (2,) else _SHOWN
    network, items = feature_network(state) if measured else (None, None)

    def compute(numbers: list[int]) -> Iterator[tuple[int, dict]]:
        networks = cost.networks_of(model.weights(weights_of(state.request.ema)))
        drawn = draw_parts(model, asked, [parts[k] for k in numbers], batch_size=size, progress=state.ranks.rank == 0)
        for number in numbers:
            start = time.monotonic()
            with cost.EvaluationCounter(*networks) as counter:
                samples = next(drawn)
            # A copy: a slice would hold, and be stored with, all samples of the part.
            found = {"x": samples.x[: max(0, shown - parts[number].start)].clone(), "cond": samples.cond,
                     "index": samples.index, "outside": samples.outside, "made": samples.made,
                     "rows": cost.rows_of(counter, samples.made), "seconds": time.monotonic() - start}
            if measured:
                found |= measure_samples(state, network, items, samples, measured == "copies")
            if measured == "copies":
                found["closest"] += parts[number].start
            yield number, found

    return state.cache.parts(key, state.ranks.share(range(len(parts))), compute)


def measure_samples(
    state: EvaluationState, network: FeatureNetwork, items: Items, samples: Samples, copied: bool
) -> dict:
    """Features of a few samples; with `copied` also their nearest training items and their classes."""
    if samples.x.shape[1:] != items.train.shape[1:]:
        raise InputError(f"samples of shape {tuple(samples.x.shape[1:])} cannot be compared with items of shape "
                         f"{tuple(items.train.shape[1:])}")
    found = {"features": network(samples.x)}
    if copied:
        found |= near_training(items, samples.x, found["features"], training_features(state, network, items))
        if samples.cond is not None and network.classify is not None:
            found["classes"] = network.classes(samples.x)
    return found


def training_features(state: EvaluationState, network: FeatureNetwork, items: Items) -> Tensor:
    """The features of the training items, (N, D), computed once for a table."""
    key = ("features of training items", network.sha256)
    if key not in state.shared:
        state.shared[key] = network(items.train)
    return state.shared[key]


def all_samples(parts: list[dict]) -> dict:
    """The parts of `sample_parts` as one."""
    first = parts[0]
    sums = {name: sum(part[name] for part in parts) for name in ("rows", "seconds")}
    whole = {name: joined([part[name] for part in parts]) for name in first if name not in ("made", *sums)}
    return {**whole, **sums, "made": first["made"]}


def feature_network(state: EvaluationState) -> tuple[FeatureNetwork, Items]:
    """The feature network for the data of a model, and the items that it is made from; made once for a table."""
    opened, shared = state.opened, state.shared
    key = ("network", id(opened.datamodule))
    if key not in shared:
        train, test = opened.datamodule.items("train"), opened.datamodule.items("test")
        items = Items(
            opened.datamodule.spec, train.x, test.x, train.cond, test.cond, state.hash_of("train"), state.cache)
        shared[key] = network_for(items, state.request.features), items
    return shared[key]


class FidelityStage:
    """Quality of the samples of a model, all drawn from one seed."""

    def __init__(self, state: EvaluationState):
        self.state = state

    def check(self) -> None:
        """Raise an InputError for a number of samples that cannot be compared, before anything is computed."""
        self._count()

    def _count(self, most: float = math.inf) -> tuple[int, str | None]:
        opened, request = self.state.opened, self.state.request
        if opened.spec.text is not None:
            return 0, None
        if opened.spec.encoding is not None:
            return _SHOWN, "no network of features is for text: compare models of text by their likelihood"
        if request.split == "train":
            return _SHOWN, "they are compared with held-out items: split=test or split=val"
        fewest, items = fewest_items(opened.spec, request.features), opened.items
        if request.samples == "auto":
            items = min(self._matched(items, fewest), most)
        return count_for(request.samples, items, fewest, request.force, request.features != "auto")

    def _matched(self, items: int, fewest: int) -> int:
        """The default number of samples: half of the held-out items, or `items` if these are fewer or it is too small.

        With half of them, as many others are left to compare on the scale. Too small is below `fewest`, or below 2/3
        of the evaluated items.
        """
        names = {"val", "test", self.state.request.split}
        half = sum(len(self.state.opened.datamodule.split(name)) for name in names) // 2
        return half if half >= fewest and 2 * items <= 3 * half < 3 * items else items

    def run(self) -> None:
        """Compare samples with held-out items in the features of one network; find copies of training items.

        For speech the synthesis of texts instead, and for a recogniser its transcripts.
        """
        if not self.state.opened.model.generates:
            self.state.report.transcription = transcription_of(self.state)
            return
        if self.state.opened.spec.text is not None:
            self.state.report.speech = speech_of(self.state)
            return
        n, reason = self._count()
        if reason is not None:
            self.state.report.fidelity = Skipped(reason)
            self._show(self._drawn(min(_SHOWN, n)))
            return
        network, items = feature_network(self.state)
        drawn = self._drawn(n, "copies")
        self._show(drawn if n >= _SHOWN else self._drawn(_SHOWN))  # further ones are shown, and compared with nothing
        real, other = self._real(n)
        scale = self._scale(network, items, real, other)

        def compute() -> dict:
            features, spec = network(real), self.state.opened.spec
            found = vars(measures_of(network, features, drawn["features"][:n]))
            trained = training_features(self.state, network, items)
            memory, pairs, arrays = copies(items, real, features, trained, drawn, n)
            if "classes" in drawn:  # with the accuracy of the classifier on real test items
                found["class_accuracy"] = class_accuracy(
                    drawn["classes"][:n], drawn["cond"][:n], spec.num_classes, spec.class_names)
                found["class_accuracy"] |= {"real": network.accuracy, "real_interval": network.interval}
            return {"found": found, "memorisation": memory, "pairs": pairs, "arrays": arrays}

        settings = {**self.state.sampling_settings(), "n": n, "network": network.sha256, "train": items.train_hash}
        done = self.state.once("fidelity", settings, compute)
        self.state.report.fidelity = Fidelity(
            network=network.described(), **done["found"], memorisation=done["memorisation"],
            likelihood_accuracy=self._likelihood_accuracy(),
        )
        self.state.report.neighbours, self.state.report.scale = Neighbours(**done["pairs"]), scale
        self.state.arrays |= done["arrays"]
        if "only" in network.note:
            self.state.report.warnings.append(f"feature network {network.name}: {network.note}")
        if done["memorisation"]["flagged"]:
            self.state.report.warnings.append(f"samples may be copies: {done['memorisation']['said']}")

    def _scale(self, network: FeatureNetwork, items: Items, real: Tensor, other: Tensor) -> Scale:
        """`scale_of`, computed once for the models of a table and cached."""
        shared, cache, data = self.state.shared, self.state.cache, self.state.report.data.item_hash
        parts = {"network": network.sha256, "n": len(real), "data": data, "train": items.train_hash,
                 "other": len(other)}
        name = ("scale", *parts.values())
        if name not in shared:
            key = key_of(stage="scale", **parts, code=code_hash())
            rows = cache.get(key) or cache.put(key, scale_of(network, items, real, other))
            shared[name] = Scale(network.described(), len(real), {what: Measures(**row) for what, row in rows.items()})
        return shared[name]

    def _real(self, n: int) -> tuple[Tensor, Tensor]:
        """The n held-out items that everything is compared with, and others, from the same split first."""
        items, split = self.state.opened.datamodule.items, self.state.request.split
        whole = items(split).x
        rows = chosen(self.state.opened.items, n, "real")
        left = torch.ones(len(whole), dtype=torch.bool)
        left[rows] = False
        other = whole[left]
        if len(other) < n:
            other = torch.cat([other, *(items(name).x for name in ("val", "test") if name != split)])
        return whole[rows], other

    def _drawn(self, n: int, measured: str = "", **options) -> dict:
        """The samples that are evaluated and shown: the same seed, numbers and classes for every model."""
        settings = {**self.state.sampling_settings(), **options, "n": n, "measured": measured}
        unguided = self.state.opened.sampler_options().get("guidance") == 0  # samples without a class
        if self.state.opened.model.num_classes is not None and not unguided:
            rows = chosen(self.state.opened.items, n, "real")  # other frequencies would count as a distance
            options["cond"] = classes_in_turn(self.state.opened.datamodule.items(self.state.request.split, rows).cond)
        if measured:
            network, items = feature_network(self.state)
            settings |= {"network": network.sha256, "train": items.train_hash}
        return self.state.once_by_all("samples", settings, all_samples, sample_parts, n, options, measured)

    def _show(self, samples: dict) -> None:
        spec = self.state.opened.spec
        shown = None if spec.event_shape == (2,) else _SHOWN
        kept = {f"samples_{key}": samples[key][:shown] for key in ("x", "cond", "index") if samples[key] is not None}
        self.state.arrays |= kept | ({} if spec.mel is None else sounds_by_class(samples["x"], samples["cond"], spec))
        self.state.report.samples = SampleFacts(
            x="samples_x", cond=None if samples["cond"] is None else "samples_cond", index="samples_index",
            made=samples["made"], outside=share_outside(samples["outside"]),
        )

    def _likelihood_accuracy(self) -> dict | None:
        """The accuracy of p(y|x) of a class-conditional flow."""
        model, spec = self.state.opened.model, self.state.opened.spec
        if not is_flow(model) or model.num_classes is None or is_of_noisy_data(model):
            return None
        batch = self.state.opened.evaluated(_LABELLED)
        if batch.cond is None:
            return None

        def compute() -> dict:
            options = {"weights": weights_of(self.state.request.ema), "seed": self.state.request.seed}
            here = batch.to(model.device)  # each class with the same noise

            def log_prob(labels: Tensor) -> Tensor:
                return model.log_likelihood(Batch(here.x, labels, here.mask, here.index), **options).nats

            found = class_posterior(log_prob, len(here), model.num_classes, None, model.device).argmax(1).cpu()
            return class_accuracy(found, batch.cond, model.num_classes, spec.class_names)

        done = self.state.once("classes", {"items": len(batch)}, compute)
        return {key: done[key] for key in ("accuracy", "interval", "n")}

    def sweeps(self) -> None:
        """Fidelity and cost at several numbers of steps, and at several temperatures."""
        for key in self.state.request.sweeps:
            n, reason = self._count(most=_SWEPT)
            if reason is not None:
                self.state.report.warnings.append(f"no sweep over {key}: {reason}")
                continue
            self._sweep(key, feature_network(self.state)[0], self._real(n)[0])

    def _sweep(self, key: str, network: FeatureNetwork, real: Tensor) -> None:
        model = self.state.opened.model
        refused = key == "temperature" and not takes_temperature(model, self.state.request.sampler)
        if refused or not model.takes(key):
            self.state.report.warnings.append(f"no sweep over {key}: {an(model.family)} has no such option")
            return
        values = _TEMPERATURES
        if key == "steps":
            most = getattr(model, "num_steps", None)
            values = getattr(model, "swept_steps", (*_STEPS, most) if most else (10, 40, 160))
            least = 2 if self.state.request.sampler in LEVEL_SAMPLERS else 1  # the first and the last noise level
            values = sorted({max(least, min(value, most or value)) for value in values})
        found, features = Sweep(key=key, sampler=None, n=len(real), values=list(values)), network(real)
        for value in values:
            drawn = self._drawn(len(real), "features", **{key: value})
            for name, measured in vars(measures_of(network, features, drawn["features"])).items():
                if name != "n":
                    getattr(found, name).append(measured)
            first = min(self.state.request.batch_size, 64, len(real))  # the batch that `made` describes
            evaluations = cost.evaluations_per_sample(model, drawn["made"], drawn["rows"] * first / len(real), first)
            found.evaluations.append(evaluations)
            found.samples_per_second.append(len(real) / drawn["seconds"])
            found.sampler = drawn["made"].get("sampler")
        self.state.report.sweeps.append(found)
