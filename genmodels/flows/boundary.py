"""What is checked where data enter a flow: layers cannot ask for values, since they have to compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.flows.bases import ClassNormal
from genmodels.flows.bijection import Bijection, Shape
from genmodels.flows.dequantize import VariationalDequantize
from genmodels.flows.squeeze import Squeeze1d
from genmodels.nn.condition import Conditioning


class Fault(NamedTuple):
    """Values that are not allowed: `wrong` has an entry for each, examples first; `told(row)` is the message."""

    wrong: Tensor
    told: Callable[[int], str]


def refuse(faults: Sequence[Fault | None]) -> None:
    """Raise ValueError naming the first example at fault; one wait for the device, and none while compiling.

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
    raise ValueError(fault.told(int(rows.nonzero()[0, 0])))


def require_tensor(name: str, value: object) -> None:
    """Raise ValueError for an array of another library.

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
    """Raise ValueError when single meets double precision; what is shorter is made longer by the layers.

    Example:
        >>> require_dtype(nn.Linear(1, 1), torch.zeros(1, dtype=torch.float64))
        Traceback (most recent call last):
        ...
        ValueError: x is float64, but the flow float32: call flow.double(), or pass x.float()
    """
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), x.dtype)
    both = (torch.float32, torch.float64)
    if own != x.dtype and own in both and x.dtype in both:
        there, here = ("flow.double()", "x.float()") if own == torch.float32 else ("flow.float()", "x.double()")
        names = [str(dtype).removeprefix("torch.") for dtype in (x.dtype, own)]
        raise ValueError(f"x is {names[0]}, but the flow {names[1]}: call {there}, or pass {here}")


def require_count(n: int) -> None:
    """Raise ValueError for a number of samples that is none.

    Example:
        >>> require_count(-1)
        Traceback (most recent call last):
        ...
        ValueError: n, the number of samples, must be a whole number from 0 on, got -1
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"n, the number of samples, must be a whole number from 0 on, got {n!r}")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError, listing the choices, for any other value of an option.

    Example:
        >>> one_of("transform", "cubic", ("spline", "affine"))
        Traceback (most recent call last):
        ...
        ValueError: transform is one of spline, affine, got 'cubic'
    """
    if value not in tuple(choices):
        raise ValueError(f"{name} is one of {', '.join(choices)}, got {value!r}")


def label_count(module: nn.Module) -> int | None:
    """How many classes every part of a flow knows that takes labels; None when none does.

    Example:
        >>> label_count(ClassNormal((2,), num_classes=3))
        3
    """
    counts = []
    for part in module.modules():
        if isinstance(part, ClassNormal):
            counts.append(part.num_classes)
        elif isinstance(part, Conditioning) and part.condition is not None and part.condition.kind == "labels":
            counts.append(part.condition.size)
        elif isinstance(part, VariationalDequantize) and part.classes is not None:
            counts.append(part.classes.num_embeddings)
    return min(counts, default=None)


def labels_fault(cond: Tensor | None, classes: int | None) -> Fault | None:
    """Labels outside 0 .. classes - 1."""
    if cond is None or classes is None or cond.dim() != 1 or cond.is_floating_point():
        return None  # what is no label at all is refused by the networks
    return Fault(
        (cond < 0) | (cond >= classes),
        lambda row: f"cond: label {int(cond[row])} in row {row}, this flow knows the classes 0..{classes - 1}",
    )


def levels_fault(x: Tensor, levels: int, mask: Tensor | None) -> Fault | None:
    """Integers outside 0 .. levels - 1, where the mask is true."""
    if x.is_floating_point() or (x.dtype == torch.uint8 and levels > 255):
        return None
    wrong = (x < 0) | (x >= levels)
    if mask is not None and mask.dtype == torch.bool and mask.dim() == x.dim() and len(mask) == len(x):
        wrong = wrong & mask

    def told(row: int) -> str:
        return f"x: integer {int(x[row][wrong[row]].flatten()[0])} in row {row}, the levels are 0..{levels - 1}"

    return Fault(wrong, told)


def mask_fault(bijection: Bijection, event_shape: Shape, mask: Tensor | None) -> Fault | None:
    """Masks (B, 1, T) with a group of frames, which a squeeze makes one, valid in part only."""
    if mask is None or mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[1] != 1 or len(event_shape) != 2:
        return None  # what is no mask of a sequence is refused by the layers
    bijection.out_shape((event_shape[0], mask.shape[-1]))
    whole = bijection.in_mask(bijection.out_mask(mask))
    if whole.shape != mask.shape:
        return None
    factor = math.prod(layer.factor for layer in bijection.modules() if isinstance(layer, Squeeze1d))
    return Fault(
        whole != mask,
        lambda row: f"mask: the valid frames of row {row} ({int(mask[row].sum())} of {mask.shape[-1]}) are no whole "
        f"groups of {factor} neighbours, which this flow squeezes into one: lengthen data and mask by "
        f"PadToMultiple({factor})",
    )
