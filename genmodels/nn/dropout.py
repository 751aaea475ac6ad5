"""Dropout with a checked probability."""

from __future__ import annotations

from torch import nn


def checked(dropout: float) -> float:
    """A probability of dropping a value.

    Raises:
        ValueError: unless it lies in [0, 1).

    Example:
        >>> checked(float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: dropout must lie in [0, 1), got nan
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    return dropout


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` for probabilities in [0, 1): torch takes NaN, and 1, with which nothing is left."""

    def __init__(self, p: float = 0.5):
        super().__init__(checked(p))
