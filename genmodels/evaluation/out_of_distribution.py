"""Out-of-distribution data: the likelihood of another data set compared with that of the evaluated items.

A high likelihood does not mean that an item is like the training data: models of images often give images of other data
sets a higher one (Nalisnick et al. 2019, "Do deep generative models know what they don't know?"). Two more scores,
typicality and likelihood less complexity, correct for this in part.
"""

from __future__ import annotations

import io
import math
import zlib
from functools import partial

import torch
from PIL import Image
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, nearest
from genmodels.core.likelihood import Likelihood, unpacked
from genmodels.core.random import KeyedGenerator, seed_of
from genmodels.data.base import DataModule
from genmodels.data.loading import TensorData
from genmodels.evaluation.checkpoint import Frame, fits
from genmodels.evaluation.likelihood import LikelihoodStage, Line, batches_of, in_one
from genmodels.evaluation.report import OtherData
from genmodels.evaluation.table import SCORES


def auroc(inside: Tensor, outside: Tensor) -> tuple[float, float]:
    """The area under the ROC curve, P(inside > outside) + P(inside = outside)/2, and its standard error.

        A = mean_i a_i = mean_j b_j,   se^2 = var(a) / n + var(b) / m

    a_i is the share of `outside` below item i of `inside`, b_j that of `inside` above item j of `outside`. 1 separates
    the sets, 1/2 is chance, and below 1/2 `outside` has the larger values.

    Source: DeLong, DeLong and Clarke-Pearson 1988.

    Example:
        >>> auroc(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 3.0]))[0]
        0.875
    """
    from scipy.stats import rankdata

    n, m = len(inside), len(outside)
    both, a, b = (torch.from_numpy(rankdata(values.double().numpy()))
                  for values in (torch.cat([inside, outside]), inside, outside))
    below, above = (both[:n] - a) / m, 1 - (both[n:] - b) / n
    variance = sum(float(share.var()) / len(share) for share in (below, above) if len(share) > 1)
    return float(below.mean()), math.sqrt(variance)


def typicality(nats: Tensor, reference: Tensor | None = None) -> Tensor:
    """(N,) minus the distance of the log-likelihood of an item from the mean, -|log p(x) - mean log p|.

    Arguments:
        nats: log-likelihoods (N,).
        reference: those that are averaged; None for all other items of `nats`.

    Source: Nalisnick et al. 2019, "Detecting out-of-distribution inputs to deep generative models using typicality".

    Example:
        >>> typicality(torch.tensor([-4.0, -1.0]), torch.tensor([-3.0, -5.0]))
        tensor([-0., -3.], dtype=torch.float64)
    """
    nats = nats.double()
    mean = (nats.sum() - nats) / (len(nats) - 1) if reference is None else reference.double().mean()
    return -(nats - mean).abs()


def compressed_bits(x: Tensor) -> Tensor:
    """(N,) length in bits of each item of integers after lossless compression: PNG for images, zlib for others.

    Images have one or three channels and at most 256 levels. The constant length of file headers does not matter to a
    ranking.

    Example:
        >>> flat, noise = torch.zeros(1, 1, 16, 16).byte(), torch.randint(0, 256, (1, 1, 16, 16)).byte()
        >>> bool(compressed_bits(flat) < compressed_bits(noise))
        True
    """
    image = x.dim() == 4 and x.shape[1] in (1, 3) and int(x.max()) < 256
    lengths = []
    for item in x.cpu():
        if image:
            file = io.BytesIO()
            array = item.to(torch.uint8).permute(1, 2, 0).squeeze(-1).contiguous().numpy()
            Image.fromarray(array).save(file, "PNG", optimize=True)
            lengths.append(file.tell())
        else:
            lengths.append(len(zlib.compress(item.contiguous().numpy().tobytes(), 9)))
    return 8 * torch.tensor(lengths, dtype=torch.float64)


