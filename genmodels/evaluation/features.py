"""A cache of results by the hash of what they depend on, and the feature networks in which samples are compared."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, progress_bar
from genmodels.core.files import write_whole
from genmodels.core.random import seed_of
from genmodels.models.build import USED_PACKAGES

#: Raised when the layout of stored results changes.
FORMAT = 1


def code_hash() -> str:
    """A hash of the sources of genmodels and of the trusted packages in use: results of other code are not reused."""
    return " ".join([_own_hash(), *map(_sources_hash, sorted({*USED_PACKAGES} - {"genmodels"}))])


@functools.cache
def _own_hash() -> str:
    return _sources_hash("genmodels")


_OF_NO_FILE = secrets.token_hex(16)  # of classes of a notebook, whose code cannot be read


def _sources_hash(package: str) -> str:
    module = sys.modules.get(package)  # None: removed since, as by a test or in a notebook
    digest = hashlib.sha256()
    for root in map(Path, getattr(module, "__path__", [getattr(module, "__file__", None) or "no file"])):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes() if path.is_file() else _OF_NO_FILE.encode())
    return digest.hexdigest()


def device_of(device: torch.device, stage: str) -> str:
    """The device by its model; for stages whose results contain times also the name of the computer."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    timed = stage in ("cost", "samples", "speech", "spoken_at", "transcription")
    return f"{name} of {platform.node()}" if timed else name


