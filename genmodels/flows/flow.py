"""A flow: a bijection to a base distribution."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.data import Latents
from genmodels.core.errors import an, at_least
from genmodels.core.random import Generator
from genmodels.core.tensors import module_table
from genmodels.flows.bases import Distribution
from genmodels.flows.bijection import Bijection, Freeze, Inverse, NotInitialized, Shape, fits
from genmodels.flows.composition import Compose
from genmodels.flows.multiscale import MultiScale
from genmodels.flows.squeeze import Squeeze1d
from genmodels.nn.condition import Conditioning


class Fault(NamedTuple):
    """Invalid values: `wrong (B, ...)` marks them, `message(row)` describes them for one example."""

    wrong: Tensor
    message: Callable[[int], str]


def refuse(faults: Sequence[Fault | None]) -> None:
    """Raise ValueError for the first faulty example; waits for the device once, and not while compiling.

    Example:
        >>> refuse([Fault(torch.tensor([False, True]), "row {} is bad".format)])
        Traceback (most recent call last):
        ...
        ValueError: row 1 is bad
    """
    faults = [fault for fault in faults if fault is not None]
    if not faults or torch.compiler.is_compiling():
        return
    found = [fault.wrong.any() for fault in faults]
    if not bool(torch.stack([each.to(found[0].device) for each in found]).any()):
        return
    fault = next(fault for fault in faults if bool(fault.wrong.any()))
    rows = fault.wrong.flatten(1).any(1) if fault.wrong.dim() > 1 else fault.wrong
    raise ValueError(fault.message(int(rows.nonzero()[0, 0])))


def require_tensor(name: str, value: object) -> None:
    """Raise ValueError for anything but a tensor.

    Example:
        >>> require_tensor("x", [1.0])
        Traceback (most recent call last):
        ...
        ValueError: x must be a torch.Tensor, got list: torch.as_tensor(x) makes one
    """
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise ValueError(f"{name} must be a torch.Tensor, got {kind}: torch.as_tensor({name}) makes one")


def require_dtype(module: nn.Module, x: Tensor) -> None:
    """Raise ValueError when x and module are in single and double precision, or the module in half or x complex.

    Layers convert half precision of x.

    Example:
        >>> require_dtype(nn.Linear(1, 1), torch.zeros(1, dtype=torch.float64))
        Traceback (most recent call last):
        ...
        ValueError: x is float64, but the flow float32: call flow.double(), or pass x.float()
    """
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), x.dtype)
    both = (torch.float32, torch.float64)
    if x.is_complex():
        raise ValueError(f"x must be real, got {str(x.dtype).removeprefix('torch.')}")
    if own in (torch.float16, torch.bfloat16):
        raise ValueError(f"the flow is {str(own).removeprefix('torch.')}, too coarse for an exact density: call "
                         "flow.float(), and run it in torch.autocast")
    if own != x.dtype and own in both and x.dtype in both:
        there, here = ("flow.double()", "x.float()") if own == torch.float32 else ("flow.float()", "x.double()")
        names = [str(dtype).removeprefix("torch.") for dtype in (x.dtype, own)]
        raise ValueError(f"x is {names[0]}, but the flow {names[1]}: call {there}, or pass {here}")


def label_count(module: nn.Module) -> int | None:
    """The number of classes of a flow's parts that are conditioned on labels; None without such parts.

    Example:
        >>> from genmodels.flows.bases import ClassNormal
        >>> label_count(ClassNormal((2,), num_classes=3))
        3
    """
    counts = []
    for part in module.modules():
        if isinstance(getattr(part, "num_classes", None), int):
            counts.append(part.num_classes)
        elif isinstance(part, Conditioning) and part.condition is not None and part.condition.kind == "labels":
            counts.append(part.condition.size)
    return min(counts, default=None)


def has_null_class(module: nn.Module) -> bool:
    """Whether a part also takes the label after the last class, for no class."""
    return any(getattr(part, "null_class", False) for part in module.modules())


def labels_fault(cond: Tensor | None, classes: int | None, null_class: bool = False) -> Fault | None:
    """Labels outside 0 .. classes - 1, or 0 .. classes with a null class."""
    if cond is None or classes is None or cond.dim() != 1 or cond.is_floating_point():
        return None  # conditions of another kind are checked by the networks
    return Fault(
        (cond < 0) | (cond >= classes + null_class),
        lambda row: f"cond: label {int(cond[row])} in row {row}, the classes of this flow are 0..{classes - 1}",
    )


def levels_fault(x: Tensor, levels: int, mask: Tensor | None) -> Fault | None:
    """Integers outside 0 .. levels - 1, where the mask is true."""
    if x.is_floating_point() or (x.dtype == torch.uint8 and levels > 255):
        return None
    x = x.long()  # int8 would wrap the number of levels
    wrong = (x < 0) | (x >= levels)
    if mask is not None and mask.dtype == torch.bool and mask.dim() == x.dim() and len(mask) == len(x):
        wrong = wrong & mask

    def message(row: int) -> str:
        return f"x: integer {int(x[row][wrong[row]].flatten()[0])} in row {row}, the levels are 0..{levels - 1}"

    return Fault(wrong, message)


def frames_together(bijection: Bijection) -> int:
    """How many neighbouring frames the squeezes of a bijection of sequences turn into one: lengths are multiples of it.

    Example:
        >>> frames_together(Compose([Squeeze1d(2), Squeeze1d(2)], (3, 8)))
        4
    """
    return math.lcm(*(together.numerator for together in accumulate(_squeezes(bijection), operator.mul)))


def _squeezes(module: nn.Module, undone: bool = False) -> Iterator[Fraction]:
    """The factors of squeezes in the order of `forward`, 1 over the factor where one is undone."""
    if isinstance(module, Squeeze1d):
        yield Fraction(1, module.factor) if undone else Fraction(module.factor)
    children = list(module.children())
    inside = undone != isinstance(module, Inverse)
    for child in children[::-1] if inside else children:
        yield from _squeezes(child, inside)


def mask_fault(bijection: Bijection, event_shape: Shape, mask: Tensor | None) -> Fault | None:
    """Masks (B, 1, T) that are neither all True nor all False in a group of frames that a squeeze makes one."""
    if mask is None or mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[1] != 1 or len(event_shape) != 2:
        return None  # other masks are checked by the layers
    bijection.out_shape((event_shape[0], mask.shape[-1]))
    whole = bijection.in_mask(bijection.out_mask(mask))
    if whole.shape != mask.shape:
        return None
    factor = frames_together(bijection)
    return Fault(
        whole != mask,
        lambda row: f"mask: row {row} has {int(mask[row].sum())} valid frames of {mask.shape[-1]}, but this flow "
        f"squeezes {factor} neighbouring frames into one, which must be valid together: lengthen data and mask by "
        f"PadToMultiple({factor})",
    )


class Flow(nn.Module):
    """A normalizing flow: the exact density of a base distribution under a bijection.

        log p(x) = log base(f(x)) + log |det df/dx|,    x = f^-1(z), z ~ base

    Arguments:
        bijection: the map f from data to latent.
        base: distribution of the latent.

    Attributes:
        event_shape: shape of x, None for an open length.
        uses_cond: whether the bijection or the base needs a condition.
        num_classes: number of classes of the flow, None where the condition is not a label.

    Shapes: `x (B, *event)`, `cond` as the bijection and the base take it, `mask (B, 1, T)` bool of x; log-densities
    `(B,)` in nats.
    Errors: ValueError when the base does not fit the bijection, for an unused condition, labels out of range, x of
    another precision than the flow, or a mask whose valid frames are not whole groups of a squeeze; NotInitialized
    while a layer is not initialised.
    Source: Rezende and Mohamed 2015; Dinh et al. 2017.

    Example:
        >>> from genmodels.flows.bases import StandardNormal
        >>> flow = Flow(Compose([], (2,)), StandardNormal((2,)))
        >>> flow.log_prob(torch.zeros(1, 2))
        tensor([-1.8379])
        >>> flow.sample(3, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([3, 2])
    """

    def __init__(self, bijection: Bijection, base: Distribution):
        super().__init__()
        self.bijection, self.base = bijection, base
        try:
            self.event_shape = tuple(bijection.in_shape(base.event_shape))
        except ValueError as error:
            here = f"{an(type(base).__name__)} over events of shape {base.event_shape}"
            raise ValueError(f"{here} is no base for this bijection: {error}") from error
        own = getattr(bijection, "event_shape", self.event_shape)
        if not fits(own, self.event_shape):
            raise ValueError(f"{type(bijection).__name__} over events of shape {own}, its base over {self.event_shape}")
        self.uses_cond = bijection.uses_cond or base.uses_cond
        self.num_classes = label_count(self)
        self.null_class = has_null_class(self)

    def _repr_html_(self) -> str:
        return module_table(self, events=self.event_shape, classes=self.num_classes)

    def initialize(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, force: bool = False
    ) -> None:
        """Data-dependent initialisation from a batch, called once, by training; on an error no layer is changed."""
        self._check(x, cond, mask)
        self.bijection.initialize(x, self._cond(cond, self.bijection), mask, force=force)

    def log_prob(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Log-density of each event in nats, (B,)."""
        self._check(x, cond, mask)
        return self.density(x, cond, mask)

    def density(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """`log_prob` without checks of values, which wait for the device."""
        require_initialized(self.bijection, "Flow.log_prob")
        return self(x, cond, mask)

    def forward(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The arithmetic of `log_prob`, which `Flow.compile()` compiles."""
        z, logdet = self.bijection(x, self._cond(cond, self.bijection), mask)
        latent_mask = None if mask is None else self.bijection.out_mask(mask)
        return self.base.log_prob(z, self._cond(cond, self.base), latent_mask) + logdet

    def sample(
        self, n: int, cond: Tensor | None = None, *, temperature: float = 1.0, generator: Generator,
        mask: Tensor | None = None, length: int | None = None,
    ) -> Tensor:
        """Events (n, *event); with a keyed generator, event k depends only on its index.

        Arguments:
            n: number of events.
            cond: condition of each.
            temperature: factor of the base's noise at every scale; 0 maps the base's mode.
            generator: source of the noise, with n rows if it is keyed.
            mask: which frames of sequences are valid; the others are zero.
            length: the length of the events where it is open; by default the length of the mask.
        """
        require_initialized(self.bijection, "Flow.sample")
        at_least(0, n=n)
        self._check_values(cond, mask)
        if mask is not None and (mask.dim() != 3 or len(mask) != n):
            raise ValueError(f"mask must have a row for each of {n} samples, ({n}, 1, T), got {tuple(mask.shape)}")
        return self._inverse(self._noise(n, cond, temperature, generator, self._latent_shape(mask, length)), cond, mask)

    def latents(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Latents:
        """Every scale of the latent, fine to coarse; a single one unless the flow is multi-scale."""
        self._check(x, cond, mask)
        require_initialized(self.bijection, "Flow.latents")
        z, _ = self.bijection(x, self._cond(cond, self.bijection), mask)
        return self._split(z)

    def from_latents(self, latents: Latents, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The inverse of `latents`; `mask` is the mask of x."""
        require_initialized(self.bijection, "Flow.from_latents")
        if not isinstance(latents, Latents):
            raise ValueError(f"from_latents takes Latents, as `latents` returns them, got {type(latents).__name__}")
        self._check_values(cond, mask)
        return self._inverse(self._join(latents), cond, mask)

    def resample(
        self, latents: Latents, scales: Iterable[int], generator: Generator, temperature: float = 1.0, *,
        cond: Tensor | None = None,
    ) -> Latents:
        """Replaces some scales (0 is the finest) by fresh noise.

        With a keyed generator the noise of a scale does not depend on which other scales are replaced.
        """
        count, scales = len(latents), list(scales)
        if any(not -count <= number < count for number in scales):
            raise ValueError(f"scales must lie in 0..{count - 1}, the scales of these latents, got {scales}")
        chosen = {number % count for number in scales}
        z = self._join(latents)
        fresh = self._split(self._noise(len(z), cond, temperature, generator, tuple(z.shape[1:]), like=z))
        return Latents(tuple(fresh[i] if i in chosen else latents[i] for i in range(count)))

    def class_posterior(
        self, x: Tensor, num_classes: int, mask: Tensor | None = None, *, log_prior: Tensor | None = None
    ) -> Tensor:
        """p(y | x) of every class, (B, num_classes) float64, from a flow whose condition is the label.

            p(y | x) = softmax_y [log p(x | y) + log p(y)]
        """
        require_classes(self, num_classes)
        return class_posterior(lambda labels: self.log_prob(x, labels, mask), len(x), num_classes, log_prior, x.device)

    def _check(self, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> None:
        require_tensor("x", x)
        require_dtype(self, x)
        self._check_values(cond, mask)

    def _check_values(self, cond: Tensor | None, mask: Tensor | None) -> None:
        """Raise ValueError for invalid values, which the layers do not look at."""
        for name, value in (("cond", cond), ("mask", mask)):
            if value is not None:
                require_tensor(name, value)
        if not torch.compiler.is_compiling():
            of_labels = labels_fault(cond, self.num_classes, self.null_class)
            refuse([of_labels, mask_fault(self.bijection, self.event_shape, mask)])

    def _noise(self, n, cond, temperature, generator, shape, like: Tensor | None = None) -> Tensor:
        anchor = like if like is not None else reference(self)
        return self.base.sample(
            n, self._cond(cond, self.base), temperature=temperature, generator=generator, event_shape=shape,
            dtype=anchor.dtype, device=anchor.device,
        )  # fmt: skip

    def _inverse(self, z: Tensor, cond: Tensor | None, mask: Tensor | None) -> Tensor:
        """The event of a latent; `mask` is the mask of the event."""
        latent_mask = None if mask is None else self.bijection.out_mask(mask)
        return self.bijection.inverse(z, self._cond(cond, self.bijection), latent_mask)[0]

    def _latent_shape(self, mask: Tensor | None, length: int | None) -> Shape:
        if length is not None:
            at_least(0, length=length)
            if None not in self.event_shape:
                raise ValueError(f"length={length} is for sequences of an open length, events are {self.event_shape} "
                                 "here")
            if mask is not None and mask.shape[-1] != length:
                raise ValueError(f"length={length}, but the mask has {mask.shape[-1]} frames: leave length out")
        length = mask.shape[-1] if length is None and mask is not None else length
        shape = tuple(length if n is None else n for n in self.event_shape)
        if None in shape:
            raise ValueError(f"this flow takes events of shape {self.event_shape}: give mask or length to sample")
        return self.bijection.out_shape(shape)

    def _cond(self, cond: Tensor | None, part: Bijection | Distribution) -> Tensor | None:
        if cond is not None and not self.uses_cond:
            raise ValueError("this flow was built without a condition: leave cond out")
        return cond if part.uses_cond else None

    def _split(self, z: Tensor) -> Latents:
        multiscale = _multiscale(self.bijection)
        if multiscale is None:
            return Latents((z,))
        return Latents.unflatten(z, multiscale.scale_shapes(multiscale.in_shape(tuple(z.shape[1:]))))

    def _join(self, latents: Latents) -> Tensor:
        if _multiscale(self.bijection) is not None:
            return latents.flatten()
        if len(latents) != 1:
            raise ValueError(f"this flow has one scale of latents, got {len(latents)}")
        return latents[0]


def class_posterior(
    log_prob: Callable[[Tensor], Tensor], n: int, num_classes: int, log_prior: Tensor | None, device
) -> Tensor:
    """softmax_y [log p(x | y) + log p(y)] in float64, (n, num_classes); a uniform prior by default."""
    if log_prior is not None and tuple(log_prior.shape) not in ((num_classes,), (1, num_classes), (n, num_classes)):
        raise ValueError(f"log_prior must have a value for each of {num_classes} classes, of each of {n} examples "
                         f"if they differ, got {tuple(log_prior.shape)}")
    labels = (torch.full((n,), y, device=device) for y in range(num_classes))
    scores = torch.stack([log_prob(label).double() for label in labels], dim=1)
    return torch.softmax(scores if log_prior is None else scores + log_prior.to(scores), dim=1)


def require_classes(flow, num_classes: int) -> None:
    """Raise ValueError for fewer classes than one, or more than the flow has."""
    most = flow.num_classes
    if num_classes < 1 or (most is not None and num_classes > most):
        known = "at least 1" if most is None else f"from 1 to {most}, the classes of this flow"
        raise ValueError(f"num_classes must be {known}, got {num_classes}")


def require_initialized(part, call: str) -> None:
    """Raise NotInitialized, naming the call and the first layer of `part` that is not initialised."""
    waiting = next(part.uninitialized(), None)
    if waiting is not None:
        kinds = {name: type(module).__name__ for name, module in part.named_modules() if name}
        layer = f"{waiting} ({kinds[waiting]})" if waiting in kinds else waiting
        raise NotInitialized(
            f"{call}: the layer {layer} has not seen data: call initialize(x) once, on a batch of training data, "
            "or load trained weights"
        )


def reference(module: nn.Module) -> Tensor:
    """The first floating parameter or buffer, for its precision and device; else an empty tensor."""
    tensors = (t for found in (module.parameters(), module.buffers()) for t in found if t.is_floating_point())
    return next(tensors, torch.empty(0))


def _multiscale(bijection: Bijection) -> MultiScale | None:
    """The multi-scale part at the end of a bijection, if any."""
    while not isinstance(bijection, MultiScale):
        if isinstance(bijection, Compose) and len(bijection.layers):
            bijection = bijection.layers[-1]
        elif isinstance(bijection, Freeze):
            bijection = bijection.bijection
        else:
            return None
    return bijection
