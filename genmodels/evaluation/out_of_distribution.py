"""Out-of-distribution data: the likelihood of another data set compared with that of the evaluated items.

A high likelihood does not mean that an item is like the training data: models of images often give images of other data
sets a higher one (Nalisnick et al. 2019, "Do deep generative models know what they don't know?"). Two more scores,
typicality and likelihood less complexity, correct for this in part.

The audit of speech finds the utterances of a split that fit it, or their own texts, least.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from functools import partial

import torch
from PIL import Image
from torch import Tensor

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, counted, hint, progress_bar
from genmodels.core.likelihood import Likelihood, unpacked
from genmodels.core.random import KeyedGenerator, seed_of
from genmodels.data.base import DataModule
from genmodels.data.loading import TensorData
from genmodels.evaluation.checkpoint import EvaluationState, Opened, chosen, fits
from genmodels.evaluation.likelihood import LikelihoodStage, Line, batches_of, in_one
from genmodels.evaluation.report import OtherData, Token, Utterance
from genmodels.evaluation.speech import suspects, transcription_of
from genmodels.evaluation.table import SCORES
from genmodels.models.checkpoint import weights_of
from genmodels.plots.images import alignments


def auroc(
    inside: Tensor, outside: Tensor, *, paired: bool = False, further: Tensor | float = 0.0
) -> tuple[float, float]:
    """The area under the ROC curve, P(inside > outside) + P(inside = outside)/2, and its standard error.

        A = mean_i a_i = mean_j b_j,   se^2 = var(a) / n + var(b) / m

    a_i is the share of `outside` below item i of `inside`, b_j that of `inside` above item j of `outside`. 1 separates
    the sets, 1/2 is chance, and below 1/2 `outside` has the larger values. Where no spread is seen, because a set has a
    single item or A is 0 or 1, two errors are 3 / min(n, m), at most 1: an event of that probability is missed in
    min(n, m) draws with probability 0.05.

    Arguments:
        paired: item i of `outside` was made from item i of `inside`; then se^2 = var(a + b) / n.
        further: (n,) added to a, what each item of `inside` changes besides, times n.

    Source: DeLong, DeLong and Clarke-Pearson 1988; Hanley and Lippman-Hand 1983 (rule of three).

    Example:
        >>> auroc(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 3.0]))[0]
        0.875
    """
    from scipy.stats import rankdata

    n, m = len(inside), len(outside)
    both, a, b = (torch.from_numpy(rankdata(values.double().numpy()))
                  for values in (torch.cat([inside, outside]), inside, outside))
    below, above = (both[:n] - a) / m, 1 - (both[n:] - b) / n
    least = min(0.5, 1.5 / min(n, m)) if min(n, m) == 1 or float(below.var() + above.var()) == 0 else 0.0
    parts = [below + further + above] if paired else [below + further, above]
    variance = 0.0 if min(n, m) == 1 else sum(float(part.var()) / len(part) for part in parts)
    return float(below.mean()), max(least, math.sqrt(variance))


def typicality(nats: Tensor, reference: Tensor | None = None) -> Tensor:
    """(N,) minus the distance of the log-likelihood of an item from the mean, -|log p(x) - mean log p|.

    Arguments:
        nats: log-likelihoods (N,).
        reference: those that are averaged; None for all other items of `nats`, of which there must be some.

    Source: Nalisnick et al. 2019, "Detecting out-of-distribution inputs to deep generative models using typicality".

    Example:
        >>> typicality(torch.tensor([-4.0, -1.0]), torch.tensor([-3.0, -5.0]))
        tensor([-0., -3.], dtype=torch.float64)
    """
    if reference is None and len(nats) == 1:
        raise InputError("the typicality of a single item needs others that it is compared with")
    nats = nats.double()
    mean = (nats.sum() - nats) / (len(nats) - 1) if reference is None else reference.double().mean()
    return -(nats - mean).abs()


def compressed_bits(x: Tensor, levels: int) -> Tensor:
    """(N,) length in bits of each item of integers after lossless compression: PNG for images, zlib for others.

    Images have one or three channels and at most 256 levels. The constant length of file headers does not matter to a
    ranking.

    Example:
        >>> flat, noise = torch.zeros(1, 1, 16, 16).byte(), torch.randint(0, 256, (1, 1, 16, 16)).byte()
        >>> bool(compressed_bits(flat, 256) < compressed_bits(noise, 256))
        True
    """
    image = x.dim() == 4 and x.shape[1] in (1, 3) and levels <= 256
    lengths = []
    for item in x.cpu().to(torch.uint8 if levels <= 256 else torch.int64):  # the same code for all sets of these levels
        if image:
            file = io.BytesIO()
            array = item.permute(1, 2, 0).squeeze(-1).contiguous().numpy()
            Image.fromarray(array).save(file, "PNG", optimize=True)
            lengths.append(file.tell())
        else:
            lengths.append(len(zlib.compress(item.contiguous().numpy().tobytes(), 9)))
    return 8 * torch.tensor(lengths, dtype=torch.float64)


def auroc_of_typicality(inside: Tensor, outside: Tensor, paired: bool = False) -> tuple[float, float]:
    """`auroc` of the typicality by log-likelihoods, with the error of the mean of `inside`, which both share.

    Item i moves the mean m by (l_i - m)/n; the slope dA/dm is taken over one standard error of m on both sides.

    Example:
        >>> auroc_of_typicality(torch.linspace(-3.0, -1.0, 9), torch.linspace(-4.0, -3.5, 5))[0]
        1.0
    """
    inside, outside = inside.double(), outside.double()
    mean, step = inside.mean(), inside.std() / math.sqrt(len(inside))
    low, high = (auroc(typicality(inside, mean + side), typicality(outside, mean + side))[0] for side in (-step, step))
    slope = (high - low) / (2 * float(step)) if step > 0 else 0.0
    return auroc(typicality(inside), typicality(outside, inside), paired=paired, further=slope * (inside - mean))


def less_complexity(nats: Tensor, x: Tensor, levels: int) -> Tensor:
    """(N,) log2 p(x) + L(x), L the bits of a lossless code: simple images are likely under any model of images.

    Source: Serra et al. 2020, "Input complexity and out-of-distribution detection with likelihood-based generative
    models", whose score is its negative.

    Example:
        >>> x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
        >>> difference = less_complexity(torch.tensor([0.0, 2.0]), x, 17).diff() * math.log(2)
        >>> round(float(difference), 6)
        2.0
    """
    return nats.double() / math.log(2) + compressed_bits(x, levels)


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
            if self.source.spec.text is not None or any(batch.mask is not None for batch in batches):
                raise InputError(f"ood={self.how} is for items of one size without texts, unlike those of "
                                 f"{self.source.spec.name}: name another data set")
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
        InputError: for an unknown name, or data that are not there.
    """
    import yaml
    from omegaconf import MISSING

    from genmodels.core.files import CONFIG_DIR
    from genmodels.models.build import build

    if name in ALTERATIONS:
        return Altered(source, name).prepare()
    known = sorted(path.stem for path in (CONFIG_DIR / "data").glob("*.yaml"))
    if name not in known:
        names = [*ALTERATIONS, *known]
        raise InputError(f"ood={name} is no data set{hint(name, names)} (there are {', '.join(names)})")
    node = yaml.safe_load((CONFIG_DIR / "data" / f"{name}.yaml").read_text(encoding="utf-8")) | overrides
    missing = [f"ood_data.{key}=..." for key, value in node.items() if value == MISSING]
    if missing:
        raise InputError(f"ood={name} needs {' '.join(missing)}")
    try:
        return build(node, trust=trust).prepare()
    except InputError as error:
        raise InputError(re.sub(r"\bdata\.", "ood_data.", str(error))) from None  # the options' names here


