"""Other data under the same model: which of the two sets does it find likelier?

A high likelihood does not mean that an item is like the training data: models of one set of pictures give many others
more (Nalisnick et al. 2019, "Do deep generative models know what they don't know?"). The figure makes that visible.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, nearest
from genmodels.core.likelihood import Likelihood, unpacked
from genmodels.core.random import KeyedGenerator, seed_of
from genmodels.data.base import DataModule
from genmodels.data.loading import TensorData
from genmodels.evaluation.checkpoint import Frame, fits, item_hash
from genmodels.evaluation.likelihood import LikelihoodStage, Line, batches_of, in_one
from genmodels.evaluation.report import OtherData


def auroc(inside: Tensor, outside: Tensor) -> tuple[float, float]:
    """The probability that an item of `inside` is given more than one of `outside`, ties half; and its standard error.

    1 tells the two apart by their likelihoods, 1/2 is a guess, below 1/2 the other set is found likelier.

    Source: Hanley and McNeil 1982.

    Example:
        >>> auroc(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 3.0]))[0]
        0.875
    """
    both = torch.cat([inside, outside]).double()
    _, which, counts = both.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[which]
    n, m = len(inside), len(outside)
    area = (float(ranks[:n].sum()) - n * (n + 1) / 2) / (n * m)
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (n - 1) * (one - area**2) + (m - 1) * (two - area**2)) / (n * m)
    return area, math.sqrt(max(0.0, variance))


class Altered(DataModule):
    """Items made from those of another data set, with its DataSpec: `noise` or `shuffled`.

    Arguments:
        source: the prepared data set.
        how: `noise` draws every value alike, uniform over the levels or normal with the mean and standard deviation of
            each coordinate of the training items; `shuffled` permutes the values of each item.
        seed: seed of the noise.
    """

    name = "altered"

    def __init__(self, source: DataModule, how: str, *, seed: int = 0):
        super().__init__(batch_size=64, num_workers=0, seed=seed)
        self.source, self.how = source, how

    def load(self) -> tuple[DataSpec, dict]:
        """The altered items of each split, with the labels of those they were made from."""
        splits = {}
        for split in ("train", "val", "test"):
            batches = list(self.source.loader(split, 4096))
            x = torch.cat([batch.x for batch in batches])
            labels = None if batches[0].cond is None else torch.cat([batch.cond for batch in batches])
            noise = KeyedGenerator(seed_of(self.seed, split), torch.arange(len(x)), self.how)
            splits[split] = TensorData(ALTERATIONS[self.how](x, self.source.spec, noise), labels)
        return self.source.spec.with_name(f"{self.source.spec.name}, {self.how}"), splits


def _noise(x: Tensor, spec: DataSpec, noise: KeyedGenerator) -> Tensor:
    if spec.levels is not None:
        return (noise.uniform(x.shape) * spec.levels).long().clamp(max=spec.levels - 1).to(x.dtype)
    wide = x.double()
    return (wide.mean(0) + wide.std(0) * noise.normal(x.shape, dtype=torch.float64)).to(x.dtype)


def _shuffled(x: Tensor, spec: DataSpec, noise: KeyedGenerator) -> Tensor:
    order = noise.uniform((len(x), spec.dims), dtype=torch.float64).argsort(1)
    return x.flatten(1).gather(1, order).view_as(x)


#: Sets that are made from any data set, without a download.
ALTERATIONS = {"noise": _noise, "shuffled": _shuffled}


def other_data(name: str, overrides: dict, source: DataModule, trust: list[str]) -> DataModule:
    """The data set of that name: `noise`, `shuffled`, or one of configs/data, with options of its own.

    Raises:
        InputError: for a name that does not exist.
    """
    import yaml

    from genmodels.core.files import CONFIG_DIR
    from genmodels.models.build import build

    if name in ALTERATIONS:
        return Altered(source, name).prepare()
    known = sorted(path.stem for path in (CONFIG_DIR / "data").glob("*.yaml"))
    if name not in known:
        near = nearest(name, [*ALTERATIONS, *known])
        hint = f": did you mean {near!r}?" if near else ""
        raise InputError(f"ood={name} is no data set{hint} (there are {', '.join([*ALTERATIONS, *known])})")
    node = yaml.safe_load((CONFIG_DIR / "data" / f"{name}.yaml").read_text(encoding="utf-8"))
    return build({**node, **overrides}, trust=trust).prepare()


def sentence(name: str, area: float, error: float, kind: str) -> str:
    """The finding in words.

    Example:
        >>> sentence("digits", 0.12, 0.01, "lower_bound")
        'digits is found likelier than the test items (AUROC 0.120 +- 0.010): likelihood does not separate them'
    """
    figure = f"(AUROC {area:.3f} +- {error:.3f})"
    constant = ", by values that lack their constant, which an order does not need" if kind == "unnormalised" else ""
    if area + 2 * error < 0.5:
        return f"{name} is found likelier than the test items {figure}: likelihood does not separate them{constant}"
    if area - 2 * error > 0.5:
        return f"{name} is found less likely than the test items {figure}{constant}"
    return f"{name} is found as likely as the test items {figure}{constant}"


def other_of(frame: Frame, name: str) -> DataModule:
    """Another data set of the request, prepared once for all models of a table.

    Raises:
        InputError: for a name that does not exist, or data that do not fit the model.
    """
    key = ("ood", name, id(frame.opened.datamodule))
    if key not in frame.shared:
        frame.shared[key] = other_data(name, frame.request.ood_data, frame.opened.datamodule, frame.request.trust)
    try:
        fits(frame.opened.model, frame.shared[key].spec)
    except InputError as error:
        raise InputError(f"ood={name}: {error}") from error
    return frame.shared[key]


def other_parts(frame: Frame, key: str, line: Line, name: str, count: int) -> dict[int, dict]:
    """This process's batches of another data set, by number."""
    return batches_of(frame, key, line, other_of(frame, name), count, f", {name}")


