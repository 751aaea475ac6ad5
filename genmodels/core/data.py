"""`Batch`, `DataSpec`, `TextCondition` and `Latents`: the contract between data, models and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from genmodels.core.errors import InputError, an, printable

Rows = TypeVar("Rows", bound="_Rows")


class _Rows:
    """Methods of dataclasses whose fields are tensors with a row per item, dataclasses of these, or None."""

    def _map(self: Rows, function: Callable[[Any], Any]) -> Rows:
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self)(*(None if value is None else function(value) for value in values))

    def to(self: Rows, *args, **kwargs) -> Rows:
        """Every tensor moved to a device; pass no dtype, which would change masks and labels too."""
        return self._map(lambda value: value.to(*args, **kwargs))

    def pin_memory(self: Rows) -> Rows:
        """Every tensor in page-locked memory (called by torch's DataLoader)."""
        return self._map(lambda value: value.pin_memory())


@dataclass
class TextCondition(_Rows):
    """The text and the speaker of each item of a batch.

    Shapes: `tokens (B, N)` int64, `mask (B, 1, N)` bool, True = valid; `speaker (B,)` int64 or None.

    Example:
        >>> text = TextCondition(torch.tensor([[3, 4], [5, 0]]), torch.tensor([[[True, True]], [[True, False]]]))
        >>> len(text), text[1:].tokens
        (2, tensor([[5, 0]]))
    """

    tokens: Tensor
    mask: Tensor
    speaker: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, selection) -> TextCondition:
        return self._map(lambda value: value[selection])


@dataclass
class Batch(_Rows):
    """A batch in the data's own units (uint8 levels, log-mel values, float vectors).

    Shapes: `x (B, *event)`, sequences padded to a common length; `cond (B,)` int64 labels, `(B, K)` features,
    a `TextCondition` or None; `mask (B, 1, T)` bool, True = valid, or None; `index (B,)` int64, the position of each
    item in its split, for noise and messages; `source (B, *event)`, items of another data set at which a flow to `x`
    starts, in their own units, or None.
    """

    x: Tensor
    cond: Tensor | TextCondition | None = None
    mask: Tensor | None = None
    index: Tensor | None = None
    source: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def item_index(self) -> Tensor:
        """(B,) int64, the key of the noise: `index`, or positions in the batch if that is None.

        Example:
            >>> Batch(torch.zeros(3, 2)).item_index, Batch(torch.zeros(1, 2), index=torch.tensor([7])).item_index
            (tensor([0, 1, 2]), tensor([7]))
        """
        return torch.arange(len(self), device=self.x.device) if self.index is None else self.index

    def rows(self, selection) -> Batch:
        """The selected examples."""
        return self._map(lambda value: value[selection])


