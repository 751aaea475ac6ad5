"""The way between two items through the latents of a model: a flow's, or those of diffusion's deterministic sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.data.spec import Batch, DataSpec
from genmodels.errors import InputError
from genmodels.evaluation.items import read_items


def interpolate(model, ends: Batch, frames: int, weights: str | float = "ema") -> Tensor:
    """Items whose latents lie between those of two items, `(frames, *event)`; the first and the last are the ends.

        z(w) = ((1 - w) z_0 + w z_1) / sqrt((1 - w)^2 + w^2)

    Ends of two classes meet under no class, where the model knows that.

    Arguments:
        model: a model with `latents` and `from_latents`.
        ends: a batch of two.
        frames: how many, at least 2.
        weights: `ema`, `raw`, or one of the decays kept.

    Raises:
        InputError: when a model that always needs a class is given ends of two classes.
    """
    cond = None
    if model.num_classes is not None:
        if ends.cond is not None and bool(ends.cond[0] == ends.cond[1]):
            cond = ends.cond[:1].expand(frames)
        elif model.has_null_class:
            ends = Batch(ends.x)
        else:
            wrong = "pictures have no class" if ends.cond is None else "these are of two"
            raise InputError(f"interpolate: this model always needs a class, and {wrong}: choose two items of one "
                             "class of the test split, by number")
    latents = model.latents(ends, weights)
    between = latents.rows(slice(0, 1)).interpolate(latents.rows(slice(1, 2)), torch.linspace(0, 1, frames))
    return model.from_latents(between, cond, weights)


def read_ends(names: list[int | str], datamodule, spec: DataSpec) -> Batch:
    """Two items: numbers of the test split, or picture files.

    Raises:
        InputError: when there are not two, or one cannot be read.
    """
    if len(names) != 2:
        raise InputError(
            f"interpolate takes two items, got {len(names)}: interpolate=[3,17] or interpolate=[a.png,b.png]"
        )
    return read_items(names, datamodule, spec, "interpolate")
