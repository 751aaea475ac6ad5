"""A bijection prepared for its checks: a copy in float64, its inputs, and methods to run it without side effects."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from genmodels.core.errors import an, with_class
from genmodels.flows.bijection import Freeze, Inverse, as_shape
from genmodels.flows.composition import Compose
from genmodels.flows.multiscale import MultiScale
from genmodels.flows.scaling import Logit
from genmodels.verification.check import NotApplicable

Range = tuple[float, float]
EVERYWHERE: Range = (-math.inf, math.inf)
_INITIAL_ROWS = 64
_FAR, FAR_VALUES = 10.0, 48  # how far out some inputs lie, and at least how many of their numbers


@dataclass
class Subject:
    """A bijection and the inputs of its checks; the other fields are those of `check_bijection`.

    Arguments:
        layer: the copy that is run: float64, evaluation mode, initialised, its parameters possibly perturbed.
        blank: a copy as given, to load into.
        x, z: (B, *event) float64 inputs of the two directions, which need not correspond.
        cond: the condition of the B rows, None for a layer without.
        far: more inputs of the two directions, far from zero; None for inputs that were given or are bounded.
        finite: whether both directions are finite on x and z, found out by the round trip.
    """

    layer: nn.Module
    blank: nn.Module
    x: Tensor
    z: Tensor
    cond: Tensor | None = None
    far: tuple[Tensor | None, Tensor | None] = (None, None)
    x_range: Range = EVERYWHERE
    z_range: Range = EVERYWHERE
    masks: bool = True
    knots: Sequence[float] = ()
    max_dims: int = 256
    patience: float = 60.0
    starts_as_identity: bool = False
    compiler: str | None = "aot_eager"
    fresh: Callable[[], nn.Module] | None = None
    seed: int = 0
    finite: bool = field(default=True, init=False)

    def raw(
        self, value: Tensor, inverse: bool = False, *, cond: Tensor | None = None, mask: Tensor | None = None,
        layer: nn.Module | None = None,
    ) -> tuple[Tensor, Any]:
        """The result of the layer as it is, called on copies, since it may modify them."""
        layer = self.layer if layer is None else layer
        cond = rows_of(self.cond, len(value)) if cond is None else cond
        given = {name: v.clone() for name, v in (("cond", cond), ("mask", mask)) if v is not None}
        return (layer.inverse if inverse else layer)(value.clone(), **given)

    def run(self, value: Tensor, inverse: bool = False, **options) -> tuple[Tensor, Tensor]:
        """The result, with a scalar log-determinant expanded to all rows: only the check of shapes rejects a scalar."""
        result, logdet = self.raw(value, inverse, **options)
        logdet = torch.as_tensor(logdet, dtype=None if torch.is_tensor(logdet) else result.dtype, device=result.device)
        return result, logdet.expand(len(value)) if logdet.dim() == 0 else logdet

    def directions(self) -> Iterator[tuple[str, bool, Tensor]]:
        """Name, flag and input of the two directions."""
        yield "forward", False, self.x
        yield "inverse", True, self.z

    def copy(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Another copy of the layer."""
        made = copy.deepcopy(self.layer)
        return made if dtype is None else made.to(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one event."""
        return tuple(self.x.shape[1:])

    @property
    def dims(self) -> int:
        """Number of values of one event."""
        return self.x[0].numel()

    def generator(self, name: str = "") -> torch.Generator:
        """A source of randomness that depends on the seed and the name alone."""
        return torch.Generator().manual_seed(self.seed * 1000 + sum(map(ord, name)))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the layer's `out_shape`, if any, accepts this event shape."""
        try:
            getattr(self.layer, "out_shape", lambda shape: shape)(shape)
        except (ValueError, ArithmeticError):
            return False
        return True

    @cached_property
    def cropped(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """x, z and cond of a part of the event with at most max_dims values; None if the layer takes none."""
        channels, *space = self.shape
        for smaller in sides(space, self.max_dims // channels):
            if not self.fits((channels, *smaller)):
                continue
            x, cond = (crop(value, space, smaller) for value in (self.x, self.cond))
            try:
                with torch.no_grad():
                    z = self.run(x.flip(0), cond=None if cond is None else cond.flip(0))[0]
            except (ValueError, RuntimeError):
                return None  # its parameters depend on the size of the event
            return x, z, cond
        return None

    def lengths(self) -> list[int]:
        """For sequences: a valid length for every row, the first one full, the others shorter.

        Raises:
            NotApplicable: for other events, and for layers without masks or of fixed length.
        """
        if not self.masks or len(self.shape) != 2 or "mask" not in inspect.signature(self.layer.forward).parameters:
            raise NotApplicable("masks are for sequences" if len(self.shape) != 2 else "takes no masks")
        channels, length = self.shape
        shorter = [n for n in range(1, length) if self.fits((channels, n))]
        if not shorter:
            raise NotApplicable(f"takes no length but {length}")
        wanted = [shorter[len(shorter) // 2], shorter[0]]
        return [length, *(wanted[i % 2] for i in range(len(self.x) - 1))]

    def mask(self) -> Tensor:
        """(B, 1, T): the first `lengths` positions are valid."""
        positions = torch.arange(self.shape[-1], device=self.x.device)
        return (positions < torch.tensor(self.lengths(), device=self.x.device)[:, None])[:, None]

    def out_mask(self, mask: Tensor) -> Tensor:
        """The mask of z."""
        return getattr(self.layer, "out_mask", lambda mask: mask)(mask)

    @property
    def masked(self) -> bool:
        """Whether the layer takes masks, and makes masks that fit."""
        with suppress(NotApplicable):
            return not self.misfit()
        return False

    def misfit(self) -> str:
        """What is wrong with the shapes of the masks that the layer makes; empty if nothing is."""
        out = self.out_mask(self.mask())
        back = getattr(self.layer, "in_mask", lambda mask: mask)(out)
        for name, mask, value in (("out_mask", out, self.z), ("in_mask", back, self.x)):
            if mask.shape[1:] not in ((1, value.shape[-1]), value.shape[1:]):
                return (f"{name} gives a mask {tuple(mask.shape)} for {tuple(value.shape)}: a layer that changes the "
                        "length of sequences defines out_mask and in_mask")
        return ""


def shown_event(event: Tensor) -> str:
    """The first numbers of an event, in messages."""
    return ", ".join(f"{float(v):.3g}" for v in event.detach().flatten()[:3]) + (", ..." if event.numel() > 3 else "")


def slopes_of(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a scalar, zeros for what it does not depend on."""
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if slope is None else slope for slope, leaf in zip(found, leaves, strict=True)]


def rolled(cond: Tensor) -> tuple[Tensor, Tensor]:
    """Every condition in the next row, and which rows are others then; NotApplicable if none is."""
    other = cond.roll(1, 0)
    changed = (other != cond).reshape(len(cond), -1).any(1)
    if not bool(changed.any()):
        raise NotApplicable("every row has the same condition: give different ones")
    return other, changed


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter or buffer."""
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def cast(cond: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Conditions in another floating-point type; classes stay integers."""
    return cond.to(dtype) if cond is not None and cond.is_floating_point() else cond


def rows_of(cond: Tensor | None, count: int) -> Tensor | None:
    """The conditions of `count` rows, those of the batch repeated."""
    return None if cond is None else cond[torch.arange(count, device=cond.device) % len(cond)]


def sides(space: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Sizes of a sequence or map with at most `most` positions, the largest first.

    Squares come last, since they do not reveal height and width interchanged.

    Example:
        >>> next(sides((64, 64), 85)), next(sides((1000,), 85)), next(sides((), 85), None)
        ((10, 8), (85,), None)
    """
    if not space:
        return
    fitting = [s for s in itertools.product(*(range(1, min(n, most) + 1) for n in space)) if math.prod(s) <= most]
    square = len(space) > 1
    yield from sorted(fitting, key=lambda s: (square and len(set(s)) == 1, -min(s), -math.prod(s), s[::-1]))


def crop(value: Tensor | None, space: list[int], smaller: list[int]) -> Tensor | None:
    """A tensor (B, C, *space), or one with several values for each position, cropped; anything else as it is."""
    if value is None or value.dim() != 2 + len(space):
        return value
    sides = [kept * (n // m) for kept, n, m in zip(smaller, value.shape[2:], space, strict=True)]
    return value[(..., *map(slice, sides))].contiguous()


@torch.no_grad()
def perturb(module: nn.Module, generator: torch.Generator, amount: float = 0.3) -> None:
    """Move every parameter at random, since an initialisation to zeros or the identity can hide errors.

    Matrices are moved by `amount` relative to their fan-in, so that a rotation stays far from singular. A parameter
    without gradient, such as a fixed rotation, stays as it is, except within `Freeze`.
    """
    frozen = {id(p) for part in module.modules() if isinstance(part, Freeze) for p in part.parameters()}
    for parameter in module.parameters():
        if not parameter.requires_grad and id(parameter) not in frozen:
            continue
        spread = amount / math.sqrt(max(1, parameter[0].numel())) if parameter.dim() > 1 else amount
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_((spread * noise).to(parameter.dtype).to(parameter.device))


def ranges(layer: nn.Module) -> tuple[Range, Range]:
    """The domains of a bijection's forward and inverse: its own attributes, or everywhere but for a logit at that end.

    Example:
        >>> ranges(Inverse(Logit(0.05)))
        ((-inf, inf), (0.0, 1.0))
    """
    if isinstance(layer, Logit):
        return (0.0, 1.0), EVERYWHERE
    if isinstance(layer, Inverse):
        return ranges(layer.bijection)[::-1]
    if isinstance(layer, Freeze):
        return ranges(layer.bijection)
    parts = layer.layers if isinstance(layer, Compose) else layer.stages if isinstance(layer, MultiScale) else ()
    ends = (ranges(parts[0])[0], ranges(parts[-1])[1]) if len(parts) else (EVERYWHERE, EVERYWHERE)
    return getattr(layer, "x_range", ends[0]), getattr(layer, "z_range", ends[1])


def knots_of(layer: nn.Module) -> list[float]:
    """The ends of every spline inside a layer, and its knots at the start of training."""
    found = set()
    for module in layer.modules():
        bound, bins = getattr(module, "bound", None), getattr(module, "bins", None)
        if isinstance(bound, int | float) and isinstance(bins, int):
            found |= {-bound + 2 * bound * k / bins for k in range(bins + 1)}
    return sorted(found)


def draw(shape: tuple[int, ...], limits: Range, generator: torch.Generator) -> Tensor:
    """Random inputs: normal with standard deviation 1.5, uniform on a bounded range, log-normal beyond a single end."""
    low, high = limits
    if math.isinf(low) or math.isinf(high):
        normal = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return low + normal.exp() if math.isfinite(low) else high - normal.exp() if math.isfinite(high) else normal
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def draw_far(shape: tuple[int, ...], limits: Range, generator: torch.Generator) -> Tensor | None:
    """Inputs with standard deviation 10, at least three rows and 48 numbers; None on a bounded range.

    Example:
        >>> draw_far((3,), EVERYWHERE, torch.Generator()).shape, draw_far((3,), (0.0, 1.0), torch.Generator())
        (torch.Size([16, 3]), None)
    """
    low, high = limits
    if math.isfinite(low) and math.isfinite(high):
        return None
    rows = max(3, math.ceil(FAR_VALUES / max(1, math.prod(shape))))
    normal = _FAR * torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return low + normal.abs() if math.isfinite(low) else high - normal.abs() if math.isfinite(high) else normal


@torch.no_grad()
def error_far_out(s: Subject, value: Tensor, inverse: bool) -> float:
    """The error of a round trip, relative to the largest value and to what rounding halfway changes.

    Where a sigmoid saturates, the way back multiplies the rounding, which is no error of the layer. Rows that overflow
    are left to "extreme inputs".
    """
    there = s.run(value, inverse)[0]
    with torch.enable_grad():
        there = there.detach().requires_grad_()
        back = s.run(there, not inverse)[0]
        slope = torch.autograd.grad(back.sum(), there)[0] if back.requires_grad else torch.zeros_like(there)
    # At 1e-10, this allows a hundred roundings halfway.
    scale = 1 + value.flatten(1).abs().amax(1) + 1e-4 * (slope * there).detach().flatten(1).abs().sum(1)
    errors = (back.detach() - value).flatten(1).abs().amax(1) / scale
    return float(errors[torch.isfinite(errors)].max()) if bool(torch.isfinite(errors).any()) else 0.0


def training_twin(module: nn.Module) -> nn.Module:
    """A copy in training mode, without dropout and with the statistics of evaluation."""
    twin = copy.deepcopy(module).train()
    for part in twin.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return twin


def initialize(layer: nn.Module, x: Tensor, cond: Tensor | None, mask: Tensor | None = None, **options) -> None:
    """The data-dependent initialisation of a layer on a batch."""
    given = {name: value for name, value in (("cond", cond), ("mask", mask)) if value is not None}
    with torch.no_grad():
        layer.initialize(x.clone(), **given, **options)


def waits(layer: nn.Module) -> bool:
    """Whether a layer still needs data to initialise."""
    return hasattr(layer, "uninitialized") and next(iter(layer.uninitialized()), None) is not None


@contextmanager
def _in_one_line(layer: nn.Module, name: str, value: Tensor) -> Iterator[None]:
    """Turns whatever a method raises into a ValueError that names it and the shape; one direction may be missing."""
    try:
        yield
    except Exception as error:
        missing = isinstance(error, NotImplementedError)
        may = missing and name == ("forward" if isinstance(layer, Inverse) else "inverse")
        if may or isinstance(error, MemoryError) or "out of memory" in str(error):
            raise
        if missing and not str(error):
            raise ValueError(f"{type(layer).__name__}: {name} is not implemented") from error
        raise ValueError(f"{type(layer).__name__}: {name} fails on events of shape {tuple(value.shape[1:])}: "
                         f"{with_class(error)}") from error


def prepare(
    layer: nn.Module, shape: Sequence[int], *, batch: int, randomise: bool, seed: int, x: Tensor | None = None,
    z: Tensor | None = None, cond: Tensor | None = None, initial: tuple[Tensor, Tensor | None] | None = None,
    x_range: Range | None = None, z_range: Range | None = None, **options,
) -> Subject:
    """The subject of a layer: copied, converted to float64, perturbed, then initialised as in training."""
    shape = as_shape(shape)
    if not shape:
        raise ValueError(f"{type(layer).__name__}: events need at least one dimension: (1,) for single numbers")
    own = ranges(layer)
    x_range, z_range = own[0] if x_range is None else x_range, own[1] if z_range is None else z_range
    for name, given in (("x_range", x_range), ("z_range", z_range)):
        if not given[0] < given[1]:
            raise ValueError(f"{name} must be (low, high) with low < high, got {given}")
    uses_cond = getattr(layer, "uses_cond", cond is not None)
    if uses_cond and cond is None:
        raise ValueError(f"{type(layer).__name__} needs a condition: give cond with a row for each example")
    if cond is not None and not uses_cond:
        raise ValueError(f"{type(layer).__name__} is given a condition, but its uses_cond is false: set it to true, or "
                         "leave cond out")
    given = next((value for value in (x, z, cond) if value is not None), None)
    batch = batch if given is None else len(given)
    if batch < 2:
        raise ValueError(f"at least two examples are needed to tell whether they are independent, got {batch}")
    device, generator = device_of(layer), torch.Generator().manual_seed(seed)

    blank = copy.deepcopy(layer)
    work = copy.deepcopy(layer).double().eval()
    if randomise:
        perturb(work, generator)
    drawn = (x is None, z is None)
    x = draw((batch, *shape), x_range, generator).to(device) if x is None else x.detach().double()
    if tuple(x.shape[1:]) != shape:
        raise ValueError(f"x holds events of shape {tuple(x.shape[1:])}, not {shape}")
    cond = None if cond is None else cast(cond, torch.float64).to(device)
    if waits(work):
        rows = draw((_INITIAL_ROWS, *shape), x_range, generator).to(device)
        data, data_cond = (rows, rows_of(cond, len(rows))) if initial is None else initial
        with _in_one_line(layer, "initialize", data):
            initialize(work, data.double(), data_cond)
    subject = Subject(work, blank, x, x, cond, x_range=x_range, z_range=z_range, seed=seed, **options)
    out = getattr(work, "out_shape", lambda shape: shape)(shape)
    if z is None:
        z = draw((batch, *out), z_range, generator).to(device)
    subject.z = z.detach().double()
    for name, inverse, value in subject.directions():
        if drawn[1] or not inverse:
            found = (None, None)  # of an inverse that is not implemented, for checks that do not need it
            with suppress(NotImplementedError), _in_one_line(layer, name, value), torch.no_grad():
                found = subject.raw(value, inverse, layer=subject.copy())
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise ValueError(f"{type(layer).__name__}: {name} must return a pair (result, log-determinant), got "
                                 f"{an(type(found).__name__)}")
    generator = subject.generator("far")
    far = (draw_far(shape, x_range, generator), draw_far(out, z_range, generator))
    subject.far = tuple(v.to(device) if own and v is not None else None for own, v in zip(drawn, far, strict=True))
    return subject