def sentence(name: str, area: float, error: float, kind: str, split: str = "test") -> str:
    """The result in words.

    Example:
        >>> sentence("digits", 0.12, 0.01, "lower_bound")
        'digits is found likelier than the test items (AUROC 0.120 +- 0.010): likelihood does not separate them'
    """
    figure = f"(AUROC {area:.3f} +- {error:.3f})"
    constant = ", by values that lack their constant, which an order does not need" if kind == "unnormalised" else ""
    if area + 2 * error < 0.5:
        return f"{name} is found likelier than the {split} items {figure}: likelihood does not separate them{constant}"
    if area - 2 * error > 0.5:
        return f"{name} is found less likely than the {split} items {figure}{constant}"
    return f"likelihood does not tell {name} from the {split} items {figure}{constant}"


def other_of(state: EvaluationState, name: str) -> DataModule:
    """Another data set of the request, prepared once for all models of a table.

    Raises:
        InputError: for an unknown name, or data that do not fit the model.
    """
    key = ("ood", name, id(state.opened.datamodule))
    if key not in state.shared:
        state.shared[key] = other_data(name, state.request.ood_data, state.opened.datamodule, state.request.trust)
    try:
        fits(state.opened.model, state.shared[key].spec)
    except InputError as error:
        raise InputError(f"ood={name}: {error}") from error
    return state.shared[key]


