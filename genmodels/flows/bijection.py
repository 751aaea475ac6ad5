"""Bijections: maps with an exact inverse and the log-determinant of the direction just evaluated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.tensors import hide


@contextlib.contextmanager
def undone_on_failure(module: nn.Module) -> Iterator[None]:
    """A block that leaves parameters and buffers as they were if it raises.

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
    before = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    try:
        yield
    except BaseException:
        module.load_state_dict(before, strict=False)
        raise


Shape = tuple[int | None, ...]


class NotInitialized(RuntimeError):
    """A flow was used before its data-dependent layers had seen data."""


class Step(NamedTuple):
    """One layer at work inside a flow: its dotted name, itself, what went in and what came out."""

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
    `in_mask`. This class checks shapes, condition and mask, keeps the state in float32 or wider, and sets what lies
    outside the mask to zero before and after, so that its content can influence nothing.

    Attributes:
        constant_logdet: whether the log-determinant does not depend on the data.
        inverse_cost: `same`, `D passes` or `iterative`.
        exact_inverse: whether the inverse is a formula (and not an iteration).
        uses_cond: whether a condition is needed; layers without networks ignore one.
        strict_cond: whether a condition that is not used is an error.
        place: dotted name inside the outermost composition, for messages.

    Shapes: `x (B, *event)`, `cond (B,)` labels, `(B, K)` vectors or maps, `mask (B, 1, T)` bool for events `(C, T)`,
    True = valid; the mask describes the tensor that is passed in. `logdet (B,)` natural log, summed over valid
    positions.
    Errors: ValueError for an event of the wrong shape, a missing or unexpected condition, a mask that is not boolean.
    """

    constant_logdet: bool = False
    inverse_cost: str = "same"
    exact_inverse: bool = True
    uses_cond: bool = False
    strict_cond: bool = False
    place: str = ""

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Data to latent: `(z, logdet)`."""
        self.out_shape(tuple(x.shape[1:]))
        x = self._enter(x, cond, mask)
        z, logdet = self._forward(x, cond, mask)
        return (z, logdet) if mask is None else (hide(z, self.out_mask(mask)), logdet)

    def inverse(self, z: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Latent to data: `(x, logdet)`, the log-determinant of this direction."""
        self.in_shape(tuple(z.shape[1:]))
        z = self._enter(z, cond, mask)
        x, logdet = self._inverse(z, cond, mask)
        return (x, logdet) if mask is None else (hide(x, self.in_mask(mask)), logdet)

    def _forward(self, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _inverse(self, z: Tensor, cond: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def out_shape(self, shape: Shape) -> Shape:
        """Event shape after `forward`; None stands for a length left open. Raises ValueError for one it cannot take."""
        return shape

    def in_shape(self, shape: Shape) -> Shape:
        """Event shape after `inverse`; the inverse of `out_shape`."""
        return shape

    def out_mask(self, mask: Tensor) -> Tensor:
        """The mask of `z`, from that of `x`."""
        return mask

    def in_mask(self, mask: Tensor) -> Tensor:
        """The mask of `x`, from that of `z`."""
        return mask

    def initialize(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, force: bool = False
    ) -> None:
        """Data-dependent initialisation from a batch, called once, by training; most layers have none.

        Raises:
            RuntimeError: for a layer that is initialised already, unless `force`.
        """

    def initialize_forward(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, force: bool = False
    ) -> Tensor:
        """`initialize`, then the layer's output; containers have it from their last layer and override this."""
        self.initialize(x, cond, mask, force=force)
        return self(x, cond, mask)[0]

    def uninitialized(self, name: str = "") -> Iterator[str]:
        """Names of the layers that are not yet initialised."""
        for child_name, child in self.named_children():
            if isinstance(child, (Bijection, nn.ModuleList)):
                inside = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
                for inner_name, inner in inside:
                    if isinstance(inner, Bijection):
                        yield from inner.uninitialized(joined(joined(name, child_name), inner_name))

    def walk(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, name: str = ""
    ) -> Iterator[Step]:
        """The layers in the order they act, each with what went in and came out; the last step holds the result."""
        z, logdet = self(x, cond, mask)
        yield Step(name, self, x, z, logdet, cond, mask)

    def _enter(self, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> Tensor:
        self._check_cond(cond)
        if not isinstance(x, Tensor):
            raise ValueError(f"{type(self).__name__} takes a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in (torch.float32, torch.float64):
            x = x.float()
        if mask is None:
            return x
        if mask.dtype != torch.bool:
            raise ValueError(f"{type(self).__name__}: mask must be boolean (True = valid), got {mask.dtype}")
        if not _broadcasts(mask, x):
            raise ValueError(
                f"{type(self).__name__}: mask {tuple(mask.shape)} does not fit x {tuple(x.shape)}: "
                "masks are for sequences (B, C, T) and have shape (B, 1, T)"
            )
        return hide(x, mask)

    def _check_cond(self, cond: Tensor | None) -> None:
        if cond is None and self.uses_cond:
            raise ValueError(f"{type(self).__name__} needs cond, the condition it was built for")
        if cond is not None and self.strict_cond and not self.uses_cond:
            raise ValueError(f"{type(self).__name__} was built without a condition: leave cond out")

    @contextlib.contextmanager
    def _initializing(self, cond: Tensor | None) -> Iterator[None]:
        """A block that initialises the parts: all of them or, when it raises, none."""
        self._check_cond(cond)
        # The outermost composition, which has no place, undoes for all.
        with contextlib.nullcontext() if self.place else undone_on_failure(self):
            yield

    def _name_parts(self) -> None:
        """Tell every layer inside its place; the outermost composition is made last, so its names stay."""
        for name, module in self.named_modules():
            if isinstance(module, Bijection):
                module.place = name

    def _misfit(self, expected: str, shape: Shape) -> ValueError:
        shown = f"({', '.join('T' if n is None else str(n) for n in shape)}{',' if len(shape) == 1 else ''})"
        return ValueError(f"{type(self).__name__} takes events of shape {expected}, got {shown}")


def _broadcasts(mask: Tensor, x: Tensor) -> bool:
    """A mask (B, 1, T) of a sequence, or one with an entry for every value."""
    sequence = x.dim() == 3 and tuple(mask.shape) == (x.shape[0], 1, x.shape[2])
    return sequence or mask.shape == x.shape


def joined(*names: str) -> str:
    """Names with dots between them, those that are empty left out."""
    return ".".join(name for name in names if name)


def full_precision(x: Tensor) -> torch.autocast:
    """Autocast switched off: products of the state are not left to half precision, only coupling networks are."""
    return torch.autocast(x.device.type, enabled=False)


def positions(x: Tensor, mask: Tensor | None) -> Tensor | int:
    """Number of (valid) positions of each example: 1 for vectors, H W for images, valid frames `(B,)` under a mask.

    A mask with an entry for every value has no such number, and is refused.
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


def per_example(values: Tensor) -> Tensor:
    """The sum over all but the batch dimension, (B, ...) to (B,)."""
    return values.flatten(1).sum(1)


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

    def in_shape(self, shape: Shape) -> Shape:
        return self.out_shape(shape)


class Around(Bijection):
    """Another bijection at work, with its shapes, masks and static facts; a subclass changes one thing about it.

    Arguments:
        bijection: the map inside.
    """

    def __init__(self, bijection: Bijection):
        super().__init__()
        self.bijection = bijection
        self.constant_logdet, self.uses_cond = bijection.constant_logdet, bijection.uses_cond
        self.exact_inverse, self.inverse_cost = bijection.exact_inverse, bijection.inverse_cost
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
            raise RuntimeError(f"Inverse: {name} takes its start from data going forward; initialise it before that")

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
        """Stay frozen when asked to train; only a direct change of the parameters thaws them."""
        return self
