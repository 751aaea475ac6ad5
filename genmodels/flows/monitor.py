"""Numerical invertibility of a flow: round-trip errors, log-scales and singular values, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genmodels.core.tensors import hide
from genmodels.flows.bijection import Bijection
from genmodels.flows.linear import GroupedLinear, InvertibleLinear
from genmodels.flows.scaling import ActNorm


@dataclass(frozen=True)
class LayerHealth:
    """One layer: its round-trip error, the largest |log-scale| it applied, and the singular values of its matrix.

    `drift` is max |x' - x| / (1 + max |x|) with x' = inverse(forward(x)) of this layer alone. What a layer does not
    have is None.
    """

    name: str
    kind: str
    drift: float
    log_scale: float | None
    smallest_singular_value: float | None
    condition: float | None


@dataclass(frozen=True)
class Health:
    """A whole flow: the round-trip error through all layers, and every layer's own figures in order."""

    round_trip: float
    layers: tuple[LayerHealth, ...]

    def first_drifting(self, threshold: float = 1e-3) -> LayerHealth | None:
        """The first layer whose own round trip is off by more than `threshold`, or is not a number."""
        return next((layer for layer in self.layers if not layer.drift <= threshold), None)

    def figures(self) -> dict[str, float]:
        """The extremes over the layers: round trip, largest log-scale, smallest singular value, largest condition."""
        found = {"round_trip": self.round_trip, "layer_drift": max((layer.drift for layer in self.layers), default=0.0)}
        extremes = (("log_scale", max), ("smallest_singular_value", min), ("condition", max))
        for key, extreme in extremes:
            values = [value for layer in self.layers if (value := getattr(layer, key)) is not None]
            if values:
                found[key] = extreme(values)
        return found


@torch.no_grad()
def examine(bijection: Bijection, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Health:
    """Numerical invertibility of a flow on a batch, in the precision of `x`.

    Arguments:
        bijection: the flow; it is run eagerly, layer by layer.
        x: (B, *event) in the units that the bijection takes; a few examples are enough.
        cond, mask: as for the bijection.

    Example:
        >>> from genmodels.flows import ActNorm, Compose, Flip
        >>> health = examine(Compose([ActNorm(2), Flip(2)], (2,)), torch.randn(4, 2))
        >>> [layer.kind for layer in health.layers], health.first_drifting()
        (['ActNorm', 'Flip'], None)
    """
    x = x if mask is None else hide(x, mask)  # what stands in padding is not meant to come back
    scales: dict[nn.Module, float] = {}

    def note(module: nn.Module, _inputs, output) -> None:
        scales[module] = float(output[1].abs().max())

    watched = [module for module in bijection.modules() if hasattr(module, "params_per_dim")]
    handles = [module.register_forward_hook(note) for module in watched]
    try:
        steps = list(bijection.walk(x, cond, mask))
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for step in steps:
        after = None if step.mask is None else step.layer.out_mask(step.mask)
        drift = relative_error(step.layer.inverse(step.z, step.cond, after)[0], step.x)
        own = [scales[module] for module in step.layer.modules() if module in scales]
        if isinstance(step.layer, ActNorm):
            own.append(float(step.layer.log_scale().abs().max()))
        values = None
        if isinstance(step.layer, InvertibleLinear | GroupedLinear):
            values = step.layer.singular_values()
        layers.append(LayerHealth(
            step.name, type(step.layer).__name__, drift, max(own, default=None),
            None if values is None else float(values[-1]),
            None if values is None else float(values[0] / values[-1]),
        ))
    z, _ = bijection(x, cond, mask)
    back, _ = bijection.inverse(z, cond, None if mask is None else bijection.out_mask(mask))
    return Health(relative_error(back, x), tuple(layers))


def relative_error(found: Tensor, true: Tensor) -> float:
    """max |found - true| / (1 + max |true|); NaN stays NaN.

    Example:
        >>> relative_error(torch.tensor([1.0, 3.5]), torch.tensor([1.0, 4.0]))
        0.10000000149011612
    """
    return float((found - true).abs().max() / (1 + true.abs().max()))