class OtherDataStage:
    """Other data sets under the first line of a model: histograms and AUROC."""

    def __init__(self, frame: Frame, likelihood: LikelihoodStage):
        self.frame, self.likelihood = frame, likelihood

    def run(self) -> None:
        """The likelihood of each of them."""
        line, _ = self.likelihood.of_first_line()
        spec = self.frame.opened.spec
        for number, name in enumerate(self.frame.request.ood):
            other = other_of(self.frame, name)
            count = min(self.frame.opened.items, len(other.split(self.frame.request.split)))
            digest = self._other_hash(name, other, count)
            settings = {"name": name, "items": digest, **line.options}
            join = partial(in_one, count)
            found = unpacked(self.frame.once_by_all("ood", settings, join, other_parts, line, name, count))
            self.frame.report.ood.append(self._entry(name, number, found, count, spec))
            order = found.nats.argsort(descending=True)[:8]
            self.frame.arrays[f"ood_{number}_nats"] = found.nats
            self.frame.arrays[f"ood_{number}_x"] = next(iter(other.loader(self.frame.request.split, 8, order))).x

    def _other_hash(self, name: str, other: DataModule, count: int) -> str:
        key = ("hash", id(other), count)
        if key not in self.frame.shared:
            self.frame.shared[key] = item_hash(other, self.frame.request.split, count)
        return self.frame.shared[key]

    def _entry(self, name: str, number: int, found: Likelihood, count: int, spec: DataSpec) -> OtherData:
        line, own = self.likelihood.of_first_line()
        inside, outside = own.nats, found.nats
        entry = {"name": name, "overrides": self.frame.request.ood_data, "n": count, "kind": found.kind,
                 "label": line.label, "values": f"ood_{number}_nats", "inside": "nats_0"}
        finite = bool(torch.isfinite(inside).all() and torch.isfinite(outside).all())
        unit = "unnormalised nats" if found.kind == "unnormalised" else spec.unit if spec.levels else "nats"
        if not finite:
            reason = found.made.get("reason", "values that are not finite")
            return OtherData(**entry, value=unit, auroc=None, reason=reason, said=f"{name}: {reason}")
        area, error = auroc(inside, outside)
        means = {}
        for key, likelihood in (("mean_in", own), ("mean_out", found)):
            bits = unit.startswith("bits")
            means[key] = likelihood.mean_bits_per_dim() if bits else -likelihood.mean_nats()
        return OtherData(**entry, value=unit, auroc=area, se=error, **means,
                         said=sentence(name, area, error, found.kind))
