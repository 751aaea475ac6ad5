"""Do samples show the class they were asked for? A classifier's word, class by class, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from genmodels.data.spec import Batch


def wilson(hits: int, n: int, z: float = 1.959964) -> list[float]:
    """The 95 % interval of a share.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".

    Example:
        >>> [round(v, 4) for v in wilson(9, 10)]
        [0.5958, 0.9821]
    """
    if n == 0:
        return [0.0, 1.0]
    share, weight = hits / n, z * z / n
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    return [max(0.0, middle - half), min(1.0, middle + half)]


def class_accuracy(found: Tensor, wanted: Tensor, num_classes: int, names: Sequence[str] = ()) -> dict:
    """The share of items whose found class is the wanted one, for all and for each class, and the confusion matrix.

    Arguments:
        found, wanted: (n,) classes.
        num_classes: K.
        names: of the classes, empty where they are numbers.

    Example:
        >>> result = class_accuracy(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
        >>> round(result["accuracy"], 4), result["confusion"]
        (0.6667, [[1, 1], [0, 1]])
    """
    table = torch.bincount(wanted * num_classes + found, minlength=num_classes**2).view(num_classes, num_classes)
    each = []
    for label, row in enumerate(table.tolist()):
        n, hits = sum(row), row[label]
        name = names[label] if names else str(label)
        each.append({"label": label, "name": name, "n": n, "interval": wilson(hits, n),
                     "accuracy": hits / n if n else None})
    hits = int(table.diagonal().sum())
    return {"accuracy": hits / len(found), "n": len(found), "interval": wilson(hits, len(found)), "per_class": each,
            "confusion": table.tolist()}


def likelihood_classifier(model, batch: Batch, num_classes: int, **options) -> Tensor:
    """(B,) the class under which each item is likeliest, all with the same noise: Bayes' rule with even priors."""
    values = []
    for label in range(num_classes):
        asked = Batch(batch.x, torch.full_like(batch.cond, label), batch.mask, batch.index)
        values.append(model.log_likelihood(asked, **options).nats)
    return torch.stack(values).argmax(0)