def other_parts(state: EvaluationState, key: str, line: Line, name: str, rows: Tensor) -> dict[int, dict]:
    """The likelihoods of this process's batches of another data set, by number of the batch."""
    return batches_of(state, key, line, other_of(state, name), rows, f", {name}")


class OtherDataStage:
    """Other data sets by the first likelihood of a model: histograms and AUROC."""

    def __init__(self, state: EvaluationState, likelihood: LikelihoodStage):
        self.state, self.likelihood = state, likelihood

    def check(self) -> None:
        """Open them: one that is missing or does not fit is an error before the likelihoods, which may take long."""
        for name in self.state.request.ood:
            other_of(self.state, name)

    def run(self) -> None:
        """The likelihood of each of them."""
        line, _ = self.likelihood.of_first_line()
        split, arrays = self.state.request.split, self.state.arrays
        for number, name in enumerate(self.state.request.ood):
            other = other_of(self.state, name)
            total, count = len(other.split(split)), self.state.opened.items
            # Those made from the evaluated items, or a sample, since a folder may be in the order of its classes.
            rows = torch.arange(count) if name in ALTERATIONS else chosen(total, count, "ood")
            settings = {"name": name, "items": self.state.hash_of(split, rows, other), **line.settings}
            found = unpacked(self.state.once_by_all(
                "ood", settings, partial(in_one, rows), other_parts, line, name, rows))
            self.state.report.ood.append(self._entry(name, number, found, other))
            order = found.nats.argsort(descending=True)[:8]
            arrays[f"ood_{number}_x"] = other.items(split, found.index[order]).x

    def _entry(self, name: str, number: int, found: Likelihood, other: DataModule) -> OtherData:
        spec, (line, own) = self.state.opened.spec, self.likelihood.of_first_line()
        sizes = torch.cat([own.dims, found.dims])
        of_dims = spec.levels is None and bool((sizes != sizes[0]).any())  # longer sequences have larger densities
        inside, outside = (one.nats / one.dims if of_dims else one.nats for one in (own, found))
        unit = spec.unit if spec.levels else "nats_per_dim" if of_dims else "nats"
        unit = f"unnormalised {'nats/dim' if of_dims else 'nats'}" if found.kind == "unnormalised" else unit
        self.state.arrays |= {f"ood_{number}_nats": outside} | ({"nats_per_dim_0": inside} if of_dims else {})
        entry = {"name": name, "overrides": self.state.request.ood_data, "n": len(found), "kind": found.kind,
                 "label": line.label, "values": f"ood_{number}_nats",
                 "inside": "nats_per_dim_0" if of_dims else "nats_0", "value": unit}
        if not bool(torch.isfinite(inside).all() and torch.isfinite(outside).all()):
            reason = found.made.get("reason", "values that are not finite")
            return OtherData(**entry, auroc=None, reason=reason, said=f"{name}: {reason}")
        paired = name in ALTERATIONS
        area, error = auroc(inside, outside, paired=paired)
        mean_in, mean_out = (one.mean_bits_per_dim() if unit.startswith("bits") else one.mean_nll_per_dim() if of_dims
                             else -one.mean_nats() for one in (own, found))
        scores = {}
        if len(inside) > 1:
            scores["typicality"] = auroc_of_typicality(inside, outside, paired)
        if spec.levels and spec.mel is None:
            scores["less_complexity"] = auroc(*(
                less_complexity(one.nats, data.items(self.state.request.split, one.index).x, spec.levels)
                for one, data in ((own, self.state.opened.datamodule), (found, other))), paired=paired)
        others = [f"{SCORES[key]} {value:.3f} +- {se:.3f}" for key, (value, se) in scores.items()]
        others += [] if len(inside) > 1 else ["no typicality, which needs two items"]
        others += ["all by likelihood per dimension, since lengths differ"] if of_dims else []
        total, split = len(other.split(self.state.request.split)), self.state.request.split
        drawn = f"{len(found):,} of {total:,} items, chosen at random"
        whole = f"all {counted(total, 'item')} of its {split} split"
        others += [] if paired else [drawn if len(found) < total else whole]
        said = "; ".join([sentence(name, area, error, found.kind, split), *others])
        return OtherData(**entry, auroc=area, se=error, mean_in=mean_in, mean_out=mean_out, scores=scores, said=said)


