"""Bijections: invertible maps with exact log-determinants, and their composition with `Inverse` and `Freeze`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.errors import an
from genmodels.core.tensors import hide, wide

_UNDOING = ContextVar("_UNDOING", default=False)


@contextlib.contextmanager
def undone_on_failure(module: nn.Module) -> Iterator[None]:
    """Restores parameters and buffers if the block raises; a nested block leaves that to the outer one.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> before = layer.bias.detach().clone()
        >>> try:
        ...     with undone_on_failure(layer):
        ...         _ = nn.init.constant_(layer.bias, 9.0)
        ...         raise ValueError
        ... except ValueError:
        ...     bool((layer.bias == before).all())
        True
    """
    if _UNDOING.get():
        yield
        return
    before = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    outer = _UNDOING.set(True)
    try:
        yield
    except BaseException:
        module.load_state_dict(before, strict=False)
        raise
    finally:
        _UNDOING.reset(outer)


Shape = tuple[int | None, ...]


class NotInitialized(RuntimeError):
    """A flow was used before its data-dependent layers were initialised."""


class Step(NamedTuple):
    """One layer of a flow applied to data: its dotted name, the layer, its input and its output."""

    name: str
    layer: Bijection
    x: Tensor
    z: Tensor
    logdet: Tensor
    cond: Tensor | None
    mask: Tensor | None


class Bijection(nn.Module):
    """An invertible map of one event shape to another, with exact log-determinants in both directions.

        forward(x) = (z, log |det dz/dx|),    inverse(z) = (x, log |det dx/dz|)

    A subclass defines `_forward` and `_inverse` and, where the shape changes, `out_shape`, `in_shape`, `out_mask` and
    `in_mask`. This class checks shapes, condition and mask, computes in float32 or wider, and sets values outside the
    mask to zero before and after, so that they influence nothing.

    Attributes:
        constant_logdet: whether the log-determinant does not depend on the data.
        inverse_cost: `same`, `D passes` or `iterative`.
        exact_inverse: whether the inverse is a formula (and not an iteration).
        uses_cond: whether a condition is needed; layers without networks ignore one.
        strict_cond: whether a condition that is not used is an error.
        rounds_cond: whether numbers of a condition stand for integers, so that no gradient goes through them.
        only_contains: whether `initialize` does nothing but initialise the layers inside.
        place: dotted name inside the outermost composition, for messages.

    Shapes: `x (B, *event)`, `cond (B,)` labels, `(B, K)` vectors or maps, `mask (B, 1, T)` bool for events `(C, T)`,
    True = valid, of the tensor that is passed in. `logdet (B,)` natural log, summed over valid positions.
    Errors: ValueError for an event of the wrong shape, a missing or unexpected condition, a mask that is not boolean.
    """

    constant_logdet: bool = False
    inverse_cost: str = "same"
    exact_inverse: bool = True
    uses_cond: bool = False
    strict_cond: bool = False
    rounds_cond: bool = False
    only_contains: bool = False
    place: str = ""

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Data to latent: `(z, logdet)`."""
        x = self._enter(x, self.out_shape, cond, mask)
        z, logdet = self._leave(x, self._forward(x, cond, mask))
        return (z, logdet) if mask is None else (hide(z, self.out_mask(mask)), logdet)

    def inverse(self, z: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Latent to data: `(x, logdet)`, the log-determinant of this direction."""
        z = self._enter(z, self.in_shape, cond, mask)
        x, logdet = self._leave(z, self._inverse(z, cond, mask))
        return (x, logdet) if mask is None else (hide(x, self.in_mask(mask)), logdet)

    def _forward(self, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _inverse(self, z: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def out_shape(self, shape: Shape) -> Shape:
        """Event shape after `forward`, None for an open length; raises ValueError for a shape that does not fit."""
        return shape

    def in_shape(self, shape: Shape) -> Shape:
        """Event shape after `inverse`; by default `out_shape`, for maps that keep the shape."""
        return self.out_shape(shape)

    def out_mask(self, mask: Tensor) -> Tensor:
        """The mask of `z`, from the mask of `x`."""
        return mask

    def in_mask(self, mask: Tensor) -> Tensor:
        """The mask of `x`, from the mask of `z`."""
        return mask

    def initialize(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, force: bool = False
    ) -> None:
        """Data-dependent initialisation from a batch, called once, by training; most layers have none.

        Raises:
            RuntimeError: for a layer that is initialised already, unless `force`; here for a layer with parts that
                start from data, which has to initialise them on their own inputs.
        """
        if self.starts_from_data:
            waiting = ", ".join(self.uninitialized(self.place)) or "some"
            raise RuntimeError(f"{type(self).__name__} has parts that start from data ({waiting}): define its "
                               "initialize(x, cond, mask, *, force), which calls theirs")

    def initialize_forward(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, force: bool = False
    ) -> Tensor:
        """`initialize`, then the layer's output; a composition overrides this to compute it only once."""
        self.initialize(x, cond, mask, force=force)
        return self(x, cond, mask)[0]

    @property
    def starts_from_data(self) -> bool:
        """Whether this layer, or one inside it, has a data-dependent initialisation."""
        return any(type(part).initialize is not Bijection.initialize and not part.only_contains
                   for part in self.modules() if isinstance(part, Bijection))

    def uninitialized(self, name: str = "") -> Iterator[str]:
        """Names of the layers that are not yet initialised."""
        found = [(joined(name, child_name), child) for child_name, child in self.named_children()]
        while found:
            name, part = found.pop(0)
            if hasattr(part, "uninitialized"):  # a bijection, or a compiled one
                yield from part.uninitialized(name)
            elif isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                found[:0] = [(joined(name, child_name), child) for child_name, child in part.named_children()]

    def walk(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, name: str = "") -> Iterator[Step]:
        """The layers in order, each with its input and output; the last step holds the result."""
        z, logdet = self(x, cond, mask)
        yield Step(name, self, x, z, logdet, cond, mask)

    def _enter(self, x: Tensor, fitting: Callable[[Shape], Shape], cond: Tensor | None, mask: Tensor | None) -> Tensor:
        if not isinstance(x, Tensor):
            raise ValueError(f"{type(self).__name__} takes a torch.Tensor, got {type(x).__name__}")
        fitting(tuple(x.shape[1:]))
        self._check_cond(cond)
        x = wide(x)
        if mask is None:
            return x
        require_mask(type(self).__name__, mask, x)
        return hide(x, mask)

    def _leave(self, x: Tensor, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The result of a direction, refused where it is no pair or would be broadcast over the batch."""
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ValueError(f"{type(self).__name__} must return a pair (result, log-determinant), got "
                             f"{an(type(found).__name__)}")
        z, logdet = found
        if len(z) != len(x) or (isinstance(logdet, Tensor) and logdet.dim() > 0 and logdet.shape != x.shape[:1]):
            raise ValueError(
                f"{type(self).__name__} returned {tuple(z.shape)} and a log-determinant {tuple(logdet.shape)} for "
                f"{tuple(x.shape)}: give one event and one log-determinant, (B,), for each row"
            )
        return z, logdet

    def _check_cond(self, cond: Tensor | None) -> None:
        if cond is None and self.uses_cond:
            raise ValueError(f"{type(self).__name__} needs cond, the condition it was built for")
        if cond is not None and self.strict_cond and not self.uses_cond:
            raise ValueError(f"{type(self).__name__} was built without a condition: leave cond out")

    @contextlib.contextmanager
    def _initializing(self, cond: Tensor | None) -> Iterator[None]:
        """Initialises all parts or, when the block raises, none."""
        self._check_cond(cond)
        with undone_on_failure(self):
            yield

    def _name_parts(self) -> None:
        """Set the place of every layer inside; the outermost composition is built last, so its names stay."""
        for name, module in self.named_modules():
            if isinstance(module, Bijection):
                module.place = name

    def _combine(self, parts: Sequence[Bijection]) -> None:
        """Set the attributes of a bijection that applies all of these."""
        self.constant_logdet = all(part.constant_logdet for part in parts)
        self.exact_inverse = all(part.exact_inverse for part in parts)
        costs = {part.inverse_cost for part in parts}
        self.inverse_cost = next((cost for cost in ("iterative", "D passes") if cost in costs), "same")
        using = [part for part in parts if part.uses_cond]
        self.uses_cond = bool(using)
        self.rounds_cond = bool(using) and all(part.rounds_cond for part in using)

    def _misfit(self, expected: str | Shape, shape: Shape) -> ValueError:
        expected = expected if isinstance(expected, str) else shown(expected)
        return ValueError(f"{type(self).__name__} takes events of shape {expected}, got {shown(shape)}")


def shown(shape: Shape) -> str:
    """An event shape in messages, with T for an open length.

    Example:
        >>> shown((3, None)), shown((2,))
        ('(3, T)', '(2,)')
    """
    return f"({', '.join('T' if n is None else str(n) for n in shape)}{',' if len(shape) == 1 else ''})"


def fits(expected: Shape, shape: Shape) -> bool:
    """Whether two event shapes agree, None standing for any length."""
    same = len(expected) == len(shape)
    return same and all(n is None or given is None or n == given for n, given in zip(expected, shape, strict=True))


def joined(*names: str) -> str:
    """Non-empty names with dots between them."""
    return ".".join(name for name in names if name)


def full_precision(x: Tensor) -> torch.autocast:
    """A context without autocast: only coupling networks run in half precision."""
    return torch.autocast(x.device.type, enabled=False)


def positions(x: Tensor, mask: Tensor | None) -> Tensor | int:
    """Number of (valid) positions of each example: 1 for vectors, H W for images, valid frames `(B,)` under a mask.

    Errors: ValueError for a mask with an entry for every value.
    """
    if mask is None:
        return math.prod(x.shape[2:])
    if mask.dim() != 3 or mask.shape[1] != 1:
        raise ValueError(f"channels mixed or scaled together share one mask (B, 1, T), got {tuple(mask.shape)}")
    return mask.flatten(1).sum(1).to(x.dtype)


def at_each_position(logdet: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """The log-determinant (B,) of a map that has `logdet` (a scalar) at every (valid) position of x."""
    count = positions(x, mask)
    return logdet * (count if isinstance(count, Tensor) else x.new_full((len(x),), count))


def require_mask(owner: str, mask: Tensor, x: Tensor) -> None:
    """Raise ValueError, naming its owner, for a mask that is not boolean or does not fit x."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{owner}: mask must be boolean (True = valid), got {mask.dtype}")
    of_frames = x.dim() == 3 and tuple(mask.shape) == (x.shape[0], 1, x.shape[2])
    if not (of_frames or mask.shape == x.shape):
        raise ValueError(f"{owner}: mask {tuple(mask.shape)} does not fit x {tuple(x.shape)}: masks are for sequences "
                         "(B, C, T) and have shape (B, 1, T)")


def as_shape(event_shape: Shape) -> Shape:
    """An event shape as a tuple; TypeError for anything but a sequence of lengths and None.

    Example:
        >>> as_shape([1, 8, 8]), as_shape((2, None))
        ((1, 8, 8), (2, None))
    """
    if not isinstance(event_shape, Sequence) or any(n is not None and not isinstance(n, int) for n in event_shape):
        raise TypeError(f"an event shape is a tuple such as (3,) or (1, 28, 28), got {event_shape!r}")
    return tuple(event_shape)


class Channelwise(Bijection):
    """A bijection of events with a known number of `channels` (dimensions, for vectors) that keeps their shape.

    Errors: ValueError for fewer than one channel, or an event with another number of them.
    """

    def __init__(self, channels: int):
        super().__init__()
        if channels < 1:
            raise ValueError(f"{type(self).__name__} needs at least one channel, got {channels}")
        self.channels = channels

    def out_shape(self, shape: Shape) -> Shape:
        if len(shape) == 0 or shape[0] != self.channels:
            raise self._misfit(f"({self.channels}, ...)", shape)
        return shape


class Around(Bijection):
    """A wrapper that acts like the bijection inside it; a subclass changes one thing about it.

    Arguments:
        bijection: the map inside.
    """

    only_contains = True

    def __init__(self, bijection: Bijection):
        super().__init__()
        self.bijection = bijection
        self._combine([bijection])
        self.strict_cond = bijection.strict_cond

    def out_shape(self, shape: Shape) -> Shape:
        return self.bijection.out_shape(shape)

    def in_shape(self, shape: Shape) -> Shape:
        return self.bijection.in_shape(shape)

    def out_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.out_mask(mask)

    def in_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.in_mask(mask)

    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        self.bijection.initialize(x, cond, mask, force=force)

    def _forward(self, x, cond, mask):
        return self.bijection(x, cond, mask)

    def _inverse(self, z, cond, mask):
        return self.bijection.inverse(z, cond, mask)


class Inverse(Around):
    """A bijection run backwards: `forward` and `inverse` swapped.

    Arguments:
        bijection: the map to invert.

    Example:
        >>> from genmodels.flows import Shift
        >>> Inverse(Shift(torch.tensor([2.0])))(torch.tensor([[5.0]]))[0]
        tensor([[3.]])
    """

    def out_shape(self, shape: Shape) -> Shape:
        return self.bijection.in_shape(shape)

    def in_shape(self, shape: Shape) -> Shape:
        return self.bijection.out_shape(shape)

    def out_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.in_mask(mask)

    def in_mask(self, mask: Tensor) -> Tensor:
        return self.bijection.out_mask(mask)

    def initialize(self, x, cond=None, mask=None, *, force=False) -> None:
        for name in self.uninitialized(self.place):
            raise RuntimeError(f"Inverse: {name} is initialised from data in its forward direction: call its "
                               "initialize before you invert it")

    def _forward(self, x, cond, mask):
        return self.bijection.inverse(x, cond, mask)

    def _inverse(self, z, cond, mask):
        return self.bijection(z, cond, mask)


class Freeze(Around):
    """A bijection whose parameters do not train; gradients still pass through it.

    Arguments:
        bijection: the map to freeze.

    Example:
        >>> from genmodels.flows import ActNorm
        >>> any(p.requires_grad for p in Freeze(ActNorm(2)).parameters())
        False
    """

    def __init__(self, bijection: Bijection):
        super().__init__(bijection.requires_grad_(False))

    def requires_grad_(self, requires_grad: bool = True) -> Freeze:
        """Does nothing. Called on a module that contains this one, it still makes the parameters trainable."""
        return self