def key_of(**parts) -> str:
    """The name of a result: a hash of plain values.

    Example:
        >>> key_of(stage="cost", seed=0) == key_of(seed=0, stage="cost") != key_of(stage="cost", seed=1)
        True
    """
    text = json.dumps({**parts, "format": FORMAT}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """Results in a folder, one file each, written atomically; unreadable files are ignored.

    Arguments:
        folder: None keeps nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = Cache(Path(folder))
        ...     first = cache.get("a"), cache.put("a", {"x": torch.ones(2)})["x"].tolist()
        ...     first, cache.get("a")["x"].tolist(), Cache(None).get("a")
        ((None, [1.0, 1.0]), [1.0, 1.0], None)
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    def get(self, key: str):
        """The result of that name, or None."""
        if self.folder is None or not (path := self.folder / f"{key}.pt").is_file():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # cut by a full disk, or written by something else: computed anew and overwritten
            return None

    def put(self, key: str, value):
        """Store a result of tensors and plain types, and return it; a warning where it cannot be stored."""
        try:
            if self.folder is not None:
                write_whole(self.folder / f"{key}.pt", lambda file: torch.save(value, file))
        except RunError as error:
            warnings.warn(f"{error}; going on without a cache; set GENMODELS_CACHE to a folder that can be written",
                          stacklevel=2)
            self.folder = None
        return value

    def parts(self, key: str, own: Sequence[int], compute: Callable[[list[int]], Iterable[tuple[int, Any]]]) -> dict:
        """The results of a stage's parts by number: those that are stored, and those that `compute` yields.

        Each is stored as soon as it is finished, so that it is not computed again after a kill.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     cache = Cache(Path(folder))
            ...     _ = cache.put("a_1", 0.5)
            ...     cache.parts("a", [0, 1, 2], lambda missing: [(number, 2.0 * number) for number in missing])
            {0: 0.0, 1: 0.5, 2: 4.0}
        """
        kept = {number: self.get(f"{key}_{number}") for number in own}
        missing = [number for number in own if kept[number] is None]
        return kept | {number: self.put(f"{key}_{number}", value) for number, value in compute(missing)}

    def forget(self, key: str) -> None:
        """Remove the parts of a finished stage."""
        for path in [] if self.folder is None else self.folder.glob(f"{key}_*.pt"):
            path.unlink(missing_ok=True)


#: Dimensions of the features of every network here but Inception.
WIDTH = 64
#: Raised when the training of the classifier changes.
RECIPE = 1
_STEPS, _BATCH, _RATE = 500, 64, 3e-3
_WEAK = 0.9  # held-out accuracy below which a classifier is reported as weak


def wilson(hits: int, n: int) -> list[float]:
    """The 95 % confidence interval of a proportion by Wilson's method, [0, 1] without any item.

    Example:
        >>> [round(v, 4) for v in wilson(9, 10)]
        [0.5958, 0.9821]
    """
    from scipy.stats import binomtest

    return [float(end) for end in binomtest(hits, n).proportion_ci(0.95, "wilson")] if n else [0.0, 1.0]


@dataclass(frozen=True)
class FeatureNetwork:
    """A map from data in their own units to features.

    Arguments:
        name: its name next to every number.
        dims: D.
        sha256: hash of its weights.
        compute: (B, *event) to (B, D).
        accuracy: on test items, None without classes.
        interval: of the accuracy, 95 % (Wilson).
        classify: (B, *event) to (B, K) logits, or None.
        note: a remark for the report.
        moments: whether samples are compared by mean and covariance too (Fréchet), which for plain coordinates say
            little about the shape of a density.
    """

    name: str
    dims: int
    sha256: str
    compute: Callable[[Tensor], Tensor]
    accuracy: float | None = None
    classify: Callable[[Tensor], Tensor] | None = None
    note: str = ""
    moments: bool = True
    interval: list[float] | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, rows: int = 256) -> Tensor:
        """(N, D) float32 features on the CPU, `rows` items at a time."""
        return torch.cat([self.compute(part).float().cpu() for part in x.split(rows)])

    @torch.no_grad()
    def classes(self, x: Tensor, rows: int = 256) -> Tensor:
        """The predicted class of each item, (N,)."""
        return torch.cat([self.classify(part).argmax(1).cpu() for part in x.split(rows)])

    def described(self) -> dict:
        """The description of the network in reports."""
        return {"name": self.name, "sha256": self.sha256, "accuracy": self.accuracy,
                "interval": self.interval, "dims": self.dims, "note": self.note}


@dataclass
class Items:
    """The training and test items of a feature network.

    Arguments:
        spec: of the data.
        train, test: (N, *event) in the data's own units.
        train_labels, test_labels: (N,) classes, or None.
        train_hash: hash of the training items and labels.
        cache: of trained classifiers.
    """

    spec: DataSpec
    train: Tensor
    test: Tensor
    train_labels: Tensor | None = None
    test_labels: Tensor | None = None
    train_hash: str = ""
    cache: Cache = field(default_factory=lambda: Cache(None))


class Scaled(nn.Module):
    """Data in their own units to float32: integers to [-1, 1], continuous values standardised by the training data.

    Each value is divided by its own standard deviation, but in images and sequences by at least a quarter of that of
    its channel: frames beyond the end of all training items are silent in all of them, and would scale longer items
    without limit.
    """

    def __init__(self, items: Items):
        super().__init__()
        if items.spec.levels is not None:
            location = scale = torch.full((1,), (items.spec.levels - 1) / 2)
        else:
            if len(items.train) < 2:
                raise InputError(f"{items.spec.name} has a single training item, by which features cannot be scaled: "
                                 "leave the stage fidelity out")
            wide = items.train.double()
            of_channel = wide.movedim(1, -1).flatten(0, -2).std(0).view(-1, *[1] * (wide.dim() - 2))
            location, scale = wide.mean(0), torch.maximum(wide.std(0), of_channel / 4)
            constant = scale <= 1e-6 * wide.abs().amax(0)
            location, scale = location.float(), torch.where(constant, 1.0, scale).float()
        self.register_buffer("location", location)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() - self.location) / self.scale


class _Net(nn.Module):
    """Three convolutions (for vectors two linear layers), a layer of 64 features, and a linear layer to the classes."""

    def __init__(self, items: Items, num_classes: int):
        super().__init__()
        self.scaled = Scaled(items)
        last, *lengths = items.spec.event_shape
        if lengths:
            layers, convolution = [], nn.Conv1d if len(lengths) == 1 else nn.Conv2d
            strides = (1, 2, 1) if min(lengths) < 16 else (2, 2, 1)
            for wide, stride in zip((16, 32, 32), strides, strict=True):
                layers += [convolution(last, wide, 3, stride, 1), nn.ReLU()]
                last = wide
            layers += [nn.AdaptiveAvgPool1d(4) if len(lengths) == 1 else nn.AdaptiveAvgPool2d(4), nn.Flatten()]
            last *= 4 ** len(lengths)
        else:
            layers = [nn.Linear(last, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
            last = 128
        self.body = nn.Sequential(*layers, nn.Linear(last, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(self.scaled(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def weights_hash(module: nn.Module) -> str:
    """SHA-256 over names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def classifier(items: Items) -> FeatureNetwork:
    """A small network trained to classify the training items; its 64 features are the last hidden layer."""
    key = key_of(what="classifier", recipe=RECIPE, data=items.train_hash, torch=torch.__version__.split("+")[0],
                 shape=list(items.spec.event_shape), classes=items.spec.num_classes, scaled="at least a quarter")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("classifier", RECIPE))
        net = _Net(items, items.spec.num_classes)
    stored = items.cache.get(key)
    if stored is None:
        _train(net, items)
        items.cache.put(key, net.state_dict())
    else:
        net.load_state_dict(stored)
    net.eval()
    note = "trained on the training split"
    found = FeatureNetwork("classifier", WIDTH, weights_hash(net), net.features, classify=net, note=note)
    if items.test_labels is None:
        return found
    n, hits = len(items.test), int((found.classes(items.test) == items.test_labels).sum())
    if hits / n < _WEAK:
        note += f"; only {hits / n:.1%} accurate on test items"
    return replace(found, accuracy=hits / n, interval=wilson(hits, n), note=note)