_DRAWN = 3  # alignments in the picture
_TOGETHER = 8  # utterances in a batch
_AGAINST = 8  # texts of other utterances that each text is compared with


def audit(state: EvaluationState, likelihood: Likelihood) -> list[Utterance]:
    """The evaluated utterances, ordered by log-likelihood per dimension, the lowest first.

    Arguments:
        likelihood: of these utterances, in index order.

    `z` compares an utterance with those of its length (`against_length`); `evidence`, of models with alignments, its
    text with those of other utterances, in nats per frame. A recogniser ranks by log-likelihood per character, and
    adds its transcripts.

    Raises:
        InputError: for data without texts.
    """
    opened = state.opened
    require_texts(opened)
    nll = -likelihood.nats.double() / likelihood.dims.double()
    heard = None if opened.model.generates else transcription_of(state).heard
    frames = likelihood.dims.double() / (opened.spec.event_shape[0] if heard is None else 1)
    scores = against_length(nll, frames)
    aligned = None
    if heard is None:
        aligned = state.once("audit", {"against": _AGAINST}, lambda: {"found": _aligned(opened)})["found"]
    items = getattr(opened.datamodule.split(opened.request.split), "items", None)
    rows = []
    for rank, k in enumerate(nll.nan_to_num(nan=torch.inf).argsort(descending=True, stable=True).tolist(), 1):
        rows.append(Utterance(
            rank=rank, index=int(likelihood.index[k]), frames=int(frames[k]), nats_per_dim=float(nll[k]),
            z=None if scores is None else float(scores[k]),
            **({} if items is None else {"name": items[k].name, "text": items[k].text}),
            **({} if heard is None else {"heard": heard[k]}),
            **({} if aligned is None else aligned[k] | {"longest": Token(**aligned[k]["longest"])}),
        ))
    if any(row.evidence is not None for row in rows):
        for rank, row in enumerate(suspects(rows), 1):
            row.rank_by_evidence = rank
    return rows


def require_texts(opened: Opened) -> None:
    """Raise an InputError for data without texts."""
    if opened.spec.text is None:
        raise InputError(f"audit: {opened.spec.name} has no texts that could be wrong")


