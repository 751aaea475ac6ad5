"""How alike two sets of features are: Fréchet distance, kernel distance, precision and recall."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from genmodels.errors import InputError

_CHUNK = 1 << 22  # distances computed at once


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of features, which add up over batches and processes.

        m = sum x / n,   C = sum (x - m)(x - m)' / (n - 1)

    Arguments:
        count: n.
        mean: (D,) float64.
        scatter: (D, D) float64, (n - 1) C.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [5.0]])
        >>> (Moments.of(x[:1]) + Moments.of(x[1:])).covariance
        tensor([[7.]], dtype=torch.float64)
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """The moments of features (n, D), n at least 1."""
        if features.dim() != 2 or len(features) == 0:
            raise InputError(f"features are (n, D) with n of at least 1, got {tuple(features.shape)}")
        wide = features.detach().to(torch.float64)
        mean = wide.mean(0)
        centred = wide - mean
        return cls(len(wide), mean, centred.T @ centred)

    def __add__(self, other: Moments) -> Moments:
        # Chan, Golub and LeVeque 1983: sums of squares about each own mean, and what the means differ by.
        count = self.count + other.count
        shift = other.mean - self.mean
        between = torch.outer(shift, shift) * (self.count * other.count / count)
        return Moments(count, self.mean + shift * (other.count / count), self.scatter + other.scatter + between)

    @property
    def covariance(self) -> Tensor:
        """C with the divisor n - 1; needs two rows."""
        if self.count < 2:
            raise InputError("a covariance needs at least 2 items")
        return self.scatter / (self.count - 1)


def frechet_distance(a: Tensor | Moments, b: Tensor | Moments) -> float:
    """The squared Wasserstein distance between the normal distributions of two sets of features.

        |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))

    Arguments:
        a, b: features (n, D), or their moments. The value is biased upwards in small sets: compare equal n only.

    Source: Dowson and Landau 1982; as a measure of samples Heusel et al. 2017.

    Example:
        >>> mean = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
        >>> first = Moments(2, mean[0], torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64))
        >>> second = Moments(2, mean[1], torch.tensor([[2.0, 0.0], [0.0, 0.5]], dtype=torch.float64))
        >>> round(frechet_distance(first, second), 10)
        2.3856102238
    """
    a, b = (x if isinstance(x, Moments) else Moments.of(x) for x in (a, b))
    if a.mean.shape != b.mean.shape:
        raise InputError(f"features of {len(a.mean)} and of {len(b.mean)} dimensions cannot be compared")
    # The root of the product C1 C2, which is not symmetric, has the trace of that of C1^(1/2) C2 C1^(1/2), which is.
    values, vectors = torch.linalg.eigh(a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    middle = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * middle
    return max(0.0, float(distance))


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """The unbiased squared maximum mean discrepancy under the kernel (x'y / D + 1)^3; it may be negative.

    Source: Binkowski et al. 2018, "Demystifying MMD GANs".

    Example:
        >>> a, b = torch.tensor([[1.0, 0], [0, 1], [1, 1]]), torch.tensor([[2.0, 0], [0, 1], [1, 0]])
        >>> round(kernel_distance(a, b), 10)
        -1.3055555556
    """
    a, b = a.to(torch.float64), b.to(torch.float64)
    if min(len(a), len(b)) < 2:
        raise InputError("the kernel distance needs at least 2 items in each set")

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / x.shape[1] + 1).pow(3)

    def within(x: Tensor) -> Tensor:
        whole = kernel(x, x)
        return (whole.sum() - whole.diagonal().sum()) / (len(x) * (len(x) - 1))

    return float(within(a) + within(b) - 2 * kernel(a, b).mean())


def kernel_distance_of_subsets(
    a: Tensor, b: Tensor, *, subsets: int = 100, size: int | None = None, seed: int = 0
) -> tuple[float, float]:
    """Mean and standard deviation of the kernel distance over random subsets of both sets.

    Arguments:
        a, b: features.
        subsets: how many.
        size: items in each; default 1,000, or half of the smaller set where that is fewer.
        seed: seed of the choice.
    """
    size = min(1000, min(len(a), len(b)) // 2) if size is None else size
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        rows, others = (torch.randperm(len(x), generator=generator)[:size] for x in (a, b))
        values.append(kernel_distance(a[rows], b[others]))
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std()) if subsets > 1 else 0.0


def precision_recall(real: Tensor, generated: Tensor, k: int = 3) -> tuple[float, float]:
    """The share of generated items among the real ones, and of real items among the generated ones.

    A point is among a set when it lies in the ball of one of its points, whose radius is the distance to the k-th
    nearest other point of that set; points on the border lie inside.

    Arguments:
        real, generated: features, equally many of both.
        k: which neighbour gives the radius.

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


def _share_inside(points: Tensor, of: Tensor, k: int) -> float:
    """The share of points that lie in a ball of one of the points `of`."""
    points, of = points.to(torch.float64), of.to(torch.float64)
    rows = max(1, _CHUNK // len(of))
    radii = []
    for start in range(0, len(of), rows):
        distances = distance(of[start : start + rows], of)
        own = torch.arange(start, start + len(distances))
        distances[torch.arange(len(distances)), own] = math.inf  # a point is no neighbour of its own
        radii.append(distances.kthvalue(k, dim=1).values)
    radii = torch.cat(radii)
    inside = [(distance(part, of) <= radii).any(1) for part in points.split(rows)]
    return float(torch.cat(inside).double().mean())


def distance(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) Euclidean distances by differences, so that equal points have the distance zero."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def check_count(count: int, dims: int) -> None:
    """An InputError for so few items that a covariance of their features means nothing.

    Example:
        >>> check_count(100, 64)
        Traceback (most recent call last):
        ...
        genmodels.errors.InputError: 100 items are too few for the covariance of 64 features: at least 128 are needed
    """
    if count < 2 * dims:
        raise InputError(f"{count} items are too few for the covariance of {dims} features: at least {2 * dims} are "
                         "needed")