def _train(net: _Net, items: Items) -> None:
    """The fixed recipe: Adam, one cycle of the learning rate, one thread, so that the weights are reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(seed_of("classifier", "batches", RECIPE))
        optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS)
        net.train()
        for _ in progress_bar(range(_STEPS), desc="feature network", unit="step"):
            rows = torch.randint(len(items.train), (_BATCH,), generator=generator)
            loss = F.cross_entropy(net(items.train[rows]), items.train_labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    finally:
        torch.set_num_threads(threads)


def random_convolutions(items: Items) -> FeatureNetwork:
    """The same network with random weights of a fixed seed, for images and sequences without classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("random-conv", RECIPE))
        net = _Net(items, 1).eval()
    return FeatureNetwork("random-conv", WIDTH, weights_hash(net), net.features, note="random weights, fixed seed")


def coordinates(items: Items) -> FeatureNetwork:
    """The items themselves, standardised by the training items, for vectors."""
    scaled = Scaled(items)
    return FeatureNetwork("coordinates", items.spec.dims, weights_hash(scaled), scaled,
                          note="standardised by the training split", moments=False)


def inception(items: Items) -> FeatureNetwork:
    """The 2,048 pooled features of torchvision's Inception v3.

    Its weights are not those of published Fréchet distances, which cannot be compared.

    Raises:
        InputError: if the weights cannot be loaded, with the path to place them in.
    """
    from torchvision.models import Inception_V3_Weights, inception_v3

    weights = Inception_V3_Weights.IMAGENET1K_V1
    file = weights.url.rsplit("/", 1)[1]
    try:
        net = inception_v3(weights=weights)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())[:120]
        raise InputError(f"features=inception needs {file} (104 MB) from {weights.url}, and it could not be loaded "
                         f"({reason}): place it in {torch.hub.get_dir()}/checkpoints") from error
    net.fc = nn.Identity()
    net.eval()
    top = items.spec.levels - 1
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def compute(x: Tensor) -> Tensor:
        x = (x.float() / top).expand(-1, 3, -1, -1)
        x = F.interpolate(x, (299, 299), mode="bilinear", antialias=True, align_corners=False)
        return net((x - mean[:, None, None]) / std[:, None, None])

    return FeatureNetwork("inception-torchvision", 2048, weights_hash(net), compute,
                          note="torchvision's weights, not those of published figures")


#: The values of `features=`.
NETWORKS: dict[str, Callable[[Items], FeatureNetwork]] = {
    "classifier": classifier, "random-conv": random_convolutions, "coordinates": coordinates, "inception": inception,
}


def chosen_network(spec: DataSpec, name: str = "auto") -> str:
    """The name of the network for such data; `auto` is the classifier if there are two classes at least.

    Raises:
        InputError: for a network that does not take them.

    Example:
        >>> chosen_network(DataSpec("digits", (1, 8, 8), levels=17)), chosen_network(DataSpec("plane", (2,)))
        ('random-conv', 'coordinates')
    """
    vector = len(spec.event_shape) == 1
    if name == "auto":
        return "classifier" if (spec.num_classes or 0) > 1 else "coordinates" if vector else "random-conv"
    if name == "classifier" and (spec.num_classes or 0) < 2:
        raise InputError(f"features=classifier needs labels of two classes at least, which {spec.name} has not: use "
                         f"features={'coordinates' if vector else 'random-conv'}")
    if name == "random-conv" and vector:
        raise InputError("features=random-conv is for images and sequences: vectors have features=coordinates")
    if name == "coordinates" and not vector:
        raise InputError("features=coordinates is for vectors: images have features=classifier or random-conv")
    if name == "inception" and not (spec.is_image and spec.event_shape[0] in (1, 3) and spec.levels):
        raise InputError("features=inception is for grey or colour images of integers")  # whose range is known
    return name


def fewest_items(spec: DataSpec, name: str = "auto") -> int:
    """The fewest items that are compared in the features of that network: two for each feature of a covariance.

    `coordinates` have no covariance, but three neighbours.

    Example:
        >>> fewest_items(DataSpec("digits", (1, 8, 8), levels=17)), fewest_items(DataSpec("plane", (2,)))
        (128, 4)
    """
    return {"coordinates": 4, "inception": 2 * 2048}.get(chosen_network(spec, name), 2 * WIDTH)


def network_for(items: Items, name: str = "auto") -> FeatureNetwork:
    """The network of that name, see `chosen_network`.

    Example:
        >>> items = Items(DataSpec("plane", (2,)), torch.randn(50, 2), torch.randn(50, 2))
        >>> network_for(items).name, network_for(items)(items.test).shape
        ('coordinates', torch.Size([50, 2]))
    """
    spec = items.spec if items.train_labels is not None else replace(items.spec, num_classes=None)
    return NETWORKS[chosen_network(spec, name)](items)
