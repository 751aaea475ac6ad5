"""Distances of two sets of features (Fréchet, kernel), precision and recall, and memorisation of training items."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from genmodels.core.errors import InputError

_CHUNK = 1 << 22  # distances computed at once


class Distance(NamedTuple):
    """A distance between two sets of features, and its standard error over the items of both; None for too few."""

    value: float
    error: float | None


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (D,) and covariance (D, D) in float64, the latter divided by n - 1."""
    if features.dim() != 2 or len(features) < 2:
        raise InputError(f"features are (n, D) with n of at least 2, got {tuple(features.shape)}")
    wide = features.detach().double()
    return wide.mean(0), torch.atleast_2d(torch.cov(wide.T))


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The squared Wasserstein distance between Gaussians with the moments of two sets of features.

        |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))

    Arguments:
        a, b: features (n, D), n of at least 2. The bias, upwards, depends on n: compare values of equal n only.

    Source: Dowson and Landau 1982; as a measure of samples Heusel et al. 2017.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [5.0]])  # mean 2, variance 7
        >>> round(frechet_distance(x, 3 * x), 9)  # 4^2 + (3 - 1)^2 7
        44.0
    """
    (mean_a, covariance_a), (mean_b, covariance_b) = _moments(a), _moments(b)
    if mean_a.shape != mean_b.shape:
        raise InputError(f"features of {len(mean_a)} and of {len(mean_b)} dimensions cannot be compared")
    # tr (C1 C2)^(1/2) = tr (C1^(1/2) C2 C1^(1/2))^(1/2), whose argument is symmetric.
    values, vectors = torch.linalg.eigh(covariance_a)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    middle = torch.linalg.eigvalsh(root @ covariance_b @ root).clamp(min=0).sqrt().sum()
    squared = (mean_a - mean_b).square().sum() + covariance_a.trace() + covariance_b.trace() - 2 * middle
    return max(0.0, float(squared))


def frechet_with_error(a: Tensor, b: Tensor) -> Distance:
    """The Fréchet distance of features (n, D) and (m, D), and its standard error by the infinitesimal jackknife.

        se^2 = var_i I(a_i) / n + var_i I(b_i) / m

    I(x) = 2 (m1 - m2)'y + y'y - y'T y, y = x - m1, is the derivative of the distance by the weight of item x, with the
    transport map T = C1^(-1/2) (C1^(1/2) C2 C1^(1/2))^(1/2) C1^(-1/2) between the Gaussians. It is the limit of the
    bootstrap. Between two sets of one distribution, where the derivative vanishes, it is too large by a factor of about
    1.5 (measured: 1.33 to 1.52).

    Source: Efron 1982, "The jackknife, the bootstrap and other resampling plans", chapter 6.

    Example:
        >>> a, b = (torch.randn(500, 2, generator=torch.Generator().manual_seed(k)) + 2 * k for k in (0, 1))
        >>> abs(frechet_with_error(a, b).value - 8) < 3 * frechet_with_error(a, b).error < 2
        True
    """
    value = frechet_distance(a, b)
    return Distance(value, math.sqrt(_influence(a, b).var() / len(a) + _influence(b, a).var() / len(b)))


def _influence(x: Tensor, other: Tensor) -> Tensor:
    """(n,) the derivative of the distance by the weight of each row of x, up to a constant."""
    (mean, covariance), (mean_other, covariance_other) = _moments(x), _moments(other)
    root, inverse = _power(covariance, 0.5), _power(covariance, -0.5)
    transport = inverse @ _power(root @ covariance_other @ root, 0.5) @ inverse
    y = x.double() - mean
    return 2 * y @ (mean - mean_other) + y.square().sum(1) - (y @ transport * y).sum(1)


def _power(covariance: Tensor, power: float) -> Tensor:
    """C^p on the directions in which C has any variance."""
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > 1e-10 * values[-1]
    return (vectors[:, kept] * values[kept] ** power) @ vectors[:, kept].T


def cubic_kernel(x: Tensor, y: Tensor) -> Tensor:
    """(x'y / D + 1)^3, which depends on moments up to the third.

    Source: Binkowski et al. 2018, "Demystifying MMD GANs".
    """
    return (x @ y.T / x.shape[1] + 1).pow(3)


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """The mean of exp(-|x - y|^2 / (2 s^2 D)) over s = 1/8, 1/4, 1/2, 1, 2: a characteristic kernel.

    For standardised coordinates, whose squared distances are about 2 D.
    """
    squared = distance(x, y).square() / (2 * x.shape[1])
    return sum(torch.exp(-squared * 4.0**k) for k in range(-1, 4)) / 5


def kernel_distance(a: Tensor, b: Tensor, kernel: Callable[[Tensor, Tensor], Tensor] = cubic_kernel) -> Distance:
    """The unbiased squared maximum mean discrepancy of n items each, which may be negative, and its standard error.

        MMD^2 = mean_{i != j} [k(a_i, a_j) + k(b_i, b_j)] - 2 mean_{i, j} k(a_i, b_j)
        var MMD^2 ~ (4 (n - 2) cov(h_12, h_13) + 2 var h_12) / (n (n - 1)),
        h_ij = k(a_i, a_j) + k(b_i, b_j) - k(a_i, b_j) - k(a_j, b_i)

    The variance is that of the mean of h, without the pairs (a_i, b_i), with moments estimated without bias, from four
    items on. Between two sets of one distribution, where the covariance is zero and its estimate is kept from being
    negative, the error is too large, by factors of 1.2 to 1.3.

    Source: Gretton et al. 2012, "A kernel two-sample test", lemma 6; variance of U-statistics: Hoeffding 1948.

    Example:
        >>> a, b = (torch.randn(400, 2, generator=torch.Generator().manual_seed(k)) + k for k in (0, 1))
        >>> found = kernel_distance(a, b)
        >>> found.value > 5 * found.error > 0
        True
    """
    a, b = a.to(torch.float64), b.to(torch.float64)
    n = len(a)
    if n != len(b) or n < 2:
        raise InputError(f"the kernel distance compares equally many items, at least 2, got {n} and {len(b)}")
    sums, squares, across, same = [], 0.0, 0.0, 0.0  # the last two: sums of k(a_i, b_j), and of k(a_i, b_i)
    for rows in torch.arange(n).split(max(1, _CHUNK // n)):
        between, here = kernel(a[rows], b), (torch.arange(len(rows)), rows)
        h = kernel(a[rows], a) + kernel(b[rows], b) - between - kernel(b[rows], a)
        h[here] = 0
        sums.append(h.sum(1))
        squares += float(h.square().sum())
        across, same = across + float(between.sum()), same + float(between[here].sum())
    by_row = torch.cat(sums)
    total, shared = float(by_row.sum()), float(by_row.square().sum()) - squares  # sum h_ij; sum h_ij h_ik, j != k
    pairs = n * (n - 1)
    value = total / pairs + 2 * ((across - same) / pairs - across / n**2)
    if n < 4:
        return Distance(value, None)
    apart = (total**2 - 4 * shared - 2 * squares) / (pairs * (n - 2) * (n - 3))  # (E h)^2, from four different indices
    covariance = max(0.0, shared / (pairs * (n - 2)) - apart)
    variance = (4 * (n - 2) * covariance + 2 * max(0.0, squares / pairs - apart)) / pairs
    return Distance(value, math.sqrt(variance))


def precision_recall(real: Tensor, generated: Tensor, k: int = 3) -> tuple[float, float]:
    """The share of generated items in the support of the real ones, and of real items in that of the generated ones.

    The support of a set is the union of closed balls around its points, whose radius is the distance to the k-th
    nearest other point of the set.

    Arguments:
        real, generated: features, equally many of both.
        k: the neighbour that gives the radius.

    Source: Kynkäänniemi et al. 2019, "Improved precision and recall metric".

    Example:
        >>> real, generated = torch.tensor([0.0, 1, 2, 4])[:, None], torch.tensor([0.5, 2.6, 10, 10.5])[:, None]
        >>> precision_recall(real, generated, k=1)
        (0.5, 1.0)
    """
    if len(real) != len(generated):
        raise InputError(f"precision and recall compare equally many items, got {len(real)} and {len(generated)}")
    if not 1 <= k < len(real):
        raise InputError(f"k must lie in 1..{len(real) - 1}, the other items of a set, got {k}")
    return _share_inside(generated, real, k), _share_inside(real, generated, k)


def precision_recall_errors(real: Tensor, generated: Tensor, k: int = 3) -> tuple[float | None, float | None]:
    """Standard errors of `precision_recall` over the items of both sets, from random splits of each into halves.

        se^2 = mean over splits of (s_1 - s_2)^2 / 4,   s_1, s_2 the shares between the first and the second halves

    The halves are disjoint, so that s_1 - s_2 has twice the variance of s_1, which has about twice that of the share of
    the whole sets. A binomial error would ignore that the balls are random too, and hold several points at once. 1.5/n
    where all halves agree, half of the "rule of three" for a share of 0 or 1. None for fewer than 2 (k + 1) items.

    Example:
        >>> x = torch.randn(2, 100, 2, generator=torch.Generator().manual_seed(0))
        >>> all(0.02 < error < 0.2 for error in precision_recall_errors(x[0], x[1] + 1))
        True
    """
    n, half = len(real), len(real) // 2
    if half <= k:
        return None, None
    generator, squares = torch.Generator().manual_seed(0), []
    for _ in range(max(4, min(20, 20_000_000 // n**2))):
        a, b = (x[torch.randperm(n, generator=generator)] for x in (real, generated))
        one, other = precision_recall(a[:half], b[:half], k), precision_recall(a[half:][:half], b[half:][:half], k)
        squares.append([(s_1 - s_2) ** 2 for s_1, s_2 in zip(one, other, strict=True)])
    return tuple(math.sqrt(sum(each) / (4 * len(squares))) or 1.5 / n for each in zip(*squares, strict=True))


def _share_inside(points: Tensor, of: Tensor, k: int) -> float:
    """The share of points that lie in a ball around one of the points `of`."""
    points, of = points.to(torch.float64), of.to(torch.float64)
    rows = max(1, _CHUNK // len(of))
    radii = []
    for start in range(0, len(of), rows):
        distances = distance(of[start : start + rows], of)
        own = torch.arange(start, start + len(distances))
        distances[torch.arange(len(distances)), own] = math.inf  # a point is not its own neighbour
        radii.append(distances.kthvalue(k, dim=1).values)
    radii = torch.cat(radii)
    inside = [(distance(part, of) <= radii).any(1) for part in points.split(rows)]
    return float(torch.cat(inside).double().mean())


def distance(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) Euclidean distances by differences, exactly zero for equal points."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


_NEIGHBOURS_CHUNK = 1 << 22  # products computed at once
_CANDIDATES = 8  # nearest items by products, which are compared by differences
_SHARE, _LIMIT, _COPYING, _ENOUGH = 0.01, 0.05, -3.0, 100  # of `memorisation`: percentile, share, z, held-out items


class Nearest(NamedTuple):
    """The index of the nearest training item of each item, and the distance, exactly zero for equal items."""

    distance: Tensor
    index: Tensor


def nearest(items: Tensor, train: Tensor) -> Nearest:
    """The nearest training item of each of `items`, both (n, ...), by Euclidean distance; the first of equal ones.

    Products of centred float64 values select candidates, and differences decide among them; all items are compared by
    differences if the candidates cannot be separated within rounding.

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
    for part in flat.split(max(1, _NEIGHBOURS_CHUNK // max(len(others), most * flat.shape[1]))):
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
    """The z of the rank-sum statistic: negative if `found` tends to be smaller than `reference`.

    Source: Mann and Whitney 1947; with ties as in Meehan, Chaudhuri and Dasgupta 2020, who test samples for copying.

    Example:
        >>> round(smaller_than(torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])), 4)
        -1.964
    """
    from scipy.stats import rankdata, tiecorrect

    n, m = len(found), len(reference)
    ranks = rankdata(torch.cat([found, reference]).double().numpy())
    std = math.sqrt(n * m / 12 * (n + m + 1) * tiecorrect(ranks))
    statistic = float(ranks[:n].sum()) - n * (n + 1) / 2
    return 0.0 if std == 0 else (statistic - n * m / 2) / std


def memorisation(samples: Nearest, held_out: Nearest, in_features: tuple[Nearest, Nearest] | None = None) -> dict:
    """Evidence for copies of training items, from the distances to them, in plain values.

    Exact duplicates; the share of samples that are closer than the first percentile of held-out items, about 1 % for a
    model that does not copy, with its 99 % interval for this border; the z of the comparison of all distances. Samples
    are flagged if that interval lies above 5 %, which says something only of a border from 100 items or more, or if
    the share of duplicates exceeds that of held-out items by 3 standard errors.

    Arguments:
        samples, held_out: nearest training neighbours in the data's own units.
        in_features: the same in a feature space.
    """
    from scipy.stats import binomtest

    n, m = len(samples.distance), len(held_out.distance)
    border = float(held_out.distance.quantile(_SHARE))
    closer = int((samples.distance < border).sum())
    interval = binomtest(closer, n).proportion_ci(0.99)
    copies, natural = int((samples.distance == 0).sum()), int((held_out.distance == 0).sum())
    together = (copies + natural) / (n + m)
    std = math.sqrt(together * (1 - together) * (1 / n + 1 / m))
    more = copies / n - natural / m > 3 * std
    flagged = bool(interval.low > _LIMIT and m >= _ENOUGH or more)
    z = smaller_than(samples.distance, held_out.distance)
    said = [f"{copies} of {n} samples are exact copies of training items ({natural} of {m} held-out items are)"
            ] if copies or natural else []
    said += [f"{closer / n:.1%} of the samples (99 % interval {interval.low:.1%} to {interval.high:.1%}) are nearer to "
             "a training item than the first percentile of held-out items; 1 % is expected"]
    said += [f"z = {z:.1f}: samples lie closer to training items than held-out items do"] if z < _COPYING else []
    return {
        "duplicates": copies, "duplicates_held_out": natural, "closer": closer / n,
        "closer_interval": [float(interval.low), float(interval.high)], "expected": _SHARE, "z": z,
        "z_features": None if in_features is None else smaller_than(*(found.distance for found in in_features)),
        "flagged": flagged, "said": "; ".join(said),
    }