def less_complexity(nats: Tensor, x: Tensor) -> Tensor:
    """(N,) log2 p(x) + L(x), L the bits of a lossless code: simple images are likely under any model of images.

    Source: Serra et al. 2020, "Input complexity and out-of-distribution detection with likelihood-based generative
    models", whose score is its negative.

    Example:
        >>> x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
        >>> difference = less_complexity(torch.tensor([0.0, 2.0]), x).diff() * math.log(2)
        >>> round(float(difference), 6)
        2.0
    """
    return nats.double() / math.log(2) + compressed_bits(x)


class Altered(DataModule):
    """Items made from those of another data set, with its DataSpec: `noise` or `shuffled`.

    Arguments:
        source: the prepared data set.
        how: `noise` draws all values independently, uniform over the levels, or Gaussian with the mean and standard
            deviation of each coordinate of the split; `shuffled` permutes the values of each item.
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
    """The data set of that name: `noise`, `shuffled`, or one of configs/data with `overrides`.

    Raises:
        InputError: for an unknown name.
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
    """The result in words.

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
        InputError: for an unknown name, or data that do not fit the model.
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
    """Other data sets by the first likelihood of a model: histograms and AUROC."""

    def __init__(self, frame: Frame, likelihood: LikelihoodStage):
        self.frame, self.likelihood = frame, likelihood

    def check(self) -> None:
        """Open them: one that is missing or does not fit is an error before the likelihoods, which may take long."""
        for name in self.frame.request.ood:
            other_of(self.frame, name)

    def run(self) -> None:
        """The likelihood of each of them."""
        line, _ = self.likelihood.of_first_line()
        split, arrays = self.frame.request.split, self.frame.arrays
        for number, name in enumerate(self.frame.request.ood):
            other = other_of(self.frame, name)
            count = min(self.frame.opened.items, len(other.split(split)))
            settings = {"name": name, "items": self.frame.hash_of(split, count, other), **line.options}
            join = partial(in_one, count)
            found = unpacked(self.frame.once_by_all("ood", settings, join, other_parts, line, name, count))
            self.frame.report.ood.append(self._entry(name, number, found, other))
            order = found.nats.argsort(descending=True)[:8]
            arrays[f"ood_{number}_nats"] = found.nats
            arrays[f"ood_{number}_x"] = next(iter(other.loader(split, 8, order))).x

    def _entry(self, name: str, number: int, found: Likelihood, other: DataModule) -> OtherData:
        spec, (line, own) = self.frame.opened.spec, self.likelihood.of_first_line()
        inside, outside = own.nats, found.nats
        unit = "unnormalised nats" if found.kind == "unnormalised" else spec.unit if spec.levels else "nats"
        entry = {"name": name, "overrides": self.frame.request.ood_data, "n": len(found), "kind": found.kind,
                 "label": line.label, "values": f"ood_{number}_nats", "inside": "nats_0", "value": unit}
        if not bool(torch.isfinite(inside).all() and torch.isfinite(outside).all()):
            reason = found.made.get("reason", "values that are not finite")
            return OtherData(**entry, auroc=None, reason=reason, said=f"{name}: {reason}")
        area, error = auroc(inside, outside)
        mean_in, mean_out = (one.mean_bits_per_dim() if unit.startswith("bits") else -one.mean_nats()
                             for one in (own, found))
        scores = {"typicality": auroc(typicality(inside), typicality(outside, inside))}
        if spec.levels and spec.mel is None:
            own_items = self._items(self.frame.opened.datamodule, len(inside))
            scores["less_complexity"] = auroc(
                less_complexity(inside, own_items), less_complexity(outside, self._items(other, len(outside))))
        others = [f"{SCORES[key]} {value:.3f} +- {se:.3f}" for key, (value, se) in scores.items()]
        said = "; ".join([sentence(name, area, error, found.kind), *others])
        return OtherData(**entry, auroc=area, se=error, mean_in=mean_in, mean_out=mean_out, scores=scores, said=said)

    def _items(self, data: DataModule, count: int) -> Tensor:
        """The first `count` items of the split."""
        loader = data.loader(self.frame.request.split, 4096, torch.arange(count))
        return torch.cat([batch.x for batch in loader])
