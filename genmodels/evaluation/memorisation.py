"""Do samples copy training items? Their nearest training neighbours, held against those of held-out items."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.evaluation.fidelity import distance

_CHUNK = 1 << 22  # products computed at once
_CANDIDATES = 8  # items by products that are compared by differences
_SHARE, _LIMIT, _COPYING = 0.01, 0.05, -3.0


class Nearest(NamedTuple):
    """For each item its nearest training item and the distance, exactly zero where they are equal."""

    distance: Tensor
    index: Tensor


def nearest(items: Tensor, train: Tensor) -> Nearest:
    """The nearest training item of each of `items`, both (n, ...), by Euclidean distance; the first one of equals.

    Products of centred float64 values choose the candidates, differences decide among them; where more candidates lie
    within the rounding of the products than are compared, differences search the whole row.

    Example:
        >>> nearest(torch.tensor([[0.9], [5.0]]), torch.tensor([[0.0], [1.0], [5.0]])).index.tolist()
        [1, 2]
    """
    flat, others = items.flatten(1).double(), train.flatten(1).double()
    centre = others.mean(0)
    centred = others - centre
    norms = centred.square().sum(1)
    most = min(_CANDIDATES, len(others))
    found = []
    for part in flat.split(max(1, _CHUNK // max(len(others), most * flat.shape[1]))):
        own = part - centre
        relative = norms - 2 * own @ centred.T  # the squared distance less |a|^2, to rounding
        near, candidates = relative.topk(most, largest=False)
        candidates = candidates.sort().values
        distances, place = (part[:, None] - others[candidates]).norm(dim=2).min(1)
        index = candidates.gather(1, place[:, None])[:, 0]
        rounding = 4 * flat.shape[1] * torch.finfo(torch.float64).eps * (own.square().sum(1) + norms.max())
        if most < len(others) and (unsure := near[:, -1] - near[:, 0] <= rounding).any():
            distances[unsure], index[unsure] = distance(part[unsure], others).min(1)
        found.append((distances, index))
    return Nearest(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def smaller_than(found: Tensor, reference: Tensor) -> float:
    """The z of the rank-sum statistic: below zero where `found` tends to be smaller than `reference`.

    Source: Mann and Whitney 1947; with ties as in Meehan, Chaudhuri and Dasgupta 2020, who test samples for copying.

    Example:
        >>> round(smaller_than(torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])), 4)
        -1.964
    """
    both = torch.cat([found, reference]).double()
    _, which, counts = both.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[which]
    n, m = len(found), len(reference)
    ties = (counts.double() ** 3 - counts).sum() / ((n + m) * (n + m - 1))
    deviation = math.sqrt(n * m / 12 * (n + m + 1 - float(ties)))
    statistic = float(ranks[:n].sum()) - n * (n + 1) / 2
    return 0.0 if deviation == 0 else (statistic - n * m / 2) / deviation


def memorisation(samples: Nearest, held_out: Nearest, in_features: tuple[Nearest, Nearest] | None = None) -> dict:
    """What the distances to training items say, in plain values.

    Exact duplicates; the share of samples that are closer than the first percentile of held-out items, 1 % for a model
    that does not copy, with its 99 % interval; the z of the comparison of all distances. A flag is raised where
    that interval lies above 5 %, or where a larger share of samples than of held-out items are duplicates by 3
    standard errors.

    Arguments:
        samples, held_out: nearest training neighbours in the data's own units.
        in_features: the same in a feature space.
    """
    from scipy.stats import binomtest

    n = len(samples.distance)
    border = float(held_out.distance.quantile(_SHARE))
    closer = int((samples.distance < border).sum())
    interval = binomtest(closer, n).proportion_ci(0.99)
    copies, natural = int((samples.distance == 0).sum()), int((held_out.distance == 0).sum())
    together = (copies + natural) / (n + len(held_out.distance))
    deviation = math.sqrt(together * (1 - together) * (1 / n + 1 / len(held_out.distance)))
    more = copies / n - natural / len(held_out.distance) > 3 * deviation and copies > 0
    flagged = bool(interval.low > _LIMIT or more)
    z = smaller_than(samples.distance, held_out.distance)
    said = [f"{copies} of {n} samples are exact copies of training items ({natural} of {len(held_out.distance)} "
            "held-out items are)"] if copies or natural else []
    said += [f"{closer / n:.1%} of the samples lie closer to a training item than 99 % of held-out items do "
             f"(99 % interval {interval.low:.1%} to {interval.high:.1%}, 1 % expected)"]
    said += [f"z = {z:.1f}: samples lie closer to training items than held-out items do"] if z < _COPYING else []
    return {
        "duplicates": copies, "duplicates_held_out": natural, "closer": closer / n,
        "closer_interval": [float(interval.low), float(interval.high)], "expected": _SHARE, "z": z,
        "z_features": None if in_features is None else smaller_than(*(found.distance for found in in_features)),
        "flagged": flagged, "said": "; ".join(said),
    }
