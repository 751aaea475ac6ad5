"""Derivatives where the caller has switched them off, by `torch.no_grad` or by `torch.inference_mode`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def usable(x: Tensor | None) -> Tensor | None:
    """The same values as a tensor that autograd may keep: tensors made in inference mode may not be.

    Example:
        >>> with torch.inference_mode():
        ...     x = torch.ones(1)
        >>> x.is_inference(), usable(x).is_inference()
        (True, False)
    """
    return x.clone() if x is not None and x.is_inference() else x


@contextmanager
def outside_inference() -> Iterator[None]:
    """Tensors made here may be differentiated; whether gradients are enabled stays as it is. Also a decorator.

    Example:
        >>> with torch.inference_mode(), outside_inference():
        ...     torch.ones(1).is_inference(), torch.is_grad_enabled()
        (False, False)
    """
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield
