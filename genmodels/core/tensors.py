"""Masked sums and means over events, tensors that autograd may save, and tables for notebooks.

A mask is `(B, 1, T)` bool, True = valid, with T the last axis of the event; None means that all scalars are valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from markupsafe import escape
from torch import Tensor, nn

from genmodels.core.errors import InputError


def spread(mask: Tensor, x: Tensor) -> Tensor:
    """The mask with as many axes as x (B, *event), broadcastable to it."""
    return mask.reshape(len(mask), *(1,) * (x.dim() - 2), -1)


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with zeros where the mask is False; by selection, not by a product, so that NaN in the padding is removed too.

    Shapes: `mask (B, 1, T)` for events with T as their last axis, or any that broadcasts to x.

    Example:
        >>> hide(torch.ones(1, 2, 3), torch.tensor([[[True, True, False]]]))
        tensor([[[1., 1., 0.],
                 [1., 1., 0.]]])
    """
    if mask is None:
        return x
    if mask.dim() == 3 and x.dim() != 3:
        mask = spread(mask, x)
    return x.masked_fill(~mask, 0)


def event_sum(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,) the sum over the valid scalars of x (B, *event)."""
    return hide(x, mask).flatten(1).sum(1)


def event_size(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,) float64, the number of valid scalars of each event of x (B, *event).

    Example:
        >>> event_size(torch.zeros(2, 3, 4), torch.arange(4)[None, None] < torch.tensor([4, 1])[:, None, None])
        tensor([12.,  3.], dtype=torch.float64)
    """
    whole = x[0].numel() if len(x) else 0
    if mask is None:
        return torch.full((len(x),), whole, dtype=torch.float64, device=x.device)
    return mask.flatten(1).sum(1).double() * (whole // mask.shape[-1])


def event_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,) the mean over the valid scalars of x (B, *event)."""
    if mask is None:
        return x.flatten(1).mean(1)
    return event_sum(x, mask) / event_size(x, mask).clamp(min=1).to(x.dtype)


def one_each(what: str, values: Tensor, x: Tensor) -> Tensor:
    """Return the values; raises InputError unless they are (B,) for x (B, *event), since other shapes would broadcast.

    Example:
        >>> one_each("an energy", torch.zeros(3, 1), torch.zeros(3, 2))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: an energy is one number for each row, (3,), got shape (3, 1)
    """
    if values.shape != x.shape[:1]:
        raise InputError(f"{what} is one number for each row, ({len(x)},), got shape {tuple(values.shape)}")
    return values


def wide(x: Tensor) -> Tensor:
    """x in float32, or unchanged if its type is wider.

    Example:
        >>> wide(torch.ones(1, dtype=torch.bfloat16)).dtype, wide(torch.ones(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def usable(x: Tensor | None) -> Tensor | None:
    """The same values as a tensor that autograd may save, which is not allowed for tensors created in inference mode.

    Example:
        >>> with torch.inference_mode():
        ...     x = torch.ones(1)
        >>> x.is_inference(), usable(x).is_inference()
        (True, False)
    """
    return x.clone() if x is not None and x.is_inference() else x


@contextmanager
def outside_inference() -> Iterator[None]:
    """Tensors created here may be differentiated; whether gradients are enabled is unchanged. Also a decorator.

    Example:
        >>> with torch.inference_mode(), outside_inference():
        ...     torch.ones(1).is_inference(), torch.is_grad_enabled()
        (False, False)
    """
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Names and values, or lists of values, as an HTML table for notebooks; `Markup` as it is, None left out.

    Example:
        >>> html_table("Flow", {"base": "N(0, 1)", "classes": None})
        '<table><caption>Flow</caption><tr><th>base</th><td>N(0, 1)</td></tr></table>'
    """
    lines = []
    for name, value in rows.items():
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (value if isinstance(value, list) else [value]))
        if value is not None:
            lines.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"


def module_table(module: nn.Module, **rows: object) -> str:
    """The parts of a module with their numbers of parameters, after `rows`, as an HTML table for notebooks."""
    parts = {name: f"{type(part).__name__}, {sum(p.numel() for p in part.parameters()):,} parameters"
             for name, part in module.named_children()}
    return html_table(type(module).__name__, {**rows, **parts})


def rows_for(x: Tensor) -> int:
    """Rows like those of x in one call of a network: on a CPU few enough that a layer fits in the cache.

    A U-Net on 28x28 takes a quarter longer for each row of 512 than for one of 128.

    Example:
        >>> rows_for(torch.zeros(5, 1, 28, 28)), rows_for(torch.zeros(5, 2))
        (128, 1024)
    """
    return max(16, min(1024, 100_352 // max(1, math.prod(x.shape[1:])))) if x.device.type == "cpu" else 1024
