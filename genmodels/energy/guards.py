"""Checks that stop training of energy-based models: data without a density, non-finite values, diverging energies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genmodels.core.errors import InputError, RunError


def require_continuous(x: Tensor, names: Sequence[str] | None = None, *, most_repeated: float = 0.01) -> None:
    """Refuse data on which score matching diverges to minus infinity: constant, repeated or dependent columns.

    The data must have a density; on points or lower-dimensional sets the loss is unbounded below.

    Arguments:
        x: (N, D) training rows, N > 1.
        names: of the columns; their numbers from 1 on by default.
        most_repeated: share of rows that may be copies of others.

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
        if len(column) > 100 and len(column.unique()) <= 20:
            raise InputError(f"column {name} has only {len(column.unique())} values: dequantise it, or add noise")
    copies = len(rows) - len(rows.unique(dim=0))
    if copies > most_repeated * len(rows):
        raise InputError(f"{copies} of {len(rows)} rows are copies of others: drop them, or add noise")
    centred = (rows - rows.mean(0)).to(torch.float64)
    scaled = centred / centred.norm(dim=0)
    if len(rows) > rows.shape[1]:
        values, vectors = torch.linalg.eigh(scaled.T @ scaled)
        if float(values[0]) < 1e-10 * float(values[-1]):
            involved = [name for name, weight in zip(names, vectors[:, 0].abs(), strict=True) if float(weight) > 1e-3]
            raise InputError(
                f"columns {', '.join(involved)} depend on each other linearly: leave one out, or add noise"
            )


def require_finite(what: str, values: Tensor, step: int, index: Tensor | None = None) -> None:
    """Raise a RunError naming step and item if a value is not finite.

    Example:
        >>> require_finite("energy", torch.tensor([0.0, float("nan")]), 7, torch.tensor([40, 41]))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.RunError: the energy of item 41 is nan at step 7: ...
    """
    bad = (~values.detach().flatten(1).isfinite().all(1) if values.dim() > 1 else ~values.detach().isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        item = row if index is None else int(index[row])
        value = values[row].detach().flatten()
        value = float(value[~value.isfinite()][0])
        raise RunError(
            f"the {what} of item {item} is {value} at step {step}: lower the learning rate, or check the item"
        )


class DivergenceGuard:
    """Stop training when the energy diverges: loss below -1000 D, or mean |E| above a million for 100 steps.

    Arguments:
        dims: D.
        patience: number of consecutive steps with large energies that are tolerated.

    Errors: RunError, from `check`.

    Example:
        >>> guard = DivergenceGuard(2)
        >>> guard.check(0, torch.tensor([-1.0]), torch.tensor([3.0]))
        >>> guard.check(1, torch.tensor([-1e9]), torch.tensor([3.0]))
        Traceback (most recent call last):
        ...
        genmodels.core.errors.RunError: energy diverges at step 1: add noise, confinement or a lower learning rate
    """

    def __init__(self, dims: int, *, patience: int = 100):
        self.dims, self.patience, self.large = dims, patience, 0

    def check(self, step: int, loss: Tensor, energy: Tensor | None = None) -> None:
        """Check the losses (B,) and energies (B,) of a step."""
        large = energy is not None and float(energy.detach().abs().mean()) > 1e6
        self.large = self.large + 1 if large else 0
        if float(loss.detach().mean()) < -1e3 * self.dims or self.large >= self.patience:
            raise RunError(f"energy diverges at step {step}: add noise, confinement or a lower learning rate")