@dataclass(frozen=True)
class DataSpec:
    """The description of a data set that a model is built for: provided by data modules, stored in checkpoints.

    Arguments:
        name: the data set's name.
        event_shape: shape of one example: images (C, H, W), mels (n_mels, T), vectors (D,).
        levels: number of integer levels (256, 17, ...), None for continuous data.
        num_classes: number of classes, None without labels.
        class_names: their names, empty if they are just numbers.
        entropy: exact differential entropy in nats, if known.
        mel: settings of the mel-spectrogram, None for other data; `event_shape` then has the longest length.
        statistics: mean and standard deviation of the cells (`mean`, `std`: numbers, or one per band) in training, the
            median length of an item (`frames`), and the number of which all lengths are multiples (`multiple`).
        text: the symbols of texts, how texts are normalised, and a few examples.
        speakers: names of the speakers, empty if not conditioned on.
        columns: names of the columns of vectors, empty if they have none.
        encoding: of text whose bytes the integers are, None for other data.
        source: `name` and `levels` of the data set that a flow starts from, None for Gaussian noise.
        fingerprint: of the items, by which a later change of the data is noticed; empty if unknown.

    Example:
        >>> DataSpec("digits", (1, 8, 8), levels=17, num_classes=10).dims
        64
    """

    name: str
    event_shape: tuple[int, ...]
    levels: int | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    entropy: float | None = None
    mel: dict | None = None
    statistics: dict | None = None
    text: dict | None = None
    speakers: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    encoding: str | None = None
    source: dict | None = None
    fingerprint: str = field(default="", compare=False)

    def __post_init__(self):
        if None in self.event_shape:
            raise ValueError(f"event_shape takes the longest length of sequences, not None, got {self.event_shape}")
        object.__setattr__(self, "event_shape", tuple(int(n) for n in self.event_shape))
        # Names come from files of unknown origin and are printed on terminals.
        object.__setattr__(self, "name", printable(self.name))
        for key in ("class_names", "speakers", "columns"):
            object.__setattr__(self, key, tuple(printable(str(name)) for name in getattr(self, key)))
        if not self.event_shape or min(self.event_shape) < 1:
            raise ValueError(f"event_shape must hold positive sizes, got {self.event_shape}")
        if self.levels is not None and self.levels < 2:
            raise ValueError(f"levels must be at least 2 or None, got {self.levels}")
        if self.columns and self.event_shape != (len(self.columns),):
            raise ValueError(f"{len(self.columns)} columns for events of shape {self.event_shape}")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(f"{len(self.class_names)} class names for num_classes = {self.num_classes}")

    @property
    def dims(self) -> int:
        """Number of scalars in one event."""
        return math.prod(self.event_shape)

    def column(self, place: int) -> str:
        """The name of column `place` (from 0) in messages, which count from 1.

        Example:
            >>> DataSpec("people", (2,), columns=("age", "height")).column(1), DataSpec("points", (2,)).column(0)
            ('2 (height)', '1')
        """
        return f"{place + 1} ({self.columns[place]})" if self.columns else str(place + 1)

    @property
    def names_of_columns(self) -> list[str]:
        """The names of all scalars of an event in messages."""
        return [self.column(place) for place in range(self.dims)]

    @property
    def unit(self) -> str:
        """The unit of likelihoods of these data, by its name in reports.

        Example:
            >>> DataSpec("digits", (1, 8, 8), levels=17).unit, DataSpec("plane", (2,)).unit
            ('bits_per_dim', 'nats')
            >>> [DataSpec("text", (1, 9), levels=256, encoding=name).unit for name in ("ascii", "utf-8")]
            ['bits_per_character', 'bits_per_byte']
        """
        if self.encoding is not None:
            return "bits_per_byte" if self.encoding == "utf-8" else "bits_per_character"
        return "bits_per_dim" if self.levels is not None else "nats" if self.mel is None else "nats_per_dim"

    @property
    def is_image(self) -> bool:
        """True for events of shape (C, H, W)."""
        return len(self.event_shape) == 3

    def to_dict(self) -> dict:
        """Plain types only, for a checkpoint or a report."""
        plain = asdict(self)
        return {**plain, "event_shape": list(self.event_shape), "class_names": list(self.class_names),
                "speakers": list(self.speakers), "columns": list(self.columns)}

    @classmethod
    def from_dict(cls, plain: dict) -> DataSpec:
        """The inverse of `to_dict`; keys of later versions are ignored."""
        return cls(**{f.name: plain[f.name] for f in fields(cls) if f.name in plain})

    def with_name(self, name: str) -> DataSpec:
        """The same data under another name."""
        return replace(self, name=name)

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether events may have this shape; mels with a text may have any length.

        Example:
            >>> DataSpec("speech", (80, 900), mel={}, text={}).holds((80, 120)), DataSpec("v", (3,)).holds((2,))
            (True, False)
        """
        return shape == self.event_shape or (self.text is not None and shape[:-1] == self.event_shape[:-1])

    def classes_named(self, cond: Any) -> list[int]:
        """The numbers of classes given by number or name, one or several; of all for None.

        Where the names are integers, an integer is a name; the elements of tensors and arrays are always numbers.

        Example:
            >>> DataSpec("pets", (3,), num_classes=2, class_names=("cat", "dog")).classes_named(["dog", 0])
            [1, 0]
            >>> DataSpec("dice", (3,), num_classes=2, class_names=("1", "6")).classes_named([6, "1"])
            [1, 0]

        Raises:
            InputError: for a class that does not exist.
        """
        if cond is None:
            return list(range(self.num_classes))
        labels = None if hasattr(cond, "tolist") else self.labels
        cond = cond.tolist() if hasattr(cond, "tolist") else cond
        one = isinstance(cond, str) or not isinstance(cond, Iterable)
        wanted = [cond] if one else list(cond)
        if not wanted:
            raise InputError("cond=[] names no class: leave cond out for every class in turn")
        names = [str(name) for name in self.class_names]
        found = []
        for given in wanted:
            c = given.item() if hasattr(given, "item") else given  # scalars of NumPy and PyTorch
            if isinstance(c, str) and c in names:
                c = names.index(c)
            elif labels is not None and type(given) is int:
                c = labels.index(given) if given in labels else None
            if not isinstance(c, int) or isinstance(c, bool) or not 0 <= c < self.num_classes:
                numbers = [f"0..{self.num_classes - 1}"] if labels is None else []
                listed = " or one of ".join(numbers + ([", ".join(names)] if names else []))
                raise InputError(f"cond: class {given!r} does not exist, classes are {listed}")
            found.append(c)
        return found

    @property
    def labels(self) -> list[int] | None:
        """The integers that name the classes, if all names are integers.

        Example:
            >>> DataSpec("dice", (3,), num_classes=2, class_names=("1", "6")).labels
            [1, 6]
        """
        try:
            labels = [int(str(name)) for name in self.class_names]
        except ValueError:
            return None
        return labels if labels and len(set(labels)) == len(labels) else None

    def as_given(self, classes: list[int]) -> list[int]:
        """Classes by number in the form that `classes_named` takes from a list."""
        return classes if self.labels is None else [self.labels[c] for c in classes]

    def require(self, family: str, *, text: bool, source: bool) -> None:
        """Raise an InputError for data with texts, or with another data set as source, if a family takes none."""
        if self.text is not None and not text:
            raise InputError(f"{self.name} has mels of different lengths with texts, and {an(family)} is not "
                             "conditioned on texts: use model=glow_tts, or clips in a folder for each class "
                             "(data=spoken_digits)")
        if self.source is not None and not source:
            raise InputError(f"{self.name} begins at another data set, and {an(family)} at noise: use "
                             "model=flow_matching, or the target alone")

    def check(self, batch: Batch) -> None:
        """Raise a ValueError naming the first invalid item (shape, level, NaN or label out of range)."""
        x = batch.x
        if not self.holds(tuple(x.shape[1:])):
            raise ValueError(f"events of shape {tuple(x.shape[1:])}, but {self.name} has {self.event_shape}")
        if self.text is not None and batch.cond is None:
            raise ValueError(f"items of {self.name} need their texts: give a Batch with cond, as `items` returns it")
        if self.levels is None:
            if x.is_complex():
                raise ValueError(f"{self.name} has real numbers, but the batch is {x.dtype}")
            if (bad := ~torch.isfinite(x)).any():
                raise ValueError(f"item {_first(batch, bad)} of {self.name} holds a value that is not finite")
        else:
            if x.is_floating_point() or x.is_complex():
                raise ValueError(f"{self.name} has {self.levels} integer levels, but the batch is {x.dtype}")
            # Compared as numbers: torch wraps a scalar into the tensor's own type, where 256 is 0.
            top = min(self.levels - 1, 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max)
            x = x.long() if x.dtype in (torch.uint16, torch.uint32) else x  # which torch does not compare
            if (bad := (x < 0) | (x > top)).any():
                value, where = int(x[bad].flatten()[0]), _first(batch, bad)
                raise ValueError(f"item {where} of {self.name}: value {value} outside 0..{self.levels - 1}")
        if isinstance(batch.cond, Tensor) and batch.cond.shape[:1] != x.shape[:1]:
            raise ValueError(f"{len(x)} items of {self.name}, but conditions of shape {tuple(batch.cond.shape)}")
        if isinstance(batch.cond, Tensor) and self.num_classes is not None and batch.cond.dim() == 1:
            if (bad := (batch.cond < 0) | (batch.cond >= self.num_classes)).any():
                value, where = int(batch.cond[bad][0]), _first(batch, bad)
                raise ValueError(f"item {where} of {self.name}: class {value} outside 0..{self.num_classes - 1}")


def _first(batch: Batch, bad: Tensor) -> int:
    return int(batch.item_index[bad.flatten(1).any(1) if bad.dim() > 1 else bad][0])


@dataclass(frozen=True, eq=False)
class Latents:
    """The latents of all scales, fine to coarse: the part factored out at each scale, then the rest.

    Arguments:
        scales: tensors `(B, *scale)`.

    Example:
        >>> latents = Latents.unflatten(torch.arange(6.0)[None], [(2,), (2, 2)])
        >>> len(latents), latents[1].shape, bool((latents.flatten() == torch.arange(6.0)).all())
        (2, torch.Size([1, 2, 2]), True)
    """

    scales: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, number: int) -> Tensor:
        return self.scales[number]

    def rows(self, selection) -> Latents:
        """The selected examples."""
        return Latents(tuple(scale[selection] for scale in self.scales))

    def flatten(self) -> Tensor:
        """One vector for each example, (B, D)."""
        return torch.cat([scale.flatten(1) for scale in self.scales], dim=1)

    @staticmethod
    def unflatten(z: Tensor, shapes: Sequence[Sequence[int]]) -> Latents:
        """The inverse of `flatten`, from the shapes of the scales."""
        sizes = [math.prod(shape) for shape in shapes]
        if tuple(z.shape[1:]) != (sum(sizes),):
            raise ValueError(f"scales {list(shapes)} hold {sum(sizes)} values, but z has shape {tuple(z.shape)}")
        parts = z.split(sizes, dim=1)
        return Latents(tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)))

    def interpolate(self, other: Latents, weights: Tensor | float) -> Latents:
        """Interpolation to other latents; between two independent standard normal ones it is standard normal.

            z(w) = ((1 - w) z_0 + w z_1) / sqrt((1 - w)^2 + w^2)

        z(0) and z(1) are the two ends. A single weight gives B latents; N weights give B strips of N, one after the
        other, (B N, *scale).
        """
        if [scale.shape for scale in self.scales] != [scale.shape for scale in other.scales]:
            raise ValueError("latents of different shapes cannot be interpolated")

        def between(start: Tensor, end: Tensor) -> Tensor:
            w = torch.as_tensor(weights, dtype=start.dtype, device=start.device)
            w = w.reshape(1, -1, *[1] * (start.dim() - 1))
            mixed = (1 - w) * start[:, None] + w * end[:, None]
            return (mixed / ((1 - w).square() + w.square()).sqrt()).flatten(0, 1)

        return Latents(tuple(between(*pair) for pair in zip(self.scales, other.scales, strict=True)))


def require_spread(spec: DataSpec, std: Tensor) -> None:
    """Raise InputError for the first column of continuous data whose standard deviation is not positive.

    Example:
        >>> require_spread(DataSpec("table", (2,)), torch.tensor([1.0, 0.0]))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: column 2 of table is constant and has no density: leave it out
    """
    constant = ~(std > 0)  # NaN of a single item too
    if bool(constant.any()):
        place = int(constant.flatten().nonzero()[0, 0])
        if len(spec.event_shape) > 1:
            at = ", ".join(str(int(k)) for k in torch.unravel_index(torch.tensor(place), spec.event_shape))
            raise InputError(f"the value at ({at}) of every item of {spec.name} is the same and has no density: store "
                             "images as integers (uint8), or add noise")
        raise InputError(f"column {spec.column(place)} of {spec.name} is constant and has no density: leave it out")


def require_precision(spec: DataSpec, x: Tensor) -> None:
    """Raise InputError for a column whose offset is so large that single precision rounds its values coarsely.

    Arguments:
        spec: the data.
        x: (N, D) float64.

    Example:
        >>> require_precision(DataSpec("table", (1,)), 1.6e9 + torch.arange(500.0, dtype=torch.float64)[:, None])
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: column 1 of table: values near 1.6e+09 with a standard deviation of 144 are \
rounded to steps of 128 in single precision: subtract an offset, such as their mean
    """
    single = x.float()
    top, spread = single.abs().amax(0), x.std(0, unbiased=False)
    step = torch.nextafter(top, top.new_tensor(math.inf)) - top
    coarse = (step > spread / 100) & (spread > 0) & (single != x).any(0)
    if bool(coarse.any()):
        k = int(coarse.nonzero()[0, 0])
        raise InputError(f"column {spec.column(k)} of {spec.name}: values near {float(top[k]):.3g} with a standard "
                         f"deviation of {float(spread[k]):.3g} are rounded to steps of {float(step[k]):.3g} in single "
                         "precision: subtract an offset, such as their mean")


def require_continuous(x: Tensor, names: Sequence[str] | None = None) -> None:
    """Refuse data on which score matching diverges to minus infinity: constant, repeated or dependent columns.

    The data must have a density; on points or lower-dimensional sets the loss is unbounded below.

    Arguments:
        x: (N, D) training rows, N > 1.
        names: of the columns; their numbers from 1 on by default.

    Errors: InputError naming the columns.

    Example:
        >>> require_continuous(torch.tensor([[1.0, 2.0], [1.0, 3.0]]), ["age", "height"])
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: column age is constant: leave it out, or add noise
    """
    rows = x.flatten(1)
    names = [str(i + 1) for i in range(rows.shape[1])] if names is None else list(names)
    for name, column in zip(names, rows.T, strict=True):
        if bool((column == column[0]).all()):
            raise InputError(f"column {name} is constant: leave it out, or add noise")
    for name, column in zip(names, rows.T, strict=True) if len(rows) > 100 else ():
        if (values := len(column.unique())) <= 20:
            raise InputError(f"column {name} has only {values} values: dequantise it, or add noise")
    copies = len(rows) - len(rows.unique(dim=0))
    if copies > 0.01 * len(rows):
        raise InputError(f"{copies} of {len(rows)} rows are copies of others: drop them, or add noise")
    if len(rows) > rows.shape[1] and (involved := dependent_columns(rows, names)):
        raise InputError(f"columns {', '.join(involved)} depend on each other linearly: leave one out, or add noise")


def dependent_columns(x: Tensor, names: Sequence[str]) -> list[str]:
    """The names of columns of x (N, D), none constant, that depend on each other linearly; none, if none do."""
    centred = (x - x.mean(0)).to(torch.float64)
    scaled = centred / centred.norm(dim=0)
    values, vectors = torch.linalg.eigh(scaled.T @ scaled)
    if float(values[0]) >= 1e-10 * float(values[-1]):
        return []
    return [name for name, weight in zip(names, vectors[:, 0].abs(), strict=True) if float(weight) > 1e-3]
