"""The precision in which sums, exponentials and squares are taken whatever the autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in float32, or as it is where that is wider.

    Example:
        >>> wide(torch.ones(1, dtype=torch.bfloat16)).dtype, wide(torch.ones(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