def against_length(nll: Tensor, frames: Tensor) -> Tensor | None:
    """Residuals of values from their regression on log length, in standard deviations.

        z_k = (v_k - a - b log T_k)/s,    a, b by least squares,    s^2 = sum_k (v_k - a - b log T_k)^2/(n - 2)

    Values that are not finite are left out of the fit. Short clips have relatively more silence, and differ from long
    ones even with correct transcripts. For utterances of equal length b is 0.

    Shapes: `nll (n,)`, `frames (n,)`; the scores are `(n,)`, or None for fewer than three finite values, or values that
    all lie on a line.

    Example:
        >>> against_length(torch.tensor([1.0, 1.0, 4.0, 1.0, 1.0]).double(), torch.full((5,), 9.0)).round(decimals=2)
        tensor([-0.3900, -0.3900,  1.5500, -0.3900, -0.3900], dtype=torch.float64)
    """
    usable = nll.isfinite()
    x, y = frames.double().log(), nll.double()
    if int(usable.sum()) < 3:
        return None
    middle, mean = x[usable].mean(), y[usable].mean()
    spread = (x[usable] - middle).square().sum()
    slope = ((x - middle) * (y - mean))[usable].sum() / spread if float(spread) > 1e-12 else 0.0
    rest = y - mean - slope * (x - middle)
    std = (rest[usable].square().sum() / (int(usable.sum()) - 2)).sqrt()
    return rest / std if float(std) > 1e-12 else None


def _aligned(opened: Opened) -> list[dict] | None:
    """The tokens of each utterance, their durations, and the evidence for its text; None without alignments."""
    if not hasattr(opened.model, "aligned"):
        return None
    model, request, found, texts = opened.model, opened.request, {}, {}

    def batches(what: str):
        loader = opened.datamodule.loader(request.split, _TOGETHER, torch.arange(opened.items))
        return progress_bar(loader, desc=f"{model.family} {what}", unit="batch")

    for batch in batches(f"aligns {request.split}"):
        aligned = model.aligned(batch.to(model.device), weights_of(request.ema), request.seed)
        rows = zip(batch.index.tolist(), batch.cond.tokens, batch.cond.mask[:, 0], batch.mask.sum((1, 2)).tolist(),
                   aligned.durations.cpu(), strict=True)
        for index, tokens, valid, frames, durations in rows:
            texts[index] = tokens[valid].tolist(), frames
            symbols, durations = [opened.spec.text["symbols"][t] for t in texts[index][0]], durations[valid].tolist()
            longest = max(range(len(durations)), key=durations.__getitem__)
            found[index] = {"tokens": symbols, "durations": durations, "longest": {
                "token": symbols[longest], "position": longest, "frames": durations[longest]}}
    for batch in batches("tries other texts"):
        others = [neighbours(texts, index) for index in batch.index.tolist()]
        rows = [k for k, other in enumerate(others) if other]
        if rows:
            part = batch.rows(torch.tensor(rows)).to(model.device)
            values = model.evidence(part, [others[k] for k in rows], weights_of(request.ema), request.seed)
            for index, value in zip(part.index.tolist(), values.tolist(), strict=True):
                found[index]["evidence"] = value
    return [found[index] for index in sorted(found)]


def neighbours(texts: dict[int, tuple[list[int], int]], index: int, count: int = _AGAINST) -> list[list[int]]:
    """The texts of other utterances nearest in length to that of one, with no more tokens than it has frames.

    Arguments:
        texts: (tokens, frames) of every utterance.

    Example:
        >>> neighbours({0: ([5, 6], 9), 1: ([5, 6], 9), 2: ([7], 9), 3: ([1] * 10, 30), 4: ([8, 9, 9], 9)}, 0)
        [[7], [8, 9, 9]]
    """
    own, frames = texts[index]
    others = {tuple(tokens) for tokens, _ in texts.values() if len(tokens) <= frames} - {tuple(own)}
    return [list(text) for text in sorted(others, key=lambda text: (abs(len(text) - len(own)), text))[:count]]


@torch.no_grad()
def picture_of_audit(opened: Opened, rows: list[Utterance]) -> Image.Image | None:
    """The alignments of the first `suspects`; None for a model without alignments."""
    if not hasattr(opened.model, "posterior"):
        return None
    index, request = torch.tensor([row.index for row in suspects(rows)[:_DRAWN]]), opened.request
    batch = opened.datamodule.items(request.split, index).to(opened.model.device)
    return alignments(opened.model.posterior(batch, weights_of(request.ema), request.seed), batch, opened.spec)
