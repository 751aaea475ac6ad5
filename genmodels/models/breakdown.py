"""What a likelihood is made of, as named numbers for the log: its parts, and its share of each noise level."""

from __future__ import annotations

import math

from genmodels.evaluation.likelihood import Likelihood


def breakdown(result: Likelihood, per_dim: bool = False) -> dict[str, float]:
    """Costs of an item by name, in bits/dim for integers and nats for continuous data; `per_dim`, nats for each cell.

    `val/<part>` are the summands of the bound. `noise/k_of_n` is what the k-th of n equal shares of the steps costs,
    the first being the cleanest: shares of steps, not log-SNRs, so that runs of different schedules have the same
    names. Their sum is `val/diffusion`.

    Example:
        >>> import torch
        >>> from genmodels.evaluation.likelihood import Profile
        >>> profile = Profile(torch.tensor([4.0, 0.0, -4.0]), torch.tensor([6.0, 2.0], dtype=torch.float64), 2)
        >>> parts = {"prior": torch.tensor([0.5, 0.5]), "diffusion": torch.tensor([4.0, 4.0])}
        >>> result = Likelihood(torch.full((2,), -4.5), "lower_bound", 1, parts=parts, profile=profile)
        >>> breakdown(result)
        {'val/prior': 0.5, 'val/diffusion': 4.0, 'noise/1_of_2': 3.0, 'noise/2_of_2': 1.0}
    """
    dims = float(result.dims.double().mean())
    unit = dims * math.log(2) if result.levels is not None else dims if per_dim else 1.0
    found = {f"val/{name}": float(value.double().mean()) / unit for name, value in result.parts.items()}
    if result.profile is not None:
        shares = (result.profile.nats / result.profile.items / unit).tolist()
        found |= {f"noise/{k}_of_{len(shares)}": share for k, share in enumerate(shares, 1)}
    return found
