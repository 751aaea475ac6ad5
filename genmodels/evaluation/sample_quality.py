"""How good samples are: their features beside those of held-out items, and of the training split as a scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genmodels.data.spec import DataSpec
from genmodels.errors import InputError
from genmodels.evaluation.classes import class_accuracy
from genmodels.evaluation.features import FeatureNetwork, Items
from genmodels.evaluation.fidelity import (
    check_count,
    cubic_kernel,
    frechet_with_error,
    gaussian_kernel,
    kernel_distance,
    precision_recall,
)
from genmodels.evaluation.memorisation import memorisation, nearest
from genmodels.random import KeyedGenerator, seed_of

_NEIGHBOURS = 8  # closest pairs that are drawn
_MOST = 10_000  # items that precision and recall compare


def chosen(count: int, n: int, what: str) -> Tensor:
    """n of `count` rows, the same in every evaluation; all of them in order where n is not fewer."""
    if n >= count:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed_of("fidelity", what, count))
    return torch.randperm(count, generator=generator)[:n].sort().values


def noise_like(x: Tensor, spec: DataSpec) -> Tensor:
    """Noise of the same shape: uniform over the levels, or normal with the data's mean and deviation."""
    from genmodels.evaluation.out_of_distribution import ALTERATIONS

    return ALTERATIONS["noise"](x, spec, KeyedGenerator(seed_of("fidelity", "noise"), torch.arange(len(x)), "noise"))


def count_for(
    samples: int | str, items: int, dims: int, force: bool, insist: bool = False
) -> tuple[int, str | None]:
    """(how many are compared, why not): equally many samples and held-out items.

    Raises:
        InputError: when the number that was asked for is too small, or more than there are items; with `insist` also
            where nobody asked for a number.

    Example:
        >>> count_for("auto", 359, 64, False)
        (359, None)
        >>> count_for("auto", 100, 64, False)[1]
        '100 items are too few for the covariance of 64 features: at least 128 are needed'
    """
    n = min(1000, items) if samples == "auto" else int(samples)
    if n > items:
        raise InputError(f"samples={n} is more than the {items} held-out items they are compared with: equally many of "
                         "both are needed")
    try:
        if not force:
            check_count(n, dims)
    except InputError as error:
        if samples != "auto" or insist:
            raise InputError(f"{error} (force=true compares them all the same)") from error
        return n, str(error)
    return n, None


def scale_of(network: FeatureNetwork, items: Items, real: Tensor, other: Tensor) -> dict:
    """What is measured of n items that are no samples, which gives the figures of models a meaning.

    Compared with the same n held-out items as samples are: n `other held-out items`, n `training items`, and `noise`;
    those of which there are not n are left out. Distances depend on n, which is the same in all of them.
    """
    n = len(real)
    compared = {"other held-out items": other, "training items": items.train, "noise": noise_like(real, items.spec)}
    return {"network": network.told(), "n": n, "rows": {
        name: fidelity_of(network, real, x[chosen(len(x), n, name)]) for name, x in compared.items() if len(x) >= n}}


def fidelity_of(network: FeatureNetwork, real: Tensor, generated: Tensor) -> dict:
    """Distances, precision and recall of equally many samples and held-out items, each with its standard error.

    The Fréchet distance where features have `moments`, and the kernel distance: cubic of such features, Gaussian of
    coordinates. Errors of precision and recall are those over the points that are counted.
    """
    found, true = network(generated), network(real)
    told: dict = {"n": len(found), "frechet": None, "frechet_error": None}
    if network.moments:
        told["frechet"], told["frechet_error"] = frechet_with_error(found, true)
    kernel = cubic_kernel if network.moments else gaussian_kernel
    told["kernel"], told["kernel_error"] = kernel_distance(found, true, kernel)
    most = min(_MOST, len(found))
    for name, share in zip(("precision", "recall"), precision_recall(true[:most], found[:most]), strict=True):
        told |= {name: share, f"{name}_error": math.sqrt(share * (1 - share) / most)}
    return told


def copies(network: FeatureNetwork, items: Items, real: Tensor, generated: Tensor) -> tuple[dict, dict, dict]:
    """Memorisation, the closest pairs of samples and training items, and their pictures as arrays."""
    found, held = nearest(generated, items.train), nearest(real, items.train)
    features = network(items.train)
    in_features = nearest(network(generated), features), nearest(network(real), features)
    closest = found.distance.argsort()[:_NEIGHBOURS]
    told = {"distance": found.distance[closest].tolist(), "index": found.index[closest].tolist()}
    arrays = {"neighbours_x": generated[closest], "neighbours_train": items.train[found.index[closest]]}
    return memorisation(found, held, in_features), told, arrays


def classes_of(network: FeatureNetwork, spec: DataSpec, generated: Tensor, wanted: Tensor) -> dict:
    """Whether samples show the classes they were asked for, beside the classifier's accuracy on real test items."""
    found = class_accuracy(network.classes(generated), wanted.cpu(), spec.num_classes, spec.class_names)
    return {**found, "real": network.accuracy}
